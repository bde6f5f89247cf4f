"""Plain functions: a dict of parameters, an optax optimizer, and one jitted step that takes its state for itself.

`donate_argnums=0` lets XLA write the new weights and moments over the old ones, so memory holds them once. `init` of
optax runs without jit, so that a moment has the sharding of its weight. The model learns the outputs of a random MoE.
Run: `python examples/plain_optax.py`; 8 CPU devices are emulated where there is no GPU.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import moax

CONFIG = moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2, router=moax.RouterConfig(aux_loss=0.01))
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, mask=moax.trainable_mask))
BATCH, SEQ, STEPS = 4, 32, 20


class State(NamedTuple):
    """The argument and the result of a step."""

    params: dict[str, Any]
    optimizer: Any


def apply(params, x):
    """x + moe(x * scale), and its stats."""
    y, stats = moax.moe(x * params["scale"].astype(x.dtype), params["moe"], CONFIG, recipe="fp8_block")
    return x + y, stats


def init(key) -> State:
    params = {"scale": jnp.ones(CONFIG.d_model), "moe": moax.init(key, CONFIG)}
    return State(params, OPTIMIZER.init(params))


def train_step(state: State, x, target):
    def loss_of(params):
        y, stats = apply(params, x)
        return jnp.mean(jnp.square(y - target).astype(jnp.float32)) + stats.aux_loss

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    updates, optimizer = OPTIMIZER.update(grads, state.optimizer, state.params)
    return State(optax.apply_updates(state.params, updates), optimizer), loss


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    count = jax.device_count()
    ep = math.gcd(4, count)
    with jax.set_mesh(jax.make_mesh((count // ep, ep), ("fsdp", "ep"), (jax.sharding.AxisType.Auto,) * 2)):
        first = state = init(jax.random.key(0))
        teacher = init(jax.random.key(1)).params
        step, teach, losses = jax.jit(train_step, donate_argnums=0), jax.jit(apply), []
        for i in range(STEPS):
            x = jax.random.normal(jax.random.key(i), (BATCH * count, SEQ, CONFIG.d_model), jnp.bfloat16)
            state, loss = step(state, x, teach(teacher, x)[0])
            losses.append(float(loss))
    weight, moment = state.params["moe"].wi, optax.tree.get(state.optimizer, "mu")["moe"].wi
    print(
        f"plain optax on {count} devices: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps; "
        f"first weights donated: {first.params['moe'].wi.is_deleted()}; "
        f"moments sharded like weights: {moment.sharding.is_equivalent_to(weight.sharding, weight.ndim)}"
    )


if __name__ == "__main__":
    main()
