"""bytes [B, S] -> logits [B, S, 256]: embed; L times (x += attention(norm(x)); x += moe(norm(x))); norm; predict.

The layers are one `lax.scan` over parameters stacked along a leading L, so that compile time does not grow with L.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, PRNGKeyArray

import moax
from lm.config import VOCAB, ModelConfig, TrainConfig
from moax import Axes, MoEParams, MoEStats, QuantizedParams, ops
from moax.params import dense_spec, token_spec

AXES = Axes()


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["norm_a", "wqkv", "wo", "norm_m", "moe"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Layer:
    """The parameters of one layer. In `Params` every array has a leading L.

    `moe.router_bias` is None, since the optimizer does not train the selection bias; `TrainState` holds it.

    Attributes:
      norm_a: [H] f32, gain of the norm before attention.
      wqkv: [H, (N + 2 M) D] f32, for N heads of queries, then M of keys and M of values. wo: [N D, H] f32.
      norm_m: [H] f32, gain of the norm before the MoE.
      moe: see `moax.MoEParams`.
    """

    norm_a: Float[Array, "*L H"]
    wqkv: Float[Array, "*L H QKV"]
    wo: Float[Array, "*L ND H"]
    norm_m: Float[Array, "*L H"]
    moe: MoEParams[Array]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["embed", "layers", "norm", "predict"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class Params:
    """All parameters that the optimizer trains.

    Attributes:
      embed: [256, H] f32.
      layers: the L layers, stacked along a leading L.
      norm: [H] f32, gain of the norm before the prediction.
      predict: [H, 256] f32; None where `embed` is tied to it.
    """

    embed: Float[Array, "V H"]
    layers: Layer
    norm: Float[Array, " H"]
    predict: Float[Array, "H V"] | None


def init(key: PRNGKeyArray, model: ModelConfig) -> Params:
    """Returns float32 parameters, drawn from a normal distribution of standard deviation 1 / sqrt(fan in).

    The matrices whose result a layer adds to the residual stream are smaller by sqrt(2 L). Where `predict` is not
    tied, its scale is a fifth, so that the first predictions are near uniform.
    """
    width = model.d_model
    shrink = (2 * model.num_layers) ** -0.5
    wqkv, wo = _attention_shapes(model)

    def normal(key, shape):
        return jax.random.normal(key, shape, jnp.float32) * shape[0] ** -0.5

    def layer(key):
        qkv, out, moe_key = jax.random.split(key, 3)
        moe = moax.init(moe_key, model.moe(), axes=AXES)
        moe = dataclasses.replace(moe, wo=moe.wo * shrink, router_bias=None)
        gain = jnp.ones(width)
        return Layer(gain, normal(qkv, wqkv), normal(out, wo) * shrink, gain, moe)

    embed, predict, layers = jax.random.split(key, 3)
    return Params(
        embed=jax.random.normal(embed, (VOCAB, width), jnp.float32) * width**-0.5,
        layers=lax.map(layer, jax.random.split(layers, model.num_layers)),
        norm=jnp.ones(width),
        predict=None if model.tied else normal(predict, (width, VOCAB)) * 0.2,
    )


def count(model: ModelConfig) -> tuple[int, int]:
    """Returns (number of parameters, number of active parameters: those that one token is multiplied with)."""
    shapes = jax.eval_shape(partial(init, model=model), jax.random.key(0))
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    experts = sum(leaf.size for leaf in (shapes.layers.moe.wi, shapes.layers.moe.wo))
    return total, total - experts + experts * model.top_k // model.num_experts


def specs(model: ModelConfig) -> Params:
    """Returns `Params` of PartitionSpecs on the mesh that is set.

    Dense weights are sharded over (fsdp, ep), the MoE's as `moax.param_specs` says.
    """
    width = model.d_model
    wqkv, wo = _attention_shapes(model)
    # The type is Any, since specs take the place of the arrays of Params.
    replicated: Any = PartitionSpec()
    dense: Any = partial(dense_spec, AXES)

    def stacked(spec) -> Any:
        return PartitionSpec(None, *spec)

    moe = dataclasses.replace(moax.param_specs(model.moe(), AXES), router_bias=None)
    layer = Layer(
        norm_a=replicated,
        wqkv=stacked(dense(wqkv)),
        wo=stacked(dense(wo)),
        norm_m=replicated,
        moe=jax.tree.map(stacked, moe),
    )
    return Params(
        dense((VOCAB, width)),
        layer,
        replicated,
        None if model.tied else dense((width, VOCAB)),
    )


def _attention_shapes(model: ModelConfig) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the shapes of `Layer.wqkv` and `Layer.wo`."""
    heads, kv_heads, dim = model.heads
    return (model.d_model, (heads + 2 * kv_heads) * dim), (heads * dim, model.d_model)


def constrain(x: Array, spec: PartitionSpec) -> Array:
    """Returns x, sharded by `spec` over the mesh that is set; x itself where there is none."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return lax.with_sharding_constraint(x, spec)


def forward(
    params: Params,
    router_bias: Float[Array, "L E"] | None,
    tokens: Int[Array, "B S"],
    config: TrainConfig,
    quantized: QuantizedParams[Array] | None = None,
) -> tuple[Float[Array, "B S V"], MoEStats]:
    """Computes the logits of the next byte at each place of each sequence.

    Args:
      params, config: the parameters, and the settings of the run.
      router_bias: [L, E] f32, the selection bias; None where the router has none.
      tokens: [B, S] ints, the bytes.
      quantized: the experts' weights as `quantize` returns them; None: each block quantizes its own.

    Returns:
      logits [B, S, 256] f32: logits[b, s] predicts tokens[b, s + 1]; and the MoEStats of the L layers, each array of
      which has a leading L.
    """
    model = config.model
    options = config.options
    dtype = jnp.dtype(config.dtype)
    rows = token_spec(AXES, ndim=3)
    rotation = _rotation(tokens.shape[1], model.heads[-1])
    attention = pick_attention(config)
    settings = dict(
        engine=options.engine,
        kernels=options.kernels,
        grad_reduce_dtype=options.grad_reduce_dtype,
    )
    dense = partial(ops.dense, axes=AXES, **settings)
    project = partial(dense, recipe=options.recipe)

    def layer(x, stacked):
        p, bias, quantized_experts = stacked
        x = constrain(x, rows)
        with jax.named_scope("attention"):
            x = x + _attention(_rms_norm(x, p.norm_a), p, rotation, model.heads, project, attention)
        moe = dataclasses.replace(p.moe, router_bias=bias)
        with jax.named_scope("moe"):
            y, stats = moax.moe(
                _rms_norm(x, p.norm_m),
                moe,
                model.moe(),
                options=options,
                quantized=quantized_experts,
            )
        return x + y, stats

    # The lookup is a matmul with one-hot rows, since the transpose of a lookup in a sharded table is a scatter. The
    # factor gives embeddings unit size. Beside smaller embeddings the mean that attention adds would dominate every
    # token, and the router would send all tokens to one expert.
    x = dense(jax.nn.one_hot(tokens, VOCAB, dtype=dtype), params.embed) * model.d_model**0.5
    x, stats = lax.scan(_remat(layer, config.remat), x, (params.layers, router_bias, quantized))
    predict = params.embed.T if params.predict is None else params.predict
    return dense(_rms_norm(x, params.norm), predict).astype(jnp.float32), stats


def quantize(params: Params, config: TrainConfig) -> QuantizedParams[Array]:
    """Returns the weights of the experts of all layers, quantized or rounded once, each array with a leading L."""
    model = config.model
    options = config.options

    def one(moe: MoEParams[Array]) -> QuantizedParams[Array]:
        if model.balance == "bias":
            bias = jnp.zeros(model.num_experts, jnp.float32)
        else:
            bias = None
        moe = dataclasses.replace(moe, router_bias=bias)
        return moax.quantize_params(
            moe,
            model.moe(),
            options=options,
            dtype=jnp.dtype(config.dtype),
        )

    return lax.map(one, params.layers.moe)


def _remat(layer, policy_name: str):
    """Returns `layer`, which recomputes in backward as `TrainConfig.remat` says."""
    if policy_name == "none":
        return layer
    if policy_name == "moe":
        policy = jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES)
    else:
        policy = None
    return jax.checkpoint(layer, policy=policy)


def _attention(
    x,
    p: Layer,
    rotation,
    heads: tuple[int, int, int],
    project,
    implementation: Literal["cudnn", "xla"],
):
    """Computes causal attention with rotary positions, [B, S, H] -> [B, S, H]; `project` is its dense layer."""
    batch, seq, _ = x.shape
    num_heads, kv_heads, dim = heads
    qkv = project(x, p.wqkv).reshape(batch, seq, num_heads + 2 * kv_heads, dim)
    q, k, v = jnp.split(qkv, (num_heads, num_heads + kv_heads), axis=2)
    q = _rotate(q, rotation)
    k = _rotate(k, rotation)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return project(y.reshape(batch, seq, num_heads * dim), p.wo)


def pick_attention(config: TrainConfig) -> Literal["cudnn", "xla"]:
    """Returns the implementation of attention that `TrainConfig.attention` takes on the devices of this process.

    Raises:
      Unsupported: `attention="cudnn"` in float32, or with heads that its kernels do not take.
    """
    if config.attention == "xla":
        return "xla"
    dim = config.model.heads[-1]
    fits = config.dtype == "bfloat16" and dim % 8 == 0 and dim <= 128
    if config.attention == "cudnn":
        if not fits:
            raise moax.Unsupported(
                f"attention='cudnn' takes bfloat16 and heads of a multiple of 8, at most 128; "
                f"the run has {config.dtype} and heads of {dim}; take 'xla'"
            )
        return "cudnn"
    if fits and getattr(jax.devices()[0], "compute_capability", None) == "9.0":
        return "cudnn"
    return "xla"


def _rms_norm(x, gain):
    """Computes x / rms(x) * gain over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * gain).astype(x.dtype)


def _rotation(seq: int, dim: int):
    """Returns cos and sin of angle[s, i] = s * 10000^(-i / (dim / 2)), each [S, 1, dim / 2] f32."""
    rates = 10000.0 ** (-jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2))
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None, None] * rates
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x, rotation):
    """Applies RoPE to x [B, S, N, D]: the pair (x[b, s, n, i], x[b, s, n, i + D/2]) turns by angle[s, i]."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
