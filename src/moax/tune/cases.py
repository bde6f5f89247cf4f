"""Shapes to measure: rows M in G groups, each group times its own [K, N]; group sizes from a fixed seed.

`perf` are the shapes of the performance targets, `anchors` both projections of published models, `groups` the same
rows in ever more groups, `tiny` what a test can run on a CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from moax.models import find_model

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


def product(name: str, model: str, ranks: int, tokens: int) -> Case:
    """x wi of one rank, by half of wi: the gate projection alone, [H, F]."""
    shape = find_model(model).on_rank(ranks, tokens)
    return Case(name, shape.rows, shape.d_model, shape.d_ff, shape.groups)


def both_products(name: str, model: str, ranks: int = 1, tokens: int = 16384) -> tuple[Case, Case]:
    """x wi, gate and up projection together, and h wo of one rank."""
    shape = find_model(model).on_rank(ranks, tokens)
    note = f"{shape.groups} of {shape.groups * ranks} experts, {tokens} tokens a rank" if ranks > 1 else ""
    sizes = dict(rows=shape.rows, groups=shape.groups, note=note)
    return (
        Case(f"{name} wi", contracted=shape.d_model, columns=shape.hidden, **sizes),
        Case(f"{name} wo", contracted=shape.d_ff, columns=shape.d_model, **sizes),
    )


PERF = (
    product("mixtral", "mixtral-8x7b", ranks=2, tokens=8192),
    product("qwen3", "qwen3-30b", ranks=4, tokens=8192),
    product("dsv3", "deepseek-v3", ranks=16, tokens=4096),
)
WHOLE = ("mixtral-8x7b", "olmoe", "qwen3-30b", "qwen3-235b", "gpt-oss-120b")
ANCHORS = (
    *(case for name in WHOLE for case in both_products(name, name)),
    *both_products("dsv3-slice", "deepseek-v3", ranks=4, tokens=4096),
    *both_products("kimi-k2-slice", "kimi-k2", ranks=4, tokens=4096),
    *both_products("qwen3-next", "qwen3-next"),
)


def _by_groups() -> tuple[Case, ...]:
    return tuple(
        Case(f"G{groups} {how}", 65536, 2048, 1536, groups, how)
        for how in ("uniform", "zipf")
        for groups in (4, 32, 128, 256)
    )


SETS: dict[str, tuple[Case, ...]] = {
    "perf": PERF,
    "anchors": ANCHORS,
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
