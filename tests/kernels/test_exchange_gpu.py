"""The exchanges on GPUs (`make test-gpu`), 2 and 4 of them: the block by all_to_all against all_gather, and many rounds
of random routing in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moax
from support import mark_rest, random, rel_norm, spread
from support.gpus import alone, dirty

pytestmark = [pytest.mark.gpu, pytest.mark.loose]
MESHES = {"2x1": (2, 1), "1x2": (1, 2), "2x2": (2, 2), "1x4": (1, 4)}
EXPERTS, TOP_K = 16, 3


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
    """Distinct experts of each token, low ids likelier by skew."""
    scores = jax.random.uniform(key, (tokens, EXPERTS)) - skew * jnp.arange(EXPERTS)
    return lax.top_k(scores, TOP_K)[1].astype(jnp.int32)


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
        programs = [step.lower(x, params, dy, t).compile() for t in ("all_to_all", "all_gather")]
        with alone():
            dirty(1 << 28)
            got, want = (jax.tree.map(np.asarray, program(x, params, dy)) for program in programs)
    for (path, g), w in zip(
        jax.tree_util.tree_leaves_with_path(got),
        jax.tree.leaves(want),
        strict=True,
    ):
        assert rel_norm(np.float32(g), np.float32(w)) <= 2.0**-7, jax.tree_util.keystr(path)


@pytest.mark.parametrize("exchange", mark_rest(("all_to_all", "all_gather"), 1))
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
