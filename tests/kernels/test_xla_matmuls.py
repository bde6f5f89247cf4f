"""Grouped matmuls by XLA against NumPy in float64, for groups of every awkward size."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.kernels import xla
from moax.kernels.groups import align_up, find_groups, sum_before

M, K, N, E = 1100, 24, 40, 5
CAPACITIES = (0, 128, 256, 384, 512, 896, 1100)
SIZES = {
    "empty": [0, 0, 0, 0, 0],
    "one row": [0, 1, 0, 0, 1],
    "all in the first": [1100, 0, 0, 0, 0],
    "all in the middle": [0, 0, 1100, 0, 0],
    "all in the last": [0, 0, 0, 0, 1100],
    "odd": [3, 257, 0, 511, 13],
    "whole capacities": [256, 512, 0, 1, 255],
    "even": [200, 200, 200, 200, 200],
    "capacity past the end": [860, 0, 0, 0, 200],
}


@functools.partial(jax.jit, static_argnums=(5, 6))
def run(x, w, dy, bias, sizes, align, dtype):
    """All matmuls of one set of operands."""
    groups = find_groups(sizes, align, x.shape[0])
    return {
        "matmul": xla.matmul(x, w, groups, dtype),
        "biased": xla.matmul(x, w, groups, dtype, bias),
        "dgrad": xla.matmul(dy, w, groups, dtype, transpose=True),
        "wgrad": xla.wgrad(x, dy, groups, dtype),
        "total": xla.wgrad(
            x,
            dy,
            groups,
            dtype,
            total=jnp.full((*w.shape[:2], dy.shape[1]), 2, dtype),
        ),
        "bias_grad": xla.bias_grad(dy, groups),
    }


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("align", [1, 32])
@pytest.mark.parametrize("case", SIZES)
def test_matmuls(case, align, dtype):
    """Breaks if a row takes another group's weight or none, if padding, the tail or the weight of an empty group
    reaches a result, or if a window that is moved back from the end loses a row."""
    sizes = np.asarray(SIZES[case])
    starts = np.asarray(sum_before(align_up(jnp.asarray(sizes), align)))
    draw = np.random.default_rng(7).standard_normal
    x, w, dy, bias = (
        np.array(jnp.asarray(draw(shape), dtype).astype(jnp.float32)) for shape in ((M, K), (E, K, N), (M, N), (E, N))
    )
    real = np.zeros(M, bool)
    expected = {"matmul": np.zeros((M, N)), "biased": np.zeros((M, N)), "dgrad": np.zeros((M, K))}
    expected |= {
        "wgrad": np.zeros((E, K, N)),
        "total": np.zeros((E, K, N)),
        "bias_grad": np.zeros((E, N)),
    }
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        real[rows] = True
        expected["matmul"][rows] = x[rows].astype(float) @ w[g]
        expected["biased"][rows] = expected["matmul"][rows] + bias[g]
        expected["dgrad"][rows] = dy[rows].astype(float) @ w[g].T
        expected["wgrad"][g] = x[rows].astype(float).T @ dy[rows]
        expected["total"][g] = 2 + expected["wgrad"][g]
        expected["bias_grad"][g] = dy[rows].astype(float).sum(0)
    x[~real] = dy[~real] = w[sizes == 0] = np.nan
    operands = (jnp.asarray(v, dtype) for v in (x, w, dy, bias))
    results = run(*operands, jnp.asarray(sizes, jnp.int32), align, dtype)
    assert sizes.sum() == real.sum()
    for name, want in expected.items():
        got = np.asarray(results[name].astype(jnp.float32))
        assert results[name].dtype == (jnp.float32 if name == "bias_grad" else dtype)
        scale = 1e-5 if results[name].dtype == jnp.float32 else 1e-2
        np.testing.assert_allclose(
            got,
            want,
            rtol=scale,
            atol=scale * max(1.0, np.abs(want).max(initial=0)),
        )


def test_one_group():
    """Breaks if rows without groups, as a shared expert has them, are not one plain matmul."""
    x, w, dy, bias = (jnp.asarray(np.random.default_rng(3).standard_normal(s), jnp.float32) for s in SHAPES)
    results = run(x, w, dy, bias, None, 1, jnp.float32)
    np.testing.assert_allclose(results["biased"], x @ w[0] + bias, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results["dgrad"], dy @ w[0].T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results["wgrad"], (x.T @ dy)[None], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results["total"], 2 + (x.T @ dy)[None], rtol=1e-5, atol=1e-5)


SHAPES = ((6, 4), (1, 4, 3), (6, 3), (1, 3))


@pytest.mark.parametrize("case", [c for c in SIZES if sum(SIZES[c]) <= 1024])
def test_work_is_proportional_to_rows(case, monkeypatch):
    """Breaks if a matmul runs all groups on all rows, as `lax.ragged_dot` does on CPU, or if memory holds the
    result of one: every matmul is counted, the loop over groups unrolled."""
    rows = []

    def counting(a, b, contract, *dtype, plain=xla._dot):
        y = plain(a, b, contract, *dtype)
        rows.append(y.size * a.shape[contract[0][0][0]] / (K * N))
        return y

    monkeypatch.setattr(xla, "_dot", counting)
    sizes = jnp.asarray(SIZES[case], jnp.int32)
    groups = find_groups(sizes, 1, M)
    x, w, dy = (jnp.ones(shape, jnp.float32) for shape in ((M, K), (E, K, N), (M, N)))
    held = sum(next(c for c in CAPACITIES if c >= size) for size in SIZES[case])
    for multiply in (
        lambda: xla.matmul(x, w, groups, jnp.float32),
        lambda: xla.matmul(dy, w, groups, jnp.float32, transpose=True),
        lambda: xla.wgrad(x, dy, groups, jnp.float32),
        lambda: xla.wgrad(x, dy, groups, jnp.float32, total=jnp.zeros((E, K, N))),
    ):
        rows.clear()
        with jax.disable_jit():
            multiply()
        assert sum(rows) == held
        assert largest(jax.make_jaxpr(multiply)().jaxpr) <= max(M * N, E * K * N)


def largest(jaxpr):
    """Elements of the largest result of any equation, those of inner jaxprs included."""
    results = max((v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars), default=0)
    inner = [v for eqn in jaxpr.eqns for v in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns"))]
    return max(
        [
            results,
            *(largest(getattr(v, "jaxpr", v)) for v in inner if hasattr(getattr(v, "jaxpr", v), "eqns")),
        ]
    )


def capacities(rows, groups):
    return xla.plan_matmuls(find_groups(jnp.zeros(groups, jnp.int32), 1, rows), rows)[0]


@pytest.mark.parametrize(
    ("rows", "groups"),
    [(1, 1), (1, 3), (300, 300), (M, E), (5000, 1), (65536, 32), (4097, 7)],
)
def test_capacities(rows, groups):
    """Breaks if no capacity holds some group, or if a group costs more than twice its rows, a quarter of the mean group
    and a step: work that grows with experts times rows."""
    results = capacities(rows, groups)
    assert results[0] == 0 and results[-1] == rows and list(results) == sorted(set(results))
    for size in range(rows + 1):
        held = next(capacity for capacity in results if capacity >= size)
        assert held <= 2 * size + rows / (4 * groups) + xla.STEP + 1
    assert capacities(M, E) == CAPACITIES
