"""Kept weights: the experts' weights, quantized once for several calls of a block.

    quantized = moax.quantize_params(params, config, recipe="fp8_block")
    y, stats = moax.moe(x, params, config, recipe="fp8_block", quantized=quantized)

The block then gathers bytes and quantizes no weight. Its gradients flow to `params`, as if it had quantized them. Kept
weights serve the microbatches of a step, the stages of a pipeline, and experts that are frozen.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moax.block.weights import Layouts, find_layouts, kept_specs, local_widths, split_axes
from moax.checks import check_kind
from moax.config import MoEConfig
from moax.kernels import implementation, select_kernels
from moax.mesh.axes import Roles
from moax.mesh.partition import Contract, Partitioned, find_mesh_view
from moax.mesh.specs import Spec
from moax.options import OptionKeywords, Options, replace_options
from moax.params import MoEParams, check_leaves, check_params
from moax.recipe import Contracted, Recipes, get_recipes
from moax.sharding import expert_specs, lay_out, shard_specs
from moax.types import QShard, QuantizedParams

BOTH: tuple[Contracted, Contracted] = ("rows", "columns")


@dataclasses.dataclass(frozen=True)
class KeptSpec:
    """The static arguments of `quantize_params`: the recipes, the implementation's name, and the layouts of wi and wo.

    `layouts` are the declared ones, whatever the layout of the weights is: the shapes of the scales depend on them.
    """

    recipe: Recipes
    kernels: str
    roles: Roles
    layouts: Layouts


def quantize_params(
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options = Options(),
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    **keywords: Unpack[OptionKeywords],
) -> QuantizedParams:
    """Quantizes wi and wo, each for the products over its rows and for those over its columns.

    Args:
      params: see `MoEParams`. A weight whose layout is not that of `param_specs` is moved there first, unquantized.
      config: the sizes of the block.
      options: those of the `moe` that takes the result; `recipe`, `axes`, `kernels` and `engine` count.
      dtype: the dtype of x in these calls, by which `kernels="auto"` chooses an implementation.
      **keywords: fields of `Options` that replace those of `options`.

    Returns:
      The quantized weights, on their shards: one byte an element and the scales, twice; None for a weight that its
      recipe does not quantize. They have no gradient; that of `moe` flows to its `params`.

    Raises:
      ValueError: no recipe quantizes its weight, a shape does not fit, or an option has a value that it cannot have.
      Unsupported: an engine or kernels that were chosen by name cannot run.
    """
    check_kind("config", config, MoEConfig)
    check_kind("options", options, Options)
    check_leaves(params)
    options = replace_options("quantize_params", options, keywords)
    recipe = get_recipes(options.recipe)
    if all(own.w is None for own in recipe.both):
        raise ValueError(f"recipe={options.recipe!r} quantizes no weight; its field w must be a Format")
    return _quantize_params(jax.lax.stop_gradient(params), config, options, np.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize_params(params: MoEParams[Array], config: MoEConfig, options: Options, dtype: np.dtype) -> QuantizedParams:
    """Runs `quantize_params` with all options in one value."""
    view, recipe = find_mesh_view(options.axes, options.engine, params), get_recipes(options.recipe)
    check_params(params, config, local=view.manual)
    roles = view.roles
    find_specs = functools.partial(shard_specs, params) if view.manual else expert_specs
    declared = find_specs(config, options.axes, roles)
    params = lay_out(params, declared)
    kernels = select_kernels(options.kernels, dtype, **local_widths(params, config, view))
    static = KeptSpec(recipe, kernels, roles, find_layouts(roles, declared.wi, declared.wo))
    operands = _op.lay_operands(view, static, params.wi, params.wo)
    shards = zip(*[iter(_op(view, static, *operands))] * 2, strict=True)
    wi, wo = (None if own.w is None else tuple(QShard(*next(shards)) for _ in BOTH) for own in recipe.both)
    return QuantizedParams(wi, wo, recipe, kernels)


def _local(static: KeptSpec, layout, wi, wo):
    """Quantizes the shards of one device. Returns data and scale of wi by rows and by columns, then those of wo.

    A weight that its recipe does not quantize has none.
    """
    del layout
    results = ()
    for w, where, recipe in zip((wi, wo), static.layouts, static.recipe.both, strict=True):
        for contracted in BOTH if recipe.w is not None else ():
            local, over = implementation(static.kernels), split_axes(where, static.roles)
            results += local.quantize_shard(w, recipe, contracted, where.gather, over)
    return results


def _contract(static: KeptSpec, operands, found_specs) -> Contract:
    """Returns the contract: the operands have the declared layouts, and each result the layout of its weight."""
    results = kept_specs(static.recipe, static.kernels, static.roles, static.layouts, [w.shape for w in operands])
    leaves = jax.tree.leaves(results, is_leaf=lambda v: isinstance(v, Spec))
    return Contract(tuple(where.spec for where in static.layouts), leaves, ((),) * len(leaves))


_op = Partitioned(_local, _contract, lambda static, operands: (("e h g f", "e i k"), ()), name="quantize_params")
