"""`moax.moe` is the whole block: the router, the experts, and the shared expert."""

from __future__ import annotations

import dataclasses
import functools
from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.block.experts import apply_experts
from moax.block.spec import BlockSpec, Weights
from moax.config import MoEConfig
from moax.kernels import select_kernels
from moax.mesh.axes import Roles
from moax.mesh.partition import MeshView, find_mesh_view
from moax.mesh.place import check_token_axes, constrain, flatten_tokens, reshard_like, unflatten_tokens
from moax.ops.activation import activate
from moax.ops.exchange import select_transport, wire_bytes
from moax.ops.linear import dense
from moax.ops.logits import router_logits
from moax.ops.routing import route
from moax.options import OptionKeywords, Options
from moax.params import MoEParams, check_params
from moax.recipe import get_recipe
from moax.sharding import expert_specs, lay_out, shard_specs
from moax.types import MoEStats, check_tokens


def moe(
    x: Float[Array, "*batch H"],
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options = Options(),
    **keywords: Unpack[OptionKeywords],
) -> tuple[Float[Array, "*batch H"], MoEStats]:
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]),  expert(x) = act(x wi + bi) wo + bo.

    Args:
      x: [..., H], floating point. Its leading dims, flattened to T, lie over (dp, fsdp, ep).
      params: see `MoEParams`. The router is cast to float32, and the other parameters to x.dtype. Experts lie over ep,
        F lies over tp, and fsdp may split any dim; the block uses every such layout without moving it.
      config: the sizes of the block and its equations; see `MoEConfig`.
      options: how the block runs; see `Options`.
      **keywords: fields of `Options` (recipe, axes, exchange, kernels, engine, chunks) that replace those of `options`.

    Inside a `shard_map` over all of `axes` the operands are shards, laid out by `param_specs`.

    Returns:
      y: [..., H], with the dtype and the sharding of x. It is differentiable in x and params; each gradient has the
        dtype of its array.
      stats: losses and counts over the whole mesh; see `MoEStats`.

    Raises:
      ValueError: a shape, a dtype or an option cannot work. The message names it.
      Unsupported: an exchange, an engine or kernels that were chosen by name cannot run.
      TypeError: `Options` has no field of a keyword's name.
    """
    return _moe(x, params, config, dataclasses.replace(options, **keywords) if keywords else options)


@functools.partial(jax.jit, static_argnums=(2, 3))  # so that a caller who does not jit runs one program too
def _moe(x, params, config: MoEConfig, options: Options):
    """Runs `moe` with all options in one value."""
    recipe, axes, engine = get_recipe(options.recipe), options.axes, options.engine
    check_tokens(x, config)
    check_token_axes(x, axes)
    view = find_mesh_view(axes, engine, x, params)
    check_params(params, config, local=view.manual)
    roles = view.roles
    declared = shard_specs(params, config, axes, roles) if view.manual else expert_specs(config, axes, roles)
    static = _make_spec(x, params, config, options, view, declared)
    params, tokens = lay_out(params, declared), flatten_tokens(x, roles)

    logits = router_logits(tokens, constrain(params.router, declared.router), axes=axes, engine=engine)
    logits = logits if params.logits_bias is None else logits + params.logits_bias.astype(jnp.float32)[None]
    routing = route(logits, config.router, config.top_k, params.router_bias, axes=axes, engine=engine)

    w = Weights(params.wi, params.wo, params.bi, params.bo)
    y, dropped = apply_experts(view, static, tokens, routing.experts, routing.weights, w)
    if params.shared_wi is not None and params.shared_wo is not None:
        how = dict(recipe=recipe, axes=axes, engine=engine, kernels=options.kernels)
        h = dense(tokens, params.shared_wi, w_spec=declared.shared_wi, **how)
        y = y + dense(activate(h, config.activation), params.shared_wo, w_spec=declared.shared_wo, **how)
    y = unflatten_tokens(view.psum(y, roles.tp), x, roles)
    dropped = view.typed_as_equal(view.psum(dropped, roles.tokens), roles.tp)[0]
    return reshard_like(y, x), MoEStats(routing.aux_loss, routing.z_loss, routing.tokens_per_expert, dropped)


def _make_spec(x, params: MoEParams[Array], config: MoEConfig, options: Options, view: MeshView, declared) -> BlockSpec:
    """Returns the spec of the block, with the transport and the implementation that run.

    `declared` has the spec of each parameter.
    """
    roles, recipe = view.roles, get_recipe(options.recipe)
    widths = {"d_model": config.d_model, "d_ff": params.wo.shape[1] // (1 if view.manual else roles.size(roles.tp))}
    return BlockSpec.make(
        config,
        recipe=recipe,
        transport=select_transport(options.exchange, view, wire_bytes(x, recipe.wire)),
        roles=roles,
        declared=declared,
        tokens=_tokens_of_device(x, roles, 1 if view.manual else roles.size(roles.tokens), options.chunks),
        dtype=x.dtype,
        kernels=select_kernels(options.kernels, x.dtype, **widths),
        chunks=options.chunks,
    )


def _tokens_of_device(x, roles: Roles, shards: int, chunks: int) -> int:
    """Returns the tokens of one device, of `shards` devices.

    Raises ValueError where shards or chunks do not divide them.
    """
    rows = x.size // x.shape[-1]
    if rows % shards:
        raise ValueError(f"x: its {rows} rows do not divide by mesh axes {roles.tokens} of {shards} devices")
    if rows // shards % chunks:
        raise ValueError(f"chunks={chunks} must divide the {rows // shards} tokens of a device")
    return rows // shards
