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

pytestmark = pytest.mark.loose

ROUTER = moax.RouterConfig(score="sigmoid", bias=True, logits_bias=True, expert_scale=True)
FULL = moax.MoEConfig(32, 48, 8, 2, use_bias=True, shared_d_ff=16, shared_gate=True, router=ROUTER, d_latent=24)
BARE = moax.MoEConfig(16, 16, 8, 2)
NAMES = moax.LogicalAxes()
RULES = (("exp", "ep"), ("embed", "fsdp"), ("mlp", None), ("layers", None))
BY_RULES = {"router": P("fsdp", None), "wi": P("ep", "fsdp", None, None), "wo": P("ep", None, "fsdp")}
KEY = jax.random.key(3)
X = np.random.default_rng(0).standard_normal((8, 4, 16)).astype(np.float32)


def specs_of(layer) -> dict:
    return {name: v.get_value() for name, v in nnx.get_partition_spec(nnx.state(layer)).items()}


def stacked(layers: int, **transform):
    """A function of rngs that makes so many layers by `nnx.vmap`."""
    make = nnx.vmap(lambda rngs: MoE(BARE, rngs=rngs, logical_axes=NAMES), in_axes=0, out_axes=0, **transform)
    return nnx.split_rngs(splits=layers)(make)


class Stack(nn.Module):
    """x + block(x), three times, by `nn.scan`, whose new dim has the name "layers"."""

    logical_axes: moax.LogicalAxes | None = None

    @nn.compact
    def __call__(self, x):
        def body(block, x, _):
            y, stats = block(x)
            return x + y, stats

        scan = nn.scan(
            body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )  # fmt: skip
        return scan(MoEBlock(BARE, name="moe", logical_axes=self.logical_axes), x, None)


def test_every_dim_has_the_name_of_its_letter():
    """Breaks if a parameter has more dims than names, or the table of the docstring says something else."""
    shapes = moax.params.full_shapes(FULL)
    lines = re.findall(r"^ {8}(\w.*?)  +(\w(?: \w)*)  +(\(.*\))$", moax.LogicalAxes.__doc__, re.M)
    written = {name: (dims.replace(" ", ""), eval(cells)) for names, dims, cells in lines for name in names.split(", ")}
    assert written == {name: (DIMS[name], NAMES.names(name)) for name in DIMS}
    assert all(len(NAMES.names(name)) == len(getattr(shapes, name)) for name in DIMS)


@pytest.mark.parametrize(
    "fields, message",
    [(dict(E=3), "E=3 must be a name or None"), (dict(F="embed"), "each dim needs a name of its own")],
)
def test_names_that_cannot_be(fields, message):
    """Breaks if names that no rule can map are taken."""
    with pytest.raises(ValueError, match=message):
        moax.LogicalAxes(**fields)


@pytest.mark.parametrize("abstract", [False, True])
def test_nnx_without_a_mesh(abstract):
    """Breaks if metadata needs a mesh in force, or the rules of a user do not map it."""

    def make():
        return MoE(FULL, rngs=nnx.Rngs(0), logical_axes=NAMES)

    layer = nnx.eval_shape(make) if abstract else make()
    assert specs_of(layer) == {name: P(*NAMES.names(name)) for name in DIMS}
    with nn.logical_axis_rules(RULES):
        mapped, mesh = specs_of(layer), make_mesh("2x4", "custom_partitioning")
        shardings = nnx.get_named_sharding(nnx.state(layer), mesh)
    assert {name: mapped[name] for name in BY_RULES} == BY_RULES
    assert shardings["wi"].get_value() == NamedSharding(mesh, BY_RULES["wi"])


def test_linen_without_a_mesh():
    """Breaks if `init` on shapes alone gives no boxes, or `nn.logical_to_mesh_sharding` cannot map them."""
    mesh, block = make_mesh("2x4", "custom_partitioning"), MoEBlock(FULL, logical_axes=NAMES)
    shapes = jax.eval_shape(block.init, KEY, jnp.ones((4, 32)))
    named = nn.get_partition_spec(shapes)
    assert named["params"]["wi"] == P("exp", "embed", None, "mlp") and named["moax_state"]["router_bias"] == P(None)
    shardings = nn.logical_to_mesh_sharding(named, mesh, RULES)["params"]
    assert {name: shardings[name] for name in BY_RULES} == {n: NamedSharding(mesh, s) for n, s in BY_RULES.items()}


@pytest.mark.more
@pytest.mark.parametrize("way", ["custom_partitioning", "explicit"])
def test_arrays_lie_by_the_rules(way):
    """Breaks if the layout of an array is not that of its metadata, its values depend on it, or the gradients of the
    block have another."""
    want = moax.init(nnx.Rngs(0).params(), BARE)
    mesh = make_mesh("2x4", way)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        layer = MoE(BARE, rngs=nnx.Rngs(0), logical_axes=NAMES)
        block = jax.jit(MoEBlock(BARE, logical_axes=NAMES).init)(KEY, jnp.asarray(X))["params"]
        grads = nnx.jit(nnx.grad(lambda m, x: m(x)[0].sum()))(layer, jnp.asarray(X))
    for name, spec in BY_RULES.items():
        value, at = getattr(layer, name).get_value(), NamedSharding(mesh, spec)
        np.testing.assert_array_equal(value, getattr(want, name))
        # The router is whole where it is used, and so is its gradient until an optimizer splits it.
        for array in (value, block[name].value, *([] if name == "router" else [grads[name].get_value()])):
            assert array.sharding.is_equivalent_to(at, array.ndim), name
        assert block[name].names == NAMES.names(name)


def test_without_a_rule_for_any_name():
    """Breaks if layers whose names nobody maps are replicated: they lie as `moax.param_specs` says."""
    mesh = make_mesh("2x4", "custom_partitioning")
    with jax.set_mesh(mesh), nn.logical_axis_rules((("heads", "fsdp"),)):
        layer = MoE(BARE, rngs=nnx.Rngs(0), logical_axes=NAMES)
        want = NamedSharding(mesh, moax.param_specs(BARE).wi)
    assert layer.wi.get_value().sharding.is_equivalent_to(want, 4)
    assert specs_of(layer)["wi"] == P("exp", "embed", None, "mlp")


def test_a_name_without_a_rule():
    """Breaks if a name that the rules forgot leaves a dim whole in silence."""
    mesh = make_mesh("2x4", "custom_partitioning")
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES[:2]):
        for make in (
            lambda: MoE(BARE, rngs=nnx.Rngs(0), logical_axes=NAMES),
            lambda: MoEBlock(BARE, logical_axes=NAMES).init(KEY, jnp.asarray(X)),
        ):
            with pytest.raises(ValueError, match="'mlp' of params.wi has no rule, and is no axis of the mesh"):
                make()


def test_names_that_are_mesh_axes():
    """Breaks if a name that is a mesh axis needs a rule: flax reads such metadata as it stands."""
    names, mesh = moax.LogicalAxes(E="ep", H=None, F="fsdp", S=None), make_mesh("2x4", "custom_partitioning")
    with jax.set_mesh(mesh):
        layer = MoE(BARE, rngs=nnx.Rngs(0), logical_axes=names)
    value = layer.wi.get_value()
    assert specs_of(layer)["wi"] == P("ep", None, None, "fsdp")
    assert value.sharding.is_equivalent_to(NamedSharding(mesh, P("ep", None, None, "fsdp")), 4)


@pytest.mark.parametrize("name", [pytest.param(None, id="default"), "layers"])
def test_stacked_nnx_layers(name):
    """Breaks if the metadata of layers that `nnx.vmap` stacked is that of one layer: each dim then has the name of the
    dim after it, and `nnx.get_named_sharding` lays out weights wrongly."""
    transform = {} if name is None else {"transform_metadata": {nnx.PARTITION_NAME: name}}
    assert specs_of(stacked(3, **transform)(nnx.Rngs(0)))["wi"] == P(name, "exp", "embed", None, "mlp")
    mesh = make_mesh("2x4", "custom_partitioning")
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        model = nnx.jit(stacked(3, **transform))(nnx.Rngs(0))
        optimizer = nnx.jit(lambda model: nnx.Optimizer(model, optax.sgd(1e-3, momentum=0.9), wrt=nnx.Param))(model)
        for variable in (model.wi, optimizer.opt_state[0].trace.wi):
            value, at = variable.get_value(), NamedSharding(mesh, P(None, *BY_RULES["wi"]))
            assert value.sharding.is_equivalent_to(at, 5)
            assert nnx.get_partition_spec({"wi": variable})["wi"].get_value() == P(None, *BY_RULES["wi"])


@pytest.mark.parametrize("logical", [False, True])
def test_stacked_linen_layers(logical):
    """Breaks if a layers axis with a name has to be an axis of the mesh."""
    mesh, stack = make_mesh("2x4", "custom_partitioning"), Stack(NAMES if logical else None)
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES if logical else ()):
        variables = jax.jit(stack.init)(KEY, jnp.asarray(X))
        wi = variables["params"]["moe"]["wi"]
        spec = P(None, *(BY_RULES["wi"] if logical else moax.param_specs(BARE).wi))
        assert wi.value.sharding.is_equivalent_to(NamedSharding(mesh, spec), 5)
        assert nn.unbox(variables)["params"]["moe"]["wi"].sharding.is_equivalent_to(wi.value.sharding, 5)
        y, _ = jax.eval_shape(stack.apply, variables, jnp.asarray(X))
    assert wi.names[0] == "layers" and y.shape == X.shape
    if not logical:
        assert nn.get_partition_spec(wi) == spec and nn.get_sharding(wi, mesh) == NamedSharding(mesh, spec)


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
        assert variable.get_value().sharding.is_equivalent_to(NamedSharding(mesh, BY_RULES["wi"]), 4)


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


def test_initializers_of_layers():
    """Breaks if a layer drops the initializers that it was given, or Linen cannot hold them."""
    given = {"router": jax.nn.initializers.zeros}
    assert not MoE(BARE, rngs=nnx.Rngs(0), initializers=given).router.get_value().any()
    assert not MoEBlock(BARE, initializers=given).init(KEY, jnp.asarray(X))["params"]["router"].any()


@pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")
@pytest.mark.parametrize("logical", [False, True])
def test_under_with_mesh(logical):
    """Breaks if a layer under the older `with mesh:` asks flax for the mesh, which flax does not find there."""
    mesh, names = make_mesh("2x4", "custom_partitioning"), NAMES if logical else None
    with mesh, nn.logical_axis_rules(RULES if logical else ()):
        layer = MoE(BARE, rngs=nnx.Rngs(0), logical_axes=names)
        box = jax.jit(MoEBlock(BARE, logical_axes=names).init)(KEY, jnp.asarray(X))["params"]["wi"]
        spec = specs_of(layer)["wi"]
    assert spec == (BY_RULES["wi"] if logical else moax.param_specs(BARE, mesh=mesh).wi)
    for value in (layer.wi.get_value(), box.value):
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), 4)
    nnx.Optimizer(layer, optax.sgd(1e-3), wrt=nnx.Param)


@pytest.mark.parametrize("names", [None, NAMES])
def test_a_mesh_axis_without_a_role(names):
    """Breaks if a layer whose `axes` forget a mesh axis is replicated over it in silence."""
    with jax.set_mesh(jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))):
        with nn.logical_axis_rules((("exp", "expert"), ("embed", None), ("mlp", None))):
            with pytest.raises(ValueError, match="mesh axis 'expert' of 8 devices has no role"):
                MoE(BARE, rngs=nnx.Rngs(0), logical_axes=names)
            with pytest.raises(ValueError, match="mesh axis 'expert' of 8 devices has no role"):
                MoEBlock(BARE, logical_axes=names).init(KEY, jnp.asarray(X))
