"""Where a block finds its mesh, which meshes it refuses, and that a `jax.vmap` over a mesh axis keeps the axis split.

Covers: the mesh of `jax.set_mesh`, of `with mesh:`, of arrays and of shapes; none; mixed axis types; axes of no role;
batches over a mesh axis; a mesh of devices that this machine does not have.
"""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moax
from moax import Axes, inspect, ops
from moax.kernels.device import find_device, why_not_hopper
from moax.mesh.specs import named
from support import make_mesh, make_params, mark_rest, put, random
from support.block import MESH, check_gradients
from support.oracle.block import block as block_by_numpy

CONFIG = moax.MoEConfig(32, 64, 8, 2, router=moax.RouterConfig(aux_loss=0.1))
PARAMS = make_params(CONFIG)
X = random(1, 64, 32)
# The warning is that of `with mesh:`.
pytestmark = pytest.mark.filterwarnings("ignore:.*with mesh.*:DeprecationWarning")


def loss(x, params, axes=Axes(), engine="auto"):
    y, stats = moax.moe(x, params, CONFIG, recipe="fp8_block", axes=axes, engine=engine)
    return jnp.sum(y.astype(jnp.float32) ** 2) + stats.aux_loss


GRADIENTS = jax.grad(loss, (0, 1))


def shapes_of(tree, shardings=None):
    """The shapes of the arrays of a tree, with these shardings if there are any."""
    if shardings is None:
        return jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), tree)
    return jax.tree.map(
        lambda v, s: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=s),
        tree,
        shardings,
    )


@pytest.mark.parametrize("origin", ["jax.set_mesh", *mark_rest(["with mesh", "shapes"], 0)])
def test_weights_cross_as_bytes_however_the_mesh_is_found(origin):
    """Breaks if a block under `with mesh:`, or whose operands alone name the mesh, runs as on no mesh: every device
    would then gather all experts in float32 and keep the whole gradient."""
    mesh = make_mesh("2x4")
    sharding = named(mesh, (P(("fsdp", "ep")), moax.param_specs(CONFIG, mesh=mesh)))
    force = {"jax.set_mesh": jax.set_mesh, "with mesh": lambda mesh: mesh}.get(
        origin,
        contextlib.nullcontext,
    )
    with force(mesh):
        if origin == "shapes":
            compiled = jax.jit(GRADIENTS).lower(*shapes_of((X, PARAMS), sharding)).compile()
        else:
            step = jax.jit(GRADIENTS, in_shardings=sharding, out_shardings=sharding)
            compiled = step.lower(*shapes_of((X, PARAMS))).compile()
    weights = shapes_of((PARAMS.wi, PARAMS.wo), (sharding[1].wi, sharding[1].wo))
    inspect.assert_no_wide_weight_gather(compiled, weights=weights)
    text = compiled.as_text()
    assert re.search(r"u8\[[\d,]*\]\S* all-gather", text), "no bytes are gathered"
    assert "reduce-scatter" in text, "the gradient is whole on each device"


def test_no_mesh_is_refused():
    """Breaks if `jax.jit(in_shardings=...)` on shapes, with no mesh in force, gathers all weights in full precision in
    silence; or if the same trace for one device is refused."""
    mesh = make_mesh("2x4")
    sharding = named(mesh, (P(("fsdp", "ep")), moax.param_specs(CONFIG, mesh=mesh)))
    step = jax.jit(GRADIENTS, in_shardings=sharding, out_shardings=sharding)
    with pytest.raises(ValueError, match=r"this program is for 8 devices.*jax\.set_mesh"):
        step.lower(*shapes_of((X, PARAMS)))
    product = jax.jit(ops.grouped_matmul, in_shardings=(sharding[0], sharding[1].wi, None))
    with pytest.raises(ValueError, match="gather_weight: this program is for 8 devices"):
        product.lower(*shapes_of((X, PARAMS.wi, np.full(8, 8, np.int32))))
    jax.jit(GRADIENTS).lower(*shapes_of((X, PARAMS)))


def test_the_mesh_of_the_weights_alone():
    """Breaks if y is gathered where the types of the weights alone name a mesh, of Explicit axes."""
    mesh = make_mesh("2x4", "explicit")
    w = put(mesh, P("fsdp"), random(4, 32, 16))
    y = jax.jit(ops.dense)(jnp.asarray(random(5, 16, 32)), w)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P(("fsdp", "ep"))), 2)


@pytest.mark.more
def test_no_mesh_allows_what_one_device_can_do():
    """Breaks if the guard of programs without a mesh keeps jax from differentiating twice, batching or exporting."""
    logits = random(2, 16, 8)

    def balance(v):
        return ops.route(v, moax.RouterConfig(aux_loss=1.0, z_loss=1.0), 2).z_loss

    second = jax.jit(jax.hessian(balance))(logits)
    assert second.shape == (16, 8, 16, 8) and np.isfinite(second).all() and np.any(second)
    assert jax.vmap(balance)(jnp.stack([logits, logits])).shape == (2,)


def test_init_under_a_mesh_context():
    """Breaks if `init` under `with mesh:` makes every parameter on one device."""
    mesh = make_mesh("2x4")
    with mesh:
        initialized = moax.init(jax.random.key(0), CONFIG)
    want = named(mesh, moax.param_specs(CONFIG, mesh=mesh))
    jax.tree.map(
        lambda v, s: v.sharding.is_equivalent_to(s, v.ndim) or pytest.fail(f"{v.sharding}"),
        initialized,
        want,
    )


CALLS = {
    "init": lambda axes: jax.eval_shape(lambda: moax.init(jax.random.key(0), CONFIG, axes=axes)),
    "param_specs": lambda axes: moax.param_specs(CONFIG, axes),
    "token_spec": lambda axes: moax.params.token_spec(axes),
    "moe": lambda axes: jax.eval_shape(lambda: moax.moe(X, PARAMS, CONFIG, axes=axes)),
    "route": lambda axes: jax.eval_shape(lambda: ops.route(random(2, 16, 8), moax.RouterConfig(), 2, axes=axes)),
}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_an_axis_without_a_role_is_refused(name, kind):
    """Breaks if a mesh with names of the user's own replicates weights and gathers them in silence."""
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(kind,) * 2)):
        with pytest.raises(
            ValueError,
            match=r"mesh axis 'data' of 4 devices has no role .* or in other=\('data',\)",
        ):
            CALLS[name](Axes())
        for axes in (Axes(dp="data"), Axes(other="data"), Axes(fsdp=("data", "fsdp"))):
            CALLS[name](axes)


@pytest.mark.parametrize("way", ["custom_partitioning", "shard_map", "explicit"])
@pytest.mark.parametrize("names", [("fsdp", "ep"), ("data", "expert")], ids=str)
def test_arrays_of_another_mesh_are_refused(names, way):
    """Breaks if an array of another mesh than that in force makes XLA end the process, or is an error deep in JAX."""
    engine = way if "_" in way else "auto"
    axis_type = AxisType.Explicit if way == "explicit" else AxisType.Auto
    theirs = jax.make_mesh((4, 2), names, axis_types=(axis_type,) * 2)
    x = jax.device_put(X, NamedSharding(theirs, P(names[0])))
    with jax.set_mesh(make_mesh("2x4", way)):
        with pytest.raises(ValueError, match=r"lies on a mesh of .*: 4.*, and the mesh in force has .*: 2.*device_put"):
            moax.moe(x, PARAMS, CONFIG, engine=engine)


def test_mixed_axis_types_are_refused():
    """Breaks if a mesh of Auto and Explicit axes ends in an error of JAX's that names nothing of the caller's."""
    kinds = (AxisType.Auto, AxisType.Explicit)
    with jax.set_mesh(jax.make_mesh((4, 2), ("fsdp", "ep"), axis_types=kinds)):
        for call in CALLS.values():
            with pytest.raises(
                ValueError,
                match=r"mesh axes \['fsdp'\] are Auto and \['ep'\] are Explicit",
            ):
                call(Axes())


STAGES = Axes(other="stage")


@pytest.mark.more
@pytest.mark.parametrize("engine", ["auto", "shard_map"])
def test_vmap_over_a_mesh_axis(engine):
    """Breaks if a batch of blocks that a mesh axis splits, as the stages of a pipeline are, is gathered over that axis:
    each device would then hold the weights of all stages, and do the work of all."""
    mesh = jax.make_mesh((2, 2, 2), ("stage", "fsdp", "ep"), axis_types=(AxisType.Auto,) * 3)
    specs = jax.tree.map(lambda s: P("stage", *s), moax.param_specs(CONFIG, STAGES, mesh=mesh))
    sharding = named(mesh, (P("stage", ("fsdp", "ep")), specs))
    params = jax.tree.map(lambda *v: jnp.stack(v), PARAMS, make_params(CONFIG, 1))
    x = np.stack([X, random(3, 64, 32)])

    def step(x, params):
        return jax.vmap(lambda x, p: jax.grad(loss, (0, 1))(x, p, STAGES, engine), spmd_axis_name="stage")(x, params)

    with jax.set_mesh(mesh):
        run = jax.jit(step, in_shardings=sharding).lower(*shapes_of((x, params))).compile()
        over_stage = [c for c in inspect.collectives(run) if "stage" in c.axes]
        assert not over_stage, f"over stage: {over_stage}"
        results = jax.tree.leaves(run.output_shardings)
        assert all(s.spec[0] == "stage" for s in results), f"gradients lie over {[s.spec for s in results]}"
        got = jax.device_get(run(*put(mesh, (P("stage", ("fsdp", "ep")), specs), (x, params))))
    params = jax.device_get(params)
    one = jax.make_mesh(
        (2, 2),
        ("fsdp", "ep"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )
    with jax.set_mesh(one):  # the devices of one stage
        for i in range(2):
            own_params = jax.tree.map(lambda v, i=i: v[i], params)
            want = jax.jit(GRADIENTS)(x[i], own_params)
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert np.linalg.norm(a[i] - b) <= 1e-6 * np.linalg.norm(b)


@pytest.mark.more
@pytest.mark.parametrize("over", [None, "fsdp"])
def test_a_batch_that_no_free_axis_splits(over):
    """Breaks if a batch whose dim lies over an axis that the block itself uses is taken apart by that axis."""
    mesh = make_mesh("2x4")
    params = jax.tree.map(lambda *v: jnp.stack(v), PARAMS, make_params(CONFIG, 1))
    x = jax.device_put(jnp.stack([X, X]), NamedSharding(mesh, P(over)))

    def step(x, p):
        return jax.grad(lambda x, p: jnp.sum(moax.moe(x, p, CONFIG)[0] ** 2), (0, 1))(x, p)

    with jax.set_mesh(mesh):
        got = jax.jit(jax.vmap(step))(x, params)
    for i in range(2):
        own_params = jax.tree.map(lambda v, i=i: np.asarray(v)[i], params)
        dy = 2 * block_by_numpy(X, own_params, CONFIG, np.zeros(X.shape)).y
        check_gradients(
            *jax.tree.map(lambda v, i=i: v[i], got),
            block_by_numpy(X, own_params, CONFIG, dy),
            MESH,
        )


def test_the_mesh_in_force_says_what_jit_compiles_for():
    """Breaks if a program that a CPU compiles for GPUs has the operations that only a CPU needs."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("ep",), abstract_device=device)):
        assert find_device().platform == "gpu" and why_not_hopper() is None
    assert find_device().platform == jax.default_backend()
