"""Bytes that the weights of one block put on the wire in a training step, from the compiled program: nothing is timed.

.venv/bin/python benchmarks/wire.py        writes benchmarks/results/wire.json
"""

import datetime
import json
import os
import subprocess
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp

import moax
from moax import inspect

SHAPE, TOKENS = (2, 4), 8192
MODELS = {
    "mixtral-8x7b": moax.MoEConfig(4096, 14336, 8, 2),
    "qwen3-30b": moax.MoEConfig(2048, 768, 128, 8),
    "gpt-oss-120b": moax.MoEConfig(2880, 2880, 128, 4, activation="swiglu_oai", use_bias=True),
}


def measure(model: str, recipe: str | None) -> dict:
    """One row: weight bytes a device receives (gathers) and sends (reduce-scatters) over fsdp, forward and backward."""
    mesh = jax.make_mesh(SHAPE, ("fsdp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = inspect.inspect_block(
        MODELS[model], tokens=TOKENS, recipe=recipe, exchange="all_gather", engine="auto", mesh=mesh, dtype=jnp.bfloat16
    )
    gathers = inspect.weight_gathers(found, axes="fsdp")
    return {
        "model": model,
        "recipe": recipe,
        "gathered": inspect.total_bytes(gathers),
        "gathered_dtypes": sorted({c.dtype for c in gathers}),
        "reduce_scattered": inspect.total_bytes(found, kind="reduce-scatter", axes="fsdp"),
    }


def main() -> None:
    root = Path(__file__).parent.parent
    sha = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = [measure(model, recipe) for model in MODELS for recipe in (None, "fp8_block", "mxfp8")]
    result = {
        "what": "bytes a device moves for the weights of one MoE block in one training step (forward and backward)",
        "how": "the optimized program for 8 emulated CPU devices; bf16 activations, float32 parameters",
        "mesh": dict(zip(("fsdp", "ep"), SHAPE, strict=True)),
        "tokens": TOKENS,
        "versions": {"moax": moax.__version__, "jax": jax.__version__},
        "git_sha": sha,
        "date": datetime.date.today().isoformat(),
        "command": ".venv/bin/python benchmarks/wire.py",
        "rows": rows,
    }
    path = root / "benchmarks" / "results" / "wire.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
