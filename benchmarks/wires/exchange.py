"""`python -m benchmarks exchange`: the exchange of tokens between the devices of this machine, as ranks of ep.

    dispatch   sends the rows of tokens to the ranks of their experts, with ids and weights
    combine    y[t] = the sum of the rows that token t became

implementation       what it does
one_sided            moax's kernel, once for each wanted number of multiprocessors
all_gather           moax's exchange by a collective of XLA
nccl all-to-all      as many rows between every two devices, without gathering and summing
ragged_all_to_all    the same rows, as XLA is installed, and as XLA decomposes it (`peers.ragged`)

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
from jax.sharding import Mesh

from benchmarks import error
from benchmarks.kernels import ours
from benchmarks.peers import ragged_peer, wires
from benchmarks.report import HOPPER, OURS, Row, compare, why
from benchmarks.tokens import BLOCK, KINDS, Tokens, busiest
from benchmarks.wires import rounds
from moax.backend import count_sms
from moax.kernels import select_kernels
from moax.mesh.axes import Axes
from moax.mesh.partition import find_mesh_view
from moax.mesh.place import named
from moax.ops.exchange import (
    ExchangeSpec,
    combine_forward,
    dispatch_forward,
    select_transport,
    slots_per_pair,
    wire_bytes,
)
from moax.recipe import Format
from moax.tune.timing import Repeats

WIRES: dict[str, Format | None] = {"none": None, "fp8": Format(block=BLOCK)}
TRANSPORTS: dict[str, str] = {OURS: "one_sided", "all_gather": "all_gather"}
NCCL = "nccl all-to-all"
SAMPLE = 64


@dataclasses.dataclass(frozen=True)
class How:
    """How the exchange runs.

    Attributes:
      devices: number of devices; None takes all.
      sms: numbers of multiprocessors of moax's kernel; None in it takes the kernel's own choice.
      peers: whether to measure the peers.
      ragged: the results of the peers in other processes.
    """

    devices: int | None = None
    sms: tuple[int | None, ...] = (None,)
    peers: bool = True
    ragged: ragged_peer.Answers = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One direction of an exchange of `tokens` tokens a device, on one device; equal values compile once."""

    static: ExchangeSpec
    direction: str
    tokens: int

    def __call__(self, rows, *plan):
        if self.direction == "dispatch":
            return dispatch_forward(self.static, rows, *plan)[0]
        return combine_forward(self.static, rows, plan[0], self.tokens)


def parse_sms(text: str | None) -> tuple[int | None, ...]:
    """Parses --sms: "16,32" -> (16, 32), and None -> (None,).

    Raises:
      ValueError: the text has anything else than numbers of at least 1.
    """
    numbers = [part.strip() for part in (text or "").split(",")]
    if text is not None and not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"--sms {text} must be numbers of multiprocessors with commas, as 16,32")
    return (None,) if text is None else tuple(map(int, numbers))


def rows(cases: list[Tokens], how: How, repeats: Repeats) -> Iterator[Row]:
    """Yields the rows of moax, then those of the peers, for each case, wire and direction.

    Raises:
      ValueError: the machine has fewer devices, or a device has fewer multiprocessors.
    """
    mesh, most = rounds.mesh_of(how.devices), max(sms or 0 for sms in how.sms)
    if most > count_sms():  # All thread blocks must run at once, since they wait for thread blocks of peers.
        raise ValueError(f"--sms {most}: a device has {count_sms()} multiprocessors")
    with jax.set_mesh(mesh):
        for case in cases:
            place = named(mesh, rounds.EP)
            x = jax.random.normal(jax.random.key(0), (case.tokens * mesh.size, case.width), jnp.bfloat16)
            experts = case.choose(mesh.size)
            weights = jnp.ones(experts.shape, jnp.float32)
            args = tuple(jax.device_put(v, place) for v in (x, experts, weights))
            for wire, direction in KINDS:
                group = list(_group(case, wire, direction, args, mesh, how, repeats))
                compare(group)
                yield from group


def _group(case: Tokens, wire: str, direction: str, args: tuple, mesh: Mesh, how: How, repeats: Repeats):
    """Yields the rows of one case, wire and direction."""
    most = busiest(case.between(mesh.size))
    nbytes = most * case.row_bytes(wire)

    def row(impl: str, build: Callable, sms: int | None = None) -> Row:
        made = _empty(case, wire, direction, impl, nbytes, mesh)
        try:
            if impl == OURS:
                made.extra["sms"] = sms or ours.exchange_sms()
                made.tile = f"sms={made.extra['sms']}"
            local, operands = build()
            _fill(made, rounds.measure(local, operands, mesh, nbytes, repeats))
            if direction == "combine" and impl in TRANSPORTS:
                y = rounds.single(local, mesh)(*operands)
                made.error = _error(y, args, case.experts // mesh.size)
        except Exception as failure:
            made.us, made.note = None, why(failure)
        return made

    for sms in how.sms:
        yield row(OURS, lambda sms=sms: _ours(case, wire, direction, OURS, args, mesh, sms), sms)
    if how.peers:
        yield row("all_gather", lambda: _ours(case, wire, direction, "all_gather", args, mesh))
        each = -(-most // (mesh.size - 1))
        yield row(NCCL, lambda: (wires.all_to_all, _even(each, case.row_bytes(wire), mesh)))
    for impl, answers in how.ragged.items():
        made = _empty(case, wire, direction, impl, nbytes, mesh)
        _fill(made, dict(ragged_peer.find(answers, case.name, wire, direction)))
        yield made


def _ours(case: Tokens, wire: str, direction: str, impl: str, args: tuple, mesh: Mesh, sms: int | None = None):
    """Returns an exchange of `moax.ops` as (function of one device, global operands)."""
    view = find_mesh_view(Axes(), "auto", args[0])
    transport = select_transport(TRANSPORTS[impl], view, wire_bytes(args[0], WIRES[wire]))
    slots = slots_per_pair(case.tokens, case.top_k, mesh.size, None)
    kernels = select_kernels("auto", args[0].dtype, width=case.width)
    static = ExchangeSpec(
        transport, view.roles, slots, WIRES[wire], kernels, sms, num_experts=case.experts, capacity=slots
    )
    dispatch = Exchange(static, "dispatch", case.tokens)
    if direction == "dispatch":
        return dispatch, args
    received = rounds.single(dispatch, mesh)(*args)
    real = (received.experts < case.experts // mesh.size).any(-1, keepdims=True)
    return Exchange(static, "combine", case.tokens), (jnp.where(real, received.rows, 0), received.slots)


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


def _empty(case: Tokens, wire: str, direction: str, impl: str, nbytes: int, mesh: Mesh) -> Row:
    """Returns an empty row; `nbytes` are the bytes of the busiest wire."""
    dtype = "bfloat16" if wire == "none" else "e4m3"
    row = Row(op="exchange", case=case.name, direction=direction, impl=impl, recipe=wire, dtype=dtype)
    row.path = HOPPER if impl == OURS else "xla"
    row.extra = dataclasses.asdict(case) | {"devices": mesh.size, "remote_bytes": nbytes}
    return row


def _fill(row: Row, found: dict) -> None:
    """Fills the row with a measurement, or with the note that says why there is none."""
    row.note, row.us = found.get("note", ""), found.pop("us", None)
    if row.us:
        row.method, row.tb_s = "wall", row.extra["remote_bytes"] / row.us * 1e-6
        row.extra |= {name: value for name, value in found.items() if name not in ("case", "wire", "direction", "note")}
