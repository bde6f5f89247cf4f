"""The whole block against reference.py in float32: outputs, statistics and every gradient, on every mesh, each way a
mesh lets an op run. The full matrix is `make test-matrix`; a covering part of it runs always."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import moax
from moax import reference
from moax.backend import log_once
from support import MESHES, TOKENS, Program, make_mesh, make_params, program, put, random, rel_norm, some, spec

ONE_DEVICE, MESH = 2e-6, 5e-6  # float32: sums in another order; on a mesh, over devices too
BASE = moax.MoEConfig(32, 48, 8, 2, use_bias=True, shared_d_ff=16, router=moax.RouterConfig(aux_loss=1e-2, z_loss=1e-3))
B, L = 16, 6


def make_x(config: moax.MoEConfig, *leading: int) -> jax.Array:
    return jnp.asarray(random(7, *(leading or (B, L)), config.d_model))


def loss_of(y, stats):
    """A loss that gives every output its own weight, and the losses of the router theirs."""
    weight = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.vdot(y.astype(jnp.float32), weight), stats.aux_loss + stats.z_loss


@functools.cache
def expected(config: moax.MoEConfig):
    """(y, stats), (dx, dparams) of reference.py."""
    x, params = make_x(config), make_params(config)

    def total(x, params):
        y, stats = reference.moe(x, params, config)
        return sum(loss_of(y, stats)), (y, stats)

    grads, outputs = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(x, params)
    return jax.tree.map(np.asarray, (outputs, grads))


def specs_of(mesh: str, config: moax.MoEConfig, axes: moax.Axes):
    return moax.param_specs(config, axes, mesh=make_mesh(mesh))


def block(
    way: str,
    mesh: str,
    config: moax.MoEConfig = BASE,
    *,
    fsdp_dim: str = "auto",
    exchange: str = "all_gather",
    **options,
) -> Program:
    """The block with every gradient: ((y, stats), (dx, dparams))."""
    axes = moax.Axes(fsdp_dim=fsdp_dim)
    x, params = make_x(config), make_params(config)

    def fn(x, params, engine):
        return moax.moe(x, params, config, axes=axes, exchange=exchange, engine=engine, **options), ()

    def graded(x, params, engine):
        total = lambda x, params: (lambda out: (sum(loss_of(*out)), out))(fn(x, params, engine)[0])  # noqa: E731
        grads, outputs = jax.grad(total, argnums=(0, 1), has_aux=True)(x, params)
        return outputs, grads

    if way == "none" or not way.startswith("user"):
        at = () if way == "none" else (spec(mesh, TOKENS), specs_of(mesh, config, axes))
        return program(way, mesh, graded, (x, params), at)
    tokens, weights = spec(mesh, TOKENS), specs_of(mesh, config, axes)
    mapped = jax.shard_map(
        lambda x, p: fn(x, p, "auto")[0], mesh=make_mesh(mesh), in_specs=(tokens, weights),
        out_specs=(tokens, PartitionSpec()), check_vma=way == "user_vma",
    )  # fmt: skip

    def total(x, params):
        out = mapped(x, params)
        return sum(loss_of(*out)), out

    on = make_mesh(mesh)
    both = jax.jit(lambda x, p: jax.grad(total, argnums=(0, 1), has_aux=True)(x, p)[::-1])
    return Program(both, put(on, (tokens, weights), (x, params)), on)


def check(got, want, limit: float) -> None:
    """Every leaf to `limit`; per expert where there are experts."""
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        by_expert = any(f".{n}" in name and "shared" not in name for n in ("wi", "wo", "bi", "bo")) and np.ndim(w) > 0
        if np.issubdtype(np.asarray(w).dtype, np.integer):
            np.testing.assert_array_equal(g, w, err_msg=name)
        else:
            error = rel_norm(g, w, per=0 if by_expert else None)
            assert error <= limit, f"{name}: {error:.2e} > {limit:.0e}"


WAYS = ("custom_partitioning", "shard_map", "explicit", "user", "user_vma")
MATRIX = list(itertools.product(MESHES, WAYS, ("all_gather", "all_to_all"), ("experts", "model")))
# Each way on one mesh, some on the others, exchange and layout taking turns.
COVER = [
    (mesh, way, ("all_gather", "all_to_all")[(i + j) % 2], ("experts", "model")[(i + j) // 2 % 2])
    for i, mesh in enumerate(("2x4", "tp2x2x2", "dp2x2x2", "1x8"))
    for j, way in enumerate(WAYS)
    if (i, j) not in {(1, 1), (1, 3), (2, 0), (2, 2), (2, 4), (3, 1), (3, 2), (3, 3), (3, 4)}
]


def test_one_device():
    """Breaks if the block computes anything but the reference."""
    check(block("none", "")(), expected(BASE), ONE_DEVICE)


@pytest.mark.parametrize(("mesh", "way", "exchange", "fsdp_dim"), COVER)
def test_covering(mesh, way, exchange, fsdp_dim):
    """Breaks if a mesh, a way to run on it, a transport or a layout of weights changes a value or a gradient."""
    check(block(way, mesh, exchange=exchange, fsdp_dim=fsdp_dim)(), expected(BASE), MESH)


@pytest.mark.matrix
@pytest.mark.parametrize(("mesh", "way", "exchange", "fsdp_dim"), MATRIX)
def test_matrix(mesh, way, exchange, fsdp_dim):
    """The full matrix of the above."""
    check(block(way, mesh, exchange=exchange, fsdp_dim=fsdp_dim)(), expected(BASE), MESH)


ROUTERS = {
    "softmax": moax.RouterConfig(aux_loss=1e-2),
    "topk_first": moax.RouterConfig(order="topk_then_score"),
    "sigmoid": moax.RouterConfig(score="sigmoid", scale=2.5, bias=True, aux_loss=1e-2, z_loss=1e-3),
    "groups": moax.RouterConfig(score="sigmoid", num_groups=4, top_groups=2, group_score="top2", bias=True),
    "max": moax.RouterConfig(num_groups=2, top_groups=1, group_score="max", normalize=False),
    "logits_bias": moax.RouterConfig(order="topk_then_score", logits_bias=True),
}
OPTIONS = {
    **{name: dict(router=router) for name, router in ROUTERS.items()},
    **{name: dict(activation=name) for name in ("geglu", "swiglu_oai", "silu", "gelu", "relu2")},
    "hidden": dict(weights_at="hidden"),
    "plain": dict(use_bias=False, shared_d_ff=0, router=moax.RouterConfig()),
    "top1": dict(top_k=1, router=moax.RouterConfig()),
    "all": dict(top_k=8),
    "odd": dict(d_model=20, d_ff=36, shared_d_ff=28),
}


# Two at a time, a router and something else.
TOGETHER = [
    ("softmax", "geglu"), ("topk_first", "swiglu_oai"), ("sigmoid", "silu"), ("groups", "gelu"), ("max", "relu2"),
    ("logits_bias", "hidden"), ("top1", "odd"), ("plain",), ("all",),
]  # fmt: skip


def test_every_option_is_tested():
    """Breaks if an option has no case below."""
    assert sorted(itertools.chain(*TOGETHER)) == sorted(OPTIONS)


@pytest.mark.parametrize("names", TOGETHER, ids=" and ".join)
def test_options_on_one_device(names):
    """Breaks if an option of the config is not what the reference says it is."""
    config = dataclasses.replace(BASE, **functools.reduce(operator.or_, (OPTIONS[name] for name in names)))
    longer = 2 if names == ("all",) else 1  # a gradient sums the rows of every token, four times as many
    check(block("none", "", config)(), expected(config), longer * ONE_DEVICE)


@pytest.mark.parametrize(
    ("name", "way"),
    [("hidden", "custom_partitioning"), ("groups", "explicit"), ("swiglu_oai", "user"), ("odd", "shard_map")],
)
def test_options_with_tensor_parallelism(name, way):
    """Breaks if an option counts something once a rank of tp, or once a rank that holds the expert."""
    config = dataclasses.replace(BASE, **OPTIONS[name])
    check(block(way, "tp2x2x2", config)(), expected(config), MESH)


@pytest.mark.parametrize("present", [("bi",), ("bo",), ()])
def test_any_subset_of_biases(present):
    """Breaks if one bias needs the other (a published block's AttributeError)."""
    params = dataclasses.replace(make_params(BASE), **{n: None for n in ("bi", "bo") if n not in present})
    x = make_x(BASE)
    got, want = (jax.grad(lambda p, f=f: sum(loss_of(*f(x, p, BASE))))(params) for f in (moax.moe, reference.moe))
    check(got, jax.tree.map(np.asarray, want), ONE_DEVICE)


@pytest.mark.parametrize("layout", ["replicated", "fsdp on F", "two dims", "wrong order", "tuple axis"])
def test_any_layout_of_the_users(layout, caplog):
    """Breaks if an Auto mesh's own layout of weights, declared or not, is not used as it is (or brought in order)."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axes, p = moax.Axes(), PartitionSpec
    wi, wo = {
        "replicated": (p(), p()),
        "fsdp on F": (p("ep", None, None, "fsdp"), p("ep", "fsdp")),
        "two dims": (p("ep", "fsdp"), p("ep", None, "fsdp")),
        "wrong order": (p(("fsdp", "ep")), p("fsdp", "ep")),
        "tuple axis": (p("expert", ("data", "zero")), p("expert", "data", "zero")),
    }[layout]
    if layout == "tuple axis":
        mesh = jax.make_mesh((2, 2, 2), ("data", "zero", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
        axes = moax.Axes(fsdp=("data", "zero"), ep="expert")
    log_once.cache_clear()
    x, params = make_x(BASE), make_params(BASE)
    place = lambda v, s: jax.device_put(v, NamedSharding(mesh, s))  # noqa: E731
    params = dataclasses.replace(params, wi=place(params.wi, wi), wo=place(params.wo, wo))
    with jax.set_mesh(mesh):
        total = lambda x, p: (lambda out: (sum(loss_of(*out)), out))(moax.moe(x, p, BASE, axes=axes))  # noqa: E731
        grads, outputs = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(x, params)
    check((outputs, grads), expected(BASE), MESH)
    moved = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "laid out as declared" in r.message]
    in_order = layout in ("fsdp on F", "two dims", "tuple axis")
    assert not moved if in_order else any("params.wi: dim 0 is sharded over" in m for m in moved)


@pytest.mark.parametrize("way", ["custom_partitioning", "shard_map"])
def test_size_one_and_absent_axes(way):
    """Breaks if an axis of one device, or a mesh of none of the roles, is not as good as no axis."""
    for shape, names in (((1, 8, 1), ("fsdp", "ep", "tp")), ((1,), ("ep",)), ((8,), ("elsewhere",))):
        mesh = jax.make_mesh(
            shape,
            names,
            axis_types=(jax.sharding.AxisType.Auto,) * len(shape),
            devices=jax.devices()[: int(np.prod(shape))],
        )
        with jax.set_mesh(mesh):
            got = jax.jit(lambda x, p: moax.moe(x, p, BASE, engine=way))(make_x(BASE), make_params(BASE))
        check(got, expected(BASE)[0], MESH)


def test_explicit_axes_of_one_device():
    """Breaks if y loses the type of x where every axis has one device."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "ep"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        x = jax.device_put(make_x(BASE), NamedSharding(mesh, PartitionSpec(("fsdp", "ep"))))
        y, stats = jax.jit(lambda x, p: (lambda y, s: (x + y, s))(*moax.moe(x, p, BASE)))(x, make_params(BASE))
    check((np.asarray(y) - np.asarray(make_x(BASE)), stats), expected(BASE)[0], MESH)


@pytest.mark.parametrize(
    "at", some([((("fsdp", "ep"),),), (("fsdp", "ep"),), ((None, None, "ep"),), (("fsdp",),), ((),)], 3)
)
def test_result_is_like_x(at):
    """Breaks if y has another type than x on an Explicit mesh, so that a residual x + y would not trace."""
    mesh = make_mesh("2x4", "explicit")
    x = make_x(BASE, 8, 8)
    want, _ = reference.moe(x, make_params(BASE), BASE)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*at)))
        params = put(mesh, moax.param_specs(BASE), make_params(BASE))
        y, grad = jax.jit(
            lambda x, p: (moax.moe(x, p, BASE)[0] + 0 * x, jax.grad(lambda x: moax.moe(x, p, BASE)[0].sum())(x))
        )(placed, params)
    assert y.sharding.is_equivalent_to(placed.sharding, 3) and grad.sharding.is_equivalent_to(placed.sharding, 3)
    assert rel_norm(y, want) <= MESH


@pytest.mark.parametrize("leading", [(96,), (2, 4, 12), (1, 96)])
def test_any_leading_dims(leading):
    """Breaks if tokens must be [B, S, H]."""
    x, params = make_x(BASE, *leading), make_params(BASE)
    want = reference.moe(x, params, BASE)[0]
    mesh = make_mesh("2x4")
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x, p: moax.moe(x, p, BASE)[0])(x, put(mesh, moax.param_specs(BASE), params))
    assert y.shape == x.shape and rel_norm(y, want) <= MESH


def test_bfloat16():
    """Breaks if compute leaves x.dtype, or a gradient leaves its primal's dtype."""
    x, params = make_x(BASE).astype(jnp.bfloat16), make_params(BASE)
    y, grads = jax.jit(
        lambda x, p: (moax.moe(x, p, BASE)[0], jax.grad(lambda x, p: sum(loss_of(*moax.moe(x, p, BASE))), (0, 1))(x, p))
    )(x, params)
    assert y.dtype == grads[0].dtype == jnp.bfloat16
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads[1]))
    # The reference on the rounded tokens: what is left is the rounding of products and of their operands.
    want_y = reference.moe(x, params, BASE)[0]
    want = jax.grad(lambda x, p: sum(loss_of(*reference.moe(x, p, BASE))), (0, 1))(x.astype(jnp.float32), params)
    assert rel_norm(y, want_y) < 1e-2
    for got, should in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        assert rel_norm(got, should) < 1e-2


@pytest.mark.parametrize("way", ["custom_partitioning", "explicit"])
@pytest.mark.parametrize("jit", [True, False])
def test_without_set_mesh(way, jit):
    """Breaks if arrays that lie on a mesh need `jax.set_mesh` besides, or the block needs `jax.jit` around it."""
    on = make_mesh("2x4", way)
    x, params = put(on, (spec("2x4", TOKENS), moax.param_specs(BASE, mesh=on)), (make_x(BASE), make_params(BASE)))
    f = lambda x, p: moax.moe(x, p, BASE)  # noqa: E731
    check((jax.jit(f) if jit else f)(x, params), expected(BASE)[0], MESH)
