"""`Format(by_group=True)`: one scale for the rows of each expert on a device, against products of rounded operands.

Covers: meshes, in passes, the dense layer, what crosses, and that no expert's rows reach the scale of another's.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import Format, Recipe, inspect, ops
from moax.groups import find_groups as find_unblocked
from moax.kernels.hopper.formats import find_groups, supports_fp8
from moax.kernels.hopper.operands import quantize_for_matmul as by_kernel
from moax.kernels.quantization import dequantize
from moax.kernels.quantization import quantize_for_matmul as by_xla
from support import make_mesh, some
from support.block import QUANTIZED, block, check, expected
from support.interpreter import interpret

GROUP = Recipe(Format(block=None, by_group=True), Format(block=None), Format("e5m2", None, by_group=True))
CONFIG = moax.MoEConfig(d_model=160, d_ff=192, num_experts=4, top_k=2, use_bias=True, shared_d_ff=64)


@pytest.mark.parametrize(
    ("way", "mesh"), some([("none", ""), ("custom_partitioning", "2x4"), ("explicit", "tp2x2x2")], 1)
)
def test_against_rounded_operands(way, mesh):
    """Breaks if a scale is of other rows than those of one expert on one device, forward or in a gradient."""
    check(block(way, mesh, CONFIG, recipe=GROUP)(), expected(CONFIG, GROUP, mesh), QUANTIZED)


def test_an_expert_has_its_own_scale():
    """Breaks if rows of one expert make those of another coarser, as one scale for all of them does."""
    sizes = jnp.array([3, 0, 4], jnp.int32)
    x = np.array(np.random.default_rng(0).normal(size=(8, 32)), np.float32)
    x[0] *= 1e6
    x[7] = np.nan
    x = jnp.asarray(x)
    for form, other in ((GROUP, True), (moax.recipe.RECIPES["fp8_tensor"], False)):
        rows, _ = by_xla(x, form, "x", find_unblocked(sizes, 1, 8))
        error = np.abs(np.asarray(dequantize(rows))[3:7] - x[3:7]).max()
        assert (error < 0.2) == other, f"{error} with by_group={other}"
        assert np.all(np.asarray(dequantize(rows))[7] == 0), "padding of no group"


@pytest.mark.more
def test_the_kernel_scales_as_xla_does():
    """Breaks if the Hopper kernels give a block of rows, or a block of wgrad, the scale of another group."""
    assert supports_fp8(GROUP)
    x = jnp.asarray(
        np.random.default_rng(1).normal(size=(384, 64)) * np.repeat([1e3, 1, 1], 128)[:, None], jnp.bfloat16
    )
    sizes = jnp.array([70, 0, 128], jnp.int32)
    made = interpret(lambda x, s: by_kernel(x, GROUP, "x", find_groups(s, 128, 384)), x, sizes)
    want, _ = by_xla(x, GROUP, "x", find_unblocked(sizes, 128, 384))
    got = made[0].data.astype(np.float32) * np.asarray(made[0].scale).T
    turned = made[1].data.astype(np.float32).T * np.repeat(np.asarray(made[1].scale)[:, :64], 128, axis=0)
    for rows in (got, turned):
        np.testing.assert_array_equal(rows[:256], np.asarray(dequantize(want))[:256])


@pytest.mark.more
def test_in_passes():
    """Breaks if a pass waits for the maxima of ranks that make no such pass, or scales by another pass's rows."""
    (y, stats), _ = block(
        "custom_partitioning", "2x4", CONFIG, recipe=GROUP, buffer_factor=0.1, exchange="all_to_all"
    )()
    want = expected(CONFIG, GROUP, "2x4")
    assert int(stats.rounds) > 2
    assert np.linalg.norm(y.reshape(want.y.shape) - want.y) < 0.05 * np.linalg.norm(want.y)


@pytest.mark.more
def test_no_device_asks_another_for_a_maximum(fresh_compile):
    """Breaks if scales of groups cost a collective, which is what they save."""
    config = moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2)
    counts = {}
    for name, recipe in (("group", GROUP), ("tensor", "fp8_tensor")):
        found = inspect.inspect_block(config, tokens=64, recipe=recipe, mesh=make_mesh("8x1"))
        counts[name] = len([c for c in found if c.kind == "all-reduce" and c.size == 1])
    assert counts["group"] < counts["tensor"] - 4, counts


def test_dense():
    """Breaks if a dense layer, whose rows are one group, does not scale all rows of a device together."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(16, 32)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(3).normal(size=(32, 24)), jnp.float32)
    tensor = Recipe(Format(block=None), Format(block=None), Format("e5m2", None))
    run = lambda recipe: jax.vjp(lambda x, w: ops.dense(x, w, recipe=recipe), x, w)  # noqa: E731
    (y, pull), (want, pull_want) = run(GROUP), run(tensor)
    jax.tree.map(np.testing.assert_array_equal, (y, pull(y)), (want, pull_want(want)))
