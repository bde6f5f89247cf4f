"""Quantized blocks against products of rounded operands in NumPy, which isolates the implementation, and against the
plain float32 block, which bounds the method. tests/block/test_moe.py covers recipes on more meshes.

Covers: recipes x widths that no block divides x meshes; the wire's
format x transports; several passes; what crosses.

The plain bound: rounding to e4m3 is off by at most 2^-4 of a value and by 2.6% in the root mean square (uniform
mantissas); a product of two such operands with random signs is off by sqrt(2) times that, 3.7%. y passes two products
in a row, gradients of x up to four, those of weights as many with one operand fresh. Hence 8% for y, 14% for gradients.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

import moax
from moax.recipe import RECIPES
from support import mark_rest, rel_norm
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
ALL = {
    **RECIPES,
}
PLAIN_Y = 0.08
PLAIN_GRAD = 0.14


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
    mark_rest([
        *((name, "none", "", "auto") for name in ("fp8_block", "mxfp8")),
        ("fp8_block", "custom_partitioning", "2x4", "model"), ("fp8_block", "explicit", "tp2x2x2", "experts"),
        ("mxfp8", "shard_map", "tp2x2x2", "model"), ("fp8_block", "custom_partitioning", "2x4", "auto"),
        ("mxfp8", "explicit", "tp2x2x2", "auto"), ("mxfp8", "custom_partitioning", "dp2x2x2", "auto"),
    ], 5),
)  # fmt: skip
def test_against_rounded_operands(recipe, way, mesh, fsdp_dim):
    """Breaks if an operand is quantized along the wrong dim, in the wrong format, in other blocks, with other rows than
    those of its expert on its device, or not at all; if the blocks of a weight depend on its shards (160 over 2 is 80,
    within the first block of 128), or shards that hold a block do not agree on its scale."""
    check(run(recipe, way, mesh, fsdp_dim=fsdp_dim), expected(CONFIG, ALL[recipe], mesh), QUANTIZED)


@pytest.mark.parametrize("recipe", RECIPES)
def test_against_full_precision(recipe):
    """Breaks if the method loses more than the rounding of its operands."""
    check_against_plain(run(recipe, fsdp_dim="auto"), PLAIN_Y, PLAIN_GRAD)


@pytest.mark.more
@pytest.mark.parametrize("recipe", ("fp8_block", "mxfp8"))
def test_in_passes(recipe):
    """Breaks if passes are quantized otherwise than rows are: y and dx of block scales are those of one pass;
    gradients of weights, whose blocks run over rows of a pass, stay within the bounds of the method."""
    (y, stats), (dx, dparams) = run(
        recipe,
        "custom_partitioning",
        "2x4",
        exchange="all_to_all",
        buffer_factor=0.1,
    )
    assert int(stats.rounds) > 2
    check_against_plain(((y, stats), (dx, dparams)), PLAIN_Y, PLAIN_GRAD)
    want = expected(CONFIG, ALL[recipe], "2x4")
    assert rel_norm(y.reshape(want.y.shape), want.y) < QUANTIZED
    assert rel_norm(dx.reshape(want.dx.shape), want.dx) < QUANTIZED
