"""`python -m lm probe RUN [RUN ...]`: the error of the gradients of each expert, in the newest checkpoint of a run.

    error[l, e] = |d - d32| / |d32|        d: the gradient of one projection of expert e, d32: the same in float32

The gradients are those of the whole model, so they hold the rounding of all layers and of attention's projections. A
router that chooses another expert for a token, because of a rounding in the layer before, counts as an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from lm import run as runs
from lm import step as steps
from lm.config import TrainConfig, mesh_over_devices
from lm.data import load

PROBED = 1 << 12  # the most tokens of the batch, since no kernel computes gradients in float32
PROJECTIONS = ("gate", "up", "down")


def main(argv: list[str]) -> int:
    """Prints the errors of the runs that `argv` names, and writes gradients.json into the folder of each. Returns 0."""
    parser = argparse.ArgumentParser("python -m lm probe", description=__doc__)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="folder of a run that has a checkpoint",
    )
    for folder in parser.parse_args(argv).runs:
        results = probe_run(folder)
        (folder / "gradients.json").write_text(json.dumps(results, indent=2) + "\n")
        errors = []
        for name, error in results["errors"].items():
            errors.append(f"{name} {error['median']:.2e} (most {error['most']:.2e})")
        run = f"{results['recipe']}, seed {results['seed']}, step {results['step']}"
        print(f"{run}: {', '.join(errors)}")
    return 0


def probe_run(folder: Path) -> dict[str, Any]:
    """Returns the errors of a run's newest checkpoint for its next batch, as a dict that JSON can hold.

    Raises:
      ValueError: the folder has no run, or the run has no checkpoint.
    """
    if not runs.Run(folder).config.is_file():
        raise ValueError(f"{folder} has no config.json; give the folder of a run")
    config = runs.read_config(str(folder.parent), folder.name)
    corpus = load(config.text, config.seq)
    mesh = mesh_over_devices(config.mesh)
    config = with_few_tokens(
        config,
        math.prod(mesh.shape.get(name, 1) for name in ("dp", "fsdp", "ep")),
    )
    with jax.set_mesh(mesh), runs.Checkpoints(runs.Run(folder).checkpoints) as checkpoints:
        if (step := checkpoints.latest()) is None:
            raise ValueError(f"{folder} has no checkpoint; Ctrl-C and the end of a run save one")
        like, rows = steps.jit_update(config, mesh)[1]
        state = checkpoints.restore(step, like)
        batch = jax.device_put(
            corpus.batch(config.seed, step, config.batch, config.seq),
            rows.sharding,
        )
        errors = {
            name: {
                "median": float(np.nanmedian(e)),
                "most": float(np.nanmax(e)),
                "by_expert": [[None if np.isnan(v) else float(v) for v in row] for row in e],
            }
            for name, e in probe(state, batch, config).items()
        }
    return {
        "recipe": config.recipe or "none",
        "dtype": config.dtype,
        "seed": config.seed,
        "step": step,
        "errors": errors,
    }


def with_few_tokens(config: TrainConfig, devices: int) -> TrainConfig:
    """Returns the settings with the largest part of the batch that has at most `PROBED` tokens, in one microbatch.

    Where each part that divides over the devices has more tokens, it is the smallest.
    """
    parts = [part for part in range(devices, config.batch + 1, devices) if config.batch % part == 0]
    fits = [part for part in parts if part * config.seq <= PROBED] or parts[:1]
    return dataclasses.replace(config, batch=fits[-1], microbatches=1)


def probe(
    state: steps.TrainState, batch: UInt8[Array, "B S1"], config: TrainConfig
) -> dict[str, Float[np.ndarray, "L E"]]:
    """Returns the errors [L, E] of each projection, NaN for an expert without a token."""
    got = _gradients(state, batch, config)
    want = _gradients(
        state,
        batch,
        dataclasses.replace(config, recipe=None, dtype="float32", name="float32"),
    )

    @jax.jit
    def norms(got, want):
        off = [a - b for a, b in zip(got, want, strict=True)]

        def norms_of(wi, wo):
            return jnp.sqrt((wi**2).sum((2, 4))), jnp.sqrt((wo**2).sum((2, 3)))

        return [norms_of(*off), norms_of(*want)]

    (wi, wo), (wi_all, wo_all) = jax.device_get(norms(got, want))
    with np.errstate(invalid="ignore", divide="ignore"):
        each = [*np.moveaxis(wi / wi_all, -1, 0), wo / wo_all]  # without a gate: up and down
    names = PROJECTIONS[-len(each) :]
    return {name: np.where(np.isfinite(e), e, np.nan) for name, e in zip(names, each, strict=True)}


# These programs run once, so XLA need not time its own kernels for each of their matmuls: cuBLAS has one.
@partial(
    jax.jit, static_argnames="config",
    compiler_options={"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
)  # fmt: skip
def _gradients(state: steps.TrainState, batch, config: TrainConfig):
    """Returns the gradients of wi [L, E, H, G, F] and wo [L, E, F, H]."""
    # A GPU would compute float32 matmuls in TF32, which errs by as much as bfloat16 may.
    with jax.default_matmul_precision("highest" if config.dtype == "float32" else "default"):
        moe = steps.gradients(state, batch, config)[1].layers.moe
    return moe.wi, moe.wo
