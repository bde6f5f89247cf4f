"""Weights on a mesh: each device quantizes its shard, and gathers the weight before a matmul.

    gather    operand = all_gather(quantize(w shard))             one byte an element, and the scales
    scatter   dw shard = reduce_scatter over fsdp, psum over dp   of each device's partial gradient

Both are ops of their own. Gathered weights and partial gradients are per-device arrays: their leading dim is sharded
over all mesh axes. The gather does not depend on tokens, so that it can overlap the work before the matmul. A barrier
between quantize and all_gather says when the wire starts: the quantization then reads its layer from a stack of weights
in place, where a barrier in front of it would make XLA copy the layer.

A weight that the caller has quantized may be gathered already, by `gather_quantized`. No axis of fsdp splits it then,
and the gather of the block moves nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from moax.kernels import Operand, implementation
from moax.kernels.device import sums_in_pieces
from moax.kernels.scales import find_scale_axes, flatten_columns, scale_shape, turn_dims
from moax.mesh import collectives
from moax.mesh.axes import Names, ResolvedAxes
from moax.mesh.collectives import GradReduce, sum_dtype
from moax.mesh.op import Op, OpSharding
from moax.mesh.specs import MeshView, Spec, WholeWeight, local_shape, pad
from moax.recipe import Format, Recipe, Use
from moax.types import QShard

# A QShard for each of `USES`, or one array in the dtype of matmuls where the recipe has no format of weights.
QuantizedWeight = tuple[Any, ...]
USES: tuple[Use, Use] = ("fprop", "dgrad")


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The static facts of a weight [E, K, *C]."""

    name: str  # in errors
    declared: Spec  # used where neither the type of the weight nor its sharding says a spec
    axes: ResolvedAxes
    recipe: Recipe
    kernels: str
    dtype: np.dtype  # of the matmuls
    # The axes that split each dim also in a matmul. None keeps ep on E, and tp where the spec has tp.
    split: tuple[Names, ...] | None = None
    grad_reduce: GradReduce | None = None  # see `moax.Options.grad_reduce_dtype`
    gathered: bool = False  # whether the weight comes quantized and gathered
    added_dims: int = 0  # the leading dims that the caller's array does not have, which errors do not count

    @property
    def grad_dtype(self) -> np.dtype:
        """The dtype in which the gradient is computed and summed."""
        return sum_dtype(self.grad_reduce, self.dtype)


@dataclasses.dataclass(frozen=True)
class GatherSpec:
    """The static facts of the gather of a weight."""

    weight: WeightSpec
    use: Use
    after: tuple[Spec, ...] = ()  # of the arrays that the wire waits for
    scales_first: bool = False  # the values start when the scales have arrived, so that no small collective waits


class GatheredWeight(NamedTuple):
    """A gathered weight, and a sign of its gather.

    Attributes:
      operand: the whole weight as each device's operand of a matmul: over K for `fprop`, over *C for `dgrad`.
      quantized: zeros, a number a device, which are there when the shard is quantized. A gather that waits for them
        starts behind this one.
    """

    operand: Operand
    quantized: Array


class WeightLayout(NamedTuple):
    """The layout of a weight on the mesh: for each dim the axes that split it in a matmul, and that are gathered."""

    spec: Spec
    split: tuple[Names, ...]
    gather: tuple[Names, ...]

    def whole_shape(self, shape: Sequence[int], axes: ResolvedAxes) -> tuple[int, ...]:
        """Returns the shape of the gathered weight, from that of a shard."""
        return tuple(n * axes.size(names) for n, names in zip(shape, self.gather, strict=True))


def find_layout(
    weight: WeightSpec,
    known_spec: Spec | None = None,
    ndim: int | None = None,
) -> WeightLayout:
    """Returns the layout by the spec that a weight is known to have, else by the declared one; see `lay_out_weight`."""
    spec = weight.declared if known_spec is None else known_spec
    if ndim is None:
        ndim = len(weight.split or spec)
    return lay_out_weight(weight.name, spec, weight.axes, ndim, split=weight.split, added_dims=weight.added_dims)


def lay_out_weight(
    name: str,
    spec: Spec,
    axes: ResolvedAxes,
    ndim: int,
    *,
    split: tuple[Names, ...] | None = None,
    added_dims: int = 0,
) -> WeightLayout:
    """Returns the layout of a weight with this spec; for `name`, `split` and `added_dims` see `WeightSpec`.

    Dim i stays split over `split[i]` in a matmul, and is gathered over the other axes of its entry: with the spec
    (("ep", "fsdp"), None, "tp") and split (("ep",), (), ("tp",)), the dims are gathered over (("fsdp",), (), ()).

    Raises:
      ValueError: a dim of the spec does not name its `split` axes first, or names an axis that may not be gathered
        after them. The axes of fsdp may be gathered, and the axes of ep where no dim keeps ep.
    """
    entries = pad(spec, ndim)
    if split is None:
        tp = axes.tp
        split = (axes.ep, *(tp if tp and tp[0] in entry else () for entry in entries[1:]))
    entries = [tuple(axis for axis in entry if axis in axes.all) for entry in entries]
    gatherable = axes.fsdp
    if set(axes.ep).isdisjoint(sum(split, ())):
        gatherable += axes.ep
    gather = []
    for dim, (entry, split_entry) in enumerate(zip(entries, split, strict=True)):
        gathered = entry[len(split_entry) :]
        if entry[: len(split_entry)] != split_entry or not set(gathered) <= set(gatherable):
            error = ValueError if any(entries) else WholeWeight
            raise error(f"{name}: dim {dim - added_dims} {_explain_entry(entry, split_entry, gatherable)}")
        gather.append(gathered)
    return WeightLayout(Spec(*entries), tuple(split), tuple(gather))


def find_quantized_layout(weight: WeightSpec) -> WeightLayout:
    """Returns the layout of the weight as it comes quantized, which does not depend on the layout of the parameter.

    It is the declared layout; a gathered weight is split as in a matmul, by ep and tp alone.
    """
    layout = find_layout(weight)
    if not weight.gathered:
        return layout
    split = layout.split
    nothing: tuple[Names, ...] = ((),) * len(split)
    return WeightLayout(Spec(*split), split, nothing)


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


def gather_weight(
    view: MeshView, static: GatherSpec, w: Array, quantized: QuantizedWeight | None, *after: Array
) -> GatheredWeight:
    """Quantizes the shards of a weight, waits for the arrays `after`, and gathers the weight.

    With `quantized`, which `moax.quantize_params` makes, nothing reads the values of w. A weight that is `gathered`
    waits for nothing.
    """
    return GatheredWeight(*_gather(view, static, w, quantized, after))


def gather_shard(
    static: GatherSpec,
    layout: WeightLayout,
    w: Array | None,
    quantized: QuantizedWeight | None,
    after: tuple[Array, ...] = (),
) -> GatheredWeight:
    """Runs `gather_weight` on one device."""
    weight = static.weight
    recipe = weight.recipe
    kernels = implementation(weight.kernels)
    gather = layout.gather
    if quantized is not None:
        gather = find_quantized_layout(weight).gather
    shard: Any = w
    if recipe.w is not None:
        if quantized is None:
            shard = kernels.quantize_shard(cast(Array, w), recipe, static.use, gather)
        else:
            shard = quantized[USES.index(static.use)]
    elif quantized is not None:
        shard = quantized[0]
    sign = collectives.vary_like(jnp.zeros(1), shard)
    if weight.gathered:
        return GatheredWeight(_make_operand(weight, static.use, shard), sign)
    # Backward gathers, quantizes or casts a weight again. Without the barrier XLA would keep the weight that forward
    # made, as a common subexpression (jax-ml/jax#13999). A weight that is neither gathered nor made has no barrier: XLA
    # would copy it out of the stack of a scan.
    is_gathered = any(gather)
    is_made = quantized is None and (recipe.w is not None or shard.dtype != weight.dtype)
    waits = after or static.use == "dgrad"
    if waits and (is_made or is_gathered):
        shard, sign, _ = lax.optimization_barrier((shard, sign, after))
    whole = _make_whole(weight, static.use, shard, gather, scales_first=static.scales_first)
    operand = _make_operand(weight, static.use, whole)
    if is_gathered:  # the order of gathers without this barrier is not measured
        operand = lax.optimization_barrier(operand)
    return GatheredWeight(operand, sign)


def _make_whole(
    weight: WeightSpec,
    use: Use,
    shard: Any,
    gather: Sequence[Names],
    *,
    scales_first: bool = False,
    equal: bool = False,
) -> Any:
    """Returns the whole weight: a QShard from a QShard, or an array in the dtype of matmuls from an array."""
    format = weight.recipe.w
    if format is None:
        return collectives.gather_weight(shard.astype(weight.dtype), gather, equal=equal)
    transposed = implementation(weight.kernels).stores_weight_transposed(weight.recipe, use)
    experts, *matrix = shard.data.shape
    if transposed:
        matrix = [matrix[-1], *matrix[:-1]]
    scale_axes = find_scale_axes((experts, *matrix), format, use, gather)
    gather = turn_dims(gather, transposed)
    scale_axes = turn_dims(scale_axes, transposed)
    return collectives.gather_qshard(shard, gather, scale_axes, scales_first, equal=equal)


def _make_operand(weight: WeightSpec, use: Use, whole: Any) -> Operand:
    """Returns the operand of a matmul from a whole weight."""
    if weight.recipe.w is None:
        return flatten_columns(whole, False)
    return implementation(weight.kernels).make_weight_operand(whole, weight.recipe, use)


def scatter_gradient(view: MeshView, weight: WeightSpec, partial: Array, w: Array) -> Array:
    """Returns the gradient of w, summed and laid out as w is, from each device's partial gradient."""
    (shard,) = _scatter(view, weight, partial, w)
    if not weight.axes.replica_axes:
        return shard  # without a barrier a matmul writes it into the stack of a scan
    # A scan stores the sum in its stack of gradients. Where this store is a copy alone, XLA starts it on a stream of
    # its own (openxla/xla#44359), as early as it can, and all other work then waits for the collective. Times a 1 that
    # XLA does not know, the store is a kernel, and XLA runs it last.
    shard, unknown_one = lax.optimization_barrier((shard, jnp.ones((), shard.dtype)))
    return shard * unknown_one


def replicas(weight: WeightSpec, layout: WeightLayout) -> Names:
    """Returns the axes over which a gradient is still a partial sum after its reduce-scatter."""
    gathered = {name for names in layout.gather for name in names}
    return tuple(name for name in weight.axes.replica_axes if name not in gathered)


def quantized_specs(weight: WeightSpec, shape: Sequence[int]) -> QuantizedWeight:
    """Returns the specs of a quantized weight of this whole shape, in the layout in which it comes."""
    layout = find_quantized_layout(weight)
    format = weight.recipe.w
    if format is None:
        return (layout.spec,)
    kernels = implementation(weight.kernels)
    specs = []
    for use in USES:
        shard_shape = local_shape(shape, layout.spec, weight.axes)
        scale_axes = find_scale_axes(shard_shape, format, use, layout.gather)
        split = layout.split
        if len(scale_axes) < len(split):  # the columns of the scales are one dim
            split = (*split[:2], sum(split[2:], ()))
        data = [*layout.spec, *[None] * (len(shape) - len(layout.spec))]
        scale = [entry + gathered for entry, gathered in zip(split, scale_axes, strict=True)]
        if kernels.stores_weight_transposed(weight.recipe, use):
            data = turn_dims(data, True)
            scale = turn_dims(scale, True)
        specs.append(QShard(Spec(*data), Spec(*scale)))
    return tuple(specs)


def quantized_shapes(weight: WeightSpec, shape: Sequence[int], *, local: bool) -> tuple[QShard[tuple[int, ...]], ...]:
    """Returns the shapes of the arrays that `quantize_weight` makes; with `local`, of a weight that is a shard."""
    layout = find_quantized_layout(weight)
    format = cast(Format, weight.recipe.w)
    shard_shape = shape if local else local_shape(shape, layout.spec, weight.axes)
    shapes = []
    for use, specs in zip(USES, quantized_specs(weight, shape), strict=True):
        transposed = implementation(weight.kernels).stores_weight_transposed(weight.recipe, use)
        scale = turn_dims(scale_shape(shard_shape, format, use, layout.gather, weight.axes), transposed)
        if not local:
            entries = pad(specs.scale, len(scale))
            scale = tuple(n * weight.axes.size(names) for n, names in zip(scale, entries, strict=True))
        shapes.append(QShard(turn_dims(shape, transposed), scale))
    return tuple(shapes)


def quantize_weight(view: MeshView, weight: WeightSpec, w: Array) -> QuantizedWeight:
    """Returns the weight in its declared layout, quantized on its shards for both kinds of matmuls, or rounded."""
    if weight.recipe.w is None:
        return (w.astype(weight.dtype),)
    _, operands = _quantize.lay_out(view, weight, w)
    data, scale, columns_data, columns_scale = _quantize(view, weight, *operands)
    return QShard(data, scale), QShard(columns_data, columns_scale)


def gather_quantized(view: MeshView, weight: WeightSpec, quantized: QuantizedWeight) -> QuantizedWeight:
    """Returns a weight of `quantize_weight`, gathered over fsdp: the `quantized` of a weight that is `gathered`.

    Its arrays are split as in a matmul, by ep and tp alone. The columns of scales are one dim.
    """
    whole = _gather_quantized(view, weight, quantized)
    return jax.tree.structure(quantized).unflatten(whole)


def values_of(quantized: QuantizedWeight) -> Any:
    """Returns the values of a quantized weight for dgrad, whose dims are in the order of the weight."""
    return jax.tree.leaves(quantized[-1])[0]


def _quantize_shards(weight: WeightSpec, layout: WeightLayout, w):
    quantize = implementation(weight.kernels).quantize_shard
    arrays = []
    for use in USES:
        arrays += quantize(w, weight.recipe, use, layout.gather)
    return tuple(arrays)


def _quantize_sharding(weight: WeightSpec, operands, operand_specs) -> OpSharding:
    layout = find_layout(weight)
    specs = [spec for shard in quantized_specs(weight, operands[0].shape) for spec in shard]
    return OpSharding((layout.spec,), specs, [()] * 4, layout)


def _gather_quantized_shards(weight: WeightSpec, layout: WeightLayout, quantized: QuantizedWeight):
    arrays: list[Array] = []
    for use, shard in zip(USES, quantized, strict=False):  # one array is for both uses
        whole = _make_whole(weight, use, shard, layout.gather, equal=True)
        if isinstance(whole, QShard):
            transposed = implementation(weight.kernels).stores_weight_transposed(weight.recipe, use)
            whole = QShard(whole.data, flatten_columns(whole.scale, transposed))
        arrays += jax.tree.leaves(whole)
    return tuple(arrays)


def _gather_quantized_rule(weight: WeightSpec, operands) -> str:
    results = ["@"] * len(jax.tree.leaves(operands))
    return f"@ -> {', '.join(results)}"


def _gather_quantized_sharding(weight: WeightSpec, operands, operand_specs) -> OpSharding:
    (quantized,) = operands
    shape = values_of(quantized).shape
    shard_specs = quantized_specs(weight, shape)
    gathered_specs = quantized_specs(dataclasses.replace(weight, gathered=True), shape)
    results = jax.tree.leaves(gathered_specs, is_leaf=lambda v: isinstance(v, Spec))
    return OpSharding((shard_specs,), results, [()] * len(results), find_layout(weight))


def _gather_sharding(static: GatherSpec, operands, operand_specs) -> OpSharding:
    weight = static.weight
    w, quantized, _ = operands
    layout = find_layout(weight, operand_specs[0], w.ndim)
    specs = None if quantized is None else quantized_specs(weight, w.shape)
    own = Spec(weight.axes.all)
    return OpSharding((layout.spec, specs, static.after), (own, own), ((), ()), layout)


def sum_shards(weight: WeightSpec, layout: WeightLayout, partial: Array) -> Array:
    """Returns this device's shard of the sum of partial gradients [E, K, *C]."""
    in_pieces = sums_in_pieces()
    return collectives.scatter_gradient(partial, layout.gather, weight.grad_reduce, in_pieces=in_pieces)


def _scatter_shards(weight: WeightSpec, layout: WeightLayout, partial, w):
    return sum_shards(weight, layout, partial)  # nothing reads the values of w, whose layout the op needs


def _scatter_sharding(weight: WeightSpec, operands, operand_specs) -> OpSharding:
    _, w = operands
    layout = find_layout(weight, operand_specs[1], w.ndim)
    specs = (Spec(weight.axes.all), layout.spec)
    return OpSharding(specs, (layout.spec,), (replicas(weight, layout),), layout)


_quantize = Op("quantize_weight", _quantize_shards, "*w -> @, @, @, @", sharding=_quantize_sharding)
_gather_quantized = Op(
    "gather_quantized",
    _gather_quantized_shards,
    _gather_quantized_rule,
    sharding=_gather_quantized_sharding,
)
_gather = Op("gather_weight", gather_shard, "*w, @, @ -> @, @", sharding=_gather_sharding)
_scatter = Op("scatter_gradient", _scatter_shards, "@, *w -> *w", sharding=_scatter_sharding)
