"""This program measures one layer on a mesh: python3 -m benchmarks.block.mesh_worker REQUEST

REQUEST is JSON: that of `block_worker`, and {"mesh": {axis: devices}, "impl": `moax` or a peer, "exchange"}. The tokens
are those of each device. Without a GPU devices are emulated. The program compiles, prints READY, waits for a line on
stdin, and measures. It prints a line of JSON for each number of tokens: {"tokens", "memory", "fwd", "fwd+bwd", "note"}.
Where the times are missing, the note has the reason.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import moax
from benchmarks.block import stages
from benchmarks.block.block_worker import TOP, path_of
from benchmarks.block.worker import READY
from benchmarks.peers import native, public
from benchmarks.report import OURS, why
from moax import backend
from moax.mesh.place import named
from moax.sharding import param_specs, token_spec
from moax.tune.timing import Repeats, call_time, kernel_time

# These are parts of the names that NCCL, XLA and moax give to kernels that move data between devices, without
# underscores. XLA's own all-reduce kernel has the name of its sum.
MOVES = re.compile(r"nccl|allreduce|raggedalltoall|multigpubarrier|putrows|^p(sum|max|min)")


def main(argv: list[str]) -> int:
    """Measures the request `argv[0]`, and prints the answers. Returns 0."""
    return on_mesh(json.loads(argv[0]), serve)


def on_mesh(request: dict[str, Any], serve: Callable[[dict[str, Any], moax.MoEConfig, Any], int]) -> int:
    """Returns serve(request, config, mesh), called while the mesh of the request is set."""
    devices = math.prod(request["mesh"].values())
    jax.config.update("jax_num_cpu_devices", devices)  # On a machine with GPUs this sets the host's devices.
    mesh = moax.make_mesh(request["mesh"], devices=jax.devices()[:devices])
    router = moax.RouterConfig(**request["config"].pop("router"))
    config = moax.MoEConfig(**request["config"], router=router)
    with jax.set_mesh(mesh):
        return serve(request, config, mesh)


def serve(request: dict[str, Any], config: moax.MoEConfig, mesh) -> int:
    """Does the work of `main` while the mesh is set."""
    repeats = Repeats(**request["repeats"])
    answers: dict[int, dict[str, Any]] = {tokens: {"tokens": tokens} for tokens in request["tokens"]}
    programs: dict[int, dict[str, Any]] = {}
    for tokens, answer in answers.items():
        try:
            layer, note = layer_of(request, config, mesh)
            programs[tokens], answer["memory"] = build(layer, config, mesh, tokens * mesh.size)
            answer["note"] = note
        except Exception as error:  # The other numbers of tokens may compile and fit.
            answer["note"] = why(error)
    print(READY, flush=True)
    sys.stdin.readline()
    params = moax.init(jax.random.key(0), config, dtype=jnp.bfloat16) if programs else None
    for tokens, program in list(
        programs.items()
    ):  # A peak never falls, so this comes before any timing, in ascending order.
        try:
            x, dy = inputs(config, mesh, tokens * mesh.size)
            jax.block_until_ready(program["fwd+bwd"](x, params, dy))
            answers[tokens]["memory"]["peak_bytes"] = peak_bytes(mesh)
        except Exception as error:
            answers[tokens]["note"] = why(error)
            del programs[tokens]
    for tokens, answer in answers.items():
        try:
            if tokens in programs:
                x, dy = inputs(config, mesh, tokens * mesh.size)
                answer["fwd"] = measure(programs[tokens]["fwd"], (x, params), repeats, mesh.size)
                answer["fwd+bwd"] = measure(programs[tokens]["fwd+bwd"], (x, params, dy), repeats, mesh.size)
        except Exception as error:
            answer["note"] = why(error)
        print(json.dumps(answer), flush=True)
    return 0


def layer_of(request: dict[str, Any], config: moax.MoEConfig, mesh) -> tuple[Callable, str]:
    """Returns the layer of a request as a function (x, params) -> y, and a note.

    Raises:
      Unsupported: the peer cannot compute this block.
    """
    if request["impl"] != OURS:
        return {"native": native, "public": public}[request["impl"]].block(config, mesh)
    recipe = None if request["recipe"] == "none" else request["recipe"]
    options: dict[str, Any] = {
        "recipe": recipe,
        **{name: request[name] for name in ("kernels", "exchange", "buffer_factor")},
    }
    return lambda x, params: moax.moe(x, params, config, **options)[0], ""


def inputs(config: moax.MoEConfig, mesh, tokens: int) -> list[jax.Array]:
    """Returns x and dy [T, H]; each device draws its own tokens."""
    place = named(mesh, token_spec(moax.Axes()))
    draw = functools.partial(jax.random.normal, shape=(tokens, config.d_model), dtype=jnp.bfloat16)
    return [jax.jit(draw, out_shardings=place)(key) for key in jax.random.split(jax.random.key(1))]


def build(layer: Callable, config: moax.MoEConfig, mesh, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns {direction: compiled program}, and the bytes of a device that are known before a program runs."""

    def both(x, params, dy):
        y, pull = jax.vjp(layer, x, params)
        return y, pull(dy)

    x = jax.ShapeDtypeStruct((tokens, config.d_model), jnp.bfloat16, sharding=named(mesh, token_spec(moax.Axes())))
    shapes = jax.eval_shape(functools.partial(moax.init, config=config, dtype=jnp.bfloat16), jax.random.key(0))
    places = named(mesh, param_specs(config))
    params = jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, places)
    # Gradients have the sharding of their parameters, as in a training step.
    placed = jax.jit(both, out_shardings=(x.sharding, (x.sharding, places)))
    programs = {
        "fwd": jax.jit(layer, out_shardings=x.sharding).lower(x, params).compile(),
        "fwd+bwd": placed.lower(x, params, x).compile(),
    }
    analysis: Any = programs["fwd+bwd"].memory_analysis()
    shards = [math.prod(p.sharding.shard_shape(p.shape)) * p.dtype.itemsize for p in jax.tree.leaves(params)]
    kinds = ("argument", "output", "temp")
    return programs, {
        "params_bytes": sum(shards),
        "compiled_bytes": {kind: getattr(analysis, f"{kind}_size_in_bytes", None) for kind in kinds},
    }


def peak_bytes(mesh) -> int | None:
    """Returns the peak bytes of the device with the largest peak; None where JAX does not tell."""
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    return max(peaks) if peaks else None


def measure(compiled, args: tuple, repeats: Repeats, devices: int) -> dict[str, Any]:
    """Measures the time of a call, and on GPUs its kernels by stage."""
    text = compiled.as_text() or ""
    found: dict[str, Any] = {"us": call_time(compiled, args, repeats).us, "path": path_of(text)}
    if backend.platform() == "gpu":
        timing = kernel_time(compiled, args, Repeats(1, 3))
        found |= split(text, timing.kernels, devices, found["us"])
    return found


def split(hlo: str, kernels: Sequence[tuple[str, float]], devices: int, us: float) -> dict[str, Any]:
    """Returns {kernel_us, stages_us, exposed_us, kernels}, the means over all devices.

    `exposed_us` is the wall clock `us` less the kernels that compute: the communication that no computation hides, plus
    the gaps between kernels. {} is returned where the kernels are not those of all devices.
    """
    launches = Counter(name for name, _ in kernels)
    if not kernels or any(count % devices for count in launches.values()):
        return {}
    moving = [(name, time) for name, time in kernels if MOVES.search(name.lower().replace("_", ""))]
    computing = [kernel for kernel in kernels if kernel not in moving]
    total, listed = stages.split(hlo, computing)
    # Devices launch at the same time, so that the order of launches does not tell forward from dgrad.
    total["gemm fwd + dgrad"] = total.pop("gemm fwd") + total.pop("gemm dgrad")
    total["communication"] = sum(time for _, time in moving)
    of_a_device = {stage: time / devices for stage, time in total.items()}
    compute = sum(time for _, time in computing) / devices
    return {
        "kernel_us": sum(of_a_device.values()),
        "stages_us": of_a_device,
        "exposed_us": max(0.0, us - compute),
        "kernels": listed[:TOP],
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
