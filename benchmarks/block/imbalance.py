"""`python -m benchmarks imbalance --mesh fsdp=1,ep=2`: time and memory of the block against the load of one rank.

    imbalance X   the busiest rank of ep has X times the balanced load, T K assignments for each T tokens of a device
    ratio         time(X) / (X time(1)): 1 where a step costs what the rows of its busiest rank cost

The caller gives the routing, so the load is exact: rank 0 has X times its share, the others have equal parts of the
rest, and the experts of a rank have equally many tokens. Each imbalance runs with `buffer_factor`, 1.25 without it, and
with None, which allocates the worst case. One process over all devices compiles a program for each buffer_factor, and
runs it with every routing (`block_worker`). Times are wall clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int

from benchmarks.block.block import WORKERS, Block, How
from benchmarks.block.worker import Worker, answers
from benchmarks.report import OURS, Row
from benchmarks.timing import Repeats
from moax import MoEConfig
from moax.config import LIMITED_FACTOR

IMBALANCES = (1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)


def rows(
    blocks: list[Block],
    settings: How,
    repeats: Repeats,
    tokens: tuple[int, ...] | None = None,
) -> Iterator[Row]:
    """Yields a row of forward with backward for each block, recipe, number of tokens, imbalance and buffer_factor."""
    settings.check()
    ranks = settings.sizes["ep"]
    if ranks < 2:
        raise ValueError(
            f"--mesh{settings} has one rank of ep, which is always balanced; it must have several, as ep=2"
        )
    limited = LIMITED_FACTOR if settings.buffer_factor == "auto" else settings.buffer_factor
    loads = [(x, factor) for factor in dict.fromkeys((limited, None)) for x in IMBALANCES if x <= ranks]
    for case in blocks:
        sizes = tokens or case.tokens[:1]
        for recipe in settings.recipes:
            request = settings.request(case, recipe, repeats, sizes) | {"loads": loads}
            lost: dict[str, Any] = {"note": "the process ended early"}
            measured_loads = {(size, load): lost for size in sorted(sizes) for load in loads}
            for _, answer in answers([(case, Worker(WORKERS[OURS], request))]):
                # An answer without a load ended before its first one.
                answered_loads = [tuple(answer["load"])] if "load" in answer else loads
                measured_loads |= {(answer["tokens"], load): answer for load in answered_loads}
            balanced = {
                (size, factor): answer.get("fwd+bwd", {}).get("us")
                for (size, (x, factor)), answer in measured_loads.items()
                if x == 1
            }
            for (size, (x, factor)), answer in measured_loads.items():
                named = "None" if factor is None else f"{factor:.4g}"
                row = Row(
                    "imbalance",
                    f"{case.name} T{size}{settings} X={x:g} buffer_factor={named}",
                    "fwd+bwd",
                )
                row.recipe = recipe
                row.note = answer.get("note", "")
                row.extra = {
                    "mesh": settings.sizes,
                    "exchange": settings.exchange,
                    "imbalance": x,
                    "buffer_factor": factor,
                }
                if measured := answer.get("fwd+bwd"):
                    row.us = measured["us"]
                    row.method = "wall"
                    row.path = measured["path"]
                    row.extra |= answer["memory"] | {name: measured[name] for name in ("rounds", "dropped")}
                    base = balanced[size, factor]
                    row.extra["ratio"] = row.us / (x * base) if base else None
                yield row


def choose_experts(
    config: MoEConfig,
    ranks: int,
    tokens: int,
    imbalance: float,
) -> Int[np.ndarray, "T K"]:
    """Returns experts that give rank 0 `imbalance` times the balanced load, T K / ranks, and the others equal parts.

    Within a rank the experts have equally many tokens. With 4 experts, K = 2, 2 ranks, 4 tokens and an imbalance of
    1.5, rank 0 has 6 of 8 assignments: the tokens choose (0, 2), (1, 0), (1, 3) and (0, 1).
    """
    of_rank = config.num_experts // ranks
    total = tokens * config.top_k
    load = round(imbalance * total / ranks)
    if load > tokens * min(config.top_k, of_rank):
        raise ValueError(
            f"imbalance {imbalance} on {ranks} ranks: one rank has {of_rank} experts, and a token chooses "
            f"{config.top_k}; it must be at most {ranks * min(config.top_k, of_rank) / config.top_k:g}"
        )
    ends = np.arange(1, tokens + 1) * load // tokens  # assignments of rank 0 up to each token
    begins = np.concatenate([[0], ends[:-1]])
    # The experts come rank by rank in turn.
    other_experts = np.arange(of_rank, config.num_experts).reshape(-1, of_rank).T.reshape(-1)
    experts = np.empty((tokens, config.top_k), np.int32)
    for token, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        there = np.arange(token * config.top_k - begin, (token + 1) * config.top_k - end)
        experts[token] = [
            *(np.arange(begin, end) % of_rank),
            *other_experts[there % max(1, len(other_experts))],
        ]
    return experts
