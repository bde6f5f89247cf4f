"""Bits of several runs of one program: the same program, mesh and operands give the same bits, or a test says where
not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def bits(tree: Any) -> list[tuple[str, bytes]]:
    """Returns the path and the bits of every shard of every array of a tree."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (f"{jax.tree_util.keystr(path)} on {shard.device}", np.asarray(shard.data).tobytes())
        for path, leaf in leaves
        for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
    ]


def differing(
    run: Callable[[], Any],
    runs: int,
    between: Callable[[], Any] = lambda: None,
) -> list[str]:
    """Returns the arrays of a program's result whose bits are not those of its first run, in any of so many further
    runs.

    `between` is called before each of them: what it leaves in memory must not reach a result.
    """
    baseline = bits(run())
    seen = set()
    for _ in range(runs):
        between()
        seen |= {name for (name, want), (_, got) in zip(baseline, bits(run()), strict=True) if got != want}
    return sorted(seen)
