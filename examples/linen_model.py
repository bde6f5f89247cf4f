"""A flax.linen model with `moax.linen.MoEBlock`: boxed variables that say how they are sharded, trained by optax.

The model learns which token follows which in a fixed permutation; the loss starts at ln(64) = 4.16 or above.
Run: `python examples/linen_model.py [--devices N]`; N CPU devices are emulated where there is no GPU.
"""

import argparse
import math

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import moax
from moax.linen import MoEBlock

VOCAB, BATCH, SEQ, STEPS = 64, 4, 32, 25


class Model(nn.Module):
    """Embedding, one MoE layer with a residual, and the logits of the next token."""

    config: moax.MoEConfig

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, self.config.d_model)(tokens)
        y, stats = MoEBlock(self.config, recipe="fp8_block", dtype=jnp.bfloat16, name="moe")(nn.RMSNorm()(x))
        return nn.Dense(VOCAB)(x + y.astype(x.dtype)), stats


def main(devices: int):
    jax.config.update("jax_num_cpu_devices", devices)
    count = jax.device_count()
    ep = math.gcd(4, count)
    router = moax.RouterConfig(aux_loss=0.01)
    model = Model(moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2, router=router))
    following = jax.random.permutation(jax.random.key(1), VOCAB)
    optimizer = optax.adamw(1e-2)

    @jax.jit
    def train_step(params, state, tokens, following):
        def loss_of(params):
            logits, stats = model.apply({"params": params}, tokens)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, following)
            return losses.mean() + stats.aux_loss, stats

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, stats

    with jax.set_mesh(jax.make_mesh((count // ep, ep), ("fsdp", "ep"), (jax.sharding.AxisType.Auto,) * 2)):
        tokens = jnp.zeros((BATCH * count, SEQ), jnp.int32)
        boxed = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
        told = nn.get_partition_spec(boxed)["moe"]["wi"]
        params = nn.unbox(boxed)
        state, losses = optimizer.init(params), []
        for step in range(STEPS):
            tokens = jax.random.randint(jax.random.key(step), tokens.shape, 0, VOCAB)
            params, state, loss, stats = train_step(params, state, tokens, following[tokens])
            losses.append(float(loss))
    print(
        f"linen model on {count} devices: loss {losses[0]:.2f} -> {losses[-1]:.2f} in {STEPS} steps; "
        f"wi is laid out by {told}; {int(stats.dropped)} dropped"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="CPU devices to emulate: a power of two (default: 8)")
    main(parser.parse_args().devices)
