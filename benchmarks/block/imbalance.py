"""`python -m benchmarks imbalance --mesh fsdp=1,ep=2`: time and memory of the block against the load of one rank.

    imbalance X   the busiest rank of ep has X times the balanced load, T K assignments for each T tokens of a device
    ratio         time(X) / (X time(1)): 1 where a step costs what the rows of its busiest rank cost

The caller gives the routing, so the load is exact: rank 0 has X times its share, the others have equal parts of the
rest, and the experts of a rank have equally many tokens. Each imbalance runs with `buffer_factor` and with None, which
allocates the worst case. One process over all devices compiles a program for each buffer_factor, and runs it with every
routing (`imbalance_worker`). Times are wall clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.block import block
from benchmarks.block.block import Block
from benchmarks.block.mesh_block import How, check_devices
from benchmarks.block.worker import Worker, answers
from benchmarks.report import Row
from benchmarks.timing import Repeats

WORKER = "benchmarks.block.imbalance_worker"
IMBALANCES = (1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)


def rows(blocks: list[Block], how: How, repeats: Repeats, tokens: tuple[int, ...] | None = None) -> Iterator[Row]:
    """Yields a row of forward with backward for each block, recipe, number of tokens, imbalance and buffer_factor."""
    check_devices(how)
    ranks = how.sizes["ep"]
    if ranks < 2:
        raise ValueError(f"--mesh {how} has one rank of ep, which is always balanced; it must have several, as ep=2")
    pairs = [(x, factor) for factor in dict.fromkeys((how.buffer_factor, None)) for x in IMBALANCES if x <= ranks]
    for case in blocks:
        for recipe in how.recipes:
            sizes = sorted(tokens or case.tokens[:1])
            request = block.request(case, recipe, sizes, repeats, how.kernels)
            request |= {"mesh": how.sizes, "exchange": how.exchange, "pairs": pairs}
            balanced: dict[tuple[int, float | None], float] = {}
            missing = {(size, pair): "the process ended early" for size in sizes for pair in pairs}
            for _, answer in answers([(case, Worker(WORKER, request))]):
                size = answer["tokens"]
                if "pair" not in answer:  # The process ended before its first row.
                    missing |= {(size, pair): answer["note"] for pair in pairs}
                    continue
                imbalance, factor = answer["pair"]
                del missing[size, (imbalance, factor)]
                row = _row(case, recipe, how, answer)
                if row.us:
                    base = (
                        balanced.setdefault((size, factor), row.us) if imbalance == 1 else balanced.get((size, factor))
                    )
                    ratio = row.extra["ratio"] = row.us / (imbalance * base) if base else None
                    said = "" if ratio is None else f", {ratio:.3f} of X balanced ones"
                    row.note = f"rounds {row.extra['rounds']}{said}"
                yield row
            for (size, pair), note in missing.items():
                yield _row(case, recipe, how, {"tokens": size, "pair": pair, "note": note})


def _row(case: Block, recipe: str, how: How, answer: dict[str, Any]) -> Row:
    """Returns the row of one answer, without its ratio."""
    imbalance, factor = answer["pair"]
    named = "None" if factor is None else f"{factor:.4g}"
    row = Row("imbalance", f"{case.name} T{answer['tokens']} {how} X={imbalance:g} buffer_factor={named}", "fwd+bwd")
    row.recipe, row.note = recipe, answer.get("note", "")
    row.extra = {"mesh": how.sizes, "exchange": how.exchange, "imbalance": imbalance, "buffer_factor": factor}
    if "us" in answer:
        row.us, row.method, row.path = answer["us"], "wall", answer["path"]
        row.extra |= {"rounds": answer["rounds"], "dropped": answer["dropped"]} | answer["memory"]
    return row
