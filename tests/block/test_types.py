"""What the block says of parameters that do not fit: which, what they have, and what they need.

Covers: every parameter and every check of `check_params`. tests/block/test_moe_behaviour.py has the errors of tokens.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import moax
from moax.params import DIMS, check_params, param_shapes
from moax.types import QArray

H, F, E, S, L = 32, 48, 8, 16, 24
FULL = moax.MoEConfig(
    H,
    F,
    E,
    2,
    use_bias=True,
    shared_d_ff=S,
    shared_gate=True,
    d_latent=L,
    router=moax.RouterConfig(bias=True, logits_bias=True, expert_scale=True),
)
BARE = moax.MoEConfig(H, F, E, 2, activation="silu")
SHAPES = dict(
    router=(H, E),
    wi=(E, L, 2, F),
    wo=(E, F, L),
    router_bias=(E,),
    logits_bias=(E,),
    bi=(E, 2, F),
    bo=(E, L),
    shared_wi=(H, 2, S),
    shared_wo=(S, H),
    shared_gate=(H,),
    expert_scale=(E,),
    latent_down=(H, L),
    latent_up=(L, H),
)
NAMES = tuple(SHAPES)


def needs(name):
    return "it must be [" + ", ".join(f"{dim}={size}" for dim, size in zip(DIMS[name], SHAPES[name], strict=True)) + "]"


def zeros(config, dtype=jnp.float32):
    return jax.tree.map(
        lambda s: jnp.zeros(s, dtype),
        param_shapes(config),
        is_leaf=lambda s: isinstance(s, tuple),
    )


def refused(params, config, message, **options):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_params(params, config, **options)


def test_shapes():
    """Breaks if a parameter changes its layout, which checkpoints and the layers rely on."""
    assert dataclasses.asdict(param_shapes(FULL)) == SHAPES
    bare = dataclasses.asdict(param_shapes(BARE))
    assert bare == dict.fromkeys(NAMES) | dict(router=(H, E), wi=(E, H, 1, F), wo=(E, F, H))
    expected = bare | dict(bi=(E, 1, F), bo=(E, H))
    assert dataclasses.asdict(param_shapes(BARE, optional=True)) == expected


@pytest.mark.parametrize("config", [FULL, BARE], ids=["full", "bare"])
def test_parameters_that_fit(config):
    """Breaks if `init` makes what `moe` refuses, or a dtype of the user's own is refused."""
    check_params(moax.init(jax.random.key(0), config), config)
    check_params(zeros(config, jnp.bfloat16), config)


@pytest.mark.parametrize("present", [(), ("bi",), ("bo",), ("bi", "bo")])
@pytest.mark.parametrize("use_bias", [False, True])
def test_any_subset_of_expert_biases(use_bias, present):
    """Breaks if expert biases must come in pairs, or if `use_bias`, which `init` alone reads, forbids them."""
    config = dataclasses.replace(FULL, use_bias=use_bias)
    check_params(
        dataclasses.replace(zeros(FULL), **{n: None for n in {"bi", "bo"} - set(present)}),
        config,
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_does_not_fit(name):
    """Breaks if a missing parameter is left out of the sum in silence, one that the config does not know is ignored,
    integers are multiplied as if they were weights, or a wrong shape is broadcast."""
    have = SHAPES[name]
    if name not in ("bi", "bo"):
        wanted = f"params.{name} is None; this config needs an array of shape {have}"
        refused(dataclasses.replace(zeros(FULL), **{name: None}), FULL, wanted)
    if getattr(param_shapes(BARE, optional=True), name) is None:
        params = dataclasses.replace(zeros(BARE), **{name: getattr(zeros(FULL), name)})
        refused(
            params,
            BARE,
            f"params.{name} is given, but the config has no such parameter; pass None",
        )
    for dtype in ("int32", "uint8", "bool"):
        params = dataclasses.replace(zeros(FULL), **{name: jnp.zeros(have, dtype)})
        refused(params, FULL, f"params.{name} has dtype {dtype}; it must be floating point")
    for shape in {(*have[:-1], have[-1] + 1), (1, *have), have[::-1], have[1:]} - {have}:
        params = dataclasses.replace(zeros(FULL), **{name: jnp.zeros(shape)})
        refused(params, FULL, f"params.{name} has shape {shape}; {needs(name)}")


def test_shards_may_have_any_divisor():
    """Breaks if shards inside the user's own `shard_map` are refused, or whatever is no shard is taken."""
    shard = dataclasses.replace(zeros(FULL), wi=jnp.zeros((E // 4, L // 2, 2, F)))
    check_params(shard, FULL, local=True)
    refused(shard, FULL, f"params.wi has shape {shard.wi.shape}; {needs('wi')}")
    for shape in ((3, L, 2, F), (E, 2 * L, 2, F), (0, L, 2, F), (E, L, F)):
        params = dataclasses.replace(zeros(FULL), wi=jnp.zeros(shape))
        refused(params, FULL, f"params.wi has shape {shape}; {needs('wi')}", local=True)


def test_pytrees():
    """Breaks if a value cannot cross jit, scan or a checkpoint: children are the arrays, everything else is static."""
    leaves, tree = jax.tree.flatten(zeros(FULL))
    assert len(leaves) == len(NAMES) and tree == jax.tree.structure(zeros(FULL))
    q = QArray(jnp.zeros((4, 4), jnp.uint8), jnp.ones((4, 1)), "e4m3", (1, 4))
    assert len(jax.tree.leaves(q)) == 2
    assert jax.tree.structure(q) != jax.tree.structure(dataclasses.replace(q, dtype="e5m2"))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(zeros(FULL))]
    assert paths == [f".{name}" for name in NAMES]
