"""`moax.hf.upcycle`: the MoE layer of a dense checkpoint computes what the dense FFN does.

Covers: copies and shards of the FFN, routers, dtypes, a file and a mapping, a mesh; what is refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import moax
from moax import MoEConfig, RouterConfig, Unsupported, hf
from support import make_mesh, random, rel_error

H, D = 32, 96
DENSE = {
    "gate_proj.weight": random(1, D, H) * H**-0.5,
    "up_proj.weight": random(2, D, H) * H**-0.5,
    "down_proj.weight": random(3, H, D) * D**-0.5,
}
X = random(4, 24, H)
CASES = {
    "copies": MoEConfig(H, D, 4, 2),
    "two shards, many copies": MoEConfig(H, D // 2, 8, 4, router=RouterConfig(score="sigmoid", scale=2.5, bias=True)),
    "three shards of one copy each": MoEConfig(H, D // 3, 12, 3, router=RouterConfig(order="topk_then_score")),
    "groups": MoEConfig(H, D // 2, 16, 4, router=RouterConfig(score="sqrt_softplus", num_groups=4, top_groups=2)),
    "factors at the hidden": MoEConfig(
        H, D // 2, 8, 2, weights_at="hidden", router=RouterConfig(expert_scale=True, logits_bias=True)
    ),
}


def dense(x, tensors=DENSE):
    """The dense FFN in float64."""
    gate, up, down = (tensors[f"{name}_proj.weight"].astype(np.float64) for name in ("gate", "up", "down"))
    h = x @ gate.T
    return (h / (1 + np.exp(-h)) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("name", CASES)
def test_the_block_is_the_dense_ffn(name):
    """Breaks if a shard is missing or twice, a factor is wrong, or a token takes a part of a copy."""
    params = hf.upcycle(DENSE, CASES[name], key=jax.random.key(0))
    y, stats = moax.moe(X, params, CASES[name])
    assert rel_error(y, dense(X)) < 2e-6
    assert (np.asarray(stats.tokens_per_expert) > 0).sum() > CASES[name].top_k


@pytest.mark.parametrize("router", [RouterConfig(normalize=False), RouterConfig(score="sigmoid", normalize=False)])
def test_a_router_of_zeros(router):
    """Breaks if weights that do not sum to a constant are not made up for where the router is 0."""
    config = MoEConfig(H, D // 2, 8, 4, router=router)
    y, _ = moax.moe(X, hf.upcycle(DENSE, config), config)
    assert rel_error(y, dense(X)) < 2e-6


def test_weights_are_copies():
    """Breaks if gate or up is not bit for bit that of the checkpoint, or a power of two rounds down."""
    params = hf.upcycle(DENSE, MoEConfig(H, D // 2, 4, 2))
    for e in range(4):
        part = slice(e % 2 * D // 2, (e % 2 + 1) * D // 2)
        np.testing.assert_array_equal(params.wi[e, :, 0], DENSE["gate_proj.weight"][part].T)
        np.testing.assert_array_equal(params.wi[e, :, 1], DENSE["up_proj.weight"][part].T)
        np.testing.assert_array_equal(params.wo[e], 2 * DENSE["down_proj.weight"][:, part].T)


def test_a_file_onto_a_mesh(tmp_path):
    """Breaks if a layer of a checkpoint is not found by its number, does not lie as param_specs says, or loses its
    dtype."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = {
        f"layers.{i}.feed_forward.{names[n.split('.')[0]]}.weight": v * (i + 1)
        for n, v in DENSE.items()
        for i in (0, 1)
    }
    tensors = {name: v.astype(jnp.bfloat16) for name, v in tensors.items()}
    tensors["layers.1.attention.wo.weight"] = random(5, H, H)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    config, mesh = CASES["two shards, many copies"], make_mesh("2x4")
    params = hf.upcycle(tmp_path, config, layer=1, key=jax.random.key(0), mesh=mesh)
    plain = hf.upcycle(hf.Checkpoint(tmp_path), config, prefix="layers.1.feed_forward.", key=jax.random.key(0))
    assert params.wi.dtype == jnp.bfloat16 and params.wi.sharding.spec == moax.param_specs(config, mesh=mesh).wi
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_without_a_gate():
    """Breaks if an FFN of two matrices is taken for a gated one."""
    config = MoEConfig(H, D, 4, 2, activation="relu2")
    tensors = {name: v for name, v in DENSE.items() if "gate" not in name}
    y, _ = moax.moe(X, hf.upcycle(tensors, config), config)
    hidden = np.maximum(X @ tensors["up_proj.weight"].T.astype(np.float64), 0) ** 2
    assert rel_error(y, hidden @ tensors["down_proj.weight"].T) < 2e-6


PLAIN = MoEConfig(H, D, 4, 2)
WRONG = {
    "width": (DENSE, MoEConfig(H, 40, 4, 2), {}, ValueError, "config.d_ff=40 must divide the width 96"),
    "top_k": (DENSE, MoEConfig(H, D // 4, 8, 2), {}, ValueError, "config.top_k=2 must be a multiple of the 4 shards"),
    "model width": (DENSE, MoEConfig(64, D, 4, 2), {}, ValueError, "d_model=64 needs"),
    "no gate": (DENSE, MoEConfig(H, D, 4, 2, "relu2"), {}, ValueError, "has no gate"),
    "no such layer": (DENSE, PLAIN, dict(layer=3), ValueError, "layer=3 has no dense FFN"),
    "both": (DENSE, PLAIN, dict(layer=3, prefix="a."), ValueError, "give one of them"),
    "shared expert": (DENSE, MoEConfig(H, D, 4, 2, shared_d_ff=8), {}, Unsupported, "shared_d_ff=8"),
    "bias": (DENSE | {"up_proj.bias": np.zeros(D)}, PLAIN, {}, Unsupported, "up_proj.bias"),
    "noise": (DENSE, PLAIN, dict(noise=-1), ValueError, "noise=-1 must be"),
    "groups": (
        DENSE, MoEConfig(H, D // 4, 8, 4, router=RouterConfig(num_groups=4, top_groups=2)), {}, ValueError,
        "whole copies",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    """Breaks if an FFN that cannot be cut so is cut nevertheless."""
    tensors, config, keywords, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        hf.upcycle(tensors, config, **keywords)
