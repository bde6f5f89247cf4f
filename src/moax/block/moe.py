"""`moax.moe` is the whole block: the router, the experts, and the shared expert.

routing = route(x router)
y[t]    = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t])

Latent experts read x[t] latent_down, and their sum is multiplied by latent_up. A caller may give the routing; see
`routing.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer

from moax.block.experts import apply_experts
from moax.block.plan import BlockPlan, check_layouts, check_quantized, check_quantized_arrays, make_plan
from moax.block.rounds import Inputs, Quantized
from moax.block.routing import RoutingInput, RoutingOverride, Tokens, read_override, route_tokens
from moax.block.small_terms import Weights
from moax.checks import Unsupported, check_arrays, check_value
from moax.config import MoEConfig, MoEStats, OptionKeywords, Options, replace_options
from moax.kernels.groups import narrow_ids
from moax.lora import Adapters, check_adapters, scaled
from moax.mesh.axes import Axes
from moax.mesh.specs import (
    MeshView,
    Spec,
    constrain,
    find_mesh_view,
    find_token_dims,
    flatten_tokens,
    unflatten_tokens,
)
from moax.ops.activation import activate, multiply_gate
from moax.ops.balance import BINS, keep_ids
from moax.ops.matmul import dense
from moax.ops.router import router_logits
from moax.ops.weights import gather_quantized, quantize_weight, values_of
from moax.params import ROUTER, MoEParams, check_params, expert_specs, reshard_params, shard_specs
from moax.types import QuantizedParams, Routing


class CallArrays(NamedTuple):
    """The optional arrays of a call of `moax.moe`, each an argument of it or None."""

    quantized: QuantizedParams | None
    adapters: Adapters[Array] | None
    router_input: Float[Array, "*batch H"] | None
    override: RoutingOverride | None
    mask: Bool[Array, "*batch"] | None
    segment_ids: Integer[Array, "*batch"] | None


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
      ValueError: a shape, a dtype, an option, or on Explicit axes the layout of a weight cannot work. The message names
        it.
      Unsupported: an engine or kernels that were chosen by name cannot run.
      TypeError: `Options` has no field of a keyword's name.
    """
    check_value("config", config, MoEConfig)
    options = replace_options("moe", options, keywords)
    check_arrays("x [*batch, S, d_model]", x, d_model=config.d_model)
    local = _takes_shards(options.axes)
    check_params(params, config, local=local, quantized=quantized is not None)
    if adapters is not None:
        check_adapters(adapters, config, local=local)
    if quantized is not None:
        check_quantized_arrays(quantized)
    check_value("return_routing", return_routing, bool)
    override = read_override(routing)
    arrays = CallArrays(quantized, adapters, router_input, override, mask, segment_ids)
    _check_arrays(x, config, arrays)
    if override is not None:
        experts = narrow_ids(override.experts, config.num_experts)
        arrays = arrays._replace(override=override._replace(experts=experts))
    if segment_ids is not None:
        arrays = arrays._replace(segment_ids=keep_ids(segment_ids))
    return _moe(config, options, bool(return_routing), x, params, arrays)


def quantize_params(
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options = Options(),
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    gather: bool = False,
    **keywords: Unpack[OptionKeywords],
) -> QuantizedParams:
    """Quantizes wi and wo once for several calls of a block, each for fprop and for dgrad.

    The block then gathers bytes and quantizes no weight. Its gradients flow to `params`, as if it had quantized them.
    A weight that the recipe does not quantize is rounded to `dtype` once. Quantized weights serve the microbatches of a
    step, the stages of a pipeline, and experts that are frozen.

    Args:
      params: see `MoEParams`. A weight whose layout is not that of `param_specs` is moved there first, unquantized.
      config: the sizes of the block.
      options: those of the `moe` that takes the result; `recipe`, `axes`, `kernels` and `engine` count.
      dtype: the dtype of x in these calls, and so of the matmuls; `kernels="auto"` chooses by it.
      gather: whether the weights are also gathered over fsdp, once for all calls. No call then gathers a weight, and
        gradients are scattered as before. Each device holds its experts whole for as long as the result lives.
      **keywords: fields of `Options` that replace those of `options`.

    Returns:
      The quantized weights, on their shards: one byte an element and the scales, twice; or one array of `dtype` for a
      weight that the recipe does not quantize. With `gather` these arrays are split by ep and tp alone: wi [E, H, G, F]
      over E and F. They have no gradient; that of `moe` flows to its `params`. With blocks, a call on another size of
      tp refuses them.

    Raises:
      ValueError: a shape does not fit, or `dtype` or an option has a value that it cannot have.
      Unsupported: an engine or kernels that were chosen by name cannot run.
    """
    check_value("config", config, MoEConfig)
    options = replace_options("quantize_params", options, keywords)
    check_params(params, config, local=_takes_shards(options.axes))
    check_value("dtype", dtype, jnp.floating)
    check_value("gather", gather, bool)
    return _quantize_params(jax.lax.stop_gradient(params), config, options, np.dtype(dtype), bool(gather))


def _takes_shards(axes: Axes) -> bool:
    """Returns whether the call is inside a `shard_map` over a mesh axis with a role, so that its arrays are shards."""
    manual_axes = jax.sharding.get_abstract_mesh().manual_axes
    return any(name in manual_axes for name in axes.names)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _quantize_params(
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options,
    dtype: np.dtype,
    gather: bool,
) -> QuantizedParams:
    view = find_mesh_view(options.axes, options.engine, params)
    declared = _find_declared(view, params, config, options.axes)
    plan = make_plan(config, options, axes=view.axes, declared=declared, tokens=1, dtype=dtype)
    if view.explicit:
        check_layouts(view, params, declared)
        params = reshard_params(params, declared)
    wi = quantize_weight(view, plan.wi, params.wi)
    wo = quantize_weight(view, plan.wo, params.wo)
    if gather:
        wi = gather_quantized(view, plan.wi, wi)
        wo = gather_quantized(view, plan.wo, wo)
    return QuantizedParams(wi, wo, plan.recipe, plan.kernels, gather, view.axes.size(view.axes.tp))


# This is a program of its own, so that a caller who does not jit runs one program too.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _moe(
    config: MoEConfig,
    options: Options,
    return_routing: bool,
    x: Float[Array, "*batch H"],
    params: MoEParams[Array],
    arrays: CallArrays,
) -> tuple[Float[Array, "*batch H"], MoEStats]:
    absent = params.wi is None or params.wo is None
    if absent:
        params = _fill_with_zeros(params, arrays.quantized, x.dtype)
    view = find_mesh_view(options.axes, options.engine, x, params)
    axes, view = find_token_dims(x, options.axes, view)
    options = dataclasses.replace(options, axes=axes)
    if x.size == 0:
        return x, _stats_of_nothing(x, config, return_routing)
    declared = _find_declared(view, params, config, axes)
    frozen = absent or arrays.adapters is not None
    gathered = arrays.quantized is not None and arrays.quantized.gathered
    plan = _plan(view, x, config, options, declared, frozen=frozen, gathered=gathered)
    quantized: Quantized = (None, None)
    if arrays.quantized is not None:
        check_quantized(view, arrays.quantized, plan, params)
        quantized = (arrays.quantized.wi, arrays.quantized.wo)
    if view.explicit:
        check_layouts(view, params, declared)
        params = reshard_params(params, declared, warn=not absent)
    tokens = _read_tokens(view, x, arrays)
    params = _constrain_params(params, declared, (*ROUTER, "wi", "wo") if absent else ROUTER)

    routing, experts, weights = route_tokens(view, tokens, params, config, options, arrays.override)
    shared = SharedMatmuls(config, options, declared)
    rows = tokens.rows
    if params.latent_down is not None:
        rows = shared.multiply(tokens.rows, params.latent_down, "latent_down")
    low_rank = () if arrays.adapters is None else scaled(arrays.adapters)
    w = Weights(params.wi, params.wo, params.bi, params.bo, *low_rank)
    inputs = Inputs(rows, experts, weights)
    result = apply_experts(view, plan, inputs, w, quantized)
    y = _add_shared(view, shared, params, tokens, result.y)
    if tokens.real is not None:
        y = jnp.where(tokens.real, y, 0)
    y = unflatten_tokens(y, x, view)
    sharding = jax.typeof(x).sharding
    if sharding.mesh.explicit_axes:
        y = jax.sharding.reshard(y, sharding)
    stats = _collect_stats(view, routing, result.dropped, result.rounds)
    if return_routing:
        experts = unflatten_tokens(routing.experts, x, view)
        weights = unflatten_tokens(routing.weights, x, view)
        stats = stats._replace(routing=dataclasses.replace(routing, experts=experts, weights=weights))
    return y, stats


def _check_arrays(x, config: MoEConfig, call: CallArrays) -> None:
    """Raises ValueError where an array of a call does not fit x [..., S, H]."""
    rules = [
        "router_input? [*batch, S, H]",
        "mask? bool [*batch, S]",
        "segment_ids? int [*batch, S]",
    ]
    arrays = [call.router_input, call.mask, call.segment_ids]
    override = call.override
    if override is not None:
        rules.append("routing int [*batch, S, K]")
        arrays.append(override.experts)
        if override.weights is not None:
            rules.append("routing.weights [*batch, S, K]")
            arrays.append(override.weights)
    batch, length = x.shape[:-2], x.shape[-2]
    check_arrays(", ".join(rules), *arrays, batch=batch, S=length, H=config.d_model, K=config.top_k)


def _find_declared(view: MeshView, params: MoEParams[Array], config: MoEConfig, axes: Axes) -> MoEParams[Spec]:
    """Returns the spec of each parameter: its own inside a `shard_map`, where the parameters are shards."""
    if view.manual:
        return shard_specs(params, config, axes, view.axes)
    return expert_specs(config, axes, view.axes)


def _plan(
    view: MeshView,
    x,
    config: MoEConfig,
    options: Options,
    declared: MoEParams[Spec],
    *,
    frozen: bool,
    gathered: bool,
) -> BlockPlan:
    """Returns the plan of the experts for x; ValueError where the mesh does not divide its tokens."""
    num_tokens = x.size // x.shape[-1]
    axes = view.axes
    shards = 1 if view.manual else axes.size(axes.tokens)
    if not isinstance(num_tokens, int):
        _check_symbolic(num_tokens, config, view)
    if num_tokens % shards:
        raise ValueError(f"x: its {num_tokens} rows are not divisible by mesh axes {axes.tokens} of {shards} devices")
    return make_plan(
        config,
        options,
        axes=axes,
        declared=declared,
        tokens=num_tokens // shards,
        dtype=x.dtype,
        frozen=frozen,
        gathered=gathered,
    )


def _read_tokens(view: MeshView, x: Float[Array, "*batch H"], arrays: CallArrays) -> Tokens:
    """Returns the tokens of a call, flat, with 0 for padding."""
    rows = flatten_tokens(x, view)
    real = None
    if arrays.mask is not None:
        real = flatten_tokens(arrays.mask[..., None], view)
    if arrays.segment_ids is not None:
        is_token = flatten_tokens((arrays.segment_ids >= 0)[..., None], view)
        real = is_token if real is None else real & is_token
    router_rows = rows
    if arrays.router_input is not None:
        router_rows = flatten_tokens(arrays.router_input, view)
    if real is not None:  # padding may hold NaN
        rows = jnp.where(real, rows, 0)
        router_rows = jnp.where(real, router_rows, 0)
    return Tokens(x, rows, router_rows, real, arrays.segment_ids)


def _constrain_params(params: MoEParams[Array], declared: MoEParams[Spec], names) -> MoEParams[Array]:
    """Returns the parameters, those of `names` in their declared layout."""
    layouts = {}
    for name in names:
        if getattr(params, name) is not None:
            layouts[name] = constrain(getattr(params, name), getattr(declared, name))
    return dataclasses.replace(params, **layouts)


class SharedMatmuls(NamedTuple):
    """The matmuls of a block that every token runs: those of the shared expert, and those around latent experts."""

    config: MoEConfig
    options: Options
    declared: MoEParams[Spec]

    def multiply(self, x: Float[Array, "T K"], w: Array, name: str) -> Float[Array, "T *C"]:
        """Returns x w; `name` is the parameter's."""
        options = self.options
        return dense(
            x,
            w,
            recipe=options.recipe,
            w_spec=getattr(self.declared, name),
            axes=options.axes,
            engine=options.engine,
            kernels=options.kernels,
            grad_reduce_dtype=options.grad_reduce_dtype,
        )

    def run_expert(self, tokens: Tokens, wi: Array, wo: Array) -> Float[Array, "T H"]:
        """Returns the output of the shared expert, a partial sum where tp splits its width."""
        h = self.multiply(tokens.rows, wi, "shared_wi")
        # A user's activation may have an infinite slope at 0, which h of padding is. The named activations have none.
        real = None if isinstance(self.config.activation, str) else tokens.real
        if real is not None:
            h = jnp.where(real[..., None], h, 1)
        a = activate(h, self.config.activation, self.config.activation_limit)
        if real is not None:  # act(1) would enter the blocks of wgrad, whose scales real rows share
            a = jnp.where(real, a, 0)
        return self.multiply(a, wo, "shared_wo")


def _add_shared(
    view: MeshView,
    matmuls: SharedMatmuls,
    params: MoEParams[Array],
    tokens: Tokens,
    y: Float[Array, "T D"],
) -> Float[Array, "T H"]:
    """Returns the sums over tp of the experts' y, times latent_up, and of the shared expert, times its gate."""
    tp = view.axes.tp
    shared = None
    if params.shared_wi is not None and params.shared_wo is not None:
        shared = matmuls.run_expert(tokens, params.shared_wi, params.shared_wo)
    # latent_up quantizes whole sums, and the gate multiplies them: one sum over tp does not do for both terms then.
    is_apart = params.latent_up is not None or params.shared_gate is not None
    if shared is not None and not is_apart:
        y = y + shared
    y = view.psum(y, tp)
    if params.latent_up is not None:
        y = matmuls.multiply(y, params.latent_up, "latent_up")
    if shared is None or not is_apart:
        return y
    shared = view.psum(shared, tp)
    if params.shared_gate is not None:  # each rank of tp has the whole gradient of the gate
        options = matmuls.options
        column = params.shared_gate[:, None]
        logits = router_logits(tokens.rows, column, axes=options.axes, engine=options.engine)
        shared = multiply_gate(shared, jax.nn.sigmoid(logits), y.dtype)
    return y + shared


def _fill_with_zeros(params: MoEParams[Array], quantized: QuantizedParams | None, dtype) -> MoEParams[Array]:
    """Returns the parameters with zeros for wi and wo, which the caller has quantized alone; nothing reads them."""
    if quantized is None or params.wi is not None or params.wo is not None:
        raise ValueError(
            "one of params.wi and params.wo is None; with quantized= either both are None, and have no gradient, or "
            "neither is"
        )
    wi = jnp.zeros(values_of(quantized.wi).shape, dtype)
    wo = jnp.zeros(values_of(quantized.wo).shape, dtype)
    return dataclasses.replace(params, wi=wi, wo=wo)


def _collect_stats(view: MeshView, routing: Routing, dropped: Int[Array, " 1"], rounds: Int[Array, " 1"]) -> MoEStats:
    """Returns the stats of a step over the whole mesh, without its routing."""
    dropped = view.psum(dropped, view.axes.tokens)
    if view.manual:  # a type says over which axes a value varies
        dropped = view.assume_replicated(dropped, view.axes.tp)
        rounds = view.assume_replicated(rounds, view.axes.all)
    return MoEStats(
        routing.aux_loss,
        routing.z_loss,
        routing.tokens_per_expert,
        dropped[0],
        rounds[0],
        histogram=routing.histogram,
    )


def _stats_of_nothing(x: Float[Array, "*batch H"], config: MoEConfig, return_routing: bool) -> MoEStats:
    """Returns the stats of x without tokens: losses and counts of 0, and one round."""
    loss = jnp.zeros((), jnp.float32)
    count = jnp.zeros((), jnp.int32)
    counts = jnp.zeros(config.num_experts, jnp.int32)
    histogram = None
    if config.router.histogram:
        histogram = jnp.zeros((config.num_experts, BINS), jnp.int32)
    routing = None
    if return_routing:
        ids = jnp.zeros((*x.shape[:-1], config.top_k), jnp.int32)
        routing = Routing(ids, ids.astype(jnp.float32), loss, loss, counts, histogram)
    return MoEStats(loss, loss, counts, count, count + 1, routing, histogram)


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
