"""`python -m lm train --recipes A,B --seeds N`: runs that differ in the recipe or the seed alone.

Runs of one seed begin with the same weights and read the same batches. They train one after the other, all recipes of a
seed before the next seed. Every run is a folder OUT/NAME/RECIPE-seedS with checkpoints of its own, so that the whole
can stop at any step and go on later. A run whose metrics reach its last step needs its checkpoints no more.
OUT/NAME/arms.json has the settings, results.json and arms.png the results.

error[l, e] = |d - d32| / |d32|        d: the gradient of one projection of expert e, d32: the same in float32
underflow   a value that is not 0 and becomes 0        saturated   a value that becomes the largest of its format
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, UInt8

import moax
from lm import loop, plots
from lm import model as lm
from lm import run as runs
from lm import step as steps
from lm.config import TrainConfig, check_batch
from lm.data import load
from lm.report import Report
from moax import Format, MoEParams, Recipe, ops
from moax.program import mesh_over_devices
from moax.recipe import RECIPES, get_recipes

PROBED = 1 << 12  # the most tokens of the batch whose gradients are compared
PROJECTIONS = ("gate", "up", "down")
LOST = ("underflow", "saturated")
# The programs of gradients run once, so XLA need not time its own kernels for each of their products: cuBLAS has one.
ONCE = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


@dataclasses.dataclass(frozen=True)
class Arms:
    """The settings of an experiment.

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
        """The folder of the experiment."""
        return Path(self.config.out, self.config.name)

    @property
    def runs(self) -> dict[tuple[str, int], tuple[TrainConfig, runs.Run]]:
        """{(recipe, seed): (settings, files)} of each run, in the order in which they train."""
        found, first = {}, self.config.seed
        for seed, recipe in itertools.product(range(first, first + self.seeds), self.recipes):
            how = dict(out=str(self.folder), name=f"{recipe}-seed{seed}", recipe=None if recipe == "none" else recipe)
            config = dataclasses.replace(self.config, **how, seed=seed)
            found[recipe, seed] = config, runs.Run(self.folder / config.name)
        return found


def find(out: str, name: str | None) -> Path | None:
    """Returns the settings' file of the experiment `name`, or of the newest one; None where there is none."""
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

    `resume` continues the runs of the folder; without it, a taken name becomes NAME-2. `report` makes the report of
    each run. The result is the contents of results.json: `held_out` has the losses of each run, `gaps` is the result of
    `find_gaps`, and `gradients` has the results of `probe` for the last checkpoint of each recipe's first seed, or
    those of results.json where that checkpoint is gone.

    Raises:
      ValueError: as `loop.train`, or several processes run it.
    """
    if jax.process_count() > 1:
        raise ValueError(f"--recipes in {jax.process_count()} processes; give the runs one process")
    load(arms.config.text, arms.config.seq)
    check_batch(arms.config, mesh_over_devices(arms.config.mesh))
    if not resume:
        arms = dataclasses.replace(arms, config=runs.create(arms.config))
    settings = {"recipes": arms.recipes, "seeds": arms.seeds, "config": arms.config.to_json()}
    (arms.folder / "arms.json").write_text(json.dumps(settings, indent=2) + "\n")
    compiled, interrupted = functools.cache(steps.build), False

    def build(config: TrainConfig, mesh) -> steps.Program:  # one program for runs that differ in their seed alone
        program = compiled(dataclasses.replace(config, seed=0, name="arm"), mesh)
        return dataclasses.replace(program, init=steps.jit_init(config, mesh))

    for config, run in arms.runs.values():
        evaluated = [row["step"] for row in run.rows("held_out_loss")]
        if max([_last_checkpoint(run), *evaluated]) >= config.steps:
            continue
        begun = run.config.is_file()
        if run.path.is_dir() and not begun:  # It ended while it made its folder.
            run.path.rmdir()
        interrupted = loop.train(config, resume=begun, report=report(), on_step=on_step, build=build).interrupted
        if interrupted:
            break
    path = arms.folder / "results.json"
    earlier = json.loads(path.read_text())["gradients"] if path.is_file() else []
    known, results = {row["recipe"]: row for row in earlier}, {}
    for probed in (False, True):  # The losses are safe before gradients are computed.
        if probed:
            known |= {row["recipe"]: row for row in map(functools.partial(_probe_arm, arms), arms.recipes) if row}
        results = compare(arms, [known[recipe] for recipe in arms.recipes if recipe in known])
        results["interrupted"] = interrupted
        path.write_text(json.dumps(results, indent=2) + "\n")
        plots.draw_experiment(results, arms.folder / "arms.png")
    return results


def _last_checkpoint(run: runs.Run) -> int:
    """Returns the number of updates of a run's newest checkpoint; -1 where it has none."""
    names = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    return max((int(path.name) for path in names if path.name.isdecimal()), default=-1)


def compare(arms: Arms, gradients: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what is known of the runs, as a dict that JSON can hold."""
    losses = {
        key: {row["step"]: row["held_out_loss"] for row in run.rows("held_out_loss")}
        for key, (_, run) in arms.runs.items()
    }
    return {
        "name": arms.config.name,
        "folder": str(arms.folder),
        "recipes": arms.recipes,
        "seeds": arms.seeds,
        "dtype": arms.config.dtype,
        "held_out": [
            {"recipe": recipe, "seed": seed, "steps": sorted(found), "losses": [found[s] for s in sorted(found)]}
            for (recipe, seed), found in losses.items()
        ],
        "gaps": [gap for recipe in arms.recipes[1:] for gap in find_gaps(recipe, arms.recipes[0], losses)],
        "gradients": gradients,
    }


def find_gaps(recipe: str, base: str, losses: dict[tuple[str, int], dict[int, float]]) -> list[dict[str, Any]]:
    """Returns by how much a recipe's loss exceeds that of `base`, for each step at which a seed of both was evaluated.

    `gaps` has the difference of each seed, and `mean` their mean. `between_seeds` is the largest loss of `base` less
    the smallest, or None for one seed.
    """
    found, seeds = [], sorted({seed for _, seed in losses})
    pairs = [(losses[recipe, seed], losses[base, seed]) for seed in seeds]
    for step in sorted(set[int]().union(*(ours.keys() & theirs.keys() for ours, theirs in pairs))):
        gaps = [ours[step] - theirs[step] for ours, theirs in pairs if step in ours and step in theirs]
        of_base = [theirs[step] for _, theirs in pairs if step in theirs]
        between = max(of_base) - min(of_base) if len(of_base) > 1 else None
        found.append(
            dict(recipe=recipe, against=base, step=step, mean=float(np.mean(gaps)), gaps=gaps, between_seeds=between)
        )
    return found


def _probe_arm(arms: Arms, recipe: str) -> dict[str, Any] | None:
    """Returns the gradient errors and the lost values of one recipe; None where its first seed has no checkpoint."""
    config, run = arms.runs[recipe, arms.config.seed]
    step = _last_checkpoint(run)
    if step < 0:
        return None
    corpus, mesh = load(config.text, config.seq), mesh_over_devices(config.mesh)
    config = _with_few_tokens(config, mesh)
    with jax.set_mesh(mesh), runs.Checkpoints(run.checkpoints) as checkpoints:
        like, batch = steps.jit_update(config, mesh)[1]
        state = checkpoints.restore(step, like)
        data = jax.device_put(corpus.batch(config.seed, step, config.batch, config.seq), batch.sharding)
        errors, lost = probe(state, data, config)
    projections = {
        name: {
            "median": float(np.nanmedian(e)),
            "most": float(np.nanmax(e)),
            "by_expert": [[None if np.isnan(v) else float(v) for v in row] for row in e],
        }
        for name, e in errors.items()
    }
    return {"recipe": recipe, "seed": config.seed, "step": step, "projections": projections, "operands": lost}


def _with_few_tokens(config: TrainConfig, mesh: jax.sharding.Mesh) -> TrainConfig:
    """Returns the settings with the largest part of the batch that has at most `PROBED` tokens, in one microbatch.

    The probe computes gradients in float32, for which no kernel runs. Where each part that divides over the mesh has
    more tokens, it is the smallest; where there is none, the batch is whole.
    """
    devices = math.prod(mesh.shape.get(name, 1) for name in ("dp", "fsdp", "ep"))
    parts = [part for part in range(devices, config.batch + 1, devices) if config.batch % part == 0]
    fits = [part for part in parts if part * config.seq <= PROBED] or parts[:1]
    return dataclasses.replace(config, batch=fits[-1], microbatches=1) if fits else config


def probe(
    state: steps.TrainState, batch: UInt8[Array, "B S1"], config: TrainConfig
) -> tuple[dict[str, Float[np.ndarray, "L E"]], dict[str, dict[str, list[int]]]]:
    """Returns the errors of the gradients of a state, on the mesh that is set, and the values that its recipe loses.

    The errors are [L, E] by projection, NaN for an expert without a token; the values are those of `_lost_values`.
    """
    got, xs, dys = _gradients(state, batch, config)
    want = _gradients(state, batch, _in_float32(config))[0]

    @jax.jit
    def norms(got, want):
        off = [a - b for a, b in zip(got, want, strict=True)]
        return [(jnp.sqrt((wi**2).sum((2, 4))), jnp.sqrt((wo**2).sum((2, 3)))) for wi, wo in (off, want)]

    (wi, wo), (wi_all, wo_all) = jax.device_get(norms(got, want))
    with np.errstate(invalid="ignore", divide="ignore"):
        each = [*np.moveaxis(wi / wi_all, -1, 0), wo / wo_all]  # without a gate: up and down
    names = PROJECTIONS[-len(each) :]
    errors = {name: np.where(np.isfinite(e), e, np.nan) for name, e in zip(names, each, strict=True)}
    return errors, _lost_values(state, xs, dys, config)


def _in_float32(config: TrainConfig) -> TrainConfig:
    """Returns the settings of the gradients to compare with, which are one program for all recipes."""
    return dataclasses.replace(config, recipe=None, dtype="float32", name="float32")


@partial(jax.jit, static_argnames="config", compiler_options=ONCE)
def _gradients(state: steps.TrainState, batch, config: TrainConfig):
    """Returns the gradients of (wi, wo), the inputs [L, B, S, H] of the MoEs and the gradients of their outputs."""
    tokens = batch.astype(jnp.int32)

    def block(x, *args, **keywords):
        y, stats = moax.moe(x, *args, **keywords)
        return y, (stats, x)

    def loss(moe: MoEParams[Array], added):
        params = dataclasses.replace(state.params, layers=dataclasses.replace(state.params.layers, moe=moe))
        logits, (stats, xs) = lm.forward(params, state.router_bias, tokens[:, :-1], config, block, added=added)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return entropy + stats.aux_loss.sum() + stats.z_loss.sum(), xs

    shape = (config.model.num_layers, batch.shape[0], batch.shape[1] - 1, config.model.d_model)
    # A GPU would compute float32 products in TF32, which errs by as much as bfloat16 may.
    with jax.default_matmul_precision("highest" if config.dtype == "float32" else "default"):
        grads, xs = jax.grad(loss, (0, 1), has_aux=True)(state.params.layers.moe, jnp.zeros(shape, config.dtype))
    return (grads[0].wi, grads[0].wo), xs, grads[1]


def _lost_values(
    state: steps.TrainState, xs: Float[Array, "L B S H"], dys: Float[Array, "L B S H"], config: TrainConfig
) -> dict[str, dict[str, list[int]]]:
    """Counts the values of each operand that the recipe of a run loses, as {operand: {"underflow": [of each layer]}}.

    The operands are x and a (the rows of both products), dy and dh (their gradients), wi and wo, in the blocks of
    forward and dgrad. They are computed in float32 and on one device, for the inputs xs of the MoEs and the gradients
    dys of their outputs.
    """
    model, (first, last) = config.model, get_recipes(config.recipe).both
    if {first, last} == {Recipe(None, None, None)}:
        return {}
    moe_config, formats = model.moe(), dict(x=first.x, a=last.x, dy=last.dy, dh=first.dy, wi=first.w, wo=last.w)

    @partial(jax.jit, compiler_options=ONCE)
    def count(moe: MoEParams[Array], x, dy, bias):
        x, dy = (v.reshape(-1, model.d_model).astype(jnp.float32) for v in (x, dy))
        routing = moax.route(ops.router_logits(x, moe.router), moe_config.router, moe_config.top_k, bias)
        rows, plan = ops.permute(x, routing.experts, num_groups=model.num_experts)
        d_rows, _ = ops.permute(dy, routing.experts, num_groups=model.num_experts)
        row_weights = jnp.zeros(len(rows)).at[plan.scatter_idx].set(routing.weights, mode="drop")
        h = ops.grouped_matmul(rows, moe.wi, plan.group_sizes)
        a, pull = jax.vjp(lambda h: ops.activate(h, moe_config.activation, moe_config.activation_limit), h)
        d_a = ops.grouped_matmul(d_rows, moe.wo.swapaxes(1, 2), plan.group_sizes)
        (d_h,) = pull(d_a * row_weights[:, None])
        values = dict(x=rows, a=a, dy=d_rows, dh=d_h.reshape(len(rows), -1))
        values |= dict(wi=moe.wi.reshape(*moe.wi.shape[:2], -1), wo=moe.wo)
        return {name: count_lost(values[name], format) for name, format in formats.items() if format is not None}

    layers, found = jax.device_get((state.params.layers.moe, xs, dys, state.router_bias)), []
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ())):  # no mesh
        for i in range(model.num_layers):
            found.append(jax.device_get(count(*jax.tree.map(lambda v, i=i: jnp.asarray(v[i]), layers))))
    return jax.tree.map(lambda *counts: [int(n) for n in counts], *found)


def count_lost(value: Float[Array, "..."], format: Format) -> dict[str, Array]:
    """Counts the values that are not 0, and those that a format loses: of rows [N, C], or of a weight [E, K, C]."""
    block = format.row_block(2, "columns") if value.ndim == 2 else format.weight_block(3, "rows")
    dtype = jnp.float8_e4m3fn if format.dtype == "e4m3" else jnp.float8_e5m2
    data = lax.bitcast_convert_type(ops.quantize(value, format, block=block).data, dtype).astype(jnp.float32)
    real = value != 0
    return dict(values=real.sum(), underflow=(real & (data == 0)).sum(), saturated=(jnp.abs(data) == format.max).sum())


def lines(results: dict[str, Any]) -> list[str]:
    """Returns the lines that an experiment prints for the result of `train`."""
    text = [f"{'run':24} {'step':>6}  held-out loss, nats a byte"]
    for run in results["held_out"]:
        last = f"{run['steps'][-1]:>6}  {run['losses'][-1]:.4f}" if run["steps"] else "     -  not begun"
        text.append(f"{run['recipe'] + '-seed' + str(run['seed']):24} {last}")
    for last in {gap["recipe"]: gap for gap in results["gaps"]}.values():
        spread = "" if last["between_seeds"] is None else f"; seeds of {last['against']} {last['between_seeds']:.4f}"
        text.append(f"{last['recipe']} less {last['against']} at step {last['step']}: {last['mean']:+.4f}{spread}")
    for found in results["gradients"]:
        each = ", ".join(f"{n} {p['median']:.1%} (most {p['most']:.1%})" for n, p in found["projections"].items())
        text.append(f"gradients of {found['recipe']} against float32, median over experts: {each}")
        if found["operands"]:
            shares = {n: [sum(of[c]) / max(1, sum(of["values"])) for c in LOST] for n, of in found["operands"].items()}
            each = ", ".join(f"{n} {under:.2%} and {over:.2%}" for n, (under, over) in shares.items())
            text.append(f"values of {found['recipe']} that become 0, and the largest of the format: {each}")
    return [*text, f"curves                   {results['folder']}/arms.png"]
