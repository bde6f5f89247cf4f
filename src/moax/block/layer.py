"""`moax.moe` is the whole block: the router, the experts, and the shared expert."""

from __future__ import annotations

import dataclasses
import functools
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from moax.block.experts import apply_experts
from moax.block.routing import Given, RoutingInput, check_routing, find_routing, like_tokens, merge_twins
from moax.block.spec import BlockSpec, Inputs, Weights
from moax.block.weights import local_widths
from moax.checks import check_kind, check_mask
from moax.config import MoEConfig
from moax.errors import Unsupported
from moax.kernels import select_kernels
from moax.lora import Adapters, check_adapters, scaled
from moax.mesh.axes import Roles
from moax.mesh.collectives import get_grad_reduce
from moax.mesh.partition import MeshView, find_mesh_view
from moax.mesh.place import constrain, reshard_like
from moax.mesh.tokens import check_token_axes, find_token_dims, flatten_tokens, unflatten_tokens
from moax.ops.activation import activate
from moax.ops.exchange import TRANSPORTS, select_transport, wire_bytes
from moax.ops.linear import dense
from moax.ops.logits import router_logits
from moax.options import OptionKeywords, Options, replace_options
from moax.params import MoEParams, check_leaves, check_params
from moax.recipe import get_recipes
from moax.sharding import expert_specs, lay_out, shard_specs
from moax.types import MoEStats, QuantizedParams, Routing, check_tokens


def moe(
    x: Float[Array, "*batch H"],
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options = Options(),
    *,
    router_input: Float[Array, "*batch H"] | None = None,
    routing: RoutingInput | None = None,
    mask: Bool[Array, "*batch"] | None = None,
    return_routing: bool = False,
    quantized: QuantizedParams | None = None,
    adapters: Adapters[Array] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> tuple[Float[Array, "*batch H"], MoEStats]:
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]),  expert(x) = act(x wi + bi) wo + bo.

    Args:
      x: [..., H], floating point. Its tokens lie over (dp, fsdp, ep), and S of [..., S, H] over cp; see `Axes`.
      params: see `MoEParams`. The router is cast to float32, and the other parameters to x.dtype. Experts lie over ep,
        F lies over tp, and fsdp may split any dim; the block uses every such layout without moving it.
      config: the sizes of the block and its equations; see `MoEConfig`.
      options: how the block runs; see `Options`.
      router_input: [..., H] with the leading dims of x, what the router reads in place of x (Gemma 4); None means x.
      routing: what takes the place of the router's choice; None leaves the choice to the router. Expert ids [..., K]
        alone have the weights of the router's scores, and a token with a negative id takes its best experts. A pair
        (ids [..., K], weights [..., K]), or a `Routing`, has weights too, and the router does not run; the losses are
        then those of the `Routing`. An id of E stands for no expert.
      mask: [...] bool, False for padding. Padding is not routed, not sent and not counted, in losses, counts and
        capacities; its y and its gradients are 0.
      return_routing: whether `stats.routing` has the routing that was used.
      quantized: wi and wo as `quantize_params` quantized them, with the same options. The block then quantizes no
        weight, and the gradients flow to `params`. `params.wi` and `params.wo` may both be None then; they have no
        gradient. None: the block quantizes them, where the recipe does.
      adapters: low-rank adapters of wi and wo, as `moax.lora.init` makes them, in the layout of
        `moax.lora.adapter_specs`. wi and wo are then frozen: their gradients are 0, and are not computed.
      **keywords: fields of `Options` (recipe, axes, exchange, kernels, engine, buffer_factor, save_rows,
        grad_reduce_dtype) that replace those of `options`.

    Inside a `shard_map` over all of `axes` the operands are shards, laid out by `param_specs`.

    Returns:
      y: [..., H], with the dtype and the sharding of x. It is differentiable in x, params and router_input; each
        gradient has the dtype of its array.
      stats: losses and counts over the whole mesh; see `MoEStats`.

    Raises:
      ValueError: a shape, a dtype or an option cannot work. The message names it.
      Unsupported: an exchange, an engine or kernels that were chosen by name cannot run.
      TypeError: `Options` has no field of a keyword's name.
    """
    check_kind("config", config, MoEConfig)
    check_kind("options", options, Options)
    options = replace_options("moe", options, keywords)
    check_tokens(x, config)
    check_leaves(params)
    if router_input is not None and (
        router_input.shape != x.shape or not jnp.issubdtype(router_input.dtype, jnp.floating)
    ):
        raise ValueError(
            f"router_input has shape {router_input.shape}, dtype {router_input.dtype}; "
            f"it must be floating point, of the shape {x.shape} of x"
        )
    if adapters is not None:
        check_kind("adapters", adapters, Adapters, "moax.lora.init")
    given = check_routing(routing, (*x.shape[:-1], config.top_k))
    if mask is not None:
        check_mask("mask", mask, x.shape[:-1])
    return _moe(x, params, quantized, router_input, config, options, given, mask, bool(return_routing), adapters)


@functools.partial(jax.jit, static_argnums=(4, 5, 8))  # so that a caller who does not jit runs one program too
def _moe(
    x, params, quantized, router_input, config: MoEConfig, options: Options, given: Given, mask, return_routing: bool,
    adapters,
):  # fmt: skip
    """Runs `moe` with all options in one value, and with what the caller gave for the routing in another one."""
    params, absent = _fill(params, quantized, x.dtype)
    recipe, axes, engine = get_recipes(options.recipe), options.axes, options.engine
    check_token_axes(x, axes)
    view = find_mesh_view(axes, engine, x, params)
    axes = find_token_dims(x, axes, view.roles)
    view, options = view.on(axes), dataclasses.replace(options, axes=axes)
    check_params(params, config, local=view.manual)
    if adapters is not None:
        check_adapters(adapters, config, local=view.manual)
    roles = view.roles
    if x.size == 0:
        return x, _stats_of_nothing(x, config, return_routing)
    declared = shard_specs(params, config, axes, roles) if view.manual else expert_specs(config, axes, roles)
    static = dataclasses.replace(
        _make_spec(x, params, config, options, view, declared), frozen=absent or adapters is not None
    )
    _check_quantized(quantized, static, params)
    params, tokens = lay_out(params, declared), flatten_tokens(x, roles)
    real = None if mask is None else flatten_tokens(mask[..., None], roles)
    read = tokens if router_input is None else flatten_tokens(router_input, roles)
    if real is not None:  # padding may hold NaN
        tokens, read = jnp.where(real, tokens, 0), jnp.where(real, read, 0)

    router = constrain(params.router, declared.router)
    params = dataclasses.replace(params, router=router)
    if absent:
        wi, wo = constrain(params.wi, declared.wi), constrain(params.wo, declared.wo)
        params = dataclasses.replace(params, wi=wi, wo=wo)
    routing = find_routing(view, x, read, params, config, options, given, real)
    experts, weights = (routing.experts, routing.weights) if given.experts is None else merge_twins(routing, config)

    if params.expert_scale is not None:
        chosen = experts[:, :, None] == jnp.arange(config.num_experts, dtype=jnp.int32)[None, None]
        weights = weights * jnp.where(chosen, params.expert_scale.astype(jnp.float32)[None, None], 0.0).sum(-1)
    w = Weights(params.wi, params.wo, params.bi, params.bo, *scaled(adapters))
    y, dropped, passes = apply_experts(view, static, Inputs(tokens, experts, weights), w, quantized)
    if params.shared_wi is not None and params.shared_wo is not None:
        how = dict(axes=axes, engine=engine, kernels=options.kernels, grad_reduce_dtype=options.grad_reduce_dtype)
        h = dense(tokens, params.shared_wi, recipe=recipe.wi, w_spec=declared.shared_wi, **how)
        a = activate(h, config.activation, config.activation_limit)
        shared = dense(a, params.shared_wo, recipe=recipe.wo, w_spec=declared.shared_wo, **how)
        if params.shared_gate is None:
            y = view.psum(y + shared, roles.tp)
        else:  # the gate multiplies the whole output, so that each rank of tp has its whole gradient
            gate = jax.nn.sigmoid(router_logits(tokens, params.shared_gate[:, None], axes=axes, engine=engine))
            y = view.psum(y, roles.tp) + (view.psum(shared, roles.tp).astype(jnp.float32) * gate).astype(y.dtype)
    else:
        y = view.psum(y, roles.tp)
    y = unflatten_tokens(y if real is None else jnp.where(real, y, 0), x, roles)
    dropped = view.typed_as_equal(view.psum(dropped, roles.tokens), roles.tp)[0]
    passes = view.typed_as_equal(lax.stop_gradient(passes), roles.all)[0]  # a maximum has no derivative in JAX
    used = like_tokens(routing, x, roles) if return_routing else None
    losses = routing.aux_loss, routing.z_loss
    return reshard_like(y, x), MoEStats(*losses, routing.tokens_per_expert, dropped, passes, used)


def _fill(params: MoEParams[Array], quantized, dtype) -> tuple[MoEParams[Array], bool]:
    """Returns the parameters, and whether wi and wo are kept quantized alone; they are then zeros, never read."""
    if not isinstance(quantized, QuantizedParams) or (params.wi is not None and params.wo is not None):
        return params, False
    wi, wo = quantized.wi, quantized.wo
    if wi is None or wo is None:
        name = "wi" if wi is None else "wo"
        raise ValueError(
            f"one of params.wi and params.wo is None, and quantized.{name} too, since no recipe quantizes {name}; "
            "pass both parameters"
        )
    if params.wi is not None or params.wo is not None:
        raise ValueError(
            "one of params.wi and params.wo is None; with quantized= either both are None, and have no gradient, or "
            "neither is"
        )
    zeros = (jnp.zeros(of[1].data.shape, dtype) for of in (wi, wo))  # of columns, never turned
    return dataclasses.replace(params, **dict(zip(("wi", "wo"), zeros, strict=True))), True


def _stats_of_nothing(x, config: MoEConfig, return_routing: bool) -> MoEStats:
    """Returns the stats of x without tokens: losses and counts of 0, and one pass."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    tokens, ids = jnp.zeros(config.num_experts, jnp.int32), jnp.zeros((*x.shape[:-1], config.top_k), jnp.int32)
    used = Routing(ids, ids.astype(jnp.float32), zero, zero, tokens) if return_routing else None
    return MoEStats(zero, zero, tokens, none, none + 1, used)


def _make_spec(x, params: MoEParams[Array], config: MoEConfig, options: Options, view: MeshView, declared) -> BlockSpec:
    """Returns the spec of the block, with the transport and the implementation that run.

    `declared` has the spec of each parameter.
    """
    _check_symbolic(x, config, view)
    roles, recipe = view.roles, get_recipes(options.recipe)
    row_bytes = wire_bytes(x, recipe.wire)
    arguments = dict(
        recipe=recipe,
        roles=roles,
        declared=declared,
        tokens=_tokens_of_device(x, roles, 1 if view.manual else roles.size(roles.tokens)),
        dtype=x.dtype,
        kernels=select_kernels(options.kernels, x.dtype, **local_widths(params, config, view)),
        buffer_factor=options.buffer_factor,
        save_rows=options.save_rows,
        grad_reduce=get_grad_reduce(options.grad_reduce_dtype),
    )
    if options.exchange == "auto":
        possible = [name for name, transport in TRANSPORTS.items() if transport.why_not(view, row_bytes) is None]
        return BlockSpec.choose(config, possible, **arguments)
    return BlockSpec.make(config, transport=select_transport(options.exchange, view, row_bytes), **arguments)


def _check_quantized(quantized: QuantizedParams | None, static: BlockSpec, params: MoEParams[Array]) -> None:
    """Raises ValueError where kept weights are of another recipe, implementation or size than the block's."""
    if quantized is None:
        return
    if not isinstance(quantized, QuantizedParams):
        raise ValueError(f"quantized is a {type(quantized).__name__}; it must be what moax.quantize_params returns")
    if quantized.recipe != static.recipe:
        raise ValueError(f"quantized has recipe={quantized.recipe}, and this call has recipe={static.recipe}")
    if quantized.kernels != static.kernels:
        raise ValueError(
            f"quantized is for kernels={quantized.kernels!r}, and this call runs {static.kernels!r}; pass the same "
            "kernels= and the dtype of x to moax.quantize_params"
        )
    for name in ("wi", "wo"):
        kept, want = getattr(quantized, name), getattr(params, name).shape
        if kept is not None and (sizes := kept[1].data.shape) != want:  # of columns, never turned
            raise ValueError(f"quantized.{name} is of a weight {sizes}, and params.{name} has shape {want}")


def _check_symbolic(x, config: MoEConfig, view: MeshView) -> None:
    """Raises Unsupported where x has a symbolic number of rows, of `jax.export`, that the block cannot take."""
    rows = x.size // x.shape[-1]
    if isinstance(rows, int):
        return
    if view.engine != "local":
        raise Unsupported(
            f"x has {rows} rows, which is symbolic, on a mesh; JAX cannot run an exported shard_map of symbolic "
            "shapes. Export one program for each number of rows, or export for one device"
        )
    if config.capacity_factor is not None:
        raise Unsupported(
            f"capacity_factor={config.capacity_factor} with {rows} rows of x, which is symbolic; use "
            "capacity_factor=None, or export one program for each number of rows"
        )


def _tokens_of_device(x, roles: Roles, shards: int) -> int:
    """Returns the tokens of one device, of `shards` devices.

    Raises ValueError where shards do not divide them.
    """
    rows = x.size // x.shape[-1]
    if rows % shards:
        raise ValueError(f"x: its {rows} rows do not divide by mesh axes {roles.tokens} of {shards} devices")
    return rows // shards
