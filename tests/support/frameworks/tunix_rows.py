"""tunix's Qwen3-MoE beside the same model with moax.adapters.tunix."""

from __future__ import annotations

import dataclasses

from rows import DEVICES, compare, emulate, perturb

emulate()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from tunix.models.qwen3 import model  # noqa: E402

from moax.adapters import tunix as adapter  # noqa: E402

NAME = "tunix 0.1.7"
THEIRS = model.MoELayer.__call__
CONFIG = model.ModelConfig(
    num_layers=2,
    vocab_size=256,
    embed_dim=64,
    hidden_dim=128,
    num_heads=4,
    head_dim=16,
    num_kv_heads=4,
    rope_theta=10_000,
    norm_eps=1e-6,
    num_experts=8,
    num_experts_per_tok=2,
)
MESHES = {"one device": (1, 1), "fsdp8": (8, 1), "fsdp4 tp2": (4, 2)}


def results(config: model.ModelConfig, sizes: tuple[int, int]):
    """Returns the logits and all gradients on a mesh of tunix's axes, its parameters laid out by its own shardings."""
    count = sizes[0] * sizes[1]
    mesh = jax.make_mesh(
        sizes,
        ("fsdp", "tp"),
        (jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:count],
    )
    with jax.set_mesh(mesh):
        graph, state, rest = nnx.split(model.Qwen3(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
        state = jax.jit(perturb, out_shardings=nnx.get_named_sharding(state, mesh))(state)
        tokens = jax.random.randint(jax.random.key(1), (DEVICES, 16), 0, config.vocab_size)
        tokens = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("fsdp")))
        positions = jnp.broadcast_to(jnp.arange(16), tokens.shape)
        dy = jax.random.normal(jax.random.key(2), (*tokens.shape, config.vocab_size)) / tokens.size
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((16, 16), bool)), (DEVICES, 16, 16))

        def loss(state):
            logits, _ = nnx.merge(graph, state, rest)(tokens, positions, None, mask)
            return jnp.vdot(logits, dy), logits

        (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    return logits, nnx.to_pure_dict(grads)


def main() -> None:
    """Prints a row for each mesh, and one of a single layer with fp8_block.

    A second layer would route a few tokens to other experts, since its logits are those of quantized values.
    """
    cases = [(CONFIG, mesh, None) for mesh in MESHES]
    for config, mesh, recipe in [
        *cases,
        (dataclasses.replace(CONFIG, num_layers=1), "fsdp4 tp2", "fp8_block"),
    ]:
        model.MoELayer.__call__ = THEIRS
        want = results(config, MESHES[mesh])
        adapter.install(recipe=recipe)
        what = "Qwen3-MoE" if recipe is None else "Qwen3-MoE, one layer"
        compare(NAME, what, mesh, recipe, results(config, MESHES[mesh]), want)


if __name__ == "__main__":
    main()
