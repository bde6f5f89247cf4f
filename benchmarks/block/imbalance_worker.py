"""This program measures one layer by imbalance: python3 -m benchmarks.block.imbalance_worker REQUEST

REQUEST is JSON: the request of `block_worker` with a mesh, and {"pairs": [[imbalance, buffer_factor], ..]}. The routing
is an operand, so one compiled program serves all imbalances of a buffer_factor. The program compiles, prints READY,
waits for a line on stdin, and measures. It prints a line of JSON for each number of tokens and each pair: {"tokens",
"pair", "memory", "us", "path", "rounds", "dropped"}, or a note with the reason of a failure.
"""

from __future__ import annotations

import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var
from jaxtyping import Int

import moax
from benchmarks.block.block_worker import inputs, on_mesh, options_of, param_shapes, path_of, peak_bytes
from benchmarks.block.worker import READY
from benchmarks.report import why
from benchmarks.timing import Repeats, call_time
from moax.mesh.specs import named
from moax.sharding import param_specs, token_spec


def main(argv: list[str]) -> int:
    """Measures the request `argv[0]`, and prints the answers. Returns 0."""
    return on_mesh(json.loads(argv[0]), serve)


def serve(request: dict[str, Any], config: moax.MoEConfig, mesh) -> int:
    """Does the work of `main` while the mesh is set."""
    repeats = Repeats(**request["repeats"])
    factors = list(dict.fromkeys(factor for _, factor in request["pairs"]))
    keys = [(tokens, factor) for tokens in request["tokens"] for factor in factors]
    programs: dict[Any, Any] = {}
    notes: dict[Any, str] = {}
    with ThreadPoolExecutor() as threads:
        compiling = {}
        for key in keys:
            try:
                lowered, saved = lower(request, config, mesh, *key)
                compiling[key] = (threads.submit(lowered.compile), saved)
            except Exception as error:
                notes[key] = why(error)
        for key, (program, saved) in compiling.items():
            try:
                programs[key] = (program.result(), {"saved_bytes": saved})
            except Exception as error:  # The other programs may compile and fit.
                notes[key] = why(error)
    print(READY, flush=True)
    sys.stdin.readline()
    params = moax.init(jax.random.key(0), config, dtype=jnp.bfloat16)
    params = jax.device_put(params, named(mesh, param_specs(config)))
    temporary = {key: program.memory_analysis().temp_size_in_bytes for key, (program, _) in programs.items()}
    for key in sorted(programs, key=lambda key: temporary[key]):  # A peak never falls.
        try:
            program, memory = programs[key]
            jax.block_until_ready(program(*operands(config, mesh, params, key[0], 1.0)))
            memory |= {"temp_bytes": temporary[key], "peak_bytes": peak_bytes(mesh)}
        except Exception as error:
            notes[key] = why(error)
    for tokens in request["tokens"]:
        for imbalance, factor in request["pairs"]:
            answer: dict[str, Any] = {"tokens": tokens, "pair": [imbalance, factor]}
            try:
                if (tokens, factor) in notes:
                    answer["note"] = notes[tokens, factor]
                else:
                    program, memory = programs[tokens, factor]
                    args = operands(config, mesh, params, tokens, imbalance)
                    answer |= measure(program, args, repeats) | {"memory": memory}
            except Exception as error:
                answer["note"] = why(error)
            print(json.dumps(answer), flush=True)
    return 0


def lower(request: dict[str, Any], config: moax.MoEConfig, mesh, tokens: int, factor: float | None) -> tuple[Any, int]:
    """Returns the lowered program of forward and backward for T tokens of a device, and the saved bytes of a device.

    The saved bytes are those of the arrays that forward leaves to backward, without the arguments of the layer.
    """
    options = options_of(request) | {"buffer_factor": factor}

    def forward(x, params, experts):
        def layer(x, params):
            y, stats = moax.moe(x, params, config, routing=experts, **options)
            return y, (stats.rounds, stats.dropped)

        return jax.vjp(layer, x, params, has_aux=True)

    def both(x, params, experts, dy):
        y, pull, counts = forward(x, params, experts)
        return y, pull(dy), counts

    over = named(mesh, token_spec(moax.Axes()))
    total = tokens * mesh.size
    x = jax.ShapeDtypeStruct((total, config.d_model), jnp.bfloat16, sharding=over)
    experts = jax.ShapeDtypeStruct((total, config.top_k), jnp.int32, sharding=over)
    params, places = param_shapes(config, mesh), named(mesh, param_specs(config))
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(forward(*args)[1]))(x, params, experts).jaxpr
    kept: dict[Any, Any] = {var: var.aval for var in jaxpr.outvars if isinstance(var, Var) and var not in jaxpr.invars}
    saved = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in kept.values())
    # Gradients have the sharding of their parameters, as in a training step.
    placed = jax.jit(both, out_shardings=(over, (over, places), None))
    return placed.lower(x, params, experts, x), saved // mesh.size


def operands(config: moax.MoEConfig, mesh, params, tokens: int, imbalance: float) -> tuple:
    """Returns the operands of a program of `lower`; each device has T tokens of the same experts."""
    x, dy = inputs(config, mesh, tokens * mesh.size)
    experts = np.tile(choose_experts(config, dict(mesh.shape)["ep"], tokens, imbalance), (mesh.size, 1))
    return x, params, jax.device_put(experts, named(mesh, token_spec(moax.Axes()))), dy


def choose_experts(config: moax.MoEConfig, ranks: int, tokens: int, imbalance: float) -> Int[np.ndarray, "T K"]:
    """Returns experts that give rank 0 `imbalance` times the balanced load, T K / ranks, and the others equal parts.

    Within a rank the experts have equally many tokens. With 4 experts, K = 2, 2 ranks, 4 tokens and an imbalance of
    1.5, rank 0 has 6 of 8 assignments: the tokens choose (0, 2), (1, 0), (1, 3) and (0, 1).
    """
    of_rank, total = config.num_experts // ranks, tokens * config.top_k
    load = round(imbalance * total / ranks)
    if load > tokens * min(config.top_k, of_rank):
        raise ValueError(
            f"imbalance {imbalance} on {ranks} ranks: one rank has {of_rank} experts, and a token chooses "
            f"{config.top_k}; it must be at most {ranks * min(config.top_k, of_rank) / config.top_k:g}"
        )
    ends = np.arange(1, tokens + 1) * load // tokens  # assignments of rank 0 up to each token
    begins = np.concatenate([[0], ends[:-1]])
    other_experts = np.arange(of_rank, config.num_experts).reshape(-1, of_rank).T.reshape(-1)  # rank by rank in turn
    experts = np.empty((tokens, config.top_k), np.int32)
    for token, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        there = np.arange(token * config.top_k - begin, (token + 1) * config.top_k - end)
        experts[token] = [*(np.arange(begin, end) % of_rank), *other_experts[there % max(1, len(other_experts))]]
    return experts


def measure(program, args: tuple, repeats: Repeats) -> dict[str, Any]:
    """Measures the time of a call, and returns its rounds and dropped assignments."""
    rounds, dropped = (int(count) for count in program(*args)[2])
    us, path = call_time(program, args, repeats).us, path_of(program.as_text() or "")
    return {"us": us, "path": path, "rounds": rounds, "dropped": dropped}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
