"""`python -m benchmarks quantize`: quantizing rows to FP8 by rows, by columns, or both in one read, and weights.

The scale blocks are 1 x 128 for rows and 128 x 128 for weights. "By columns" transposes the rows too. The bytes are
those of real rows, which are read once, plus the data and scales that are written. The peer computes the same in plain
jnp under jit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import error
from benchmarks.kernels import ours
from benchmarks.kernels.measure import measure
from benchmarks.report import HOPPER, JNP, OURS, Row, compare
from moax.kernels.hopper.formats import BLOCK, KMajorFp8
from moax.models import find_model
from moax.tune.cases import Case
from moax.tune.problem import Problem, quantize_rows, quantize_weight
from moax.tune.timing import Repeats

SAMPLE = 64  # rows or columns that are compared with float64


@dataclasses.dataclass(frozen=True)
class Source:
    """The values to quantize: sorted rows [rows, width] of `groups` groups, or a weight [groups, rows, width]."""

    name: str
    rows: int
    width: int
    groups: int
    weight: bool = False

    @classmethod
    def of_rows(cls, name: str, model: str, ranks: int, tokens: int) -> Source:
        """Returns the expert-sorted rows of one of `ranks` ranks of a model, with `tokens` tokens a rank."""
        shape = find_model(model).on_rank(ranks, tokens)
        return cls(name, shape.rows, shape.d_model, shape.groups)

    @classmethod
    def of_wi(cls, name: str, model: str, ranks: int) -> Source:
        """Returns the gate and up projections of the experts of one of `ranks` ranks of a model."""
        shape = find_model(model).on_rank(ranks, tokens=0)
        return cls(name, shape.d_model, shape.hidden, shape.groups, weight=True)

    @property
    def elements(self) -> int:
        """Number of real values."""
        return self.rows * self.width * (self.groups if self.weight else 1)


PERF = (
    Source.of_rows("mixtral", "mixtral-8x7b", ranks=2, tokens=8192),
    Source.of_rows("qwen3", "qwen3-30b", ranks=4, tokens=8192),
    Source.of_rows("dsv3", "deepseek-v3", ranks=16, tokens=4096),
    Source.of_rows("gpt-oss", "gpt-oss-120b", ranks=1, tokens=16384),
    Source("wide", rows=131072, width=4096, groups=32),
    Source.of_wi("mixtral wi", "mixtral-8x7b", ranks=1),
    Source.of_wi("qwen3 wi", "qwen3-30b", ranks=1),
    Source.of_wi("gpt-oss wi", "gpt-oss-120b", ranks=4),
)
TINY = (Source("tiny", 200, 96, 3), Source("tiny wi", 128, 160, 2, weight=True))
KINDS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
WEIGHT_KINDS = {"native": (True, False), "transposed": (False, True), "both": (True, True)}


def rows(sources: list[Source], peers: bool, repeats: Repeats, found: dict[str, Any]) -> Iterator[Row]:
    """Yields the row of moax, then that of plain jnp, for each source and kind; `found` are the limits."""
    for source in sources:
        value, blocks, real = _values(source)
        for kind, wanted in (WEIGHT_KINDS if source.weight else KINDS).items():
            plain = _plain(source, *wanted)
            exact = plain(value)  # Its error is that of rounding alone.

            def own(blocks=blocks, wanted=wanted, weight=source.weight):
                return ours.quantize_weight(*wanted) if weight else ours.quantize(blocks, *wanted)

            scale = 4 / BLOCK / (BLOCK if source.weight else 1)  # bytes of scales for each quantized value
            nbytes = source.elements * (value.dtype.itemsize + sum(wanted) * (1 + scale))
            builds = {OURS: (HOPPER, own)} | ({JNP: ("xla", lambda f=plain: f)} if peers else {})
            group = [
                measure(
                    _row(source, kind, impl, path, value),
                    build,
                    (value,),
                    nbytes=nbytes,
                    judge=functools.partial(_judge, exact, value, real, source.weight),
                    repeats=repeats,
                    found=found,
                )
                for impl, (path, build) in builds.items()
            ]
            compare(group)
            yield from group


def _values(source: Source):
    """Returns (the values to quantize, their Blocks, the indices of real rows)."""
    if source.weight:
        case = Case(source.name, source.groups, source.rows, source.width, source.groups)
        return Problem(case).w, None, np.arange(source.rows)
    problem = Problem(Case(source.name, source.rows, source.width, 16, source.groups))
    return problem.x, problem.blocks(), problem.index


def _plain(source: Source, first: bool, second: bool) -> Callable:
    """Returns the function in plain jnp that makes the first and the second result of moax's kernel."""
    if source.weight:
        make = (lambda w: quantize_weight(w, False)), (lambda w: quantize_weight(w, True))
    else:
        make = quantize_rows, (lambda x: quantize_rows(x.T))
    return jax.jit(lambda x: tuple(f(x) if on else None for f, on in zip(make, (first, second), strict=True)))


def _judge(exact, value, real, weight: bool, out) -> error.Error:
    """Returns the error of `out`, and that of plain jnp's result `exact` as the error of rounding."""
    return error.Error(_error(out, value, real, weight), rounding=_error(exact, value, real, weight))


def _row(source: Source, kind: str, impl: str, path: str, value) -> Row:
    """Returns an empty row."""
    extra = {"shape": list(value.shape), "real_rows": source.rows, "weight": source.weight}
    names = dict(op="quantize", case=source.name, direction=kind, impl=impl, recipe="fp8_block")
    return Row(**names, dtype=str(value.dtype), path=path, extra=extra)


def _error(out: tuple[KMajorFp8 | None, KMajorFp8 | None], value, real, weight: bool) -> float:
    """Returns the distance of the dequantized `out` to `value` in float64, on sampled rows and columns."""
    got, want = [], []
    for operand, turned in zip(out, (False, True), strict=True):
        if operand is None:
            continue
        lines = value.shape[-1] if turned else value.shape[-2]
        some = np.linspace(0, lines - 1, min(lines, SAMPLE)).astype(np.int32)
        if weight:
            got.append(error.operand_columns(operand, some))
            want.append(error.double(value[:, :, some].swapaxes(1, 2) if turned else value[:, some]))
        elif turned:
            got.append(error.operand_rows(operand, some)[:, real])
            want.append(error.double(value[:, some]).T[:, real])
        else:
            some = real[np.linspace(0, len(real) - 1, min(len(real), SAMPLE)).astype(np.int32)]
            got.append(error.operand_rows(operand, some))
            want.append(error.double(jnp.take(value, some, axis=0)))
    return error.relative(got, want)
