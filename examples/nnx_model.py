"""A flax.nnx model with `moax.nnx.MoE`, its expert weights sharded and quantized to FP8, trained by optax.

The model learns which token follows which in a fixed permutation; the loss starts at ln(64) = 4.16 or above.
Run: `python examples/nnx_model.py [--devices N]`; N CPU devices are emulated where there is no GPU.
"""

import argparse
import math

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import moax
from moax.nnx import MoE

VOCAB, BATCH, SEQ, STEPS = 64, 4, 32, 25


class Model(nnx.Module):
    """Embedding, one MoE layer with a residual, and the logits of the next token."""

    def __init__(self, config: moax.MoEConfig, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, config.d_model, rngs=rngs)
        self.norm = nnx.RMSNorm(config.d_model, rngs=rngs)
        self.moe = MoE(config, recipe="fp8_block", dtype=jnp.bfloat16, rngs=rngs)
        self.out = nnx.Linear(config.d_model, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        y, stats = self.moe(self.norm(x))
        return self.out(x + y.astype(x.dtype)), stats


@nnx.jit
def train_step(model, optimizer, tokens, following):
    def loss_of(model):
        logits, stats = model(tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, following)
        return losses.mean() + stats.aux_loss, stats

    (loss, stats), grads = nnx.value_and_grad(loss_of, has_aux=True)(model)
    optimizer.update(model, grads)
    return loss, stats


def main(devices: int):
    jax.config.update("jax_num_cpu_devices", devices)
    count = jax.device_count()
    ep = math.gcd(4, count)
    router = moax.RouterConfig(aux_loss=0.01)
    config = moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2, router=router)
    following = jax.random.permutation(jax.random.key(1), VOCAB)
    with jax.set_mesh(jax.make_mesh((count // ep, ep), ("fsdp", "ep"), (jax.sharding.AxisType.Auto,) * 2)):
        model = Model(config, nnx.Rngs(0))  # made under the mesh, so each device makes its shard of the experts
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        losses = []
        for step in range(STEPS):
            tokens = jax.random.randint(jax.random.key(step), (BATCH * count, SEQ), 0, VOCAB)
            loss, stats = train_step(model, optimizer, tokens, following[tokens])
            losses.append(float(loss))
        shard = model.moe.params.wi.addressable_shards[0].data.shape
    print(
        f"nnx model on {count} devices: loss {losses[0]:.2f} -> {losses[-1]:.2f} in {STEPS} steps; "
        f"a device holds {shard} of wi {model.moe.params.wi.shape}; {int(stats.dropped)} dropped"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="CPU devices to emulate: a power of two (default: 8)")
    main(parser.parse_args().devices)
