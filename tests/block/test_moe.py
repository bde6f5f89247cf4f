"""The whole block, forward and every gradient, against NumPy in float64.

Covers: meshes x ways to run on them x transports x layouts of weights x recipes x configs x buffer factors, by pairs in
`make test-more` (`make test` runs the rows of `COVER`); every option of the config; layouts that a user may have
chosen; bfloat16.
"""

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
from moax.checks import log_once
from moax.recipe import RECIPES
from support import MESHES, TOKENS, Table, make_mesh, make_params, mark_rest, put, rel_norm, spec
from support.block import (
    BASE,
    MESH,
    ONE_DEVICE,
    QUANTIZED,
    block,
    check,
    check_gradients,
    check_outputs,
    cotangent,
    expected,
    loss_of,
    make_x,
)
from support.oracle.block import block as block_by_numpy

# Each dim has blocks of 128, also where tp halves F.
WIDE = dataclasses.replace(BASE, d_model=256, d_ff=256)
VARIANTS = {
    "full": dataclasses.replace(WIDE, shared_d_ff=64),
    "latent": dataclasses.replace(WIDE, shared_d_ff=0, d_latent=128),
    "plain": dataclasses.replace(
        WIDE,
        shared_d_ff=0,
        use_bias=False,
        activation="relu2",
        router=moax.RouterConfig(),
    ),
}
SMALL = 0.05  # several passes of each kind for every routing
COVER = Table(
    "block",
    {
        "mesh": tuple(MESHES),
        "way": ("custom_partitioning", "shard_map", "explicit", "user", "user_vma"),
        "exchange": ("all_gather", "all_to_all"),
        "fsdp_dim": ("experts", "model"),
        "recipe": (None, *RECIPES),
        "variant": tuple(VARIANTS),
        "buffer_factor": (1.25, SMALL),
    },
    [
        ("tp2x2x2", "custom_partitioning", "all_gather", "model", "fp8_block", "full", 1.25),
        ("tp2x2x2", "explicit", "all_gather", "experts", None, "plain", 1.25),
        ("8x1", "custom_partitioning", "all_to_all", "model", None, "latent", SMALL),
        ("1x8", "user", "all_gather", "experts", "mxfp8", "latent", 1.25),
        ("4x2", "shard_map", "all_gather", "experts", "mxfp8", "plain", 1.25),
        ("2x4", "user_vma", "all_to_all", "model", None, "plain", SMALL),
        ("dp2x2x2", "user", "all_to_all", "model", "fp8_block", "full", 1.25),
        ("8x1", "user_vma", "all_to_all", "experts", "mxfp8", "full", 1.25),
        ("1x8", "explicit", "all_to_all", "model", "fp8_block", "full", 1.25),
    ],
    # Blocks along rows are those of a pass: in several passes the gradients of weights are other numbers. Where types
    # do not vary, the gradient of latent rows is a partial sum over tp until the caller's shard_map adds it up.
    possible=lambda mesh, way, recipe, variant, buffer_factor, **_: (
        recipe is None or (buffer_factor != SMALL and (mesh[:2], way, variant) != ("tp", "user", "latent"))
    ),
)


def test_one_device():
    """Breaks if the block computes anything but the reference."""
    check(block("none", "")(), expected(BASE), ONE_DEVICE)


@pytest.mark.parametrize(tuple(COVER.options), COVER.parameters(0, short=9))
def test_covering(mesh, way, exchange, fsdp_dim, recipe, variant, buffer_factor):
    """Breaks if a mesh, a way to run on it, a transport, a layout of weights or a pass changes a value or a gradient,
    or if an operand is rounded in other blocks than its recipe says."""
    config = VARIANTS[variant]
    got = block(way, mesh, config, exchange=exchange, fsdp_dim=fsdp_dim, recipe=recipe, buffer_factor=buffer_factor)()
    assert (int(got[0][1].rounds) > 1) == (buffer_factor == SMALL)
    check(got, expected(config, recipe, mesh), MESH if recipe is None else QUANTIZED)


@pytest.mark.more
def test_latent_rows_where_types_do_not_vary():
    """Breaks if the gradient of latent rows, rounded on each rank of tp before the sum, errs by more than rounding."""
    got = block("user", "tp2x2x2", VARIANTS["latent"], fsdp_dim="experts", recipe="fp8_block")()
    want = expected(VARIANTS["latent"], "fp8_block", "tp2x2x2")
    check_outputs(got[0], want, QUANTIZED)
    # latent_down reaches 2.2e-2, and QUANTIZED is the bound where the sum is rounded.
    check_gradients(*got[1], want, 3e-2)


ROUTERS = {
    "softmax": moax.RouterConfig(aux_loss=1e-2),
    "topk_first": moax.RouterConfig(order="topk_then_score"),
    "sigmoid": moax.RouterConfig(score="sigmoid", scale=2.5, bias=True, aux_loss=1e-2, z_loss=1e-3),
    "groups": moax.RouterConfig(
        score="sigmoid",
        num_groups=4,
        top_groups=2,
        group_score="top2",
        bias=True,
    ),
    "max": moax.RouterConfig(num_groups=2, top_groups=1, group_score="max", normalize=False),
    "logits_bias": moax.RouterConfig(order="topk_then_score", logits_bias=True),
    "sqrt_softplus": moax.RouterConfig(score="sqrt_softplus", scale=1.5, bias=True, aux_loss=1e-2),
    "expert_scale": moax.RouterConfig(expert_scale=True),
}
OPTIONS = {
    **{name: dict(router=router) for name, router in ROUTERS.items()},
    **{name: dict(activation=name) for name in ("geglu", "swiglu_oai", "silu", "gelu", "relu2")},
    "input": dict(weights_at="input", use_bias=False),
    "shared_gate": dict(shared_gate=True),
    "limit": dict(activation_limit=0.5),
    "plain": dict(use_bias=False, shared_d_ff=0, router=moax.RouterConfig()),
    "top1": dict(top_k=1, router=moax.RouterConfig()),
    "all": dict(top_k=8),
    "latent": dict(d_latent=12),
    "odd": dict(d_model=20, d_ff=36, shared_d_ff=28),
}


# Two at a time, a router and something else.
TOGETHER = [
    ("softmax", "geglu"),
    ("topk_first", "swiglu_oai"),
    ("sigmoid", "silu"),
    ("groups", "gelu"),
    ("max", "relu2"),
    ("logits_bias",),
    ("top1", "odd"),
    ("plain",),
    ("all",),
    ("sqrt_softplus", "input", "limit"),
    ("expert_scale", "shared_gate", "latent"),
]


def test_every_option_is_tested():
    """Breaks if an option has no case below."""
    assert sorted(itertools.chain(*TOGETHER)) == sorted(OPTIONS)


@pytest.mark.parametrize("names", TOGETHER, ids=" and ".join)
def test_options_on_one_device(names):
    """Breaks if an option of the config is not what the reference says it is."""
    config = dataclasses.replace(
        BASE,
        **functools.reduce(operator.or_, (OPTIONS[name] for name in names)),
    )
    # A gradient sums the rows of every token, four times as many.
    longer = 2 if names == ("all",) else 1
    check(block("none", "", config)(), expected(config), longer * ONE_DEVICE)


@pytest.mark.parametrize(
    ("name", "way"),
    mark_rest(
        [
            ("odd", "shard_map"),
            ("latent", "explicit"),
            ("shared_gate", "user"),
            ("input", "explicit"),
            ("swiglu_oai", "user"),
            ("groups", "explicit"),
            ("expert_scale", "user_vma"),
            ("shared_gate", "shard_map"),
            ("latent", "custom_partitioning"),
        ],
        2,
    ),
)
def test_options_with_tensor_parallelism(name, way):
    """Breaks if an option counts something once a rank of tp, or once a rank that holds the expert."""
    config = dataclasses.replace(BASE, **OPTIONS[name])
    check(block(way, "tp2x2x2", config)(), expected(config), MESH)


def swish_tanh(gate, up):
    """An activation of a user's own, of gate and up."""
    return jax.nn.silu(1.5 * gate) * jnp.tanh(up)


@pytest.mark.parametrize(
    ("activation", "way"),
    mark_rest([(swish_tanh, "shard_map"), (("relu", "linear"), "none"), (jnp.tanh, "none"), ("mish", "explicit")], 1),
)
def test_any_activation(activation, way):
    """Breaks if a function, a pair or a name of `jax.nn` is another function in the experts, or in the shared one."""
    config = dataclasses.replace(BASE, activation=activation)
    x = make_x(config)
    params = make_params(config)

    def total(x, p):
        out = reference.moe(x, p, config)
        return sum(loss_of(*out)), out

    (dx, dparams), (y, _) = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, params)
    (got, _), (got_dx, got_dparams) = block(way, "tp2x2x2", config)()
    assert rel_norm(got, y) <= MESH and rel_norm(got_dx, dx) <= MESH
    for name in ("wi", "wo", "bi", "bo", "router", "shared_wi", "shared_wo"):
        assert rel_norm(getattr(got_dparams, name), getattr(dparams, name)) <= MESH, name


@pytest.mark.parametrize("present", [("bi",), ("bo",)])
def test_any_subset_of_biases(present):
    """Breaks if one bias needs the other (a published block's AttributeError)."""
    params = dataclasses.replace(
        make_params(BASE),
        **{n: None for n in ("bi", "bo") if n not in present},
    )
    x = make_x(BASE)
    got = jax.jit(jax.grad(lambda p: sum(loss_of(*moax.moe(x, p, BASE)))))(params)
    flat = np.asarray(x).reshape(-1, BASE.d_model)
    want = block_by_numpy(flat, params, BASE, cotangent(flat.shape), d_losses=(1, 1))
    check_gradients(want.dx, got, want, ONE_DEVICE)


@pytest.mark.parametrize(
    "layout",
    mark_rest(["wrong order", "fsdp on F", "tuple axis", "two dims", "replicated"], 1),
)
def test_any_layout_of_the_users(layout, caplog, fresh_compile):
    """Breaks if an Auto mesh's own layout of weights, declared or not, is not used as it is (or brought in order)."""
    mesh = jax.make_mesh((2, 4), ("fsdp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    axes = moax.Axes()
    p = PartitionSpec
    wi, wo = {
        "replicated": (p(), p()),
        "fsdp on F": (p("ep", None, None, "fsdp"), p("ep", "fsdp")),
        "two dims": (p("ep", "fsdp"), p("ep", None, "fsdp")),
        "wrong order": (p(("fsdp", "ep")), p("fsdp", "ep")),
        "tuple axis": (p("expert", ("data", "zero")), p("expert", "data", "zero")),
    }[layout]
    if layout == "tuple axis":
        mesh = jax.make_mesh(
            (2, 2, 2),
            ("data", "zero", "expert"),
            axis_types=(jax.sharding.AxisType.Auto,) * 3,
        )
        axes = moax.Axes(fsdp=("data", "zero"), ep="expert")
    log_once.cache_clear()
    x = make_x(BASE)
    params = make_params(BASE)
    place = lambda v, s: jax.device_put(v, NamedSharding(mesh, s))  # noqa: E731
    params = dataclasses.replace(params, wi=place(params.wi, wi), wo=place(params.wo, wo))
    with jax.set_mesh(mesh):

        def total(x, p):
            return (lambda out: (sum(loss_of(*out)), out))(moax.moe(x, p, BASE, axes=axes))

        grads, outputs = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(x, params)
    check((outputs, grads), expected(BASE), MESH)
    moved = [
        r.getMessage()
        for r in caplog.records
        if r.levelname == "WARNING" and "the declared layout is used" in r.message
    ]
    if layout == "replicated":
        assert len(moved) == 1 and "outside of jax.set_mesh" in moved[0]
    elif layout == "wrong order":
        assert len(moved) == 2 and all("dim 0 is " in m for m in moved)
    else:
        assert not moved


@pytest.mark.parametrize(
    ("shape", "names", "way"),
    mark_rest(
        [
            ((1, 8, 1), ("fsdp", "ep", "tp"), "shard_map"),
            ((8,), ("elsewhere",), "custom_partitioning"),
            ((1,), ("ep",), "shard_map"),
            ((1, 8, 1), ("fsdp", "ep", "tp"), "custom_partitioning"),
            ((1,), ("ep",), "custom_partitioning"),
            ((8,), ("elsewhere",), "shard_map"),
        ],
        2,
    ),
)
def test_size_one_and_absent_axes(shape, names, way):
    """Breaks if an axis of one device, or a mesh whose axes are all left out, is not as good as no axis."""
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(
        shape,
        names,
        axis_types=kinds,
        devices=jax.devices()[: int(np.prod(shape))],
    )
    with jax.set_mesh(mesh):
        axes = moax.Axes(other="elsewhere")
        got = jax.jit(lambda x, p: moax.moe(x, p, BASE, axes=axes, engine=way))(make_x(BASE), make_params(BASE))
    check_outputs(got, expected(BASE), MESH)


def test_explicit_axes_of_one_device():
    """Breaks if y loses the type of x where every axis has one device."""
    mesh = jax.make_mesh((1, 1), ("fsdp", "ep"), devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        x = jax.device_put(make_x(BASE), NamedSharding(mesh, PartitionSpec(("fsdp", "ep"))))
        y, stats = jax.jit(lambda x, p: (lambda y, s: (x + y, s))(*moax.moe(x, p, BASE)))(x, make_params(BASE))
    check_outputs((np.asarray(y) - np.asarray(make_x(BASE)), stats), expected(BASE), MESH)


@pytest.mark.parametrize(
    "entries",
    mark_rest([((None, None, "ep"),), (("fsdp", "ep"),), ((("fsdp", "ep"),),), (("fsdp",),), ((),)], 1),
)
def test_result_is_like_x(entries):
    """Breaks if y has another type than x on an Explicit mesh, so that a residual x + y would not trace."""
    mesh = make_mesh("2x4", "explicit")
    x = make_x(BASE, 8, 8)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*entries)))
        params = put(mesh, moax.param_specs(BASE), make_params(BASE))

        def both(x, p):
            y, pull = jax.vjp(lambda x: moax.moe(x, p, BASE)[0] + 0 * x, x)
            return y, pull(y)[0]

        y, grad = jax.jit(both)(placed, params)
    assert y.sharding.is_equivalent_to(placed.sharding, 3)
    assert grad.sharding.is_equivalent_to(placed.sharding, 3)
    assert rel_norm(np.asarray(y).reshape(64, -1), by_numpy(x).y) <= MESH


def by_numpy(x):
    """The block of any tokens with `make_params`; gradients are of no use."""
    flat = np.asarray(x, np.float32).reshape(-1, BASE.d_model)
    return block_by_numpy(flat, make_params(BASE), BASE, np.zeros(flat.shape))


@pytest.mark.parametrize("leading", mark_rest([((2, 4, 12),), ((96,),), ((1, 96),)], 1))
def test_any_leading_dims(leading):
    """Breaks if tokens must be [B, S, H]."""
    x = make_x(BASE, *leading)
    params = make_params(BASE)
    mesh = make_mesh("2x4")
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x, p: moax.moe(x, p, BASE)[0])(
            x,
            put(
                mesh,
                moax.param_specs(BASE),
                params,
            ),
        )
    assert y.shape == x.shape and rel_norm(np.asarray(y).reshape(96, -1), by_numpy(x).y) <= MESH


def test_bfloat16():
    """Breaks if compute leaves x.dtype, or a gradient leaves its primal's dtype. The oracle has the rounded tokens:
    what is left is the rounding of matmuls and of their operands."""
    x = make_x(BASE).astype(jnp.bfloat16)
    params = make_params(BASE)

    def total(x, p):
        out = moax.moe(x, p, BASE)
        return sum(loss_of(*out)), out[0]

    (dx, dparams), y = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, params)
    assert y.dtype == dx.dtype == jnp.bfloat16
    flat = np.asarray(x.astype(jnp.float32)).reshape(-1, BASE.d_model)
    want = block_by_numpy(flat, params, BASE, cotangent(flat.shape), d_losses=(1, 1))
    assert rel_norm(np.asarray(y, np.float32).reshape(flat.shape), want.y) < 1e-2
    check_gradients(np.asarray(dx, np.float32), dparams, want, 2e-2)


@pytest.mark.parametrize(
    ("way", "jit"),
    mark_rest(
        [("custom_partitioning", False), ("explicit", True), ("custom_partitioning", True), ("explicit", False)], 1
    ),
)
def test_without_set_mesh(way, jit):
    """Breaks if arrays that lie on a mesh need `jax.set_mesh` besides, or the block needs `jax.jit` around it."""
    on = make_mesh("2x4", way)
    x, params = put(
        on,
        (spec("2x4", TOKENS), moax.param_specs(BASE, mesh=on)),
        (make_x(BASE), make_params(BASE)),
    )
    f = lambda x, p: moax.moe(x, p, BASE)  # noqa: E731
    check_outputs((jax.jit(f) if jit else f)(x, params), expected(BASE), MESH)
