"""`python -m benchmarks wire` counts the bytes that the weights of one block put on the wire in a training step.

It reads the bytes from the compiled program for 8 emulated CPU devices, and times nothing.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import moax
from benchmarks import report
from lm import program
from moax import inspect
from moax.models import MODELS

RESULT = Path(__file__).parent.parent / "results" / "wire.json"
MESH = {"fsdp": 2, "ep": 4}
TOKENS = 8192
NAMES = ("mixtral-8x7b", "qwen3-30b", "gpt-oss-120b")
RECIPES = (None, "fp8_block", "mxfp8")


def run(out: str | None = None, sha: str | None = None, *, as_json: bool = False) -> int:
    """Compiles every model with every recipe, writes the file, and prints the rows."""
    program.emulate(8)
    rows = []
    for name, recipe in itertools.product(NAMES, RECIPES):
        text = f"wire: compiling {name}, recipe {recipe or 'none'}: {len(rows) + 1} of {len(NAMES) * len(RECIPES)}"
        print(text, file=sys.stderr, flush=True)
        rows.append(measure(name, recipe))
    head = report.header(["python", "-m", "benchmarks", "wire"], sha, {}) | {
        "what": "bytes a device moves for the weights of one MoE block in one training step (forward and backward)",
        "how": "the optimized program for 8 emulated CPU devices; bf16 activations, float32 parameters",
        "mesh": MESH,
        "tokens": TOKENS,
    }
    report.save(out or RESULT, head, rows)
    print(report.to_json(head, rows) if as_json else "\n".join(map(str, rows)))
    return 0


def measure(name: str, recipe: str | None) -> dict[str, Any]:
    """Returns a row: the bytes of gathers and reduce-scatters that a device sends over fsdp, forward and backward."""
    moved = inspect.inspect_block(
        MODELS[name].config,
        tokens=TOKENS,
        recipe=recipe,
        exchange="all_gather",
        mesh=moax.make_mesh(MESH),
        dtype=jnp.bfloat16,
    )
    gathers = inspect.weight_gathers(moved, axes="fsdp")
    return {
        "model": name,
        "recipe": recipe,
        "gathered": inspect.total_bytes(gathers),
        "gathered_dtypes": sorted({c.dtype for c in gathers}),
        "reduce_scattered": inspect.total_bytes(moved, kind="reduce-scatter", axes="fsdp"),
    }
