"""bytes [B, S] -> logits [B, S, 256]: embed; L times (x += attention(norm(x)); x += moe(norm(x))); norm; predict.

The layers are one `lax.scan` over parameters stacked along a leading L, so that compile time does not grow with L.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

import moax
from moax import Axes, MoEParams, MoEStats, backend, ops
from moax.mesh.place import constrain
from moax.mesh.specs import spec as make_spec
from moax.options import Options
from moax.sharding import dense_spec, token_spec
from moax.train.presets import VOCAB, ModelConfig

MoEBlock = Callable[..., tuple[Float[Array, "B S H"], MoEStats]]


@partial(jax.tree_util.register_dataclass, data_fields=["norm_a", "wqkv", "wo", "norm_m", "moe"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer; in `Params` every array has a leading L. `moe.router_bias` is None: the selection bias is not trained.

    Attributes:
      norm_a: [H] f32, gain of the norm before attention.
      wqkv: [H, 3 H] f32. wo: [H, H] f32.
      norm_m: [H] f32, gain of the norm before the MoE.
      moe: see `moax.MoEParams`.
    """

    norm_a: Float[Array, "*L H"]
    wqkv: Float[Array, "*L H H3"]
    wo: Float[Array, "*L H H"]
    norm_m: Float[Array, "*L H"]
    moe: MoEParams[Array]


@partial(jax.tree_util.register_dataclass, data_fields=["embed", "layers", "norm", "predict"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Params:
    """All that is trained: embed [256, H], the stacked layers, the last norm [H], predict [H, 256] or None (tied)."""

    embed: Float[Array, "V H"]
    layers: Layer
    norm: Float[Array, " H"]
    predict: Float[Array, "H V"] | None


@dataclasses.dataclass(frozen=True)
class Execution:
    """How the model runs: how its blocks do, in which dtype, and what is computed again; see `TrainConfig`."""

    options: Options = Options()
    dtype: str = "float32"
    remat: str = "none"


def init(key: PRNGKeyArray, model: ModelConfig, axes: Axes = Axes()) -> Params:
    """Float32 parameters: normal, 1 / sqrt(fan in), and smaller by sqrt(2 L) where a layer adds to the residual.

    Untied predictions begin near uniform.
    """
    width, shrink = model.d_model, (2 * model.num_layers) ** -0.5

    def normal(key, shape):
        return jax.random.normal(key, shape, jnp.float32) * shape[0] ** -0.5

    def layer(key):
        qkv, out, moe_key = jax.random.split(key, 3)
        moe = moax.init(moe_key, model.moe(), axes=axes)
        moe = dataclasses.replace(moe, wo=moe.wo * shrink, router_bias=None)
        gain = jnp.ones(width)
        return Layer(gain, normal(qkv, (width, 3 * width)), normal(out, (width, width)) * shrink, gain, moe)

    embed, predict, layers = jax.random.split(key, 3)
    return Params(
        embed=jax.random.normal(embed, (VOCAB, width), jnp.float32) * width**-0.5,
        layers=lax.map(layer, jax.random.split(layers, model.num_layers)),
        norm=jnp.ones(width),
        predict=None if model.tied else normal(predict, (width, VOCAB)) * 0.2,
    )


def count(model: ModelConfig) -> tuple[int, int]:
    """(all parameters, those that one token meets)."""
    shapes = jax.eval_shape(partial(init, model=model), jax.random.key(0))
    total = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    experts = sum(leaf.size for leaf in (shapes.layers.moe.wi, shapes.layers.moe.wo))
    return total, total - experts + experts * model.top_k // model.num_experts


def specs(model: ModelConfig, axes: Axes = Axes()) -> Params:
    """`Params` of PartitionSpecs on the mesh that is set: dense weights over (fsdp, ep), the MoE's as it wants them."""
    width = model.d_model
    spec: Any = make_spec  # Any: specs stand where Params has arrays
    dense: Any = partial(dense_spec, axes)

    def stacked(one) -> Any:
        return spec(None, *one)

    moe = dataclasses.replace(moax.param_specs(model.moe(), axes), router_bias=None)
    layer = Layer(
        norm_a=spec(),
        wqkv=stacked(dense((width, 3 * width))),
        wo=stacked(dense((width, width))),
        norm_m=spec(),
        moe=jax.tree.map(stacked, moe),
    )
    return Params(dense((VOCAB, width)), layer, spec(), None if model.tied else dense((width, VOCAB)))


def forward(
    params: Params,
    router_bias: Float[Array, "L E"] | None,
    tokens: Int[Array, "B S"],
    model: ModelConfig,
    execution: Execution,
    block: MoEBlock = moax.moe,
) -> tuple[Float[Array, "B S V"], MoEStats]:
    """Float32 logits of the next byte at each place, and the statistics of the L layers, each with a leading L.

    `block` is called as `moax.moe`, which it stands for.
    """
    options, dtype, axes = execution.options, jnp.dtype(execution.dtype), execution.options.axes
    rows = token_spec(axes, ndim=3)
    rotation = _rotation(tokens.shape[1], model.d_model // model.num_heads)
    dense = partial(ops.dense, axes=axes, engine=options.engine, kernels=options.kernels)
    project = partial(dense, recipe=options.recipe)

    def layer(x, stacked):
        p, bias = stacked
        x = constrain(x, rows)
        x = x + _attention(_rms_norm(x, p.norm_a), p, rotation, model.num_heads, project)
        moe = dataclasses.replace(p.moe, router_bias=bias)
        y, stats = block(
            _rms_norm(x, p.norm_m),
            moe,
            model.moe(),
            options,
        )
        return x + y, stats

    # A product with one-hot rows, since the transpose of a lookup in a sharded table is a scatter. Scaled to unit size:
    # beside smaller embeddings, what attention averages would be most of every token, and all would go to one expert.
    x = dense(jax.nn.one_hot(tokens, VOCAB, dtype=dtype), params.embed) * model.d_model**0.5
    x, stats = lax.scan(_remat(layer, execution.remat), x, (params.layers, router_bias))
    predict = params.embed.T if params.predict is None else params.predict
    return dense(_rms_norm(x, params.norm), predict).astype(jnp.float32), stats


def _remat(layer, how: str):
    if how == "none":
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES) if how == "moe" else None
    return jax.checkpoint(layer, policy=policy)


def _attention(x, p: Layer, rotation, heads: int, dense):
    """Causal attention of N heads with rotary positions, [B, S, H] -> [B, S, H]."""
    batch, seq, width = x.shape
    qkv = dense(x, p.wqkv).reshape(batch, seq, 3, heads, width // heads)
    q, k, v = _rotate(qkv[:, :, 0], rotation), _rotate(qkv[:, :, 1], rotation), qkv[:, :, 2]
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=_pick_attention(q))
    return dense(y.reshape(batch, seq, width), p.wo)


def _pick_attention(q) -> Literal["cudnn", "xla"]:
    """cuDNN's kernels, which hold no [S, S] of scores in memory, where q fits them on Hopper; elsewhere XLA."""
    fits = q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128
    return "cudnn" if backend.on_hopper() and fits else "xla"


def _rms_norm(x, gain):
    """x / rms(x) * gain over the last dim, in float32."""
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * gain).astype(x.dtype)


def _rotation(seq: int, dim: int):
    """cos, sin of place * 10000^(-i / (dim / 2)), each [S, 1, dim / 2] f32."""
    rates = 10000.0 ** (-jnp.arange(dim // 2, dtype=jnp.float32) / (dim // 2))
    angles = jnp.arange(seq, dtype=jnp.float32)[:, None, None] * rates
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x, rotation):
    """RoPE on [B, S, N, D]: the pairs (x[i], x[i + D/2]) turn by their place's angle."""
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
