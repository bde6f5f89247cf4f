"""This script compiles a scan of qwen3-30b layers for H200s that this machine does not have, and reads its memory.

    saved = (temp(4 layers) - temp(2 layers)) / 2 - x        temporary = temp(4 layers) - 4 (saved + x)

`make check-memory` runs it. It prints a row for each case beside the word of `moax estimate`, and with `--out` writes
the rows. It exits with 1 where a program of the default options keeps more than the limits below, where the estimate
of what a layer saves is off by more than a tenth, or where a program runs a kernel twice.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from h200 import make_operands, mesh_of_h200s, save

import moax
from moax.estimate import estimate
from moax.models import MODELS

CONFIG, TOKENS, FACTOR = MODELS["qwen3-30b"].config, 8192, 1.25
X_BYTES = TOKENS * CONFIG.d_model * 2
SAVED_LIMIT, TEMPORARY_LIMIT = 0.55e9, 1.2e9
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
KERNEL = re.compile(r'kernel_hash = ("(?:[^"\\]|\\.)*")')


def compile_scan(ep: int, layers: int, **options):
    """Returns the compiled forward and backward of a scan of layers, for one of ep GPUs."""
    with jax.set_mesh(mesh_of_h200s((ep,), ("ep",))):
        params, x = make_operands(CONFIG, ep * TOKENS, layers=layers)

        def loss(params, x):
            def layer(x, params):
                return x + moax.moe(x, params, CONFIG, kernels="hopper", **options)[0], None

            return jnp.sum(jnp.square(jax.lax.scan(layer, x, params)[0].astype(jnp.float32)))

        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()


def count_repeated(text: str) -> int:
    """Returns how many kernels an optimized program runs twice on the same operands: to use a result, and to store it.

    XLA fuses a kernel with the update that stores its result in the array of a scan, and keeps the kernel too where
    anything else reads the result.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?%(\S+) .*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    stored = {name: KERNEL.findall(body) for name, body in bodies.items() if " dynamic-update-slice(" in body}
    called = [(body, name) for body in bodies.values() for name in re.findall(r"calls=%([^\s,]+)", body)]
    return sum(kernel in KERNEL.findall(body) for body, name in called for kernel in stored.get(name, ()))


def measure(recipe: str | None, ep: int, factor: float | None, save_rows: bool) -> dict:
    """Returns the row of one case."""
    options = dict(recipe=recipe, exchange="all_to_all", buffer_factor=factor, save_rows=save_rows)
    programs = [compile_scan(ep, layers, **options) for layers in (2, 4)]
    two, four = (program.memory_analysis().temp_size_in_bytes for program in programs)
    saved = (four - two) / 2 - X_BYTES
    guess = estimate(CONFIG, {"ep": ep}, TOKENS, layers=1, hardware="h200", **options)
    return {
        "case": f"{recipe or 'bf16'}, ep {ep}, buffer_factor {factor}, save_rows {save_rows}",
        "saved_bytes": round(saved),
        "estimated_bytes": guess.memory.saved - X_BYTES,
        "temporary_bytes": round(four - 4 * (saved + X_BYTES)),
        "saved_bytes_of_48_layers": round(48 * (saved + X_BYTES)),
        "kernels_run_twice": count_repeated(programs[0].as_text()),
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
        failed += row["kernels_run_twice"] > 0
    save(args.out, rows)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
