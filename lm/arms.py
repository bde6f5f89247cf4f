"""`python -m lm arms`: one run, and arms that go on from a checkpoint in its middle with other settings, compared.

The run goes on to its end unbroken. An arm has the run's state of step `--at`, its data and its learning rates.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from lm import command, program
from lm.config import TrainConfig, check_batch, mesh_over_devices

NAME = "python -m lm arms"
DESCRIPTION = """\
Trains a run of STEPS steps, which saves its state at step AT, and for each --arm a run that goes on from that state to
step STEPS with the options of the arm, as `python -m lm train --from CHECKPOINT` does. After each run that ends,
comparison.json has what `python -m lm compare` tells of all runs so far; comparison.png follows the last.
"""


def main(argv: list[str]) -> int:
    """Runs `python -m lm arms ARGV`. Returns 130 where Ctrl-C stopped it, else 0.

    Raises:
      ValueError: an arm has options that cannot change, or cannot run on this machine.
    """
    args = parser().parse_args(["arms", *argv])
    if args.resume or args.origin or args.coordinator or args.distributed:
        ours = "--resume, --from and the options of several processes"
        raise ValueError(f"{ours} are those of python -m lm train; leave them out")
    program.start(args.cpu_devices)
    config = command.train_config(args)
    step = args.at if args.at is not None else (config.steps + 1) // 2
    if not config.steps <= 2 * step < 2 * config.steps:
        half = (config.steps + 1) // 2
        raise ValueError(f"--at {step} must be at least {half}, half of --steps, and below --steps {config.steps}")
    config = dataclasses.replace(config, save_every=step)
    arms = {text: arm_config(config, text) for text in args.arm}
    check_comparable(config, arms)
    command_line = shlex.join(part.rsplit("/", 1)[-1] if part.startswith("/") else part for part in argv)
    results = Path(args.results or config.out)
    results.mkdir(parents=True, exist_ok=True)
    return train_all(config, arms, args, results, f"{NAME} {command_line}")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `arms`, which has the options of `train`."""
    from lm import compare

    top = command.parser(NAME, DESCRIPTION)
    arms = top.add_argument_group("the arms")
    about = 'options of train for one arm, as "--recipe fp8_block" or "--mesh fsdp=2,ep=2"; give it once for each arm'
    arms.add_argument("--arm", action="append", required=True, metavar="OPTIONS", help=about)
    about = "step whose state the arms begin with, at least half of STEPS (default: half)"
    arms.add_argument("--at", type=int, metavar="STEP", help=about)
    about = "stop after so long; the run at hand ends early, and arms that have not begun are left out"
    arms.add_argument("--seconds", type=float, default=float("inf"), help=about)
    arms.add_argument("--results", metavar="FOLDER", help="folder of comparison.json and comparison.png (default: OUT)")
    arms.add_argument("--sha", help="commit to note in comparison.json (default: git's)")
    compare.add_bar(arms)
    return top


def arm_config(base: TrainConfig, options: str) -> TrainConfig:
    """Returns the settings of an arm: those of `base` with the options of the arm, "--mesh fsdp=2,ep=2".

    Raises:
      ValueError: the options change what an arm shares with `base`, or cannot run on this machine.
    """
    from lm.run import check_fixed

    args = command.parser().parse_args(["train", *shlex.split(options)])
    config = command.override(base, args)
    option = f'--arm "{options}"'
    check_fixed(base, config, option)
    for field in ("steps", "text", "out"):
        if getattr(config, field) != getattr(base, field):
            raise ValueError(f"{option}: --{field} is the same in all arms; give it to {NAME} itself")
    check_batch(config, mesh_over_devices(config.mesh))
    name = args.name or re.sub(r"[^\w.=]+", "-", options).strip("-")
    return dataclasses.replace(config, name=name, save_every=0)


def check_comparable(base: TrainConfig, arms: dict[str, TrainConfig]) -> None:
    """Raises a ValueError where `compare` would refuse an arm when it has been trained.

    `arms` has the settings of each arm by its options.
    """
    from lm import compare

    run = "the run itself"
    settings_of_base = base.to_json()
    known = {compare.name_arm(settings_of_base, settings_of_base): run}
    for options, arm in arms.items():
        option = f'--arm "{options}"'
        settings = arm.to_json()
        compare.check_settings(settings, settings_of_base, option, run)
        name = compare.name_arm(settings, settings_of_base)
        if name in known:
            raise ValueError(f"{option} is the arm {name!r}, which {known[name]} is too; leave it out")
        known[name] = option


def train_all(
    config: TrainConfig, arms: dict[str, TrainConfig], args: argparse.Namespace, results: Path, command_line: str
) -> int:
    """Trains the run and the arms one after the other, and compares those that have begun after each."""
    from lm import compare, loop
    from lm.report import Report

    deadline = time.monotonic() + args.seconds

    def stop_in_time(row: dict[str, Any]) -> None:
        if time.monotonic() > deadline:
            raise KeyboardInterrupt

    report = Report(sys.stdout)
    base = loop.train(config, report=report, on_step=stop_in_time)
    folders = [base.run.path]
    outcome = compare.write(folders, results, args.bar, command_line, args.sha)
    stopped = base.interrupted
    for options, arm in arms.items():
        has_time = time.monotonic() < deadline
        if stopped or not has_time:
            report.note(f'--arm "{options}" is left out: {NAME} was stopped, or its {args.seconds:g} seconds are over')
            continue
        arm = dataclasses.replace(arm, origin=str(base.run.checkpoints / str(config.save_every)))
        report.note(f"\n{options}")
        result = loop.train(arm, report=report, on_step=stop_in_time)
        stopped = result.interrupted
        folders.append(result.run.path)
        outcome = compare.write(folders, results, args.bar, command_line, args.sha)
    report.note("\n".join(["", *compare.lines(outcome), f"result  {results / 'comparison.json'}"]))
    report.note(f"curves  {compare.draw(outcome, results)}")
    return 130 if stopped and time.monotonic() < deadline else 0
