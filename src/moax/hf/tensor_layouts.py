"""Which tensors an MoE layer has in a checkpoint, and where each tensor's elements are in MoEParams.

Dims are letters: E experts, H model width, F expert width, S shared width, L latent width, G gate (g = 0) and up
(g = 1) projection. The H of latent experts is L.
A row of a layout is "name field dims of the tensor":

    experts.gate_up_proj wi E GF H      tensor[e, g F + f, h] = wi[e, h, g, f]    the whole gate precedes the whole up
    experts.gate_up_proj wi E H FG      tensor[e, h, 2 f + g] = wi[e, h, g, f]    gate and up columns alternate
    experts.{e}.w1.weight wi:0 F H      tensor e [f, h]       = wi[e, h, 0, f]    one tensor an expert, the gate alone
    experts.mlp.w2 wo EF H              tensor[e F + f, h]    = wo[e, f, h]       the experts are concatenated
    gate.bias router_bias 1 E           tensor[0, e]          = router_bias[e]    a dim of size 1

"../" at the start of a name leaves the block: in `layers.3.moe.`, "../shared.weight" is `layers.3.shared.weight`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moax.checks import Unsupported
from moax.config import MoEConfig
from moax.params import DIMS, param_shapes

# the start of a name, up to the number of its layer
LAYER = re.compile(r"(?:.*?\.)??(?:layers|blocks)\.(\d+)\.")


class Row(NamedTuple):
    """A tensor of a block, or one tensor an expert; `projection` is the G of a tensor that holds gate or up alone."""

    name: str
    field: str
    dims: tuple[str, ...]
    projection: int | None


class BlockLayout(NamedTuple):
    """The tensors of an MoE block."""

    # the name of the block in its layer and a dot; "" where the tensors belong to the layer itself
    block: str
    rows: tuple[Row, ...]
    # names in the block of tensors of the layer around the block, such as a norm
    outside: tuple[str, ...]
    stem: str  # the part of the names before the number of a layer


def block_layout(
    block: str,
    *rows: str,
    outside: tuple[str, ...] = (),
    stem: str = "model.layers.",
) -> BlockLayout:
    """Returns the layout of rows as this file's docstring writes them; a string may have several, split by ";"."""
    parsed = []
    for text in ";".join(rows).split(";"):
        name, place, *dims = text.split()
        field, _, projection = place.partition(":")
        dims = tuple(dim.strip("1") for dim in dims)
        parsed.append(Row(name, field, dims, int(projection) if projection else None))
    return BlockLayout(block and f"{block}.", tuple(parsed), outside, stem)


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: the entry of its field at the indices `fixed`, such as {"G": 1, "E": 3}."""

    name: str
    field: str
    dims: tuple[str, ...]
    fixed: dict[str, int]
    sizes: dict[str, int]  # of each letter

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        return tuple(math.prod(self.sizes[letter] for letter in group) for group in self.dims)

    @property
    def region(self) -> tuple[slice, ...]:
        """The part of the field that the tensor holds."""
        slices = []
        for letter in DIMS[self.field]:
            if letter in self.fixed:
                slices.append(slice(self.fixed[letter], self.fixed[letter] + 1))
            else:
                slices.append(slice(0, self.sizes[letter]))
        return tuple(slices)

    def by_expert(self) -> list[Tensor]:
        """Returns the parts of stacked experts, to be read and written one at a time; else the tensor itself."""
        if self.field not in ("wi", "wo") or not self.dims[0].startswith("E"):
            return [self]
        dims = tuple(filter(None, (self.dims[0][1:], *self.dims[1:])))
        experts = range(self.sizes["E"])
        return [dataclasses.replace(self, dims=dims, fixed=self.fixed | {"E": e}) for e in experts]

    def to_params(self, array: np.ndarray) -> np.ndarray:
        """Returns a tensor as the `region` of its field; the result is a view."""
        letters = "".join(self.dims)
        shape = [cut.stop - cut.start for cut in self.region]
        return self._transpose(array, letters, self._in_order_of_field(letters), shape)

    def from_params(self, block: np.ndarray) -> np.ndarray:
        """Returns the `region` of the field as the contiguous tensor: the inverse of `to_params`."""
        letters = "".join(self.dims)
        tensor = self._transpose(block, self._in_order_of_field(letters), letters, self.shape)
        return np.ascontiguousarray(tensor)

    def _in_order_of_field(self, letters: str) -> str:
        return "".join(d for d in DIMS[self.field] if d in letters)

    def _transpose(self, array: np.ndarray, source: str, target: str, shape: Sequence[int]) -> np.ndarray:
        array = array.reshape([self.sizes[d] for d in source])
        return array.transpose([source.index(d) for d in target]).reshape(shape)


def tensors_of(layout: BlockLayout, config: MoEConfig) -> Iterator[Tensor]:
    """Yields every tensor of a block, in the order of `DIMS`; Unsupported where a parameter has no name."""
    shapes = param_shapes(config)
    for field in DIMS:
        shape = getattr(shapes, field)
        if shape is None:
            continue
        rows = [row for row in layout.rows if row.field == field]
        sizes = dict(zip(DIMS[field], shape, strict=True))
        if not rows:
            raise Unsupported(f"the names of this family have no tensor for params.{field}")
        if {row.projection for row in rows} not in ({None}, set(range(config.gates))):
            raise Unsupported(f"activation={config.activation!r} does not have the projections of this family")
        for row in rows:
            fixed = {}
            if row.projection is not None:
                fixed["G"] = row.projection
            if "{e}" not in row.name:
                yield Tensor(row.name, field, row.dims, fixed, sizes)
                continue
            for e in range(config.num_experts):
                yield Tensor(row.name.format(e=e), field, row.dims, fixed | {"E": e}, sizes)


def resolve(prefix: str, name: str) -> str:
    """Returns the whole name of a tensor in the block of this prefix."""
    if not name.startswith("../"):
        return prefix + name
    parent = prefix.rstrip(".").rpartition(".")[0]
    name_in_parent = name.removeprefix("../")
    return f"{parent}.{name_in_parent}" if parent else name_in_parent


def block_test(prefix: str, layout: BlockLayout) -> Callable[[str], bool]:
    """Returns the test whether a tensor of this name belongs to the block of this prefix."""
    beside = {resolve(prefix, row.name) for row in layout.rows if row.name.startswith("../")}
    # A block that is the layer itself has the names that begin as its rows do: `router.`, `experts.`.
    starts = (prefix,)
    if prefix and not layout.block:
        heads = {row.name.partition(".")[0] for row in layout.rows}
        starts = tuple(f"{prefix}{head}." for head in heads)
    outside = {prefix + name for name in layout.outside}
    return lambda name: name in beside or (name.startswith(starts) and name not in outside)
