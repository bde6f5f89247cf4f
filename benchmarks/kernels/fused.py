"""`python -m benchmarks quantize`: quantization fused with the activation a = silu(gate) up of h = [gate, up].

    swiglu       h -> a by rows                                          forward
    swiglu grad  h, d_a, weights -> a by columns, d_h by rows and by columns, <d_a, a> of each row

"By rows" quantizes 1 x 128 blocks of a row, "by columns" 128 x 1 blocks of a column. The bytes are those of real rows:
each input is read once, data and scales are written. The peer computes the same in plain jnp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import error
from benchmarks.kernels import ours
from benchmarks.kernels.measure import measure
from benchmarks.report import HOPPER, JNP, OURS, Row, compare
from moax.kernels.hopper.formats import BLOCK
from moax.models import find_model
from moax.tune.cases import Case
from moax.tune.problem import Problem, quantize_rows
from moax.tune.timing import Repeats

SAMPLE = 64


@dataclasses.dataclass(frozen=True)
class Hidden:
    """Real rows [rows, width] in `groups` groups, where `width` is the expert width F."""

    name: str
    rows: int
    width: int
    groups: int

    @classmethod
    def of(cls, name: str, model: str, ranks: int, tokens: int) -> Hidden:
        """Returns the hidden rows of one of `ranks` ranks of a model, with `tokens` tokens a rank."""
        shape = find_model(model).on_rank(ranks, tokens)
        return cls(name, shape.rows, shape.d_ff, shape.groups)


PERF = (
    Hidden.of("mixtral h", "mixtral-8x7b", ranks=1, tokens=8192),
    Hidden.of("qwen3 h", "qwen3-30b", ranks=1, tokens=16384),
    Hidden.of("gpt-oss h", "gpt-oss-120b", ranks=1, tokens=16384),
    Hidden.of("dsv3 h", "deepseek-v3", ranks=8, tokens=8192),
)
TINY = (Hidden("tiny h", 200, 96, 3),)
BY_ROW = 1 + 4 / BLOCK  # bytes of a quantized value, its share of a scale included


def rows(sources: list[Hidden], peers: bool, repeats: Repeats, found: dict[str, Any]) -> Iterator[Row]:
    """Yields the row of moax, then that of plain jnp, for each source and direction; `found` are the limits."""
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
            some, want = _reference(kind, args, index)

            def build(own=own, problem=problem):
                return own(problem.blocks())

            def judge(out, kind=kind, some=some, want=want):
                by_rows = out if kind == "swiglu" else out[1]
                return error.Error(error.relative([error.operand_rows(by_rows, some)], [want]))

            extra = dataclasses.asdict(source)
            builds = {OURS: (HOPPER, build)} | ({JNP: ("xla", lambda f=plain: f)} if peers else {})
            group = [
                measure(
                    Row("quantize", source.name, kind, impl, "fp8_block", path=path, extra=extra),
                    make,
                    args,
                    nbytes=nbytes,
                    judge=judge,
                    repeats=repeats,
                    found=found,
                )
                for impl, (path, make) in builds.items()
            ]
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
    """Returns (sampled rows, the float64 values of a in forward, or of d_h in backward, in these rows)."""
    some = index[np.linspace(0, len(index) - 1, min(len(index), SAMPLE)).astype(np.int32)]
    gate, up = np.split(error.double(args[0][some]), 2, axis=-1)
    sigmoid = 1.0 / (1.0 + np.exp(-gate))
    if kind == "swiglu":
        return some, gate * sigmoid * up
    d_a = error.double(args[1][some]) * error.double(args[2][some])[:, None]
    d_gate = d_a * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return some, np.concatenate([d_gate, d_a * gate * sigmoid], axis=-1)
