"""`python -m benchmarks exchange`: the exchange of tokens between the devices of this machine, as ranks of ep.

    dispatch   sends the rows of tokens to the ranks of their experts, with ids and weights
    combine    y[t] = the sum of the rows that token t became

implementation     what it does
one_sided          moax's kernel
all_gather         moax's exchange by a collective of XLA
nccl all-to-all    as many rows between every two devices, without gathering and summing

The bytes are those of real rows and their scales that the busiest device sends to others, or receives from them: an
exchange ends with its busiest wire. `us` is the wall clock of one of ROUNDS rounds in one program, since the host takes
longer to launch a call than the devices take to exchange some rows; `tb_s` is the rate by `us`. `extra` has the time of
single calls, which the host limits, and of their kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh

from benchmarks.report import HOPPER, OURS, Row, compare, why
from benchmarks.timing import Repeats, call_time, kernel_time
from moax.exchange import select_transport
from moax.exchange.transport import ExchangeSpec
from moax.kernels import select_kernels
from moax.kernels.hopper.pallas.exchange import SMS
from moax.mesh.axes import Axes
from moax.mesh.specs import Spec, find_mesh_view, named
from moax.models import find_model
from moax.ops.dispatch_combine import combine_forward, dispatch_forward
from moax.recipe import Format

# Each kind is (wire, direction). Sums are not quantized.
KINDS = (("none", "dispatch"), ("none", "combine"), ("fp8", "dispatch"))
BLOCK = 128  # elements of an FP8 row that share a scale of 4 bytes
WIRES: dict[str, Format | None] = {"none": None, "fp8": Format(block=BLOCK)}
TRANSPORTS: dict[str, str] = {OURS: "one_sided", "all_gather": "all_gather"}
NCCL = "nccl all-to-all"
ROUNDS = 10
EP = Spec("ep")  # the spec of all operands and results


@dataclasses.dataclass(frozen=True)
class Tokens:
    """T tokens of a device, of width H, each for K of E experts.

    `routing` is `uniform`; `zipf`, where expert popularity is 1 / rank; or `one`: all experts are of one rank.
    """

    name: str
    tokens: int
    width: int
    experts: int
    top_k: int
    routing: str = "uniform"

    def choose(self, devices: int) -> np.ndarray:
        """Draws distinct experts of the tokens of all devices, [T devices, K] i32; they are the same in every run."""
        draw = np.random.default_rng([11, self.tokens, self.experts])
        scores = draw.gumbel(size=(self.tokens * devices, self.experts)).astype(np.float32)
        if self.routing == "zipf":
            scores -= np.log(draw.permutation(np.arange(1, self.experts + 1, dtype=np.float32)))
        if self.routing == "one":
            scores[:, self.experts // devices :] = -np.inf
        return np.argsort(-scores, axis=1)[:, : self.top_k].astype(np.int32)

    def busiest(self, devices: int) -> int:
        """Returns the rows that the busiest device sends to others in dispatch, or receives from them."""
        owner = (self.choose(devices) // (self.experts // devices)).reshape(
            devices,
            self.tokens,
            self.top_k,
        )
        # rows[from, to] is the number of rows between two ranks.
        rows = np.stack([(owner == rank).any(-1).sum(-1) for rank in range(devices)], axis=1)
        np.fill_diagonal(rows, 0)
        return int(max(rows.sum(0).max(), rows.sum(1).max()))

    def row_bytes(self, wire: str) -> int:
        """Returns the bytes of a row on the wire, scales included; `wire` is `none` or `fp8`."""
        if wire == "none":
            return self.width * 2
        return self.width + 4 * -(-self.width // BLOCK)


MODELS = (
    ("mixtral", "mixtral-8x7b", 8192),
    ("qwen3", "qwen3-30b", 8192),
    ("dsv3", "deepseek-v3", 4096),
)


def _of_models() -> Iterator[Tokens]:
    for name, model, tokens in MODELS:
        config = find_model(model).config
        for routing in ("uniform", "zipf", "one"):
            yield Tokens(f"{name} {routing}", tokens, config.d_model, config.num_experts, config.top_k, routing)


PERF = tuple(_of_models())
TINY = tuple(Tokens(f"tiny {routing}", 32, 128, 16, 2, routing) for routing in ("uniform", "one"))


def mesh_of(devices: int | None) -> Mesh:
    """Returns the mesh of the first `devices` devices as ep; None takes all devices."""
    local = jax.local_devices()
    count = len(local) if devices is None else devices
    if not 2 <= count <= len(local):
        raise ValueError(f"--devices {count}: an exchange needs 2 devices or more; JAX has {len(local)}")
    return jax.make_mesh((count,), ("ep",), axis_types=(AxisType.Auto,), devices=local[:count])


@functools.cache
def single(local: Callable, mesh: Mesh) -> Callable:
    """Returns `local`, a function of one device's shards, as a jitted function of global arrays."""
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=EP, out_specs=EP, check_vma=False))


@functools.cache
def rounds(local: Callable, mesh: Mesh, count: int = ROUNDS) -> Callable:
    """Returns `count` rounds of `local`, a function of one device's shards, as one jitted program."""

    def one(_, carry):
        # No round can start early, and XLA cannot compute a part of it before the loop.
        args, results = lax.optimization_barrier((carry[0], local(*carry[0])))
        # An element of each result is a part of the program's, so that XLA must compute every result.
        elements = [lax.slice(v, (0,) * v.ndim, (1,) * v.ndim).reshape(1) for v in jax.tree.leaves(results)]
        return args, sum((v.astype(jnp.float32) for v in elements), carry[1])

    def loop(*args):
        return lax.fori_loop(0, count, one, (args, jnp.zeros(1, jnp.float32)))[1]

    return single(loop, mesh)


def measure(
    local: Callable,
    args: tuple,
    mesh: Mesh,
    nbytes: int,
    repeats: Repeats,
) -> dict[str, Any]:
    """Measures `local` in rounds and in single calls."""
    call = single(local, mesh)
    times: dict[str, Any] = {"us": call_time(rounds(local, mesh), args, repeats).us / ROUNDS}
    times["call_us"] = call_time(call, args, repeats).us
    timing = kernel_time(call, args, dataclasses.replace(repeats, warmups=1))
    if not timing.kernels:
        return times
    us = timing.us / mesh.size
    name, longest = max(timing.kernels, key=lambda kernel: kernel[1])
    rates = {"kernel_us": us, "kernel_gb_s": nbytes / us * 1e-3}
    return times | rates | {"longest": name, "longest_us": longest, "longest_gb_s": nbytes / longest * 1e-3}


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
    mesh = mesh_of(devices)
    with jax.set_mesh(mesh):
        for case in cases:
            place = named(mesh, EP)
            x = jax.random.normal(
                jax.random.key(0),
                (case.tokens * mesh.size, case.width),
                jnp.bfloat16,
            )
            experts = case.choose(mesh.size)
            weights = jnp.ones(experts.shape, jnp.float32)
            args = tuple(jax.device_put(v, place) for v in (x, experts, weights))
            for wire, direction in KINDS:
                group = list(_group(case, wire, direction, args, mesh, peers, repeats))
                compare(group)
                yield from group


def _group(
    case: Tokens,
    wire: str,
    direction: str,
    args: tuple,
    mesh: Mesh,
    peers: bool,
    repeats: Repeats,
):
    """Yields the rows of one case, wire and direction."""
    busiest = case.busiest(mesh.size)
    nbytes = busiest * case.row_bytes(wire)

    def row(impl: str, build: Callable) -> Row:
        dtype = "bfloat16" if wire == "none" else "e4m3"
        path = HOPPER if impl == OURS else "xla"
        result = Row("exchange", case.name, direction, impl, wire, dtype, path)
        result.extra = dataclasses.asdict(case) | {"devices": mesh.size, "remote_bytes": nbytes}
        try:
            if impl == OURS:
                result.extra["sms"] = SMS
                result.tile = f"sms={SMS}"
            local, operands = build()
            times = measure(local, operands, mesh, nbytes, repeats)
            result.us = times.pop("us")
            result.method = "wall"
            result.tb_s = nbytes / result.us * 1e-6
            result.extra |= times
        except Exception as failure:
            result.us = None
            result.note = why(failure)
        return result

    yield row(OURS, lambda: _ours(case, wire, direction, OURS, args, mesh))
    if peers:
        yield row("all_gather", lambda: _ours(case, wire, direction, "all_gather", args, mesh))
        each = -(-busiest // (mesh.size - 1))
        yield row(NCCL, lambda: (all_to_all, _even(each, case.row_bytes(wire), mesh)))


def _ours(case: Tokens, wire: str, direction: str, impl: str, args: tuple, mesh: Mesh):
    """Returns an exchange of `moax.ops` as (function of one device, global operands)."""
    view = find_mesh_view(Axes(), "auto", args[0])
    row_bytes = args[0].shape[-1] * (args[0].dtype.itemsize if WIRES[wire] is None else 1)
    transport = select_transport(TRANSPORTS[impl], view, row_bytes)
    kernels = select_kernels("auto", args[0].dtype, width=case.width)
    static = ExchangeSpec(
        transport,
        view.axes,
        mesh.size,
        case.tokens,
        case.tokens,
        WIRES[wire],
        kernels,
        case.experts,
        case.tokens,
    )
    dispatch = Exchange(static, "dispatch")
    if direction == "dispatch":
        return dispatch, args
    received = single(dispatch, mesh)(*args)
    real = (received.experts < case.experts // mesh.size).any(-1, keepdims=True)
    return Exchange(static, "combine"), (jnp.where(real, received.rows, 0), received.slots)


def all_to_all(rows: jax.Array) -> jax.Array:
    """Sends the d-th equal part of one device's rows to device d."""
    return lax.all_to_all(rows, "ep", 0, 0, tiled=True)


def _even(each: int, size: int, mesh: Mesh) -> tuple[jax.Array]:
    """Returns `each` rows of `size` bytes from every device to every device."""

    def draw():
        return jax.random.bits(jax.random.key(1), (mesh.size**2 * each, size), jnp.uint8)

    return (jax.jit(draw, out_shardings=named(mesh, EP))(),)
