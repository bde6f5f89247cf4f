"""Logical names of the dims of parameters, in both layers: metadata without a mesh, layouts by a user's rules.

Covers: nnx and Linen; no mesh, a mesh with rules, a mesh without; stacked layers; tables of flax.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax")
pytest.importorskip("optax")

import optax
from flax import linen as nn
from flax import nnx

import moax
from moax.linen import MoEBlock
from moax.nnx import MoE
from moax.params import DIMS
from support import make_mesh
from support.layers import KEY, LAYERS, Stack, by_name, params_of, stack

pytestmark = pytest.mark.loose

ROUTER = moax.RouterConfig(score="sigmoid", bias=True, logits_bias=True, expert_scale=True)
FULL = moax.MoEConfig(
    32,
    48,
    8,
    2,
    use_bias=True,
    shared_d_ff=16,
    shared_gate=True,
    router=ROUTER,
    d_latent=24,
)
BARE = moax.MoEConfig(16, 16, 8, 2)
NAMES = moax.LogicalAxes()
RULES = (("exp", "ep"), ("embed", "fsdp"), ("mlp", None), ("layers", None))
BY_RULES = {
    "router": P("fsdp", None),
    "wi": P("ep", "fsdp", None, None),
    "wo": P("ep", None, "fsdp"),
}
X = np.random.default_rng(0).standard_normal((8, 4, 16)).astype(np.float32)
BOTH = pytest.mark.parametrize("library", LAYERS)


def lies_as(array: jax.Array, mesh: jax.sharding.Mesh, spec: P) -> bool:
    return array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)


def test_every_dim_has_the_name_of_its_letter():
    """Breaks if a parameter has more dims than names, or the table of the docstring says something else."""
    shapes = moax.params.param_shapes(FULL, optional=True)
    lines = re.findall(r"^ {8}(\w.*?)  +(\w(?: \w)*)  +(\(.*\))$", moax.LogicalAxes.__doc__, re.M)
    written = {name: (dims.replace(" ", ""), eval(cells)) for names, dims, cells in lines for name in names.split(", ")}
    assert written == {name: (DIMS[name], NAMES.names(name)) for name in DIMS}
    assert all(len(NAMES.names(name)) == len(getattr(shapes, name)) for name in DIMS)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(E=3), "E is an int; it must be a name"),
        (dict(F="embed"), "each dim needs a name of its own"),
    ],
)
def test_names_that_cannot_be(fields, message):
    """Breaks if names that no rule can map are taken."""
    with pytest.raises(ValueError, match=message):
        moax.LogicalAxes(**fields)


@pytest.mark.parametrize(("library", "shapes"), [("nnx", False), ("nnx", True), ("linen", True)])
def test_without_a_mesh(library, shapes):
    """Breaks if metadata needs a mesh in force, `init` on shapes alone gives none, or a user's rules do not map it."""
    mesh = make_mesh("2x4", "custom_partitioning")
    layer = LAYERS[library](FULL, shapes, logical_axes=NAMES)
    assert layer.labels() == {name: P(*NAMES.names(name)) for name in DIMS}
    if library == "linen":
        mapped = by_name(
            nn.logical_to_mesh_sharding(
                nn.get_partition_spec(layer.variables),
                mesh,
                RULES,
            )
        )
    else:
        with nn.logical_axis_rules(RULES):
            mapped = layer.shardings(mesh)
            labels = layer.labels()
        assert {name: labels[name] for name in BY_RULES} == BY_RULES
    expected = {n: NamedSharding(mesh, s) for n, s in BY_RULES.items()}
    assert {name: mapped[name] for name in BY_RULES} == expected


@pytest.mark.more
@pytest.mark.parametrize("way", ["custom_partitioning", "explicit"])
@BOTH
def test_arrays_lie_by_the_rules(library, way):
    """Breaks if the layout of an array is not that of its metadata, its values depend on it, or the gradients of the
    block have another."""
    mesh = make_mesh("2x4", way)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        layer = LAYERS[library](BARE, logical_axes=NAMES)
        grads = jax.jit(jax.grad(lambda p, x: layer(p, x)[0].sum()))(params_of(layer.arrays), jnp.asarray(X))
    want = moax.init(layer.key, BARE)
    for name, spec in BY_RULES.items():
        np.testing.assert_array_equal(layer.arrays[name], getattr(want, name))
        assert lies_as(layer.arrays[name], mesh, spec), name
        # The router is whole where it is used, and so is its gradient until an optimizer splits it.
        assert name == "router" or lies_as(getattr(grads, name), mesh, spec), name


def test_names_without_a_rule():
    """Breaks if layers whose names nobody maps are replicated, and do not lie as `moax.param_specs` says; or if one
    name that the rules forgot leaves a dim whole in silence."""
    mesh = make_mesh("2x4", "custom_partitioning")
    with jax.set_mesh(mesh):
        with nn.logical_axis_rules((("heads", "fsdp"),)):
            layer = LAYERS["nnx"](BARE, logical_axes=NAMES)
            want = moax.param_specs(BARE).wi
        assert lies_as(layer.arrays["wi"], mesh, want)
        assert layer.labels()["wi"] == P("exp", "embed", None, "mlp")
        for make in LAYERS.values():
            with (
                nn.logical_axis_rules(RULES[:2]),
                pytest.raises(ValueError, match="'mlp' of wi has no rule"),
            ):
                make(BARE, logical_axes=NAMES)


def test_names_that_are_mesh_axes():
    """Breaks if a name that is a mesh axis needs a rule: flax reads such metadata as it stands."""
    names = moax.LogicalAxes(E="ep", H=None, F="fsdp", S=None)
    mesh = make_mesh("2x4", "custom_partitioning")
    with jax.set_mesh(mesh):
        layer = LAYERS["nnx"](BARE, logical_axes=names)
    assert layer.labels()["wi"] == P("ep", None, None, "fsdp")
    assert lies_as(layer.arrays["wi"], mesh, P("ep", None, None, "fsdp"))


@pytest.mark.parametrize("name", [pytest.param(None, id="default"), "layers"])
def test_stacked_nnx_layers(name):
    """Breaks if the metadata of layers that `nnx.vmap` stacked is that of one layer: each dim then has the name of the
    dim after it, and `nnx.get_named_sharding` lays out weights wrongly."""
    make = stack(
        BARE,
        3,
        name and {"transform_metadata": {nnx.PARTITION_NAME: name}},
        logical_axes=NAMES,
    )
    labels = nnx.get_partition_spec(nnx.state(make(nnx.Rngs(0))))
    assert labels["wi"].get_value() == P(name, "exp", "embed", None, "mlp")
    mesh = make_mesh("2x4", "custom_partitioning")
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        model = nnx.jit(make)(nnx.Rngs(0))
        optimizer = nnx.jit(lambda model: nnx.Optimizer(model, optax.sgd(1e-3, momentum=0.9), wrt=nnx.Param))(model)
        for variable in (model.wi, optimizer.opt_state[0].trace.wi):
            assert lies_as(variable.get_value(), mesh, P(None, *BY_RULES["wi"]))
            assert nnx.get_partition_spec({"wi": variable})["wi"].get_value() == P(None, *BY_RULES["wi"])


@pytest.mark.parametrize("logical", [False, True])
def test_stacked_linen_layers(logical):
    """Breaks if a layers axis with a name has to be an axis of the mesh."""
    mesh = make_mesh("2x4", "custom_partitioning")
    model = Stack(BARE, 3, "layers", NAMES if logical else None)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES if logical else ()):
        variables = jax.jit(model.init)(KEY, jnp.asarray(X))
        wi = variables["params"]["moe"]["wi"]
        spec = P(None, *(BY_RULES["wi"] if logical else moax.param_specs(BARE).wi))
        for value in (wi.value, nn.unbox(variables)["params"]["moe"]["wi"]):
            assert lies_as(value, mesh, spec)
        y, _ = jax.eval_shape(model.apply, variables, jnp.asarray(X))
    assert wi.names[0] == "layers" and y.shape == X.shape
    if not logical:
        assert nn.get_partition_spec(wi) == spec
        assert nn.get_sharding(wi, mesh) == NamedSharding(mesh, spec)


def test_optimizer_state_made_under_jit():
    """Breaks if the moments of an optimizer that `nnx.jit` makes are not laid out as the parameters are."""
    mesh = make_mesh("2x4", "custom_partitioning")

    @nnx.jit
    def make():
        layer = MoE(BARE, rngs=nnx.Rngs(0), logical_axes=NAMES)
        return layer, nnx.Optimizer(layer, optax.adam(1e-3), wrt=nnx.Param)

    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        layer, optimizer = make()
    for variable in (layer.wi, optimizer.opt_state[0].mu.wi):
        assert lies_as(variable.get_value(), mesh, BY_RULES["wi"])


def test_tables():
    """Breaks if a user cannot print a model: flax prints no output that is a dataclass."""
    options = dict(console_kwargs={"force_terminal": False, "width": 160})
    layer = MoE(BARE, rngs=nnx.Rngs(0))
    assert "wi: float32[8,16,2,16]" in nnx.tabulate(layer, jnp.asarray(X), **options)
    table = nn.tabulate(MoEBlock(BARE, logical_axes=NAMES), KEY, **options)(jnp.asarray(X))
    assert "wo: float32[8,16,16] P(exp, mlp, embed)" in table


def test_paths_of_stats_have_names():
    """Breaks if metrics that are logged by their paths lose the names of `MoEStats`."""
    names = moax.MoEStats._fields
    stats = moax.MoEStats(*range(len(names)))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(stats)]
    assert paths == [f".{name}" for name in names] and ".dropped" in paths
    assert jax.tree.map(lambda v: v + 1, stats).dropped == stats.dropped + 1


@BOTH
def test_initializers_of_layers(library):
    """Breaks if a layer drops the initializers that it was given, or Linen cannot hold them."""
    assert not LAYERS[library](BARE, initializers={"router": jax.nn.initializers.zeros}).arrays["router"].any()


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
@pytest.mark.parametrize("logical", [False, True])
@BOTH
def test_under_with_mesh(library, logical):
    """Breaks if a layer under the older `with mesh:` asks flax for the mesh, which flax does not find there."""
    mesh = make_mesh("2x4", "custom_partitioning")
    with mesh, nn.logical_axis_rules(RULES if logical else ()):
        layer = LAYERS[library](BARE, logical_axes=NAMES if logical else None)
        spec = BY_RULES["wi"] if logical else moax.param_specs(BARE, mesh=mesh).wi
        assert library == "linen" or layer.labels()["wi"] == spec
    assert lies_as(layer.arrays["wi"], mesh, spec)
    if library == "nnx":
        nnx.Optimizer(layer.module, optax.sgd(1e-3), wrt=nnx.Param)


@BOTH
@pytest.mark.parametrize("names", [None, NAMES])
def test_a_mesh_axis_without_a_role(library, names):
    """Breaks if a layer whose `axes` forget a mesh axis is replicated over it in silence."""
    with jax.set_mesh(jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))):
        with nn.logical_axis_rules((("exp", "expert"), ("embed", None), ("mlp", None))):
            with pytest.raises(ValueError, match="mesh axis 'expert' of 8 devices has no role"):
                LAYERS[library](BARE, logical_axes=names)
