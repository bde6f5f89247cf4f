"""No array of size 0 enters a program, since XLA's pass from Shardy to GSPMD crashes on one that leaves a `shard_map`.

Covers: the block with its gradients and the ops, by both implementations; all named policies of `jax.checkpoint`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from support import TOKENS, make_mesh, make_params, mark_rest, put, random, rel_norm, spec
from support.block import QUANTIZED
from support.gpus import pretend

CONFIG = moax.MoEConfig(64, 96, 8, 2)
T = 64


def empty_arrays(jaxpr) -> Iterator[str]:
    """What makes or reads an array of size 0 in a jaxpr, or in one inside it."""
    for eqn in jaxpr.eqns:
        shapes = [getattr(v.aval, "shape", ()) for v in (*eqn.invars, *eqn.outvars)]
        if any(0 in shape for shape in shapes):
            yield f"{eqn.primitive.name}: {shapes}"
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from empty_arrays(inner)


BLOCKS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (dict(), dict(recipe="fp8_block")),
    (dict(use_bias=True), dict(exchange="all_to_all")),
    (dict(capacity_factor=1.0), dict(recipe="fp8_block", buffer_factor=None)),
    (dict(shared_d_ff=32), dict(recipe="mxfp8", exchange="all_to_all", save_rows=False)),
    (dict(d_latent=32), dict(recipe="fp8_block")),
]


@pytest.mark.parametrize(("fields", "options"), mark_rest(BLOCKS, 2))
@pytest.mark.parametrize("kernels", ["xla", "hopper"])
def test_block(monkeypatch, kernels, fields, options):
    """Breaks if a block makes an array of size 0, such as the product of a group without rows."""
    config = moax.MoEConfig(256, 256, 8, 2, **fields)
    dtype = jnp.float32
    if kernels == "hopper":
        pretend(monkeypatch)
        dtype = jnp.bfloat16
    mesh = make_mesh("2x4", "explicit")
    params = make_params(config)
    x = random(1, 256, config.d_model).astype(dtype)
    with jax.set_mesh(mesh):
        params = put(mesh, moax.param_specs(config), params)
        x = put(mesh, spec("2x4", TOKENS), x)

        def loss(x, params):
            y, stats = moax.moe(x, params, config, kernels=kernels, **options)
            return jnp.sum(y.astype(jnp.float32) ** 2) + stats.aux_loss

        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, params).jaxpr
    assert not list(empty_arrays(jaxpr))


@pytest.mark.parametrize("recipe", [None, "fp8_block"])
@pytest.mark.parametrize("kernels", ["xla", "hopper"])
def test_ops(monkeypatch, kernels, recipe):
    """Breaks if an op makes an array of size 0."""
    dtype = jnp.float32
    if kernels == "hopper":
        pretend(monkeypatch)
        dtype = jnp.bfloat16
    x = jnp.asarray(random(1, 256, 256), dtype)
    w = jnp.asarray(random(2, 4, 256, 256), dtype)
    sizes = jnp.asarray([100, 0, 28, 128], jnp.int32)
    experts = jnp.asarray(np.arange(512).reshape(256, 2) % 4, jnp.int32)
    weights = jnp.ones((256, 2), jnp.float32)

    def products(x, w):
        y = moax.ops.grouped_matmul(x, w, sizes, recipe=recipe, kernels=kernels)
        return jnp.sum(
            (y + moax.ops.dense(x, w[0], recipe=recipe, kernels=kernels)).astype(jnp.float32) ** 2,
        )

    def rows(x):
        sorted_rows, plan = moax.ops.permute(x, experts, 4, kernels=kernels)
        return jnp.sum(moax.ops.unpermute(sorted_rows, plan, weights, kernels=kernels).astype(jnp.float32) ** 2)

    def loss_of_sequences(logits):
        router = moax.RouterConfig(sequence_aux_loss=1.0)
        return moax.route(logits, router, 2, sequences=experts[:, 0], kernels=kernels).aux_loss

    for jaxpr in (
        jax.make_jaxpr(jax.grad(products, (0, 1)))(x, w),
        jax.make_jaxpr(jax.grad(rows))(x),
        jax.make_jaxpr(jax.grad(loss_of_sequences))(x),
    ):
        assert not list(empty_arrays(jaxpr.jaxpr))


POLICIES = [
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
]
# The way to run on a mesh, the recipe and the policy; a dict keeps the first of two equal cases.
POLICY_CASES = dict.fromkeys(
    [
        ("explicit", None, "dots_saveable"),
        ("shard_map", "fp8_block", "dots_with_no_batch_dims_saveable"),
        *itertools.product(("custom_partitioning", "shard_map", "explicit"), (None, "fp8_block"), POLICIES),
    ]
)


def test_all_policies_are_named():
    """Breaks if JAX has a policy without arguments that `test_policies` does not run, by this or by another name."""
    policies = vars(jax.checkpoint_policies)
    names = {name for name in policies if name.islower() and not name.startswith(("_", "save_", "offload_"))}
    assert {policies[name] for name in names} == {policies[name] for name in POLICIES}


def gradients(f, *operands):
    """The gradients of a block, compiled."""
    return jax.jit(jax.grad(lambda x, params: jnp.sum(f(x, params) ** 2), (0, 1)))(*operands)


@functools.cache
def case_of_policies(way, recipe):
    """The mesh, the block, its operands, and its gradients without `jax.checkpoint`."""
    mesh = make_mesh("2x4", way)
    engine = "shard_map" if way == "shard_map" else "auto"

    def block(x, params):
        return moax.moe(x, params, CONFIG, recipe=recipe, engine=engine)[0]

    with jax.set_mesh(mesh):
        x = put(mesh, spec("2x4", TOKENS), random(1, T, CONFIG.d_model))
        params = put(mesh, moax.param_specs(CONFIG), make_params(CONFIG))
        return mesh, block, (x, params), gradients(block, x, params)


@pytest.mark.parametrize(("way", "recipe", "policy"), mark_rest(list(POLICY_CASES), 2))
def test_policies(way, recipe, policy):
    """Breaks if a policy saves what crashes the compiler, or what makes other gradients."""
    mesh, block, operands, want = case_of_policies(way, recipe)
    with jax.set_mesh(mesh):
        got = gradients(jax.checkpoint(block, policy=getattr(jax.checkpoint_policies, policy)), *operands)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_norm(a, b) < (2e-6 if recipe is None else QUANTIZED)
