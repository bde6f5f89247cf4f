"""Parameters: the same values wherever they are made, each device making its shards alone.

Covers: meshes x engines x layouts of weights; dtypes; variances; stacks of layers; keys of both kinds.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import moax
from moax.mesh.specs import local_shape
from moax.params import operand_shapes
from support import make_mesh, mark_rest

CONFIG = moax.MoEConfig(
    32,
    48,
    8,
    2,
    use_bias=True,
    shared_d_ff=16,
    shared_gate=True,
    d_latent=24,
    router=moax.RouterConfig(bias=True, logits_bias=True, expert_scale=True),
)
NAMES = [f.name for f in dataclasses.fields(moax.MoEParams)]
ON = [
    ("2x4", "custom_partitioning"),
    ("2x4", "explicit"),
    ("tp2x2x2", "custom_partitioning"),
    ("dp2x2x2", "explicit"),
]
DIMS = ["experts", "model", "experts", "model"]


@functools.cache
def alone(**options):
    """The parameters of one device, without a mesh."""
    return moax.init(jax.random.key(3), CONFIG, **options)


@pytest.mark.parametrize(
    "fsdp_dim, on",
    mark_rest([*zip(DIMS + DIMS[::-1], ON * 2, strict=True)][1:] + [("experts", ON[0])], 1),
)
def test_the_same_on_every_mesh(on, fsdp_dim):
    """Breaks if a run depends on its mesh from the first step on, or a device holds more than its shards."""
    mesh = make_mesh(*on)
    axes = moax.Axes(fsdp_dim=fsdp_dim)
    with jax.set_mesh(mesh):
        params = moax.init(jax.random.key(3), CONFIG, axes=axes)
        specs = moax.param_specs(CONFIG, axes)
    roles = axes.resolve(mesh)
    for name in NAMES:
        got = getattr(params, name)
        want = getattr(alone(), name)
        own_spec = getattr(specs, name)
        np.testing.assert_array_equal(got, want, err_msg=name)
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, own_spec), got.ndim), name
        shards = got.addressable_shards
        assert len(shards) == 8 and {s.data.shape for s in shards} == {local_shape(want.shape, own_spec, roles)}, name


@pytest.mark.parametrize("way", mark_rest(["custom_partitioning", "explicit"], 1))
def test_no_device_makes_the_whole(way):
    """Breaks if weights are made whole on every device and cut afterwards, which a large model has no memory for."""
    with jax.set_mesh(make_mesh("2x4", way)):
        text = jax.jit(lambda key: moax.init(key, CONFIG)).lower(jax.random.key(0)).compile().as_text()
    assert "f32[1,24,2,48]" in text and "f32[1,48,24]" in text
    for whole in ("[8,24,2,48]", "[8,48,24]", "[18432]", "[9216]"):
        assert whole not in text


@pytest.mark.parametrize("way", mark_rest(["explicit", "custom_partitioning"], 1))
def test_a_stack_of_layers(way):
    """Breaks if vmap over keys, by which layers for a scan are made, forgets how a layer's shards lie."""
    mesh = make_mesh("2x4", way)
    keys = jax.random.split(jax.random.key(3), 3)
    with jax.set_mesh(mesh):
        stack = jax.vmap(lambda key: moax.init(key, CONFIG))(keys)
        specs = moax.param_specs(CONFIG)
    one = moax.init(keys[1], CONFIG)
    for name in NAMES:
        got = getattr(stack, name)
        own_spec = getattr(specs, name)
        np.testing.assert_array_equal(got[1], getattr(one, name), err_msg=name)
        own_spec = type(own_spec)(None, *own_spec)
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, own_spec), got.ndim), name


def test_which_parameters():
    """Breaks if `init` leaves out what the config asks for, or makes what it does not."""
    bare = moax.init(jax.random.key(0), moax.MoEConfig(32, 48, 8, 2, activation="relu2"))
    assert [n for n in NAMES if getattr(bare, n) is not None] == ["router", "wi", "wo"]
    assert bare.wi.shape == (8, 32, 1, 48)
    assert all(getattr(alone(), n) is not None for n in NAMES)


@pytest.mark.parametrize("dtype", mark_rest([jnp.bfloat16, jnp.float16], 1))
def test_dtype(dtype):
    """Breaks if lower-precision parameters are other numbers than the float32 ones, rounded."""
    narrow = dataclasses.replace(alone(dtype=dtype), router_bias=None)
    for got, want in zip(
        jax.tree.leaves(narrow),
        jax.tree.leaves(dataclasses.replace(alone(), router_bias=None)),
        strict=True,
    ):
        assert got.dtype == dtype
        np.testing.assert_array_equal(
            got.astype(jnp.float32),
            want.astype(dtype).astype(jnp.float32),
        )


def test_variance():
    """Breaks if the variance is not 1 / fan-in, or a tail is not cut at two sigma of the uncut normal."""
    config = moax.MoEConfig(96, 160, 16, 2, shared_d_ff=224, d_latent=64)
    params = moax.init(jax.random.key(1), config)
    fan_in = dict(
        router=96,
        wi=64,
        wo=160,
        shared_wi=96,
        shared_wo=224,
        latent_down=96,
        latent_up=64,
    )
    for name, n in fan_in.items():
        w = np.asarray(getattr(params, name), np.float64).ravel()
        # Five standard errors: of a mean sigma / sqrt(size), of a standard deviation at most that / sqrt(2).
        sigma = 1 / math.sqrt(n)
        few = 5 / math.sqrt(w.size)
        assert abs(w.std() / sigma - 1) < few and abs(w.mean()) < few * sigma, name
        assert np.abs(w).max() <= 2 * sigma / math.sqrt(0.7737) * 1.001, name


def test_independent():
    """Breaks if two parameters, two experts, or gate and up projection begin with the same numbers."""
    p = alone()
    rows = [p.wi[0, :, 0], p.wi[0, :, 1], p.wi[1, :, 0], p.wo[0].T, p.wo[1].T]
    for i, a in enumerate(rows):
        for b in rows[:i]:
            assert abs(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1]) < 0.15
    other = moax.init(jax.random.key(4), CONFIG)
    assert not any(np.array_equal(getattr(p, n), getattr(other, n)) for n in ("router", "wi", "wo", "shared_wi"))


@pytest.mark.parametrize("name", ["router_bias", "logits_bias", "bi", "bo"])
def test_biases_are_zero(name):
    """Breaks if a bias prefers an expert before anything was learned."""
    assert not np.asarray(getattr(alone(), name)).any()


def test_state_is_float32():
    """Breaks if a narrow dtype of the parameters is that of the selection bias, whose small steps it rounds away."""
    config = moax.MoEConfig(32, 48, 8, 2, router=moax.RouterConfig("sigmoid", bias=True))
    shapes = jax.eval_shape(
        lambda key: moax.init(key, config, dtype=jnp.bfloat16),
        jax.random.key(0),
    )
    expected = (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    assert (shapes.router_bias.dtype, shapes.router.dtype, shapes.wi.dtype) == expected
    mesh = make_mesh("2x4")
    declared, _ = operand_shapes(config, 64, moax.Axes(), mesh, jnp.bfloat16, jnp.bfloat16)
    expected = jax.tree.map(lambda s: (s.shape, s.dtype), shapes)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), declared) == expected


@pytest.mark.loose
def test_weight_decay_leaves_state():
    """Breaks if the mask lets an optimizer decay the selection bias, which has no gradient, or keeps it from others."""
    optax = pytest.importorskip("optax")
    config = moax.MoEConfig(
        32,
        48,
        8,
        2,
        use_bias=True,
        router=moax.RouterConfig("sigmoid", bias=True),
    )
    shapes = jax.eval_shape(lambda key: moax.init(key, config), jax.random.key(0))
    ones = jax.tree.map(lambda s: np.ones(s.shape, np.float32), shapes)
    params = {"layers": [ones, ones], "scale": np.ones(3, np.float32)}
    optimizer = optax.adamw(1e-1, weight_decay=0.5, mask=moax.trainable_mask)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    for layer in updates["layers"]:
        moved = {name for name, update in vars(layer).items() if update is not None and np.any(update)}
        assert moved == {"router", "wi", "wo", "bi", "bo"}
    assert np.all(updates["scale"])


@pytest.mark.more
def test_keys_of_both_kinds():
    """Breaks if raw uint32 keys, which linen makes, are refused or give other numbers."""
    for got, want in zip(
        jax.tree.leaves(moax.init(jax.random.PRNGKey(3), CONFIG)),
        jax.tree.leaves(alone()),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)


def test_traced():
    """Breaks if `init` cannot be jitted, or traced for its shapes alone, as checkpoints are restored."""
    with jax.set_mesh(make_mesh("2x4")):
        shapes = jax.eval_shape(lambda key: moax.init(key, CONFIG), jax.random.key(3))
        params = jax.jit(lambda key: moax.init(key, CONFIG))(jax.random.key(3))
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    np.testing.assert_array_equal(params.wi, alone().wi)


def test_sizes_that_do_not_divide():
    """Breaks if a mesh that cannot hold the experts is found out by XLA."""
    with jax.set_mesh(make_mesh("1x8")):
        with pytest.raises(
            ValueError,
            match=r"params.wi: dim 0 of size 6 is not divisible by mesh axes \('ep',\) of 8",
        ):
            moax.init(jax.random.key(0), dataclasses.replace(CONFIG, num_experts=6))


def test_initializers():
    """Breaks if an initializer of JAX sees all experts as one matrix, for its fan-in is then E times too large; or if a
    parameter that was not named changes."""
    initialized = moax.init(
        jax.random.key(3),
        CONFIG,
        dtype=jnp.bfloat16,
        initializers={
            "wi": jax.nn.initializers.lecun_normal(),
            "wo": jax.nn.initializers.glorot_uniform(),
            "router": jax.nn.initializers.zeros,
            "bi": jax.nn.initializers.constant(0.5),
        },
    )
    want = {"wi": math.sqrt(1 / 24), "wo": math.sqrt(2 / (24 + 48)), "router": 0.0}
    for name, std in want.items():
        value = np.asarray(getattr(initialized, name), np.float32)
        assert np.std(value) == pytest.approx(std, rel=0.05)
        assert value.shape == getattr(alone(), name).shape
    wi = np.asarray(initialized.wi, np.float32)
    assert not np.array_equal(wi[0], wi[1]) and not np.array_equal(wi[:, :, 0], wi[:, :, 1])
    assert (initialized.bi == 0.5).all()
    assert initialized.wi.dtype == initialized.router.dtype == jnp.bfloat16
    np.testing.assert_array_equal(initialized.shared_wi, alone(dtype=jnp.bfloat16).shared_wi)


def test_an_initializer_gets_the_shape_of_one_matrix():
    """Breaks if a parameter is put together in another order of its dims."""
    asked = []

    def by_position(key, shape, dtype):
        asked.append(shape)
        return jnp.arange(math.prod(shape)).reshape(shape).astype(dtype)

    names = ("router", "wi", "wo", "bi", "bo", "shared_wi", "router_bias")
    initialized = moax.init(
        jax.random.key(0),
        CONFIG,
        initializers=dict.fromkeys(names, by_position),
    )
    assert sorted(set(asked)) == sorted([(32, 8), (24, 48), (48, 24), (48,), (24,), (32, 16), (8,)])
    np.testing.assert_array_equal(initialized.wi[5, :, 1], np.arange(24 * 48).reshape(24, 48))
    np.testing.assert_array_equal(initialized.bi[5, 1], np.arange(48))


@pytest.mark.more
def test_initializers_on_a_mesh():
    """Breaks if the values of an initializer depend on the mesh, or a device makes more than its shards."""
    options = dict(initializers={"wi": jax.nn.initializers.lecun_normal()})
    with jax.set_mesh(make_mesh("2x4", "custom_partitioning")):
        wi = moax.init(jax.random.key(3), CONFIG, **options).wi
        text = jax.jit(lambda key: moax.init(key, CONFIG, **options)).lower(jax.random.key(0)).compile().as_text()
    np.testing.assert_array_equal(wi, alone_with(**options).wi)
    assert {s.data.shape for s in wi.addressable_shards} == {(1, 24, 2, 48)}
    assert "[8,24,2,48]" not in text and "[16,24,48]" not in text


def alone_with(**options):
    """The parameters of one device, made with options that cannot be hashed."""
    return moax.init(jax.random.key(3), CONFIG, **options)


@pytest.mark.parametrize(
    "initializers, message",
    [
        (
            {"kernel": jax.nn.initializers.zeros},
            "initializers has 'kernel'; the parameters of this config are router, wi",
        ),
        (
            {"wi": lambda key, shape, dtype: jnp.zeros((3,), dtype)},
            r"\['wi'\] returned shape \(3,\); it must return",
        ),
        (
            {"wo": lambda key, shape, dtype: "normal"},
            r"\['wo'\] returned a str; it must return an array of shape",
        ),
    ],
)
def test_initializers_that_do_not_fit(initializers, message):
    """Breaks if a misspelt name, or a wrong shape, goes unnoticed."""
    with pytest.raises(ValueError, match=message):
        moax.init(jax.random.key(0), CONFIG, initializers=initializers)
