"""The block in several rounds over its buffers: exact for every routing, counted, and not compiled where one suffices.

Covers: transports x meshes x ways x routings, forward and every gradient and the number of rounds against NumPy; bits
where one round suffices; the order of both directions on a CPU; capacities; biases in bfloat16; remat and scan; memory;
refused factors. Rounds of balanced routings are also rows of tests/block/test_moe.py, and rounds of each recipe are in
tests/block/test_quantized.py.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import inspect
from moax.exchange.transport import allot_slots
from moax.kernels.groups import allot_rows
from support import TOKENS, make_mesh, make_params, put, rel_norm, size, spec
from support.block import BASE, MESH, ONE_DEVICE, block, check, cotangent, expected, make_x
from support.oracle.block import block as block_by_numpy
from support.oracle.ops import choose_experts

ROUTED = dataclasses.replace(
    BASE,
    shared_d_ff=0,
    router=moax.RouterConfig(score="sigmoid", bias=True, aux_loss=1e-2),
)
FACTOR = 0.4
FAR = 10.0  # a bias of the selection that no score outweighs


def biases(ranks: int) -> dict[str, np.ndarray]:
    """The bias that makes each routing, on a mesh with so many ranks of ep; it chooses experts and weighs none."""
    experts = np.arange(ROUTED.num_experts)
    rank = experts // (ROUTED.num_experts // ranks)
    hot = {f"all to rank {r}": FAR * (rank == r) for r in sorted({0, ranks - 1})}
    return {
        "balanced": 0.0 * experts,
        "zipf": -0.15 * np.log1p(experts),
        "all to one expert": FAR * (experts == 5),
        **hot,
        "none to a rank": -FAR * (rank == ranks // 2),
    }


def rounds_of(mesh: str, exchange: str, experts: np.ndarray, factor: float) -> int:
    """NumPy's word on the most rounds of a rank, of the experts [tokens, K] of all shards."""
    ranks = size(mesh, "ep")
    shards = size(mesh, *TOKENS)
    top_k = experts.shape[1]
    local = len(experts) // shards
    each = ROUTED.num_experts // ranks
    slots, _ = allot_slots(local, top_k, ranks, ROUTED.num_experts, None, factor)
    slots = local if exchange == "all_gather" else slots
    room = allot_rows(local * top_k, factor, slots * ranks * min(top_k, each))
    later = local if exchange == "all_gather" else math.ceil(slots / 2)
    rows = math.ceil(room * 9 / 20)
    largest = 1
    # A group has the tokens of all ranks of ep.
    for group in experts.reshape(shards // ranks, ranks * local, top_k):
        # The loads are what is left for each rank, by round of the exchange.
        loads = np.zeros((ranks, local), int)
        for rank in range(ranks):
            mine = group // each == rank
            slot = np.cumsum(mine.any(-1).reshape(ranks, local), axis=1).reshape(-1) - 1
            left = mine.copy()
            arrivals = np.argwhere(mine & (slot < slots)[:, None])  # in the order of arrival
            by_expert = arrivals[np.argsort(group[tuple(arrivals.T)], kind="stable")]
            left[tuple(by_expert[:room].T)] = False
            again = np.cumsum(left.any(-1).reshape(ranks, local), axis=1).reshape(-1) - 1
            np.add.at(loads[rank], again // later, left.sum(-1) * left.any(-1))
        ends = np.flatnonzero(loads.any(0))
        largest = max(
            largest,
            1 + sum(max(1, math.ceil(n / rows)) for n in loads.max(0)[: ends.max(initial=-1) + 1]),
        )
    return largest


def check_routings(
    way: str,
    mesh: str,
    exchange: str,
    config=ROUTED,
    factor: float = FACTOR,
) -> set[int]:
    """Compiles one program and gives it every routing; returns the numbers of rounds that they took."""
    program = block(way, mesh, config, exchange=exchange, buffer_factor=factor)
    x = make_x(config)
    flat = np.asarray(x).reshape(-1, config.d_model)
    seen = set()
    for name, bias in biases(size(mesh, "ep")).items():
        params = dataclasses.replace(
            make_params(config),
            router_bias=jnp.asarray(bias, jnp.float32),
        )
        sharding = program.args[1].router_bias.sharding
        placed = dataclasses.replace(
            program.args[1],
            router_bias=jax.device_put(params.router_bias, sharding),
        )
        got = dataclasses.replace(program, args=(program.args[0], placed))()
        want = block_by_numpy(flat, params, config, cotangent(flat.shape), d_losses=(1, 1))
        assert int(got[0][1].dropped) == 0
        check(got, want, 2 * MESH)
        logits = flat.astype(np.float64) @ np.asarray(params.router, np.float64)
        experts = choose_experts(logits, config.router, config.top_k, bias)
        rounds = int(got[0][1].rounds)
        assert rounds == rounds_of(mesh, exchange, experts, factor), name
        seen.add(rounds)
    return seen


@pytest.mark.parametrize(
    ("mesh", "way", "exchange"),
    [
        ("2x4", "custom_partitioning", "all_to_all"),
        *(
            pytest.param(*row, marks=pytest.mark.more)
            for row in (
                ("dp2x2x2", "shard_map", "all_gather"),
                ("1x8", "explicit", "all_to_all"),
                ("tp2x2x2", "explicit", "all_to_all"),
                ("2x4", "user_vma", "all_to_all"),
                ("4x2", "shard_map", "all_gather"),
                ("8x1", "custom_partitioning", "all_to_all"),
            )
        ),
    ],
)
def test_every_routing_is_exact(mesh, way, exchange):
    """Breaks if a round loses or repeats a row, a gradient of a later round is lost, ranks disagree on their rounds, or
    `stats.rounds` is not the most of any rank."""
    numbers_of_rounds = check_routings(way, mesh, exchange)
    assert len(numbers_of_rounds) > 1 or mesh == "8x1", numbers_of_rounds


def trained(x, params, mesh, config, **options):
    """y, stats and gradients of one step on the mesh."""

    def loss(x, params):
        y, stats = moax.moe(x, params, config, **options)
        return jnp.vdot(y, jnp.asarray(cotangent(y.shape))), (y, stats)

    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(x, params)


@pytest.mark.more
def test_bits_of_one_round_do_not_depend_on_the_factor():
    """Breaks if the size of a buffer, or the mere possibility of a second round, changes a bit of a balanced step."""
    config = dataclasses.replace(BASE, shared_d_ff=0)
    mesh = make_mesh("2x4")
    args = put(
        mesh,
        (spec("2x4", TOKENS), moax.param_specs(config, mesh=mesh)),
        (make_x(config, 1024), make_params(config)),
    )
    got = [trained(*args, mesh, config, exchange="all_to_all", buffer_factor=factor) for factor in (1.25, 2.0, None)]
    assert [int(value[0][1][1].rounds) for value in got] == [1, 1, 1]
    for other in got[:2]:
        jax.tree.map(np.testing.assert_array_equal, other, got[2])


def test_a_worst_case_that_fits_compiles_no_loop():
    """Breaks if one device, whose rows are T K by any routing, or a buffer of the worst case pays for rounds."""
    x = make_x(BASE)
    params = make_params(BASE)
    for factor in (1.0, 1.25, None):
        assert "while[" not in str(jax.make_jaxpr(lambda x, f=factor: moax.moe(x, params, BASE, buffer_factor=f))(x))


@pytest.mark.parametrize(("mesh", "loops"), [("4x2", False), ("2x4", True)])
def test_two_ranks_have_no_loop(mesh, loops):
    """Breaks if two ranks of ep pay for a loop of overflow rounds by default, or four allot the worst case."""
    mesh = make_mesh(mesh)
    x = make_x(BASE, 1024)
    with jax.set_mesh(mesh):
        program = str(jax.make_jaxpr(lambda x: moax.moe(x, make_params(BASE), BASE)[0])(x))
    assert ("while[" in program) == loops


@pytest.mark.more
def test_without_biases():
    """Breaks if what a config leaves out has a gradient to sum."""
    config = dataclasses.replace(BASE, use_bias=False)
    check(block("none", "", config, buffer_factor=0.1)(), expected(config), ONE_DEVICE)


@pytest.mark.more
@pytest.mark.parametrize(
    ("exchange", "save_rows"),
    [("all_to_all", False), ("all_to_all", True), ("all_gather", True)],
)
def test_saved_rows_change_nothing(exchange, save_rows):
    """Breaks if the rows that backward makes again are not those of forward."""
    check(
        block("shard_map", "2x4", exchange=exchange, save_rows=save_rows)(),
        expected(BASE),
        MESH,
    )


@pytest.mark.more
def test_bias_gradients_are_not_rounded():
    """Breaks if sums in float32 of a bias's gradient round the dtype of the activations on their way to its own."""
    x = make_x(BASE).astype(jnp.bfloat16)
    params = make_params(BASE)

    def loss(params, factor):
        y = moax.moe(x, params, BASE, buffer_factor=factor)[0].astype(jnp.float32)
        return jnp.vdot(y, jnp.asarray(cotangent(y.shape)))

    got = jax.jit(jax.grad(loss), static_argnums=1)(params, 0.3)
    want = jax.jit(jax.grad(loss), static_argnums=1)(params, None)
    assert rel_norm(got.bi, want.bi) < 2.0**-10 and rel_norm(got.bo, want.bo) < 2.0**-10


@pytest.mark.more
def test_drops_are_those_of_the_capacity():
    """Breaks if rounds change which assignments a capacity drops, or what they leave."""
    config = dataclasses.replace(BASE, shared_d_ff=0, capacity_factor=0.7)
    mesh = make_mesh("2x4")
    args = put(
        mesh,
        (spec("2x4", TOKENS), moax.param_specs(config, mesh=mesh)),
        (make_x(config), make_params(config)),
    )
    small = trained(*args, mesh, config, exchange="all_to_all", buffer_factor=0.1)
    whole = trained(*args, mesh, config, exchange="all_to_all", buffer_factor=None)
    assert int(small[0][1][1].dropped) == int(whole[0][1][1].dropped) > 0
    assert int(small[0][1][1].rounds) > 1 == int(whole[0][1][1].rounds)
    assert rel_norm(small[0][1][0], whole[0][1][0]) < MESH
    assert all(
        jax.tree.leaves(
            jax.tree.map(
                lambda a, b: rel_norm(a, b) < 2 * MESH,
                small[1],
                whole[1],
            )
        )
    )


def test_backward_waits_for_the_rounds_of_forward():
    """Breaks if XLA for CPUs may run a collective of backward beside one of forward's loop, where dy does not depend on
    y: it pairs one device's first with another's second. Nobody reads y here, so only backward can keep the loop."""
    config = dataclasses.replace(BASE, shared_d_ff=0)
    mesh = make_mesh("2x4")
    args = put(
        mesh,
        (spec("2x4", TOKENS), moax.param_specs(config, mesh=mesh)),
        (make_x(config), make_params(config)),
    )

    def loss(x, params):
        y = moax.moe(x, params, config, buffer_factor=0.1)[0]
        return jnp.vdot(y, jnp.asarray(cotangent(y.shape)))

    with jax.set_mesh(mesh):
        traffic = inspect.collectives(jax.jit(jax.grad(loss, argnums=(0, 1))), *args, mesh=mesh)
    agreements = [c for c in traffic if c.open_loop and c.kind == "all-reduce"]  # one in each loop
    assert len(agreements) == 2


@pytest.mark.more
def test_in_a_rematerialized_scan():
    """Breaks if rounds, whose backward computes forward again, do not nest in a user's own remat and scan."""
    x = make_x(BASE)
    params = make_params(BASE)

    def loss(x, factor):
        layer = jax.checkpoint(
            lambda x, _: (x + moax.moe(x, params, BASE, buffer_factor=factor)[0], None),
        )
        return jnp.sum(jax.lax.scan(layer, x, None, length=2)[0] ** 2)

    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(x, factor) for factor in (0.1, None))
    assert rel_norm(got, want) < ONE_DEVICE


@pytest.mark.more
def test_memory_is_that_of_the_buffers():
    """Breaks if a buffer of the worst case is left: with 8 ranks the program of the balanced load takes a third of the
    memory at most."""
    config = moax.MoEConfig(64, 64, 64, 4)
    mesh = make_mesh("1x8")
    args = put(mesh, (spec("1x8", TOKENS), moax.param_specs(config, mesh=mesh)),
               (make_x(config, 32768), make_params(config)))  # fmt: skip

    def loss(x, params, factor):
        return jnp.sum(
            moax.moe(x, params, config, exchange="all_to_all", buffer_factor=factor)[0] ** 2,
        )

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
        used = {f: step.lower(*args, f).compile().memory_analysis().temp_size_in_bytes for f in (1.25, None)}
    assert used[1.25] < used[None] / 3, used


@pytest.mark.parametrize("factor", [0, -1.0, math.inf, math.nan, "1.25", True])
def test_refuses_what_is_no_factor(factor):
    """Breaks if a factor without a meaning is taken."""
    with pytest.raises(ValueError, match="buffer_factor=.* must be a finite number > 0"):
        moax.Options(buffer_factor=factor)


@functools.cache
def _allotted() -> tuple[int, ...]:
    return tuple(allot_rows(balanced, 1.25, 10**6) for balanced in (0, 5, 24, 100, 1000, 65536))


def test_allotted_rows():
    """Breaks if small buffers have no room for chance, large ones are not the factor's, or the worst case is passed."""
    assert _allotted() == (64, 81, 113, 214, 1250, 81920)
    assert allot_rows(100, 0.5, 10**6) == 107
    assert allot_rows(100, 1.25, 96) == 96 == allot_rows(9.0, None, 96)
    assert allot_rows(0.01, 0.001, 50) == 1
