"""The shapes to measure: M rows in G groups, each of which is multiplied with a matrix [K, N] of its own.

set         contents
perf        the shapes of the performance targets
anchors     both matmuls of published models
groups      the same rows in 4, 32, 128 and 256 groups
tiny        shapes that a test can run on a CPU

The group sizes come from a fixed seed.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from moax import MoEConfig
from moax.models import find_model

Direction = Literal["fwd", "dgrad", "wgrad"]
DIRECTIONS: tuple[Direction, ...] = ("fwd", "dgrad", "wgrad")


@dataclasses.dataclass(frozen=True)
class Case:
    """One shape: rows [M, K], whose `groups` groups are multiplied with matrices [K, N].

    Attributes:
      name: the name of the case.
      rows: number of rows M.
      contracted: contracted dim K.
      columns: number of columns N.
      groups: number of groups G.
      distribution: the distribution of the group sizes, see `group_sizes`.
      note: a remark that results repeat.
    """

    name: str
    rows: int
    contracted: int
    columns: int
    groups: int
    distribution: Literal["dirichlet", "uniform", "zipf"] = "dirichlet"
    note: str = ""

    @property
    def sizes(self) -> np.ndarray:
        """Rows of each group, [G] i32; they are the same in every run."""
        return group_sizes(self.rows, self.groups, self.distribution)

    @property
    def flops(self) -> int:
        """Floating-point operations of one direction over real rows: 2 M K N."""
        return 2 * self.rows * self.contracted * self.columns

    def least_bytes(self, direction: Direction, itemsize: int) -> int:
        """Returns the bytes that must cross device memory: both operands and the result, each of them once."""
        x = self.rows * self.contracted
        y = self.rows * self.columns
        w = int((self.sizes > 0).sum()) * self.contracted * self.columns
        read, written = {"fwd": (x + w, y), "dgrad": (y + w, x), "wgrad": (x + y, self.weights)}[direction]
        return read * itemsize + written * 2

    @property
    def weights(self) -> int:
        """Elements of the matrices of all groups."""
        return self.groups * self.contracted * self.columns


def group_sizes(rows: int, groups: int, distribution: str) -> np.ndarray:
    """Draws [G] i32 group sizes that sum to `rows`."""
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


def slice_of(model: str, ranks: int) -> MoEConfig:
    """Returns the block of a model with the experts of one of `ranks` ranks alone, so that one device can run it.

    T tokens make T K rows, as many as a rank of the whole model receives. The slice has no shared expert, and no
    groups of experts, since a rank may hold less than one group.
    """
    config = find_model(model).config
    experts = experts_of_rank(model, ranks)
    router = dataclasses.replace(config.router, num_groups=1, top_groups=1)
    return dataclasses.replace(
        config,
        num_experts=experts,
        router=router,
        shared_d_ff=0,
        shared_gate=False,
    )


def experts_of_rank(model: str, ranks: int) -> int:
    """Returns the number of experts of one of `ranks` ranks; ValueError where `ranks` does not divide the experts."""
    experts = find_model(model).config.num_experts
    if ranks < 1 or experts % ranks:
        raise ValueError(f"ranks={ranks} must divide the {experts} experts of {model}")
    return experts // ranks


def products(name: str, model: str, ranks: int = 1, tokens: int = 16384) -> tuple[Case, Case, Case]:
    """Returns, of one of `ranks` ranks of ep with `tokens` tokens each at an even load, the matmuls of x and the gate
    [H, F], of x and wi (gate and up together), and of h and wo."""
    c = find_model(model).config
    groups = experts_of_rank(model, ranks)
    if ranks > 1:
        note = f"{groups} of {c.num_experts} experts, {tokens} tokens a rank"
    else:
        note = ""
    sizes = dict(rows=tokens * c.top_k, groups=groups)
    return (
        Case(name, contracted=c.d_rows, columns=c.d_ff, **sizes),
        Case(f"{name} wi", contracted=c.d_rows, columns=c.gates * c.d_ff, note=note, **sizes),
        Case(f"{name} wo", contracted=c.d_ff, columns=c.d_rows, note=note, **sizes),
    )


PERF = (
    products("mixtral", "mixtral-8x7b", ranks=2, tokens=8192)[0],
    products("qwen3", "qwen3-30b", ranks=4, tokens=8192)[0],
    products("dsv3", "deepseek-v3", ranks=16, tokens=4096)[0],
)
WHOLE = ("mixtral-8x7b", "olmoe", "qwen3-30b", "qwen3-235b", "gpt-oss-120b")
ANCHORS = (
    *(case for name in WHOLE for case in products(name, name)[1:]),
    *products("dsv3-slice", "deepseek-v3", ranks=4, tokens=4096)[1:],
    *products("kimi-k2-slice", "kimi-k2", ranks=4, tokens=4096)[1:],
    *products("qwen3-next", "qwen3-next")[1:],
)


GROUPS = tuple(
    Case(f"G{groups} {distribution}", 65536, 2048, 1536, groups, distribution)
    for distribution in ("uniform", "zipf")
    for groups in (4, 32, 128, 256)
)
SETS: dict[str, tuple[Case, ...]] = {
    "perf": PERF,
    "anchors": ANCHORS,
    "groups": GROUPS,
    "tiny": (Case("tiny", 256, 128, 256, 4), Case("tiny zipf", 200, 96, 64, 5, "zipf")),
}
NAMES = (*SETS, "all")


def select(names: str, only: list[str] | None = None) -> list[Case]:
    """Returns the cases of some sets."""
    wanted = [name.strip() for name in names.split(",")]
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ValueError(f"--cases {names}: unknown {', '.join(unknown)}; the sets are {', '.join(NAMES)}")
    if "all" in wanted:
        wanted = [name for name in SETS if name != "tiny"]
    cases = [case for name in wanted for case in SETS[name]]
    return pick(cases, only, f"--cases {names}")


def pick(cases, only: list[str] | None, where: str) -> list:
    """Returns the cases whose name contains one of the words `only`; all of them where `only` is None or empty."""
    picked = [case for case in cases if not only or any(word in case.name for word in only)]
    if not picked:
        raise ValueError(f"--only {' '.join(only or [])}: no case of {where}: {', '.join(c.name for c in cases)}")
    return picked
