"""`moax.moe` is the whole block: the router, the experts, and the shared expert.

routing = route(x router)
y[t]    = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t])

Latent experts read x[t] latent_down, and their sum is multiplied by latent_up. A caller may give the routing:

    experts [..., K] are given       the router's scores give their weights: replay, or hash routing
    experts and weights are given    the router does not run: a router of the caller's own

With E = 4, K = 2 and the experts (2, 2) and weights (0.3, 0.7) of a token, the token goes to expert 2 once, with the
weight 1.0, and the second place is (4, 0.0): no expert.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from moax.block.experts import apply_experts
from moax.block.plan import BlockPlan, make_plan
from moax.block.rounds import Quantized
from moax.block.small_terms import Weights
from moax.checks import Unsupported, check_arrays, check_value
from moax.config import MoEConfig, MoEStats, OptionKeywords, Options, replace_options
from moax.exchange import AUTO, select_transport
from moax.lora import Adapters, check_adapters, scaled
from moax.mesh.specs import (
    MeshView,
    constrain,
    find_mesh_view,
    find_token_dims,
    flatten_tokens,
    unflatten_tokens,
)
from moax.ops.activation import activate
from moax.ops.balance import BINS, keep_ids, split_ids
from moax.ops.matmul import dense
from moax.ops.router import route, router_logits
from moax.ops.weights import QuantizedWeight, quantize_weight
from moax.params import ROUTER, MoEParams, check_params, expert_specs, reshard_params, shard_specs
from moax.recipe import describe_recipes, get_recipes
from moax.types import QuantizedParams, Routing

Ids = Integer[Array, "*batch K"]
RoutingInput = Routing | tuple[Ids, Float[Array, "*batch K"]] | Ids


class CallKeywords(TypedDict, total=False):
    """The keywords of `moax.moe` that belong to one call and its tokens, as a layer's call takes them."""

    router_input: Float[Array, "*batch H"] | None
    quantized: QuantizedParams | None
    adapters: Adapters[Array] | None
    routing: RoutingInput | None
    mask: Bool[Array, "*batch"] | None
    segment_ids: Integer[Array, "*batch"] | None
    return_routing: bool


def moe(
    x: Float[Array, "*batch H"],
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options = Options(),
    *,
    router_input: Float[Array, "*batch H"] | None = None,
    routing: RoutingInput | None = None,
    mask: Bool[Array, "*batch"] | None = None,
    segment_ids: Integer[Array, "*batch"] | None = None,
    return_routing: bool = False,
    quantized: QuantizedParams | None = None,
    adapters: Adapters[Array] | None = None,
    **keywords: Unpack[OptionKeywords],
) -> tuple[Float[Array, "*batch H"], MoEStats]:
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]),  expert(x) = act(x wi + bi) wo + bo.

    With `config.d_latent` the sum over k is (sum_k weights[t, k] expert[experts[t, k]](x[t] latent_down)) latent_up.

    Args:
      x: [..., H], floating point. Its tokens are split over (dp, fsdp, ep), and S of [..., S, H] over cp; see `Axes`.
      params: see `MoEParams`. The router is cast to float32, and the other parameters to x.dtype. Experts are split
        over ep, F over tp, and fsdp may split any dim; the block uses every such layout without moving it.
      config: the sizes of the block and its equations; see `MoEConfig`.
      options: how the block runs; see `Options`.
      router_input: [..., H] with the leading dims of x, what the router reads in place of x (Gemma 4); None means x.
      routing: what takes the place of the router's choice; None leaves the choice to the router. Expert ids [..., K]
        alone have the weights of the router's scores, and a token with a negative id takes its best experts. A pair
        (ids [..., K], weights [..., K]), or a `Routing`, has weights too, and the router does not run; the losses are
        then those of the `Routing`. An id of E stands for no expert.
      mask: [...] bool, False for padding. Padding is not routed, not sent and not counted, in losses, counts and
        capacities; its y and its gradients are 0.
      segment_ids: [..., S] for x [..., S, H], any integers: tokens of a packed row with equal ids are one sequence, for
        `RouterConfig.sequence_aux_loss`. A negative id is padding, as False of `mask` is. None: a row is one sequence.
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
    check_value("config", config, MoEConfig)
    options = replace_options("moe", options, keywords)
    check_arrays("x [*batch, S, d_model]", x, d_model=config.d_model)
    local = not set(jax.sharding.get_abstract_mesh().manual_axes).isdisjoint(options.axes.names)
    check_params(params, config, local=local, quantized=quantized is not None)
    if adapters is not None:
        check_adapters(adapters, config, local=local)
    if quantized is not None:
        check_value("quantized", quantized, QuantizedParams, "moax.quantize_params")
    if isinstance(routing, tuple) and len(routing) == 2:
        none: Any = None
        routing = Routing(*routing, none, none, none)
    given = () if routing is None else (routing,)
    given = (routing.experts, routing.weights) if isinstance(routing, Routing) else given
    arrays = ["router_input? [*batch, S, H]", "mask? bool [*batch, S]", "segment_ids? int [*batch, S]"]
    arrays += ["routing int [*batch, S, K]", "routing.weights [*batch, S, K]"][: len(given)]
    sizes = dict(batch=x.shape[:-2], S=x.shape[-2], H=config.d_model, K=config.top_k)
    check_arrays(", ".join(arrays), router_input, mask, segment_ids, *given, **sizes)
    segment_ids = None if segment_ids is None else keep_ids(segment_ids)
    static = config, options, bool(return_routing)
    return _moe(*static, x, params, quantized, adapters, router_input, routing, mask, segment_ids)


def quantize_params(
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options = Options(),
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    **keywords: Unpack[OptionKeywords],
) -> QuantizedParams:
    """Quantizes wi and wo once for several calls of a block, each for products over its rows and over its columns.

    The block then gathers bytes and quantizes no weight. Its gradients flow to `params`, as if it had quantized them.
    A weight that the recipe does not quantize is rounded to `dtype` once. Quantized weights serve the microbatches of a
    step, the stages of a pipeline, and experts that are frozen.

    Args:
      params: see `MoEParams`. A weight whose layout is not that of `param_specs` is moved there first, unquantized.
      config: the sizes of the block.
      options: those of the `moe` that takes the result; `recipe`, `axes`, `kernels` and `engine` count.
      dtype: the dtype of x in these calls, and so of the products; `kernels="auto"` chooses by it.
      **keywords: fields of `Options` that replace those of `options`.

    Returns:
      The quantized weights, on their shards: one byte an element and the scales, twice; or one array of `dtype` for a
      weight that its recipe does not quantize. They have no gradient; that of `moe` flows to its `params`.

    Raises:
      ValueError: a shape does not fit, or an option has a value that it cannot have.
      Unsupported: an engine or kernels that were chosen by name cannot run.
    """
    check_value("config", config, MoEConfig)
    options = replace_options("quantize_params", options, keywords)
    local = not set(jax.sharding.get_abstract_mesh().manual_axes).isdisjoint(options.axes.names)
    check_params(params, config, local=local)
    return _quantize_params(jax.lax.stop_gradient(params), config, options, np.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _quantize_params(params: MoEParams[Array], config: MoEConfig, options: Options, dtype: np.dtype) -> QuantizedParams:
    axes = options.axes
    view = find_mesh_view(axes, options.engine, params)
    given = (config, axes, view.axes)
    declared = shard_specs(params, *given) if view.manual else expert_specs(*given)
    plan = make_plan(config, options, AUTO, axes=view.axes, declared=declared, tokens=1, dtype=dtype)
    params = reshard_params(params, declared) if view.explicit else params
    wi, wo = quantize_weight(view, plan.wi, params.wi), quantize_weight(view, plan.wo, params.wo)
    return QuantizedParams(wi, wo, plan.recipe, plan.kernels)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # so that a caller who does not jit runs one program too
def _moe(
    config: MoEConfig, options: Options, return_routing: bool, x, params: MoEParams[Array], quantized, adapters,
    router_input, given: Routing | Ids | None, mask, segments,
):  # fmt: skip
    absent = params.wi is None or params.wo is None
    if absent:
        params = _fill(params, quantized, x.dtype)
    recipe, axes, engine = get_recipes(options.recipe), options.axes, options.engine
    axes, view = find_token_dims(x, axes, find_mesh_view(axes, engine, x, params))
    resolved, options = view.axes, dataclasses.replace(options, axes=axes)
    if x.size == 0:
        return x, _stats_of_nothing(x, config, return_routing)
    declared = shard_specs(params, config, axes, resolved) if view.manual else expert_specs(config, axes, resolved)
    rows, shards = x.size // x.shape[-1], 1 if view.manual else resolved.size(resolved.tokens)
    if not isinstance(rows, int):
        _check_symbolic(rows, config, view)
    if rows % shards:
        raise ValueError(f"x: its {rows} rows are not divisible by mesh axes {resolved.tokens} of {shards} devices")
    row_bytes = config.d_rows * (x.dtype.itemsize if recipe.wi.wire is None else 1)
    transport = None if options.exchange == "auto" else select_transport(options.exchange, view, row_bytes)
    frozen = absent or adapters is not None
    sizes = dict(axes=resolved, declared=declared, tokens=rows // shards, dtype=x.dtype)
    plan = make_plan(config, options, transport, frozen=frozen, **sizes)
    if quantized is not None:
        _check_quantized(quantized, plan, params)
    params = reshard_params(params, declared, warn=not absent) if view.explicit else params
    tokens = flatten_tokens(x, view)
    if segments is not None:
        mask = segments >= 0 if mask is None else mask & (segments >= 0)
    real = None if mask is None else flatten_tokens(mask[..., None], view)
    read = tokens if router_input is None else flatten_tokens(router_input, view)
    if real is not None:  # padding may hold NaN
        tokens, read = jnp.where(real, tokens, 0), jnp.where(real, read, 0)

    constrained = [name for name in ROUTER if getattr(params, name) is not None]
    if absent:
        constrained += ["wi", "wo"]
    layouts = {name: constrain(getattr(params, name), getattr(declared, name)) for name in constrained}
    params = dataclasses.replace(params, **layouts)
    routing, experts, weights = _route(view, x, read, params, config, options, given, real, segments)

    how = dict(axes=axes, engine=engine, kernels=options.kernels, grad_reduce_dtype=options.grad_reduce_dtype)
    rows = tokens
    if params.latent_down is not None:
        rows = dense(tokens, params.latent_down, recipe=recipe.wi, w_spec=declared.latent_down, **how)
    w = Weights(params.wi, params.wo, params.bi, params.bo, *(() if adapters is None else scaled(adapters)))
    kept: Quantized = (None, None) if quantized is None else (quantized.wi, quantized.wo)
    y, dropped, rounds = apply_experts(view, plan, (rows, experts, weights), w, kept)
    shared, apart = None, params.latent_up is not None or params.shared_gate is not None
    if params.shared_wi is not None and params.shared_wo is not None:
        h = dense(tokens, params.shared_wi, recipe=recipe.wi, w_spec=declared.shared_wi, **how)
        a = activate(h, config.activation, config.activation_limit)
        shared = dense(a, params.shared_wo, recipe=recipe.wo, w_spec=declared.shared_wo, **how)
    y = view.psum(y if shared is None or apart else y + shared, resolved.tp)
    if params.latent_up is not None:  # the product quantizes whole sums
        y = dense(y, params.latent_up, recipe=recipe.wo, w_spec=declared.latent_up, **how)
    if shared is not None and apart:
        shared = view.psum(shared, resolved.tp)
        if params.shared_gate is not None:  # it multiplies whole sums, so each rank of tp has its whole gradient
            gate = jax.nn.sigmoid(router_logits(tokens, params.shared_gate[:, None], axes=axes, engine=engine))
            shared = (shared.astype(jnp.float32) * gate).astype(y.dtype)
        y += shared
    y = unflatten_tokens(y if real is None else jnp.where(real, y, 0), x, view)
    dropped = view.psum(dropped, resolved.tokens)
    if view.manual:  # a type says over which axes a value varies
        dropped, rounds = view.assume_replicated(dropped, resolved.tp), view.assume_replicated(rounds, resolved.all)
    used = None
    if return_routing:
        shaped = {name: unflatten_tokens(getattr(routing, name), x, view) for name in ("experts", "weights")}
        used = dataclasses.replace(routing, **shaped)
    counts = routing.aux_loss, routing.z_loss, routing.tokens_per_expert
    sharding = jax.typeof(x).sharding
    y = jax.sharding.reshard(y, sharding) if sharding.mesh.explicit_axes else y
    return y, MoEStats(*counts, dropped[0], rounds[0], used, routing.histogram)


def _route(
    view: MeshView, x, tokens: Float[Array, "T H"], params: MoEParams[Array], config: MoEConfig, options: Options,
    given: Routing | Ids | None, real: Bool[Array, "T 1"] | None, segments,
) -> tuple[Routing, Int[Array, "T K"], Float[Array, "T K"]]:  # fmt: skip
    """Returns the Routing of `tokens`, and the block's experts and weights: each expert of a token once."""
    resolved, router, every = view.axes, config.router, jnp.arange(config.num_experts, dtype=jnp.int32)[None, None]
    if isinstance(given, Routing):
        experts = flatten_tokens(given.experts.astype(jnp.int32), view)
        weights = flatten_tokens(given.weights.astype(jnp.float32), view)
        some = (experts >= 0) & (experts < config.num_experts)  # a negative id stands for no expert too
        some = some if real is None else some & real
        experts, weights = jnp.where(some, experts, config.num_experts), jnp.where(some, weights, 0.0)
        counts = view.psum((experts[:, :, None] == every).sum((0, 1), dtype=jnp.int32), resolved.tokens)
        aux, z = (jnp.zeros((), jnp.float32) if v is None else v for v in (given.aux_loss, given.z_loss))
        routing = Routing(experts, weights, aux, z, counts)
    else:
        how = dict(axes=options.axes, engine=options.engine)
        experts = None if given is None else flatten_tokens(given.astype(jnp.int32), view)
        logits = router_logits(tokens, params.router, **how)
        logits = logits if params.logits_bias is None else logits + params.logits_bias.astype(jnp.float32)[None]
        # The axes that may split a row [S, H] of x, once x is flattened.
        row_axes = resolved.tokens if view.dims is None else resolved.sequence
        routing = route(
            logits, router, config.top_k, params.router_bias,
            experts=experts, mask=None if real is None else real[:, 0],
            sequences=_find_sequences(x, segments, view) if router.sequence_aux_loss else None,
            sequence_axes=row_axes, kernels=options.kernels, **how,
        )  # fmt: skip
    experts, weights = routing.experts, routing.weights
    if given is not None:
        # A second appearance of an expert becomes E with weight 0, and the first one has the sum of its weights.
        same = experts[:, :, None] == experts[:, None, :]
        place = jnp.arange(config.top_k, dtype=jnp.int32)
        later = (same & (place[None, :] < place[:, None])[None]).any(-1)
        total = jnp.where(same, weights[:, None, :], 0.0).sum(-1)
        experts, weights = jnp.where(later, config.num_experts, experts), jnp.where(later, 0.0, total)
    if params.expert_scale is not None:
        scale = params.expert_scale.astype(jnp.float32)[None, None]
        weights = weights * jnp.where(experts[:, :, None] == every, scale, 0.0).sum(-1)
    return routing, experts, weights


def _find_sequences(x: Float[Array, "*batch H"], segments, view: MeshView) -> Int[Array, "T C"]:
    """Returns the row of each token of x, (0, 0, 0, 1, 1, 1) for x [2, 3, H], and the columns of its segment."""
    if x.ndim < 3:
        raise ValueError(f"x has shape {x.shape}; it must be [..., S, H] for RouterConfig.sequence_aux_loss")
    rows = jnp.arange(math.prod(x.shape[:-2]), dtype=jnp.int32).reshape(*x.shape[:-2], 1)
    if segments is None:
        sequences = jnp.broadcast_to(rows, x.shape[:-1])[..., None]
    else:
        own = jnp.where(segments < 0, -1, rows)[..., None]
        sequences = jnp.concatenate([own, split_ids(segments[..., None])], axis=-1)
    return flatten_tokens(sequences, view)


def _fill(params: MoEParams[Array], quantized: QuantizedParams, dtype) -> MoEParams[Array]:
    """Returns the parameters with zeros for wi and wo, which the caller has quantized alone; nothing reads them."""
    if params.wi is not None or params.wo is not None:
        raise ValueError(
            "one of params.wi and params.wo is None; with quantized= either both are None, and have no gradient, or "
            "neither is"
        )
    wi, wo = (jnp.zeros(_data(of).shape, dtype) for of in (quantized.wi, quantized.wo))
    return dataclasses.replace(params, wi=wi, wo=wo)


def _stats_of_nothing(x, config: MoEConfig, return_routing: bool) -> MoEStats:
    """Returns the stats of x without tokens: losses and counts of 0, and one round."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    tokens, ids = jnp.zeros(config.num_experts, jnp.int32), jnp.zeros((*x.shape[:-1], config.top_k), jnp.int32)
    histogram = jnp.zeros((config.num_experts, BINS), jnp.int32) if config.router.histogram else None
    used = Routing(ids, ids.astype(jnp.float32), zero, zero, tokens, histogram) if return_routing else None
    return MoEStats(zero, zero, tokens, none, none + 1, used, histogram)


def _check_quantized(quantized: QuantizedParams, plan: BlockPlan, params: MoEParams[Array]) -> None:
    """Raises ValueError where quantized weights are of another recipe, implementation or size than the block's."""
    for name in ("recipe", "kernels"):
        have, want = getattr(quantized, name), getattr(plan, name)
        if have == want:
            continue
        have, want = (describe_recipes(value) if name == "recipe" else repr(value) for value in (have, want))
        want = f"another {want}" if have == want else want
        raise ValueError(
            f"quantized has {name}={have}, and this call has {want}; pass the same options and the dtype of x to "
            "moax.quantize_params"
        )
    for name in ("wi", "wo"):
        data, want = _data(getattr(quantized, name)), getattr(params, name).shape
        if data.shape != want:
            raise ValueError(f"quantized.{name} is of a weight {data.shape}, and params.{name} has shape {want}")
        if jnp.issubdtype(data.dtype, jnp.floating) and data.dtype != plan.dtype:
            raise ValueError(
                f"quantized.{name} has dtype {data.dtype}, and x has {plan.dtype}; pass the dtype of x to "
                "moax.quantize_params"
            )


def _data(weight: QuantizedWeight) -> Array:
    """Returns the values of a quantized weight for products over columns, whose dims are in the order of the weight."""
    return jax.tree.leaves(weight[-1])[0]


def _check_symbolic(rows, config: MoEConfig, view: MeshView) -> None:
    """Raises Unsupported where the block cannot take a symbolic number of rows, of `jax.export`."""
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
