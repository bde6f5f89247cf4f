"""Grouped wgrad against float64 loops over groups.

Covers: sizes of groups x recipes; ways x layouts of dw, with what crosses; dtypes; every error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moax import Unsupported, inspect
from moax.ops import grouped_matmul, grouped_wgrad
from moax.recipe import RECIPES
from support import TOKENS, fake_operands, in_user_shard_map, program, random, rel_error, size, some, spec
from support.oracle.ops import grouped_matmul_vjp
from support.products import PATTERNS, problem


def by_hand(x, dy, sizes, rows):
    """dw in float64, of groups that begin at the rows `rows`."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    groups = [slice(first, first + n) for n, first in zip(sizes, rows, strict=True)]
    return np.stack([np.tensordot(x[mine], dy[mine], ((0,), (0,))) for mine in groups])


@pytest.mark.parametrize("pattern", some(tuple(PATTERNS), 2))
def test_group_sizes(pattern):
    """Breaks if a degenerate size or a NaN of padding reaches a sum, or an empty group's dw is not 0."""
    sizes = PATTERNS[pattern]
    (x, _, _, _, dy), _ = problem(sizes, 8, 88, 20, (2, 12))
    dw = jax.jit(lambda x, dy: grouped_wgrad(x, dy, jnp.asarray(sizes), align=8))(x, dy)
    starts = np.cumsum([0, *(-(-n // 8) * 8 for n in sizes)])[:-1]
    assert rel_error(dw, by_hand(x, dy, sizes, starts), per=0) < 2e-6


@pytest.mark.parametrize("recipe", some(tuple(RECIPES), 2))
def test_recipes(recipe):
    """Breaks if the operands are not those of the grouped matmul's own wgrad: quantized along the rows of a group."""
    sizes, align = (70, 0, 128, 1), RECIPES[recipe].row_alignment
    args, real = problem(sizes, align, 512, 200, (96,))
    x, w, _, _, dy = args
    want = grouped_matmul_vjp(*args, align, quantized=fake_operands(x, w, dy, RECIPES[recipe], real))
    got = jax.jit(lambda x, dy: grouped_wgrad(x, dy, jnp.asarray(sizes), recipe=recipe))(x, dy)
    assert rel_error(got, want[2], per=0) < 2e-6


LAYOUTS = {"experts": P(("ep", "fsdp")), "model": P("ep", "fsdp"), "whole": P("ep"),
           "tp columns": P("ep", "fsdp", None, "tp"), "tp rows": P("ep", ("tp", "fsdp"))}  # fmt: skip
CASES = [("custom_partitioning", "model"), ("explicit", "experts"), ("shard_map", "tp columns"), ("user", "model"),
         ("custom_partitioning", "tp rows"), ("explicit", "whole"), ("user_vma", "tp columns")]  # fmt: skip


@pytest.mark.parametrize("way, layout", some(CASES, 1))
def test_on_mesh(way, layout, fresh_compile):
    """Breaks if dw does not lie as `w_spec` says, is not summed over every shard of the rows, or leaves by more than a
    reduce-scatter."""
    mesh = "tp2x2x2" if layout.startswith("tp") else "dp2x2x2"
    ep, shards, local, rows = size(mesh, "ep"), size(mesh, *TOKENS), (5, 0, 3, 7), 16
    experts, width, columns = ep * len(local), 32, (2, 8)
    of_w = spec(mesh, *LAYOUTS[layout])
    tp = ["tp" if "tp" in (e or ()) else None for e in (*of_w, *[None] * (4 - len(of_w)))]
    x, dy = random(0, rows * shards, width), random(1, rows * shards, *columns)
    sizes = np.tile(np.array(local, np.int32), shards)
    of_x, of_dy = spec(mesh, TOKENS, tp[1]), spec(mesh, TOKENS, *tp[2:])

    def forward(x, dy, sizes, engine):
        dw = grouped_wgrad(x, dy, sizes, w_spec=of_w, engine=engine)
        return (), (jax.lax.psum(dw, "dp") if in_user_shard_map() and mesh.startswith("dp") else dw)

    p = program(way, mesh, forward, (x, dy, sizes),
                (of_x, of_dy, spec(mesh, TOKENS)), (), of_w)  # fmt: skip
    _, dw = p()
    total = np.zeros((experts, width, *columns))
    for s in range(shards):
        mine, first = slice(rows * s, rows * (s + 1)), (s % ep) * len(local)
        these = slice(first, first + len(local))
        starts = np.cumsum([0, *local])[:-1]
        total[these] += by_hand(x[mine], dy[mine], local, starts)
    assert rel_error(dw, total) < 5e-6
    if not way.startswith("user"):
        placed = p.placed()[1]
        parts = [size(mesh, *((e,) if isinstance(e, str) else e or ())) for e in (*of_w, *[None] * (4 - len(of_w)))]
        assert placed.sharding.shard_shape(placed.shape) == tuple(n // c for n, c in zip(dw.shape, parts, strict=True))
        kinds = {c.kind for c in p.under(lambda *args: inspect.collectives(p.fn, *args)) if c.size > 64}
        assert kinds <= {"reduce-scatter", "all-reduce", "all-gather"}
        assert ("reduce-scatter" in kinds) == (layout != "whole")


def test_is_the_gradient_of_the_product():
    """Breaks if dw differs from the one that `grouped_matmul` makes, or a float32 dw of bfloat16 rows was rounded."""
    (x, w, sizes, _, dy), _ = problem((7, 0, 30, 1), 1, 48, 64, (24,))
    x, dy = (jnp.asarray(v).astype(jnp.bfloat16) for v in (x, dy))
    sizes = jnp.asarray(sizes)
    _, pull = jax.vjp(lambda w: grouped_matmul(x, w, sizes), jnp.asarray(w).astype(jnp.bfloat16))
    narrow, wide = (grouped_wgrad(x, dy, sizes, preferred_element_type=out) for out in (None, jnp.float32))
    assert narrow.dtype == jnp.bfloat16 and wide.dtype == jnp.float32
    np.testing.assert_array_equal(narrow.astype(jnp.float32), pull(dy)[0].astype(jnp.float32))
    clean = [np.nan_to_num(np.asarray(v.astype(jnp.float32))) for v in (x, dy)]
    starts = np.cumsum([0, *np.asarray(sizes)])[:-1]
    assert rel_error(wide, by_hand(*clean, np.asarray(sizes), starts)) < 2e-6


def test_errors():
    """Breaks if shapes that do not fit are not named, or a derivative that does not exist is."""
    with pytest.raises(Unsupported, match="grouped_wgrad is the gradient of a weight"):
        jax.grad(lambda x: grouped_wgrad(x, jnp.ones((4, 6)), jnp.full(2, 2)).sum())(jnp.ones((4, 8)))
    with pytest.raises(ValueError, match=r"x, dy, group_sizes have shapes \(4, 8\), \(5, 6\), \(2,\)"):
        grouped_wgrad(jnp.zeros((4, 8)), jnp.zeros((5, 6)), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="align=3 must be a multiple of 128"):
        grouped_wgrad(jnp.zeros((4, 8)), jnp.zeros((4, 6)), jnp.zeros(2, jnp.int32), recipe="fp8_block", align=3)
