"""This program measures one layer in a process of its own: python3 -m benchmarks.block.block_worker REQUEST

REQUEST is JSON: {"config", "recipe", "tokens": [T of a device, ..], "kernels", "exchange", "overlap", "buffer_factor",
"mesh": {axis: devices}, "repeats"}. Without a GPU the devices of a mesh are emulated. The program compiles, prints
READY, waits for a line on stdin, and measures. It prints a line of JSON for each number of tokens: {"tokens", "memory",
"fwd", "fwd+bwd", "note"}. Where the times are missing, the note has the reason.

With {"loads": [[imbalance, buffer_factor], ..]} it prints such a line for each of them too, with "load" and without
"fwd". The routing is then an operand (`imbalance.choose_experts`), so that all imbalances run one program, and fwd+bwd
has `rounds` and `dropped`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

import moax
from benchmarks.block import stages
from benchmarks.block.block import KEPT
from benchmarks.block.imbalance import choose_experts
from benchmarks.block.worker import READY, config_of
from benchmarks.report import HOPPER, why
from benchmarks.timing import Repeats, call_time, kernel_time
from moax.kernels.device import find_device
from moax.mesh.specs import named
from moax.params import param_specs, token_spec

TOP = 40  # The answer lists at most this many kernels.
# These are parts of the names that NCCL and XLA give to kernels that move data between devices, without
# underscores. XLA's own all-reduce kernel has the name of its sum.
MOVES = re.compile(r"nccl|allreduce|raggedalltoall|^p(sum|max|min)")


def main(argv: list[str]) -> int:
    """Measures the request `argv[0]`, and prints the answers. Returns 0."""
    request = json.loads(argv[0])
    config = config_of(request)
    if not request["mesh"]:
        return serve(request, config, None)
    devices = math.prod(request["mesh"].values())
    # On a machine with GPUs this sets the host's devices.
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = moax.make_mesh(request["mesh"], devices=jax.devices()[:devices])
    with jax.set_mesh(mesh):
        return serve(request, config, mesh)


def serve(request: dict[str, Any], config: moax.MoEConfig, mesh) -> int:
    """Does the work of `main` while the mesh is set."""
    repeats = Repeats(**request["repeats"])
    devices = size_of(mesh)
    loads = request.get("loads", [[None, request["buffer_factor"]]])
    shapes = param_shapes(config, mesh)
    keep = functools.partial(moax.quantize_params, config=config, **options_of(request))
    keeper = None
    kept_shapes = None
    if request["recipe"] == KEPT:
        keeper = jax.jit(keep).lower(shapes).compile()
        kept_shapes = jax.tree.map(
            lambda v, sharding: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding),
            jax.eval_shape(keep, shapes),
            keeper.output_shardings,
        )
    programs: dict[tuple[int, float | None], tuple[dict, dict]] = {}
    notes = {}
    for tokens, factor in itertools.product(
        request["tokens"],
        dict.fromkeys(factor for _, factor in loads),
    ):
        try:
            options = options_of(request) | {"buffer_factor": factor}
            compiler_options = moax.OVERLAP_OPTIONS if request["overlap"] else None
            programs[tokens, factor] = build(
                config,
                options,
                compiler_options,
                mesh,
                shapes,
                kept_shapes,
                tokens,
                "loads" in request,
            )
        except Exception as error:  # The other programs may compile and fit.
            notes[tokens, factor] = why(error)
    print(READY, flush=True)
    sys.stdin.readline()
    params = None
    quantized = None
    if programs:
        params = moax.init(jax.random.key(0), config, dtype=jnp.bfloat16)
        if keeper is not None:
            quantized = keeper(params)

    def operands(tokens: int, imbalance: float | None) -> tuple:
        x, dy = inputs(config, mesh, tokens * devices)
        if "loads" not in request:
            return x, params, quantized, None, dy
        load = 1.0 if imbalance is None else imbalance
        experts = choose_experts(config, request["mesh"]["ep"], tokens, load)
        every_shard = np.tile(experts, (devices, 1))
        placed = jax.device_put(every_shard, named(mesh, token_spec(moax.Axes())))
        return x, params, quantized, placed, dy

    # A peak never falls, so these calls come before any timing, which holds several results, in ascending order.
    for key in sorted(programs, key=lambda key: programs[key][1]["compiled_bytes"]["temp"] or 0):
        try:
            compiled, memory = programs[key]
            jax.block_until_ready(compiled["fwd+bwd"](*operands(key[0], None)))
            memory["peak_bytes"] = peak_bytes(mesh)
        except Exception as error:
            notes[key] = why(error)
    for tokens, (imbalance, factor) in itertools.product(request["tokens"], loads):
        answer: dict[str, Any] = {"tokens": tokens}
        if "loads" in request:
            answer["load"] = [imbalance, factor]
        try:
            if (tokens, factor) in notes:
                answer["note"] = notes[tokens, factor]
            else:
                compiled, answer["memory"] = programs[tokens, factor]
                args = operands(tokens, imbalance)
                for name, program in compiled.items():
                    inputs_of_program = args[:-1] if name == "fwd" else args
                    answer[name] = measure(program, inputs_of_program, repeats, devices)
                if "loads" in request:
                    counts = zip(("rounds", "dropped"), compiled["fwd+bwd"](*args)[2], strict=True)
                    answer["fwd+bwd"] |= {name: int(count) for name, count in counts}
        except Exception as error:
            answer["note"] = why(error)
        print(json.dumps(answer), flush=True)
    return 0


def options_of(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of `moax.moe` that a request names."""
    recipe = request["recipe"].removesuffix("+kept")
    names = ("kernels", "exchange", "buffer_factor")
    options = {name: request[name] for name in names if name in request}
    return {"recipe": None if recipe == "none" else recipe} | options


def layer(x, params, quantized, experts=None, *, config: moax.MoEConfig, options: dict[str, Any]):
    """Returns (y, stats) of the block."""
    return moax.moe(x, params, config, quantized=quantized, routing=experts, **options)


def param_shapes(config: moax.MoEConfig, mesh) -> moax.MoEParams:
    """Returns the ShapeDtypeStructs of the parameters in bf16, with their sharding on a mesh."""
    shapes = jax.eval_shape(
        functools.partial(moax.init, config=config, dtype=jnp.bfloat16),
        jax.random.key(0),
    )
    if mesh is None:
        return shapes
    places = named(mesh, param_specs(config))
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        places,
    )


def inputs(config: moax.MoEConfig, mesh, tokens: int) -> list[jax.Array]:
    """Returns x and dy [T, H]; each device draws its own tokens."""
    place = None if mesh is None else named(mesh, token_spec(moax.Axes()))
    draw = functools.partial(jax.random.normal, shape=(tokens, config.d_model), dtype=jnp.bfloat16)
    return [jax.jit(draw, out_shardings=place)(key) for key in jax.random.split(jax.random.key(1))]


def build(
    config: moax.MoEConfig,
    options: dict[str, Any],
    compiler_options: dict[str, Any] | None,
    mesh,
    params,
    quantized,
    tokens: int,
    routed: bool,
) -> tuple[dict, dict]:
    """Returns {direction: program compiled with the options `how`} for T tokens of a device, and the bytes of a device
    that are known before a program runs. With `routed` the routing is an operand, and the only direction also returns
    (rounds, dropped)."""

    def run(x, params, quantized, experts):
        y, stats = layer(x, params, quantized, experts, config=config, options=options)
        return y, ((stats.rounds, stats.dropped) if routed else ())

    def forward(x, params, quantized, experts):
        def differentiated(x, params):
            return run(x, params, quantized, experts)

        return jax.vjp(differentiated, x, params, has_aux=True)

    def both(x, params, quantized, experts, dy):
        y, pull, counts = forward(x, params, quantized, experts)
        return y, pull(dy), counts

    def saved_arrays(*args):
        _, pull, _ = forward(*args)
        return jax.tree.leaves(pull)

    devices = size_of(mesh)
    sharding = None
    placed = None
    if mesh is not None:
        # Gradients have the sharding of their parameters, as in a training step.
        sharding = named(mesh, token_spec(moax.Axes()))
        placed = (sharding, (sharding, named(mesh, param_specs(config))), None)
    x = jax.ShapeDtypeStruct((tokens * devices, config.d_model), jnp.bfloat16, sharding=sharding)
    experts = None
    if routed:
        experts = jax.ShapeDtypeStruct((len(x), config.top_k), jnp.int32, sharding=sharding)
    programs = {}
    if not routed:
        fwd = jax.jit(lambda *args: run(*args)[0], out_shardings=sharding)
        programs["fwd"] = fwd.lower(x, params, quantized, None).compile(compiler_options)
    fwd_bwd = jax.jit(both, out_shardings=placed)
    programs["fwd+bwd"] = fwd_bwd.lower(x, params, quantized, experts, x).compile(compiler_options)
    analysis: Any = programs["fwd+bwd"].memory_analysis()
    jaxpr = jax.make_jaxpr(saved_arrays)(x, params, quantized, experts).jaxpr
    weights = jaxpr.invars[1:]  # Forward keeps the array x.
    # An array that is saved twice counts once.
    saved: dict[Any, Any] = {}
    for var in jaxpr.outvars:
        if isinstance(var, Var) and var not in weights:
            saved[var] = var.aval
    saved_bytes = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in saved.values())
    kinds = ("argument", "output", "temp")
    memory: dict[str, Any] = {
        "params_bytes": sum(_shard_bytes(p) for p in jax.tree.leaves(params)),
        "compiled_bytes": {kind: getattr(analysis, f"{kind}_size_in_bytes", None) for kind in kinds},
        "saved_bytes": saved_bytes // devices,
    }
    if mesh is None:
        memory["saved_needed_bytes"] = saved_needed(config, options["recipe"], tokens)
    return programs, memory


def size_of(mesh) -> int:
    """Returns the number of devices of a mesh; None means one device."""
    return 1 if mesh is None else mesh.size


def peak_bytes(mesh) -> int | None:
    """Returns the peak bytes of the device with the largest peak; None where JAX does not tell."""
    devices = jax.local_devices()[:1] if mesh is None else mesh.devices.flat
    stats = [device.memory_stats() or {} for device in devices]
    peaks = [memory["peak_bytes_in_use"] for memory in stats if "peak_bytes_in_use" in memory]
    return max(peaks, default=None)


def measure(compiled, args: tuple, repeats: Repeats, devices: int) -> dict[str, Any]:
    """Measures the time of a call, and on GPUs its kernels by stage."""
    text = compiled.as_text() or ""
    results: dict[str, Any] = {"us": call_time(compiled, args, repeats).us, "path": path_of(text)}
    if find_device().platform == "gpu":
        kernels = kernel_time(compiled, args, Repeats(1, 3)).kernels
        results |= split(text, kernels, devices, results["us"])
    return results


def split(
    hlo: str,
    kernels: Sequence[tuple[str, float]],
    devices: int,
    us: float,
) -> dict[str, Any]:
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
    results = {
        "kernel_us": sum(of_a_device.values()),
        "stages_us": of_a_device,
        "kernels": listed[:TOP],
    }
    return results | {"exposed_us": max(0.0, us - compute)}


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


def _shard_bytes(array: jax.ShapeDtypeStruct) -> int:
    if array.sharding is None:
        shape = array.shape
    else:
        shape = array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
