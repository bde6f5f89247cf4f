"""Quantized blocks against products of rounded operands in NumPy, which isolates the implementation, and against the
plain float32 block, which bounds the method. tests/block/test_moe.py covers recipes on more meshes.

Covers: recipes, a recipe for each projection and scales by group x widths that no block divides x meshes; the wire's
format x transports; several passes; what crosses.

The plain bound: rounding to e4m3 is off by at most 2^-4 of a value and by 2.6% in the root mean square (uniform
mantissas); a product of two such operands with random signs is off by sqrt(2) times that, 3.7%. y passes two products
in a row, gradients of x up to four, those of weights as many with one operand fresh; e5m2 (fp8_tensor's dy) doubles
the rounding of a gradient. Hence 8% for y, 14% for gradients, 20% where dy is e5m2.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import Format, Recipe, Recipes, estimate, inspect, ops
from moax.kernels.groups import find_groups as find_unblocked
from moax.kernels.scales import dequantize
from moax.kernels.xla import quantize_for_matmul as by_xla
from moax.recipe import RECIPES
from support import interpret, make_mesh, random, rel_norm, some
from support.block import QUANTIZED, block, check, check_gradients, cotangent, expected, make_params, make_x
from support.oracle.block import block as block_by_numpy

# 160 and 192 are no multiples of a block: of 128 each dim ends in an edge block, and of wi [160, 2, 192], whose columns
# are one dim of 384, the second block lies over the end of the gate and the start of the up projection.
CONFIG = moax.MoEConfig(
    d_model=160,
    d_ff=192,
    num_experts=4,
    top_k=2,
    use_bias=True,
    shared_d_ff=64,
)
GROUP = Recipe(
    Format(block=None, by_group=True),
    Format(block=None),
    Format("e5m2", None, by_group=True),
)
HALF = Recipes(wi="fp8_block")
ALL = {
    **RECIPES,
    "group": GROUP,
    "wi": HALF,
    "wo": Recipes(wo="fp8_block"),
    "two": Recipes("mxfp8", "fp8_block"),
    "tensor": Recipes("fp8_block", "fp8_tensor"),
}
PLAIN_Y = 0.08
PLAIN_GRAD = {"fp8_tensor": 0.20, "group": 0.20}


@functools.cache
def run(recipe, way="none", mesh="", **options):
    """The outputs and gradients of the block."""
    return block(way, mesh, CONFIG, recipe=ALL[recipe], **options)()


@functools.cache
def plain():
    """What full precision gives for the tokens of quantized runs."""
    x = np.asarray(make_x(CONFIG, rows_differ=True)).reshape(-1, CONFIG.d_model)
    return block_by_numpy(x, make_params(CONFIG), CONFIG, cotangent(x.shape), d_losses=(1, 1))


def check_against_plain(got, limit_y, limit):
    (y, _), (dx, dparams) = got
    assert rel_norm(y.reshape(plain().y.shape), plain().y) < limit_y
    # The router's gradient is a sum of differences between experts, in which half the digits cancel.
    check_gradients(
        dx,
        dataclasses.replace(dparams, router=plain().dparams["router"].astype(np.float32)),
        plain(),
        limit,
    )
    assert rel_norm(dparams.router, plain().dparams["router"]) < 2 * limit


@pytest.mark.parametrize(
    ("recipe", "way", "mesh", "fsdp_dim"),
    some([
        *((name, "none", "", "auto") for name in ("fp8_block", "mxfp8", "fp8_tensor", "two", "group")),
        ("fp8_block", "custom_partitioning", "2x4", "model"), ("fp8_tensor", "explicit", "tp2x2x2", "experts"),
        ("mxfp8", "shard_map", "tp2x2x2", "model"), ("wi", "custom_partitioning", "2x4", "auto"),
        ("wo", "explicit", "tp2x2x2", "auto"), ("tensor", "custom_partitioning", "dp2x2x2", "auto"),
        ("group", "explicit", "tp2x2x2", "auto"),
    ], 5),
)  # fmt: skip
def test_against_rounded_operands(recipe, way, mesh, fsdp_dim):
    """Breaks if an operand is quantized along the wrong dim, in the wrong format, in other blocks, by the recipe of the
    other product, with other rows than those of its expert on its device, or not at all; if the blocks of a weight
    depend on its shards (160 over 2 is 80, within the first block of 128), or shards that hold a block do not agree on
    its scale."""
    check(run(recipe, way, mesh, fsdp_dim=fsdp_dim), expected(CONFIG, ALL[recipe], mesh), QUANTIZED)


@pytest.mark.parametrize("recipe", RECIPES)
def test_against_full_precision(recipe):
    """Breaks if the method loses more than the rounding of its operands."""
    check_against_plain(run(recipe, fsdp_dim="auto"), PLAIN_Y, PLAIN_GRAD.get(recipe, 0.14))


@pytest.mark.more
@pytest.mark.parametrize("recipe", ("fp8_block", "fp8_tensor", "wi", "group"))
def test_in_passes(recipe):
    """Breaks if passes are quantized otherwise than rows are: y and dx of block scales are those of one pass;
    gradients of weights, whose blocks run over rows of a pass, stay within the bounds of the method. The ranks of a
    recipe of whole tensors all reduce a maximum in each pass, so that they would wait for each other for ever."""
    (y, stats), (dx, dparams) = run(
        recipe,
        "custom_partitioning",
        "2x4",
        exchange="all_to_all",
        buffer_factor=0.1,
    )
    assert int(stats.rounds) > 2
    check_against_plain(((y, stats), (dx, dparams)), PLAIN_Y, PLAIN_GRAD.get(recipe, 0.14))
    want = expected(CONFIG, ALL[recipe], "2x4")
    assert rel_norm(y.reshape(want.y.shape), want.y) < (0.05 if recipe in PLAIN_GRAD else QUANTIZED)
    assert recipe in PLAIN_GRAD or rel_norm(dx.reshape(want.dx.shape), want.dx) < QUANTIZED


def test_what_crosses():
    """Breaks if the weight without a recipe travels as bytes, if the other one does not, or if the estimate of the
    bytes does not know which is which."""
    config = moax.MoEConfig(256, 384, 8, 2)
    mesh = make_mesh("2x4")
    traffic = inspect.weight_gathers(
        inspect.inspect_block(
            config,
            tokens=64,
            recipe=HALF,
            mesh=mesh,
            backward=False,
        )
    )
    large = {(c.dtype, c.size) for c in traffic if c.size > 10_000}
    assert large == {("uint8", 2 * 256 * 768), ("bfloat16", 2 * 384 * 256)}
    estimated = estimate.estimate(config, {"fsdp": 2, "ep": 4}, 8, recipe=HALF, kernels="xla")
    # Backward gathers again.
    assert estimated.wire_bytes("gather_weight") == 2 * inspect.total_bytes(traffic)
    both = (None, Recipes(wo="fp8_block"), "fp8_block")
    slow, half, fast = (estimate.estimate(config, {"fsdp": 8}, 512, recipe=r).times["products"] for r in both)
    assert fast < half < slow


@pytest.mark.more
def test_no_device_asks_another_for_a_maximum():
    """Breaks if scales of groups cost a collective, which is what they save."""
    config = moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2)
    counts = {}
    for name, recipe in (("group", GROUP), ("tensor", "fp8_tensor")):
        traffic = inspect.inspect_block(config, tokens=64, recipe=recipe, mesh=make_mesh("8x1"))
        counts[name] = len([c for c in traffic if c.kind == "all-reduce" and c.size == 1])
    assert counts["group"] < counts["tensor"] - 4, counts


def test_an_expert_has_its_own_scale():
    """Breaks if rows of one expert make those of another coarser, as one scale for all of them does."""
    sizes = jnp.array([3, 0, 4], jnp.int32)
    x = random(0, 8, 32)
    x[0] = x[0] * 1e6
    x[7] = np.nan
    for form, fine in ((GROUP, True), (RECIPES["fp8_tensor"], False)):
        rows = np.asarray(
            dequantize(by_xla(jnp.asarray(x), form, "x", find_unblocked(sizes, 1, 8))[0]),
        )
        error = np.abs(rows[3:7] - x[3:7]).max()
        assert (error < 0.2) == fine, f"{error} with by_group={fine}"
        assert np.all(rows[7] == 0), "padding of no group"


@pytest.mark.more
def test_the_kernel_scales_as_xla_does():
    """Breaks if the Hopper kernels give a block of rows, or a block of wgrad, the scale of another group."""
    hopper = pytest.importorskip("moax.kernels.hopper")
    from moax.kernels.hopper.formats import find_groups, supports_fp8

    assert supports_fp8(GROUP)
    x = jnp.asarray(random(1, 384, 64) * np.repeat([1e3, 1, 1], 128)[:, None], jnp.bfloat16)
    sizes = jnp.array([70, 0, 128], jnp.int32)
    results = interpret(
        lambda x, s: hopper.quantize_for_matmul(x, GROUP, "x", find_groups(s, 128, 384)),
        x,
        sizes,
    )
    want, _ = by_xla(x, GROUP, "x", find_unblocked(sizes, 128, 384))
    got = results[0].data.astype(np.float32) * np.asarray(results[0].scale).T
    turned = results[1].data.astype(np.float32).T * np.repeat(np.asarray(results[1].scale)[:, :64], 128, axis=0)
    for rows in (got, turned):
        np.testing.assert_array_equal(rows[:256], np.asarray(dequantize(want))[:256])


def test_dense():
    """Breaks if a dense layer, whose rows are one group, does not scale all rows of a device together."""
    x = jnp.asarray(random(2, 16, 32))
    w = jnp.asarray(random(3, 32, 24))
    tensor = Recipe(Format(block=None), Format(block=None), Format("e5m2", None))
    run = lambda recipe: jax.vjp(lambda x, w: ops.dense(x, w, recipe=recipe), x, w)  # noqa: E731
    y, pull = run(GROUP)
    want, pull_want = run(tensor)
    jax.tree.map(np.testing.assert_array_equal, (y, pull(y)), (want, pull_want(want)))
