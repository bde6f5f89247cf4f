"""`python -m lm train`: its options, the settings of a run, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import shlex
import sys
from typing import Any

from lm import processes, program
from lm.config import PRESETS, ModelConfig, TrainConfig

NAME = "python -m lm train"
DESCRIPTION = """\
Trains a decoder-only language model on bytes: attention and an MoE in every layer.

The text is the source of Python's standard library, or your own files (--text). The run writes config.json,
metrics.jsonl, checkpoints/ and curves.png into OUT/NAME/. Ctrl-C saves the state, and prints how to resume. Settings
that you do not give come from the preset; with --resume and --from, from the run.
"""


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m lm ARGV`, and returns the exit code; see `lm.program`."""
    if argv is None:
        argv = sys.argv[1:]
    if argv[:1] in (["arms"], ["compare"], ["probe"]):
        command = importlib.import_module(f"lm.{argv[0]}")
        return program.run(f"python -m lm {argv[0]}", lambda: command.main(argv[1:]))
    args = parser().parse_args(argv)
    return program.run(NAME, lambda: run(args), traceback=args.traceback)


def parser(name: str = NAME, description: str = DESCRIPTION) -> argparse.ArgumentParser:
    """Returns the parser of `train`, or of the command `name` with the same options.

    Settings have no defaults here, since the preset or the run has them.
    """
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        "python -m lm",
        f"{name} [options]",
        description,
        formatter_class=raw,
    )
    top.add_argument("command", choices=("train", "arms", "compare", "probe"), help=argparse.SUPPRESS)
    top.add_argument("--traceback", action="store_true", help="show where an error arose")
    run = top.add_argument_group("the run (default: the preset's)")
    run.add_argument(
        "--preset",
        choices=PRESETS,
        metavar="NAME",
        help=f"{', '.join(PRESETS)} (default: tiny)",
    )
    again = "continue the run NAME (default: the newest) from its last checkpoint"
    run.add_argument("--resume", action="store_true", help=again)
    _add_settings(run, TrainConfig)
    run.add_argument(
        "--cpu-devices",
        type=int,
        metavar="N",
        help="emulate N devices on this machine's CPU",
    )
    processes.add_options(
        top.add_argument_group("one of several processes, each started with the same options"),
    )
    _add_settings(top.add_argument_group("the model (default: the preset's)"), ModelConfig)
    return top


def _add_settings(group, owner: type) -> None:
    """Adds the options of all settings of a config to a parser."""
    for field in dataclasses.fields(owner):
        if settings := dict(field.metadata):
            flag = settings.pop("flag", field.name.replace("_", "-"))
            passed = settings.keys() & {"type", "metavar", "choices"}
            keywords = {name: settings[name] for name in passed}
            if field.type == "bool":
                keywords["action"] = argparse.BooleanOptionalAction
            elif field.type in ("int", "float"):
                keywords["type"] = {"int": int, "float": float}[field.type]
            group.add_argument(f"--{flag}", dest=field.name, help=settings["about"], **keywords)


def run(args: argparse.Namespace) -> int:
    """Trains, and prints the end of the run. Returns 130 where Ctrl-C stopped it, else 0."""
    processes.join(args)
    program.start(args.cpu_devices)
    from lm import loop
    from lm.report import Report, finish

    stream = sys.stdout if processes.is_first() else None
    config = processes.together(lambda: train_config(args))
    report = Report(stream)
    result = loop.train(config, resume=args.resume, report=report)
    lines = finish(result, report)
    if result.interrupted:
        again = [*NAME.split(), "--resume", "--name", result.config.name]
        again += ["--out", config.out] if config.out != "runs" else []
        again += ["--cpu-devices", str(args.cpu_devices)] if args.cpu_devices else []
        lines.append(f"the run is saved after step {result.steps}; continue with:")
        lines.append(f"  {shlex.join(again + processes.flags(args))}")
    if stream:
        print(*lines, sep="\n")
    return 130 if result.interrupted else 0


def train_config(args: argparse.Namespace) -> TrainConfig:
    """Returns the settings of a run: the options override the run to resume, or the preset.

    Raises:
      ValueError: the options have two of --preset, --resume and --from, or name a run that does not exist.
    """
    named = {"--preset": args.preset, "--resume": args.resume, "--from": args.origin}
    if len(two := [option for option, value in named.items() if value]) > 1:
        raise ValueError(f"{' with '.join(two)}: each names where the settings come from; leave {two[0]} out")
    if args.resume:
        from lm.run import read_config

        base = read_config(args.out or "runs", args.name)
    elif args.origin:
        from lm.run import find_checkpoint

        base = find_checkpoint(args.origin)[0].read_settings()
    else:
        preset = args.preset or "tiny"
        base = dataclasses.replace(PRESETS[preset], name=preset)
    return override(dataclasses.replace(base, out="runs"), args)


def override(base: TrainConfig, args: argparse.Namespace) -> TrainConfig:
    """Returns `base` with the settings that `args` gives."""
    chosen: dict[str, Any] = {name: value for name, value in vars(args).items() if value is not None}
    if chosen.get("recipe") == "none":
        chosen["recipe"] = None
    for name in ("capacity_factor", "buffer_factor"):
        if chosen.get(name) == math.inf:
            chosen[name] = None
    model = {f.name: chosen[f.name] for f in dataclasses.fields(ModelConfig) if f.name in chosen}
    run = {f.name: chosen[f.name] for f in dataclasses.fields(TrainConfig) if f.name in chosen}
    return dataclasses.replace(base, model=dataclasses.replace(base.model, **model), **run)
