"""Careless use: every wrong call is a ValueError that names the argument, and what looks odd but is legal is right.

Covers: a table of wrong calls of every public function; no tokens; integer dtypes; second derivatives; float64; NumPy
numbers; the precision of the router's gradient and of its weights.
"""

import contextlib
import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import MoEConfig, Options, RouterConfig, ops, reference
from moax.checks import check_arrays
from support import TOKENS, make_mesh, make_params, mark_rest, put, random, rel_error, spec

CONFIG = MoEConfig(d_model=16, d_ff=8, num_experts=4, top_k=2)
X = np.ones((6, 16), np.float32)
PARAMS = make_params(CONFIG)
ADAPTERS = moax.lora.init(jax.random.key(0), CONFIG, 2)
MESH = jax.sharding.AbstractMesh((2,), ("ep",))
LOGITS = np.ones((6, 4), np.float32)
IDS = np.zeros((6, 2), np.int32)
ROWS = np.ones((6, 8), np.float32)
W = np.ones((4, 8, 8), np.float32)
SIZES = np.array([2, 2, 1, 1], np.int32)
NOT_ARRAYS = (None, [[1.0]], "x", {}, 1.0, PARAMS, jax.random.key(0))
NOT_COUNTS = (None, 0, -1, 2.0, "2", True, [2])


def _with(call, name, values, **others):
    """Returns the cases (function, arguments, name) in which one argument has each of these values."""
    return [(call, {**others, name: value}, name) for value in values]


def _moe(**changes):
    arguments = dict(x=X, params=PARAMS, config=CONFIG) | changes
    return moax.moe(
        arguments.pop("x"),
        arguments.pop("params"),
        arguments.pop("config"),
        **arguments,
    )


def _params(**changes):
    return _moe(params=dataclasses.replace(PARAMS, **changes))


MATMUL = dict(x=ROWS, w=W, group_sizes=SIZES)
DISPATCH = dict(x=X, experts=IDS, weights=np.ones((6, 2), np.float32), num_experts=4)
PERMUTE = dict(x=X, experts=IDS, num_groups=4)
DENSE = dict(x=X, w=np.ones((16, 4), np.float32))
LOGITS_OF = dict(x=X, w=np.ones((16, 4), np.float32))
ROUTE = dict(logits=LOGITS, config=RouterConfig(), top_k=2)
UPDATE = dict(bias=np.zeros(4, np.float32), tokens_per_expert=SIZES)
EMPTY = np.zeros((0, 16), np.float32)
INTS = np.ones((6, 16), np.int32)
HALVES = np.ones((6, 8), np.int8)

WRONG = [
    *_with(_moe, "x", (*NOT_ARRAYS, INTS, np.ones(16, np.float32), np.ones((6, 15), np.float32))),
    *_with(_moe, "params", (None, X, {}, [PARAMS], "params")),
    *_with(_moe, "config", (None, {}, "mixtral", RouterConfig(), 3)),
    *_with(_moe, "options", (None, {}, "auto", moax.Axes())),
    *_with(_moe, "recipe", ("fp4", 8, {}, ["fp8_block"], True, moax.Format())),
    *_with(_moe, "axes", ("ep", None, {}, ("dp", "ep"), 1)),
    *_with(_moe, "exchange", ("mail", None, {}, 1, ["auto"])),
    *_with(_moe, "kernels", ("cuda", None, {}, ["xla"])),
    *_with(_moe, "engine", ("gspmd", None, {}, ["auto"])),
    *_with(_moe, "buffer_factor", (0, -1.0, "2", True, [1], float("nan"), float("inf"))),
    *_with(_moe, "save_rows", (1, "yes")),
    *_with(_moe, "return_routing", ("no", 1, None, np.ones(()))),
    *_with(moax.quantize_params, "dtype", (jnp.int8, "bf16", jnp.float64, None), params=PARAMS, config=CONFIG),
    *_with(_params, "wi", (X, [1.0], "wi", None, np.ones((4, 16, 2, 8), np.int32))),
    *_with(_params, "router", (None, {}, np.ones((16, 5), np.float32))),
    *_with(moax.route, "logits", (*NOT_ARRAYS, np.ones(4, np.float32), IDS), config=RouterConfig(), top_k=2),
    *_with(moax.route, "config", (None, {}, "softmax", CONFIG), logits=LOGITS, top_k=2),
    *_with(moax.route, "top_k", (*NOT_COUNTS, 5), logits=LOGITS, config=RouterConfig()),
    *_with(moax.route, "bias", ([0.0] * 4, np.ones(4, np.int32)), **ROUTE | dict(config=RouterConfig(bias=True))),
    *_with(moax.route, "sequences", (None, [0], X[:, 0], SIZES), logits=LOGITS, top_k=2,
           config=RouterConfig(sequence_aux_loss=1.0)),
    *_with(moax.route, "axes", ("ep", None), **ROUTE),
    *_with(ops.router_logits, "x", (*NOT_ARRAYS, INTS), w=DENSE["w"]),
    *_with(ops.router_logits, "w", (*NOT_ARRAYS, X), x=X),
    *_with(ops.grouped_matmul, "x", (*NOT_ARRAYS, HALVES, X), w=W, group_sizes=SIZES),
    *_with(ops.grouped_matmul, "w", (*NOT_ARRAYS, ROWS, W[..., :0]), x=ROWS, group_sizes=SIZES),
    *_with(ops.grouped_matmul, "w", (W[:0],), x=ROWS, group_sizes=SIZES[:0]),
    *_with(ops.grouped_matmul, "w", (W[:, :0],), x=ROWS[:, :0], group_sizes=SIZES),
    *_with(ops.grouped_matmul, "group_sizes", ([2, 2, 1, 1], None, SIZES.astype(np.float32), SIZES > 1, SIZES[:3]),
           x=ROWS, w=W),
    *_with(ops.grouped_matmul, "bias", ([0.0], np.ones((4, 8), np.int32), np.ones(8, np.float32)), **MATMUL),
    *_with(ops.grouped_matmul, "align", (0, 2.0, "8", True), **MATMUL),
    *_with(ops.grouped_matmul, "w_spec", ("ep", ("ep", None), jax.sharding.PartitionSpec(*"abcd")), **MATMUL),
    *_with(ops.permute, "x", (*NOT_ARRAYS, INTS), experts=IDS, num_groups=4),
    *_with(ops.permute, "weights", (*NOT_ARRAYS[1:], IDS, X), x=X, experts=IDS, num_groups=4),
    *_with(ops.permute, "experts", ([[0, 1]], None, X, IDS > 0, IDS[:3]), x=X, num_groups=4),
    *_with(ops.permute, "num_groups", NOT_COUNTS, x=X, experts=IDS),
    *_with(ops.permute, "capacity", NOT_COUNTS[1:], **PERMUTE),
    *_with(ops.unpermute, "plan", (None, {}, IDS), rows=ROWS, weights=np.ones((6, 2), np.float32)),
    *_with(ops.dispatch, "experts", ([[0]], X, None), **{k: v for k, v in DISPATCH.items() if k != "experts"}),
    *_with(ops.dispatch, "num_experts", NOT_COUNTS, **{k: v for k, v in DISPATCH.items() if k != "num_experts"}),
    *_with(ops.dispatch, "capacity_factor", (0, -1.0, "1", True, float("nan")), **DISPATCH),
    *_with(ops.combine, "received", (None, {}, X), rows=X),
    *_with(ops.dense, "x", (*NOT_ARRAYS, INTS), w=DENSE["w"]),
    *_with(ops.dense, "w", (*NOT_ARRAYS, np.ones((15, 4), np.float32), np.ones((16, 0), np.float32)), x=X),
    *_with(ops.dense, "w", (np.ones((0, 4), np.float32),), x=X[:, :0]),
    *_with(ops.dense, "bias", ([0.0], np.ones(5, np.float32)), **DENSE),
    *_with(ops.activate, "h", NOT_ARRAYS, activation="silu"),
    *_with(ops.activate, "activation", (None, ["silu"], "sillu", 1), h=np.ones((6, 1, 8), np.float32)),
    *_with(ops.activate, "limit", (0, -1, float("nan"), "3", True, [1]), h=np.ones((6, 2, 8)), activation="swiglu"),
    *_with(ops.activate, "limit", (0.1,), h=np.ones((6, 1, 8)), activation="silu"),
    *_with(moax.update_router_bias, "bias", (None, [0.0], SIZES), tokens_per_expert=SIZES),
    *_with(moax.update_router_bias, "tokens_per_expert", (None, [1], X, SIZES[:3]), bias=np.zeros(4, np.float32)),
    *_with(moax.update_router_bias, "rate", ("1e-3", True, [1]), **UPDATE),
    *_with(moax.update_router_bias, "rule", (None, "mean", ["sign"]), **UPDATE),
    *_with(moax.update_router_bias, "histogram", (None, [1], SIZES, np.zeros((4, 1000), np.float32)),
           rule="quantile", **UPDATE),
    *_with(moax.load_metrics, "tokens_per_expert", (None, [1], X, SIZES[:0])),
    *_with(_moe, "segment_ids", ([0], "x", SIZES, np.ones((6,), bool))),
    *_with(RouterConfig, "histogram", (True, None, 1)),
    *_with(moax.init, "key", (0, None, "seed", np.zeros(4, np.float32), jax.random.split(jax.random.key(0), 3),
                              np.zeros((3, 2), np.uint32), np.uint32(0)), config=CONFIG),
    *_with(moax.init, "config", (None, {}, RouterConfig()), key=jax.random.key(0)),
    *_with(moax.init, "dtype", (jnp.int32, bool, "float99", jnp.float64), key=jax.random.key(0), config=CONFIG),
    *_with(moax.init, "axes", ("ep", None, {}), key=jax.random.key(0), config=CONFIG),
    *_with(moax.quantize_params, "dtype", (None, jnp.int32, "float99"), params=PARAMS, config=CONFIG),
    *_with(moax.param_specs, "config", (None, {}), mesh=MESH),
    *_with(moax.param_specs, "axes", ("ep", None), config=CONFIG, mesh=MESH),
    *_with(moax.param_specs, "mesh", ("x", {"ep": 2}, [8]), config=CONFIG),
    *_with(moax.lora.init, "axes", ("ep", None), key=jax.random.key(0), config=CONFIG, rank=2),
    *_with(moax.lora.adapter_specs, "config", (None, {}), mesh=MESH),
    *_with(moax.lora.merge, "adapters", (None, PARAMS), params=PARAMS),
    *_with(moax.lora.merge, "params", (None, {}, dataclasses.replace(PARAMS, wi=None)), adapters=ADAPTERS),
    *_with(moax.make_mesh, "sizes", ([8], None, 8, (("ep", 8),), "fsdp", {"fsdp": 0}, {"fsdp": "2"}, {"fsdp": -1})),
    *_with(moax.inspect.inspect_block, "config", (None, {}), tokens=8),
    *_with(moax.inspect.inspect_block, "tokens", NOT_COUNTS, config=CONFIG),
    *_with(moax.inspect.inspect_block, "dtype", ("float99", jnp.int32), config=CONFIG, tokens=8),
    *_with(moax.estimate.estimate, "hardware", (3, "a100"), model=CONFIG, mesh={}, tokens=8),
    *_with(moax.estimate.estimate, "dtype", ("float99", "int8"), model=CONFIG, mesh={}, tokens=8),
    *_with(moax.estimate.estimate, "remat", (1, "yes"), model=CONFIG, mesh={}, tokens=8),
    *_with(moax.hf.config_to_hf, "config", (None, {}), model_type="mixtral"),
    *_with(moax.hf.params_from_hf, "config", (None, {}), source={}, model_type="mixtral"),
    *_with(moax.init, "initializers", ({"wi": 3}, [1], "wi", jax.nn.initializers.zeros, 0), key=jax.random.key(0),
           config=CONFIG),
    *_with(moax.Axes, "dp", ({"a": 1}, 1, [1])),
    *_with(moax.Format, "block", (True, 0, 8.0, "8", [8])),
    *_with(moax.Format, "dtype", ("e3m4", None, ["e4m3"], jnp.float8_e4m3fn)),
    *_with(moax.Recipe, "x", ("e4m3", 8), w=None, dy=None),
    *_with(RouterConfig, "score", (None, ["softmax"], "relu")),
    *_with(RouterConfig, "aux_loss", (None, "1", [0.1], np.array([0.1, 0.2]), jnp.ones(()), -1)),
    *_with(MoEConfig, "d_ff", (*NOT_COUNTS, np.float32(8)), d_model=16, num_experts=4, top_k=2),
    *_with(MoEConfig, "router", (None, {}, "softmax"), d_model=16, d_ff=8, num_experts=4, top_k=2),
]  # fmt: skip


def _name(case) -> str:
    call, arguments, name = case
    return f"{call.__name__.strip('_')}-{name}-{type(arguments[name]).__name__}"


A = np.ones((6, 8), np.float32)
B = np.ones((8, 2, 3), np.float32)
C = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("rule", "values", "sizes", "says"),
    [
        ("x [T, H], w [H, *C], bias? [*C]", (A, B, C), {}, None),
        ("x [T, H], w [H, *C], bias? [*C]", (A, B, None), dict(T=6, C=(2, 3)), None),
        ("x [..., H], n int []", (A[0], np.int32(1)), {}, None),
        (
            "x [T, H], w [H, *C]",
            (A[:, :4], B),
            {},
            "x, w have shapes (6, 4), (8, 2, 3); they must be [T, H], [H, *C]",
        ),
        (
            "w [H, *C], b [*C]",
            (B, C[:, :2]),
            {},
            "w, b have shapes (8, 2, 3), (2, 2); they must be [H, *C], [*C]",
        ),
        (
            "w [H, *C], b [E, *C]",
            (B, C),
            {},
            "w, b have shapes (8, 2, 3), (2, 3); they must be [H, *C], [E, *C]",
        ),
        ("x [T, H], y [T, K]", (A, C), dict(K=4), "y has shape (2, 3); it must be [T, K=4]"),
        ("x [T, H, *C]", (A[0],), {}, "x has shape (8,); it must be [T, H, *C]"),
        ("p.x [..., H]", (A,), dict(H=4), "p.x has shape (6, 8); it must be [..., H=4]"),
        ("x [T, H], y [T]", (A, None), {}, "y is None; it must be an array [T]"),
        (
            "ids int [T, K]",
            (A,),
            {},
            "ids has dtype float32; it must be an array of integers [T, K]",
        ),
        (
            "mask bool [T]",
            (IDS,),
            {},
            "mask has dtype int32; it must be bool, such as segment_ids > 0",
        ),
        ("x [T, H], y [T, E]", (A, C), dict(local=True, T=12, H=16), None),
        ("x [T, H]", (A,), dict(local=True, H=12), "x has shape (6, 8); it must be [T, H=12]"),
        ("x [T, H]", (EMPTY,), dict(local=True, T=12), "x has shape (0, 16); it must be [T=12, H]"),
    ],
)
def test_arrays_by_rule(rule, values, sizes, says):
    """Breaks if an array of another dtype, rank or size than its rule says is taken, or the message names another."""
    with contextlib.nullcontext() if says is None else pytest.raises(ValueError, match=re.escape(says)):
        check_arrays(rule, *values, **sizes)


@pytest.mark.loose
@pytest.mark.parametrize(("call", "arguments", "name"), WRONG, ids=map(_name, WRONG))
def test_wrong_calls(call, arguments, name):
    """Breaks if a wrong argument is taken, or fails in the guts: as an AttributeError or without a name."""
    with pytest.raises(ValueError) as error:
        call(**arguments)
    said = str(error.value)
    assert re.search(rf"(\b|\.){name}\b", said) and re.search("must|needs|divide", said), said


def test_the_table_is_long():
    """Breaks if the table of wrong calls loses its rows."""
    assert len(WRONG) > 250 and len({call for call, *_ in WRONG}) > 15


def test_swapped_arguments():
    """Breaks if the two arguments that are most easily swapped give anything but their names."""
    with pytest.raises(ValueError, match="x is a MoEParams; it must be an array"):
        moax.moe(PARAMS, X, CONFIG)
    with pytest.raises(ValueError, match="config is a MoEParams"):
        moax.moe(X, CONFIG, PARAMS)


@pytest.mark.parametrize("way", ("none", "custom_partitioning", "shard_map", "explicit"))
def test_no_tokens(way):
    """Breaks if an empty batch is an error, or its losses are not finite, or its gradients not zeros."""
    config = dataclasses.replace(
        CONFIG,
        shared_d_ff=8,
        use_bias=True,
        router=RouterConfig(aux_loss=1.0, z_loss=1.0),
    )
    params = make_params(config)
    x = jnp.zeros((0, 3, 16))

    def total(x, params):
        y, stats = moax.moe(x, params, config, engine=way if "_" in way else "auto")
        return y.sum() + stats.aux_loss + stats.z_loss, (y, stats)

    run = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)
    if way == "none":
        (loss, (y, stats)), (dx, dparams) = run(x, params)
    else:
        mesh = make_mesh("2x4", way)
        with jax.set_mesh(mesh):
            x, params = put(mesh, (spec("2x4", TOKENS), moax.param_specs(config)), (x, params))
            (loss, (y, stats)), (dx, dparams) = run(x, params)
    assert y.shape == dx.shape == (0, 3, 16) and loss == 0
    assert not stats.tokens_per_expert.any() and stats.dropped == 0
    assert not any(np.asarray(d).any() for d in jax.tree.leaves(dparams))


OPS_WITHOUT_TOKENS = {
    "route": lambda x, sizes: moax.route(x[:, :4], RouterConfig(aux_loss=1.0, z_loss=1.0), 2).weights,
    "router_logits": lambda x, sizes: ops.router_logits(x, jnp.ones((16, 4))),
    "grouped_matmul": lambda x, sizes: ops.grouped_matmul(x, jnp.ones((4, 16, 2, 8)), jnp.zeros(sizes, jnp.int32)),
    "dense": lambda x, sizes: ops.dense(x[None], jnp.ones((16, 8)), recipe="fp8_block"),
    "permute": lambda x, sizes: ops.permute(x, jnp.zeros((0, 2), jnp.int32), 4, align=8)[0],
    "all_gather": lambda x, sizes: ops.dispatch(x, jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2)), 4).rows,
    "all_to_all": lambda x, sizes: (
        ops.dispatch(x, jnp.zeros((0, 2), jnp.int32), jnp.zeros((0, 2)), 4, exchange="all_to_all").rows
    ),
}


@pytest.mark.parametrize("mesh", ("", "2x4"))
@pytest.mark.parametrize("name", OPS_WITHOUT_TOKENS)
def test_ops_without_tokens(name, mesh):
    """Breaks if an op divides by the number of its rows, or has no gradient without any."""
    op = OPS_WITHOUT_TOKENS[name]
    sizes = 8 if mesh else 4

    @jax.jit
    def both(x):
        y, pull = jax.vjp(lambda x: op(x, sizes), x)
        return y, pull(y)[0]

    with jax.set_mesh(make_mesh(mesh)) if mesh else contextlib.nullcontext():
        y, dx = both(jnp.zeros((0, 16)))
    assert y.size == 0 and dx.shape == (0, 16)


@pytest.mark.parametrize("exchange", ("all_gather", "all_to_all"))
def test_dispatch_without_choices(exchange):
    """Breaks if a transport divides by the number of choices of a token."""
    experts = jnp.zeros((6, 0), jnp.int32)
    received = ops.dispatch(jnp.ones((6, 16)), experts, jnp.zeros((6, 0)), 4, exchange=exchange)
    assert received.count == 0 and received.dropped == 0


@pytest.mark.parametrize("dtype", (np.int8, np.uint8, np.uint32))
def test_integers_of_any_width(dtype):
    """Breaks if group sizes of few bits overflow, so that rows of large groups become 0, or unsigned ones fail."""
    sizes = np.array([100, 0, 120, 80], dtype)
    x = jnp.asarray(random(0, 384, 8))
    w = jnp.asarray(random(1, 4, 8, 8))
    got = ops.grouped_matmul(x, w, sizes, align=128)
    np.testing.assert_array_equal(got, ops.grouped_matmul(x, w, sizes.astype(np.int32), align=128))
    assert np.abs(got[128:248]).min(1).max() > 0
    experts = np.arange(200).astype(dtype)[:, None] % 4
    plans = [ops.permute(jnp.ones((200, 8)), e, 4)[1] for e in (experts, experts.astype(np.int32))]
    jax.tree.map(np.testing.assert_array_equal, *plans)


@pytest.mark.parametrize("dtype", (np.int64, np.uint32, np.uint64))
@pytest.mark.parametrize("x64", (True, False))
def test_wide_ids_are_no_expert(x64, dtype):
    """Breaks if an id beyond the experts wraps to an expert, or to the negative id of a token without a choice."""
    beyond = np.array([[0, 2**31 + 1], [0, np.iinfo(dtype).max], [1, np.iinfo(dtype).max - 1], [1, 7]], dtype)
    if dtype != np.uint32:
        beyond[3, 1] = 2**32 + 2
    plain = np.where(beyond < 4, beyond, 4).astype(np.int32)
    x = jnp.asarray(random(0, 4, 16))
    weights = jnp.ones((4, 2))
    with jax.enable_x64(x64):
        calls = [
            lambda ids: moax.moe(x, PARAMS, CONFIG, routing=ids, return_routing=True)[1].routing,
            lambda ids: moax.moe(x, PARAMS, CONFIG, routing=(ids, weights), return_routing=True)[1].routing,
            lambda ids: moax.route(x[:, :4], RouterConfig(), 2, experts=ids),
            lambda ids: ops.permute(x, ids, 4)[1],
            lambda ids: ops.dispatch(x, ids, weights, 4).experts,
        ]
        # Without x64 JAX itself wraps an array of 64 bits.
        arrays = (beyond, jnp.asarray(beyond)) if x64 or dtype == np.uint32 else (beyond,)
        for call, ids in itertools.product(calls, arrays):
            jax.tree.map(np.testing.assert_array_equal, call(ids), call(plain))


def _losses(route, logits, config):
    r = route(logits, config, 2)
    return jnp.sum(r.weights**2) + r.aux_loss + r.z_loss


@pytest.mark.parametrize("way", ("none", "custom_partitioning", "explicit"))
def test_second_derivatives_of_route(way):
    """Breaks if a Hessian of the router or of its losses fails, or is not that of plain JAX."""
    config = RouterConfig("sigmoid", aux_loss=0.3, z_loss=0.2)
    logits = jnp.asarray(random(2, 16, 4))
    tangent = jnp.asarray(random(3, 16, 4))

    def both(route, logits):
        total = lambda v: _losses(route, v, config)  # noqa: E731
        reverse = jax.grad(lambda v: jnp.sum(jax.grad(total)(v) * tangent))(logits)
        return reverse, jax.jvp(jax.grad(total), (logits,), (tangent,))[1]

    want = jax.jit(lambda v: both(reference.route, v))(logits)
    if way == "none":
        got = jax.jit(lambda v: both(moax.route, v))(logits)
    else:
        mesh = make_mesh("2x4", way)
        with jax.set_mesh(mesh):
            layout = spec("2x4", TOKENS)
            logits, tangent = put(mesh, (layout, layout), (logits, tangent))
            got = jax.jit(lambda v: both(moax.route, v))(logits)
    assert max(rel_error(g, w) for g, w in zip(got, want, strict=True)) < 5e-6


def test_second_derivatives_of_router_logits():
    """Breaks if the gradient penalty of a router fails on a mesh, or is wrong."""
    x = jnp.asarray(random(4, 16, 8))
    w = jnp.asarray(random(5, 8, 4))

    def penalty(logits_of, w):
        return jnp.sum(jax.grad(lambda x: jnp.sum(logits_of(x, w) ** 3))(x) ** 2)

    want = jax.grad(lambda w: penalty(lambda x, w: jnp.dot(x, w, precision="highest"), w))(w)
    with jax.set_mesh(make_mesh("2x4")):
        got = jax.jit(jax.grad(lambda w: penalty(ops.router_logits, w)))(w)
    assert rel_error(got, want) < 5e-6


FIRST_ONLY = {
    "moe": lambda x: moax.moe(x, PARAMS, CONFIG)[0],
    "grouped_matmul": lambda x: ops.grouped_matmul(x, jnp.ones((4, 16, 8)), SIZES),
    "permute": lambda x: ops.permute(x, IDS, 4)[0],
    "dispatch": lambda x: ops.dispatch(x, IDS, jnp.ones((6, 2)), 4).rows,
}


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("name", FIRST_ONLY)
def test_other_second_derivatives_are_refused(name, loop):
    """Breaks if a second derivative is silently 0 where values are rounded, or fails inside a loop or a kernel."""

    def loss(x):
        if not loop:
            return jnp.sum(FIRST_ONLY[name](x) ** 2)
        return jax.lax.scan(lambda total, _: (total + jnp.sum(FIRST_ONLY[name](x * total) ** 2), None), 1.0, None, 2)[0]

    with pytest.raises(moax.Unsupported, match=f"{name} has first derivatives and no second ones"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(jnp.asarray(X))


BACKWARD_ONLY = {
    "moe": lambda x: moax.moe(x, PARAMS, CONFIG, routing=(IDS, np.ones((6, 2), np.float32)))[0],
    "route": lambda x: moax.route(x[:, :4], RouterConfig(), 2).weights,
    "router_logits": lambda x: moax.moe(x, PARAMS, CONFIG)[0],
    "grouped_matmul": lambda x: ops.dense(x, np.ones((16, 4), np.float32)),
    "permute": lambda x: ops.permute(x, IDS, 4)[0],
    "unpermute": lambda x: ops.unpermute(jnp.concatenate([x, x]), ops.permute(X, IDS, 4)[1]),
    "dispatch": lambda x: ops.dispatch(x, IDS, np.ones((6, 2), np.float32), 4).rows,
    "combine": lambda x: ops.combine(x, ops.dispatch(X, IDS, np.ones((6, 2), np.float32), 4)),
}
FORWARD_MODE = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jit": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "remat": lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
    "loop": lambda f, x: jax.jvp(lambda x: jax.lax.scan(lambda c, _: (c, f(c)), x, None, 2), (x,), (x,)),
}


@pytest.mark.parametrize("transform", FORWARD_MODE)
@pytest.mark.parametrize("name", mark_rest(tuple(BACKWARD_ONLY), 3))
def test_forward_mode_is_refused(name, transform):
    """Breaks if JAX's error about a `custom_vjp`, which names no function, is all that a user of `jax.jvp` reads."""
    with pytest.raises(moax.Unsupported, match=f"moax: {name} has no forward-mode derivative"):
        FORWARD_MODE[transform](BACKWARD_ONLY[name], jnp.asarray(X))


def test_second_derivatives_in_a_loop_on_a_mesh():
    """Breaks if JAX's own error about `custom_partitioning` is all that a user reads."""

    def loss(x):
        return jax.lax.scan(lambda x, _: (moax.moe(x, PARAMS, CONFIG)[0], None), x, None, 2)[0].sum()

    with (
        jax.set_mesh(make_mesh("2x4")),
        pytest.raises(moax.Unsupported, match="first derivatives and no second ones"),
    ):
        jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))).trace(jnp.zeros((16, 16)))


def test_misspelt_keywords():
    """Breaks if the message names the constructor of a class that the caller has not called."""
    with pytest.raises(
        TypeError,
        match=r"moe\(\) got an unexpected keyword argument 'recpie'; did you mean 'recipe'",
    ):
        moax.moe(X, PARAMS, CONFIG, recpie="fp8_block")
    with pytest.raises(
        TypeError,
        match=r"quantize_params\(\) .*'seed'; the fields of moax.Options are recipe, axes",
    ):
        moax.quantize_params(PARAMS, CONFIG, seed=1)


@pytest.mark.parametrize(
    ("construct", "hint"),
    [
        (
            lambda: MoEConfig(16, dff=8, num_experts=4, top_k=2),
            r"MoEConfig\(\) .*'dff'; did you mean 'd_ff'\?",
        ),
        (
            lambda: RouterConfig(auxloss=0.1),
            r"RouterConfig\(\) .*'auxloss'; did you mean 'aux_loss'\?",
        ),
        (lambda: moax.Axes(fdsp="data"), r"Axes\(\) .*'fdsp'; did you mean 'fsdp'\?"),
        (
            lambda: moax.Axes(names=("ep",)),
            r"Axes\(\) .*'names'; the fields of moax.Axes are dp, fsdp, ep, tp",
        ),
        (lambda: Options(recipie="mxfp8"), r"Options\(\) .*'recipie'; did you mean 'recipe'\?"),
        (
            lambda: dataclasses.replace(CONFIG, topk=1),
            r"MoEConfig\(\) .*'topk'; did you mean 'top_k'\?",
        ),
        (lambda: moax.Format(blocks=32), r"Format\(\) .*'blocks'; did you mean 'block'\?"),
        (lambda: moax.Recipe(None, None, dw=None), r"Recipe\(\) .*'dw'; did you mean '(w|dy)'\?"),
        (
            lambda: moax.LogicalAxes(T="embed"),
            r"LogicalAxes\(\) .*'T'; the fields of moax.LogicalAxes are E, H, F",
        ),
    ],
)
def test_misspelt_fields(construct, hint):
    """Breaks if a misspelt field of a config has Python's error alone, without the name that was meant."""
    with pytest.raises(TypeError, match=hint):
        construct()


def test_float64_is_refused():
    """Breaks if float64 computes in float32 without a word."""
    with jax.enable_x64(True):
        x = jnp.ones((6, 16), jnp.float64)
        for call in (lambda: moax.moe(x, PARAMS, CONFIG), lambda: moax.route(x, RouterConfig(), 2),
                     lambda: ops.dense(jnp.asarray(X), x.T),
                     lambda: _params(wo=jnp.ones((4, 8, 16), jnp.float64))):  # fmt: skip
            with pytest.raises(
                ValueError,
                match=r"(x|logits|w|params\.wo) has dtype float64; moax computes in float32",
            ):
                call()


def test_numbers_of_numpy(unchecked):
    """Breaks if a coefficient that NumPy computed is refused, or makes a config that differs from its equal."""
    router = RouterConfig(
        aux_loss=np.float32(0.5),
        z_loss=np.float64(0.25),
        scale=np.float32(2),
        bias=True,
    )
    config = MoEConfig(
        np.int64(16),
        np.int32(8),
        np.uint8(4),
        np.int16(2),
        router=router,
        capacity_factor=np.float32(2),
    )
    plain = RouterConfig(aux_loss=0.5, z_loss=0.25, scale=2.0, bias=True)
    same = MoEConfig(16, 8, 4, 2, router=plain, capacity_factor=2.0)
    assert config == same and hash(config) == hash(same) and repr(config) == repr(same)
    assert Options(buffer_factor=np.int32(2)) == Options(buffer_factor=2.0)
    assert type(Options(buffer_factor=np.float32(2)).buffer_factor) is float


@pytest.mark.parametrize("way", ("custom_partitioning", "shard_map", "explicit", "user_vma"))
def test_gradient_of_a_bfloat16_router(way):
    """Breaks if a device rounds its part of the router's gradient before the parts are summed. The parts of 8 devices
    are 256, 1, 1, ..: of rounded sums, 256 + 1 in bfloat16 is 256."""
    x = np.ones((8, 1), np.float32)
    x[0] = 256.0
    mesh = make_mesh("8x1", way)
    call = lambda x, w: ops.router_logits(x, w)  # noqa: E731
    if way == "user_vma":
        P = jax.sharding.PartitionSpec
        call = jax.shard_map(call, mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=P("fsdp"))
    with jax.set_mesh(mesh):
        x = put(mesh, spec("8x1", TOKENS), jnp.asarray(x))
        got = jax.jit(jax.grad(lambda w: call(x, w).sum()))(jnp.ones((1, 1), jnp.bfloat16))
    # The sum is 256 + 7 = 263, which rounds up to 264.
    assert got.dtype == jnp.bfloat16 and float(got[0, 0]) == 264.0


@pytest.mark.parametrize("order", ("topk_then_score", "score_then_topk"))
@pytest.mark.parametrize("level", mark_rest((-1000.0, -40.0), 1))
def test_sigmoid_weights_of_low_logits(order, level):
    """Breaks if the weights of a token whose sigmoids nearly underflow do not sum to 1, or their gradient is lost."""
    logits = level + random(6, 16, 4)
    config = RouterConfig("sigmoid", order)
    weights, pull = jax.vjp(lambda v: moax.route(v, config, 2).weights, jnp.asarray(logits))
    rounded = np.asarray(jnp.asarray(logits), np.float64)
    best = -np.sort(-rounded, axis=1)[:, :2]
    want = 1 / (1 + np.exp(best[:, ::-1] - best))  # sigmoid(l) is exp(l) here
    assert rel_error(weights, want) < 1e-5
    np.testing.assert_allclose(weights.sum(1), 1.0, rtol=1e-6)
    (d,) = pull(jnp.asarray(np.tile(np.float32([1, 0]), (16, 1))))
    assert rel_error(np.abs(d).max(1), want[:, 0] * want[:, 1]) < 1e-4
