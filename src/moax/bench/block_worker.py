"""One block in a process of its own: python3 -m moax.bench.block_worker REQUEST

REQUEST is JSON: {"config", "recipe", "tokens": [..], "kernels", "repeats"}. Prints a line of JSON for each number of
tokens: {"tokens", "memory", "fwd", "fwd+bwd"}, or a note that says why not.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp

import moax
from moax import backend
from moax.bench import stages
from moax.bench.report import why
from moax.bench.timing import Repeats, call_time, kernel_time

TOP = 40  # kernels that are listed


def main(argv: list[str]) -> int:
    """Prints what was measured of a request."""
    request = json.loads(argv[0])
    router = moax.RouterConfig(**request["config"].pop("router"))
    config = moax.MoEConfig(**request["config"], router=router)
    recipe = None if request["recipe"] == "none" else request["recipe"]
    repeats = Repeats(**request["repeats"])
    params = moax.init(jax.random.key(0), config, dtype=jnp.bfloat16)

    def block(x, params):
        return moax.moe(x, params, config, recipe=recipe, kernels=request["kernels"])[0]

    found: list[tuple[int, dict[str, Any], dict[str, tuple[Any, tuple]]]] = []
    for tokens in request["tokens"]:
        try:
            found.append((tokens, *first_call(block, config, recipe, params, tokens)))
        except Exception as error:  # one that does not fit leaves those that do
            print(json.dumps({"tokens": tokens, "note": why(error)}), flush=True)
    for tokens, memory, programs in found:
        try:
            measured: dict[str, Any] = {name: measure(*pair, repeats) for name, pair in programs.items()}
        except Exception as error:
            measured = {"note": why(error)}
        print(json.dumps({"tokens": tokens, "memory": memory, **measured}), flush=True)
    return 0


def first_call(block, config, recipe, params, tokens: int) -> tuple[dict[str, Any], dict[str, tuple[Any, tuple]]]:
    """(memory, {direction: (program, arguments)}), after one call with backward.

    Before any timing, which keeps several results at a time, and in ascending order: a peak can only grow.
    """
    keys = jax.random.split(jax.random.key(1))
    x, dy = (jax.random.normal(key, (tokens, config.d_model), jnp.bfloat16) for key in keys)

    def both(x, params, dy):
        y, pull = jax.vjp(block, x, params)
        return y, pull(dy)

    programs = {
        name: (jax.jit(f).lower(*args).compile(), args)
        for name, f, args in (("fwd", block, (x, params)), ("fwd+bwd", both, (x, params, dy)))
    }
    compiled, args = programs["fwd+bwd"]
    jax.block_until_ready(compiled(*args))
    statistics = jax.local_devices()[0].memory_stats() or {}
    analysis: Any = compiled.memory_analysis()
    saved = jax.eval_shape(lambda x, params: jax.vjp(block, x, params)[1], x, params)
    memory = {
        "peak_bytes": statistics.get("peak_bytes_in_use"),
        "params_bytes": _nbytes(params),
        "saved_bytes": _nbytes(saved) - _nbytes(params),
        "saved_needed_bytes": saved_needed(config, recipe, tokens),
        "compiled_bytes": {
            name: getattr(analysis, f"{name}_size_in_bytes", None) for name in ("argument", "output", "temp")
        },
    }
    return memory, programs


def measure(compiled, args: tuple, repeats: Repeats) -> dict[str, Any]:
    """Time of a call, and on a GPU its kernels by stage."""
    text = compiled.as_text() or ""
    found: dict[str, Any] = {"us": call_time(compiled, args, repeats).us}
    found["path"] = "mosaic" if "mosaic_gpu_v2" in text else "xla"
    if backend.platform() == "gpu":
        timing = kernel_time(compiled, args, Repeats(1, 3))
        found["kernel_us"] = timing.us if timing.kernels else None
        found["stages_us"], listed = stages.split(text, timing.kernels)
        found["kernels"] = listed[:TOP]
    return found


def saved_needed(config, recipe: str | None, tokens: int) -> dict[str, int]:
    """Bytes that backward needs of forward, without padding: the sorted rows as wgrad reads them, and h = x wi."""
    assigned = tokens * config.top_k
    form = moax.recipe.get_recipe(recipe).x
    if form is None:
        per_row = 2.0 * config.d_model
    else:
        per_row = config.d_model * (1 + (4 / form.block if form.block else 0))
    hidden = assigned * config.gates * config.d_ff * 2
    return {"rows": math.ceil(assigned * per_row), "hidden": hidden}


def _nbytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype"))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
