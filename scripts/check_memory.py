"""This script compiles a scan of qwen3-30b layers for H200s that this machine does not have, and reads its memory.

    saved = (temp(4 layers) - temp(2 layers)) / 2 - x        temporary = temp(4 layers) - 4 (saved + x)

`make check-memory` runs it. It prints a row for each case beside the word of `moax estimate`, and with `--out` writes
the rows. It exits with 1 where a program of the default options keeps more than the limits below, or where the estimate
of what a layer saves is off by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from check_sass import mesh_of_h200s
from jax.sharding import NamedSharding, PartitionSpec

import moax
from moax.estimate import estimate
from moax.models import MODELS

CONFIG, TOKENS, FACTOR = MODELS["qwen3-30b"].config, 8192, 1.25
X_BYTES = TOKENS * CONFIG.d_model * 2
SAVED_LIMIT, TEMPORARY_LIMIT = 0.55e9, 1.4e9
RECIPE = "fp8_block"
CASES = (
    (RECIPE, 8, None, True),
    (RECIPE, 8, FACTOR, True),
    (RECIPE, 8, FACTOR, False),
    (RECIPE, 64, FACTOR, True),
    (None, 1, FACTOR, True),
    (None, 8, FACTOR, True),
    (None, 8, FACTOR, False),
)


def temporary_bytes(ep: int, layers: int, **options) -> int:
    """Returns the bytes beside arguments and results of forward and backward of a scan of layers, on one of ep GPUs."""
    mesh = mesh_of_h200s((ep,), ("ep",))

    def place(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: moax.init(jax.random.key(0), CONFIG, dtype=jnp.bfloat16))
        specs = moax.param_specs(CONFIG)
        params = jax.tree.map(lambda p, s: place((layers, *p.shape), p.dtype, None, *s), shapes, specs)
        x = place((ep * TOKENS, CONFIG.d_model), jnp.bfloat16, "ep")

        def loss(params, x):
            def layer(x, params):
                return x + moax.moe(x, params, CONFIG, kernels="hopper", **options)[0], None

            return jnp.sum(jnp.square(jax.lax.scan(layer, x, params)[0].astype(jnp.float32)))

        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def measure(recipe: str | None, ep: int, factor: float | None, save_rows: bool) -> dict:
    """Returns the row of one case."""
    options = dict(recipe=recipe, exchange="all_to_all", buffer_factor=factor, save_rows=save_rows)
    two, four = (temporary_bytes(ep, layers, **options) for layers in (2, 4))
    saved = (four - two) / 2 - X_BYTES
    guess = estimate(CONFIG, {"ep": ep}, TOKENS, layers=1, hardware="h200", **options)
    return {
        "case": f"{recipe or 'bf16'}, ep {ep}, buffer_factor {factor}, save_rows {save_rows}",
        "saved_bytes": round(saved),
        "estimated_bytes": guess.memory.activations - X_BYTES,
        "temporary_bytes": round(four - 4 * (saved + X_BYTES)),
        "saved_bytes_of_48_layers": round(48 * (saved + X_BYTES)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the rows to this file, as JSON")
    args = parser.parse_args()
    rows, failed = [], 0
    for case in CASES:
        rows.append(row := measure(*case))
        off = row["estimated_bytes"] / row["saved_bytes"] - 1
        print(
            f"{row['case']:53} saved {row['saved_bytes'] / 1e9:5.2f} GB a layer (estimate {off:+.0%}), "
            f"temporary {row['temporary_bytes'] / 1e9:5.2f} GB, "
            f"48 layers {row['saved_bytes_of_48_layers'] / 1e9:5.1f} GB",
            flush=True,
        )
        over = row["saved_bytes"] > SAVED_LIMIT or row["temporary_bytes"] > TEMPORARY_LIMIT
        failed += abs(off) > 0.1 or (case[0] == RECIPE and case[2:] == (FACTOR, True) and over)
    if args.out:
        git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
        about = {
            "device": "compiled for NVIDIA H200s that this machine does not have",
            "versions": {"jax": jax.__version__, "python": platform.python_version()},
            "git": git,
            "command": shlex.join(["python", "scripts/check_memory.py", "--out", str(args.out)]),
        }
        args.out.write_text(json.dumps(about | {"rows": rows}, indent=2) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
