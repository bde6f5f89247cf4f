"""Where arrays lie: the algebra of specs as pure functions, and the PartitionSpec of every parameter on every mesh.

Covers: every parameter x meshes x axes x layouts; unequal orders, absent axes, shards inside a shard_map; errors.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moax
from moax import Axes, MoEConfig, MoEParams, ops
from moax.kernels.xla.operands import quantize
from moax.mesh.axes import ResolvedAxes, as_names
from moax.mesh.specs import Spec, check_divides, constrain, local_shape, make_sharded, mesh_in_force, named, pad
from moax.ops.weights import WeightSpec, find_layout, replicas
from moax.params import dense_spec, param_specs, reshard_params, shard_specs, token_spec
from moax.recipe import FULL, RECIPES
from support import make_mesh, mark_rest

ROUTER = moax.RouterConfig(bias=True, logits_bias=True, expert_scale=True)
CONFIG = MoEConfig(
    32,
    48,
    8,
    2,
    use_bias=True,
    shared_d_ff=16,
    shared_gate=True,
    router=ROUTER,
    d_latent=16,
)
NAMES = [f.name for f in dataclasses.fields(MoEParams)]


def mesh_of_sizes(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def layout(name: str, own_spec: P, kept_axes: tuple, axes: ResolvedAxes):
    weight = WeightSpec(name, own_spec, axes, FULL, "xla", np.dtype(np.float32), kept_axes)
    return find_layout(weight, own_spec, len(kept_axes))


def roles_on(axes: Axes = Axes(), **sizes: int) -> ResolvedAxes:
    return axes.resolve(mesh_of_sizes(**sizes))


# Axes and roles.


def test_axes_are_names_or_tuples():
    """Breaks if one name and a tuple of it are two configs, or an Axes cannot be a static argument of jit."""
    assert Axes(fsdp=("data", "fsdp")).fsdp == ("data", "fsdp")
    assert Axes().ep == ("ep",) == Axes(ep=("ep",)).ep
    assert hash(Axes(dp=["a", "b"])) == hash(Axes(dp=("a", "b"))) and Axes(tp=()).tp == ()
    assert (as_names(None), as_names("a"), as_names(("a", "b"))) == ((), ("a",), ("a", "b"))


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(fsdp="ep"), "Axes: mesh axis 'ep' is named by both fsdp and ep; name it once"),
        (
            dict(dp=("a", "b"), tp="a"),
            "Axes: mesh axis 'a' is named by both dp and tp; name it once",
        ),
        (dict(ep=("x", "x")), "Axes: mesh axis 'x' is named by both ep and ep; name it once"),
        (dict(ep=3), "Axes: ep=3 must be a mesh axis name or a tuple of them"),
        (dict(ep=("x", 3)), "Axes: ep=('x', 3) must be a mesh axis name or a tuple of them"),
        (
            dict(fsdp_dim="hidden"),
            "Axes: fsdp_dim='hidden' must be one of 'auto', 'experts', 'model'",
        ),
        (dict(cp=("dp", "cp")), "Axes: mesh axis 'dp' is named by both dp and cp; name it once"),
        (dict(tokens="ep"), "Axes: tokens='ep'; it must be the mesh axes of each leading dim of x"),
        (
            dict(tokens=("fsdp", "tp")),
            "Axes: tokens=('fsdp', 'tp') names 'tp', which is in none of dp, fsdp, ep and cp",
        ),
        (
            dict(tokens=("ep", ("fsdp", "ep"))),
            "Axes: tokens=('ep', ('fsdp', 'ep')) names a mesh axis twice",
        ),
    ],
)
def test_axes_that_cannot_be(fields, message):
    """Breaks if one mesh axis plays two roles (merging ep into fsdp shards experts over both), or the message hides
    which."""
    with pytest.raises(ValueError, match=re.escape(message)):
        Axes(**fields)


def test_roles_forget_axes_of_one_device():
    """Breaks if a collective runs over an axis that the mesh lacks, or over one device."""
    roles = roles_on(Axes(fsdp=("data", "fsdp")), data=2, fsdp=1, ep=4, elsewhere=1)
    assert roles == ResolvedAxes(fsdp=("data",), ep=("ep",), sizes=(("data", 2), ("ep", 4)), dims=(("data", "ep"), ()))
    assert roles_on() == ResolvedAxes() and roles_on(fsdp=1, ep=1) == ResolvedAxes()
    assert ResolvedAxes().size(()) == 1 and roles.size(roles.all) == 8


def test_order_of_token_axes():
    """Breaks if ep is not innermost: tokens that an exchange brings together would not lie together."""
    roles = roles_on(tp=2, ep=2, fsdp=2, dp=2)
    assert roles.tokens == ("dp", "fsdp", "ep") and roles.all == ("dp", "fsdp", "ep", "tp")


def test_dims_of_token_axes():
    """Breaks if S is not over cp, if an order of the caller's is lost, or if an axis that it leaves out splits nothing:
    two devices would then compute the same tokens and count them twice."""
    roles = roles_on(dp=2, ep=2, cp=2)
    assert [roles.over(n) for n in (1, 2, 3)] == [
        (("dp", "ep", "cp"),), (("dp", "ep"), ("cp",)), (("dp", "ep"), (), ("cp",)),
    ]  # fmt: skip
    assert roles.sequence == ("cp",) and roles.replica_axes == ("dp", "cp")
    ordered = roles_on(Axes(tokens=P(("ep", "fsdp"), "cp")), fsdp=2, ep=2, cp=2)
    assert ordered.over(2) == (("ep", "fsdp"), ("cp",)) and ordered.tokens == ("ep", "fsdp", "cp")
    with_cp = roles_on(Axes(tokens=("ep",)), dp=2, fsdp=1, ep=2, cp=2)
    assert with_cp.over(2) == (("dp", "ep"), ("cp",))
    inner = roles_on(Axes(tokens=("fsdp", "ep")), fsdp=2, ep=2)
    assert inner.sequence == ("ep",) and inner.replica_axes == ("fsdp",)
    with pytest.raises(
        ValueError,
        match=re.escape("x has 2 dims before H, and Axes.tokens has 3 entries"),
    ):
        roles_on(Axes(tokens=("fsdp", "ep", "cp")), fsdp=2).over(2)


# The algebra of specs.


def test_one_spec_for_one_layout():
    """Breaks if JAX makes two specs of two ways to write a layout, which jit would compile twice."""
    assert tuple(P((), ("b",), ["a"], ("c", "d"))) == (None, "b", "a", ("c", "d"))


def test_pad():
    """Breaks if a short spec loses its missing dims, or one for another rank is cut in silence."""
    assert pad(P("a", ("b", "c")), 3) == (("a",), ("b", "c"), ()) and pad(P(), 0) == ()
    with pytest.raises(ValueError, match=re.escape("has 3 entries, for an array of 2 dims")):
        pad(P(None, None, "a"), 2)


def test_check_divides():
    """Breaks if a size that does not divide fails inside XLA, or is named without dim or axes."""
    roles = roles_on(fsdp=2, ep=4)
    check_divides("w", (8, 3, 0), P(("ep", "fsdp"), None, "ep"), roles)
    message = "params.wi: dim 1 of size 12 is not divisible by mesh axes ('fsdp', 'ep') of 8 devices"
    with pytest.raises(ValueError, match=re.escape(message)):
        check_divides("params.wi", (4, 12), P("ep", ("fsdp", "ep")), roles)


def test_local_shape():
    """Breaks if a shard is taken for another size than the mesh gives it."""
    roles = roles_on(fsdp=2, ep=4)
    assert local_shape((16, 6, 5), P(("ep", "fsdp"), "fsdp"), roles) == (2, 3, 5)
    assert local_shape((5,), P("fsdp"), roles) == (3,)


ROLES = roles_on(dp=2, fsdp=2, ep=2, tp=2)
WI = (("ep",), (), (), ("tp",))
# Section 3.3 of Transformer Engine's tests: ("expert", "fsdp"), experts over the first.
EXPERT = roles_on(Axes(ep="expert"), expert=2, fsdp=2, dp=2)
KEPT = (("expert",), (), ())


@pytest.mark.parametrize(
    "roles, kept_axes, own_spec, gather",
    [
        (ROLES, WI, P(("ep", "fsdp"), None, None, "tp"), (("fsdp",), (), (), ())),
        (ROLES, WI, P("ep", "fsdp", None, "tp"), ((), ("fsdp",), (), ())),
        (ROLES, WI, P("ep", None, None, ("tp", "fsdp")), ((), (), (), ("fsdp",))),
        (ROLES, WI, P("ep", None, None, "tp"), ((), (), (), ())),
        (ROLES, WI, P(("ep", "other"), "other", None, "tp"), ((), (), (), ())),
        (EXPERT, KEPT, P(("expert", "fsdp")), (("fsdp",), (), ())),
        (EXPERT, KEPT, P("expert", None, "fsdp"), ((), (), ("fsdp",))),
        (EXPERT, KEPT, P("expert", "fsdp", None), ((), ("fsdp",), ())),
        # A dense weight gathers ep too.
        (ROLES, ((), ("tp",)), P(("fsdp", "ep"), "tp"), (("fsdp", "ep"), ())),
    ],
)
def test_layout_of_a_weight(roles, kept_axes, own_spec, gather):
    """Breaks if more is gathered than fsdp, if the expert axis is where a dim keeps it, if quantizing does not keep the
    shard, or if an axis of no role stays in the spec."""
    own, keeps, results = layout("w", own_spec, kept_axes, roles)
    assert keeps == kept_axes and results == gather
    assert pad(own, len(kept_axes)) == tuple(k + g for k, g in zip(kept_axes, gather, strict=True))


@pytest.mark.parametrize(
    "own_spec, dim, message",
    [
        (P(("fsdp", "ep"), None, None, "tp"), 0, "is sharded over mesh axes 'fsdp', 'ep'; it must be sharded over mesh "
         "axis 'ep' first, and may then be sharded over mesh axis 'fsdp'"),
        (P(None, "fsdp", None, "tp"), 0, "is not sharded; it must be sharded over mesh axis 'ep' first"),
        (P("ep", "fsdp", None, None), 3, "is not sharded; it must be sharded over mesh axis 'tp' first"),
        (P("ep", "tp", None, "tp"), 1, "is sharded over mesh axis 'tp'; it may be sharded over mesh axis 'fsdp' alone"),
        (P("ep", "dp", None, "tp"), 1, "is sharded over mesh axis 'dp'; it may be sharded over mesh axis 'fsdp' alone"),
    ],
)  # fmt: skip
def test_conflicting_layouts(own_spec, dim, message):
    """Breaks if a layout that no gather repairs is used all the same (experts in another order than the ranks that own
    them), or if the message does not name dim and axes."""
    with pytest.raises(ValueError, match=re.escape(f"params.wi: dim {dim} {message}")):
        layout("params.wi", own_spec, WI, ROLES)


def test_gradients_are_reduced_over_replicas_never_over_experts():
    """Breaks if a weight gradient is summed over ranks of other experts, or not over all that hold copies of it."""
    weight = WeightSpec("w", P("expert"), EXPERT, FULL, "xla", np.dtype(np.float32), KEPT)
    by = {names: replicas(weight, find_layout(weight, P(*names), 3)) for names in (("expert",), (("expert", "fsdp"),))}
    assert by == {("expert",): ("dp", "fsdp"), (("expert", "fsdp"),): ("dp",)}


def test_large_weights_keep_their_dims():
    """Breaks if 3.2e9 elements are flattened to one dim, which no index of 32 bits reaches."""
    w = jax.ShapeDtypeStruct((8, 20_000, 20_000), jnp.bfloat16)
    for use in ("fprop", "dgrad"):
        format = RECIPES["mxfp8"].w
        q = jax.eval_shape(
            functools.partial(
                quantize,
                format=format,
                block=format.weight_block(3, use),
            ),
            w,
        )
        assert q.data.shape == w.shape and math.prod(w.shape) > 2**31
        assert all(dim < 2**31 for leaf in jax.tree.leaves(q) for dim in leaf.shape)


@pytest.mark.parametrize(
    "weight_spec",
    mark_rest([P("expert", "fsdp", None), P("expert", None, "fsdp")], 1),
    ids=str,
)
def test_grouped_dense_end_to_end(weight_spec):
    """Transformer Engine's own scenario, 4 groups of 128 tokens, MXFP8, outside any shard_map: gradients lie like their
    primals. Theirs checks no gradient's value; 5e-2 is its bound of the output."""
    mesh = jax.make_mesh(
        (2, 2),
        ("expert", "fsdp"),
        devices=jax.devices()[:4],
        axis_types=(AxisType.Auto,) * 2,
    )
    axes = Axes(ep="expert")
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((512, 256), (4, 256, 256)))
    # Each rank of fsdp has half the rows of each of its two experts.
    sizes = np.full(8, 64, np.int32)

    def loss(x, w):
        return jnp.mean(ops.grouped_matmul(x, w, sizes, recipe="mxfp8", axes=axes) ** 2)

    def full(x, w):
        by = x.reshape(2, 2, 2, 64, 256)  # fsdp, expert rank, expert, row
        return jnp.mean(jnp.einsum("frgmk,rgkn->frgmn", by, w.reshape(2, 2, 256, 256)) ** 2)

    with jax.set_mesh(mesh):
        place = lambda v, s: jax.device_put(v, NamedSharding(mesh, s))  # noqa: E731
        dx, dw = jax.jit(jax.grad(loss, (0, 1)))(place(x, P(("fsdp", "expert"))), place(w, weight_spec))
    assert dw.sharding.is_equivalent_to(NamedSharding(mesh, weight_spec), 3)
    assert dx.sharding.is_equivalent_to(NamedSharding(mesh, P(("fsdp", "expert"))), 2)
    for got, want in zip((dx, dw), jax.grad(full, (0, 1))(x, w), strict=True):
        assert np.linalg.norm(got - want) <= 5e-2 * np.linalg.norm(want)


# The spec of every parameter.


def expected(ep, experts, model, tp, shared) -> dict:
    return dict(
        router=P(None, None),
        wi=Spec(experts, model, None, tp),
        wo=Spec(experts, tp, model),
        router_bias=P(None),
        logits_bias=P(None),
        bi=Spec(ep, None, tp),
        bo=Spec(ep, None),
        shared_wi=Spec(shared, None, tp),
        shared_wo=Spec(tp, shared),
        shared_gate=P(None),
        expert_scale=P(None),
        latent_down=Spec(shared, None),
        latent_up=Spec(shared, None),
    )


FSDP = ("data", "fsdp")
CASES = {
    # name: axes, sizes, (experts, what fsdp adds to experts, to H, tp, shared)
    "experts": (Axes(), dict(fsdp=2, ep=4), ("ep", ("ep", "fsdp"), (), (), ("fsdp", "ep"))),
    "model": (Axes(fsdp_dim="model"), dict(fsdp=2, ep=4), ("ep", "ep", "fsdp", (), ("fsdp", "ep"))),
    "auto falls to model": (Axes(), dict(fsdp=4, ep=4), ("ep", "ep", "fsdp", (), ("fsdp", "ep"))),
    "tp": (Axes(), dict(fsdp=2, ep=2, tp=2), ("ep", ("ep", "fsdp"), (), "tp", ("fsdp", "ep"))),
    "tp, model": (
        Axes(fsdp_dim="model"),
        dict(fsdp=2, ep=2, tp=2),
        ("ep", "ep", "fsdp", "tp", ("fsdp", "ep")),
    ),
    "dp shards no weight": (
        Axes(),
        dict(dp=2, fsdp=2, ep=2),
        ("ep", ("ep", "fsdp"), (), (), ("fsdp", "ep")),
    ),
    "dp alone": (Axes(), dict(dp=8), ((), (), (), (), ())),
    "size one": (Axes(), dict(dp=1, fsdp=1, ep=1, tp=1), ((), (), (), (), ())),
    "left out": (Axes(other="stage"), dict(stage=8), ((), (), (), (), ())),
    "no ep": (Axes(), dict(fsdp=8, ep=1), ((), "fsdp", (), (), "fsdp")),
    "no fsdp": (Axes(fsdp_dim="model"), dict(ep=8), ("ep", "ep", (), (), "ep")),
    "tuple": (
        Axes(fsdp=FSDP),
        dict(data=2, fsdp=2, ep=2),
        ("ep", ("ep", *FSDP), (), (), (*FSDP, "ep")),
    ),
    "tuple, model": (
        Axes(fsdp=FSDP, fsdp_dim="model"),
        dict(data=2, fsdp=2, ep=2),
        ("ep", "ep", FSDP, (), (*FSDP, "ep")),
    ),
    "tuple, one absent": (Axes(fsdp=FSDP), dict(data=4), ((), "data", (), (), "data")),
    "other names": (
        Axes(ep=("x", "y"), tp="z"),
        dict(z=2, y=2, x=2),
        (("x", "y"), ("x", "y"), (), "z", ("x", "y")),
    ),
    "shared not by ep": (Axes(), dict(fsdp=2, ep=8), ("ep", "ep", "fsdp", (), ("fsdp", "ep"))),
}


@pytest.mark.parametrize("name", CASES)
def test_param_specs(name):
    """Breaks if a weight's layout is not that of DESIGN.md section 3, on meshes with absent and size-1 axes too."""
    axes, sizes, want = CASES[name]
    got = dataclasses.asdict(param_specs(CONFIG, axes, mesh_of_sizes(**sizes)))
    wanted = {n: tuple(s) for n, s in expected(*want).items()}
    assert {n: tuple(s) for n, s in got.items()} == wanted


def test_shared_experts_go_over_fsdp_alone_where_ep_does_not_divide():
    """Breaks if a width that (fsdp, ep) does not divide leaves the shared expert whole on every device."""
    config = dataclasses.replace(CONFIG, d_model=6)
    got = param_specs(config, Axes(), mesh_of_sizes(fsdp=2, ep=4))
    assert got.shared_wi == P("fsdp", None, None) and got.shared_wo == P(None, "fsdp")


def test_only_what_init_makes():
    """Breaks if the tree of specs is not that of the parameters, so that `jax.jit` refuses it as a sharding."""
    config = MoEConfig(32, 48, 8, 2)
    specs = param_specs(config, mesh=mesh_of_sizes(ep=2))
    assert jax.tree.structure(specs) == jax.tree.structure(moax.init(jax.random.key(0), config))
    assert [n for n in NAMES if getattr(specs, n) is not None] == ["router", "wi", "wo"]


@pytest.mark.parametrize(
    "axes, sizes, message",
    [
        (
            Axes(),
            dict(ep=3),
            "params.wi: dim 0 of size 8 is not divisible by mesh axes ('ep',) of 3 devices",
        ),
        (
            Axes(fsdp_dim="experts"),
            dict(fsdp=4, ep=4),
            "dim 0 of size 8 is not divisible by mesh axes ('ep', 'fsdp') of 16",
        ),
        (
            Axes(fsdp_dim="model"),
            dict(fsdp=5),
            "params.wi: dim 1 of size 16 is not divisible by mesh axes ('fsdp',) of 5",
        ),
        (
            Axes(),
            dict(tp=5),
            "params.wi: dim 3 of size 48 is not divisible by mesh axes ('tp',) of 5 devices",
        ),
        (
            Axes(),
            dict(tp=24),
            "params.shared_wi: dim 2 of size 16 is not divisible by mesh axes ('tp',) of 24 devices",
        ),
    ],
)
def test_sizes_that_do_not_divide(axes, sizes, message):
    """Breaks if a weight that the mesh cannot hold is padded, or refused without parameter, dim and axes."""
    with pytest.raises(ValueError, match=re.escape(message)):
        param_specs(CONFIG, axes, mesh_of_sizes(**sizes))


def test_no_mesh():
    """Breaks if specs of no mesh are all None: weights would be replicated by a program that forgot `set_mesh`."""
    with pytest.raises(ValueError, match="param_specs: no mesh; pass mesh=, or call it under"):
        param_specs(CONFIG)


@pytest.mark.parametrize("way", ["custom_partitioning", "explicit"])
def test_the_mesh_in_force(way):
    """Breaks if `jax.set_mesh` and `mesh=` disagree."""
    mesh = make_mesh("2x4", way)
    with jax.set_mesh(mesh):
        here = param_specs(CONFIG), token_spec(Axes(), 3), dense_spec(Axes(), (32, 8))
    axes_by_name = (
        param_specs(CONFIG, mesh=mesh),
        token_spec(Axes(), 3, mesh),
        dense_spec(
            Axes(),
            (32, 8),
            mesh,
        ),
    )
    assert here == axes_by_name
    assert here[1:] == (P(("fsdp", "ep"), None, None), P(("fsdp", "ep"), None))


@pytest.mark.parametrize(
    "shape, sizes, want",
    [
        ((32, 48), dict(fsdp=2, ep=4), P(("fsdp", "ep"), None)),
        ((12, 16, 3), dict(fsdp=2, ep=4), P(None, ("fsdp", "ep"), None)),
        ((6, 10), dict(fsdp=2, ep=4), P("fsdp", None)),
        ((3, 10), dict(fsdp=2, ep=4), P(None, "fsdp")),
        ((3, 5), dict(fsdp=2, ep=4), P(None, None)),
        ((32, 48), dict(dp=2, tp=2), P(None, None)),
        ((32, 48), {}, P(None, None)),
        ((), dict(fsdp=2), P()),
    ],
)
def test_dense_spec(shape, sizes, want):
    """Breaks if a dense weight lies whole on every device of ep, or is cut where it does not divide."""
    assert tuple(dense_spec(Axes(), shape, mesh_of_sizes(**sizes))) == tuple(want)


# Shards inside the caller's own `shard_map`.


def shapes_of(specs, roles: ResolvedAxes, config=CONFIG):
    full = dataclasses.asdict(moax.params.param_shapes(config))
    return MoEParams(
        **{n: jax.ShapeDtypeStruct(local_shape(full[n], getattr(specs, n), roles), jnp.float32) for n in NAMES}
    )


@pytest.mark.parametrize("fsdp_dim", ["experts", "model"])
@pytest.mark.parametrize(
    "sizes", [dict(fsdp=2, ep=4), dict(fsdp=2, ep=2, tp=2), dict(dp=2, fsdp=4), dict(ep=8)], ids=str
)
def test_shards_are_found_by_shape(sizes, fsdp_dim):
    """Breaks if shards laid out by `param_specs` are gathered along another dim than the one they were cut along."""
    axes = Axes(fsdp_dim=fsdp_dim)
    specs = param_specs(CONFIG, axes, mesh_of_sizes(**sizes))
    roles = roles_on(**sizes)
    for hint in (axes, Axes()):  # the shapes decide, whatever the caller says of fsdp_dim
        specs_found = shard_specs(shapes_of(specs, roles), CONFIG, hint, roles)
        expected = {n: tuple(getattr(specs, n)) for n in NAMES}
        assert {n: tuple(getattr(specs_found, n)) for n in NAMES} == expected


def test_shards_without_fsdp():
    """Breaks if a caller who gathered over fsdp, or never sharded by it, gets the weights gathered again."""
    roles = roles_on(fsdp=2, ep=4)
    specs = param_specs(CONFIG, mesh=mesh_of_sizes(ep=4))
    specs_found = shard_specs(shapes_of(specs, roles), CONFIG, Axes(), roles)
    assert specs_found.wi == P("ep", None, None, None) and specs_found.wo == P("ep", None, None)
    none = dataclasses.replace(
        shapes_of(specs, roles),
        shared_wi=jax.ShapeDtypeStruct((32, 2, 16), jnp.float32),
    )
    assert shard_specs(none, CONFIG, Axes(), roles).shared_wi == P(None, None, None)


@pytest.mark.parametrize(
    "name, shape",
    [("wi", (8, 32, 2, 48)), ("wo", (2, 48, 16, 1)), ("bo", (8, 32)), ("wi", (1, 8, 2, 48))],
)
def test_no_shard_has_this_shape(name, shape):
    """Breaks if a weight whose experts are not split is taken for a shard, or the message lists none that is."""
    sizes = dict(fsdp=2, ep=4)
    roles = roles_on(**sizes)
    good = shapes_of(param_specs(CONFIG, mesh=mesh_of_sizes(**sizes)), roles)
    bad = dataclasses.replace(good, **{name: jax.ShapeDtypeStruct(shape, jnp.float32)})
    with pytest.raises(
        ValueError,
        match=re.escape(f"params.{name} has shape {shape} inside the shard_map; a shard has ("),
    ):
        shard_specs(bad, CONFIG, Axes(), roles)


# Arrays and meshes.


@pytest.mark.parametrize("way", ["custom_partitioning", "explicit"])
def test_constrain_on_every_mesh(way):
    """Breaks if a constraint is one of Auto axes alone, or needs a mesh."""
    x = jnp.arange(16.0).reshape(8, 2)
    assert constrain(x, P("fsdp")) is x
    mesh = make_mesh("2x4", way)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(2 * x, P("ep", "fsdp")))(x)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("ep", "fsdp")), 2)
    np.testing.assert_array_equal(y, 2 * x)


def test_mesh_in_force():
    """Breaks if an array's own mesh is not found where none is set, or counts for more than the one in force."""
    mesh = make_mesh("2x4", "explicit")
    other = make_mesh("1x8", "explicit")
    x = jax.device_put(jnp.zeros(8), NamedSharding(mesh, P("ep")))
    assert mesh_in_force(jnp.zeros(8)) is None
    assert mesh_in_force(jnp.zeros(8), x).shape == mesh.shape
    with jax.set_mesh(other):
        assert mesh_in_force(jnp.zeros(8)).shape == other.shape


@pytest.mark.parametrize("way", ["custom_partitioning", "explicit"])
def test_make_sharded(way):
    """Breaks if results are made whole and cut afterwards, or cannot be made by vmap (a stack of layers)."""
    mesh = make_mesh("2x4", way)
    make = lambda n: n + jnp.arange(8.0)  # noqa: E731
    with jax.set_mesh(mesh):
        y = make_sharded(make, P("ep"))(jnp.float32(1))
        stack = jax.vmap(make_sharded(make, P("ep")))(jnp.arange(3.0))
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("ep")), 1)
    assert stack.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "ep")), 2)
    np.testing.assert_array_equal(stack, np.arange(3.0)[:, None] + np.arange(8.0)[None])


def test_settle():
    """Breaks if parameters that were made before the mesh was set do not run on Explicit axes, or if a layout of the
    user's is moved."""
    mesh = make_mesh("2x4", "explicit")
    params = moax.init(jax.random.key(0), CONFIG)
    with jax.set_mesh(mesh):
        declared = param_specs(CONFIG)
        mine = P("ep", "fsdp", None, None)
        params = dataclasses.replace(
            params,
            wi=jax.device_put(params.wi, NamedSharding(mesh, mine)),
        )
        got = jax.tree.map(lambda p: jax.typeof(p).sharding.spec, reshard_params(params, declared))
    assert got == dataclasses.replace(declared, wi=mine)


def test_named():
    """Breaks if `jax.jit(out_shardings=named(...))` has another tree than the specs."""
    mesh = make_mesh("2x4")
    specs = param_specs(MoEConfig(32, 48, 8, 2), mesh=mesh)
    shardings = named(mesh, specs)
    assert shardings.wi == NamedSharding(mesh, specs.wi) and shardings.bi is None


entries = st.lists(
    st.sampled_from(["dp", "fsdp", "ep", "tp", "elsewhere"]),
    unique=True,
    max_size=5,
)


@given(names=entries, cuts=st.lists(st.integers(0, 5), min_size=2, max_size=2))
def test_any_layout_is_gathered_to_what_is_kept_or_refused(names, cuts):
    """Breaks if some layout is accepted whose gather does not leave exactly the kept axes, in order."""
    first_cut, second = sorted(cuts)
    weight_spec = P(*(tuple(part) or None for part in (names[:first_cut], names[first_cut:second], names[second:])))
    split_axes = (("ep",), (), ("tp",))
    try:
        own, _, gather = layout("w", weight_spec, split_axes, ROLES)
    except ValueError as error:
        assert re.search(r": dim \d is (not )?sharded", str(error))
        return
    for entry, gathered, need in zip(pad(own, 3), gather, split_axes, strict=True):
        assert entry == need + gathered and set(gathered) <= {"fsdp"}
