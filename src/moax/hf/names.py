"""Where each tensor of a checkpoint lies in MoEParams: the names and layouts of the five families, as a table.

Dims are letters: E experts, H model width, F expert width, S shared width, G gate and up projection. A tensor's dims
on disk are groups of letters: `("E", "GF", "H")` is [E, 2F, H], all of the gate before all of the up projection, and
`("E", "H", "FG")` is [E, H, 2F], gate and up taking turns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from moax.config import MoEConfig
from moax.errors import Unsupported
from moax.params import param_shapes

DIMS = dict(
    router="HE", wi="EHGF", wo="EFH", router_bias="E", logits_bias="E", bi="EGF", bo="EH", shared_wi="HGS",
    shared_wo="SH",
)  # fmt: skip


class Row(NamedTuple):
    """A line of a table: the tensor's name in the block ({e}: one an expert), its field of MoEParams, its dims on disk,
    and which projection it is (0 gate, 1 up) where it is one."""

    name: str
    field: str
    disk: tuple[str, ...]
    projection: int | None = None


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint. fixed: (dim, index) of the dims of its field that it is one entry of."""

    name: str
    field: str
    disk: tuple[str, ...]
    fixed: tuple[tuple[str, int], ...]

    def shape(self, config: MoEConfig) -> tuple[int, ...]:
        """Its shape on disk."""
        sizes = dim_sizes(config)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.disk)

    def by_expert(self) -> bool:
        """Whether it stacks the matrices of experts, and is read and written one of them at a time."""
        return self.field in ("wi", "wo") and self.disk[0] == "E"

    def of_expert(self, e: int) -> Tensor:
        """The entry of expert `e`."""
        return dataclasses.replace(self, disk=self.disk[1:], fixed=(*self.fixed, ("E", e)))

    def corner(self) -> tuple[int, ...]:
        """Where `to_params` of it starts in the field."""
        return tuple(dict(self.fixed).get(letter, 0) for letter in DIMS[self.field])

    def block(self, config: MoEConfig) -> tuple[int, ...]:
        """The shape of `to_params` of it: of rank of the field, 1 in the fixed dims."""
        sizes = dim_sizes(config) | dict.fromkeys(dict(self.fixed), 1)
        return tuple(sizes[letter] for letter in DIMS[self.field])

    def to_params(self, array: np.ndarray, config: MoEConfig) -> np.ndarray:
        """As it lies in the field: a view."""
        sizes, letters = dim_sizes(config), "".join(self.disk)
        wanted = [letter for letter in DIMS[self.field] if letter in letters]
        array = array.reshape([sizes[letter] for letter in letters])
        return array.transpose([letters.index(letter) for letter in wanted]).reshape(self.block(config))

    def to_disk(self, block: np.ndarray, config: MoEConfig) -> np.ndarray:
        """The inverse of `to_params`, contiguous."""
        letters = "".join(self.disk)
        have = [letter for letter in DIMS[self.field] if letter in letters]
        sizes = dim_sizes(config)
        block = block.reshape([sizes[letter] for letter in have])
        block = block.transpose([have.index(letter) for letter in letters])
        return np.ascontiguousarray(block.reshape(self.shape(config)))


ROUTER = Row("gate.weight", "router", ("E", "H"))
AROUND = (
    ROUTER,
    Row("gate.e_score_correction_bias", "router_bias", ("E",)),
    Row("shared_experts.gate_proj.weight", "shared_wi", ("S", "H"), 0),
    Row("shared_experts.up_proj.weight", "shared_wi", ("S", "H"), 1),
    Row("shared_experts.down_proj.weight", "shared_wo", ("H", "S")),
)
# Spelling: (the block's name in its layer, its tensors). The first two have one tensor an expert; `stacked` is what
# transformers 5 holds in memory of every family but GPT-OSS, which has no other spelling than its own.
SPELLINGS: dict[str, tuple[str, tuple[Row, ...]]] = {
    "mixtral": (
        "block_sparse_moe",
        (
            ROUTER,
            Row("experts.{e}.w1.weight", "wi", ("F", "H"), 0),
            Row("experts.{e}.w3.weight", "wi", ("F", "H"), 1),
            Row("experts.{e}.w2.weight", "wo", ("H", "F")),
        ),
    ),
    "per_expert": (
        "mlp",
        (
            *AROUND,
            Row("experts.{e}.gate_proj.weight", "wi", ("F", "H"), 0),
            Row("experts.{e}.up_proj.weight", "wi", ("F", "H"), 1),
            Row("experts.{e}.down_proj.weight", "wo", ("H", "F")),
        ),
    ),
    "stacked": (
        "mlp",
        (
            *AROUND,
            Row("experts.gate_up_proj", "wi", ("E", "GF", "H")),
            Row("experts.down_proj", "wo", ("E", "H", "F")),
        ),
    ),
    "gpt_oss": (
        "mlp",
        (
            Row("router.weight", "router", ("E", "H")),
            Row("router.bias", "logits_bias", ("E",)),
            Row("experts.gate_up_proj", "wi", ("E", "H", "FG")),
            Row("experts.gate_up_proj_bias", "bi", ("E", "FG")),
            Row("experts.down_proj", "wo", ("E", "F", "H")),
            Row("experts.down_proj_bias", "bo", ("E", "H")),
        ),
    ),
}
BLOCKS = tuple(dict.fromkeys(block for block, _ in SPELLINGS.values()))


def dim_sizes(config: MoEConfig) -> dict[str, int]:
    """The size of each letter."""
    c = config
    return dict(E=c.num_experts, H=c.d_model, F=c.d_ff, S=c.shared_d_ff, G=c.gates)


def spelling_of(model_type: str, stacked: bool | None) -> str:
    """The spelling that a model of this type is written in; `stacked` None: the published one.

    Raises Unsupported for GPT-OSS with one tensor an expert.
    """
    if model_type == "gpt_oss":
        if stacked is False:
            raise Unsupported("stacked=False: GPT-OSS has stacked experts alone")
        return "gpt_oss"
    if stacked:
        return "stacked"
    return "mixtral" if model_type == "mixtral" else "per_expert"


def tensors_of(spelling: str, config: MoEConfig) -> Iterator[Tensor]:
    """Every tensor of a block of this config, in the order of its fields.

    Raises Unsupported where the spelling has no name for a parameter of the config.
    """
    rows, shapes = SPELLINGS[spelling][1], param_shapes(config)
    if config.gates != 2:
        raise Unsupported(f"activation={config.activation!r}: published MoE layers have a gate")
    for field in DIMS:
        if getattr(shapes, field) is None:
            continue
        found = [row for row in rows if row.field == field]
        if not found:
            raise Unsupported(f"checkpoints in the spelling {spelling!r} have no tensor for params.{field}")
        for row in found:
            fixed = () if row.projection is None else (("G", row.projection),)
            experts = range(config.num_experts) if "{e}" in row.name else (None,)
            for e in experts:
                at = fixed if e is None else (*fixed, ("E", e))
                yield Tensor(row.name.format(e=e), field, row.disk, at)
