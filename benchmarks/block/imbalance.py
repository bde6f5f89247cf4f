"""`python -m benchmarks imbalance --mesh fsdp=1,ep=2`: time and memory of the block against the load of one rank.

    imbalance X   the busiest rank of ep has X times the balanced load, T K assignments for each T tokens of a device
    ratio         time(X) / (X time(1)): 1 where a step costs what the rows of its busiest rank cost

The caller gives the routing, so the load is exact: rank 0 has X times its share, the others have equal parts of the
rest, and the experts of a rank have equally many tokens. Each imbalance runs with `buffer_factor` and with None, which
allots the worst case. R ranks have an imbalance of at most R. What a larger one does to the buffers is measured with
smaller buffers: an imbalance of R with the factor `buffer_factor` R / X fills the buffers as often as X with
`buffer_factor`. With 2 ranks and 1.25, the factor 0.625 stands for X = 4: the load is 3.2 times the buffers. Its ratio
is taken of the balanced row of `buffer_factor`.

One process over all devices compiles a program for each buffer_factor, and runs it with every routing
(`imbalance_worker`). `us` is wall clock. On GPUs the ratio is one of kernel times on the GPU whose kernels compute
longest; elsewhere it is one of wall clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.block import block
from benchmarks.block.block import Block
from benchmarks.block.mesh_block import How, check_devices
from benchmarks.block.worker import Worker, answers
from benchmarks.report import Row
from moax.tune.timing import Repeats

WORKER = "benchmarks.block.imbalance_worker"
IMBALANCES = (1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)
Pair = tuple[float, float | None]


def rows(blocks: list[Block], how: How, repeats: Repeats, tokens: tuple[int, ...] | None = None) -> Iterator[Row]:
    """Yields a row of forward with backward for each block, recipe, number of tokens, imbalance and buffer_factor.

    Args:
      blocks: the cases.
      how: how the layer runs; it has no peers.
      repeats: the number of calls.
      tokens: the numbers of tokens of a device; None takes the smallest of each block.

    Raises:
      ValueError: the mesh has one rank of ep, or more devices than the machine has GPUs.
    """
    check_devices(how)
    ranks = how.sizes["ep"]
    if ranks < 2:
        raise ValueError(f"--mesh {how} has one rank of ep, which is always balanced; it must have several, as ep=2")
    pairs = make_pairs(ranks, how.buffer_factor)
    for case in blocks:
        for recipe in how.recipes:
            sizes = sorted(tokens or case.tokens[:1])
            request = block.request(case, recipe, sizes, repeats, how.kernels)
            request |= {"mesh": how.sizes, "exchange": how.exchange, "pairs": list(pairs)}
            balanced: dict[tuple[int, float | None], dict[str, Any]] = {}
            missing = {(size, pair): "the process ended early" for size in sizes for pair in pairs}
            for _, answer in answers([(case, Worker(WORKER, request))]):
                size = answer["tokens"]
                if "pair" not in answer:  # The process ended before its first row.
                    missing |= {(size, pair): answer["note"] for pair in pairs}
                    continue
                pair = tuple(answer["pair"])
                del missing[size, pair]
                row = _row(case, recipe, how, answer, pairs[pair])
                if pair[0] == 1.0 and row.us:
                    balanced[size, pair[1]] = row.extra
                base = balanced.get((size, pair[1] if pairs[pair] == pair[0] else how.buffer_factor))
                _compare(row, base)
                yield row
            for (size, pair), note in missing.items():
                yield _row(case, recipe, how, {"tokens": size, "pair": pair, "note": note}, pairs[pair])


def make_pairs(ranks: int, buffer_factor: float | None) -> dict[Pair, float]:
    """Returns {(imbalance, buffer_factor): the imbalance that it stands for}; see the module."""
    possible = [x for x in IMBALANCES if x <= ranks]
    pairs: dict[Pair, float] = {(x, factor): x for factor in dict.fromkeys((buffer_factor, None)) for x in possible}
    if buffer_factor is not None:
        pairs |= {(float(ranks), buffer_factor * ranks / x): x for x in IMBALANCES if x > ranks}
    return pairs


def _row(case: Block, recipe: str, how: How, answer: dict[str, Any], stands_for: float) -> Row:
    """Returns the row of one answer, without its ratio."""
    imbalance, factor = answer["pair"]
    named = "None" if factor is None else f"{factor:.4g}"
    row = Row("imbalance", f"{case.name} T{answer['tokens']} {how} X={imbalance:g} buffer_factor={named}", "fwd+bwd")
    row.recipe, row.note = recipe, answer.get("note", "")
    row.extra = {
        "mesh": how.sizes,
        "exchange": how.exchange,
        "imbalance": imbalance,
        "buffer_factor": factor,
        "stands_for": stands_for,
    }
    if "us" in answer:
        row.us, row.method, row.path = answer["us"], "wall", answer["path"]
        busiest = max(answer["devices"], key=lambda device: device["compute_us"], default=None)
        row.extra |= {name: answer[name] for name in ("passes", "dropped", "devices")} | answer["memory"]
        row.extra |= {"wall_us": row.us, "busiest_compute_us": busiest and busiest["compute_us"]}
        row.extra |= {"busiest_kernel_us": busiest and sum(busiest.values())}
        row.extra |= {name: answer[name] for name in ("profile_note",) if name in answer}
    return row


def _compare(row: Row, base: dict[str, Any] | None) -> None:
    """Sets the ratios of a row to X times the balanced row `base`, and the note, which names the passes."""
    if not row.us:
        return
    extra = row.extra
    for name in ("wall", "busiest_kernel", "busiest_compute"):
        ours, theirs = extra[f"{name}_us"], base and base[f"{name}_us"]
        extra[f"{name}_ratio"] = ours / (extra["imbalance"] * theirs) if ours and theirs else None
    clock = "busiest_kernel" if extra["busiest_kernel_ratio"] else "wall"
    extra |= {"ratio": extra[f"{clock}_ratio"], "ratio_of": clock}
    said = "" if extra["ratio"] is None else f", {extra['ratio']:.3f} of X balanced ones ({clock.replace('_', ' ')})"
    row.note = f"passes {extra['passes']}{said}"
