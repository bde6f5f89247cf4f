"""`moax.nnx.Dense` and `moax.linen.Dense`: flax's own layers without a recipe, `moax.ops.dense` with one.

Covers: libraries x biases x dtypes against flax; ways x libraries with a recipe; layouts and logical names.
"""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax")

from flax import linen, nnx

import moax.linen
import moax.nnx
from moax.ops import dense
from support import TOKENS, make_mesh, mark_rest, put, random, rel_error, spec

pytestmark = pytest.mark.loose

WIDTH, COLUMNS = 64, 48
X = random(0, 8, 4, WIDTH)
BIAS = jax.nn.initializers.normal(1.0)
KEY = jax.random.key(5)
NAMES = ("embed", "mlp")
RULES = (("embed", ("fsdp", "ep")), ("mlp", "tp"))


def mesh_for(way, mesh="2x4"):
    return nullcontext() if way == "none" else jax.set_mesh(make_mesh(mesh, way))


def taken_apart(layer):
    """Of an nnx layer: its values by name, apply(values, x), and its state."""
    graph, state = nnx.split(layer)
    tree = jax.tree.structure(state)
    values = {name: variable.get_value() for name, variable in state.items()}
    return values, lambda values, x: nnx.merge(graph, tree.unflatten(jax.tree.leaves(values)))(x), state


def make(library, columns=COLUMNS, **options):
    """kernel and bias as flax holds them, and apply(kernel, bias, x) of the layer."""
    if library == "nnx":
        values, apply, state = taken_apart(
            moax.nnx.Dense(
                WIDTH,
                columns,
                rngs=nnx.Rngs(5),
                **options,
            )
        )
        return values, apply, {name: state[name] for name in state}
    layer = moax.linen.Dense(columns, **options)
    boxed = jax.jit(layer.init)(KEY, X)["params"]
    return linen.unbox(boxed), lambda values, x: layer.apply({"params": values}, x), boxed


def flax_of(library, **options):
    """The same of flax's layer."""
    if library == "linen":
        layer = linen.Dense(COLUMNS, **options)
        return layer.init(KEY, X)["params"], lambda values, x: layer.apply({"params": values}, x)
    return taken_apart(nnx.Linear(WIDTH, COLUMNS, rngs=nnx.Rngs(5), **options))[:2]


def loss(apply, values, x):
    y = apply(values, x)
    return jnp.sum(
        y.astype(jnp.float32) * jnp.cos(jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape)),
    ), y


@pytest.mark.parametrize(
    "options",
    mark_rest(
        [
            dict(bias_init=BIAS),
            dict(use_bias=False, kernel_init=BIAS),
            dict(dtype=jnp.bfloat16, bias_init=BIAS),
            dict(param_dtype=jnp.bfloat16),
        ],
        2,
    ),
    ids=lambda o: "-".join(o),
)
@pytest.mark.parametrize("library", ("nnx", "linen"))
def test_without_a_recipe_it_is_flax(library, options):
    """Breaks if a user who swaps the layer gets another tree, other values of the same key, another dtype, another
    result or another gradient."""
    values, apply, _ = make(library, **options)
    want, apply_flax = flax_of(library, **options)
    assert jax.tree.structure(values) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, values, want)

    def run(apply):
        return jax.jit(jax.value_and_grad(lambda v, x: loss(apply, v, x), (0, 1), has_aux=True))

    (_, y), grads = run(apply)(values, X)
    (_, y_flax), grads_flax = run(apply_flax)(want, X)
    assert y.dtype == y_flax.dtype
    narrow = jnp.bfloat16 in options.values()
    tolerance = 2e-2 if narrow else 2e-6  # flax sums the gradient of its bias in bfloat16
    assert rel_error(y, y_flax) < tolerance
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_flax), strict=True):
        assert one.dtype == other.dtype and rel_error(one, other) < tolerance


@pytest.mark.parametrize("way", mark_rest(("explicit", "custom_partitioning", "shard_map", "none"), 1))
@pytest.mark.parametrize("library", ("nnx", "linen"))
def test_on_mesh(library, way):
    """Breaks if an option is not passed on, a layer made under a mesh has other values or another layout than
    `dense_spec`, or flax is told another layout."""
    options = dict(recipe="fp8_block", bias_init=BIAS, engine=way if way == "shard_map" else "auto")
    with mesh_for(way):
        values, apply, boxed = make(library, **options)
        x = X if way == "none" else put(make_mesh("2x4", way), (spec("2x4", TOKENS),), (X,))[0]
        (_, y), grads = jax.jit(jax.value_and_grad(lambda v, x: loss(apply, v, x), has_aux=True))(values, x)
    alone, _, _ = make(library, bias_init=BIAS)
    jax.tree.map(np.testing.assert_array_equal, values, alone)

    def by_hand(values, x):
        return dense(x, values["kernel"], values["bias"], recipe="fp8_block")

    (_, want), want_grads = jax.jit(jax.value_and_grad(lambda v, x: loss(by_hand, v, x), has_aux=True))(alone, X)
    assert rel_error(y, want) < 5e-6
    assert rel_error(grads["bias"], want_grads["bias"]) < 5e-6
    # Each device has 4 rows, which are a block of rows of their own in the gradient of the kernel.
    assert rel_error(grads["kernel"], want_grads["kernel"]) < (5e-6 if way == "none" else 0.05)
    if way != "none":
        sharding = NamedSharding(make_mesh("2x4", way), P(("fsdp", "ep")))
        assert values["kernel"].sharding.is_equivalent_to(sharding, 2)
        assert grads["kernel"].sharding.is_equivalent_to(sharding, 2)
        labels = linen.get_partition_spec(boxed) if library == "linen" else None
        said = labels["kernel"] if labels else boxed["kernel"].get_metadata("out_sharding")
        assert tuple(said)[0] == ("fsdp", "ep")


@pytest.mark.parametrize("way", mark_rest(("custom_partitioning", "explicit"), 1))
@pytest.mark.parametrize("library", ("nnx", "linen"))
def test_logical_names(library, way):
    """Breaks if the rules of flax do not decide the layout, tp is gathered, or a name without a rule passes."""
    # Without a mesh, the names are all there is.
    values, apply, boxed = make(library, logical_axes=NAMES)
    if library == "nnx":
        assert boxed["kernel"].get_metadata("out_sharding") == NAMES
        assert boxed["bias"].get_metadata("out_sharding") == NAMES[1:]
    else:
        assert linen.get_partition_spec(boxed) == {"kernel": P(*NAMES), "bias": P(*NAMES[1:])}
    with mesh_for(way, "tp2x2x2"), linen.logical_axis_rules(RULES):
        split, apply, _ = make(library, logical_axes=NAMES, bias_init=BIAS)
        x = put(make_mesh("tp2x2x2", way), (spec("tp2x2x2", TOKENS),), (X,))[0]
        y = jax.jit(apply)(split, x)
    assert split["kernel"].addressable_shards[0].data.shape == (WIDTH // 4, COLUMNS // 2)
    assert split["bias"].addressable_shards[0].data.shape == (COLUMNS // 2,)
    assert y.addressable_shards[0].data.shape[-1] == COLUMNS // 2
    np.testing.assert_array_equal(split["kernel"], values["kernel"])
    want = X.astype(np.float64) @ np.asarray(values["kernel"], np.float64) + np.asarray(split["bias"])
    assert rel_error(y, want) < 5e-6
    with (
        mesh_for(way),
        linen.logical_axis_rules(RULES[:1]),
        pytest.raises(ValueError, match="'mlp' of kernel has no"),
    ):
        make(library, logical_axes=NAMES)


@pytest.mark.parametrize("library", ("nnx", "linen"))
def test_errors(library, unchecked):
    """Breaks if a mistake is not named."""
    with pytest.raises(ValueError, match="features=0 must be an int of at least 1"):
        make(library, columns=0)
    with pytest.raises(ValueError, match=r"logical_axes='embed' must be the names of two dims"):
        make(library, logical_axes="embed")
    with pytest.raises(ValueError, match="recipe='fp4' must be"):
        values, apply, _ = make(library, recipe="fp4")
        apply(values, X)
