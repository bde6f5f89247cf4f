"""`python -m lm train` and `python -m lm compare`: their options, the settings of a run, and what they print."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from pathlib import Path

from lm import processes
from lm.config import ATTENTION, BALANCE, DTYPES, PRESETS, REMAT, ModelConfig, TrainConfig
from moax import program
from moax.program import factor

NAME = "python -m lm"
TRAIN = """\
Trains a decoder-only language model on bytes: attention and an MoE in every layer.

The text is the source of Python's standard library, or your own files (--text). The run writes config.json,
metrics.jsonl, checkpoints/ and curves.png into OUT/NAME/. Ctrl-C saves the state, and prints how to resume. Settings
that you do not give come from the preset; with --resume, from the run.
"""
COMPARE = "Draws the losses of several runs on one plot, and prints how far apart they end."


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m lm ARGV`, and returns the exit code; see `moax.program`."""
    args = parsers()[0].parse_args(argv)
    return program.run(f"{NAME} {args.command}", lambda: args.run(args), traceback=args.traceback)


def parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser of the whole command line, and the parser of each command by the command's name."""
    top = argparse.ArgumentParser(prog=NAME, description="The example language model of moax.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    found = {}
    for name, words, add_options, run in (
        ("train", TRAIN, add_train_options, run_train),
        ("compare", COMPARE, add_compare_options, run_compare),
    ):
        raw = argparse.RawDescriptionHelpFormatter
        usage = f"{NAME} {'train [options]' if name == 'train' else 'compare RUN RUN [...] [--out FILE]'}"
        found[name] = commands.add_parser(
            name, help=words.splitlines()[0], description=words, usage=usage, formatter_class=raw
        )
        add_options(found[name])
        found[name].add_argument("--traceback", action="store_true", help="show where an error arose")
        found[name].set_defaults(run=run)
    return top, found


def add_train_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `train` to `parser`."""
    presets = ", ".join(PRESETS)
    run = parser.add_argument_group("the run")
    add = run.add_argument
    add("--preset", choices=PRESETS, metavar="NAME", help=f"sizes and settings: {presets} (default: tiny)")
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
    add("--json", action="store_true", help="print JSON at the end; progress goes to stderr")
    add("--save-every", type=int, metavar="STEPS", help="save a checkpoint every so many steps; 0: at the end alone")
    several = parser.add_argument_group("several runs, to compare recipes (results.json and arms.png in OUT/NAME/)")
    add = several.add_argument
    add("--recipes", type=lambda text: tuple(text.split(",")), metavar="A,B", help="train a run with each recipe on "
        "the same data, as none,fp8_block; the others are compared with the first")  # fmt: skip
    add("--seeds", type=int, metavar="N", help="do so for N seeds, from --seed on (default: 1)")
    how = parser.add_argument_group("how it runs")
    program.add_block_options(how, mesh="all devices on fsdp")
    how.add_argument("--cpu-devices", type=int, metavar="N", help="emulate N devices on this machine's CPU")
    how.add_argument("--engine", metavar="NAME", help="how ops are partitioned, as in moax.Options (default: auto)")
    how.add_argument("--dtype", choices=DTYPES, help="dtype of activations")
    how.add_argument("--buffer-factor", type=factor, metavar="X", help="buffers for X times the balanced load, in more "
        "rounds where a step needs more; none: buffers for the worst case")  # fmt: skip
    how.add_argument("--attention", choices=ATTENTION, help="auto takes cuDNN on a Hopper GPU where the heads fit it, "
        "else XLA (default: auto)")  # fmt: skip
    how.add_argument("--remat", choices=REMAT, help="recompute in backward: nothing, everything, or all but the MoE")
    processes.add_options(parser.add_argument_group("one of several processes, each started with the same options"))
    model = parser.add_argument_group("the model (default: the preset's)")
    add = model.add_argument
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


def run_train(args: argparse.Namespace) -> int:
    """Trains, and prints the end of the run. Returns 130 where Ctrl-C stopped the run, else 0."""
    processes.join(args)
    program.start(args.cpu_devices)
    from lm import experiments, loop, report

    if args.recipes or (args.resume and args.name and experiments.find(args.out, args.name)):
        return run_experiment(args)
    if args.seeds:
        raise ValueError(f"--seeds {args.seeds} without --recipes; give the recipes to compare, as none,fp8_block")
    config = processes.together(lambda: train_config(args))
    result = loop.train(config, resume=args.resume, report=report.make_report(json=args.json))
    end = report.finish(result)
    if not processes.is_first():
        return 130 if result.interrupted else 0
    return _say(args, end, report.lines(result.config, end), f"the run is saved after step {result.steps}")


def run_experiment(args: argparse.Namespace) -> int:
    """Trains a run for each recipe and seed, and prints how they compare. Returns 130 where Ctrl-C stopped it, else 0.

    Raises:
      ValueError: the options have --recipe, or --resume finds no such runs.
    """
    from lm import experiments, report

    if args.recipe:
        raise ValueError(f"--recipe {args.recipe} with several runs; give --recipes alone")
    if args.resume:
        found = experiments.find(args.out, args.name)
        if found is None:
            raise ValueError(f"--resume: {args.out}/{args.name or '*'} has no arms.json; start with --recipes A,B")
        before = experiments.read(found)
        config = train_config(args, before.config)
        settings = experiments.Arms(config, args.recipes or before.recipes, args.seeds or before.seeds)
    else:
        settings = experiments.Arms(train_config(args), args.recipes, args.seeds or 1)
    results = experiments.train(settings, resume=args.resume, report=lambda: report.make_report(json=args.json))
    return _say(args, results, experiments.lines(results), "the runs are saved")


def _say(args: argparse.Namespace, end: dict, lines: list[str], saved: str) -> int:
    """Prints the end of a run or an experiment, and how to resume where Ctrl-C stopped it; returns the exit code."""
    for line in [json.dumps(end, indent=2)] if args.json else lines:
        print(line)
    if not end["interrupted"]:
        return 0
    command = [*NAME.split(), "train", "--resume", "--name", end["name"]]
    command += ["--out", args.out] if args.out != "runs" else []
    command += ["--cpu-devices", str(args.cpu_devices)] if args.cpu_devices else []
    again = shlex.join(command + processes.flags(args))
    print(f"{saved}; continue with:\n  {again}", file=sys.stderr if args.json else sys.stdout)
    return 130


def train_config(args: argparse.Namespace, before: TrainConfig | None = None) -> TrainConfig:
    """Returns the settings of a run: the options override `before`, or the run to resume, or the preset.

    Raises:
      ValueError: the options have both --preset and --resume, or name a run that does not exist.
    """
    from lm.run import read_config

    given = {name: value for name, value in vars(args).items() if value is not None}
    if before is not None:
        base = before
    elif args.resume:
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


def add_compare_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `compare` to `parser`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, as runs/tiny")
    parser.add_argument("--out", default="compare.png", metavar="FILE", help="file of the plot (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run_compare(args: argparse.Namespace) -> int:
    """Draws the plot, and prints the held-out loss and the speed of each run. Returns 0."""
    from lm.plots import compare
    from lm.run import Run

    results = compare([Run(Path(path)) for path in args.runs], Path(args.out))
    if args.json:
        runs = [{"name": name, "held_out_loss": loss, "tokens_per_s": rate} for name, loss, rate in results]
        print(json.dumps({"runs": runs, "plot": args.out}, indent=2))
        return 0
    for name, loss, rate in results:
        print(f"{name:24} held-out loss {loss:.4f} ({loss - results[0][1]:+.4f})   {rate:,.0f} tokens/s")
    print(f"the curves are in {args.out}")
    return 0
