"""The implementation for Hopper GPUs, by Pallas Mosaic kernels. `moax.kernels.protocol` documents its functions.

Each file of the folder `pallas` has the kernels of one op, which take arrays and a TileConfig and know neither meshes
nor configs. Every matmul works on blocks of 128 expert-sorted rows (`formats.Blocks`), and FP8 operands are K-major
(`formats.KMajorFp8`). XLA computes what the kernels do not take: it quantizes operands of other recipes, and the
matmuls multiply them in bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from moax.checks import log_once
from moax.kernels import Role, xla
from moax.kernels.device import HOPPER_WIDTH, find_device
from moax.kernels.groups import Groups, Packing, align_up, sum_before, zero_rows
from moax.kernels.hopper.formats import (
    BLOCK,
    COPY_WIDTH,
    GATHER_WIDTH,
    HALF,
    BlockedGroups,
    Blocks,
    GatheredRows,
    KMajorFp8,
    data_of,
    find_groups,
    supports_fp8,
)
from moax.kernels.hopper.pallas import activation, permute, plan
from moax.kernels.hopper.pallas.matmul import MERGES_DIMS, grouped_matmul, grouped_matmul_activate
from moax.kernels.hopper.pallas.permute import gather_sum as gather_sum
from moax.kernels.hopper.pallas.quantize import quantize_rows, quantize_weight
from moax.kernels.hopper.pallas.tiles import pick_tile, turn_tile, with_projections
from moax.kernels.hopper.pallas.wgrad import grouped_wgrad
from moax.kernels.results import ActivationGrads, Permutation, QuantizedActivationGrads
from moax.kernels.scales import (
    DTYPES,
    dequantize,
    flatten_columns,
    shards_cut_blocks,
    turn_dims,
)
from moax.mesh.axes import Names
from moax.mesh.collectives import is_alone
from moax.recipe import FULL, Format, Recipe, Use
from moax.types import QShard

__all__ = xla.__all__
WAVES = 4  # beside a collective; a matmul alone takes up to 6 % longer by them
# For wider experts it is faster to sort the rows first (benchmarks/LOG.md, 2026-11-24).
GATHER_HIDDEN = 1536


def stores_weight_transposed(recipe: Recipe, use: Use) -> bool:
    """Returns whether a quantized shard has the dims (E, *C, K): FP8 matmuls read both operands along K."""
    return supports_fp8(recipe) and use == "fprop"


def choose_rows(recipe: Recipe, role: Role, width: int, hidden: int) -> tuple[int, bool]:
    """Returns the alignment of groups, and whether matmuls shall gather rows: those of narrow experts."""
    # In FP8 128 rows share a scale, and 64 else suffice.
    align = math.lcm(recipe.row_alignment, BLOCK if supports_fp8(recipe) else HALF)
    # Matmuls that gather take up to 29 % longer. A kernel that sorts the rows first takes longer than that; in FP8 it
    # quantizes rows for wgrad too.
    whole_lines = width % GATHER_WIDTH == 0 and hidden % GATHER_WIDTH == 0
    narrow = whole_lines and hidden <= GATHER_HIDDEN
    return align, narrow and getattr(recipe, role) is None


def pack_rows(group_sizes: Int[Array, " E"] | None, align: int, num_rows: int) -> Packing:
    """Packs rows to groups at multiples of 128: in groups (3, 2) at align 4, row 4 moves to row 128."""
    if group_sizes is None or align == BLOCK:
        groups = find_groups(group_sizes, BLOCK, align_up(num_rows, BLOCK))

        def pad(x):
            padding = [(0, -x.shape[0] % BLOCK), *[(0, 0)] * (x.ndim - 1)]
            return zero_rows(jnp.pad(x, padding), groups.real)

        return Packing(groups, pad, lambda y: zero_rows(y, groups.real)[:num_rows])

    rows = align_up(num_rows + group_sizes.shape[0] * (BLOCK - 1), BLOCK)
    groups = find_groups(group_sizes, BLOCK, rows)
    unpacked = sum_before(align_up(group_sizes, align))
    packed = sum_before(align_up(group_sizes, BLOCK))

    def find_rows(target, source, align, size, padding):
        """Returns the row of groups at `source` for each of `size` rows of groups at `target`."""
        layout = xla.find_groups(group_sizes, align, size)
        row = source[layout.index] + jnp.arange(size, dtype=jnp.int32) - target[layout.index]
        return jnp.where(layout.real, row, padding)

    gather_idx = find_rows(packed, unpacked, BLOCK, rows, num_rows)
    scatter_idx = find_rows(unpacked, packed, align, num_rows, rows)

    def pack(x):
        return gather_rows(x.reshape(x.shape[0], -1), gather_idx).reshape(-1, *x.shape[1:])

    return Packing(groups, pack, lambda y: gather_rows(y, scatter_idx))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def top_k(x: Float[Array, "T E"], k: int):
    """Returns the k largest of each row of x and their indices i32."""
    if plan.supports_top_k(x.shape, k):
        return plan.top_k_rows(x, k)
    return xla.top_k(x, k)


@top_k.defjvp
def _top_k_jvp(k: int, primals, tangents):
    """Returns the derivative of `top_k`: the tangents of the chosen values."""
    values, indices = top_k(*primals, k)
    tangent = jnp.take_along_axis(tangents[0], indices, axis=1)
    return (values, indices), (tangent, np.zeros(indices.shape, jax.dtypes.float0))


def build_permutation(
    experts: Int[Array, "R K"], num_groups: int, align: int, num_rows: int, weights: Any = None,
    keep: Callable | None = None,
) -> Permutation:  # fmt: skip
    """Returns the Permutation of the experts."""
    if not plan.supports(experts.shape, num_groups):
        return xla.build_permutation(experts, num_groups, align, num_rows, weights, keep)
    counted = plan.count_groups(experts, num_groups)
    part = None if keep is None else keep(counted.counts.sum(0)[:num_groups])
    return plan.build_permutation(experts, counted, num_groups, align, num_rows, weights, part)


def gather_rows(x: Float[Array, "R H"], gather_idx: Int[Array, " N"], groups: Groups | None = None):
    """rows[n] = x[gather_idx[n]]."""
    rows = gather_idx.shape[0]
    gather_idx = jnp.pad(gather_idx, (0, -rows % HALF), constant_values=x.shape[0])
    blocks = None
    if isinstance(groups, BlockedGroups):
        blocks = groups.blocks
    return permute.gather_rows(x, gather_idx, blocks)[:rows]


def quantize_for_matmul(
    x: Array, recipe: Recipe, role: Role, groups: BlockedGroups,
    *, gather_idx: Any = None, in_matmul: bool = False, fprop_or_dgrad: bool = True,
    wgrad: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """Quantizes rows as [M, C] for fprop or dgrad and as [C, M] for wgrad, in one read, sorted or not."""
    if not (fprop_or_dgrad or wgrad):
        return None, None
    format: Any = getattr(recipe, role)
    if in_matmul and format is None:
        operand = GatheredRows(x, gather_idx)
        return operand, operand
    if not supports_fp8(recipe):
        if gather_idx is not None:
            with jax.named_scope("permute"):
                x = gather_rows(x, gather_idx, groups)
        return xla.quantize_for_matmul(x, recipe, role, groups)
    with jax.named_scope("quantize"):
        x = x.reshape(x.shape[0], -1)
        return quantize_rows(
            x,
            groups.blocks,
            gather_idx=gather_idx,
            format=format,
            fprop_or_dgrad=fprop_or_dgrad,
            wgrad=wgrad,
        )


@jax.named_scope("quantize")
def quantize_shard(w: Array, recipe: Recipe, use: Use, gather: Sequence[Names]) -> QShard:
    """Quantizes a weight's shard [E, K, *C], and turns it for a matmul over rows."""
    if not supports_fp8(recipe):
        return xla.quantize_shard(w, recipe, use, gather)
    format = cast(Format, recipe.w)
    transposed = stores_weight_transposed(recipe, use)
    experts, rows, *columns = w.shape
    # Where shards cut blocks, the maximum of a block comes from several devices.
    cuts_blocks = shards_cut_blocks(w.shape, format, use, gather)
    if cuts_blocks or rows % COPY_WIDTH or math.prod(columns) % COPY_WIDTH:
        if format.scale == "e8m0":  # the matmuls take these scales in float32
            recipe = dataclasses.replace(recipe, w=dataclasses.replace(format, scale="pow2"))
        shard = xla.quantize_shard(w, recipe, use, gather)
        if not transposed:
            return shard
        return QShard(jnp.moveaxis(shard.data, 1, -1), jnp.moveaxis(shard.scale, 1, -1))
    q = quantize_weight(w.reshape(experts, rows, -1), format=format, transposed=transposed)
    blocks = [-(-math.prod(columns) // BLOCK)]
    if any(gather[2:]):  # no block lies in two shards of the last dim
        blocks = [*columns[:-1], columns[-1] // BLOCK]
    data = lax.bitcast_convert_type(q.data, jnp.uint8).reshape(turn_dims(w.shape, transposed))
    scale = q.scale.reshape(turn_dims((experts, -(-rows // BLOCK), *blocks), transposed))
    return QShard(data, scale)


def make_weight_operand(whole: QShard, recipe: Recipe, use: Use) -> Any:
    """Returns a quantized weight that is whole as a K-major operand: [E, C, K] for a matmul over rows."""
    if not supports_fp8(recipe):
        return xla.make_weight_operand(whole, recipe, use)
    format = cast(Format, recipe.w)
    transposed = stores_weight_transposed(recipe, use)
    data = flatten_columns(whole.data, transposed)
    scale = flatten_columns(whole.scale, transposed)
    return KMajorFp8(lax.bitcast_convert_type(data, DTYPES[format.dtype]), scale)


def matmul(
    x: Any, w: Any, groups: BlockedGroups, dtype: Any, bias: Any = None, *, transpose: bool = False
) -> Float[Array, "M N"]:
    """y[m] = x[m] w[g(m)] + bias[g(m)], rounded after the bias. In FP8 w is K-major: `transpose` does not matter."""
    if bias is not None:
        bias = bias.reshape(bias.shape[0], -1)
    x, gather_idx = _unpack(x, dtype)
    w, _ = _unpack(w, dtype)
    return _matmul(x, w, groups.blocks, dtype, gather_idx, bias, transpose)


def _matmul(x, w, blocks: Blocks, dtype, gather_idx=None, bias=None, transpose: bool = False):
    """Runs the kernel of a matmul, with rows of x that it gathers by `gather_idx`."""
    _, rows, columns = data_of(w).shape
    op = "matmul"
    if isinstance(x, KMajorFp8):
        op = "matmul_fp8"
    elif transpose:
        op = "matmul_transposed"
    if op != "matmul":
        columns = rows
    tile = _pick_tile(op, data_of(x).shape[1], columns, blocks)
    return grouped_matmul(x, w, blocks, tile, transpose=transpose, bias=bias, gather_idx=gather_idx, out_dtype=dtype)


def matmul_activate(
    x: Any, w: Any, groups: BlockedGroups, dtype: Any, act: Callable, gates: int, bias: Any = None
) -> tuple[Float[Array, "M GF"], Any]:
    """h[m] = x[m] w[g(m)] + bias[g(m)], with a = act(h) [M, F] from one kernel where that takes it, else with None.

    The kernel takes 16-bit operands without a bias, 64 | K and 64 | F, and activations that Mosaic knows. It needs jax
    0.11.2. In FP8 the scale of a row of a has 128 columns of gate and of up, for whose sums a consumer lacks registers.
    """
    gated = gates == 2
    takes_operands = not isinstance(x, KMajorFp8) and bias is None
    if not takes_operands or not MERGES_DIMS or not supports_activation(act, gated):
        return matmul(x, w, groups, dtype, bias), None
    x, gather_idx = _unpack(x, dtype)
    w, _ = _unpack(w, dtype)
    if w.shape[1] % GATHER_WIDTH or w.shape[2] % (gates * GATHER_WIDTH):
        return _matmul(x, w, groups.blocks, dtype, gather_idx), None

    @jax.custom_batching.custom_vmap
    def together(x, w, blocks, gather_idx):
        w = w.reshape(*w.shape[:2], gates, -1)
        tile = _pick_tile("matmul", w.shape[1], gates * w.shape[3], blocks)
        tile = with_projections(tile, gates, w.shape[3])
        h, a = grouped_matmul_activate(x, w, blocks, tile, act, gather_idx=gather_idx)
        return h.reshape(h.shape[0], -1), a

    @together.def_vmap
    # The copy engine takes a weight with gate and up in no more dims.
    def apart(size, batched, *operands):
        def each(x, w, blocks, gather_idx):
            h = _matmul(x, w, blocks, dtype, gather_idx)
            return h, activation.activate_rows(h, blocks, act, gated=gated)

        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, list(batched))
        return jax.vmap(each, axes, axis_size=size)(*operands), (True, True)

    return together(x, w, groups.blocks, gather_idx)


def wgrad(
    x: Any, dy: Any, groups: BlockedGroups, dtype: Any, out_dtype: Any = None, total: Any = None
) -> Float[Array, "E K N"]:
    """dw[g] = sum over rows m of group g: x[m]^T dy[m], of operands with 0 in padding; FP8 has [K, M] and [N, M]."""
    if total is not None:
        out_dtype = total.dtype
    elif out_dtype is None:
        out_dtype = dtype
    x, idx_of_x = _unpack(x, dtype)
    dy, idx_of_dy = _unpack(dy, dtype)
    op, dim = "wgrad", 1
    if isinstance(x, KMajorFp8):
        op, dim = "wgrad_fp8", 0
    rows, columns = (data_of(v).shape[dim] for v in (x, dy))
    if idx_of_dy is None:
        gather_idx, gathers = idx_of_x, "x"
        tile = _pick_tile(op, rows, columns, groups.blocks)
    else:
        gather_idx, gathers = idx_of_dy, "dy"
        tile = turn_tile(_pick_tile(op, rows, columns, groups.blocks), rows)
    return grouped_wgrad(
        x, dy, groups.blocks, tile, gather_idx=gather_idx, gathers=gathers, out_dtype=out_dtype, total=total
    )


def _unpack(x, dtype) -> tuple[Any, Any]:
    """Returns an operand as a matmul takes it, in this dtype unless it is FP8, and its gather_idx or None."""
    if isinstance(x, KMajorFp8):
        return x, None
    if isinstance(x, GatheredRows):
        return x.x.astype(dtype), x.gather_idx
    return dequantize(x, dtype), None


def _pick_tile(op: str, contracted: int, columns: int, blocks: Blocks):
    """Returns the TileConfig of a matmul with these blocks on this device."""
    rows = blocks.group.shape[0] * BLOCK // blocks.sizes.shape[0]
    tile = pick_tile(op, contracted, columns, rows, find_device().device_kind)
    if not is_alone():
        tile = dataclasses.replace(tile, waves=WAVES)
    return tile


def bias_grad(dy: Float[Array, "M *C"], groups: BlockedGroups) -> Float[Array, "E *C"]:
    """dbias[g] = sum over rows m of group g: dy[m], in float32. dy is 0 in padding."""
    if groups.sizes is None:
        return dy.astype(jnp.float32).sum(0, keepdims=True)
    # A matmul takes a fraction of the time of XLA's scatter.
    ones = jnp.ones((dy.shape[0], HOPPER_WIDTH), dy.dtype)
    sums = wgrad(ones, dy.reshape(dy.shape[0], -1), groups, dy.dtype, jnp.float32)
    return sums[:, 0].reshape(groups.sizes.shape[0], *dy.shape[1:])


def activate(h: Float[Array, "N G F"], act: Callable, recipe: Recipe, groups: BlockedGroups) -> Any:
    """Returns the Operand of act(h); XLA computes what the kernels do not know."""
    gated = h.shape[1] == 2
    flat = h.reshape(h.shape[0], -1)
    with jax.named_scope("activate"):
        if not supports_activation(act, gated):
            a = xla.activate(h, act, FULL, groups)
            a = zero_rows(a, groups.real)
        elif _fuses(recipe, h.shape[2]):
            format = cast(Format, recipe.x)
            return activation.activate_quantize(flat, groups.blocks, act, gated=gated, format=format)
        else:
            a = activation.activate_rows(flat, groups.blocks, act, gated=gated)
    return quantize_for_matmul(a, recipe, "x", groups, wgrad=False)[0]


def activate_grad(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, groups: BlockedGroups,
    weights: Float[Array, " N"],
) -> ActivationGrads:  # fmt: skip
    """Returns act(h) times the weights, d_h, and inner [N], which is <d_a, act(h)> of each row."""
    if not supports_activation(act, h.shape[1] == 2):
        grads = xla.activate_grad(h, d_a, act, groups, weights)
        # Padding of h may hold NaN, which 0 does not undo.
        return grads._replace(d_h=zero_rows(grads.d_h, groups.real))
    with jax.named_scope("activate"):
        flat = h.reshape(h.shape[0], -1)
        a, d_h, inner = activation.activate_grad_rows(flat, d_a, groups.blocks, act, weights=weights)
    return ActivationGrads(a, d_h.reshape(h.shape), inner.sum(0))


def activate_grad_quantize(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, recipe: Recipe,
    groups: BlockedGroups, *, weights: Float[Array, " N"],
) -> QuantizedActivationGrads:  # fmt: skip
    """Computes the backward of `activate`, quantized."""
    if supports_activation(act, h.shape[1] == 2) and _fuses(recipe, h.shape[2]):
        flat = h.reshape(h.shape[0], -1)
        of_a = cast(Format, recipe.x)
        of_h = cast(Format, recipe.dy)
        with jax.named_scope("activate"):
            a, d_h, d_h_wgrad, inner = activation.activate_grad_quantize(
                flat, d_a, groups.blocks, act, weights=weights, of_a=of_a, of_h=of_h
            )
        return QuantizedActivationGrads(a, d_h, d_h_wgrad, inner.sum(0))
    grads = activate_grad(h, d_a, act, groups, weights)
    _, a = quantize_for_matmul(grads.a, recipe, "x", groups, fprop_or_dgrad=False)
    d_h, d_h_wgrad = quantize_for_matmul(grads.d_h, recipe, "dy", groups)
    return QuantizedActivationGrads(a, d_h, d_h_wgrad, grads.inner)


def supports_activation(act: Callable, gated: bool) -> bool:
    """Returns whether the kernels can compute an activation; the log says once why they cannot."""
    why = activation.why_not_in_kernels(act, gated)
    if why is not None:
        reason = f"the kernels do not know {why} of the activation"
        log_once(f"kernels='hopper': {reason}; XLA computes it, which is slower")
    return why is None


def _fuses(recipe: Recipe, width: int) -> bool:
    """Returns whether one kernel activates and quantizes, forward and backward."""
    if not supports_fp8(recipe) or width % BLOCK:
        return False
    x = cast(Format, recipe.x)
    dy = cast(Format, recipe.dy)
    return (x.scale == "float32") == (dy.scale == "float32")
