"""This program measures one layer in a process of its own: python3 -m benchmarks.block.block_worker REQUEST

REQUEST is JSON: {"config", "recipe", "tokens": [T of a device, ..], "kernels", "buffer_factor", "repeats", "errors"},
and for a layer on a mesh {"mesh": {axis: devices}, "impl": `moax` or `native`, "exchange"}. Without a GPU the devices
of a mesh are emulated. The program compiles, prints READY, waits for a line on stdin, and measures. It prints a line of
JSON for each number of tokens: {"tokens", "memory", "fwd", "fwd+bwd", "note"}. Where the times are missing, the note
has the reason. With `errors` each fwd+bwd has the errors of the block against float32.
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
from benchmarks.block import bits, errors, stages
from benchmarks.block.block import KEPT
from benchmarks.block.worker import READY
from benchmarks.peers import native
from benchmarks.report import HOPPER, OURS, why
from benchmarks.timing import Repeats, call_time, kernel_time
from moax import backend
from moax.mesh.specs import named
from moax.sharding import param_specs, token_spec

TOP = 40  # The answer lists at most this many kernels.
# These are parts of the names that NCCL, XLA and moax give to kernels that move data between devices, without
# underscores. XLA's own all-reduce kernel has the name of its sum.
MOVES = re.compile(r"nccl|allreduce|raggedalltoall|multigpubarrier|putrows|^p(sum|max|min)")


def main(argv: list[str]) -> int:
    """Measures the request `argv[0]`, and prints the answers. Returns 0."""
    return on_mesh(json.loads(argv[0]), serve)


def on_mesh(request: dict[str, Any], serve: Callable[[dict[str, Any], moax.MoEConfig, Any], int]) -> int:
    """Returns serve(request, config, mesh), called while the mesh of the request is set; without one, mesh is None."""
    router = moax.RouterConfig(**request["config"].pop("router"))
    config = moax.MoEConfig(**request["config"], router=router)
    if not request.get("mesh"):
        return serve(request, config, None)
    devices = math.prod(request["mesh"].values())
    jax.config.update("jax_num_cpu_devices", devices)  # On a machine with GPUs this sets the host's devices.
    mesh = moax.make_mesh(request["mesh"], devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        return serve(request, config, mesh)


def serve(request: dict[str, Any], config: moax.MoEConfig, mesh) -> int:
    """Does the work of `main` while the mesh is set."""
    repeats, devices = Repeats(**request["repeats"]), 1 if mesh is None else mesh.size
    shapes = param_shapes(config, mesh)
    keep = functools.partial(moax.quantize_params, config=config, **options_of(request))
    quantized_shapes = jax.eval_shape(keep, shapes) if request["recipe"] == KEPT else None
    answers: dict[int, dict[str, Any]] = {tokens: {"tokens": tokens} for tokens in request["tokens"]}
    programs: dict[int, dict[str, Any]] = {}
    compare = None
    for tokens, answer in answers.items():
        try:
            layer, answer["note"] = layer_of(request, config, mesh)
            programs[tokens], answer["memory"] = build(layer, config, mesh, shapes, quantized_shapes, tokens * devices)
            if mesh is None:
                answer["memory"]["saved_needed_bytes"] = saved_needed(config, options_of(request)["recipe"], tokens)
            if request["errors"] and compare is None:
                compare = errors.build(layer, config, shapes, quantized_shapes)
        except Exception as error:  # The other numbers of tokens may compile and fit.
            answer["note"] = why(error)
    print(READY, flush=True)
    sys.stdin.readline()
    params = moax.init(jax.random.key(0), config, dtype=jnp.bfloat16) if programs else None
    quantized = keep(params) if programs and quantized_shapes is not None else None
    # A peak never falls, so this call comes before any timing, which holds several results, in ascending order.
    for tokens, program in list(programs.items()):
        try:
            x, dy = inputs(config, mesh, tokens * devices)
            jax.block_until_ready(program["fwd+bwd"](x, params, quantized, dy))
            answers[tokens]["memory"]["peak_bytes"] = peak_bytes(mesh)
        except Exception as error:
            answers[tokens]["note"] = why(error)
            del programs[tokens]
    off = compare(*inputs(config, mesh, errors.TOKENS), params, quantized) if programs and compare else None
    for tokens, answer in answers.items():
        try:
            if tokens in programs:
                x, dy = inputs(config, mesh, tokens * devices)
                for name, args in {"fwd": (x, params, quantized), "fwd+bwd": (x, params, quantized, dy)}.items():
                    answer[name] = measure(programs[tokens][name], args, repeats, devices)
                    if mesh is None:
                        answer[name]["bits"] = bits.compare_runs(programs[tokens][name], args)
                answer["fwd+bwd"] |= {"errors": off} if off else {}
        except Exception as error:
            answer["note"] = why(error)
        print(json.dumps(answer), flush=True)
    return 0


def options_of(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of `moax.moe` that a request names."""
    recipe = request["recipe"].removesuffix("+kept")
    names = ("kernels", "exchange", "buffer_factor")
    return {"recipe": None if recipe == "none" else recipe} | {n: request[n] for n in names if n in request}


def layer_of(request: dict[str, Any], config: moax.MoEConfig, mesh) -> tuple[Callable, str]:
    """Returns the layer of a request as a function (x, params, quantized) -> y, and a note."""
    if request.get("impl", OURS) != OURS:
        peer, note = native.block(config, mesh)
        return lambda x, params, quantized: peer(x, params), note
    options = options_of(request)
    return lambda x, params, quantized: moax.moe(x, params, config, quantized=quantized, **options)[0], ""


def param_shapes(config: moax.MoEConfig, mesh) -> moax.MoEParams:
    """Returns the ShapeDtypeStructs of the parameters in bf16, with their sharding on a mesh."""
    shapes = jax.eval_shape(functools.partial(moax.init, config=config, dtype=jnp.bfloat16), jax.random.key(0))
    if mesh is None:
        return shapes
    places = named(mesh, param_specs(config))
    return jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, places)


def inputs(config: moax.MoEConfig, mesh, tokens: int) -> list[jax.Array]:
    """Returns x and dy [T, H]; each device draws its own tokens."""
    place = None if mesh is None else named(mesh, token_spec(moax.Axes()))
    draw = functools.partial(jax.random.normal, shape=(tokens, config.d_model), dtype=jnp.bfloat16)
    return [jax.jit(draw, out_shardings=place)(key) for key in jax.random.split(jax.random.key(1))]


def build(layer: Callable, config: moax.MoEConfig, mesh, params, quantized, tokens: int) -> tuple[dict, dict]:
    """Returns {direction: compiled program}, and the bytes of a device that are known before a program runs."""

    def both(x, params, quantized, dy):
        y, pull = jax.vjp(lambda x, params: layer(x, params, quantized), x, params)
        return y, pull(dy)

    at = None if mesh is None else named(mesh, token_spec(moax.Axes()))
    x = jax.ShapeDtypeStruct((tokens, config.d_model), jnp.bfloat16, sharding=at)
    # Gradients have the sharding of their parameters, as in a training step.
    placed = None if mesh is None else (at, (at, named(mesh, param_specs(config))))
    programs = {
        "fwd": jax.jit(layer, out_shardings=at).lower(x, params, quantized).compile(),
        "fwd+bwd": jax.jit(both, out_shardings=placed).lower(x, params, quantized, x).compile(),
    }
    analysis: Any = programs["fwd+bwd"].memory_analysis()
    kinds = ("argument", "output", "temp")
    memory: dict[str, Any] = {
        "params_bytes": sum(_shard_bytes(p) for p in jax.tree.leaves(params)),
        "compiled_bytes": {kind: getattr(analysis, f"{kind}_size_in_bytes", None) for kind in kinds},
    }
    if mesh is None:
        forward = lambda x, params, quantized: jax.vjp(lambda *v: layer(*v, quantized), x, params)[1]  # noqa: E731
        saved = jax.eval_shape(forward, x, params, quantized)
        memory["saved_bytes"] = _nbytes(saved) - _nbytes((params, quantized))
    return programs, memory


def peak_bytes(mesh) -> int | None:
    """Returns the peak bytes of the device with the largest peak; None where JAX does not tell."""
    devices = jax.local_devices()[:1] if mesh is None else mesh.devices.flat
    stats = [device.memory_stats() or {} for device in devices]
    return max((found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found), default=None)


def measure(compiled, args: tuple, repeats: Repeats, devices: int) -> dict[str, Any]:
    """Measures the time of a call, and on GPUs its kernels by stage."""
    text = compiled.as_text() or ""
    found: dict[str, Any] = {"us": call_time(compiled, args, repeats).us, "path": path_of(text)}
    if backend.platform() == "gpu":
        found |= split(text, kernel_time(compiled, args, Repeats(1, 3)).kernels, devices, found["us"])
    return found


def split(hlo: str, kernels: Sequence[tuple[str, float]], devices: int, us: float) -> dict[str, Any]:
    """Returns {kernel_us, stages_us, kernels}, the means over all devices, and of several devices exposed_us.

    `exposed_us` is the wall clock `us` less the kernels that compute: the communication that no computation hides, plus
    the gaps between kernels. {} is returned where the kernels are not those of all devices.
    """
    launches = Counter(name for name, _ in kernels)
    if not kernels or any(count % devices for count in launches.values()):
        return {}
    if devices == 1:
        total, listed = stages.split(hlo, kernels)
        return {"kernel_us": sum(total.values()), "stages_us": total, "kernels": listed[:TOP]}
    moving = [(name, time) for name, time in kernels if MOVES.search(name.lower().replace("_", ""))]
    computing = [kernel for kernel in kernels if kernel not in moving]
    total, listed = stages.split(hlo, computing)
    # Devices launch at the same time, so that the order of launches does not tell forward from dgrad.
    total["gemm fwd + dgrad"] = total.pop("gemm fwd") + total.pop("gemm dgrad")
    total["communication"] = sum(time for _, time in moving)
    of_a_device = {stage: time / devices for stage, time in total.items()}
    compute = sum(time for _, time in computing) / devices
    found = {"kernel_us": sum(of_a_device.values()), "stages_us": of_a_device, "kernels": listed[:TOP]}
    return found | {"exposed_us": max(0.0, us - compute)}


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


def _shard_bytes(of: jax.ShapeDtypeStruct) -> int:
    shape = of.shape if of.sharding is None else of.sharding.shard_shape(of.shape)
    return math.prod(shape) * of.dtype.itemsize


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
