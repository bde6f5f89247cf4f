"""Weights on a mesh: each device quantizes its shard, and gathers the weight before a product.

    quantize  shard = quantize(w shard)                           one byte an element, and the scales
    gather    operand = all_gather(shard)                         over fsdp
    scatter   dw shard = reduce_scatter over fsdp, psum over dp   of each device's partial gradient

Each is an op of its own, so that a barrier between quantize and gather can say when the wire starts: the quantization
then reads its layer from a stack of weights in place, where a barrier before it would make XLA copy the layer. Gathered
weights and partial gradients are per-device arrays: their leading dim is sharded over all mesh axes. The gather does
not depend on tokens, so that it can overlap the work before the product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from moax.kernels import Operand, implementation
from moax.kernels.device import sums_in_pieces
from moax.kernels.scales import find_scale_axes
from moax.mesh import collectives
from moax.mesh.axes import Names, ResolvedAxes
from moax.mesh.collectives import GradReduce, sum_dtype
from moax.mesh.op import Op, OpSharding
from moax.mesh.specs import MeshView, Spec, WholeWeight, local_shape, pad
from moax.recipe import Format, Recipe, Use
from moax.types import QShard

# A QShard for each of `USES`, or one array in the dtype of products where the recipe has no format of weights.
QuantizedWeight = tuple[Any, ...]
WeightShard = Any  # a QShard, or an array where the recipe has no format of weights
USES: tuple[Use, Use] = ("fprop", "dgrad")


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The static facts of a weight [E, K, *C]."""

    name: str  # in errors
    declared: Spec  # used where neither the type of the weight nor its sharding says a spec
    axes: ResolvedAxes
    recipe: Recipe
    kernels: str
    dtype: np.dtype  # of the products
    # The axes that split each dim also in a product. None keeps ep on E, and tp where the spec has tp.
    kept: tuple[Names, ...] | None = None
    grad_reduce: GradReduce | None = None  # see `moax.Options.grad_reduce_dtype`

    @property
    def grad_dtype(self) -> np.dtype:
        """The dtype in which the gradient is computed and summed."""
        return sum_dtype(self.grad_reduce, self.dtype)


@dataclasses.dataclass(frozen=True)
class GatherSpec:
    """The static facts of the gather of a weight."""

    weight: WeightSpec
    use: Use
    # The shard is of `moax.quantize_params`, and has the declared layout.
    prequantized: bool = False
    # The values start when the scales have arrived, so that no small collective waits.
    scales_first: bool = False


class WeightLayout(NamedTuple):
    """The layout of a weight on the mesh: for each dim the axes that split it in a product, and that are gathered."""

    spec: Spec
    kept: tuple[Names, ...]
    gather: tuple[Names, ...]
    matrix_axes: Names  # that split the matrix of one expert

    def whole_shape(self, shape: Sequence[int], axes: ResolvedAxes) -> tuple[int, ...]:
        """Returns the shape of the gathered weight, from that of a shard."""
        return tuple(n * axes.size(names) for n, names in zip(shape, self.gather, strict=True))


def find_layout(
    weight: WeightSpec,
    known_spec: Spec | None = None,
    ndim: int | None = None,
) -> WeightLayout:
    """Returns the layout by the spec that a weight is known to have, else by the declared one.

    Dim i stays split over `kept[i]` in a product, and is gathered over the other axes of its entry: with the spec
    (("ep", "fsdp"), None, "tp") and kept (("ep",), (), ("tp",)), the dims are gathered over (("fsdp",), (), ()).

    Raises:
      ValueError: a dim of the spec does not name its `kept` axes first, or names an axis that may not be gathered
        after them. The axes of fsdp may be gathered, and the axes of ep where no dim keeps ep.
    """
    axes = weight.axes
    split = weight.kept
    spec = weight.declared if known_spec is None else known_spec
    if ndim is None:
        ndim = len(split or spec)
    entries = pad(spec, ndim)
    if split is None:
        tp = axes.tp
        split = (axes.ep, *(tp if tp and tp[0] in entry else () for entry in entries[1:]))
    entries = [tuple(name for name in entry if name in axes.all) for entry in entries]
    gatherable = axes.fsdp
    if set(axes.ep).isdisjoint(sum(split, ())):
        gatherable += axes.ep
    gather = []
    for dim, (entry, split_entry) in enumerate(zip(entries, split, strict=True)):
        gathered = entry[len(split_entry) :]
        if entry[: len(split_entry)] != split_entry or not set(gathered) <= set(gatherable):
            error = ValueError if any(entries) else WholeWeight
            raise error(f"{weight.name}: dim {dim} {_explain_entry(entry, split_entry, gatherable)}")
        gather.append(gathered)
    matrix_axes = sum((*gather[1:], *split[1:]), ())
    return WeightLayout(Spec(*entries), tuple(split), tuple(gather), matrix_axes)


def _explain_entry(entry: Names, required: Names, gatherable: Names) -> str:
    """Returns the sentence about a dim: the axes that split it, and the axes that should."""
    state = f"is sharded over {_name_axes(entry)}" if entry else "is not sharded"
    if required and gatherable:
        order = f"{_name_axes(required)} first, and may then be sharded over {_name_axes(gatherable)}"
        return f"{state}; it must be sharded over {order} alone"
    if required:
        return f"{state}; it must be sharded over {_name_axes(required)} alone"
    if gatherable:
        return f"{state}; it may be sharded over {_name_axes(gatherable)} alone"
    return f"{state}; it must not be sharded"


def _name_axes(names: Names) -> str:
    """Returns the names, after the word for them."""
    word = "axis" if len(names) == 1 else "axes"
    return f"mesh {word} {', '.join(map(repr, names))}"


def make_shard(
    view: MeshView,
    static: GatherSpec,
    w: Array,
    quantized: QuantizedWeight | None,
) -> WeightShard:
    """Returns what each device sends of a weight: its shard, quantized for one use, or w where nothing is quantized.

    With `quantized`, which `moax.quantize_params` makes, nothing reads the values of w.
    """
    shard = _choose_shard(static, w, quantized)
    if shard is None:
        return QShard(*_quantize_for(view, static, w))
    return shard


def _choose_shard(
    static: GatherSpec,
    w: Array,
    quantized: QuantizedWeight | None,
) -> WeightShard | None:
    """Returns the shard that is there, or None where w must be quantized for the use."""
    quantizes = static.weight.recipe.w is not None
    if quantized is None:
        return None if quantizes else w
    return quantized[USES.index(static.use)] if quantizes else quantized[0]


def gather_weight(view: MeshView, static: GatherSpec, w: Array, shard: WeightShard) -> Operand:
    """Returns the whole weight as each device's operand of a matmul: over K for `fprop`, over *C for `dgrad`.

    `shard` is the result of `make_shard`. The op needs the layout of w, and not its values.
    """
    (gathered,) = _gather(view, static, shard, w)
    return gathered


def gather_shard(
    static: GatherSpec,
    layout: WeightLayout,
    shard: WeightShard,
    w: Array | None,
) -> tuple[Operand]:
    """Runs `gather_weight` on one device; nothing reads the values of w."""
    weight = static.weight
    recipe = weight.recipe
    gather = layout.gather
    if static.prequantized:
        # A quantized weight has the declared layout, whatever the layout of w is.
        gather = find_layout(weight).gather
    if recipe.w is None:
        whole = collectives.gather_weight(shard.astype(weight.dtype), gather)
        operand = whole.reshape(*whole.shape[:2], -1)
    else:
        operand = implementation(weight.kernels).gather_shard(
            shard, recipe, static.use, gather, scales_first=static.scales_first
        )
    # The barrier makes a copy: XLA's partitioner confuses an operand with a result that is the same array.
    return (lax.optimization_barrier(operand),)


def gather_on_device(
    weight: WeightSpec,
    use: Use,
    layout: WeightLayout,
    w: Array,
    quantized: QuantizedWeight | None = None,
) -> Operand:
    """Quantizes and gathers a weight on one device, for an op whose own step that is."""
    static = GatherSpec(weight, use, quantized is not None)
    shard = _choose_shard(static, w, quantized)
    if shard is None:
        shard = QShard(*_quantize_one_use(static, layout, w))
    (gathered,) = gather_shard(static, layout, shard, None)
    return gathered


def scatter_gradient(view: MeshView, weight: WeightSpec, partial: Array, w: Array) -> Array:
    """Returns the gradient of w, summed and laid out as w is, from each device's partial gradient."""
    return _scatter(view, weight, partial, w)[0]


def replicas(weight: WeightSpec, layout: WeightLayout) -> Names:
    """Returns the axes over which a gradient is still a partial sum after its reduce-scatter."""
    gathered = {name for names in layout.gather for name in names}
    return tuple(name for name in weight.axes.replica_axes if name not in gathered)


def quantized_specs(weight: WeightSpec, shape: Sequence[int]) -> QuantizedWeight:
    """Returns the specs of a quantized weight of this whole shape, in its declared layout."""
    layout = find_layout(weight)
    if weight.recipe.w is None:
        return (layout.spec,)
    return tuple(_shard_specs(weight, layout, shape, use) for use in USES)


def _shard_specs(
    weight: WeightSpec,
    layout: WeightLayout,
    shape: Sequence[int],
    use: Use,
) -> QShard[Spec]:
    """Returns the specs of a weight of this whole shape that is quantized for one use, in a layout of the weight."""
    format = cast(Format, weight.recipe.w)
    kernels = implementation(weight.kernels)
    shard_shape = local_shape(shape, layout.spec, weight.axes)
    scale_axes = find_scale_axes(shard_shape, format, use, layout.gather)
    if not scale_axes:
        scale_axes = (layout.gather[0], (), ())
    split = layout.kept
    if format.block is None:
        split = (split[0], (), ())
    elif len(scale_axes) < len(split):  # the columns of the scales are one dim
        split = (*split[:2], sum(split[2:], ()))
    data = [*layout.spec, *[None] * (len(shape) - len(layout.spec))]
    scale = [entry + gathered for entry, gathered in zip(split, scale_axes, strict=True)]
    if kernels.stores_weight_transposed(weight.recipe, use):
        data = [data[0], *data[2:], data[1]]
        scale = [scale[0], *scale[2:], scale[1]]
    return QShard(Spec(*data), Spec(*scale))


def quantize_weight(view: MeshView, weight: WeightSpec, w: Array) -> QuantizedWeight:
    """Returns the weight in its declared layout, quantized on its shards for both kinds of products, or rounded."""
    if weight.recipe.w is None:
        return (w.astype(weight.dtype),)
    _, operands = _quantize.lay_out(view, weight, w)
    data, scale, columns_data, columns_scale = _quantize(view, weight, *operands)
    return QShard(data, scale), QShard(columns_data, columns_scale)


def _quantize_shards(weight: WeightSpec, layout: WeightLayout, w):
    quantize = implementation(weight.kernels).quantize_shard
    arrays = []
    for use in USES:
        arrays += quantize(w, weight.recipe, use, layout.gather, layout.matrix_axes)
    return tuple(arrays)


def _quantize_one_use(static: GatherSpec, layout: WeightLayout, w) -> tuple[Array, Array]:
    weight = static.weight
    quantize = implementation(weight.kernels).quantize_shard
    data, scale = quantize(w, weight.recipe, static.use, layout.gather, layout.matrix_axes)
    return data, scale


def _quantize_for_sharding(static: GatherSpec, operands, operand_specs) -> OpSharding:
    (w,) = operands
    layout = find_layout(static.weight, operand_specs[0], w.ndim)
    specs = _shard_specs(static.weight, layout, w.shape, static.use)
    return OpSharding((layout.spec,), list(specs), [()] * 2, layout)


def _quantize_sharding(weight: WeightSpec, operands, operand_specs) -> OpSharding:
    layout = find_layout(weight)
    specs = [spec for shard in quantized_specs(weight, operands[0].shape) for spec in shard]
    return OpSharding((layout.spec,), specs, [()] * 4, layout)


def _gather_sharding(static: GatherSpec, operands, operand_specs) -> OpSharding:
    weight = static.weight
    _, w = operands
    layout = find_layout(weight, operand_specs[1], w.ndim)
    of_shard = find_layout(weight) if static.prequantized else layout
    specs = of_shard.spec
    if weight.recipe.w is not None:
        specs = _shard_specs(weight, of_shard, w.shape, static.use)
    return OpSharding((specs, layout.spec), (Spec(weight.axes.all),), ((),), layout)


def sum_shards(weight: WeightSpec, layout: WeightLayout, partial: Array) -> Array:
    """Returns this device's shard of the sum of partial gradients [E, K, *C]."""
    in_pieces = sums_in_pieces()
    return collectives.scatter_gradient(partial, layout.gather, weight.grad_reduce, in_pieces=in_pieces)


def _scatter_shards(weight: WeightSpec, layout: WeightLayout, partial, w):
    # Nothing reads the values of w, whose layout the op needs.
    shard = sum_shards(weight, layout, partial)
    if not any(layout.gather):
        return lax.optimization_barrier(shard)
    # A scan stores the shard in its stack of gradients. Where this store is a copy alone, XLA starts it on a stream of
    # its own (openxla/xla#44359), as early as it can, and all other work then waits for the reduce-scatter. Times a 1
    # that XLA does not know, the store is a kernel, and XLA runs it last.
    shard, unknown_one = lax.optimization_barrier((shard, jnp.ones((), shard.dtype)))
    return shard * unknown_one


def _scatter_sharding(weight: WeightSpec, operands, operand_specs) -> OpSharding:
    _, w = operands
    layout = find_layout(weight, operand_specs[1], w.ndim)
    specs = (Spec(weight.axes.all), layout.spec)
    return OpSharding(specs, (layout.spec,), (replicas(weight, layout),), layout)


_quantize = Op("quantize_weight", _quantize_shards, "*w -> @, @, @, @", sharding=_quantize_sharding)
_quantize_for = Op("quantize_weight", _quantize_one_use, "*w -> @, @", sharding=_quantize_for_sharding)
_gather = Op("gather_weight", gather_shard, "@, *w -> @", sharding=_gather_sharding)
_scatter = Op("scatter_gradient", _scatter_shards, "@, *w -> *w", sharding=_scatter_sharding)
