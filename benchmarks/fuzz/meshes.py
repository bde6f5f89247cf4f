"""A block on a mesh: the layout that a seed draws, and the programs that compare the mesh with one device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

import moax
from benchmarks.fuzz.cases import Case, Layout, draw
from benchmarks.fuzz.oracle import Programs, by_moax, by_reference
from moax.exchange import EXCHANGES
from moax.params import token_spec

ROLES = ("dp", "fsdp", "ep", "tp", "cp")
BY_TOKEN = ("x", "dy", "ids", "weights", "mask")  # the inputs that have a dim of tokens
RESULTS_BY_TOKEN = ("y", "dx", "weights", "experts")


class DifferentBits(AssertionError):
    """Two runs of one program differ."""


def draw_on_mesh(seed: int, devices: int, tiny: bool) -> Case:
    """Returns the case of a seed on a mesh of up to `devices` devices, with sizes that the mesh divides."""
    case = draw(seed, tiny)
    rng = np.random.default_rng([seed, 3])
    doublings = int(rng.integers(1, devices.bit_length()))
    sizes: dict[str, int] = {}
    # Each factor of 2 goes to a role, so that a role may have 4.
    for role in rng.choice(ROLES, doublings):
        sizes[str(role)] = 2 * sizes.get(str(role), 1)
    order = [role for role in ROLES if role in sizes]
    rng.shuffle(order)
    exchange = str(rng.choice(EXCHANGES))
    ranks = sizes.get("ep", 1)
    rows = math.prod(size for role, size in sizes.items() if role not in ("tp", "cp"))
    sequence = sizes.get("cp", 1)
    tokens = _round_up(case.tokens, rows * sequence)
    batch = None
    if "cp" in sizes or rng.random() < 0.5:
        batch = rows
    layout = Layout(
        sizes=tuple((role, sizes[role]) for role in order),
        explicit=bool(rng.random() < 0.5),
        exchange=exchange,
        batch=batch,
    )
    config = dataclasses.replace(
        case.config,
        num_experts=_round_up(case.config.num_experts, ranks),
        d_ff=_round_up(case.config.d_ff, 32 * sizes.get("tp", 1)),
    )
    way = case.way
    if way == "vmap":  # layers of a model run one after the other
        way = "plain"
    return dataclasses.replace(case, config=config, tokens=tokens, way=way, layout=layout)


def _round_up(size: int, multiple: int) -> int:
    """Returns the first multiple from `size` on."""
    return -(-size // multiple) * multiple


def make_mesh_of(layout: Layout) -> Mesh:
    """Makes the mesh of a layout, of the first devices of the machine."""
    sizes = dict(layout.sizes)
    axis_type = AxisType.Auto
    if layout.explicit:
        axis_type = AxisType.Explicit
    devices = jax.devices()[: math.prod(sizes.values())]
    return moax.make_mesh(sizes, axis_type=axis_type, devices=devices)


def place(case: Case, inputs: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Returns the inputs on the devices of the mesh, with tokens [B, S] where the layout has a batch."""
    assert case.layout is not None
    placed = dict(inputs)
    specs = moax.param_specs(case.config, mesh=mesh)
    params = {}
    for name, value in vars(inputs["params"]).items():
        if value is not None:
            spec = jax.P(None, *getattr(specs, name))
            params[name] = jax.device_put(value, NamedSharding(mesh, spec))
    placed["params"] = moax.MoEParams(**params)
    for name in BY_TOKEN:
        value = inputs[name]
        if value is None:
            continue
        if case.layout.batch is not None:
            value = value.reshape(len(value), case.layout.batch, -1, *value.shape[2:])
        dims = value.ndim - 1
        leading = 1
        if case.layout.batch is not None:
            leading = 2
        tokens = token_spec(moax.Axes(), leading + 1, mesh)
        spec = jax.P(None, *tokens[:leading], *[None] * (dims - leading))
        placed[name] = jax.device_put(value, NamedSharding(mesh, spec))
    return placed


def make_mesh_programs(case: Case, kernels: str, inputs: dict[str, Any]) -> Programs:
    """Returns the compiled programs of a case on its mesh, on one device by XLA, and of the reference.

    Nothing runs while they compile. The program of the mesh runs twice at each call.

    Raises:
      DifferentBits: the two runs of a call differ.
    """
    assert case.layout is not None
    layout = case.layout
    mesh = make_mesh_of(layout)
    with jax.set_mesh(mesh):
        placed = place(case, inputs, mesh)
        on_mesh: Any = by_moax(case, kernels, layout.exchange)
        compiled = on_mesh.lower(placed).compile()
    one_device: Any = by_moax(case, "xla")
    reference: Any = by_reference(case)
    own = jax.tree.map(lambda v: v[0], inputs)
    experts = np.zeros((case.tokens, case.config.top_k), np.int32)

    def run_twice(inputs: dict[str, Any]) -> dict[str, Any]:
        with jax.set_mesh(mesh):
            placed = place(case, inputs, mesh)
            first, second = (jax.device_get(compiled(placed)) for _ in range(2))
        compare_bits(first, second)
        for name in RESULTS_BY_TOKEN:
            if name in first and layout.batch is not None:
                value = first[name]
                first[name] = value.reshape(len(value), case.tokens, *value.shape[3:])
        return first

    one_device = one_device.lower(inputs).compile()
    return Programs(run_twice, one_device, reference.lower(own, experts).compile())


def compare_bits(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Raises DifferentBits where two runs differ."""
    names = [name for name in first if first[name].tobytes() != second[name].tobytes()]
    if names:
        raise DifferentBits(f"two runs of one program differ in {', '.join(sorted(names))}")
