"""`python -m benchmarks exchange`: tokens to the ranks of their experts and back, over devices of this machine as ep.

    dispatch   received rows, ids and weights of tokens
    combine    y[t] = the sum of the rows that token t became

By `one_sided`, once for each number of multiprocessors that is asked for, beside it by `all_gather`; the same bytes by
one all-to-all of NCCL: as many rows between every two devices, neither gathered before nor summed after; and the same
rows by `lax.ragged_all_to_all`, as installed and as XLA decomposes it (`peers.ragged`: what it favours).

Bytes are those of real rows, scales included, that cross from one device to another, of the device that sends or
receives most: an exchange ends with its busiest wire. `us` is the wall clock of a round, of many in one program
(`rounds`), and `tb_s` the rate by it; `extra` has that of single calls, which is the host's, and kernel time.
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
    """devices: the first so many, None for all; sms: numbers of multiprocessors of our kernel, None for its own choice;
    peers: whether they are measured, and what those in other processes said."""

    devices: int | None = None
    sms: tuple[int | None, ...] = (None,)
    peers: bool = True
    ragged: ragged_peer.Answers = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One direction of an exchange of T = `tokens` a device, of one device; equal ones compile once."""

    static: ExchangeSpec
    direction: str
    tokens: int

    def __call__(self, rows, *plan):
        if self.direction == "dispatch":
            return dispatch_forward(self.static, rows, *plan)
        return combine_forward(self.static, rows, plan[0], self.tokens)


def parse_sms(text: str | None) -> tuple[int | None, ...]:
    """Numbers with commas.

    Raises:
      ValueError: something else, or a number below 1.
    """
    numbers = [part.strip() for part in (text or "").split(",")]
    if text is not None and not all(number.isdecimal() and int(number) for number in numbers):
        raise ValueError(f"--sms {text}: must be numbers of multiprocessors with commas, as 16,32")
    return (None,) if text is None else tuple(map(int, numbers))


def rows(cases: list[Tokens], how: How, repeats: Repeats) -> Iterator[Row]:
    """For each case, wire and direction our rows, then those of the others.

    Raises:
      ValueError: devices or multiprocessors that are not there.
    """
    mesh, most = rounds.mesh_of(how.devices), max(sms or 0 for sms in how.sms)
    if most > count_sms():  # blocks of threads that wait for those of peers must all be running
        raise ValueError(f"--sms {most}: there are {count_sms()} multiprocessors")
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
    for impl, said in how.ragged.items():
        made = _empty(case, wire, direction, impl, nbytes, mesh)
        _fill(made, dict(ragged_peer.find(said, case.name, wire, direction)))
        yield made


def _ours(case: Tokens, wire: str, direction: str, impl: str, args: tuple, mesh: Mesh, sms: int | None = None):
    """(function of one device, global operands) of an exchange of `moax.ops`."""
    view = find_mesh_view(Axes(), "auto", args[0])
    transport = select_transport(TRANSPORTS[impl], view, wire_bytes(args[0], WIRES[wire]))
    slots = slots_per_pair(case.tokens, case.top_k, mesh.size, None)
    kernels = select_kernels("auto", args[0].dtype, width=case.width)
    static = ExchangeSpec(transport, view.roles, slots, WIRES[wire], kernels, sms, num_experts=case.experts)
    dispatch = Exchange(static, "dispatch", case.tokens)
    if direction == "dispatch":
        return dispatch, args
    received = rounds.single(dispatch, mesh)(*args)
    real = (received.experts < case.experts // mesh.size).any(-1, keepdims=True)
    return Exchange(static, "combine", case.tokens), (jnp.where(real, received.rows, 0), received.slots)


def _even(each: int, size: int, mesh: Mesh) -> tuple[jax.Array]:
    """`each` rows of `size` bytes from every device to every device."""
    draw = lambda: jax.random.bits(jax.random.key(1), (mesh.size**2 * each, size), jnp.uint8)  # noqa: E731
    return (jax.jit(draw, out_shardings=named(mesh, rounds.EP))(),)


def _error(y: jax.Array, args: tuple, experts: int) -> float:
    """Of the sum of what a token became: as many times the token as ranks, each of so many experts, own one of its."""
    some = np.linspace(0, len(args[0]) - 1, SAMPLE).astype(np.int64)
    ranks = np.array([len(set(row)) for row in np.asarray(args[1])[some] // experts])
    got, x = (error.double(np.asarray(v)[some]) for v in (y, args[0]))
    return error.relative([got], [x * ranks[:, None]])


def _empty(case: Tokens, wire: str, direction: str, impl: str, nbytes: int, mesh: Mesh) -> Row:
    dtype = "bfloat16" if wire == "none" else "e4m3"
    row = Row(op="exchange", case=case.name, direction=direction, impl=impl, recipe=wire, dtype=dtype)
    row.path = HOPPER if impl == OURS else "xla"
    row.extra = dataclasses.asdict(case) | {"devices": mesh.size, "remote_bytes": nbytes}
    return row


def _fill(row: Row, found: dict) -> None:
    """Takes over what was measured, or the note that says why not."""
    row.note, row.us = found.get("note", ""), found.pop("us", None)
    if row.us:
        row.method, row.tb_s = "wall", row.extra["remote_bytes"] / row.us * 1e-6
        row.extra |= {name: value for name, value in found.items() if name not in ("case", "wire", "direction", "note")}
