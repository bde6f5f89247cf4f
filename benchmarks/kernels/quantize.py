"""`moax bench quantize`: FP8 with 1 x 128 blocks by rows, by columns with transpose, both in one read, and weights.

Bytes are those of real rows, read once, plus data and scales written; the peer is the same in plain jnp under jit.
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
from moax.tune.problem import Problem, quantize_rows, quantize_weight
from benchmarks.report import Row, compare, why
from moax.tune.timing import Repeats, kernel_time
from moax.groups import BLOCK
from moax.types import Operand

JNP = "jnp"
SAMPLE = 64  # rows, or columns, that are compared


@dataclasses.dataclass(frozen=True)
class Source:
    """rows x width values in `groups` groups of expert-sorted rows; a weight [groups, rows, width] where `weight`."""

    name: str
    rows: int
    width: int
    groups: int
    weight: bool = False

    @property
    def elements(self) -> int:
        """Real ones."""
        return self.rows * self.width * (self.groups if self.weight else 1)


PERF = (
    Source("mixtral", 16384, 4096, 4),
    Source("qwen3", 65536, 2048, 32),
    Source("dsv3", 32768, 7168, 16),
    Source("gpt-oss", 65536, 2880, 128),
    Source("wide", 131072, 4096, 32),
    Source("mixtral wi", 4096, 28672, 8, weight=True),
    Source("qwen3 wi", 2048, 1536, 128, weight=True),
    Source("gpt-oss wi", 2880, 5760, 32, weight=True),
)
TINY = (Source("tiny", 200, 96, 3), Source("tiny wi", 128, 160, 2, weight=True))
KINDS = {"rows": (True, False), "columns": (False, True), "both": (True, True)}
WEIGHT_KINDS = {"native": (True, False), "transposed": (False, True), "both": (True, True)}


def rows(sources: list[Source], peers: bool, repeats: Repeats, found: dict[str, Any]) -> Iterator[Row]:
    """For each source and kind our row, then that of plain jnp."""
    for source in sources:
        value, blocks, real = _values(source)
        for kind, wanted in (WEIGHT_KINDS if source.weight else KINDS).items():
            plain = _plain(source, *wanted)
            exact = plain(value)  # what the error of ours is beside

            def own(blocks=blocks, wanted=wanted, weight=source.weight):
                return ours.quantize_weight(*wanted) if weight else ours.quantize(blocks, *wanted)

            group = [_row(source, kind, "moax", "mosaic", own, value, real, exact, repeats, found)]
            if peers:
                group.append(_row(source, kind, JNP, "xla", lambda f=plain: f, value, real, exact, repeats, found))
            compare(group)
            yield from group


def _values(source: Source):
    """(what to quantize, its Blocks, the indices of real rows)."""
    if source.weight:
        case = Case(source.name, source.groups, source.rows, source.width, source.groups)
        return Problem(case).w, None, np.arange(source.rows)
    problem = Problem(Case(source.name, source.rows, source.width, 16, source.groups))
    return problem.x, problem.blocks(), problem.index


def _plain(source: Source, first: bool, second: bool) -> Callable:
    """The same results by plain jnp."""
    if source.weight:
        make = (lambda w: quantize_weight(w, False)), (lambda w: quantize_weight(w, True))
    else:
        make = quantize_rows, (lambda x: quantize_rows(x.T))
    return jax.jit(lambda x: tuple(f(x) if on else None for f, on in zip(make, (first, second), strict=True)))


def _row(source, kind, impl, path, build, value, real, exact, repeats: Repeats, found) -> Row:
    row = Row("quantize", source.name, kind, impl, "fp8_block", str(value.dtype), path)
    row.extra = {"shape": list(value.shape), "real_rows": source.rows, "weight": source.weight}
    try:
        f = build()
        timing = kernel_time(f, (value,), repeats)
        row.us, row.method = timing.us, timing.method
        row.error = _error(f(value), value, real, source.weight)
        row.error_rounding = _error(exact, value, real, source.weight)
    except Exception as failure:
        row.us, row.note = None, why(failure)
        return row
    outputs = sum(KINDS.get(kind, WEIGHT_KINDS.get(kind, (True, False))))
    scale = 4 / BLOCK / (BLOCK if source.weight else 1)
    nbytes = source.elements * (value.dtype.itemsize + outputs * (1 + scale))
    row.tb_s = nbytes / row.us * 1e-6
    row.limit, row.fraction = limits.fraction(found, row.us, 0.0, nbytes, "bf16")
    return row


def _error(out: tuple[Operand | None, Operand | None], value, real, weight: bool) -> float:
    """Distance of what was quantized to what it stands for, in float64, on some rows and columns."""
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
