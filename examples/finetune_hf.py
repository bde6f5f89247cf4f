"""Fine-tunes the MoE layers of a published kind of model: from safetensors onto the mesh, some steps, and back.

The program makes its own checkpoint, a Qwen3-MoE of random weights without attention; one from a hub is read alike.
Embedding and head stay as they are; the loss is that of the next token in a fixed permutation.
Run: `python examples/finetune_hf.py`; 8 CPU devices are emulated where there is no GPU.
"""

import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

import moax
from moax import hf

VOCAB, BATCH, SEQ, STEPS = 64, 4, 32, 25
SIZES = {"hidden_size": 64, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2}
HF_CONFIG = SIZES | {"model_type": "qwen3_moe", "vocab_size": VOCAB, "num_hidden_layers": 2, "norm_topk_prob": True}
OPTIMIZER = optax.adamw(1e-3, mask=moax.trainable_mask)


def make_checkpoint(folder: Path) -> None:
    """Random weights in bfloat16, under the names of a published model."""
    config, keys = hf.config_from_hf(HF_CONFIG), jax.random.split(jax.random.key(0), 4)
    embed, head = (jax.random.normal(key, (VOCAB, config.d_model), jnp.bfloat16) for key in keys[:2])
    others = {"model.embed_tokens.weight": embed, "lm_head.weight": head / math.sqrt(config.d_model)}
    layers = {i: moax.init(keys[2 + i], config, dtype=jnp.bfloat16) for i in hf.moe_layers(HF_CONFIG)}
    hf.save_hf(folder, layers, config, "qwen3_moe", others=others, hf_config=HF_CONFIG)


def loss_of(layers, frozen, config, tokens, following):
    x = frozen["model.embed_tokens.weight"][tokens]
    for params in layers.values():
        x = x + moax.moe(x, params, config)[0]
    logits = jax.nn.standardize(x) @ frozen["lm_head.weight"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    count = jax.device_count()
    ep = math.gcd(4, count)
    mesh = jax.make_mesh((count // ep, ep), ("fsdp", "ep"), (jax.sharding.AxisType.Auto,) * 2)
    following = jax.random.permutation(jax.random.key(1), VOCAB)
    with tempfile.TemporaryDirectory() as name, jax.set_mesh(mesh):
        source, tuned = Path(name, "source"), Path(name, "tuned")
        make_checkpoint(source)
        config, checkpoint = hf.config_from_hf(source), hf.Checkpoint(source)
        layers = {i: hf.params_from_hf(checkpoint, config, layer=i, dtype=jnp.float32) for i in hf.moe_layers(source)}
        frozen = {key: jnp.asarray(checkpoint[key], jnp.float32) for key in checkpoint if ".mlp." not in key}

        @jax.jit
        def step(layers, state, tokens):
            loss, grads = jax.value_and_grad(loss_of)(layers, frozen, config, tokens, following[tokens])
            updates, state = OPTIMIZER.update(grads, state, layers)
            return optax.apply_updates(layers, updates), state, loss

        state, losses = jax.jit(OPTIMIZER.init)(layers), []
        for i in range(STEPS):
            tokens = jax.random.randint(jax.random.key(i), (BATCH * count, SEQ), 0, VOCAB)
            layers, state, loss = step(layers, state, tokens)
            losses.append(float(loss))
        hf.save_hf(tuned, layers, config, others=checkpoint, dtype=jnp.bfloat16)
        written, wi = hf.Checkpoint(tuned), layers[0].wi
        same = sum(jnp.array_equal(written[key], checkpoint[key]) for key in written)
        print(
            f"fine-tuning on {count} devices: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps; each holds "
            f"{wi.addressable_shards[0].data.shape} of wi {wi.shape}; wrote {len(written)} tensors, {same} as they were"
        )


if __name__ == "__main__":
    main()
