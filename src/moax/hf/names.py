"""The tensors of an MoE layer: which ones a spelling has for a config, and where each one lies in MoEParams."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator

import numpy as np

from moax.config import MoEConfig
from moax.errors import Unsupported
from moax.hf.config import family_of
from moax.hf.families import FAMILIES
from moax.hf.spellings import Spelling
from moax.params import DIMS, param_shapes

LAYER = re.compile(r"(?:.*?\.)??(?:layers|blocks)\.(\d+)\.")  # the start of a name, up to the number of its layer


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
        return self.field in ("wi", "wo") and self.disk[0].startswith("E")

    def of_expert(self, e: int) -> Tensor:
        """Returns the part of the tensor that belongs to expert `e`.

        Its dims are ("F", "H") where those of the tensor are ("E", "F", "H") or ("EF", "H").
        """
        rest = self.disk[0][1:]
        return dataclasses.replace(
            self, disk=((rest, *self.disk[1:]) if rest else self.disk[1:]), fixed=(*self.fixed, ("E", e))
        )

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


def dim_sizes(config: MoEConfig) -> dict[str, int]:
    """Returns the size of each letter."""
    c = config
    return dict(E=c.num_experts, H=c.d_model, F=c.d_ff, S=c.shared_d_ff, G=c.gates)


def spelling_of(model_type: str, stacked: bool | None) -> Spelling:
    """Returns the spelling in which a model of this type is written.

    Args:
      model_type: one of `MODEL_TYPES`.
      stacked: whether the experts are stacked; None takes the published spelling.

    Raises:
      Unsupported: `stacked` is False, and the published spelling of the family has stacked experts alone.
    """
    family = FAMILIES[family_of(model_type)]
    if stacked:
        return family.memory or family.published
    if stacked is False and not any("{e}" in row.name for row in family.published.rows):
        raise Unsupported(f"stacked=False: a {model_type} model has stacked experts alone")
    return family.published


def spellings_of(model_type: str | None) -> tuple[Spelling, ...]:
    """Returns the spellings in which a model of this type may be read; every spelling for None."""
    families = FAMILIES.values() if model_type is None else (FAMILIES[family_of(model_type)],)
    both = [spelling for family in families for spelling in (family.published, family.memory) if spelling]
    return tuple(dict.fromkeys(both))


def resolve(prefix: str, name: str) -> str:
    """Returns the whole name of a tensor: "../a" in the block `layers.3.moe.` is `layers.3.a`."""
    if not name.startswith("../"):
        return prefix + name
    parent = prefix.rstrip(".").rpartition(".")[0]
    return f"{parent}.{name[3:]}" if parent else name[3:]


def tensors_of(spelling: Spelling, config: MoEConfig) -> Iterator[Tensor]:
    """Yields every tensor of a block of this config, in the order of `DIMS`.

    Raises:
      Unsupported: the spelling has no name for a parameter of the config.
    """
    shapes = param_shapes(config)
    for field in DIMS:
        if getattr(shapes, field) is None:
            continue
        rows = [row for row in spelling.rows if row.field == field]
        if not rows:
            raise Unsupported(f"the names of this family have no tensor for params.{field}")
        parts = {row.projection for row in rows}
        if parts not in ({None}, set(range(config.gates))):
            raise Unsupported(f"activation={config.activation!r} does not have the projections of this family")
        for row in rows:
            projection = () if row.projection is None else (("G", row.projection),)
            experts = range(config.num_experts) if "{e}" in row.name else (None,)
            for e in experts:
                fixed = projection if e is None else (*projection, ("E", e))
                yield Tensor(row.name.format(e=e), field, row.disk, fixed)


def block_prefix(stem: str, layer: int, spelling: Spelling) -> str:
    """Returns the start of the names of a block: `model.layers.3.mlp.` for the stem `model.layers.`."""
    return f"{stem}{layer}." + (f"{spelling.block}." if spelling.block else "")


def block_test(prefix: str, spelling: Spelling) -> Callable[[str], bool]:
    """Returns the test whether a tensor of this name belongs to the block of this prefix.

    Where the block is the layer itself, the names in the block begin as those of its rows do: `router.`, `experts.`.
    """
    beside = {resolve(prefix, row.name) for row in spelling.rows if row.name.startswith("../")}
    heads = () if spelling.block or not prefix else {row.name.partition(".")[0] for row in spelling.rows}
    starts = tuple(f"{prefix}{head}." for head in heads) or (prefix,)
    outside = {prefix + name for name in spelling.outside}
    return lambda name: name in beside or (name.startswith(starts) and name not in outside)
