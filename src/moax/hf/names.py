"""This table says where each tensor of a checkpoint lies in MoEParams, for the five families.

Dims are letters: E experts, H model width, F expert width, S shared width, G gate and up projection. The dims of a
tensor on disk are groups of letters, for g = 0 (gate) and g = 1 (up):

    ("E", "GF", "H")    disk[e, g F + f, h] = wi[e, h, g, f]     the whole gate comes before the whole up projection
    ("E", "H", "FG")    disk[e, h, 2 f + g] = wi[e, h, g, f]     gate and up columns alternate
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
    """A line of the table.

    Attributes:
      name: the tensor's name in the block; {e} stands for the index of an expert.
      field: the field of MoEParams that holds it.
      disk: its dims on disk.
      projection: 0 for a gate projection, 1 for an up projection, None for other tensors.
    """

    name: str
    field: str
    disk: tuple[str, ...]
    projection: int | None = None


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    Attributes:
      name, field, disk: see `Row`.
      fixed: (dim, index) pairs: the tensor is the entry `index` of its field along `dim`.
    """

    name: str
    field: str
    disk: tuple[str, ...]
    fixed: tuple[tuple[str, int], ...]

    def shape(self, config: MoEConfig) -> tuple[int, ...]:
        """Returns the shape on disk."""
        sizes = dim_sizes(config)
        return tuple(math.prod(sizes[letter] for letter in group) for group in self.disk)

    def by_expert(self) -> bool:
        """Whether the tensor stacks the matrices of experts, so that one expert at a time is read or written."""
        return self.field in ("wi", "wo") and self.disk[0] == "E"

    def of_expert(self, e: int) -> Tensor:
        """Returns the part of the tensor that belongs to expert `e`."""
        return dataclasses.replace(self, disk=self.disk[1:], fixed=(*self.fixed, ("E", e)))

    def corner(self) -> tuple[int, ...]:
        """Returns the first index in the field of the block that `to_params` returns."""
        return tuple(dict(self.fixed).get(letter, 0) for letter in DIMS[self.field])

    def block(self, config: MoEConfig) -> tuple[int, ...]:
        """Returns the shape of the block that `to_params` returns: the field's rank, with 1 in fixed dims."""
        sizes = dim_sizes(config) | dict.fromkeys(dict(self.fixed), 1)
        return tuple(sizes[letter] for letter in DIMS[self.field])

    def to_params(self, array: np.ndarray, config: MoEConfig) -> np.ndarray:
        """Returns `array`, which has the layout on disk, as a block of the field; the block is a view."""
        sizes, letters = dim_sizes(config), "".join(self.disk)
        wanted = [letter for letter in DIMS[self.field] if letter in letters]
        array = array.reshape([sizes[letter] for letter in letters])
        return array.transpose([letters.index(letter) for letter in wanted]).reshape(self.block(config))

    def to_disk(self, block: np.ndarray, config: MoEConfig) -> np.ndarray:
        """Returns the array on disk of a block of the field, contiguous: the inverse of `to_params`."""
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
# {spelling: (the block's name in its layer, its tensors)}. The first two spellings have one tensor for each expert.
# transformers 5 holds every family but GPT-OSS in memory as `stacked`. GPT-OSS has only its own spelling.
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
    """Returns the size of each letter."""
    c = config
    return dict(E=c.num_experts, H=c.d_model, F=c.d_ff, S=c.shared_d_ff, G=c.gates)


def spelling_of(model_type: str, stacked: bool | None) -> str:
    """Returns the spelling in which a model of this type is written.

    Args:
      model_type: one of `MODEL_TYPES`.
      stacked: whether experts are stacked; None takes the published spelling.

    Raises:
      Unsupported: `stacked` is False for GPT-OSS.
    """
    if model_type == "gpt_oss":
        if stacked is False:
            raise Unsupported("stacked=False: GPT-OSS has stacked experts alone")
        return "gpt_oss"
    if stacked:
        return "stacked"
    return "mixtral" if model_type == "mixtral" else "per_expert"


def tensors_of(spelling: str, config: MoEConfig) -> Iterator[Tensor]:
    """Yields every tensor of a block of this config, in the order of `DIMS`.

    Raises:
      Unsupported: the spelling has no name for a parameter of the config.
    """
    rows, shapes = SPELLINGS[spelling][1], param_shapes(config)
    if config.gates != 2:
        raise Unsupported(f"activation={config.activation!r} has no gate, and published MoE layers have one")
    for field in DIMS:
        if getattr(shapes, field) is None:
            continue
        rows_of_field = [row for row in rows if row.field == field]
        if not rows_of_field:
            raise Unsupported(f"checkpoints in the spelling {spelling!r} have no tensor for params.{field}")
        for row in rows_of_field:
            projection = () if row.projection is None else (("G", row.projection),)
            experts = range(config.num_experts) if "{e}" in row.name else (None,)
            for e in experts:
                fixed = projection if e is None else (*projection, ("E", e))
                yield Tensor(row.name.format(e=e), field, row.disk, fixed)
