"""One layer on a mesh in a process of its own: python3 -m benchmarks.block.mesh_worker REQUEST

REQUEST is JSON: that of `block_worker`, with {"mesh": {axis: devices}, "impl": `moax` or a peer, "exchange"}; tokens
are those of each device. Where there is no GPU, devices are emulated. Compiles, prints READY, and once a line comes in
measures. Prints a line of JSON for each number of tokens: {"tokens", "memory", "fwd", "fwd+bwd", "note"}; without the
times, the note says why not.
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

# As NVIDIA's library, XLA and moax call the kernels that move data between devices, without their underscores; an
# all-reduce of XLA's own has the name of the sum in it.
MOVES = re.compile(r"nccl|allreduce|raggedalltoall|multigpubarrier|putrows|^psum")


def main(argv: list[str]) -> int:
    """Prints what was measured of a request."""
    request = json.loads(argv[0])
    devices = math.prod(request["mesh"].values())
    jax.config.update("jax_num_cpu_devices", devices)  # of a GPU's machine, the host's
    mesh = moax.make_mesh(request["mesh"], devices=jax.devices()[:devices])
    router = moax.RouterConfig(**request["config"].pop("router"))
    config = moax.MoEConfig(**request["config"], router=router)
    with jax.set_mesh(mesh):
        return serve(request, config, mesh)


def serve(request: dict[str, Any], config: moax.MoEConfig, mesh) -> int:
    """`main`, with the mesh in force."""
    repeats = Repeats(**request["repeats"])
    answers: dict[int, dict[str, Any]] = {tokens: {"tokens": tokens} for tokens in request["tokens"]}
    programs: dict[int, dict[str, Any]] = {}
    for tokens, answer in answers.items():
        try:
            layer, note = layer_of(request, config, mesh)
            programs[tokens], answer["memory"] = build(layer, config, mesh, tokens * mesh.size)
            answer["note"] = note
        except Exception as error:  # one that does not compile, or does not fit, leaves those that do
            answer["note"] = why(error)
    print(READY, flush=True)
    sys.stdin.readline()
    params = moax.init(jax.random.key(0), config, dtype=jnp.bfloat16) if programs else None
    for tokens, program in list(programs.items()):  # before any timing, and ascending: a peak can only grow
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
    """((x, params) -> y, a note).

    Raises:
      Unsupported: a peer that does not compute this one.
    """
    if request["impl"] != OURS:
        return {"native": native, "public": public}[request["impl"]].block(config, mesh)
    recipe = None if request["recipe"] == "none" else request["recipe"]
    options: dict[str, Any] = {"recipe": recipe, **{name: request[name] for name in ("kernels", "exchange", "chunks")}}
    return lambda x, params: moax.moe(x, params, config, **options)[0], ""


def inputs(config: moax.MoEConfig, mesh, tokens: int) -> list[jax.Array]:
    """x and dy [T, H], each device drawing its own tokens."""
    place = named(mesh, token_spec(moax.Axes()))
    draw = functools.partial(jax.random.normal, shape=(tokens, config.d_model), dtype=jnp.bfloat16)
    return [jax.jit(draw, out_shardings=place)(key) for key in jax.random.split(jax.random.key(1))]


def build(layer: Callable, config: moax.MoEConfig, mesh, tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """({direction: compiled program}, what is known of a device's memory before it runs)."""

    def both(x, params, dy):
        y, pull = jax.vjp(layer, x, params)
        return y, pull(dy)

    x = jax.ShapeDtypeStruct((tokens, config.d_model), jnp.bfloat16, sharding=named(mesh, token_spec(moax.Axes())))
    shapes = jax.eval_shape(functools.partial(moax.init, config=config, dtype=jnp.bfloat16), jax.random.key(0))
    places = named(mesh, param_specs(config))
    params = jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, places)
    # Gradients as a training step wants them, where their parameters are.
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
    """Of the device that took the most so far; None where devices do not say."""
    stats = [device.memory_stats() or {} for device in mesh.devices.flat]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    return max(peaks) if peaks else None


def measure(compiled, args: tuple, repeats: Repeats, devices: int) -> dict[str, Any]:
    """Time of a call, and on GPUs its kernels by stage."""
    text = compiled.as_text() or ""
    found: dict[str, Any] = {"us": call_time(compiled, args, repeats).us, "path": path_of(text)}
    if backend.platform() == "gpu":
        timing = kernel_time(compiled, args, Repeats(1, 3))
        found |= split(text, timing.kernels, devices, found["us"])
    return found


def split(hlo: str, kernels: Sequence[tuple[str, float]], devices: int, us: float) -> dict[str, Any]:
    """{kernel_us, stages_us, exposed_us, kernels} of a device, the mean over all; {} where kernels are not those of
    all devices, so that there is no telling whose they are.

    exposed_us: wall clock `us` less the kernels that compute. What nothing hides of the communication, and the gaps
    between kernels: an upper bound of the first.
    """
    launches = Counter(name for name, _ in kernels)
    if not kernels or any(count % devices for count in launches.values()):
        return {}
    moving = [(name, time) for name, time in kernels if MOVES.search(name.lower().replace("_", ""))]
    computing = [kernel for kernel in kernels if kernel not in moving]
    total, listed = stages.split(hlo, computing)
    # Devices launch at the same time: the order of launches, which tells forward from dgrad, is lost.
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
