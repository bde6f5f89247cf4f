"""Kept weights: a block that takes wi and wo from `quantize_params` equals one that quantizes or rounds them itself.

Covers: kinds of meshes x recipes x layouts, forward and backward, bit by bit; what a block gathers then; microbatches
in a scan; wrong arguments.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import Axes, inspect
from moax.mesh.specs import find_mesh_view
from moax.ops.weights import WeightSpec, gather_quantized, quantize_weight, quantized_shapes
from moax.recipe import get_recipe
from support import TOKENS, make_mesh, make_params, mark_rest, put, random, spec

CONFIG = moax.MoEConfig(256, 384, 8, 2, use_bias=True)
PARAMS = make_params(CONFIG)
X = random(1, 64, 256)
CASES = [
    ("2x4", "custom_partitioning", "fp8_block", "experts"),
    ("2x4", "explicit", "mxfp8", "experts"),
    ("tp2x2x2", "custom_partitioning", "mxfp8", "model"),
    ("8x1", "shard_map", "fp8_block", "model"),
    ("none", "none", "fp8_block", "auto"),
    ("tp2x2x2", "custom_partitioning", None, "model"),
]


def run(x, params, quantized=None, **options):
    """y, and the gradients of x and of the parameters."""

    def loss(x, params):
        y, _ = moax.moe(x, params, CONFIG, quantized=quantized, **options)
        return jnp.sum(y**2), y

    (dx, dparams), y = jax.grad(loss, (0, 1), has_aux=True)(x, params)
    return y, dx, dparams


@pytest.mark.parametrize(("mesh", "way", "recipe", "dim"), mark_rest(CASES, 1))
def test_bits_are_those_of_a_block_that_quantizes(mesh, way, recipe, dim):
    """Breaks if kept weights are other bytes or scales than the block's own, lie elsewhere, or take the place of the
    parameters that gradients belong to."""
    axes = Axes(fsdp_dim=dim)
    options = dict(recipe=recipe, axes=axes, engine=way if way == "shard_map" else "auto")
    with jax.set_mesh(make_mesh(mesh, way) if mesh != "none" else jax.make_mesh((1,), ("fsdp",))):
        params = PARAMS
        x = X
        if mesh != "none":
            params = put(make_mesh(mesh, way), moax.param_specs(CONFIG, axes), params)
            x = put(make_mesh(mesh, way), moax.params.token_spec(axes), x)
        quantized = moax.quantize_params(params, CONFIG, dtype=jnp.float32, **options)
        for name in ("wi", "wo"):
            expected = jnp.float32 if recipe is None else jnp.uint8
            assert jax.tree.leaves(getattr(quantized, name))[0].dtype == expected
        want = jax.jit(functools.partial(run, **options))(x, params)
        got = jax.jit(functools.partial(run, **options))(x, params, quantized)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_rounded_once():
    """Breaks if weights that are rounded once are not those that a block casts, or their gradients leave float32."""
    x = jnp.asarray(X, jnp.bfloat16)
    quantized = moax.quantize_params(PARAMS, CONFIG)
    assert [v.dtype for v in jax.tree.leaves((quantized.wi, quantized.wo))] == [jnp.bfloat16] * 2
    got = jax.jit(run)(x, PARAMS, quantized)
    want = jax.jit(run)(x, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert got[2].wi.dtype == got[2].wo.dtype == jnp.float32


@pytest.mark.more
def test_a_block_reads_kept_weights_alone():
    """Breaks if a block with kept weights quantizes the parameters once more: it would see their NaN."""
    quantized = moax.quantize_params(PARAMS, CONFIG, recipe="fp8_block", dtype=jnp.float32)
    assert all(v.dtype == jnp.uint8 for w in (quantized.wi, quantized.wo) for v, _ in w)
    nan = jax.tree.map(lambda v: jnp.full_like(v, jnp.nan), (PARAMS.wi, PARAMS.wo))
    spoilt = moax.MoEParams(PARAMS.router, *nan, bi=PARAMS.bi, bo=PARAMS.bo)
    step = jax.jit(functools.partial(run, recipe="fp8_block"))
    got = step(X, spoilt, quantized)
    want = step(X, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.more
def test_what_crosses():
    """Breaks if kept weights are gathered in more than a byte an element, or weights of the step beside them."""
    mesh = make_mesh("2x4")
    with jax.set_mesh(mesh):
        params = put(mesh, moax.param_specs(CONFIG), PARAMS)
        x = put(mesh, moax.params.token_spec(Axes()), X)
        quantized = moax.quantize_params(params, CONFIG, recipe="fp8_block", dtype=jnp.float32)
        step = jax.jit(functools.partial(run, recipe="fp8_block"))
        with_quantized, own = (step.lower(x, params, q).compile() for q in (quantized, None))
    gathers = [
        [(c.shape, c.dtype) for c in inspect.weight_gathers(inspect.collectives(p))] for p in (with_quantized, own)
    ]
    assert sorted(gathers[0]) == sorted(gathers[1]) and len(gathers[0]) >= 4
    to_fp8 = [len(re.findall(r"f8e4m3fn\[\S* convert", program.as_text())) for program in (with_quantized, own)]
    assert to_fp8[0] < to_fp8[1], f"casts to FP8 with kept weights and without: {to_fp8}"


@pytest.mark.more
def test_microbatches():
    """Breaks if the gradients of a step in microbatches, over weights that were quantized once, are not their sum."""
    parts = X.reshape(4, 16, 256)
    quantized = moax.quantize_params(PARAMS, CONFIG, recipe="fp8_block", dtype=jnp.float32)

    @jax.jit
    def step(params):
        def one(total, x):
            return jax.tree.map(jnp.add, total, run(x, params, quantized, recipe="fp8_block")[2]), None

        return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, params), parts)[0]

    want = functools.reduce(
        lambda a, b: jax.tree.map(jnp.add, a, b),
        [run(x, PARAMS, recipe="fp8_block")[2] for x in parts],
    )
    for got, sums in zip(jax.tree.leaves(step(PARAMS)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, sums, atol=1e-5 * float(np.abs(sums).max()))


def test_without_wi_and_wo_in_a_shard_map():
    """Breaks if the axes over which prequantized weights vary are lost where no wi and wo are given: `check_vma` then
    refuses the gradient of x."""
    mesh = make_mesh("tp2x2x2")
    layout = spec("tp2x2x2", TOKENS)
    config = dataclasses.replace(CONFIG, use_bias=False)  # a bias varies over tp

    def gradient(x, params, absent):
        quantized = moax.quantize_params(params, config, recipe="fp8_block", dtype=jnp.float32)
        own_params = dataclasses.replace(params, wi=None, wo=None) if absent else params
        return jax.grad(
            lambda x: (moax.moe(x, own_params, config, quantized=quantized, recipe="fp8_block")[0] ** 2).sum()
        )(x)

    with jax.set_mesh(mesh):
        args = put(mesh, (layout, specs := moax.param_specs(config)), (X, make_params(config)))
        steps = (functools.partial(gradient, absent=absent) for absent in (False, True))
        own, none = (jax.jit(jax.shard_map(step, in_specs=(layout, specs), out_specs=layout))(*args) for step in steps)
    np.testing.assert_array_equal(own, none)


@pytest.mark.parametrize(
    ("recipe", "absent", "message"),
    [
        (None, ("wi",), "either both are None, and have no gradient, or neither is"),
        ("fp8_block", ("wo",), "either both are None, and have no gradient, or neither is"),
    ],
)
def test_one_weight_alone(recipe, absent, message):
    """Breaks if the message asks for a weight that is there quantized, and does not say why."""
    quantized = moax.quantize_params(PARAMS, CONFIG, recipe=recipe, dtype=jnp.float32)
    params = dataclasses.replace(PARAMS, **dict.fromkeys(absent))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: moax.moe(X, params, CONFIG, quantized=quantized, recipe=recipe))


WRONG = {
    "another dtype": (dict(dtype=jnp.bfloat16), dict(), "quantized.wi has dtype bfloat16, and x has float32"),
    "another recipe": (dict(recipe="fp8_block"), dict(recipe="mxfp8"),
                       "^quantized has recipe='fp8_block', and this call has 'mxfp8'; pass"),
    "no recipe": (dict(), dict(recipe="mxfp8"), "^quantized has recipe=None, and this call has 'mxfp8'"),
    "recipes without names": (dict(recipe=moax.Recipe(None, None, moax.Format())),
                              dict(recipe=moax.Recipe(None, moax.Format(), None)),
                              r"^quantized has recipe=\(a Recipe\), and this call has another \(a Recipe\)"),
    "another size": (dict(recipe="fp8_block"), dict(recipe="fp8_block"), "quantized.wi is of a weight"),
    "no kept weights": (None, dict(recipe="fp8_block"), "as moax.quantize_params returns it"),
}  # fmt: skip


@pytest.mark.parametrize("gather", (False, True))
@pytest.mark.parametrize(("recipe", "works"), [("fp8_block", False), ("mxfp8", False), (None, True)])
def test_of_another_tp(gather, recipe, works):
    """Breaks if scales of blocks that were counted in parts of F are read as those of whole F: the shapes are equal,
    and gate and up change places."""
    config = moax.MoEConfig(256, 256, 8, 2)
    params = make_params(config)
    quantized = moax.quantize_params(params, config, recipe=recipe, dtype=jnp.float32, gather=gather)
    with jax.set_mesh(make_mesh("tp2x2x2")):

        def run_block():
            return moax.moe(X, params, config, quantized=quantized, recipe=recipe)[0]

        if works:
            assert jax.eval_shape(run_block).shape == X.shape
            return
        message = "quantized is of tp of 1 device, and this call has tp of 2 devices, .* on the mesh of this call"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(run_block)


def change(field, function):
    """The function that gives quantized weights another data or scale of wi."""

    def broken(quantized):
        shards = [shard._replace(**{field: function(getattr(shard, field))}) for shard in quantized.wi]
        return dataclasses.replace(quantized, wi=tuple(shards))

    return broken


BROKEN = {
    "cast scales": ("fp8_block", change("scale", lambda v: v.astype(jnp.bfloat16)),
                    r"^quantized.wi: its fprop.scale is bfloat16 \(8, 2, 6\); it must be float32 \(8, 2, 6\)"),
    "scales of integers": ("fp8_block", change("scale", lambda v: v.astype(jnp.uint8)),
                           "its fprop.scale is uint8 .*; it must be float32 "),
    "cast exponents": ("mxfp8", change("scale", lambda v: v.astype(jnp.int32)), "it must be float32 or uint8 "),
    "cut scales": ("fp8_block", change("scale", lambda v: v[:1]),
                   r"its fprop.scale is float32 \(1, 2, 6\); it must be float32 \(8, 2, 6\)"),
    "cast data": ("fp8_block", change("data", lambda v: v.astype(jnp.float32)),
                  "its fprop.data is float32 .*; it must be uint8 "),
    "one use": ("fp8_block", lambda q: dataclasses.replace(q, wi=q.wi[:1]),
                r"^quantized.wi is \(QShard\(array, array\)\); it must be \(QShard\(array, array\), QShard"),
    "a name": ("fp8_block", lambda q: dataclasses.replace(q, wo="a"), r"^quantized.wo is str; it must be \(QShard"),
    "no scale": ("fp8_block", change("scale", lambda v: None), r"^quantized.wi is \(QShard\(array, NoneType\), "),
    "a name of a recipe": ("fp8_block", lambda q: dataclasses.replace(q, recipe="fp8_block"),
                           "^quantized.recipe is a str; it must be a moax.Recipe"),
    "integers": (None, lambda q: dataclasses.replace(q, wi=(q.wi[0].astype(jnp.int32),)),
                 "^quantized.wi has dtype int32, and x has float32"),
    "no tuple": (None, lambda q: dataclasses.replace(q, wi=q.wi[0]), r"^quantized.wi is array; it must be \(array\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_arrays(name):
    """Breaks if scales of another dtype or shape are broadcast or multiplied in silence, or the message has no name."""
    recipe, broken, message = BROKEN[name]
    quantized = broken(moax.quantize_params(PARAMS, CONFIG, recipe=recipe, dtype=jnp.float32))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: moax.moe(X, PARAMS, CONFIG, quantized=quantized, recipe=recipe))


@pytest.mark.parametrize("kernels", ("xla", "hopper"))
@pytest.mark.parametrize("recipe", ("fp8_block", "mxfp8"))
@pytest.mark.parametrize("fsdp_dim", ("model", "experts"))
@pytest.mark.parametrize("width", (100, 256))
def test_shapes_of_scales(width, fsdp_dim, recipe, kernels):
    """Breaks if a block expects other scales than are made: where shards cut blocks, tp splits F or kernels turn K."""
    mesh = make_mesh("tp2x2x2")
    config = dataclasses.replace(CONFIG, d_model=width, d_ff=80)
    with jax.set_mesh(mesh):
        axes = Axes(fsdp_dim=fsdp_dim)
        specs = moax.param_specs(config, axes)
        view = find_mesh_view(axes, "auto")
        ep, tp = view.axes.ep, view.axes.tp
        for name, split in (("wi", (ep, (), (), tp)), ("wo", (ep, tp, ()))):
            w = getattr(make_params(config), name)
            declared = getattr(specs, name)
            dtype = np.dtype(np.float32)
            weight = WeightSpec(name, declared, view.axes, get_recipe(recipe), kernels, dtype, split)
            quantized = jax.eval_shape(functools.partial(quantize_weight, view, weight), w)
            gathered = jax.eval_shape(functools.partial(gather_quantized, view, weight), quantized)
            whole = dataclasses.replace(weight, gathered=True)
            for arrays, spec_of in ((quantized, weight), (gathered, whole)):
                want = jax.tree.map(lambda v: v.shape, arrays)
                assert quantized_shapes(spec_of, w.shape, local=False) == want


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    """Breaks if weights that were quantized otherwise are multiplied as if they were the block's."""
    make_quantized, called, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        quantized = (
            PARAMS
            if make_quantized is None
            else moax.quantize_params(PARAMS, CONFIG, **dict(dtype=jnp.float32) | make_quantized)
        )
        config = dataclasses.replace(CONFIG, d_ff=128) if name == "another size" else CONFIG
        jax.eval_shape(
            lambda: moax.moe(X, make_params(config), config, quantized=quantized, **called),
        )
