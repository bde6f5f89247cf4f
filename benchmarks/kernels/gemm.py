"""`python -m benchmarks gemm`: grouped matmuls beside their peers, in three directions.

Each matmul is measured in bf16, and in FP8 with scale blocks of 1 x 128 for rows and 128 x 128 for weights; on a GPU
`moax_xla` is that of `kernels="xla"`. The operands of moax and of the peers are quantized before the clock starts. Only
real rows count as work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import error, limits
from benchmarks.cases import DIRECTIONS, Case, Direction
from benchmarks.kernels import ours
from benchmarks.peers import jax_peers, torch_grouped
from benchmarks.problem import Problem
from benchmarks.report import OURS, Row, compare, why
from benchmarks.timing import Repeats, kernel_time
from moax.kernels.device import find_device

RECIPES = ("none", "fp8_block")
PEERS = (*jax_peers.CALLS, "torch")
FEW = Repeats(2, 5)  # repeats of the choice of a tile


def rows(
    cases: list[Case],
    peers: tuple[str, ...],
    repeats: Repeats,
    peaks: dict[str, Any],
    *,
    quick: bool = False,
) -> Iterator[Row]:
    """Yields the rows of moax, then those of the peers, for each case and direction."""
    torch = torch_grouped.rows(cases, repeats) if "torch" in peers else []
    for case in cases:
        problem = Problem(case)
        for direction in DIRECTIONS:
            group = [own(problem, direction, recipe, repeats) for recipe in RECIPES]
            if find_device().platform == "gpu":
                group.append(own(problem, direction, "none", repeats, by_xla=True))
            group += [peer(name, problem, direction, repeats, quick=quick) for name in jax_peers.CALLS if name in peers]
            group += [row for row in torch if (row.case, row.direction) == (case.name, direction)]
            for row in group:
                limits.rate(
                    row,
                    peaks,
                    case.flops,
                    case.least_bytes(direction, 1 if row.recipe != "none" else 2),
                )
                row.extra |= {
                    "M": case.rows,
                    "K": case.contracted,
                    "N": case.columns,
                    "G": case.groups,
                }
                row.extra |= {"sizes": case.distribution, "case_note": case.note}
            compare(group)
            yield from group
        del problem


def own(
    problem: Problem,
    direction: Direction,
    recipe: str,
    repeats: Repeats,
    by_xla: bool = False,
) -> Row:
    """Returns the row of moax's grouped matmul."""
    fp8 = recipe != "none"
    impl = f"{OURS}_xla" if by_xla else OURS
    row = Row("gemm", problem.case.name, direction, impl, recipe, "e4m3" if fp8 else "bfloat16")

    def measure():
        operands = problem.quantized(direction) if fp8 else None
        call = (ours.xla_gemm if by_xla else ours.gemm)(problem, direction, operands)
        row.path = call.path
        _time(row, [call], problem, direction, repeats, operands=operands)

    _attempt(row, measure)
    return row


def peer(
    name: str,
    problem: Problem,
    direction: Direction,
    repeats: Repeats,
    *,
    quick: bool,
) -> Row:
    """Returns the row of a peer in this process, with its fastest tile."""
    row = Row("gemm", problem.case.name, direction, name, path="peer")
    calls = jax_peers.CALLS[name]
    _attempt(row, lambda: _time(row, calls(problem, direction, quick), problem, direction, repeats, packed=True))
    return row


def _attempt(row: Row, measure: Callable[[], None]) -> None:
    """Calls `measure`; its error, such as a missing peer or a refused shape, becomes the note of the row."""
    try:
        measure()
    except Exception as failure:
        row.us = None
        row.note = why(failure)


def _time(
    row: Row,
    calls,
    problem,
    direction,
    repeats: Repeats,
    *,
    operands=None,
    packed: bool = False,
) -> None:
    """Times each call, and fills the row with the time and the error of the fastest one."""
    best = None
    failures = []
    for call in calls:
        try:
            timing = kernel_time(call.f, call.args, FEW if len(calls) > 1 else repeats)
        except Exception as failure:  # Another tile may fit where this one does not.
            failures.append(f"{call.tile}: {why(failure)}")
            continue
        if best is None or timing.us < best[1].us:
            best = call, timing
    if best is None:
        raise RuntimeError("; ".join(failures))
    call, timing = best
    if len(calls) > 1:
        timing = kernel_time(call.f, call.args, repeats)
    row.us = timing.us
    row.method = timing.method
    row.tile = call.tile
    row.note = "; ".join(failures)
    errors = error.measure(
        call.f(*call.args),
        error.sample(problem, direction, operands),
        direction,
        problem,
        packed=packed,
    )
    row.error = errors.total
    row.error_worst = errors.worst
