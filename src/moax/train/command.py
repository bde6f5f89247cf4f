"""`moax train`: this module has its options, turns them into the settings of a run, and runs it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys

from moax import program
from moax.arguments import add_execution, factor
from moax.config import GATED, UNGATED
from moax.train import processes
from moax.train.presets import BALANCE, DTYPES, PRESETS, REMAT, ModelConfig, TrainConfig

USAGE = "moax train [--preset NAME] [options]"
DESCRIPTION = """\
Trains a decoder-only language model on bytes: attention and an MoE in every layer.

The text is the source of Python's standard library, or your own files (--text). The run writes config.json,
metrics.jsonl, checkpoints/ and curves.png into OUT/NAME/. Ctrl-C saves the state, and prints how to resume. Settings
that you do not give come from the preset; with --resume, from the run.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax train` to `parser`."""
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
    add_execution(how, mesh="all devices on fsdp", dtypes=DTYPES)
    how.add_argument("--buffer-factor", type=factor, metavar="X", help="buffers for X times the balanced load, in more "
        "passes where a step needs more; none: buffers for the worst case")  # fmt: skip
    how.add_argument("--remat", choices=REMAT, help="recompute in backward: nothing, everything, or all but the MoE")
    processes.add_options(parser.add_argument_group("one of several processes, each started with the same options"))
    model = parser.add_argument_group("the model (default: the preset's)")
    add = model.add_argument
    add("--d-model", type=int, metavar="H", help="width of the residual stream")
    add("--d-ff", type=int, metavar="F", help="width of an expert")
    add("--layers", type=int, dest="num_layers", metavar="L", help="number of layers")
    add("--heads", type=int, dest="num_heads", metavar="N", help="number of attention heads")
    add("--experts", type=int, dest="num_experts", metavar="E", help="experts of a layer")
    add("--top-k", type=int, metavar="K", help="experts of a token")
    add("--shared-d-ff", type=int, metavar="S", help="width of an expert that every token takes; 0: no such expert")
    add("--capacity-factor", type=factor, metavar="X", help="bound the rows of a rank at X times the even load, drop "
        "and count the rest; none: drop nothing")  # fmt: skip
    add("--tied", action=argparse.BooleanOptionalAction, help="one matrix embeds and predicts bytes")
    add("--balance", choices=BALANCE, help="keep experts busy by a selection bias, by a loss of the batch or of "
        "each sequence, or not at all")  # fmt: skip
    add("--activation", choices=GATED + UNGATED, help="the activation of the experts (default: swiglu)")


def run(args: argparse.Namespace) -> int:
    """Trains, and prints the end of the run. Returns 130 where Ctrl-C stopped the run, else 0."""
    processes.join(args)
    program.start(args.cpu_devices)
    from moax.train import arms, loop, report, summary

    if args.recipes or (args.resume and args.name and arms.find(args.out, args.name)):
        return run_arms(args)
    if args.seeds:
        raise ValueError(f"--seeds {args.seeds} without --recipes; give the recipes to compare, as none,fp8_block")
    config = processes.together(lambda: train_config(args))
    result = loop.train(config, resume=args.resume, report=report.for_stream(json=args.json))
    end = summary.finish(result)
    if not processes.is_first():
        return 130 if result.interrupted else 0
    for line in [json.dumps(end, indent=2)] if args.json else summary.lines(result, end):
        print(line)
    if not result.interrupted:
        return 0
    hint = f"the run is saved after step {result.steps}; continue it with:\n  {to_resume(args, result.config.name)}"
    print(hint, file=sys.stderr if args.json else sys.stdout)
    return 130


def run_arms(args: argparse.Namespace) -> int:
    """Trains a run for each recipe and seed, and prints how they compare. Returns 130 where Ctrl-C stopped it, else 0.

    Raises:
      ValueError: the options have --recipe, or --resume finds no such runs.
    """
    from moax.train import arms, report

    if args.recipe:
        raise ValueError(f"--recipe {args.recipe} with several runs; give --recipes alone")
    if args.resume:
        found = arms.find(args.out, args.name)
        if found is None:
            raise ValueError(f"--resume: {args.out}/{args.name or '*'} has no arms.json; start with --recipes A,B")
        before = arms.read(found)
        config = train_config(args, before.config)
        settings = arms.Arms(config, args.recipes or before.recipes, args.seeds or before.seeds)
    else:
        settings = arms.Arms(train_config(args), args.recipes, args.seeds or 1)
    results = arms.train(settings, resume=args.resume, report=lambda: report.for_stream(json=args.json))
    for line in [json.dumps(results, indent=2)] if args.json else arms.lines(results):
        print(line)
    if not results["interrupted"]:
        return 0
    hint = f"the runs are saved; continue them with:\n  {to_resume(args, results['name'])}"
    print(hint, file=sys.stderr if args.json else sys.stdout)
    return 130


def to_resume(args: argparse.Namespace, name: str) -> str:
    """Returns the command line that continues the run `name`."""
    command = ["moax", "train", "--resume", "--name", name]
    command += ["--out", args.out] if args.out != "runs" else []
    command += ["--cpu-devices", str(args.cpu_devices)] if args.cpu_devices else []
    return shlex.join(command + processes.flags(args))


def train_config(args: argparse.Namespace, before: TrainConfig | None = None) -> TrainConfig:
    """Returns the settings of a run: the options override those of the preset, or, with --resume, those of the run.

    `before` are the settings to override; None looks for them.

    Raises:
      ValueError: the options have both --preset and --resume, or name a run that does not exist.
    """
    from moax.train.run import newest, read_config

    given = {name: value for name, value in vars(args).items() if value is not None}
    if before is not None:
        base = before
    elif args.resume:
        if args.preset:
            raise ValueError(f"--preset {args.preset} with --resume: the run has its sizes already; leave --preset out")
        base = read_config(args.out, args.name or newest(args.out))
    else:
        preset = args.preset or "tiny"
        base = dataclasses.replace(PRESETS[preset], name=preset)
    if "recipe" in given:
        given["recipe"] = None if given["recipe"] == "none" else given["recipe"]
    for name in ("capacity_factor", "buffer_factor"):
        if name in given and math.isinf(given[name]):
            given[name] = None
    model = {f.name: given[f.name] for f in dataclasses.fields(ModelConfig) if f.name in given}
    run = {f.name: given[f.name] for f in dataclasses.fields(TrainConfig) if f.name in given}
    return dataclasses.replace(base, model=dataclasses.replace(base.model, **model), **run)
