"""`moax bench exchange`: tokens to the ranks of their experts and back, over all devices of the machine as ep.

    dispatch   received rows, ids and weights of tokens
    combine    y[t] = the sum of the rows that token t became

By `one_sided`, beside it by `all_gather`, and the same bytes by one all-to-all of NCCL: as many rows between every two
devices, neither gathered before nor summed after. Bytes are those of real rows, scales included, that cross from one
device to another, of the device that sends or receives most: an exchange ends with its busiest wire. `us` is wall clock
of back-to-back calls, `tb_s` the rate by it; by kernel time, mean of the devices, `extra` has both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moax import ops
from moax.bench import error, ours
from moax.bench.report import Row, compare, why
from moax.bench.timing import Repeats, call_time, kernel_time
from moax.recipe import Format
from moax.sharding import named, spec

WIRES: dict[str, Format | None] = {"none": None, "fp8": Format(block=128)}
OURS = {"moax": "one_sided", "all_gather": "all_gather"}
NCCL = "nccl all-to-all"
SAMPLE = 64


@dataclasses.dataclass(frozen=True)
class Tokens:
    """T tokens a device of width H, K of E experts each; routing: uniform, zipf (shares 1/rank), or all to one rank."""

    name: str
    tokens: int
    width: int
    experts: int
    top_k: int
    routing: str = "uniform"

    def choose(self, devices: int) -> np.ndarray:
        """Experts of the tokens of all devices [T devices, K], distinct for each token, the same in every run."""
        draw = np.random.default_rng([11, self.tokens, self.experts])
        scores = draw.gumbel(size=(self.tokens * devices, self.experts)).astype(np.float32)
        if self.routing == "zipf":
            scores -= np.log(draw.permutation(np.arange(1, self.experts + 1, dtype=np.float32)))
        if self.routing == "one":
            scores[:, self.experts // devices :] = -np.inf
        return np.argsort(-scores, axis=1)[:, : self.top_k].astype(np.int32)


SIZES = (("mixtral", 8192, 4096, 8, 2), ("qwen3", 8192, 2048, 128, 8), ("dsv3", 4096, 7168, 256, 8))
PERF = tuple(Tokens(f"{s[0]} {routing}", *s[1:], routing) for s in SIZES for routing in ("uniform", "zipf", "one"))
TINY = tuple(Tokens(f"tiny {routing}", 32, 128, 16, 2, routing) for routing in ("uniform", "one"))


def rows(cases: list[Tokens], peers: bool, repeats: Repeats) -> Iterator[Row]:
    """For each case, wire and direction our row, then those of the others."""
    devices = jax.local_device_count()
    mesh = jax.make_mesh((devices,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.local_devices())
    with jax.set_mesh(mesh):
        for case in cases:
            place = named(mesh, spec("ep"))
            x = jax.random.normal(jax.random.key(0), (case.tokens * devices, case.width), jnp.bfloat16)
            experts = case.choose(devices)
            weights = jnp.ones(experts.shape, jnp.float32)
            args = tuple(jax.device_put(v, place) for v in (x, experts, weights))
            pairs = _rows_between(experts, case, devices)
            for wire in WIRES:
                yield from _both(case, wire, args, pairs, peers, repeats)


def _rows_between(experts: np.ndarray, case: Tokens, devices: int) -> np.ndarray:
    """How many rows go from device (dim 0) to device (dim 1)."""
    owner = (experts // (case.experts // devices)).reshape(devices, case.tokens, case.top_k)
    return np.stack([(owner == rank).any(-1).sum(-1) for rank in range(devices)], axis=1)


def _both(case: Tokens, wire: str, args: tuple, pairs: np.ndarray, peers: bool, repeats: Repeats) -> Iterator[Row]:
    away = pairs * (1 - np.eye(len(pairs), dtype=pairs.dtype))
    busiest = int(max(away.sum(0).max(), away.sum(1).max()))
    travels = {"dispatch": "bfloat16" if wire == "none" else "e4m3", "combine": "bfloat16"}
    directions = ("dispatch", "combine") if wire == "none" else ("dispatch",)  # sums travel as they are
    impls = list(OURS) if peers else ["moax"]
    for direction in directions:
        size = case.width * 2 if travels[direction] == "bfloat16" else case.width + 4 * -(-case.width // 128)
        group = []
        for impl in impls:
            build = lambda impl=impl, to=direction: _program(case, OURS[impl], WIRES[wire], to, args)  # noqa: E731
            group.append(_row(case, direction, impl, wire, travels[direction], build, busiest * size, repeats))
            if direction == "combine" and group[-1].us:
                group[-1].error = _error(case, OURS[impl], args, pairs)
        if peers:
            each = -(-busiest // max(len(pairs) - 1, 1))
            build = lambda each=each, size=size: _all_to_all(each, size, len(pairs))  # noqa: E731
            group.append(_row(case, direction, NCCL, wire, travels[direction], build, busiest * size, repeats))
        compare(group)
        yield from group


def _program(case: Tokens, exchange: str, wire: Format | None, direction: str, args: tuple) -> tuple[Callable, tuple]:
    @jax.jit
    def dispatch(x, experts, weights):
        return ops.dispatch(x, experts, weights, case.experts, exchange=exchange, wire=wire)  # pyrefly: ignore

    if direction == "dispatch":
        return dispatch, args
    received = dispatch(*args)
    real = (received.experts < case.experts // jax.local_device_count()).any(-1, keepdims=True)
    return jax.jit(ops.combine), (jnp.where(real, received.rows, 0), received)


def _all_to_all(each: int, size: int, devices: int) -> tuple[Callable, tuple]:
    """`each` rows of `size` bytes from every device to every device."""
    mesh = jax.sharding.get_mesh()
    x = jax.random.bits(jax.random.key(1), (devices, devices, each, size), jnp.uint8)
    x = jax.device_put(x, named(mesh, spec("ep")))
    return jax.jit(lambda v: v, out_shardings=named(mesh, spec((), "ep"))), (x,)


def _error(case: Tokens, exchange: str, args: tuple, pairs: np.ndarray) -> float:
    """Of the sum of what a token became: as many times the token as ranks own one of its experts."""
    combine, operands = _program(case, exchange, None, "combine", args)
    some = np.linspace(0, len(args[0]) - 1, SAMPLE).astype(np.int64)
    owner = np.asarray(args[1])[some] // (case.experts // len(pairs))
    ranks = np.array([len(set(row)) for row in owner])
    got, x = (error.double(np.asarray(v)[some]) for v in (combine(*operands), args[0]))
    return error.relative([got], [x * ranks[:, None]])


def _row(case, direction, impl, wire, dtype, build, nbytes: int, repeats: Repeats) -> Row:
    row = Row("exchange", case.name, direction, impl, recipe=wire, dtype=dtype, extra=dataclasses.asdict(case))
    row.path = "mosaic" if impl == "moax" else "xla"
    try:
        f, args = build()
        timing = call_time(f, args, repeats)
        row.us, row.method, row.tb_s = timing.us, timing.method, nbytes / timing.us * 1e-6
        if impl == "moax":
            row.extra["sms"] = ours.exchange_sms()
        row.extra |= {"remote_bytes": nbytes, **_kernels(f, args, nbytes, repeats)}
    except Exception as failure:
        row.us, row.note = None, why(failure)
    return row


def _kernels(f, args, nbytes: int, repeats: Repeats) -> dict[str, Any]:
    """Kernel time of a call, mean of the devices, and its longest kernel, which is the one that moves the rows."""
    timing = kernel_time(f, args, dataclasses.replace(repeats, warmups=1))
    if not timing.kernels:
        return {}
    us, (name, longest) = timing.us / jax.local_device_count(), max(timing.kernels, key=lambda kernel: kernel[1])
    return {
        "kernel_us": us,
        "kernel_gb_s": nbytes / us * 1e-3,
        "longest": name,
        "longest_us": longest,
        "longest_gb_s": nbytes / longest * 1e-3,
    }
