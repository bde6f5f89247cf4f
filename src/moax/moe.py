"""The block: the way of the data on one screen.

    x [T, H] --route--> experts [T, K], weights [T, K]
       |                        |
       +------ dispatch --------+        received rows [R, H], local experts [R, K], weights [R, K]
                  |
               permute                   rows sorted by expert [N, H]
                  |
    quantize -> matmul(wi) -> activate -> quantize -> matmul(wo)
                  |
              unpermute                  partial y [R, H], weighted
                  |
               combine                   y [T, H]

`_forward_local` is what one device does of it, `_backward_local` the same walked backwards, one `custom_vjp` around the
two; `Partitioned` puts both on any mesh. The router is outside, an op and a `custom_vjp` of its own.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moax.axes import Axes
from moax.backend import Kernels, select_kernels
from moax.block import (
    BlockSpec,
    Saved,
    Weights,
    backward_contract,
    backward_factors,
    forward_contract,
    forward_factors,
)
from moax.config import MoEConfig
from moax.ops.activation import activate, activate_grad_rows, activate_rows, scale_rows
from moax.ops.dense import dense
from moax.ops.exchange import Transport, combine_local, dispatch_local, select_transport, send_rows, wire_bytes
from moax.ops.grouped_matmul import add_bias, bias_grad, matmul_local, once, wgrad_local
from moax.ops.permute import permute_local, plan_local, unpermute_local, weights_from_rows, weights_of_rows
from moax.ops.route import route
from moax.ops.router import router_logits
from moax.partition import Engine, Partitioned, View, find_view, scatter_gradient
from moax.recipe import Recipe, get_recipe
from moax.sharding import (
    check_token_axes,
    constrain,
    expert_specs,
    flatten_tokens,
    lay_out,
    like,
    shard_specs,
    unflatten_tokens,
)
from moax.types import MoEParams, MoEStats, check_params, check_tokens

CHECKPOINT_NAMES = ("moax_rows", "moax_hidden", "moax_plan")


def moe(
    x: Float[Array, "*batch H"],
    params: MoEParams,
    config: MoEConfig,
    *,
    recipe: str | Recipe | None = None,
    axes: Axes = Axes(),
    exchange: Transport = "auto",
    kernels: Kernels = "auto",
    engine: Engine = "auto",
) -> tuple[Float[Array, "*batch H"], MoEStats]:
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]),  expert(x) = act(x wi + bi) wo + bo.

    Args:
      x: [..., H], floating point. Its leading dims, flattened to T, are spread over (dp, fsdp, ep).
      params: see `MoEParams`; cast to x.dtype (the router: to float32). Whatever layout they have is used as it is,
        where experts are over ep and F over tp; fsdp may be on any dim.
      config: see `MoEConfig`.
      recipe: `fp8_block`, `mxfp8`, `fp8_tensor`, a `Recipe`, or None to quantize nothing.
      axes: the roles of mesh axes.
      exchange: `all_gather`, `all_to_all` or `one_sided` (Hopper GPUs of one process); `auto` is all_gather. With ep of
        size 1 nothing moves.
      kernels: `mosaic` (Hopper GPUs, bfloat16, widths that are multiples of 32), `xla`, or `auto`: mosaic where it can
        run, else xla, which is logged once on a GPU.
      engine: how the block is put on a mesh of Auto axes: `custom_partitioning` (the default), or `shard_map`, whose
        compilation-cache key is the same in every process. Explicit axes always take `shard_map`; inside a
        `shard_map` over all of `axes` the block works on the shards it is given, laid out by `param_specs`.

    Returns:
      y: like x in shape, dtype and sharding. Gradients have the dtype and the sharding of their primals.
      stats: losses and counts over the whole mesh.

    Raises:
      ValueError: a shape, dtype or option that cannot work, naming it. Unsupported: a choice by name that cannot run.
    """
    return _moe(x, params, config, recipe, axes, exchange, kernels, engine)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6, 7))  # one program also for a caller who does not jit
def _moe(x, params, config: MoEConfig, recipe, axes: Axes, exchange: Transport, kernels: Kernels, engine: Engine):
    recipe = get_recipe(recipe)
    check_tokens(x, config)
    check_token_axes(x, axes)
    view = find_view(axes, engine, x, params)
    check_params(params, config, local=view.manual)
    roles, transport = view.roles, select_transport(exchange, view, wire_bytes(x, recipe.wire))
    rows = x.size // x.shape[-1]
    shards = 1 if view.manual else roles.size(roles.tokens)
    if rows % shards:
        raise ValueError(f"x: its {rows} rows do not divide by mesh axes {roles.tokens} of {shards} devices")

    declared = shard_specs(params, config, axes, roles) if view.manual else expert_specs(config, axes, roles)
    params, tokens = lay_out(params, declared), flatten_tokens(x, roles)
    router = constrain(params.router, declared.router)
    logits = router_logits(tokens, router, axes=axes, engine=engine)
    logits = logits if params.logits_bias is None else logits + params.logits_bias.astype(jnp.float32)[None]
    routing = route(logits, config.router, config.top_k, params.router_bias, axes=axes, engine=engine)

    widths = {"d_model": config.d_model, "d_ff": params.wo.shape[1] // (1 if view.manual else roles.size(roles.tp))}
    chosen = select_kernels(kernels, x.dtype, **widths)
    static = BlockSpec.make(config, recipe, transport, roles, declared, rows // shards, x.dtype, chosen)
    operands = (tokens, routing.experts, routing.weights, Weights(params.wi, params.wo, params.bi, params.bo))
    y, dropped = _experts(view, static, *_forward.lay(view, static, *operands))
    if params.shared_wi is not None and params.shared_wo is not None:
        sharing = dict(recipe=recipe, axes=axes, engine=engine, kernels=kernels)
        h = dense(tokens, params.shared_wi, w_spec=declared.shared_wi, **sharing)
        y = y + dense(activate(h, config.activation), params.shared_wo, w_spec=declared.shared_wo, **sharing)
    y = unflatten_tokens(view.psum(y, roles.tp), x, roles)
    dropped = view.same(view.psum(dropped, roles.tokens), roles.tp)[0]
    stats = MoEStats(routing.aux_loss, routing.z_loss, routing.tokens_per_expert, dropped)
    return like(y, x), stats


def _forward_local(static: BlockSpec, layout, x, experts, weights, w: Weights):
    """What one device does: tokens [T, H] in, its part of y [T, H] out (a partial sum where tp splits F)."""
    static, (wi, wo), dtype = static.on(layout, w), layout, static.dtype

    received = dispatch_local(static.exchange, x, experts, weights)
    plan = plan_local(static.permute, received.experts)
    groups, early = static.groups(plan), static.weights_at == "hidden"
    rows, saved_rows = static.rows(received.rows, plan, groups)
    by_row = weights_of_rows(plan, received.weights)

    with jax.named_scope("experts_in"):
        h = matmul_local(rows, static.weight(w.wi, wi, "rows"), groups, dtype, w.bi)
        h = h.reshape(h.shape[0], w.wi.shape[2], -1)
    a = activate_rows(h, static.activate(False), by_row if early else None, groups, fp8=static.fp8)
    with jax.named_scope("experts_out"):
        bo = None if w.bo is None else once(w.bo, static.roles.tp)
        o = matmul_local(a, static.weight(w.wo, wo, "rows"), groups, dtype, None if early else bo)
        if early and bo is not None:
            o = o + scale_rows(add_bias(jnp.zeros_like(o), bo, groups), by_row, groups.real)

    partial = unpermute_local(o, plan, None if early else received.weights, groups)
    y = combine_local(static.exchange, partial, received.slots, x.shape[0])
    return y, received.dropped + plan.dropped, Saved(saved_rows, h, plan, received.weights, received.slots)


def _backward_local(static: BlockSpec, layout, saved: Saved, w: Weights, dy):
    """The transpose of `_forward_local`. The gradient of a weight of a row is <d a, a>, so o is not kept."""
    static, (wi, wo), dtype, roles = static.on(layout, w), layout, static.dtype, static.roles
    rows, h, plan, weights, sent = saved
    groups, by_row = static.groups(plan), weights_of_rows(plan, weights)

    received = send_rows(static.exchange, dy, sent)
    d_o_rows, d_o_columns = static.grads(received, plan, groups)
    with jax.named_scope("experts_out"):
        d_a = matmul_local(d_o_rows, static.weight(w.wo, wo, "columns"), groups, dtype, transpose=True)
    biased = static.activate(w.bi is not None)
    a, d_h_rows, d_h_columns, d_h, inner = activate_grad_rows(h, d_a, biased, by_row, groups, fp8=static.fp8)
    with jax.named_scope("experts_out"):
        d_wo, d_bo = wgrad_local(a, d_o_columns, groups, dtype), None
        if w.bo is not None:
            d_o = permute_local(received, plan, groups)
            bias = add_bias(jnp.zeros_like(d_o), once(w.bo, roles.tp), groups)
            inner = inner + jnp.sum(d_o.astype(jnp.float32) * bias.astype(jnp.float32), axis=-1)
            d_bo = bias_grad(once(scale_rows(d_o, by_row, groups.real), roles.tp), groups)
    with jax.named_scope("experts_in"):
        d_rows = matmul_local(d_h_rows, static.weight(w.wi, wi, "columns"), groups, dtype, transpose=True)
        d_wi = wgrad_local(rows, d_h_columns, groups, dtype)
        d_wi = d_wi.reshape(*d_wi.shape[:2], w.wi.shape[2], -1)
        d_bi = None if w.bi is None else bias_grad(d_h, groups)

    back = lambda partial: combine_local(static.exchange, partial, sent, dy.shape[0])  # noqa: E731
    dx, d_weights = back(unpermute_local(d_rows, plan, None, groups)), back(weights_from_rows(plan, inner))
    d_wi, d_wo = (scatter_gradient(d, at.gather) for d, at in zip((d_wi, d_wo), layout, strict=True))
    return dx, d_weights, d_wi, d_wo, d_bi, d_bo


_forward = Partitioned(_forward_local, forward_contract, forward_factors, name="experts")
_backward = Partitioned(_backward_local, backward_contract, backward_factors, name="experts_grad")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _experts(view: View, static: BlockSpec, x, experts, weights, w: Weights):
    return _forward(view, static, x, experts, weights, w)[:2]


def _experts_fwd(view, static, x, experts, weights, w):
    y, dropped, saved = _forward(view, static, x, experts, weights, w)
    rows, hidden, *rest = saved
    rest = jax.tree.map(lambda v: checkpoint_name(v, "moax_plan"), rest)
    rows = jax.tree.map(lambda v: checkpoint_name(v, "moax_rows"), rows)
    return (y, dropped), (Saved(rows, checkpoint_name(hidden, "moax_hidden"), *rest), w)


def _experts_bwd(view, static, residuals, cotangents):
    saved, w = residuals
    # Not the gather of forward, kept: each direction gathers what it needs when it needs it.
    w, dy = lax.optimization_barrier((w, cotangents[0]))
    dx, d_weights, *dw = _backward(view, static, saved, w, dy)
    dw = [None if p is None else d.astype(p.dtype) for p, d in zip(w, dw, strict=True)]
    return dx, None, d_weights, w._replace(wi=dw[0], wo=dw[1], bi=dw[2], bo=dw[3])


_experts.defvjp(_experts_fwd, _experts_bwd)
