"""`python -m lm compare RUN [RUN ...]`: how far apart the losses of recipes are, beside how far apart two seeds are.

Runs of one seed begin with the same weights and read the same batches, so that their losses differ by the recipe alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm import plots
from lm.run import Run

# `fingerprint` tells another text.
MAY_DIFFER = ("name", "out", "text", "recipe", "seed", "save_every", "origin", "machine")

Losses = dict[tuple[str, int], dict[int, float]]  # {(recipe, seed): {step: held-out loss}}


def main(argv: list[str]) -> int:
    """Prints the comparison of the runs that `argv` names, and writes comparison.json and comparison.png. Returns 0."""
    parser = argparse.ArgumentParser("python -m lm compare", description=__doc__)
    about = "folder of a run; the runs differ in recipe and seed alone, and the first has the recipe to compare with"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=about)
    about = "folder of comparison.json and comparison.png (default: that of the first run)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=about)
    args = parser.parse_args(argv)
    results = compare(args.runs)
    out = args.out or args.runs[0].parent
    (out / "comparison.json").write_text(json.dumps(results, indent=2) + "\n")
    plots.draw_comparison(results, out / "comparison.png")
    print(*lines(results), f"curves                   {out}/comparison.png", sep="\n")
    return 0


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Returns what is known of runs, as a dict that JSON can hold: `held_out` has the losses, `gaps` is of `find_gaps`.

    Raises:
      ValueError: a folder has no run, two runs have the same recipe and seed, or runs differ in another setting.
    """
    losses: Losses = {}
    baseline: dict[str, Any] = {}
    for folder in folders:
        run = Run(folder)
        if not run.config.is_file():
            raise ValueError(f"{folder} has no config.json; give the folders of runs")
        settings = json.loads(run.config.read_text())
        baseline = baseline or settings
        for name in settings.keys() | baseline.keys():
            if name not in MAY_DIFFER and settings.get(name) != baseline.get(name):
                values = f"{settings.get(name)!r}, and in {folders[0]} {baseline.get(name)!r}"
                raise ValueError(f"{name} is in {folder} {values}; compare runs that differ in recipe and seed alone")
        key = settings["recipe"] or "none", settings["seed"]
        if key in losses:
            raise ValueError(f"{folder} has recipe {key[0]} and seed {key[1]}, as a run before it; give each once")
        losses[key] = {row["step"]: row["held_out_loss"] for row in run.rows("held_out_loss")}
    recipes = list(dict.fromkeys(recipe for recipe, _ in losses))
    held_out = []
    for (recipe, seed), by_step in losses.items():
        steps = sorted(by_step)
        row = {
            "recipe": recipe,
            "seed": seed,
            "steps": steps,
            "losses": [by_step[s] for s in steps],
        }
        held_out.append(row)
    return {
        "recipes": recipes,
        "seeds": len({seed for _, seed in losses}),
        "dtype": baseline["dtype"],
        "held_out": held_out,
        "gaps": [gap for recipe in recipes[1:] for gap in find_gaps(recipe, recipes[0], losses)],
    }


def find_gaps(recipe: str, base: str, losses: Losses) -> list[dict[str, Any]]:
    """Returns by how much a recipe's loss exceeds that of `base`, for each step at which a seed of both was evaluated.

    `gaps` has the difference of each seed, and `mean` their mean. `between_seeds` is the largest loss of `base` less
    the smallest, or None for one seed.
    """
    rows = []
    seeds = sorted({seed for _, seed in losses})
    pairs = [(losses.get((recipe, seed), {}), losses.get((base, seed), {})) for seed in seeds]
    for step in sorted(set[int]().union(*(ours.keys() & theirs.keys() for ours, theirs in pairs))):
        common = [(ours, theirs) for ours, theirs in pairs if step in ours and step in theirs]
        gaps = [ours[step] - theirs[step] for ours, theirs in common]
        of_base = [theirs[step] for _, theirs in pairs if step in theirs]
        between = max(of_base) - min(of_base) if len(of_base) > 1 else None
        rows.append(
            dict(
                recipe=recipe,
                against=base,
                step=step,
                mean=float(np.mean(gaps)),
                gaps=gaps,
                between_seeds=between,
            )
        )
    return rows


def lines(results: dict[str, Any]) -> list[str]:
    """Returns the lines that say the result of `compare`."""
    text = [f"{'run':24} {'step':>6}  held-out loss, nats a byte"]
    for run in results["held_out"]:
        if run["steps"]:
            last = f"{run['steps'][-1]:>6}  {run['losses'][-1]:.4f}"
        else:
            last = "     -  not begun"
        text.append(f"{run['recipe'] + ', seed ' + str(run['seed']):24} {last}")
    for last in {gap["recipe"]: gap for gap in results["gaps"]}.values():
        if last["between_seeds"] is None:
            spread = ""
        else:
            spread = f"; seeds of {last['against']} {last['between_seeds']:.4f}"
        text.append(f"{last['recipe']} less {last['against']} at step {last['step']}: {last['mean']:+.4f}{spread}")
    return text
