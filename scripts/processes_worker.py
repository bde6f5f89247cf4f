"""This program runs blocks and measures a layer, in one process or as one of several; check_processes.py starts it:

    python scripts/processes_worker.py REQUEST

REQUEST is JSON: {"folder", "size", "parts", "devices" of the mesh, "processes", "process", "coordinator", "command",
"sha", "share"}; a share (i, n) is every nth program from the ith on. The program writes into the folder `values.I.npz`
with this process's shards of the values and gradients of each block, and `blocks.I.json` with what their programs are.
It then waits until the file `go` is there, so that nothing else runs beside the measurement, and writes `times.I.json`.
I is the number of the process.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

import moax
from benchmarks.block.block_worker import path_of
from benchmarks.block.mesh_worker import inputs
from benchmarks.report import header, why
from moax import MoEConfig, RouterConfig, backend, inspect
from moax.models import MODELS
from moax.params import param_shapes
from moax.sharding import param_specs, token_spec
from moax.tune.timing import Repeats, call_time

# Autotuning by the clock may take another algorithm, and so another order of sums, in each process.
SAME_PRODUCTS = {"xla_gpu_autotune_level": 0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A block of the table.

    Attributes:
      axis: the mesh axis that has all devices, `ep` or `fsdp`.
      exchange, recipe, buffer_factor: the arguments of `moax.moe`.
      routing: `uniform`; `zipf`, where an expert's popularity falls with its number; or `one`, where all tokens choose
        experts of the first rank.
      axis_type: the type of the mesh axes, `Auto` or `Explicit`.
    """

    axis: str
    exchange: str
    recipe: str | None
    buffer_factor: float = 1.25
    routing: str = "uniform"
    axis_type: str = "Auto"

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{self.axis} {self.exchange} {self.recipe} {self.buffer_factor} {self.routing} {self.axis_type}"


CASES = (
    Case("ep", "all_to_all", "fp8_block", 0.5, "one"),
    Case("ep", "all_gather", None, 0.5, "zipf", "Explicit"),
    Case("fsdp", "auto", "fp8_block"),
    Case("ep", "auto", "fp8_block", 1.25, "zipf"),
    Case("ep", "all_to_all", None),
    Case("ep", "all_gather", "fp8_block", 0.5, "one"),
    Case("ep", "all_gather", None),
    Case("ep", "all_to_all", "fp8_block", 1.25, "zipf", "Explicit"),
    Case("ep", "all_to_all", "mxfp8", 0.5, "zipf"),
    Case("ep", "all_gather", "fp8_tensor"),
    Case("fsdp", "auto", None, 1.25, "uniform", "Explicit"),
)


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of a run.

    Attributes:
      cases: the table of blocks.
      config, tokens: their block, and the tokens of a device; the number of tokens is a prime.
      layer, layer_tokens: the layer that is measured, and the tokens of a device.
      repeats: the calls of a measurement.
      recipes: the recipes of the measured layer.
    """

    cases: tuple[Case, ...]
    config: MoEConfig
    tokens: int
    layer: MoEConfig
    layer_tokens: int
    repeats: Repeats
    recipes: tuple[str | None, ...] = (None, "fp8_block")


ROUTER = RouterConfig(aux_loss=1e-2, z_loss=1e-3)
BLOCK = MoEConfig(320, 192, 16, 4, use_bias=True, shared_d_ff=128, router=ROUTER)
SMALL = MoEConfig(64, 32, 4, 2, router=ROUTER)
QWEN3 = MODELS["qwen3-30b"].config
SIZES = {
    "full": Size(CASES, BLOCK, 487, QWEN3, 8192, Repeats(5, 30)),
    "quick": Size(CASES[:6], BLOCK, 487, QWEN3, 2048, Repeats.quick()),
    "tiny": Size(CASES[:2], SMALL, 61, SMALL, 64, Repeats(1, 2), (None,)),
}


def main(argv: list[str]) -> int:
    """Runs the request `argv[0]`. Returns 0."""
    request = json.loads(argv[0])
    several, process, folder = request["processes"] > 1, request["process"], Path(request["folder"])
    jax.config.update("jax_num_cpu_devices", 1 if several else request["devices"])  # the host's, where GPUs are
    if several:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            request["coordinator"], request["processes"], process, cluster_detection_method="deactivate"
        )
    devices, size = request["devices"], SIZES[request["size"]]
    first, step = request["share"]
    size = dataclasses.replace(size, cases=size.cases[first::step])
    blocks = lower_blocks(size, devices) if "blocks" in request["parts"] else {}
    layers = lower_layers(size, devices, first, step) if "times" in request["parts"] else {}
    # As many threads as programs: a process that tunes a program waits for the other processes to tune it too.
    with concurrent.futures.ThreadPoolExecutor(max(1, len(blocks) + len(layers))) as pool:
        options = SAME_PRODUCTS if backend.platform() == "gpu" else None
        compiling = {case: pool.submit(lowered.compile, options) for case, lowered in blocks.items()}
        measured = {case: pool.submit(lowered.compile) for case, lowered in layers.items()}
    head = header(request["command"], request["sha"], {})
    run_blocks(size, devices, compiling, folder, process, head)
    while not (folder / "go").exists():
        time.sleep(0.05)
    write(folder / f"times.{process}.json", measure(size, devices, measured))
    return 0


def mesh_of(axis: str, axis_type: str, devices: int):
    """Returns the mesh (fsdp, ep) on which one axis has all devices."""
    sizes = {"fsdp": 1, "ep": 1} | {axis: devices}
    return moax.make_mesh(sizes, axis_type=AxisType[axis_type])


def lower(config: MoEConfig, tokens: int, mesh, **options) -> jax.stages.Lowered:
    """Returns the lowered program (x, params, dy) -> {y, stats, dx, dparams} of a block on the mesh in force."""

    def both(x, params, dy):
        def block(x, params):
            y, stats = moax.moe(x, params, config, **options)
            return (y, stats.aux_loss + stats.z_loss), stats

        (y, loss), pull, stats = jax.vjp(block, x, params, has_aux=True)
        dx, dparams = pull((dy, jnp.ones_like(loss)))
        return {"y": y, "stats": stats, "dx": dx, "d": dparams}

    def shape(array, spec):
        return jax.ShapeDtypeStruct(array, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    x = shape((tokens * mesh.size, config.d_model), token_spec(moax.Axes()))
    shapes = {name: value for name, value in vars_of(param_shapes(config)).items() if value is not None}
    specs = vars_of(param_specs(config))
    params = moax.MoEParams(**{name: shape(value, specs[name]) for name, value in shapes.items()})
    return jax.jit(both).lower(x, params, x)


def vars_of(params: moax.MoEParams) -> dict[str, Any]:
    """Returns the fields of a MoEParams by name."""
    return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}


def lower_blocks(size: Size, devices: int) -> dict[Case, jax.stages.Lowered]:
    """Returns the lowered program of each block of the table."""
    programs = {}
    for case in size.cases:
        mesh = mesh_of(case.axis, case.axis_type, devices)
        with jax.set_mesh(mesh):
            options = dict(exchange=case.exchange, recipe=case.recipe, buffer_factor=case.buffer_factor)
            programs[case] = lower(size.config, size.tokens, mesh, **options)
    return programs


def lower_layers(size: Size, devices: int, first: int, step: int) -> dict[Case, jax.stages.Lowered]:
    """Returns the lowered program of the layer by each exchange and recipe, of which every `step`th from `first` on."""
    programs, mesh = {}, mesh_of("ep", "Auto", devices)
    with jax.set_mesh(mesh):
        cases = [Case("ep", exchange, recipe) for recipe in size.recipes for exchange in ("all_gather", "all_to_all")]
        for case in cases[first::step]:
            options = dict(exchange=case.exchange, recipe=case.recipe)
            programs[case] = lower(size.layer, size.layer_tokens, mesh, **options)
    return programs


def draw(shapes: tuple, config: MoEConfig, routing: str) -> tuple:
    """Returns (x, params, dy) as the program's arguments lie; the values depend on shapes and routing alone.

    The first element of each token is 1. The first row of the router is thus what it adds to the logits of all tokens.
    """
    x, params, dy = shapes
    number = np.arange(config.num_experts, dtype=np.float32)
    first = number < len(number) / x.sharding.mesh.size
    skew = {"uniform": 0 * number, "zipf": -np.log1p(number), "one": np.where(first, 20, 0)}[routing]

    def make(seed, of, fixed=None):
        values = np.random.default_rng(seed).standard_normal(of.shape, np.float32)
        values *= 1 if seed in (0, 1) else config.d_model**-0.5
        if fixed is not None:
            values[fixed[0]] = fixed[1]
        values = values.astype(jnp.bfloat16)
        return jax.make_array_from_callback(of.shape, of.sharding, lambda index: values[index])

    made = {}
    for seed, (name, of) in enumerate(vars_of(params).items(), start=2):
        if of is not None:
            made[name] = make(seed, of, (0, skew) if name == "router" else None)
    return make(0, x, (np.s_[:, 0], 1)), moax.MoEParams(**made), make(1, dy)


def run_blocks(size: Size, devices: int, compiling: dict, folder: Path, process: int, head: dict) -> None:
    """Runs the blocks once they are compiled, and writes their values and a row for each."""
    values, rows = {}, []
    for case, program in compiling.items():
        row: dict[str, Any] = {"name": case.name} | dataclasses.asdict(case)
        rows.append(row)
        try:
            compiled = program.result()
            mesh = mesh_of(case.axis, case.axis_type, devices)
            out = compiled(*draw(arguments(compiled), size.config, case.routing))
            places = {device: i for i, device in enumerate(mesh.devices.flat)}
            for path, leaf in jax.tree_util.tree_leaves_with_path(out):
                for shard in leaf.addressable_shards:
                    what = np.asarray(shard.data)
                    key = f"{case.name}|{jax.tree_util.keystr(path)}|{places[shard.device]}"
                    values[key] = what.astype(np.float32) if what.dtype == jnp.bfloat16 else what
            row |= about(compiled, mesh) | {"passes": int(np.asarray(out["stats"].passes.addressable_shards[0].data))}
        except Exception as error:  # The other blocks may run.
            row["note"] = why(error)
    np.savez(folder / f"values.{process}.npz", **values)
    write(folder / f"blocks.{process}.json", {"header": head, "rows": rows})


def arguments(compiled) -> tuple:
    """Returns the shapes and shardings of the arguments of a compiled program."""
    shapes, places = compiled.in_avals[0], compiled.input_shardings[0]
    return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, places)


def about(compiled, mesh) -> dict[str, Any]:
    """Returns which kernels a program runs, and the bytes that a device sends outside of the loop of further passes."""
    found = [c for c in inspect.collectives(compiled, mesh=mesh) if not c.open_loop]
    kinds = sorted({c.kind for c in found})
    return {"path": path_of(compiled.as_text() or ""), "bytes": {k: inspect.total_bytes(found, k) for k in kinds}}


def measure(size: Size, devices: int, programs: dict) -> list[dict[str, Any]]:
    """Returns a row for each layer: the wall clock of forward and backward, and the bytes on the wire."""
    rows, mesh = [], mesh_of("ep", "Auto", devices)
    if not programs:
        return rows
    with jax.set_mesh(mesh):
        params = moax.init(jax.random.key(0), size.layer, dtype=jnp.bfloat16)
        x, dy = inputs(size.layer, mesh, size.layer_tokens * devices)
        for case, program in programs.items():
            row = {"name": case.name, "exchange": case.exchange, "recipe": case.recipe, "tokens": size.layer_tokens}
            rows.append(row)
            try:
                us = call_time(program.result(), (x, params, dy), size.repeats).us
                row |= {"us": us} | about(program.result(), mesh)
            except Exception as error:  # The other layers may run.
                row["note"] = why(error)
    return rows


def write(path: Path, content: Any) -> None:
    """Writes JSON, so that who waits for the file reads all of it."""
    path.with_suffix(".part").write_text(json.dumps(content))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
