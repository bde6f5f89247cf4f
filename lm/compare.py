"""`python -m lm compare RUN [RUN ...]`: how far apart the losses of arms are, beside how far apart two seeds are.

An arm is a recipe, a capacity factor, a mesh and an exchange. Runs of one seed begin with the same weights, or with the
same checkpoint (`--from`), and read the same batches, so that their losses differ by the arm alone.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.run import Run

MAY_DIFFER = {"recipe", "mesh", "exchange", "seed"}
# `fingerprint` tells another text.
NOT_COMPARED = {"name", "out", "text", "origin", "save_every", "machine"}

Losses = dict[tuple[str, int], dict[int, float]]  # {(arm, seed): {step: held-out loss}}


def main(argv: list[str]) -> int:
    """Prints the comparison of the runs that `argv` names, and writes comparison.json and comparison.png. Returns 0."""
    parser = argparse.ArgumentParser("python -m lm compare", description=__doc__)
    about = (
        "folder of a run; the runs differ in recipe, capacity factor, mesh, exchange and seed alone, and the first has "
        "the arm to compare with. One comparison.json in place of runs is drawn again"
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=about)
    about = "folder of comparison.json and comparison.png (default: that of the first run)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=about)
    add_bar(parser)
    args = parser.parse_args(argv)
    out = args.out or args.runs[0].parent
    if args.runs[0].suffix == ".json":
        results = json.loads(args.runs[0].read_text())
        if "arms" not in results:
            raise ValueError(f"{args.runs[0]} has no arms, as an earlier moax wrote it; give the folders of its runs")
    else:
        results = write(args.runs, out, args.bar, f"python -m lm compare {shlex.join(argv)}")
    print(*lines(results), f"curves                   {draw(results, out)}", sep="\n")
    return 0


def add_bar(parser) -> None:
    """Adds the option --bar to a parser."""
    about = "the most by which an arm's last loss may exceed that of the first; the result says which arms keep it"
    parser.add_argument("--bar", type=float, metavar="NATS", help=about)


def write(
    folders: Sequence[Path],
    out: Path,
    bar: float | None,
    command: str,
    sha: str | None = None,
) -> dict[str, Any]:
    """Writes the result of `compare` to comparison.json in the folder `out`, and returns it."""
    results = compare(folders, bar)
    results["header"]["command"] = command
    results["header"]["git_sha"] = sha or results["header"].get("git_sha")
    (out / "comparison.json").write_text(to_json(results))
    return results


def draw(results: dict[str, Any], out: Path) -> str:
    """Draws the result of `compare` to comparison.png in the folder `out`, and returns words that say where it is."""
    try:
        from lm import plots
    except ModuleNotFoundError as error:
        return f"none, as there is {error}; python -m lm compare {out / 'comparison.json'} draws them elsewhere"
    plots.draw_comparison(results, out / "comparison.png")
    return str(out / "comparison.png")


def compare(folders: Sequence[Path], bar: float | None = None) -> dict[str, Any]:
    """Returns what is known of runs, as a dict that JSON can hold.

    `held_out` has a row for each run: its losses, the tokens/s of its median step and the share of (token, expert)
    pairs that it dropped. `gaps` has the result of `find_gaps`, and `furthest` that of `find_furthest`.

    Raises:
      ValueError: a folder has no run, two runs have the same arm and seed, or runs differ in another setting.
    """
    losses: Losses = {}
    training: Losses = {}
    held_out = []
    baseline: dict[str, Any] = {}
    for folder in folders:
        run = Run(folder)
        if not run.config.is_file():
            raise ValueError(f"{folder} has no config.json; give the folders of runs")
        settings = json.loads(run.config.read_text())
        baseline = baseline or settings
        check_settings(settings, baseline, folder, folders[0])
        key = name_arm(settings, baseline), settings["seed"]
        if key in losses:
            raise ValueError(f"{folder} has the arm {key[0]!r} and seed {key[1]}, as a run before it; give each once")
        losses[key] = {row["step"]: row["held_out_loss"] for row in run.rows("held_out_loss")}
        training[key] = {row["step"]: row["loss"] for row in run.rows("loss")}
        held_out.append(describe_run(run, settings, key[0]))
    arms = list(dict.fromkeys(arm for arm, _ in losses))
    return {
        "header": dict(baseline.get("machine", {})),
        "config": {name: value for name, value in baseline.items() if name not in ("fingerprint", "machine")},
        "arms": arms,
        "seeds": len({seed for _, seed in losses}),
        "dtype": baseline["dtype"],
        "bar": bar,
        "held_out": held_out,
        "gaps": [gap for arm in arms[1:] for gap in find_gaps(arm, arms[0], losses)],
        "furthest": [row for arm in arms[1:] for row in find_furthest(arm, arms[0], losses, training)],
    }


def check_settings(settings: dict[str, Any], baseline: dict[str, Any], folder: Path | str, first: Path | str) -> None:
    """Raises a ValueError if two runs differ in more than arm and seed; `folder` and `first` name them."""
    for name in (settings.keys() | baseline.keys()) - MAY_DIFFER - NOT_COMPARED:
        ours: Any = settings.get(name)
        theirs: Any = baseline.get(name)
        if name == "model":
            ours = ours | {"capacity_factor": theirs["capacity_factor"]}
        if ours != theirs:
            values = f"{ours!r}, and in {first} {theirs!r}"
            may = "recipe, capacity factor, mesh, exchange and seed alone"
            raise ValueError(f"{name} is in {folder} {values}; compare runs that differ in {may}")


def name_arm(settings: dict[str, Any], baseline: dict[str, Any]) -> str:
    """Returns the recipe of a run, and what else of its arm differs from the first run: "none on fsdp=2,ep=2"."""
    name = settings["recipe"] or "none"
    capacity = settings["model"]["capacity_factor"]
    if capacity != baseline["model"]["capacity_factor"]:
        name += f" with capacity {capacity:g}" if capacity is not None else " without capacity"
    if settings["mesh"] != baseline["mesh"]:
        name += f" on {','.join(f'{axis}={size}' for axis, size in settings['mesh'].items()) or 'fsdp'}"
    if settings["exchange"] != baseline["exchange"]:
        name += f" by {settings['exchange']}"
    return name


def describe_run(run: Run, settings: dict[str, Any], arm: str) -> dict[str, Any]:
    """Returns the settings of a run's arm, its held-out losses by step, its speed and its drops."""
    model = settings["model"]
    evaluations = run.rows("held_out_loss")
    steps = run.rows("loss")
    pairs = len(steps) * settings["batch"] * settings["seq"] * model["top_k"] * model["num_layers"]
    speeds = [row["tokens_per_s"] for row in steps]
    return {
        "arm": arm,
        "seed": settings["seed"],
        "recipe": settings["recipe"],
        "capacity_factor": model["capacity_factor"],
        "mesh": settings["mesh"],
        "exchange": settings["exchange"],
        "origin": settings.get("origin"),
        "device": settings.get("machine", {}).get("device"),
        "steps": [row["step"] for row in evaluations],
        "losses": [row["held_out_loss"] for row in evaluations],
        "tokens_per_s": round(statistics.median(speeds)) if speeds else None,
        "dropped": sum(row["dropped"] for row in steps) / pairs if pairs else None,
    }


def find_gaps(arm: str, base: str, losses: Losses) -> list[dict[str, Any]]:
    """Returns by how much an arm's loss exceeds that of `base`, for each step at which a seed of both was evaluated.

    `gaps` has the difference of each seed, and `mean` their mean. `between_seeds` is the largest loss of `base` less
    the smallest, or None for one seed.
    """
    rows = []
    seeds = sorted({seed for _, seed in losses})
    pairs = [(losses.get((arm, seed), {}), losses.get((base, seed), {})) for seed in seeds]
    for step in sorted(set[int]().union(*(ours.keys() & theirs.keys() for ours, theirs in pairs))):
        common = [(ours, theirs) for ours, theirs in pairs if step in ours and step in theirs]
        gaps = [ours[step] - theirs[step] for ours, theirs in common]
        of_base = [theirs[step] for _, theirs in pairs if step in theirs]
        between = max(of_base) - min(of_base) if len(of_base) > 1 else None
        rows.append(
            dict(
                arm=arm,
                against=base,
                step=step,
                mean=float(np.mean(gaps)),
                gaps=gaps,
                between_seeds=between,
            )
        )
    return rows


def find_furthest(arm: str, base: str, losses: Losses, training: Losses) -> list[dict[str, Any]]:
    """Returns for each seed of `arm` the step at which its loss is furthest from that of `base`, and the difference.

    `held_out` is of the evaluations, and `training` of the losses of single steps; None where no step is common.
    """
    rows = []
    for name, seed in losses:
        if name == arm and (base, seed) in losses:
            row: dict[str, Any] = {"arm": arm, "against": base, "seed": seed}
            for kind, of_kind in (("held_out", losses), ("training", training)):
                ours = of_kind[arm, seed]
                theirs = of_kind[base, seed]
                gaps = {step: ours[step] - theirs[step] for step in ours if step in theirs}
                step = max(gaps, key=lambda step: abs(gaps[step]), default=None)
                row[kind] = None if step is None else {"step": step, "gap": gaps[step]}
            rows.append(row)
    return rows


def to_json(results: dict[str, Any]) -> str:
    """Returns JSON with a line for each row of a list of rows, and for each other value."""
    fields = []
    for name, value in results.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n  ".join(json.dumps(row) for row in value)
            text = f"[\n  {rows}\n ]"
        else:
            text = json.dumps(value)
        fields.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def lines(results: dict[str, Any]) -> list[str]:
    """Returns the lines that say the result of `compare`."""
    width = max(24, *(len(f"{run['arm']}, seed {run['seed']}") for run in results["held_out"]))
    text = [f"{'run':{width}} {'step':>6}  held-out loss, nats a byte"]
    for run in results["held_out"]:
        if run["steps"]:
            last = f"{run['steps'][-1]:>6}  {run['losses'][-1]:.4f}"
        else:
            last = "     -  not begun"
        if run["tokens_per_s"]:
            last += f"  {run['tokens_per_s']:,} tokens/s, {run['dropped']:.3%} dropped"
        text.append(f"{run['arm'] + ', seed ' + str(run['seed']):{width}} {last}")
    for last in {gap["arm"]: gap for gap in results["gaps"]}.values():
        if last["between_seeds"] is None:
            spread = ""
        else:
            spread = f"; seeds of {last['against']} {last['between_seeds']:.4f}"
        if results["bar"] is None:
            verdict = ""
        elif last["step"] < results["config"]["steps"]:
            verdict = "; not at its end, so the bar says nothing"
        else:
            verdict = f"; {'within' if last['mean'] <= results['bar'] else 'above'} the bar of {results['bar']:g}"
        gap = f"{last['arm']} less {last['against']} at step {last['step']}: {last['mean']:+.4f}"
        text.append(gap + spread + verdict)
    for row in results["furthest"]:
        if row["training"]:
            kinds = [f"{kind.replace('_', '-')} {row[kind]['gap']:+.4f} at step {row[kind]['step']}"
                     for kind in ("held_out", "training") if row[kind]]  # fmt: skip
            text.append(f"{row['arm']}, seed {row['seed']}, furthest from {row['against']}: {', '.join(kinds)}")
    return text
