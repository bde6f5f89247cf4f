"""state, bytes [B, S + 1] -> state, metrics: one jitted update of the whole training state, by AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree, UInt8

import moax
from lm import model as lm
from lm.config import TrainConfig
from lm.model import Params
from moax import MoEStats, QuantizedParams
from moax.params import token_spec


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["step", "params", "router_bias", "optimizer"],
    meta_fields=[],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state that a checkpoint holds.

    Attributes:
      step: [] i32, the number of updates.
      params: the parameters that the optimizer trains.
      router_bias: [L, E] f32, which `moax.update_router_bias` alone changes; None unless balance is `bias`.
      optimizer: the state of optax.
    """

    step: Int[Array, ""]
    params: Params
    router_bias: Float[Array, "L E"] | None
    optimizer: PyTree


def schedule(config: TrainConfig) -> optax.Schedule:
    """Returns the schedule step -> learning rate: linear from 0 over `warmup`, then a cosine to a tenth at `steps`."""
    warmup = min(config.warmup, max(1, config.steps // 2))
    return optax.warmup_cosine_decay_schedule(
        0.0,
        config.lr,
        warmup,
        max(config.steps, warmup + 1),
        config.lr / 10,
    )


def optimizer(config: TrainConfig) -> Any:
    """Returns the `optax.GradientTransformation` of `Params`; its type is Any, as optax's types admit no dataclass."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            schedule(config),
            b1=0.9,
            b2=0.95,
            weight_decay=config.weight_decay,
            mask=_decays,
        ),
    )


def _decays(params: Params) -> PyTree:
    """Returns a tree that is True for trained matrices; vectors (biases, gains) have two dims in a stack of layers."""
    names = ("norm", "bi", "bo", "logits_bias")
    return jax.tree_util.tree_map_with_path(
        lambda path, trained: trained and not str(getattr(path[-1], "name", "")).startswith(names),
        moax.trainable_mask(params),
    )


def init_state(config: TrainConfig) -> TrainState:
    """Returns the state before the first step."""
    params = lm.init(jax.random.key(config.seed), config.model)
    bias = None
    if config.model.balance == "bias":
        bias = jnp.zeros((config.model.num_layers, config.model.num_experts), jnp.float32)
    return TrainState(jnp.zeros((), jnp.int32), params, bias, optimizer(config).init(params))


def shardings(config: TrainConfig, mesh) -> TrainState:
    """Returns a `TrainState` of NamedShardings on `mesh`, which must be the mesh that is set.

    A moment of the optimizer has the sharding of its parameter; counts and the bias are on every device.
    """
    params = jax.eval_shape(partial(lm.init, model=config.model), jax.random.key(0))
    tx = optimizer(config)
    specs = lm.specs(config.model)
    replicated = cast(Any, PartitionSpec())
    moments = optax.tree_utils.tree_map_params(
        tx,
        lambda _, spec: spec,
        jax.eval_shape(tx.init, params),
        specs,
        transform_non_params=lambda _: replicated,
    )
    bias = replicated if config.model.balance == "bias" else None
    return jax.tree.map(partial(NamedSharding, mesh), TrainState(replicated, specs, bias, moments))


def loss_fn(
    params: Params,
    router_bias,
    batch: UInt8[Array, "B S1"],
    config: TrainConfig,
    quantized: QuantizedParams[Array] | None = None,
):
    """Computes the training loss: mean cross entropy, plus the auxiliary losses of all layers.

    batch[b, s + 1] is the target of batch[b, s]. See `model.forward` for `quantized`.

    Returns:
      The loss [] f32 in nats a byte, and (cross entropy [] f32, MoEStats with a leading L).
    """
    tokens = batch.astype(jnp.int32)
    logits, stats = lm.forward(params, router_bias, tokens[:, :-1], config, quantized)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return entropy + stats.aux_loss.sum() + stats.z_loss.sum(), (entropy, stats)


def gradients(state: TrainState, batch: UInt8[Array, "B S1"], config: TrainConfig):
    """Computes the result of `jax.value_and_grad(loss_fn)`, in `config.microbatches` parts of the batch.

    Losses and gradients are means over the parts, counts are sums, and `rounds` is the most of any part. Microbatch n
    has the sequences n, n + N, n + 2 N, ..., so that no sequence leaves its device.
    """
    grad = jax.value_and_grad(loss_fn, has_aux=True)
    count = config.microbatches
    if count == 1:
        return grad(state.params, state.router_bias, batch, config)
    parts = batch.reshape(batch.shape[0] // count, count, -1).swapaxes(0, 1)
    parts = lm.constrain(parts, PartitionSpec(None, *_batch_spec()))
    with jax.named_scope("quantize_weights"):
        quantized = lm.quantize(state.params, config)

    def add(sums, part):
        (total, (entropy, stats)), grads = grad(
            state.params,
            state.router_bias,
            part,
            config,
            quantized,
        )
        with jax.named_scope("accumulate"):
            return jax.tree.map(jnp.add, sums, (total, entropy, grads)), stats

    zero = (
        jnp.zeros((), jnp.float32),
        jnp.zeros((), jnp.float32),
        jax.tree.map(jnp.zeros_like, state.params),
    )
    sums, stats = lax.scan(add, zero, parts)
    total, entropy, grads = jax.tree.map(lambda v: v / count, sums)
    stats = MoEStats(
        aux_loss=stats.aux_loss.mean(0),
        z_loss=stats.z_loss.mean(0),
        tokens_per_expert=stats.tokens_per_expert.sum(0),
        dropped=stats.dropped.sum(0),
        rounds=stats.rounds.max(0),
    )
    return (total, (entropy, stats)), grads


def train_step(
    state: TrainState, batch: UInt8[Array, "B S1"], config: TrainConfig
) -> tuple[TrainState, dict[str, Any]]:
    """Makes one update of the state.

    Returns:
      The state after the update, and the metrics: loss, extra_loss, grad_norm, lr, dropped, rounds (all []), and
      tokens_per_expert [L, E] i32.
    """
    (total, (entropy, stats)), grads = gradients(state, batch, config)
    with jax.named_scope("optimizer"):
        updates, opt_state = optimizer(config).update(grads, state.optimizer, state.params)
        params = jax.tree.map(jnp.add, state.params, updates)
        norm = optax.tree.norm(grads)
    bias = state.router_bias
    if bias is not None:
        update_bias = partial(moax.update_router_bias, rate=config.bias_rate)
        bias = jax.vmap(update_bias)(bias, stats.tokens_per_expert)
    metrics = {
        "loss": entropy,
        "extra_loss": total - entropy,
        "grad_norm": norm,
        "lr": schedule(config)(state.step),
        "dropped": stats.dropped.sum(),
        "rounds": stats.rounds.max(),
        "tokens_per_expert": stats.tokens_per_expert,
    }
    return TrainState(state.step + 1, params, bias, opt_state), metrics


def eval_step(
    state: TrainState,
    batch: UInt8[Array, "B S1"],
    config: TrainConfig,
) -> Float[Array, ""]:
    """Computes the mean cross entropy of a batch [B, S + 1] u8, in nats a byte."""
    return loss_fn(state.params, state.router_bias, batch, config)[1][0]


def jit_update(config: TrainConfig, mesh) -> tuple[jax.stages.Wrapped, tuple]:
    """Returns the jitted `train_step` on `mesh`, which must be set, and the ShapeDtypeStructs of its arguments."""
    states = shardings(config, mesh)
    like = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(partial(init_state, config)),
        states,
    )
    rows = NamedSharding(mesh, _batch_spec())
    batch = jax.ShapeDtypeStruct((config.batch, config.seq + 1), jnp.uint8, sharding=rows)
    # The metrics are on every device, so that every process can read them.
    metrics = NamedSharding(mesh, PartitionSpec())
    step = jax.jit(
        partial(train_step, config=config),
        out_shardings=(states, metrics),
        donate_argnums=0,
    )
    return step, (like, batch)


def jit_init(config: TrainConfig, mesh) -> jax.stages.Wrapped:
    """Returns the jitted `init_state` on `mesh`, which must be the mesh that is set."""
    return jax.jit(partial(init_state, config), out_shardings=shardings(config, mesh))


@dataclasses.dataclass(frozen=True)
class Program:
    """The compiled functions of a run on one mesh.

    Attributes:
      init: () -> the state before the first step.
      update: (state, batch) -> (state, metrics), as `train_step`; it donates the state.
      evaluate: (state, batch) -> cross entropy, as `eval_step`.
      rows: the sharding of a batch.
      like: the state as ShapeDtypeStructs.
    """

    init: Callable[[], TrainState]
    update: jax.stages.Compiled
    evaluate: jax.stages.Compiled
    rows: jax.sharding.NamedSharding
    like: TrainState


def build(config: TrainConfig, mesh) -> Program:
    """Compiles the program of a run on `mesh`, which must be the mesh that is set."""
    step, (like, batch) = jit_update(config, mesh)
    evaluate = jax.jit(
        partial(eval_step, config=config),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
    return Program(
        init=jit_init(config, mesh),
        update=step.lower(like, batch).compile(),
        evaluate=evaluate.lower(like, batch).compile(),
        rows=batch.sharding,
        like=like,
    )


def _batch_spec() -> PartitionSpec:
    """Returns the spec of a batch [B, S + 1]: its sequences are sharded, and their S + 1 bytes are not."""
    return PartitionSpec(token_spec(lm.AXES, ndim=3)[0])
