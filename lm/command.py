"""`python -m lm train`: its options, the settings of a run or of several runs, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import sys

from lm import processes
from lm.config import ATTENTION, BALANCE, DTYPES, PRESETS, REMAT, ModelConfig, TrainConfig
from moax import program
from moax.program import factor

NAME = "python -m lm train"
DESCRIPTION = """\
Trains a decoder-only language model on bytes: attention and an MoE in every layer.

The text is the source of Python's standard library, or your own files (--text). The run writes config.json,
metrics.jsonl, checkpoints/ and curves.png into OUT/NAME/. Ctrl-C saves the state, and prints how to resume. Settings
that you do not give come from the preset; with --resume, from the run.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m lm ARGV`, and returns the exit code; see `moax.program`."""
    args = parser().parse_args(argv)
    return program.run(NAME, lambda: run(args), traceback=args.traceback)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser("python -m lm", f"{NAME} [options]", DESCRIPTION, formatter_class=raw)
    top.add_argument("command", choices=("train",), help=argparse.SUPPRESS)
    top.add_argument("--traceback", action="store_true", help="show where an error arose")
    add = top.add_argument_group("the run").add_argument
    add("--preset", choices=PRESETS, metavar="NAME", help=f"sizes and settings: {', '.join(PRESETS)} (default: tiny)")
    add("--name", help="folder of the run inside OUT (default: the preset's name; NAME-2 where that is taken)")
    add("--out", default="runs", help="folder of all runs (default: %(default)s)")
    add("--resume", action="store_true", help="continue the run NAME (default: the newest) from its last checkpoint")
    add("--text", metavar="PATH", help="a file or folder to train on (default: Python's standard library)")
    add("--steps", type=int, help="number of updates")
    add("--batch", type=int, help="sequences of a step, over the whole mesh")
    add("--microbatches", type=int, metavar="N", help="compute a step's batch in N parts, one after the other, with "
        "the experts' weights quantized once (default: 1)")  # fmt: skip
    add("--seq", type=int, help="bytes of a sequence")
    add("--lr", type=float, help="peak learning rate")
    add("--seed", type=int, help="seed of the weights and of the order of the data")
    add("--eval-every", type=int, metavar="STEPS", help="compute the held-out loss every so many steps")
    add("--save-every", type=int, metavar="STEPS", help="save a checkpoint every so many steps; 0: at the end alone")
    several = "several runs, to compare recipes (results.json and arms.png in OUT/NAME/)"
    add = top.add_argument_group(several).add_argument
    add("--recipes", type=lambda text: tuple(text.split(",")), metavar="A,B", help="train a run with each recipe on "
        "the same data, as none,fp8_block; the others are compared with the first")  # fmt: skip
    add("--seeds", type=int, metavar="N", help="do so for N seeds, from --seed on (default: 1)")
    how = top.add_argument_group("how it runs")
    program.add_block_options(how, mesh="all devices on fsdp")
    add = how.add_argument
    add("--cpu-devices", type=int, metavar="N", help="emulate N devices on this machine's CPU")
    add("--engine", metavar="NAME", help="how ops are partitioned, as in moax.Options (default: auto)")
    add("--dtype", choices=DTYPES, help="dtype of activations")
    add("--buffer-factor", type=factor, metavar="X", help="buffers for X times the balanced load, in more rounds where "
        "a step needs more; none: buffers for the worst case")  # fmt: skip
    add("--attention", choices=ATTENTION, help="auto takes cuDNN on a Hopper GPU where the heads fit it, else XLA "
        "(default: auto)")  # fmt: skip
    add("--remat", choices=REMAT, help="recompute in backward: nothing, everything, or all but the MoE")
    processes.add_options(top.add_argument_group("one of several processes, each started with the same options"))
    add = top.add_argument_group("the model (default: the preset's)").add_argument
    add("--d-model", type=int, metavar="H", help="width of the residual stream")
    add("--d-ff", type=int, metavar="F", help="width of an expert")
    add("--layers", type=int, dest="num_layers", metavar="L", help="number of layers")
    add("--heads", type=int, dest="num_heads", metavar="N", help="number of attention heads")
    add("--head-dim", type=int, metavar="D", help="width of a head; 0: H / N")
    add("--kv-heads", type=int, dest="num_kv_heads", metavar="M", help="heads of keys and values; 0: N")
    add("--experts", type=int, dest="num_experts", metavar="E", help="experts of a layer")
    add("--top-k", type=int, metavar="K", help="experts of a token")
    add("--shared-d-ff", type=int, metavar="S", help="width of an expert that every token takes; 0: no such expert")
    add("--capacity-factor", type=factor, metavar="X", help="bound the rows of a rank at X times the even load, drop "
        "and count the rest; none: drop nothing")  # fmt: skip
    add("--tied", action=argparse.BooleanOptionalAction, help="one matrix embeds and predicts bytes")
    add("--balance", choices=BALANCE, help="keep experts busy by a selection bias, by a loss of the batch or of "
        "each sequence, or not at all")  # fmt: skip
    add("--activation", metavar="NAME", help="the activation of the experts, as in MoEConfig (default: swiglu)")
    return top


def run(args: argparse.Namespace) -> int:
    """Trains, and prints the end of the run or runs. Returns 130 where Ctrl-C stopped them, else 0.

    Raises:
      ValueError: options exclude one another, or there is no run to resume.
    """
    processes.join(args)
    program.start(args.cpu_devices)
    from lm import experiments, loop
    from lm.report import Report, finish

    stream = sys.stdout if processes.is_first() else None
    found = experiments.find(args.out, args.name) if args.resume and (args.name or args.recipes) else None
    if args.recipes or found:
        if args.recipe:
            raise ValueError(f"--recipe {args.recipe} with several runs; give --recipes alone")
        if args.resume and not found:
            raise ValueError(f"--resume: {args.out}/{args.name or '*'} has no arms.json; start with --recipes A,B")
        base = experiments.read(found) if found else experiments.Arms(train_config(args), args.recipes)
        config = train_config(args, base.config)
        arms = experiments.Arms(config, args.recipes or base.recipes, args.seeds or base.seeds)
        results = experiments.train(arms, resume=args.resume, report=lambda: Report(stream))
        lines, name, interrupted = experiments.lines(results), results["name"], results["interrupted"]
        saved = "the runs are saved"
    elif args.seeds:
        raise ValueError(f"--seeds {args.seeds} without --recipes; give the recipes to compare, as none,fp8_block")
    else:
        config = processes.together(lambda: train_config(args))
        result = loop.train(config, resume=args.resume, report=Report(stream))
        lines, name, interrupted = finish(result), result.config.name, result.interrupted
        saved = f"the run is saved after step {result.steps}"
    if interrupted:
        again = [*NAME.split(), "--resume", "--name", name]
        again += ["--out", args.out] if args.out != "runs" else []
        again += ["--cpu-devices", str(args.cpu_devices)] if args.cpu_devices else []
        lines += [f"{saved}; continue with:", f"  {shlex.join(again + processes.flags(args))}"]
    if stream:
        print(*lines, sep="\n")
    return 130 if interrupted else 0


def train_config(args: argparse.Namespace, before: TrainConfig | None = None) -> TrainConfig:
    """Returns the settings of a run: the options override `before`, or the run to resume, or the preset.

    Raises:
      ValueError: the options have both --preset and --resume, or name a run that does not exist.
    """
    given = {name: value for name, value in vars(args).items() if value is not None}
    if before is not None:
        base = before
    elif args.resume:
        from lm.run import read_config

        if args.preset:
            raise ValueError(f"--preset {args.preset} with --resume: the run has its sizes already; leave --preset out")
        base = read_config(args.out, args.name)
    else:
        preset = args.preset or "tiny"
        base = dataclasses.replace(PRESETS[preset], name=preset)
    if given.get("recipe") == "none":
        given["recipe"] = None
    for name in ("capacity_factor", "buffer_factor"):
        if math.isinf(given.get(name, 0)):
            given[name] = None
    model = {f.name: given[f.name] for f in dataclasses.fields(ModelConfig) if f.name in given}
    run = {f.name: given[f.name] for f in dataclasses.fields(TrainConfig) if f.name in given}
    return dataclasses.replace(base, model=dataclasses.replace(base.model, **model), **run)
