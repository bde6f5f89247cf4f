"""The plan of a block: all that is static about its experts, decided before anything is computed.

`make_plan` chooses the transport and the implementation of the kernels, and sizes the buffers of each round:

    slots     rows that a rank may send to another in a round; `rounds.py` has an example
    max_rows  sorted rows that a rank may hold in a round
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from moax.checks import check_value
from moax.config import LIMITED_FACTOR, BufferFactor, MoEConfig, Options
from moax.exchange import AUTO, TRANSPORTS, find_transport
from moax.exchange.transport import ExchangeSpec, allot_slots
from moax.kernels import implementation, select_kernels
from moax.kernels.groups import allot_rows
from moax.mesh.axes import Names, ResolvedAxes
from moax.mesh.collectives import get_grad_reduce
from moax.mesh.specs import MeshView, Spec, entries_of_type
from moax.ops.permutation import PermuteSpec, sorted_rows
from moax.ops.weights import USES, WeightSpec, find_layout, quantized_shapes, values_of
from moax.params import DIMS, LARGE, MoEParams
from moax.recipe import Format, Recipe, describe_recipe, get_recipe
from moax.text import plural
from moax.types import QShard, QuantizedParams

# A later round has half of the slots and 45 % of the rows of the first, because it recomputes what the first round
# saved. Its rows are this many twentieths.
LATER_ROWS = 9
# The time of a row of all_to_all over that of a row of all_gather, which finds no slots and copies no rows into them.
# On H200s all_to_all was slower by 4 % with 0.98 times the rows (Mixtral, ep 2), and as fast with 0.58 times (ep 4).
# Nobody has measured more ranks.
SLOT_COST = 1.7
MEASURED_RANKS = 4
# With at most so many ranks `buffer_factor="auto"` allots the worst case, which needs no loop of overflow rounds. Two
# H200s were faster with it.
WHOLE_RANKS = 2
MAX_ROWS = 2**31 - 1  # row numbers are int32


class Round(NamedTuple):
    """The buffers of a round: the specs of dispatch and combine, and those of permute and unpermute."""

    exchange: ExchangeSpec
    permute: PermuteSpec


class Rounds(NamedTuple):
    """The buffers of the first round and of each overflow round, and whether a routing may need overflow rounds."""

    first: Round
    later: Round
    overflows: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """The static facts of the experts of a block.

    Attributes:
      config, recipe: the equations, and the formats of the operands of matmuls.
      axes, wi, wo: the mesh axes by role, and the static facts of both weights.
      dtype, kernels: the dtype of matmuls, and the implementation's name.
      first, later: the buffers of the first round, and of each overflow round.
      overflows: whether a routing may need overflow rounds.
      expected: the sorted rows of a device at a balanced load, without padding.
      save_rows: whether forward leaves rows to backward: the received rows where matmuls gather, else the sorted rows.
        Without ep, matmuls that gather read x, so that forward leaves no rows. Frozen experts leave sorted rows.
      frozen: whether wi and wo have no gradient. The sorted rows that forward leaves are then not quantized.
      gathers_x, gathers_dy: whether matmuls gather received rows, and gradients of partial sums, by themselves.
    """

    config: MoEConfig
    recipe: Recipe
    axes: ResolvedAxes
    wi: WeightSpec
    wo: WeightSpec
    dtype: np.dtype
    kernels: str
    first: Round
    later: Round
    overflows: bool
    expected: int
    save_rows: bool
    frozen: bool
    gathers_x: bool
    gathers_dy: bool


def make_plan(
    config: MoEConfig,
    options: Options,
    *,
    axes: ResolvedAxes,
    declared: MoEParams[Spec],
    tokens: int,
    dtype: DTypeLike,
    frozen: bool = False,
    gathered: bool = False,
) -> BlockPlan:
    """Returns the plan of a block whose shards have `tokens` tokens each.

    Args:
      config, options: the block, and how it runs.
      declared: the spec of each parameter.
      axes, dtype, frozen: see `BlockPlan`.
      gathered: whether wi and wo come quantized and gathered.

    Raises:
      ValueError: no transport has the name of `options.exchange`, or int32 cannot count the rows of the worst routing.
      Unsupported: kernels chosen by name cannot run.
    """
    recipe = get_recipe(options.recipe)
    dtype = np.dtype(dtype)
    ep, tp = axes.ep, axes.tp
    d_ff = config.d_ff // axes.size(tp)  # of one device
    kernels = select_kernels(options.kernels, dtype, d_model=config.d_rows, d_ff=d_ff)
    local = implementation(kernels)
    align, gathers_x = local.choose_rows(recipe, "x", config.d_rows, d_ff)
    _, gathers_dy = local.choose_rows(recipe, "dy", config.d_rows, d_ff)

    ranks = axes.size(ep)
    buffer_factor = choose_buffer_factor(options.buffer_factor, ranks)
    slots, all_slots = allot_slots(
        tokens,
        config.top_k,
        ranks,
        config.num_experts,
        config.capacity_factor,
        buffer_factor,
    )
    transport = find_transport(options.exchange)
    if options.exchange == "auto":
        transport = choose_transport(config, axes, tokens, slots)
    exchange = ExchangeSpec(
        transport=transport,
        axes=axes,
        ranks=ranks,
        tokens=tokens,
        slots=slots if TRANSPORTS[transport].has_slots else all_slots,
        num_experts=config.num_experts,
        capacity=all_slots,
    )
    num_rows = sorted_rows(tokens * ranks, config.top_k, config.num_experts // ranks, align, None)
    if isinstance(num_rows, int) and num_rows > MAX_ROWS:
        counts = f"its {tokens} tokens on a device, over {plural(ranks, 'rank')} of ep and with top_k={config.top_k}"
        raise ValueError(f"x: {counts}, may have {num_rows} rows; there must be at most {MAX_ROWS}, which int32 counts")
    rounds = size_rounds(config, exchange, kernels, align, buffer_factor)

    # Where rows travel, backward would receive them again. Frozen experts have adapters, which read unquantized rows.
    must_keep = bool(ep) or frozen
    save_rows = options.save_rows
    if save_rows is None:
        save_rows = must_keep or not local.supports_fp8(recipe)

    make_weight = functools.partial(
        WeightSpec,
        axes=axes,
        recipe=recipe,
        kernels=kernels,
        dtype=dtype,
        grad_reduce=get_grad_reduce(options.grad_reduce_dtype),
        gathered=gathered,
    )
    return BlockPlan(
        config=config,
        recipe=recipe,
        axes=axes,
        wi=make_weight("params.wi", declared.wi, split=(ep, (), (), tp)),
        wo=make_weight("params.wo", declared.wo, split=(ep, tp, ())),
        dtype=dtype,
        kernels=kernels,
        first=rounds.first,
        later=rounds.later,
        overflows=rounds.overflows,
        expected=tokens * config.top_k,
        save_rows=save_rows and (must_keep or not gathers_x),
        frozen=frozen,
        gathers_x=gathers_x,
        gathers_dy=gathers_dy,
    )


def choose_buffer_factor(wanted: BufferFactor, ranks: int) -> float | None:
    """Returns the buffer factor for so many ranks of ep, where `auto` stands for one of two."""
    if wanted != "auto":
        return wanted
    return None if ranks <= WHOLE_RANKS else LIMITED_FACTOR


def size_rounds(
    config: MoEConfig, exchange: ExchangeSpec, kernels: str, align: int, buffer_factor: float | None
) -> Rounds:
    """Returns the buffers of all rounds; `exchange` is of the first one, and groups start at multiples of `align`."""
    tokens, ranks, slots = exchange.tokens, exchange.ranks, exchange.slots
    has_slots = TRANSPORTS[exchange.transport].has_slots
    received_rows = (slots if has_slots else tokens) * ranks
    capacity = None
    later_slots = -(-slots // 2)
    if config.capacity_factor is not None:
        capacity = math.ceil(config.capacity_factor * tokens * config.top_k)
        later_slots = slots  # drops are decided over all slots
    num_groups = config.num_experts // ranks
    all_rows = sorted_rows(received_rows, config.top_k, num_groups, 1, capacity)
    max_rows = allot_rows(tokens * config.top_k, buffer_factor, all_rows)
    # A symbolic size has the worst case itself.
    limits_rows = max_rows is not all_rows and max_rows < all_rows
    limits_slots = slots is not exchange.capacity and slots < exchange.capacity
    make_permute = functools.partial(PermuteSpec, num_groups, align, capacity, kernels, exchange.axes)
    first = make_permute(max_rows=max_rows if limits_rows else None)
    later = make_permute(max_rows=-(-max_rows * LATER_ROWS // 20))
    return Rounds(
        first=Round(exchange, first),
        later=Round(dataclasses.replace(exchange, slots=later_slots), later),
        overflows=limits_rows or limits_slots,
    )


def choose_transport(config: MoEConfig, axes: ResolvedAxes, tokens: int, slots: int) -> str:
    """Returns the transport whose balanced step costs least, and of equal ones the first.

    A step costs what its rows cost. A row has the same bytes in every transport, and with few ranks a row with a slot
    costs `SLOT_COST` times as much. With a capacity factor the choice would decide which tokens are dropped, so
    the result is all_gather, which drops none on the way.
    """
    if not axes.ep or config.capacity_factor is not None:
        return AUTO
    slot_cost = SLOT_COST if axes.size(axes.ep) <= MEASURED_RANKS else 1

    def cost(name: str) -> float:
        if TRANSPORTS[name].has_slots:
            return slots * slot_cost
        return tokens

    return min(TRANSPORTS, key=cost)


def check_layouts(view: MeshView, params: MoEParams[Array], declared: MoEParams[Spec]) -> None:
    """Raises ValueError for a weight on Explicit axes that the block would have to move unquantized.

    fsdp and ep may split any dim of a shared or latent weight, and tp any dim but gate and up, since a device needs
    both. `find_layout` has the rule of wi and wo. Another axis may split no weight.
    """
    axes = view.axes
    for name in LARGE:
        weight = getattr(params, name)
        if weight is None:
            continue
        for dim, names in enumerate(entries_of_type(weight)):
            allowed = axes.fsdp + axes.ep
            if DIMS[name][dim] != "G":
                allowed += axes.tp
            for axis in names:
                if axis in allowed or view.mesh.shape[axis] == 1:
                    continue
                raise ValueError(
                    f"params.{name} has the layout {jax.typeof(weight).sharding.spec}: dim {dim} is sharded over mesh "
                    f"axis {axis!r}; {_explain(allowed)}, as in moax.param_specs, {getattr(declared, name)}"
                )


def _explain(allowed: Names) -> str:
    """Returns the sentence about the axes that may split a dim."""
    if not allowed:
        return "the dim must be whole"
    return f"the mesh axes {allowed} alone may split the dim"


def check_quantized_arrays(quantized: Any) -> None:
    """Raises ValueError unless quantized is a QuantizedParams, with the arrays that its recipe says for each weight."""
    check_value("quantized", quantized, QuantizedParams, "moax.quantize_params")
    check_value("quantized.recipe", quantized.recipe, Recipe)
    expected = "(array)" if quantized.recipe.w is None else "(QShard(array, array), QShard(array, array))"
    for name in ("wi", "wo"):
        value = _describe_tree(getattr(quantized, name))
        if value != expected:
            raise ValueError(f"quantized.{name} is {value}; it must be {expected}, as moax.quantize_params returns it")


def _describe_tree(value: Any) -> str:
    """Returns the text of a tuple, a QShard or an array of a quantized weight, or the name of another class."""
    if hasattr(value, "dtype"):
        return "array"
    name = type(value).__name__
    if not isinstance(value, tuple):
        return name
    return f"{name.removeprefix('tuple')}({', '.join(map(_describe_tree, value))})"


def check_quantized(view: MeshView, quantized: QuantizedParams, plan: BlockPlan, params: MoEParams[Array]) -> None:
    """Raises ValueError where quantized weights are of another recipe, implementation, tp or size than the block's."""
    same = "pass the same options and the dtype of x to moax.quantize_params"
    if quantized.recipe != plan.recipe:
        have = describe_recipe(quantized.recipe)
        want = describe_recipe(plan.recipe)
        if have == want:
            want = f"another {want}"
        raise ValueError(f"quantized has recipe={have}, and this call has {want}; {same}")
    if quantized.kernels != plan.kernels:
        raise ValueError(f"quantized has kernels={quantized.kernels!r}, and this call has {plan.kernels!r}; {same}")
    tp = view.axes.size(view.axes.tp)
    if quantized.tp != tp and plan.recipe.w is not None:
        raise ValueError(
            f"quantized is of tp of {plural(quantized.tp, 'device')}, and this call has tp of {plural(tp, 'device')}, "
            "which counts the blocks of scales otherwise; call moax.quantize_params on the mesh of this call, with its "
            "axes="
        )
    for name in ("wi", "wo"):
        weight = getattr(plan, name)
        arrays = getattr(quantized, name)
        values = values_of(arrays)
        shape = getattr(params, name).shape
        owner = f"params.{name}"
        if quantized.gathered and view.manual:  # the parameter is a shard of what the quantized weight is
            shape = find_layout(weight).whole_shape(shape, view.axes)
            owner = f"params.{name}, gathered over {view.axes.fsdp},"
        if values.shape != shape:
            raise ValueError(f"quantized.{name} is of a weight {values.shape}, and {owner} has shape {shape}")
        if plan.recipe.w is not None:
            shapes = quantized_shapes(weight, shape, local=view.manual)
            for use, shard, expected in zip(USES, arrays, shapes, strict=True):
                _check_shard(f"quantized.{name}: its {use}", shard, expected, plan.recipe.w)
        elif values.dtype != plan.dtype:
            raise ValueError(
                f"quantized.{name} has dtype {values.dtype}, and x has {plan.dtype}; pass the dtype of x to "
                "moax.quantize_params"
            )


def _check_shard(name: str, shard: QShard[Array], shapes: QShard[tuple[int, ...]], format: Format) -> None:
    """Raises ValueError unless the arrays of a quantized weight have the dtypes and shapes of its format."""
    scale_dtypes = ["float32"]
    if format.scale == "e8m0":  # FP8 matmuls take the exponents in float32
        scale_dtypes.append("uint8")
    for field, dtypes in (("data", ["uint8"]), ("scale", scale_dtypes)):
        array = getattr(shard, field)
        shape = getattr(shapes, field)
        if array.shape != shape or array.dtype.name not in dtypes:
            raise ValueError(
                f"{name}.{field} is {array.dtype.name} {array.shape}; it must be {' or '.join(dtypes)} {shape}, as "
                "moax.quantize_params returns it"
            )
