"""Muon of optax over stacks of experts, on 4x2: the optimizer's own step has no collective where E alone is split.

Covers: Auto and Explicit axes; gate and up apart and together; each matrix by itself (docs/how-to/muon.md).
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

import moax
from moax import inspect
from support import make_mesh, rel_error

optax = pytest.importorskip("optax")
contrib = pytest.importorskip("optax.contrib")

CONFIG = moax.MoEConfig(d_model=64, d_ff=96, num_experts=8, top_k=2)
# The output dims of wi [E, H, 2, F] are F, or gate and up as one matrix.
APART = 3
TOGETHER = (2, 3)


def muon(columns=APART):
    """Muon for wi and wo, with `columns` as the output dims of wi; Adam for the router."""

    def matrices(params):
        none = jax.tree.map(lambda _: None, params)
        dims = contrib.MuonDimensionNumbers
        return dataclasses.replace(none, wi=dims(1, columns), wo=dims(1, 2))

    return contrib.muon(1e-2, muon_weight_dimension_numbers=matrices)


def collectives(fsdp_dim: str, way: str, columns=APART) -> list[inspect.Collective]:
    """The collectives of the compiled optimizer step, for gradients in the layout of their weights."""
    optimizer = muon(columns)

    def step(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with jax.set_mesh(make_mesh("4x2", way)):
        params = moax.init(jax.random.key(0), CONFIG, axes=moax.Axes(fsdp_dim=fsdp_dim))
        return inspect.collectives(jax.jit(step), params, optimizer.init(params), params)


@pytest.mark.loose
@pytest.mark.parametrize("columns", [APART, TOGETHER], ids=["apart", "together"])
@pytest.mark.parametrize("way", ["custom_partitioning", "explicit"])
def test_split_experts_need_no_collective(way, columns):
    """Breaks if `fsdp_dim="experts"` splits a matrix, or XLA gathers the stack for the batch of matrices."""
    traffic = collectives("experts", way, columns)
    assert not traffic, inspect.table(traffic)


@pytest.mark.loose
def test_split_matrices_are_gathered():
    """Breaks if a step on split matrices, which must gather them, shows no collective: the test above then sees none by
    blindness."""
    traffic = collectives("model", "custom_partitioning")
    assert {c.axes for c in traffic if c.kind == "all-gather"} == {("fsdp",)}
    assert inspect.total_bytes(traffic) > CONFIG.num_experts * CONFIG.d_model * CONFIG.d_ff


@pytest.mark.loose
def test_each_matrix_is_updated_by_itself():
    """Breaks if the dims that we name are not those of a matrix: Muon on the stack is Muon on each matrix alone."""
    with jax.set_mesh(make_mesh("4x2")):
        params = moax.init(jax.random.key(0), CONFIG, axes=moax.Axes(fsdp_dim="experts"))
        grads = moax.init(jax.random.key(1), CONFIG, axes=moax.Axes(fsdp_dim="experts"))
        optimizer = muon()
        updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    alone = contrib.muon(1e-2)
    for e, gate in ((0, 0), (5, 1)):
        matrix, weight = (np.asarray(tree.wi)[e, :, gate] for tree in (grads, params))
        want, _ = alone.update(matrix, alone.init(weight), weight)
        assert rel_error(np.asarray(updates.wi)[e, :, gate], want) < 1e-5
    matrix, weight = (np.asarray(tree.wo)[3] for tree in (grads, params))
    want, _ = alone.update(matrix, alone.init(weight), weight)
    assert rel_error(np.asarray(updates.wo)[3], want) < 1e-5
