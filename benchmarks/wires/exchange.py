"""`python -m benchmarks exchange`: the exchange of tokens between the devices of this machine, as ranks of ep.

    dispatch   sends the rows of tokens to the ranks of their experts, with ids and weights
    combine    y[t] = the sum of the rows that token t became

implementation     what it does
one_sided          moax's kernel
all_gather         moax's exchange by a collective of XLA
nccl all-to-all    as many rows between every two devices, without gathering and summing

The bytes are those of real rows and their scales that the busiest device sends to others, or receives from them: an
exchange ends with its busiest wire. `us` is the wall clock of one of many rounds in one program (`rounds`), and `tb_s`
is the rate by `us`. `extra` has the time of single calls, which the host limits, and the kernel time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from benchmarks import error
from benchmarks.report import HOPPER, OURS, Row, compare, why
from benchmarks.timing import Repeats
from benchmarks.tokens import BLOCK, KINDS, Tokens, busiest
from benchmarks.wires import rounds
from moax.exchange import select_transport
from moax.exchange.transport import ExchangeSpec
from moax.kernels import select_kernels
from moax.kernels.hopper.pallas.exchange import SMS
from moax.mesh.axes import Axes
from moax.mesh.specs import find_mesh_view, named
from moax.ops.dispatch_combine import combine_forward, dispatch_forward, wire_bytes
from moax.recipe import Format

WIRES: dict[str, Format | None] = {"none": None, "fp8": Format(block=BLOCK)}
TRANSPORTS: dict[str, str] = {OURS: "one_sided", "all_gather": "all_gather"}
NCCL = "nccl all-to-all"
SAMPLE = 64


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One direction of an exchange, on one device; equal values compile once."""

    static: ExchangeSpec
    direction: str

    def __call__(self, rows, *plan):
        if self.direction == "dispatch":
            return dispatch_forward(self.static, rows, *plan)[0]
        return combine_forward(self.static, rows, plan[0])


def rows(cases: list[Tokens], devices: int | None, peers: bool, repeats: Repeats) -> Iterator[Row]:
    """Yields the rows of moax, then the rows of the peers, for each case, wire and direction."""
    mesh = rounds.mesh_of(devices)
    with jax.set_mesh(mesh):
        for case in cases:
            place = named(mesh, rounds.EP)
            x = jax.random.normal(jax.random.key(0), (case.tokens * mesh.size, case.width), jnp.bfloat16)
            experts = case.choose(mesh.size)
            weights = jnp.ones(experts.shape, jnp.float32)
            args = tuple(jax.device_put(v, place) for v in (x, experts, weights))
            for wire, direction in KINDS:
                group = list(_group(case, wire, direction, args, mesh, peers, repeats))
                compare(group)
                yield from group


def _group(case: Tokens, wire: str, direction: str, args: tuple, mesh: Mesh, peers: bool, repeats: Repeats):
    """Yields the rows of one case, wire and direction."""
    most = busiest(case.between(mesh.size))
    nbytes = most * case.row_bytes(wire)

    def row(impl: str, build: Callable) -> Row:
        dtype = "bfloat16" if wire == "none" else "e4m3"
        path = HOPPER if impl == OURS else "xla"
        made = Row("exchange", case.name, direction, impl, wire, dtype, path)
        made.extra = dataclasses.asdict(case) | {"devices": mesh.size, "remote_bytes": nbytes}
        try:
            if impl == OURS:
                made.extra["sms"], made.tile = SMS, f"sms={SMS}"
            local, operands = build()
            found = rounds.measure(local, operands, mesh, nbytes, repeats)
            made.us, made.method = found.pop("us"), "wall"
            made.tb_s = nbytes / made.us * 1e-6
            made.extra |= found
            if direction == "combine" and impl in TRANSPORTS:
                y = rounds.single(local, mesh)(*operands)
                made.error = _error(y, args, case.experts // mesh.size)
        except Exception as failure:
            made.us, made.note = None, why(failure)
        return made

    yield row(OURS, lambda: _ours(case, wire, direction, OURS, args, mesh))
    if peers:
        yield row("all_gather", lambda: _ours(case, wire, direction, "all_gather", args, mesh))
        each = -(-most // (mesh.size - 1))
        yield row(NCCL, lambda: (all_to_all, _even(each, case.row_bytes(wire), mesh)))


def _ours(case: Tokens, wire: str, direction: str, impl: str, args: tuple, mesh: Mesh):
    """Returns an exchange of `moax.ops` as (function of one device, global operands)."""
    view = find_mesh_view(Axes(), "auto", args[0])
    transport = select_transport(TRANSPORTS[impl], view, wire_bytes(args[0].shape[-1], args[0].dtype, WIRES[wire]))
    kernels = select_kernels("auto", args[0].dtype, width=case.width)
    static = ExchangeSpec(
        transport, view.axes, case.tokens, case.tokens, WIRES[wire], kernels, case.experts, case.tokens
    )
    dispatch = Exchange(static, "dispatch")
    if direction == "dispatch":
        return dispatch, args
    received = rounds.single(dispatch, mesh)(*args)
    real = (received.experts < case.experts // mesh.size).any(-1, keepdims=True)
    return Exchange(static, "combine"), (jnp.where(real, received.rows, 0), received.slots)


def all_to_all(rows: jax.Array) -> jax.Array:
    """Sends the d-th equal part of one device's rows to device d."""
    return lax.all_to_all(rows, "ep", 0, 0, tiled=True)


def _even(each: int, size: int, mesh: Mesh) -> tuple[jax.Array]:
    """Returns `each` rows of `size` bytes from every device to every device."""

    def draw():
        return jax.random.bits(jax.random.key(1), (mesh.size**2 * each, size), jnp.uint8)

    return (jax.jit(draw, out_shardings=named(mesh, rounds.EP))(),)


def _error(y: jax.Array, args: tuple, experts: int) -> float:
    """Returns the error of combine on sampled tokens, whose rows dispatch left unchanged.

    Then y[t] is x[t] times the number of ranks that own at least one of the token's experts; `experts` is the number of
    experts of a rank. Example: with 2 experts a rank, the experts 0, 1 and 5 of a token are on 2 ranks.
    """
    some = np.linspace(0, len(args[0]) - 1, SAMPLE).astype(np.int64)
    ranks = np.array([len(set(row)) for row in np.asarray(args[1])[some] // experts])
    got, x = (error.double(np.asarray(v)[some]) for v in (y, args[0]))
    return error.relative([got], [x * ranks[:, None]])
