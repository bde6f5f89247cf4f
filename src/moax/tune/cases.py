"""Shapes to measure: rows M in G groups, each group times its own [K, N]; group sizes from a fixed seed.

`perf` are the shapes of the performance targets, `anchors` both projections of published models, `groups` the same
rows in ever more groups, `tiny` what a test can run on a CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

Direction = Literal["fwd", "dgrad", "wgrad"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class Case:
    """rows M, contracted K, columns N of `groups` groups whose sizes are drawn from `distribution`."""

    name: str
    rows: int
    contracted: int
    columns: int
    groups: int
    distribution: Literal["dirichlet", "uniform", "zipf"] = "dirichlet"
    note: str = ""

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each group [G], the same in every run."""
        return group_sizes(self.rows, self.groups, self.distribution)

    @property
    def flops(self) -> int:
        """Of one direction, over real rows: 2 M K N."""
        return 2 * self.rows * self.contracted * self.columns

    def least_bytes(self, direction: Direction, itemsize: int) -> int:
        """What must cross device memory once: both operands of `itemsize` bytes, the result in bf16."""
        x, y = self.rows * self.contracted, self.rows * self.columns
        w = int((self.sizes > 0).sum()) * self.contracted * self.columns
        read, written = {"fwd": (x + w, y), "dgrad": (y + w, x), "wgrad": (x + y, self.weights)}[direction]
        return read * itemsize + written * 2

    @property
    def weights(self) -> int:
        """Elements of all groups' matrices."""
        return self.groups * self.contracted * self.columns


def group_sizes(rows: int, groups: int, distribution: str) -> np.ndarray:
    """[G] sizes that sum to `rows`: shares from Dirichlet(8), equal, or 1/rank in a random order."""
    draw = np.random.default_rng([8, rows, groups])
    if distribution == "dirichlet":
        shares = draw.dirichlet(np.full(groups, 8.0))
    elif distribution == "zipf":
        shares = draw.permutation(1.0 / np.arange(1, groups + 1))
    else:
        shares = np.ones(groups)
    exact = shares / shares.sum() * rows
    sizes = np.floor(exact).astype(np.int64)
    short = rows - int(sizes.sum())
    sizes[np.argsort(sizes - exact, kind="stable")[:short]] += 1
    return sizes.astype(np.int32)


PERF = (
    Case("mixtral", 16384, 4096, 14336, 4),
    Case("qwen3", 65536, 2048, 768, 32),
    Case("dsv3", 32768, 7168, 2048, 16),
)

# name, d_model, d_ff, experts here, rows of 16384 tokens, what part of the model that is
MODELS = (
    ("mixtral-8x7b", 4096, 14336, 8, 32768, ""),
    ("olmoe", 2048, 1024, 64, 131072, ""),
    ("qwen3-30b", 2048, 768, 128, 131072, ""),
    ("qwen3-235b", 4096, 1536, 128, 131072, ""),
    ("gpt-oss-120b", 2880, 2880, 128, 65536, ""),
    ("dsv3-slice", 7168, 2048, 64, 32768, "64 of 256 experts, a quarter of the rows"),
    ("kimi-k2-slice", 7168, 2048, 96, 32768, "96 of 384 experts, a quarter of the rows"),
    ("qwen3-next", 2048, 512, 512, 163840, ""),
)


def _anchors() -> tuple[Case, ...]:
    both = []
    for name, width, hidden, experts, rows, note in MODELS:
        both.append(Case(f"{name} wi", rows, width, 2 * hidden, experts, note=note))
        both.append(Case(f"{name} wo", rows, hidden, width, experts, note=note))
    return tuple(both)


def _by_groups() -> tuple[Case, ...]:
    return tuple(
        Case(f"G{groups} {how}", 65536, 2048, 1536, groups, how)
        for how in ("uniform", "zipf")
        for groups in (4, 32, 128, 256)
    )


SETS: dict[str, tuple[Case, ...]] = {
    "perf": PERF,
    "anchors": _anchors(),
    "groups": _by_groups(),
    "tiny": (Case("tiny", 256, 128, 256, 4), Case("tiny zipf", 200, 96, 64, 5, "zipf")),
}
NAMES = (*SETS, "all")


def select(names: str, only: list[str] | None = None) -> list[Case]:
    """The cases of sets named with commas; `only`: of these, those whose name contains one of the words.

    Raises:
      ValueError: an unknown set, or nothing left.
    """
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ValueError(f"--cases {names}: unknown {', '.join(unknown)}; the sets are {', '.join(NAMES)}")
    if "all" in wanted:
        wanted = [name for name in SETS if name != "tiny"]
    found = [case for name in wanted for case in SETS[name]]
    return pick(found, only, f"--cases {names}")


def pick(found, only: list[str] | None, where: str) -> list:
    """Those whose name contains one of the words `only`; all without."""
    kept = [case for case in found if not only or any(word in case.name for word in only)]
    if not kept:
        raise ValueError(f"--only {' '.join(only or [])}: no case of {where}: {', '.join(c.name for c in found)}")
    return kept
