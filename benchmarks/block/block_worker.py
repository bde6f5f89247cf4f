"""This program measures one block in a process of its own: python3 -m benchmarks.block.block_worker REQUEST

REQUEST is JSON: {"config", "recipe", "tokens": [..], "kernels", "buffer_factor", "repeats", "errors"}. The program
compiles, prints READY, waits for a line on stdin, and measures. It prints a line of JSON for each number of tokens:
{"tokens", "memory", "fwd", "fwd+bwd"}, or {"tokens", "note"} with the reason of a failure. With `errors` each fwd+bwd
has the errors of the block against float32.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp

import moax
from benchmarks.block import bits, errors, idle, recipes, stages
from benchmarks.block.worker import READY
from benchmarks.report import HOPPER, why
from moax import backend
from moax.tune.timing import Repeats, call_time, kernel_time

TOP = 40  # The answer lists at most this many kernels.


def main(argv: list[str]) -> int:
    """Measures the request `argv[0]`, and prints the answers. Returns 0."""
    request = json.loads(argv[0])
    router = moax.RouterConfig(**request["config"].pop("router"))
    config = moax.MoEConfig(**request["config"], router=router)
    recipe, kept = recipes.find(request["recipe"])
    repeats = Repeats(**request["repeats"])
    draw = functools.partial(moax.init, jax.random.key(0), config, dtype=jnp.bfloat16)
    shapes = jax.eval_shape(draw)

    how = dict(recipe=recipe, kernels=request["kernels"], buffer_factor=request["buffer_factor"])
    keep = functools.partial(moax.quantize_params, config=config, **how) if kept else lambda params: None
    quantized_shapes = jax.eval_shape(keep, shapes)

    def block(x, params, quantized):
        return moax.moe(x, params, config, quantized=quantized, **how)[0]

    answers: dict[int, dict[str, Any]] = {tokens: {"tokens": tokens} for tokens in request["tokens"]}
    programs: dict[int, dict[str, Any]] = {}
    for tokens, answer in answers.items():
        try:
            programs[tokens], answer["memory"] = build(block, config, recipe, shapes, quantized_shapes, tokens)
        except Exception as error:  # The other numbers of tokens may compile and fit.
            answer["note"] = why(error)
    compare = errors.build(block, config, shapes, quantized_shapes) if request["errors"] else None
    print(READY, flush=True)
    sys.stdin.readline()
    params = draw()
    quantized = keep(params)
    for tokens, program in programs.items():
        try:
            answers[tokens]["memory"]["peak_bytes"] = peak_bytes(program, params, quantized, tokens, config.d_model)
        except Exception as error:
            answers[tokens]["note"] = why(error)
    found = compare(*inputs(errors.TOKENS, config.d_model), params, quantized) if compare else None
    for tokens, answer in answers.items():
        last = tokens == max(answers)  # CUPTI by itself does not work after JAX's profiler
        try:
            if "note" not in answer:
                x, dy = inputs(tokens, config.d_model)
                args = {"fwd": (x, params, quantized), "fwd+bwd": (x, params, quantized, dy)}
                for name, operands in args.items():
                    answer[name] = measure(programs[tokens][name], operands, repeats)
                    answer[name]["bits"] = bits.compare_runs(programs[tokens][name], operands)
                for name, operands in args.items() if last and backend.platform() == "gpu" else ():
                    answer[name]["back_to_back"] = idle.back_to_back(programs[tokens][name], operands)
                answer["fwd+bwd"] |= {"errors": found} if found else {}
        except Exception as error:
            answer["note"] = why(error)
        print(json.dumps(answer), flush=True)
    return 0


def inputs(tokens: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns x and dy, both [T, H] in bf16."""
    keys = jax.random.split(jax.random.key(1))
    return tuple(jax.random.normal(key, (tokens, width), jnp.bfloat16) for key in keys)  # pyrefly: ignore[bad-return]


def build(block, config, recipe, shapes, quantized, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns {direction: compiled program}, and the bytes that are known before a program runs."""

    def both(x, params, quantized, dy):
        y, pull = jax.vjp(functools.partial(block, quantized=quantized), x, params)
        return y, pull(dy)

    x = jax.ShapeDtypeStruct((tokens, config.d_model), jnp.bfloat16)
    saved = jax.eval_shape(
        lambda x, params, kept: jax.vjp(lambda *v: block(*v, kept), x, params)[1], x, shapes, quantized
    )
    programs = {
        "fwd": jax.jit(block).lower(x, shapes, quantized).compile(),
        "fwd+bwd": jax.jit(both).lower(x, shapes, quantized, x).compile(),
    }
    analysis: Any = programs["fwd+bwd"].memory_analysis()
    return programs, {
        "params_bytes": _nbytes(shapes),
        "saved_bytes": _nbytes(saved) - _nbytes((shapes, quantized)),
        "saved_needed_bytes": saved_needed(config, recipe, tokens),
        "compiled_bytes": {
            name: getattr(analysis, f"{name}_size_in_bytes", None) for name in ("argument", "output", "temp")
        },
    }


def peak_bytes(programs: dict[str, Any], params, quantized, tokens: int, width: int) -> int | None:
    """Returns the peak bytes of the process after one call with backward; None where JAX does not tell.

    A peak never falls. The call must therefore come before any timing, which holds several results, and after the calls
    with fewer tokens.
    """
    x, dy = inputs(tokens, width)
    jax.block_until_ready(programs["fwd+bwd"](x, params, quantized, dy))
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def measure(compiled, args: tuple, repeats: Repeats) -> dict[str, Any]:
    """Measures the time of a call, and on a GPU its kernels by stage."""
    text = compiled.as_text() or ""
    found: dict[str, Any] = {"us": call_time(compiled, args, repeats).us}
    found["path"] = path_of(text)
    if backend.platform() == "gpu":
        timing = kernel_time(compiled, args, Repeats(1, 3))
        found["kernel_us"] = timing.us if timing.kernels else None
        found["stages_us"], listed = stages.split(text, timing.kernels)
        found["kernels"] = listed[:TOP]
    return found


def path_of(text: str) -> str:
    """Returns the implementation that a compiled program runs, from its text."""
    return HOPPER if "mosaic_gpu_v2" in text else "xla"


def saved_needed(config, recipe: str | moax.Recipe | None, tokens: int) -> dict[str, int]:
    """Returns the bytes that backward needs, without padding: the sorted rows as wgrad reads them, and h = x wi."""
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
