"""`moax train --recipes A,B --seeds N`: runs that differ in the recipe or the seed alone, and what tells them apart.

Runs of one seed begin with the same weights and read the same batches. They train one after the other, all recipes of a
seed before the next seed. Every run is a folder OUT/NAME/RECIPE-seedS with checkpoints of its own, so that the whole
can stop at any step and go on later. A run whose metrics reach its last step needs its checkpoints no more.
OUT/NAME/arms.json has the settings, results.json and arms.png the results.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moax.arguments import mesh_over_devices
from moax.recipe import RECIPES
from moax.train import loop, plot_arms, probe
from moax.train import run as runs
from moax.train import step as steps
from moax.train.checkpoint import Checkpoints
from moax.train.data import load
from moax.train.mesh import TOKEN_AXES, check_batch
from moax.train.presets import TrainConfig
from moax.train.report import Report

PROBED = 1 << 12  # the most tokens of the batch whose gradients are compared


@dataclasses.dataclass(frozen=True)
class Arms:
    """The settings of a comparison.

    Attributes:
      config: the settings that all runs share; `name` is that of the folder, `seed` the first seed.
      recipes: names of recipes, "none" for no recipe. The others are compared with the first.
      seeds: the number of seeds, from `config.seed` on.

    Raises:
      ValueError: a recipe is unknown or given twice, or there is none, or `seeds` is below 1.
    """

    config: TrainConfig
    recipes: tuple[str, ...]
    seeds: int = 1

    def __post_init__(self):
        for recipe in self.recipes:
            if recipe not in ("none", *RECIPES) or self.recipes.count(recipe) > 1:
                raise ValueError(
                    f"--recipes has {recipe!r}; it must name each of some of none, {', '.join(RECIPES)} once"
                )
        if not self.recipes or self.seeds < 1:
            raise ValueError(f"--recipes {','.join(self.recipes)} --seeds {self.seeds}: give at least one of each")

    @property
    def folder(self) -> Path:
        """The folder of the comparison."""
        return Path(self.config.out, self.config.name)

    def arm(self, recipe: str, seed: int) -> TrainConfig:
        """Returns the settings of one run."""
        name = f"{recipe}-seed{seed}"
        none = None if recipe == "none" else recipe
        return dataclasses.replace(self.config, out=str(self.folder), name=name, recipe=none, seed=seed)

    def every(self) -> list[tuple[str, int]]:
        """Returns (recipe, seed) of each run, in the order in which they train."""
        first = self.config.seed
        return [(recipe, seed) for seed in range(first, first + self.seeds) for recipe in self.recipes]


def find(out: str, name: str | None) -> Path | None:
    """Returns the settings' file of the comparison `name`, or of the newest one; None where there is none."""
    found = sorted(Path(out).glob(f"{name or '*'}/arms.json"), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def read(path: Path) -> Arms:
    """Reads the settings that `train` wrote."""
    data = json.loads(path.read_text())
    return Arms(TrainConfig.from_json(data["config"]), tuple(data["recipes"]), data["seeds"])


def train(
    arms: Arms,
    *,
    resume: bool = False,
    report: Callable[[], Report] = Report,
    on_step: Callable[[dict], None] | None = None,
) -> dict[str, Any]:
    """Trains every run to its end, then compares them; Ctrl-C saves the run at hand and compares what there is.

    Args:
      arms: the settings.
      resume: continue the runs of the folder; without it, a taken name becomes NAME-2.
      report: makes the report of each run.
      on_step: as for `loop.train`.

    Returns:
      What results.json holds; see `compare`.

    Raises:
      ValueError: as `loop.train`, or several processes run it.
    """
    if jax.process_count() > 1:
        raise ValueError(f"--recipes in {jax.process_count()} processes; give the runs one process")
    load(arms.config.text, arms.config.seq)
    check_batch(arms.config.batch, arms.config.seq, mesh_over_devices(arms.config.mesh), arms.config.microbatches)
    if not resume:
        arms = dataclasses.replace(arms, config=runs.create(arms.config)[1])
    settings = {"recipes": arms.recipes, "seeds": arms.seeds, "config": arms.config.to_json()}
    (arms.folder / "arms.json").write_text(json.dumps(settings, indent=2) + "\n")
    build, interrupted = _build_once(), False
    for recipe, seed in arms.every():
        config = arms.arm(recipe, seed)
        run = runs.Run(Path(config.out, config.name))
        if _has_ended(run, config.steps):
            continue
        begun = (run.path / "config.json").is_file()
        if run.path.is_dir() and not begun:  # It ended while it made its folder.
            run.path.rmdir()
        result = loop.train(config, resume=begun, report=report(), on_step=on_step, build=build)
        interrupted = result.interrupted
        if interrupted:
            break
    results = {}
    for probed in (False, True):  # The losses are safe before gradients are computed.
        results = compare(arms, probed=probed) | {"interrupted": interrupted}
        _results(arms).write_text(json.dumps(results, indent=2) + "\n")
        plot_arms.draw(results, arms.folder / "arms.png")
    return results


def _build_once() -> Callable[..., steps.Program]:
    """Returns `step.build`, which compiles once for runs that differ in their seed alone."""
    made: dict[TrainConfig, steps.Program] = {}

    def build(config: TrainConfig, mesh) -> steps.Program:
        key = dataclasses.replace(config, seed=0, name="arm")
        if key not in made:
            made[key] = steps.build(config, mesh)
        return dataclasses.replace(made[key], init=steps.jit_init(config, mesh))

    return build


def _results(arms: Arms) -> Path:
    """Returns the path of the results."""
    return arms.folder / "results.json"


def _has_ended(run: runs.Run, steps: int) -> bool:
    """Returns whether a run has made all its steps, by its checkpoints or by its metrics."""
    return max([_last_step(run), *(row["step"] for row in run.rows() if "held_out_loss" in row)]) >= steps


def _last_step(run: runs.Run) -> int:
    """Returns the number of updates of a run's newest checkpoint; -1 where it has none."""
    names = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    return max((int(path.name) for path in names if path.name.isdecimal()), default=-1)


def compare(arms: Arms, *, probed: bool = True) -> dict[str, Any]:
    """Returns what is known of the runs, as a dict that JSON can hold.

    `held_out` has the losses of each run. `gaps` has, for each recipe but the first and each step, by how much its loss
    exceeds that of the first recipe (`gaps` by seed, and their mean), beside `between_seeds`, the largest loss of the
    first recipe less the smallest. `gradients` and `quantization` are those of `probe`, for the last checkpoint of each
    recipe's first seed and at most `PROBED` tokens of the batch that comes next. Where that checkpoint is gone, and
    with `probed=False`, they are those of results.json.
    """
    losses = {}
    for recipe, seed in arms.every():
        config = arms.arm(recipe, seed)
        rows = runs.Run(Path(config.out, config.name)).rows()
        losses[recipe, seed] = {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}
    held_out = [
        {"recipe": recipe, "seed": seed, "steps": sorted(found), "losses": [found[s] for s in sorted(found)]}
        for (recipe, seed), found in losses.items()
    ]
    gaps = [gap for recipe in arms.recipes[1:] for gap in _gaps(arms, recipe, losses)]
    look = _probe if probed else _earlier_probe
    probes = [found for recipe in arms.recipes if (found := look(arms, recipe))]
    return {
        "name": arms.config.name,
        "folder": str(arms.folder),
        "recipes": arms.recipes,
        "seeds": arms.seeds,
        "dtype": arms.config.dtype,
        "held_out": held_out,
        "gaps": gaps,
        "gradients": [p["gradients"] for p in probes],
        "quantization": [p["quantization"] for p in probes if p["quantization"]["operands"]],
    }


def _gaps(arms: Arms, recipe: str, losses: dict[tuple[str, int], dict[int, float]]) -> list[dict[str, Any]]:
    """Returns the gaps of one recipe, at each step at which a seed of both recipes was evaluated."""
    base, seeds = arms.recipes[0], sorted({seed for _, seed in losses})
    found = []
    for step in sorted({s for seed in seeds for s in losses[recipe, seed].keys() & losses[base, seed].keys()}):
        of_base = [losses[base, seed][step] for seed in seeds if step in losses[base, seed]]
        pairs = [(losses[recipe, s].get(step), losses[base, s].get(step)) for s in seeds]
        gaps = [a - b for a, b in pairs if a is not None and b is not None]
        between = max(of_base) - min(of_base) if len(of_base) > 1 else None
        row = {"recipe": recipe, "against": base, "step": step, "mean": float(np.mean(gaps)), "gaps": gaps}
        found.append(row | {"between_seeds": between})
    return found


def _probe(arms: Arms, recipe: str) -> dict[str, Any] | None:
    """Returns the gradient errors and the lost values of one recipe; None where its first seed has no checkpoint."""
    config = arms.arm(recipe, arms.config.seed)
    run = runs.Run(Path(config.out, config.name))
    step = _last_step(run)
    if step < 0:
        return _earlier_probe(arms, recipe)
    corpus, mesh = load(config.text, config.seq), mesh_over_devices(config.mesh)
    config = _with_few_tokens(config, mesh)
    with jax.set_mesh(mesh), Checkpoints(run.checkpoints) as checkpoints:
        like, batch = steps.jit_update(config, mesh)[1]
        state = checkpoints.restore(step, like)
        data = jax.device_put(corpus.batch(config.seed, step, config.batch, config.seq), batch.sharding)
        errors, lost = probe.measure(state, data, config)
    of = {"recipe": recipe, "seed": config.seed, "step": step}
    projections = {
        name: {"median": float(np.nanmedian(e)), "most": float(np.nanmax(e)), "by_expert": _as_list(e)}
        for name, e in errors.items()
    }
    return {"gradients": of | {"projections": projections}, "quantization": of | {"operands": lost}}


def _with_few_tokens(config: TrainConfig, mesh: jax.sharding.Mesh) -> TrainConfig:
    """Returns the settings with the largest part of the batch that has at most `PROBED` tokens, in one microbatch.

    The probe computes gradients in float32, for which no kernel runs. Where each part that divides over the mesh has
    more tokens, it is the smallest; where there is none, the batch is whole.
    """
    devices = math.prod(mesh.shape.get(name, 1) for name in TOKEN_AXES)
    parts = [part for part in range(devices, config.batch + 1, devices) if config.batch % part == 0]
    fits = [part for part in parts if part * config.seq <= PROBED] or parts[:1]
    return dataclasses.replace(config, batch=fits[-1], microbatches=1) if fits else config


def _earlier_probe(arms: Arms, recipe: str) -> dict[str, Any] | None:
    """Returns what results.json has of the gradients and the lost values of a recipe; None where it has nothing."""
    if not _results(arms).is_file():
        return None
    earlier = json.loads(_results(arms).read_text())
    gradients, lost = (
        [found for found in earlier[name] if found["recipe"] == recipe] for name in ("gradients", "quantization")
    )
    return {"gradients": gradients[0], "quantization": (lost or [{"operands": {}}])[0]} if gradients else None


def _as_list(errors: np.ndarray) -> list[list[float | None]]:
    """Returns errors [L, E] as lists, with None for NaN."""
    return [[None if np.isnan(e) else float(e) for e in row] for row in errors]


def lines(results: dict[str, Any], unit: str = "nats a byte") -> Sequence[str]:
    """Returns the lines that `moax train --recipes` prints for what `train` returned."""
    text = [f"{'run':24} {'step':>6}  held-out loss, {unit}"]
    for run in results["held_out"]:
        last = f"{run['steps'][-1]:>6}  {run['losses'][-1]:.4f}" if run["steps"] else "     -  not begun"
        text.append(f"{run['recipe'] + '-seed' + str(run['seed']):24} {last}")
    for recipe in results["recipes"][1:]:
        rows = [gap for gap in results["gaps"] if gap["recipe"] == recipe]
        if rows:
            last = rows[-1]
            spread = (
                "" if last["between_seeds"] is None else f"; seeds of {last['against']} {last['between_seeds']:.4f}"
            )
            text.append(f"{recipe} less {last['against']} at step {last['step']}: {last['mean']:+.4f}{spread}")
    for found in results["gradients"]:
        each = ", ".join(f"{n} {p['median']:.1%} (most {p['most']:.1%})" for n, p in found["projections"].items())
        text.append(f"gradients of {found['recipe']} against float32, median over experts: {each}")
    for found in results["quantization"]:
        shares = {
            name: [sum(of[what]) / max(1, sum(of["values"])) for what in ("underflow", "saturated")]
            for name, of in found["operands"].items()
        }
        each = ", ".join(f"{name} {under:.2%} and {over:.2%}" for name, (under, over) in shares.items())
        text.append(f"values of {found['recipe']} that become 0, and the largest of the format: {each}")
    return [*text, f"curves                   {results['folder']}/arms.png"]
