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

`_hidden` and `_output` are what one device does of it, `_gradients` the same walked backwards, one `custom_vjp` around
them; `Partitioned` puts both directions on any mesh. The router is outside, an op and a `custom_vjp` of its own. With
chunks, a device takes its tokens a part at a time, and backward walks each part forward again.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from moax.backend import Kernels, select_kernels
from moax.block.contract import (
    BlockSpec,
    Saved,
    Weights,
    backward_contract,
    backward_factors,
    forward_contract,
    forward_factors,
    join_chunks,
    split_chunks,
)
from moax.config import MoEConfig
from moax.mesh.axes import Axes
from moax.mesh.collectives import scatter_gradient
from moax.mesh.partition import Engine, Partitioned, View, find_view
from moax.mesh.place import check_token_axes, constrain, flatten_tokens, like, unflatten_tokens
from moax.ops.activation import activate, activate_grad_rows, activate_rows, scale_rows
from moax.ops.exchange import (
    Exchange,
    combine_backward,
    combine_forward,
    dispatch_backward,
    dispatch_forward,
    select_transport,
    wire_bytes,
)
from moax.ops.linear import dense
from moax.ops.logits import router_logits
from moax.ops.permutation import permute_local, plan_local, unpermute_local, weights_from_rows, weights_of_rows
from moax.ops.products import add_bias, bias_grad, matmul_local, once, wgrad_local
from moax.ops.routing import route
from moax.params import MoEParams, check_params
from moax.recipe import Recipe, get_recipe
from moax.sharding import expert_specs, lay_out, shard_specs
from moax.types import MoEStats, check_tokens

CHECKPOINT_NAMES = ("moax_rows", "moax_hidden", "moax_plan")


def moe(
    x: Float[Array, "*batch H"],
    params: MoEParams,
    config: MoEConfig,
    *,
    recipe: str | Recipe | None = None,
    axes: Axes = Axes(),
    exchange: Exchange = "auto",
    kernels: Kernels = "auto",
    engine: Engine = "auto",
    chunks: int = 1,
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
      chunks: parts that a device takes its tokens in, one after the other, which bounds memory by a part: what was
        received and the hidden activations are those of one part at a time; none is kept for backward, which computes
        them again. Weights are gathered once for all parts, wi twice in backward. `capacity_factor` holds in each part,
        and scales of a whole tensor are those of a part.

    Returns:
      y: like x in shape, dtype and sharding. Gradients have the dtype and the sharding of their primals.
      stats: losses and counts over the whole mesh.

    Raises:
      ValueError: a shape, dtype or option that cannot work, naming it. Unsupported: a choice by name that cannot run.
    """
    return _moe(x, params, config, recipe, axes, exchange, kernels, engine, chunks)


@functools.partial(jax.jit, static_argnums=range(2, 9))  # one program also for a caller who does not jit
def _moe(x, params, config: MoEConfig, recipe, axes: Axes, exchange: Exchange, kernels, engine: Engine, chunks: int):
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
    if chunks < 1 or rows // shards % chunks:
        raise ValueError(f"chunks={chunks} must divide the {rows // shards} tokens of a device")

    declared = shard_specs(params, config, axes, roles) if view.manual else expert_specs(config, axes, roles)
    params, tokens = lay_out(params, declared), flatten_tokens(x, roles)
    router = constrain(params.router, declared.router)
    logits = router_logits(tokens, router, axes=axes, engine=engine)
    logits = logits if params.logits_bias is None else logits + params.logits_bias.astype(jnp.float32)[None]
    routing = route(logits, config.router, config.top_k, params.router_bias, axes=axes, engine=engine)

    widths = {"d_model": config.d_model, "d_ff": params.wo.shape[1] // (1 if view.manual else roles.size(roles.tp))}
    chosen = select_kernels(kernels, x.dtype, **widths)
    static = BlockSpec.make(config, recipe, transport, roles, declared, rows // shards, x.dtype, chosen, chunks)
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


def _hidden(static: BlockSpec, wi, bi, x, experts, weights) -> tuple[Saved, Array]:
    """Tokens [T, H] to the input of the activation, and how many assignments were dropped on the way."""
    received = dispatch_forward(static.exchange, x, experts, weights)
    plan = plan_local(static.permute, received.experts)
    groups = static.groups(plan)
    rows, saved_rows = static.rows(received.rows, plan, groups)
    with jax.named_scope("experts_in"):
        h = matmul_local(rows, wi, groups, static.dtype, bi)
        h = h.reshape(h.shape[0], static.gates, -1)
    return Saved(saved_rows, h, plan, received.weights, received.slots), received.dropped + plan.dropped


def _output(static: BlockSpec, wo, bo, saved: Saved, tokens: int):
    """The activation's input to this device's part of y [T, H], a partial sum where tp splits F."""
    plan, early = saved.plan, static.weights_at == "hidden"
    groups, by_row = static.groups(plan), weights_of_rows(plan, saved.weights)
    a = activate_rows(saved.hidden, static.activate(False), by_row if early else None, groups, fp8=static.fp8)
    with jax.named_scope("experts_out"):
        bo = None if bo is None else once(bo, static.roles.tp)
        o = matmul_local(a, wo, groups, static.dtype, None if early else bo)
        if early and bo is not None:
            o = o + scale_rows(add_bias(jnp.zeros_like(o), bo, groups), by_row, groups.real)
    partial = unpermute_local(o, plan, None if early else saved.weights, groups)
    return combine_forward(static.exchange, partial, saved.sent, tokens)


def _gradients(static: BlockSpec, wi, wo, w: Weights, saved: Saved, dy):
    """The transpose of `_hidden` and `_output`: dx, d_weights, and the gradients of w on this device, gathered. The
    gradient of a weight of a row is <d a, a>, so o is not kept."""
    dtype, roles = static.dtype, static.roles
    rows, h, plan, weights, sent = saved
    groups, by_row = static.groups(plan), weights_of_rows(plan, weights)

    received = combine_backward(static.exchange, dy, sent)
    d_o_rows, d_o_columns = static.grads(received, plan, groups)
    with jax.named_scope("experts_out"):
        d_a = matmul_local(d_o_rows, wo, groups, dtype, transpose=True)
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
        d_rows = matmul_local(d_h_rows, wi, groups, dtype, transpose=True)
        d_wi = wgrad_local(rows, d_h_columns, groups, dtype)
        d_wi = d_wi.reshape(*d_wi.shape[:2], static.gates, -1)
        d_bi = None if w.bi is None else bias_grad(d_h, groups)

    d_received, d_weights = unpermute_local(d_rows, plan, None, groups), weights_from_rows(plan, inner)
    dx, d_weights = dispatch_backward(static.exchange, sent, d_received, d_weights, dy.shape[0])
    return dx, d_weights, Weights(d_wi, d_wo, d_bi, d_bo)


def _forward_local(static: BlockSpec, layout, x, experts, weights, w: Weights):
    """What one device does: y, what it dropped, and without chunks what backward needs."""
    static = static.on(layout, w)
    wi, wo = static.gathered(w, layout, "rows")

    def part(of):
        saved, dropped = _hidden(static, wi, w.bi, *of)
        return _output(static, wo, w.bo, saved, of[0].shape[0]), dropped, saved

    if static.chunks == 1:
        return part((x, experts, weights))
    y, dropped = lax.map(lambda of: part(of)[:2], split_chunks(static.chunks, (x, experts, weights)))
    return join_chunks(y), dropped.sum(0)


def _backward_local(static: BlockSpec, layout, kept, w: Weights, dy):
    """The transpose of `_forward_local`; kept: what it left, with chunks its x, experts, weights."""
    static = static.on(layout, w)
    wi, wo = static.gathered(w, layout, "columns")
    if static.chunks == 1:
        dx, d_weights, dw = _gradients(static, wi, wo, w, kept, dy)
    else:
        wi_rows = static.gathered(w, layout, "rows")[0]

        def part(total, of):
            saved, _ = _hidden(static, wi_rows, w.bi, *of[:3])
            dx, d_weights, dw = _gradients(static, wi, wo, w, saved, of[3])
            return jax.tree.map(lambda t, d: t + d.astype(t.dtype), total, dw), (dx, d_weights)

        parts = split_chunks(static.chunks, (*kept, dy))
        zero = static.zero_gradients(w, layout, (*kept, dy))
        dw, each = lax.scan(part, zero, parts)
        dx, d_weights = join_chunks(each)
    d_wi, d_wo = (scatter_gradient(d.astype(static.dtype), at.gather) for d, at in zip(dw[:2], layout, strict=True))
    return dx, d_weights, d_wi, d_wo, dw.bi, dw.bo


_forward = Partitioned(_forward_local, forward_contract, forward_factors, name="experts")
_backward = Partitioned(_backward_local, backward_contract, backward_factors, name="experts_grad")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _experts(view: View, static: BlockSpec, x, experts, weights, w: Weights):
    return _forward(view, static, x, experts, weights, w)[:2]


def _experts_fwd(view, static, x, experts, weights, w):
    y, dropped, *kept = _forward(view, static, x, experts, weights, w)
    if not kept:
        return (y, dropped), ((x, experts, weights), w)
    rows, hidden, *rest = kept[0]
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
