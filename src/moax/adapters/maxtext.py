"""Puts moax's block in the place of MaxText's routed MoE layer; parameters, rules and checkpoints stay MaxText's.

    python -m moax.adapters.maxtext fp8_block base.yml model_name=qwen3-30b-a3b run_name=first

is MaxText's training command with moax's block. The first word is the name of a recipe, or `none`; MaxText reads the
other words. `fp8_block+kept` also quantizes the weights once a step, for forward, backward and all microbatches of
`gradient_accumulation_steps`, and `none+kept` casts them once. `fp8_block+gathered` and `none+gathered` also gather
them over fsdp once a step, so that each GPU holds its experts whole. `+whole` behind one of these words is
`buffer_factor=None` of `moax.Options`. A program of your own calls `install` before it trains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Unpack

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moax.activations import Activation
from moax.adapters.versions import check_version
from moax.block.moe import moe, quantize_params
from moax.checks import Unsupported
from moax.config import BufferFactor, MoEConfig, OptionKeywords, Options, RouterConfig, replace_options
from moax.mesh.axes import Axes
from moax.ops.balance import update_router_bias
from moax.params import MoEParams
from moax.recipe import RECIPES
from moax.types import KEPT, Kept, QuantizedParams

AXES = Axes(
    dp="data",
    fsdp=("fsdp", "fsdp_transpose", "context"),
    ep="expert",
    tp="tensor",
    other="stage",
    fsdp_dim="model",
)
# MaxText's `shard_exp_on_fsdp` splits E in place of H. A gather along the first dim needs no copy.
AXES_BY_EXPERTS = dataclasses.replace(AXES, fsdp_dim="experts")
USAGE = f"""usage: python -m moax.adapters.maxtext RECIPE base.yml [setting=value ...]

RECIPE is none, {", ".join(RECIPES)}, or one of them with +kept, which quantizes the weights once a step, or with
+gathered, which also gathers them once a step. A last +whole gives the buffers the rows of the worst routing.
MaxText's command reads the other words: see `python -m maxtext.trainers.pre_train.train`."""
# MaxText routes by groups, and by a bias that steers the choice alone, where the name of the model begins so.
GROUPED_MODELS = ("deepseek3", "deepseek4", "kimi-k2")
# The decoder blocks whose routers moax does not have.
OTHER_ROUTERS = ("llama4", "gemma4", "deepseek4")


class Arm(NamedTuple):
    """The first word of the command: the recipe, how the weights are kept for a step, and the factor of the buffers."""

    recipe: str | None
    kept: Kept | None
    buffer_factor: BufferFactor


def main(argv: Sequence[str] | None = None) -> None:
    """Runs MaxText's training command with moax's block.

    Args:
      argv: the recipe, as `fp8_block`, `none`, `fp8_block+kept` or `fp8_block+whole`, then the words of MaxText's
        command. None means `sys.argv` without the program.

    Raises:
      SystemExit: the recipe has no such name, or MaxText is missing, or is of a version that moax is not tested with.
    """
    words = sys.argv[1:] if argv is None else argv
    if not words or words[0] in ("-h", "--help"):
        sys.exit(USAGE)
    try:
        arm = read_arm(words[0])
        check_version("maxtext")
    except (ValueError, ModuleNotFoundError, Unsupported) as error:
        sys.exit(f"moax: {error}")
    install(**arm._asdict())

    from absl import app
    from maxtext.trainers.pre_train import train

    app.run(train.main, [sys.argv[0], *words[1:]])


def read_arm(word: str) -> Arm:
    """Returns what the first word of the command says.

    Args:
      word: the name of a recipe or `none`, then `+kept` or `+gathered` or neither, then `+whole` or nothing.

    Raises:
      ValueError: no recipe has the name.
    """
    factors: dict[str, BufferFactor] = {"": "auto", "+whole": None}
    arms = {}
    for recipe, choice, (whole, factor) in itertools.product((None, *RECIPES), (None, *KEPT), factors.items()):
        name = recipe or "none"
        if choice is not None:
            name += f"+{choice}"
        arms[name + whole] = Arm(recipe, choice, factor)
    if word not in arms:
        names = ", ".join(["none", *RECIPES])
        suffixes = " or ".join(f"+{choice}" for choice in KEPT)
        raise ValueError(f"the recipe {word!r} must be one of {names}, then {suffixes} or neither, then +whole or not")
    return arms[word]


def install(*, kept: Kept | None = None, **options: Unpack[OptionKeywords]) -> None:
    """Replaces the call of MaxText's layer `RoutedMoE` in this process, until the next call of `install`.

    Args:
      kept: what is done once a step, for forward, backward and all microbatches. "kept" quantizes the weights, or
        casts them to MaxText's `dtype` where `recipe` is None. "gathered" also gathers them over fsdp. None leaves all
        to each call of a layer. The other two need MaxText's `scan_layers=False`.
      **options: the fields of `moax.Options`. The default of `axes` is `AXES`, which names MaxText's mesh axes, and
        `AXES_BY_EXPERTS` with MaxText's `shard_exp_on_fsdp=True`.

    Raises:
      ModuleNotFoundError: MaxText is not installed.
      Unsupported: moax is not tested with the installed version of MaxText.
      TypeError: `moax.Options` has no such field.
      ValueError: an option has a value that it cannot have.
    """
    check_version("maxtext")
    if kept not in (None, *KEPT):
        raise ValueError(f"kept={kept!r} must be None, or one of {', '.join(map(repr, KEPT))}")
    layer_options = replace_options("install", Options(axes=AXES), options)

    from maxtext.layers.moe import RoutedMoE
    from maxtext.trainers.pre_train import train

    def call(layer, x, input_ids=None, gate_inputs=None, out_sharding=None, forced_routed_experts=None):
        return run_layer(layer, x, gate_inputs, forced_routed_experts, layer_options)

    RoutedMoE.__call__ = call
    # An earlier call of `install` may have wrapped MaxText's functions.
    loss = inspect.unwrap(train.loss_fn)
    accumulate = inspect.unwrap(train.gradient_accumulation_loss_and_grad)
    if kept is not None:
        loss = quantize_for_loss(loss, layer_options, kept)
        accumulate = quantize_for_microbatches(accumulate, layer_options, kept)
    train.loss_fn = loss
    train.gradient_accumulation_loss_and_grad = accumulate


def run_layer(
    layer: Any,
    x: Float[Array, "B S H"],
    gate_inputs: Float[Array, "B S H"] | None,
    forced_routed_experts: Int[Array, "B S K"] | None,
    options: Options,
) -> tuple[Float[Array, "B S H"], Float[Array, ""], Array | None]:
    """Runs a layer of MaxText by `moax.moe`, and returns what MaxText's own call returns.

    Args:
      layer: a `RoutedMoE`.
      x: [B, S, H].
      gate_inputs: [B, S, H], what the router reads in place of x; None means x.
      forced_routed_experts: [B, S, K] experts in place of the router's choice; an id that is no expert is no choice.
      options: the options of `moax.moe`.

    Returns:
      y: [B, S, H] in MaxText's `dtype`.
      loss: the balance loss.
      update: [E], the update of the routed bias, or the counts that MaxText sums over microbatches; None without one.

    Raises:
      Unsupported: MaxText's settings ask for what moax does not have.
    """
    config = config_of(layer)
    routing = None
    if forced_routed_experts is not None:
        routing = forced_routing(layer, forced_routed_experts)
    quantized = None
    if hasattr(layer, "quantized_weights"):
        quantized = layer.quantized_weights.get_value()
    dtype = None
    if options.recipe is None and options.grad_reduce_dtype is None:
        dtype = layer.config.dtype  # the block would cast them anyway, to the same bits
    y, stats = moe(
        x.astype(layer.config.dtype),
        params_of(layer, dtype),
        config,
        options_of(layer.config, options),
        router_input=gate_inputs,
        routing=routing,
        quantized=quantized,
    )
    update = None
    if layer.should_update_load_balance():
        update = bias_update(layer.config, stats.tokens_per_expert)
    return y, stats.aux_loss, update


def config_of(layer: Any) -> MoEConfig:
    """Returns the config of moax's block that computes what a layer of MaxText computes.

    Args:
      layer: a `RoutedMoE`.

    Raises:
      Unsupported: MaxText's settings ask for what moax does not have. The message names them.
    """
    config = layer.config
    check_layer(layer)
    return MoEConfig(
        d_model=layer.moe_expert_input_dim,
        d_ff=layer.intermediate_dim,
        num_experts=layer.num_experts,
        top_k=layer.num_experts_per_tok,
        activation=activation_of(config),
        activation_limit=activation_limit_of(config),
        use_bias=config.mlp_bias,
        router=router_of(config),
    )


def options_of(config: Any, options: Options) -> Options:
    """Returns the options with the axes of the layout that MaxText's settings give the experts' weights.

    Args:
      config: MaxText's config.
      options: the options of `moax.moe`. Axes other than `AXES` stay as they are.
    """
    if config.shard_exp_on_fsdp and options.axes == AXES:
        return dataclasses.replace(options, axes=AXES_BY_EXPERTS)
    return options


def params_of(layer: Any, dtype: DTypeLike | None = None) -> MoEParams:
    """Returns the parameters of a layer of MaxText as those of moax's block, each in its own dtype and sharding.

    Args:
      layer: a `RoutedMoE`.
      dtype: the dtype of wi; None keeps that of MaxText's weights.
    """
    biases = {}
    if layer.config.mlp_bias:
        biases["bi"] = jnp.stack([layer.wi_0_bias[...], layer.wi_1_bias[...]], axis=1)
        biases["bo"] = layer.wo_bias[...]
    if layer.gate.bias is not None:
        if layer.config.decoder_block.value == "deepseek":
            biases["router_bias"] = layer.gate.bias[...]
        else:
            biases["logits_bias"] = layer.gate.bias[...]
    return MoEParams(layer.gate.kernel[...], gate_and_up(layer, dtype), layer.wo[...], **biases)


def gate_and_up(layer: Any, dtype: DTypeLike | None = None) -> Float[Array, "E H 2 F"]:
    """Returns wi [E, H, 2, F]: MaxText's two weights, stacked, or its one weight of `prefuse_moe_weights`, as it is.

    Args:
      layer: a `RoutedMoE`.
      dtype: the dtype of the stack. A cast before the stack copies fewer bytes than one behind it. None casts nothing.
    """
    if layer.config.prefuse_moe_weights:
        wi = layer.wi[...]  # [E, H, 2F]
        experts, width, columns = wi.shape
        return wi.reshape(experts, width, 2, columns // 2)
    gate = layer.wi_0[...]
    up = layer.wi_1[...]
    if dtype is not None:
        gate = gate.astype(dtype)
        up = up.astype(dtype)
    return jnp.stack([gate, up], axis=2)


def check_layer(layer: Any) -> None:
    """Raises Unsupported where a setting of MaxText asks for another layer than moax's block."""
    config = layer.config
    for setting in ("te_moe_block", "use_random_routing"):
        if getattr(config, setting):
            raise Unsupported(f"{setting}=True asks MaxText for another layer, and moax's block takes its place")
    if config.capacity_factor > 0 and not config.sparse_matmul:
        settings = f"capacity_factor={config.capacity_factor} with sparse_matmul=False"
        raise Unsupported(f"{settings}: MaxText drops tokens by it, and moax's block none; set capacity_factor=-1")
    if layer.is_hash_routing:
        raise Unsupported("hash routing: moax's router chooses by scores")
    if layer.wi_0_sparsity_module is not None:
        raise Unsupported("a sparsity rule for expert weights: moax's matmuls are dense")
    if layer.wo_scale is not None:
        raise Unsupported(f"weight_dtype={config.weight_dtype}: moax quantizes float32 or bfloat16 weights itself")


def activation_of(config: Any) -> Activation:
    """Returns moax's name of the activation of MaxText's experts."""
    if config.decoder_block.value == "gpt_oss":
        return "swiglu_oai"
    names = {"silu": "swiglu", "gelu": "geglu"}
    if config.mlp_activations[0] not in names:
        raise Unsupported(f"mlp_activations={config.mlp_activations}: the adapter has {', '.join(names)}")
    return names[config.mlp_activations[0]]


def activation_limit_of(config: Any) -> float | None:
    """Returns the limit of the activation, None where MaxText's block sets none."""
    if config.decoder_block.value == "gpt_oss":
        return config.mlp_activations_limit
    if config.decoder_block.value == "deepseek" and config.mlp_activations_limit > 0:
        return config.mlp_activations_limit
    return None


def router_of(config: Any) -> RouterConfig:
    """Returns the router of MaxText's decoder block, from MaxText's config."""
    block = config.decoder_block.value
    score = config.routed_score_func
    if block == "deepseek":
        return deepseek_router(config)
    if score or block in OTHER_ROUTERS:
        settings = f"decoder_block={block!r}, routed_score_func={score!r}"
        raise Unsupported(f"{settings}: moax has no such router")
    # MaxText takes the softmax over the K chosen logits. It sums to 1, so norm_topk_prob changes nothing.
    return RouterConfig(
        order="topk_then_score",
        logits_bias=config.routed_bias,
        aux_loss=config.load_balance_loss_weight,
    )


def deepseek_router(config: Any) -> RouterConfig:
    """Returns the router of DeepSeek's block, where norm_topk_prob changes nothing: `sigmoid` divides by the sum."""
    score = config.routed_score_func
    if score not in ("softmax", "sigmoid"):
        raise Unsupported(f"routed_score_func={score!r} in DeepSeek's block: moax has no such router")
    grouped = config.model_name.startswith(GROUPED_MODELS)
    if config.routed_bias and not grouped:
        names = f"model_name={config.model_name!r}, and no name that begins with {' or '.join(GROUPED_MODELS)}"
        raise Unsupported(f"routed_bias=True with {names}: MaxText then adds the bias to the weights")
    num_groups = 1
    top_groups = 1
    if grouped and config.n_routing_groups != -1:
        num_groups = config.n_routing_groups
        top_groups = config.topk_routing_group
    return RouterConfig(
        score=score,
        normalize=score == "sigmoid",
        scale=config.routed_scaling_factor,
        bias=config.routed_bias,
        num_groups=num_groups,
        top_groups=top_groups,
        aux_loss=config.load_balance_loss_weight,
    )


def forced_routing(layer: Any, experts: Int[Array, "B S K"]) -> Int[Array, "B S K"]:
    """Returns MaxText's forced experts as a `routing` of `moax.moe`, in which the id E is no expert."""
    if layer.config.decoder_block.value == "deepseek":
        raise Unsupported("forced_routed_experts in DeepSeek's block: MaxText adds the bias to their weights")
    chosen = (experts >= 0) & (experts < layer.num_experts)
    return jnp.where(chosen, experts, layer.num_experts)


def bias_update(config: Any, tokens_per_expert: Int[Array, " E"]) -> Array:
    """Returns what MaxText adds to the routed bias, or for a microbatch the counts, which MaxText sums first."""
    if config.gradient_accumulation_steps > 1:
        return tokens_per_expert
    bias = jnp.zeros_like(tokens_per_expert, jnp.float32)
    return update_router_bias(bias, tokens_per_expert, config.routed_bias_update_rate)


def quantize_for_microbatches(accumulate: Callable[..., Any], options: Options, kept: Kept) -> Callable[..., Any]:
    """Returns MaxText's accumulation of gradients, which first quantizes the weights of all layers.

    Args:
      accumulate: `gradient_accumulation_loss_and_grad` of MaxText.
      options: the options of `moax.moe`.
      kept: see `install`.
    """

    @functools.wraps(accumulate)
    def accumulate_quantized(loss, config, model, *rest):
        with quantize_layers(model, config, options, kept):
            return accumulate(loss, config, model, *rest)

    return accumulate_quantized


def quantize_for_loss(loss: Callable[..., Any], options: Options, kept: Kept) -> Callable[..., Any]:
    """Returns MaxText's loss, which first quantizes the weights of all layers where a step has one microbatch.

    Args:
      loss: `loss_fn` of MaxText.
      options: the options of `moax.moe`.
      kept: see `install`.
    """

    @functools.wraps(loss)
    def loss_quantized(model, config, *rest, **keywords):
        if config.gradient_accumulation_steps > 1:
            return loss(model, config, *rest, **keywords)
        with quantize_layers(model, config, options, kept):
            return loss(model, config, *rest, **keywords)

    return loss_quantized


@contextlib.contextmanager
def quantize_layers(model: Any, config: Any, options: Options, kept: Kept) -> Iterator[None]:
    """Gives each layer of a model of MaxText its quantized weights, as long as the context lasts.

    Args:
      model: an nnx module of MaxText.
      config: MaxText's config.
      options: the options of `moax.moe`.
      kept: see `install`.

    Raises:
      ValueError: MaxText scans over the layers.
    """
    from flax import nnx
    from maxtext.layers.moe import RoutedMoE

    if config.scan_layers:
        raise ValueError(f"+{kept} needs scan_layers=False: the weights of a scan over layers are one stack")
    layers = [node for _, node in nnx.iter_graph(model) if isinstance(node, RoutedMoE)]
    try:
        for layer in layers:
            layer.quantized_weights = nnx.Cache(quantize_layer(layer, options, kept))
        yield
    finally:
        for layer in layers:
            if hasattr(layer, "quantized_weights"):  # A layer behind one that failed has none.
                del layer.quantized_weights  # The state of a step has no quantized weights.


def quantize_layer(layer: Any, options: Options, kept: Kept) -> QuantizedParams:
    """Returns the quantized weights of a layer of MaxText, for one step."""
    return quantize_params(
        params_of(layer),
        config_of(layer),
        options_of(layer.config, options),
        dtype=layer.config.dtype,
        gather=kept == "gathered",
    )


if __name__ == "__main__":
    main()
