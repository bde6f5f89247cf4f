"""`moax bench quantize`, fused with the activation: a = silu(gate) up of h = [gate, up], and its backward.

    swiglu       h -> a by rows                                          forward
    swiglu grad  h, d_a, weights -> a by columns, d_h by rows and by columns, <d_a, a> of each row

Bytes are those of real rows, each input read once, data and scales written; the peer is the same in plain jnp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import error, limits
from benchmarks.kernels import ours
from moax.tune.cases import Case
from moax.tune.problem import Problem, quantize_rows
from benchmarks.report import Row, compare, why
from moax.tune.timing import Repeats, kernel_time
from moax.groups import BLOCK

SAMPLE = 64


@dataclasses.dataclass(frozen=True)
class Hidden:
    """`rows` real rows of an expert's hidden width in `groups` groups."""

    name: str
    rows: int
    width: int
    groups: int


PERF = (
    Hidden("mixtral h", 16384, 14336, 8),
    Hidden("qwen3 h", 131072, 768, 128),
    Hidden("gpt-oss h", 65536, 2880, 128),
    Hidden("dsv3 h", 65536, 2048, 32),
)
TINY = (Hidden("tiny h", 200, 96, 3),)
BY_ROW = 1 + 4 / BLOCK  # bytes of a quantized value and its share of a scale


def rows(sources: list[Hidden], peers: bool, repeats: Repeats, found: dict[str, Any]) -> Iterator[Row]:
    """For each source and direction our row, then that of plain jnp."""
    for source in sources:
        problem = Problem(Case(source.name, source.rows, 2 * source.width, source.width, source.groups))
        h, d_a, index = problem.x, problem.dy, problem.index
        weights = jax.random.uniform(jax.random.key(3), (problem.num_rows,), jnp.float32)
        values = source.rows * source.width
        kinds = (
            ("swiglu", ours.activate, _forward, (h,), values * (4 + BY_ROW)),
            ("swiglu grad", ours.activate_grad, _backward, (h, d_a, weights), values * (6 + 5 * BY_ROW)),
        )
        for kind, own, plain, args, nbytes in kinds:
            want = _reference(kind, args, index)

            def build(own=own, problem=problem):
                return own(problem.blocks())

            group = [_row(source, kind, "moax", "mosaic", build, args, want, nbytes, repeats, found)]
            if peers:
                group.append(_row(source, kind, "jnp", "xla", lambda f=plain: f, args, want, nbytes, repeats, found))
            compare(group)
            yield from group


def _swiglu(h):
    gate, up = jnp.split(h.astype(jnp.float32), 2, axis=-1)
    return jax.nn.silu(gate) * up


@jax.jit
def _forward(h):
    return quantize_rows(_swiglu(h))


@jax.jit
def _backward(h, d_a, weights):
    a, pull = jax.vjp(_swiglu, h)
    inner = jnp.sum(d_a.astype(jnp.float32) * a, axis=-1)
    (d_h,) = pull(d_a.astype(jnp.float32) * weights[:, None])
    return quantize_rows((a * weights[:, None]).T), quantize_rows(d_h), quantize_rows(d_h.T), inner


def _reference(kind: str, args: tuple, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows to look at, a of forward or d_h of backward there, in float64)."""
    some = index[np.linspace(0, len(index) - 1, min(len(index), SAMPLE)).astype(np.int32)]
    gate, up = np.split(error.double(args[0][some]), 2, axis=-1)
    sigmoid = 1.0 / (1.0 + np.exp(-gate))
    if kind == "swiglu":
        return some, gate * sigmoid * up
    d_a = error.double(args[1][some]) * error.double(args[2][some])[:, None]
    d_gate = d_a * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return some, np.concatenate([d_gate, d_a * gate * sigmoid], axis=-1)


def _row(
    source, kind, impl, path, build: Callable, args, want, nbytes: float, repeats: Repeats, found: dict[str, Any]
) -> Row:
    row = Row("quantize", source.name, kind, impl, "fp8_block", path=path, extra=dataclasses.asdict(source))
    try:
        f = build()
        timing = kernel_time(f, args, repeats)
        out = f(*args)
        by_rows = out if kind == "swiglu" else out[1]
        row.error = error.relative([error.operand_rows(by_rows, want[0])], [want[1]])
        row.us, row.method = timing.us, timing.method
    except Exception as failure:
        row.us, row.note = None, why(failure)
        return row
    row.tb_s = nbytes / row.us * 1e-6
    row.limit, row.fraction = limits.fraction(found, row.us, 0.0, nbytes, "bf16")
    return row
