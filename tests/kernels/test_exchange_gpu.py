"""The one-sided exchange on GPUs (`make test-gpu`), 2 and 4 of them: against all_to_all to the bit, the block against
all_gather, and many rounds of random routing in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moax
from moax.exchange import select_transport
from moax.ops import combine, dispatch
from support import integers, random, rel_norm, some, spread
from support.gpus import alone, dirty

pytestmark = [pytest.mark.gpu, pytest.mark.loose]
MESHES = {"2x1": (2, 1), "1x2": (1, 2), "2x2": (2, 2), "1x4": (1, 4)}
ROUTINGS = {"uniform": 0.0, "skewed": 0.1, "all to the first": 10.0, "all to the last": -10.0}
EXPERTS, TOP_K = 16, 3
ENGINES = (
    ("custom_partitioning", 0.7),
    ("shard_map", None),
    ("custom_partitioning", None),
    ("shard_map", 0.7),
)


def mesh_of(name, kind=AxisType.Auto):
    """The mesh of this name over the first GPUs; skips where there are fewer."""
    shape = MESHES[name]
    count = shape[0] * shape[1]
    if jax.device_count() < count:
        pytest.skip(f"{count} GPUs, this machine has {jax.device_count()}")
    devices = np.array(jax.devices()[:count]).reshape(shape)
    return jax.sharding.Mesh(devices, ("fsdp", "ep"), axis_types=(kind,) * 2)


def place(mesh, *arrays):
    """Arrays over all devices by their leading dim."""
    return [jax.device_put(v, NamedSharding(mesh, P(("fsdp", "ep")))) for v in arrays]


def choose(key, tokens, skew):
    """Distinct experts of each token, low ids likelier by skew; by NumPy where the key is a seed."""
    if isinstance(key, int):
        scores = np.random.default_rng(key).random((tokens, EXPERTS)) - skew * np.arange(EXPERTS)
        return np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32)
    scores = jax.random.uniform(key, (tokens, EXPERTS)) - skew * jnp.arange(EXPERTS)
    return lax.top_k(scores, TOP_K)[1].astype(jnp.int32)


def exchanged(transport, engine, factor, x, experts, weights):
    """What dispatch delivers, the sum of it, and both gradients."""

    def there_and_back(x, weights):
        options = dict(exchange=transport, capacity_factor=factor, engine=engine)
        r = dispatch(x, experts, weights, EXPERTS, **options)
        scale = r.weights.sum(1, keepdims=True).astype(x.dtype)
        return combine(r.rows * scale, r, engine=engine), r

    y, pull, r = jax.vjp(there_and_back, x, weights, has_aux=True)
    return y, pull(y), r


@pytest.mark.parametrize(
    ("mesh", "engine", "factor"),
    [
        pytest.param(mesh, *settings, marks=() if mesh == "1x2" else pytest.mark.more)
        for mesh in ("1x2", "2x2", "1x4")
        for settings in ENGINES
    ],
    ids=str,
)
def test_exchange(mesh, engine, factor):
    """A row in another's place, one that is missing, or one that arrived after it was read."""
    on = mesh_of(mesh)
    tokens = 1003
    width = 2880
    rows = tokens * on.size
    weights = np.float32(1 + np.arange(rows * TOP_K).reshape(rows, TOP_K) % 3)
    x = integers(0, rows, width).astype(jnp.bfloat16)
    check_both(
        on,
        x,
        [choose(1, rows, skew) for skew in ROUTINGS.values()],
        weights,
        engine,
        factor,
    )


def check_both(on, x, routings, weights, *how):
    """What `exchanged` returns by one_sided is what it returns by all_to_all, for each routing."""
    run = jax.jit(exchanged, static_argnums=(0, 1, 2))
    with jax.set_mesh(on):
        calls = [place(on, x, experts, weights) for experts in routings]
        programs = [run.lower(transport, *how, *calls[0]).compile() for transport in ("one_sided", "all_to_all")]
        for args in calls:
            with alone():
                dirty(1 << 28)
                got, want = (jax.tree.map(np.asarray, program(*args)) for program in programs)
            compare(got, want, EXPERTS // on.shape["ep"], on.size)


def compare(got, want, per_rank, shards):
    """Sums, gradients and each shard's real rows are the same to the bit."""
    for g, w in zip(jax.tree.leaves(got[:2]), jax.tree.leaves(want[:2]), strict=True):
        np.testing.assert_array_equal(np.float32(g), np.float32(w))
    cut = lambda v, s: v.reshape(shards, -1, *v.shape[1:])[s]  # noqa: E731
    for s in range(shards):
        for field in ("rows", "experts", "weights", "dropped", "count"):
            g, w = (cut(getattr(r[2], field), s) for r in (got, want))
            if field in ("rows", "experts", "weights"):
                real = (cut(want[2].experts, s) < per_rank).any(1)
                g = g[: real.sum()]
                w = w[real]
            np.testing.assert_array_equal(np.float32(g), np.float32(w), err_msg=field)


@pytest.mark.parametrize(
    ("width", "dtype"),
    spread([(8, "float32"), (16384, "bfloat16")], (8, 96, 7168, 16384), ("bfloat16", "float32")),
)
def test_widths(width, dtype):
    """Rows of 16 bytes, and rows of which one fills a warpgroup's memory."""
    on = mesh_of("1x2")
    if width * jnp.dtype(dtype).itemsize > 48 * 1024:
        pytest.skip("wider than the kernel takes")
    rows = 257 * on.size
    x = integers(1, rows, width).astype(jnp.dtype(dtype))
    weights = np.ones((rows, TOP_K), np.float32)
    check_both(on, x, [choose(2, rows, 0.05)], weights, "auto", None)


@pytest.mark.parametrize("mesh", some(("1x2", "2x2", "1x4"), 1))
def test_soak(mesh, rounds=10_000, tokens=512, width=1024):
    """Rounds of new routing, from even to all on one rank, in one program without a stop between them: a signal that is
    early, or a buffer that is still in use, shows as a wrong sum in some round."""
    on = mesh_of(mesh)
    rows = tokens * on.size
    per_rank = EXPERTS // on.shape["ep"]
    x = place(on, integers(0, rows, width))[0]

    def one(wrong, key):
        skew = jnp.exp(jax.random.uniform(key, (), minval=-5.0, maxval=2.0)) * jax.random.choice(
            key, jnp.array([-1, 1])
        )
        experts = choose(key, rows, skew)
        weights = jax.random.randint(key, (rows, TOP_K), 1, 4).astype(jnp.float32)
        turned = jnp.roll(x, jax.random.randint(key, (), 0, width), axis=1)
        r = dispatch(turned, experts, weights, EXPERTS, exchange="one_sided")
        shard = jnp.arange(r.rows.shape[0]) // (r.rows.shape[0] // on.size) % on.shape["ep"]
        factor = jnp.where(r.experts < per_rank, r.experts + shard[:, None] * per_rank + 1, 0)
        y = combine(r.rows * (r.weights * factor).sum(1, keepdims=True), r)
        want = turned * (weights * (experts + 1)).sum(1, keepdims=True)
        return wrong + (y != want).any(1).sum(), r.dropped.sum()

    with jax.set_mesh(on):
        keys = jax.random.split(jax.random.key(0), rounds)
        program = jax.jit(lambda keys: lax.scan(one, jnp.int32(0), keys)).lower(keys).compile()
        with alone():
            dirty(1 << 28)
            wrong, dropped = jax.block_until_ready(program(keys))
    assert int(wrong) == 0 and not np.asarray(dropped).any()


CONFIG = moax.MoEConfig(d_model=1024, d_ff=512, num_experts=EXPERTS, top_k=TOP_K)


RECIPES = {"bf16": None, "fp8_block": "fp8_block"}
KINDS = (AxisType.Auto, AxisType.Explicit)


@pytest.mark.parametrize(
    ("mesh", "recipe", "kind"),
    spread(
        [("1x2", "fp8_block", KINDS[0]), ("1x2", "bf16", KINDS[1])],
        ("1x2", "2x1", "2x2", "1x4"),
        RECIPES,
        KINDS,
    ),
    ids=str,
)
def test_block(mesh, recipe, kind):
    """Twice in a scan, rematerialized: output and gradients are all_gather's, but for the rounding of sums. Not one
    after the other: a last bit would tip which experts the second takes."""
    on = mesh_of(mesh, kind)
    sharding = NamedSharding(on, P(None, ("fsdp", "ep")))
    x = jax.device_put(random(0, 2, 640 * on.size, 1024).astype(jnp.bfloat16), sharding)
    dy = jax.device_put(random(1, 2, 640 * on.size, 1024).astype(jnp.bfloat16), sharding)

    @functools.partial(jax.jit, static_argnums=3)
    def step(x, params, dy, transport):
        layer = jax.checkpoint(
            lambda x, params: moax.moe(x, params, CONFIG, recipe=RECIPES[recipe], exchange=transport)
        )

        def both(x, params):
            return lax.scan(lambda _, x: (None, layer(x, params)), None, x)[1]

        y, pull, stats = jax.vjp(both, x, params, has_aux=True)
        return y, pull(dy), stats.tokens_per_expert

    with jax.set_mesh(on):
        params = moax.init(jax.random.key(0), CONFIG)
        programs = [step.lower(x, params, dy, t).compile() for t in ("one_sided", "all_gather")]
        with alone():
            dirty(1 << 28)
            got, want = (jax.tree.map(np.asarray, program(x, params, dy)) for program in programs)
    for (path, g), w in zip(
        jax.tree_util.tree_leaves_with_path(got),
        jax.tree.leaves(want),
        strict=True,
    ):
        assert rel_norm(np.float32(g), np.float32(w)) <= 2.0**-7, jax.tree_util.keystr(path)


@pytest.mark.parametrize("exchange", some(("one_sided", "all_gather", "all_to_all"), 1))
def test_soak_of_passes(exchange, rounds=200, tokens=384):
    """Rounds of a block in one program, forward and backward, with new routing in each: a pass that reads the rows of
    another pass, or that ranks do not agree about, shows as an error in some round, or never ends."""
    on = mesh_of("1x2")
    config = moax.MoEConfig(d_model=256, d_ff=128, num_experts=EXPERTS, top_k=TOP_K)

    def step(x, params, routing, exchange, buffer_factor):
        def loss(x, params):
            options = dict(exchange=exchange, buffer_factor=buffer_factor)
            y, stats = moax.moe(x, params, config, routing=routing, **options)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), (y, stats.rounds)

        return jax.grad(loss, (0, 1), has_aux=True)(x, params)

    def one(x, params, key):
        skew = jax.random.uniform(key, (), maxval=0.5) * jax.random.choice(key, jnp.array([-1, 1]))
        routing = (
            choose(key, tokens * on.size, skew),
            jax.random.uniform(key, (tokens * on.size, TOP_K)),
        )
        x = jnp.roll(x, jax.random.randint(key, (), 0, x.shape[1]), axis=1)
        grads, (y, passes) = step(x, params, routing, exchange, 0.4)
        want, (want_y, _) = step(x, params, routing, "all_gather", None)
        pairs = zip(jax.tree.leaves((y, grads)), jax.tree.leaves((want_y, want)), strict=True)
        norm = lambda v: jnp.linalg.norm(v.astype(jnp.float32).ravel())  # noqa: E731
        return jnp.stack([norm(g - w) / jnp.maximum(norm(w), 1e-6) for g, w in pairs]).max(), passes

    with jax.set_mesh(on):
        params = moax.init(jax.random.key(0), config, dtype=jnp.bfloat16)
        x = place(on, jnp.asarray(random(0, tokens * on.size, 256), jnp.bfloat16))[0]
        run = jax.jit(lambda x, params, keys: lax.map(functools.partial(one, x, params), keys))
        keys = jax.random.split(jax.random.key(0), rounds)
        program = run.lower(x, params, keys).compile()
        with alone():
            dirty(1 << 28)
            errors, passes = jax.tree.map(np.asarray, program(x, params, keys))
    assert errors.max() <= 2.0**-7 and passes.min() < passes.max(), (errors, passes)


def test_refuses_devices_out_of_order():
    """Where the check sees the devices it names them."""
    mesh_of("1x2")
    backwards = jax.sharding.Mesh(
        np.array(jax.devices()[:2])[::-1],
        ("ep",),
        axis_types=(AxisType.Auto,),
    )
    with jax.set_mesh(backwards), pytest.raises(moax.Unsupported, match=r"not of \[1, 0\]"):
        select_transport("one_sided", None, 256)
