"""`find_mesh_view` for each kind of mesh, and what `Op` makes of a local function, on a toy op.

Covers: engines x axis types x meshes; layouts of operands; vmap; gathers, scatters and maxima over the mesh.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moax
from moax import Axes, Unsupported
from moax.block.moe import moe
from moax.inspect import collectives
from moax.kernels.xla import make_weight_operand, quantize_shard
from moax.kernels.xla.operands import quantize
from moax.mesh.axes import ResolvedAxes
from moax.mesh.collectives import gather_qshard, gather_weight, reduce_max, scatter_gradient, vary_like
from moax.mesh.op import Op, OpSharding
from moax.mesh.specs import Spec, find_mesh_view
from moax.recipe import Format, Recipe
from support import ENGINES, MESHES, make_mesh, make_params, mark_rest, put, random, rel_norm
from support.block import MESH, check, check_gradients, cotangent, loss_of
from support.oracle.block import block as block_by_numpy

AUTO = AxisType.Auto
EXPLICIT = AxisType.Explicit
DEVICES = 8


def mesh_with(kinds: dict, **sizes: int):
    """A mesh of these sizes, its axes Auto but for those in `kinds`."""
    types = tuple(kinds.get(n, AUTO) for n in sizes)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)


# The toy: y = factor * x, and the sum of x over all rows. x [T, H], rows over (dp, fsdp, ep).


@dataclasses.dataclass(frozen=True)
class Toy:
    factor: float
    axes: ResolvedAxes


def double_local(static, x, w):
    y = static.factor * x if w is None else static.factor * x * w[None]
    return y, x.sum(0), x.reshape(-1)


_double = Op("double", double_local, "t h, @ -> t h, h, @t")


def double(x, w=None, *, factor=2.0, axes=Axes(), engine="auto"):
    view = find_mesh_view(axes, engine, x)
    y, total, flat = _double(view, Toy(factor, view.axes), x, w)
    return y, view.psum(total, view.axes.tokens), flat


def rows(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float32))


def check_double(got, x, w=1.0, factor=2.0):
    x = np.asarray(x)
    for value, want in zip(
        got,
        (factor * x * w, x.sum(-2), x.reshape(*x.shape[:-2], -1)),
        strict=True,
    ):
        np.testing.assert_array_equal(value, want)


# Views: the table of view.py, row by row.


def view_of(mesh, engine="auto", axes=Axes(), manual=None):
    """The view in a trace under `mesh`, inside a `shard_map` over the axes `manual` if there are any."""
    seen = []

    def look(x):
        seen.append(find_mesh_view(axes, engine, x))
        return x

    with jax.set_mesh(mesh):
        if manual is not None:
            look = jax.shard_map(
                look,
                in_specs=P(),
                out_specs=P(),
                axis_names=set(manual),
                check_vma=False,
            )
        jax.eval_shape(look, jnp.zeros(8))
    return seen[0]


SIZES = dict(fsdp=2, ep=4)
# A GPU machine may have fewer devices.
ROLES = Axes().resolve(AbstractMesh(tuple(SIZES.values()), tuple(SIZES)))


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_no_mesh_and_axes_of_one_device(engine):
    """Breaks if one device pays for a mesh: partitioning, or a collective over one rank."""
    view = find_mesh_view(Axes(), engine, jnp.zeros(8))
    assert view.engine == "local" and view.mesh is None
    for mesh in (
        mesh_with({}, fsdp=1, ep=1),
        mesh_with({}, stage=DEVICES),
        mesh_with({}, fsdp=1, stage=4),
    ):
        view = view_of(mesh, engine, axes=Axes(other="stage"))
        assert view.engine == "local"
        assert not view.manual
        assert view.axes == ResolvedAxes()
        assert view.mesh is not None


def test_auto_axes():
    """Breaks if Auto axes do not take `custom_partitioning`, or `shard_map` where asked for by name."""
    for engine, want in (("auto", ENGINES[0]), *((e, e) for e in ENGINES)):
        view = view_of(mesh_with({}, **SIZES), engine)
        assert (view.engine, view.manual, view.explicit, view.axes) == (want, False, False, ROLES)
    view = view_of(mesh_with({}, stage=2, ep=4), "shard_map", axes=Axes(other="stage"))
    assert view.mesh.manual_axes == () and set(view.mesh.axis_names) == {"stage", "ep"}


@pytest.mark.parametrize("sizes", [SIZES, dict(fsdp=1, ep=1), dict(stage=4)], ids=str)
def test_explicit_axes(sizes):
    """Breaks if Explicit axes, where `custom_partitioning` fails, take it; or if results lose their types on axes of
    one device."""
    mesh = mesh_with(dict.fromkeys(sizes, EXPLICIT), **sizes)
    for engine in ("auto", "shard_map"):
        view = view_of(mesh, engine, axes=Axes(other="stage"))
        assert (view.engine, view.manual, view.explicit) == ("shard_map", False, True)
    with pytest.raises(
        Unsupported,
        match="engine='custom_partitioning' cannot run on this mesh: axes are Explicit; use",
    ):
        view_of(mesh, "custom_partitioning", axes=Axes(other="stage"))


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_manual_axes(kind, engine):
    """Breaks if an op inside the user's own `shard_map` is partitioned once more, or does not know it is inside one."""
    view = view_of(mesh_with(dict.fromkeys(SIZES, kind), **SIZES), engine, manual=SIZES)
    assert (view.engine, view.manual, view.explicit, view.axes) == ("local", True, False, ROLES)


def test_other_axes_manual():
    """Breaks if a `shard_map` over an axis of no role (pipeline stages) keeps ops from being partitioned over theirs,
    or lets them take `custom_partitioning`, which aborts the process there."""
    mesh = mesh_with({}, stage=2, **{**SIZES, "ep": 2})
    view = view_of(mesh, manual=["stage"])
    assert (view.engine, view.manual, view.mesh.manual_axes) == ("shard_map", False, ("stage",))
    with pytest.raises(
        Unsupported,
        match=re.escape("axes ['stage'] are Manual; use 'auto' or 'shard_map'"),
    ):
        view_of(mesh, "custom_partitioning", manual=["stage"])


def test_some_of_the_axes_manual():
    """Breaks if an op is run over half of its axes, which neither a local function nor a rule of the rest is."""
    message = "mesh axes ['fsdp'] are Manual (inside a shard_map) but ['ep'] are not; take all of them, or none"
    with pytest.raises(ValueError, match=re.escape(message)):
        view_of(mesh_with({}, **SIZES), manual=["fsdp"])


@pytest.mark.parametrize(
    ("recipe", "engine"),
    mark_rest(
        [("fp8_block", "auto"), (None, "auto"), (None, "shard_map"), ("fp8_block", "shard_map")],
        1,
    ),
)
def test_inside_a_shard_map_over_another_axis(recipe, engine):
    """Breaks if the result of one stage is taken for that of all, or a weight of all has the gradient of one stage."""
    mesh = jax.make_mesh((2, 2, 2), ("stage", "fsdp", "ep"), (AxisType.Auto,) * 3)
    config = moax.MoEConfig(32, 64, 4, 2, use_bias=True)
    params = moax.init(jax.random.key(0), config)
    x = jnp.asarray(random(1, 2, 16, 32))
    settings = dict(recipe=recipe, engine=engine)

    def stage(params, x):
        return moax.moe(x[0], params, config, **settings)[0][None]

    def mapped(out):
        return jax.shard_map(
            stage,
            mesh=mesh,
            in_specs=(P(), P("stage")),
            out_specs=out,
            axis_names={"stage"},
        )

    def loss(params, x):
        return jnp.sum(mapped(P("stage"))(params, x) ** 2)

    def want(params, x):
        return sum(jnp.sum(moax.moe(part, params, config, recipe=recipe)[0] ** 2) for part in x)

    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="require replication"):
            jax.eval_shape(mapped(P()), params, x)
        got = jax.device_get(jax.jit(jax.grad(loss, (0, 1)))(params, x))
    limit = 5e-6 if recipe is None else 0.1  # a stage quantizes rows of its own
    jax.tree.map(
        lambda g, w: rel_norm(g, w) < limit or pytest.fail(f"{rel_norm(g, w)}"),
        got,
        jax.grad(want, (0, 1))(params, x),
    )


def test_axes_of_one_device_do_not_count_as_left_out():
    """Breaks if a `shard_map` must name axes along which there is nothing to split."""
    view = view_of(mesh_with({}, fsdp=4, ep=1), manual=["fsdp"])
    assert view.engine == "local" and view.manual


def test_the_mesh_in_an_arrays_type():
    """Breaks if sharded arrays of Explicit axes are taken for one device's because nobody called `set_mesh`."""
    mesh = make_mesh("2x4", "explicit")
    x = jax.device_put(rows(16, 4), NamedSharding(mesh, P(("fsdp", "ep"))))
    assert find_mesh_view(Axes(), "auto", x).engine == "shard_map"
    check_double(jax.jit(double)(x), x)


@pytest.mark.parametrize("engine", ["shardmap", None, "local"])
def test_unknown_engines(engine):
    """Breaks if a misspelt engine falls back to another in silence, with or without a mesh."""
    message = f"engine={engine!r} must be one of 'auto', 'custom_partitioning', 'shard_map'"
    with pytest.raises(ValueError, match=re.escape(message)):
        find_mesh_view(Axes(), engine, jnp.zeros(8))
    with pytest.raises(ValueError, match=re.escape(message)):
        view_of(mesh_with({}, **SIZES), engine)


# The op on each of them.

WAYS = (*ENGINES, "explicit")


@pytest.mark.parametrize(
    ("way", "mesh"),
    mark_rest(
        [
            ("custom_partitioning", "2x4"),
            ("shard_map", "tp2x2x2"),
            ("explicit", "dp2x2x2"),
            ("explicit", "8x1"),
            *itertools.product(WAYS, ("2x4", "8x1")),
        ],
        4,
    ),
)
def test_a_local_function_on_a_mesh(way, mesh):
    """Breaks if results are not the global ones, wherever the operand lies or nowhere yet, or a sum leaves an
    axis out or doubles one."""
    x = rows(16, 8)
    w = rows(8, seed=1)
    on = make_mesh(mesh, way)
    axis = next(iter(on.shape))
    with jax.set_mesh(on):
        engine = way if way in ENGINES else "auto"
        run = jax.jit(
            lambda x, w: (double(x, engine=engine), double(x, w, factor=3.0, engine=engine)),
        )
        for layout in (None, P(), P(axis), P(None, axis)):
            plain, scaled = run(
                x if layout is None else jax.device_put(x, NamedSharding(on, layout)),
                w,
            )
            check_double(plain, x)
            check_double(scaled, x, np.asarray(w), 3.0)


@pytest.mark.parametrize("way", ("shard_map", "explicit"))
def test_without_jit(way):
    """Breaks if an op that `jax.jit` would make one program calls itself where `jax.disable_jit` turns it off."""
    x = rows(16, 8)
    with jax.set_mesh(make_mesh("2x4", way)), jax.disable_jit():
        check_double(double(x, engine=way if way in ENGINES else "auto"), x)


def test_alone_and_inside_a_shard_map():
    """Breaks if a local function is not what one device does: whole without a mesh, its shard inside a `shard_map`."""
    x = rows(16, 4)
    check_double(jax.jit(double)(x), x)
    mesh = make_mesh("2x4")
    tokens = P(("fsdp", "ep"))
    for check_vma in (False, True):
        specs = dict(in_specs=tokens, out_specs=(tokens, P(), tokens), check_vma=check_vma)
        check_double(jax.jit(jax.shard_map(double, mesh=mesh, **specs))(x), x)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_inside_a_shard_map_over_other_axes(kind):
    """Breaks if an op cannot be used in a pipeline stage: its axes are free there, another one is Manual."""
    mesh = mesh_with({"fsdp": kind, "ep": kind}, stage=2, fsdp=2, ep=2)
    x = rows(2, 8, 4)

    def stage(x):
        y, total, flat = double(x[0])
        return y[None], total[None], flat[None]

    with jax.set_mesh(mesh):
        run = jax.shard_map(
            stage,
            in_specs=P("stage"),
            out_specs=P("stage"),
            axis_names={"stage"},
            check_vma=False,
        )
        check_double(jax.jit(run)(x), x)


@pytest.mark.parametrize("engine", ENGINES)
def test_shardings_pass_through(engine):
    """Breaks if an op costs its caller a constraint: under jit alone its results lie like its operand, those with dims
    of their own as the contract says, and nothing is moved."""
    mesh = make_mesh("2x4")
    tokens = NamedSharding(mesh, P(("fsdp", "ep")))
    x = jax.device_put(rows(16, 4), tokens)

    def fn(x):
        y, _, flat = double(x + 1.0, engine=engine)
        y, _, _ = double(3.0 * y, engine=engine)
        return y - 1.0, flat

    with jax.set_mesh(mesh):
        y, flat = jax.jit(fn)(x)
        assert y.sharding.is_equivalent_to(tokens, 2) and flat.sharding.is_equivalent_to(tokens, 1)
        assert collectives(fn, x) == []


def test_shardings_pass_backwards():
    """Breaks if where a result is wanted does not reach the operand's producer, which would compute the whole."""
    mesh = make_mesh("2x4")

    def fn(key):
        return double(jax.random.normal(key, (64, 32)))[0]

    with jax.set_mesh(mesh):
        compiled = jax.jit(fn, out_shardings=P(("fsdp", "ep"))).lower(jax.random.key(0)).compile()
    assert "f32[8,32]" in compiled.as_text() and "[64,32]" not in compiled.as_text()


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_do_not_divide(way):
    """Breaks if a shard is padded, or the message does not name op, operand, dim and axes."""
    message = "double: operand 0: dim 0 of size 12 is not divisible by mesh axes ('fsdp', 'ep') of 8 devices"
    with jax.set_mesh(make_mesh("2x4", way)):
        with pytest.raises(ValueError, match=re.escape(message)):
            jax.jit(functools.partial(double, engine=way if way in ENGINES else "auto"))(
                rows(
                    12,
                    4,
                )
            )


# An op that follows its weight's layout, as the products do, and refuses one layout.


def follow_contract(static, operands, operand_specs):
    own_spec = Spec(None, None) if operand_specs[0] is None else operand_specs[0]
    if len(own_spec) > 1 and own_spec[1] is not None:
        raise ValueError(f"w: dim 1 is sharded over {own_spec[1]}")
    names = own_spec[0] if len(own_spec) and own_spec[0] is not None else ()
    return OpSharding(
        (own_spec,),
        (Spec(names), Spec(None)),
        ((), names if isinstance(names, tuple) else (names,)),
        names,
    )


def follow_local(static, layout, w):
    return jnp.full(w.shape[:1], len(layout), jnp.float32), w.sum(0)


_follow = Op("follow", follow_local, "a b -> a, b", sharding=follow_contract)


@pytest.mark.parametrize("way", ["custom_partitioning", "explicit"])
@pytest.mark.parametrize("own_spec", [P(), P(("ep",)), P(("fsdp", "ep")), P(("ep", "fsdp"))], ids=str)
def test_the_layout_that_an_operand_has(way, own_spec):
    """Breaks if an operand's own layout is not what the contract is asked about, or the local function is not told."""
    mesh = make_mesh("2x4", way)
    w = rows(16, 4)
    with jax.set_mesh(mesh):
        layout, total = jax.jit(lambda w: _follow(find_mesh_view(Axes(), "auto", w), 0, w))(
            jax.device_put(w, NamedSharding(mesh, own_spec))
        )
    names = own_spec[0] if len(own_spec) else ()
    np.testing.assert_array_equal(layout, np.full(16, len(names)))
    np.testing.assert_array_equal(total, w.sum(0))


@pytest.mark.parametrize("way", ["custom_partitioning", "explicit"])
def test_a_layout_that_the_contract_refuses(way):
    """Breaks if the type a user wrote is overruled, or a layout that propagation chose is an error."""
    mesh = make_mesh("2x4", way)
    w = rows(16, 4)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda w: _follow(find_mesh_view(Axes(), "auto", w), 0, w)[1])
        w_at = jax.device_put(w, NamedSharding(mesh, P(None, "ep")))
        if way == "explicit":
            with pytest.raises(ValueError, match="w: dim 1 is sharded over ep"):
                run(w_at)
        else:
            np.testing.assert_array_equal(run(w_at), w.sum(0))


# vmap.


@pytest.mark.parametrize("way", ["none", *WAYS])
def test_vmap(way):
    """Breaks if a batch is not each of its elements: all operands batched or one alone, twice over."""
    engine = way if way in ENGINES else "auto"
    fn = functools.partial(double, engine=engine)
    x = rows(2, 3, 16, 4)
    w = rows(3, 4, seed=1)
    with jax.set_mesh(make_mesh("2x4", way) if way != "none" else mesh_with({}, fsdp=1)):
        check_double(jax.jit(jax.vmap(fn))(x[0]), x[0])
        check_double(jax.jit(jax.vmap(jax.vmap(fn)))(x), x)
        check_double(jax.jit(jax.vmap(fn, in_axes=(0, None)))(x[0], w[0]), x[0], np.asarray(w[0]))
        check_double(jax.jit(jax.vmap(fn))(x[0], w), x[0], np.asarray(w)[:, None])
        check_double(
            jax.jit(jax.vmap(jax.vmap(fn), in_axes=(0, None)))(x, w),
            x,
            np.asarray(w)[:, None],
        )
        y, total, _ = jax.jit(jax.vmap(fn, in_axes=(None, 0)))(x[0, 0], w)
        np.testing.assert_array_equal(y, 2 * x[0, 0][None] * w[:, None])
        np.testing.assert_array_equal(total, np.broadcast_to(x[0, 0].sum(0), (3, 4)))


CONFIG = moax.MoEConfig(16, 24, 8, 2, use_bias=True, router=moax.RouterConfig(aux_loss=0.1))


@pytest.mark.parametrize("way", mark_rest(["explicit", "custom_partitioning", "shard_map"], 1))
def test_arguments_that_lie_nowhere_yet(way):
    """Breaks if the block needs its arguments placed: those made before the mesh was set are one device's."""
    x = jnp.asarray(random(1, 32, 16))
    params = make_params(CONFIG)
    engine = way if way in ENGINES else "auto"
    with jax.set_mesh(make_mesh("2x4", way)):
        got = jax.jit(jax.grad(lambda x, p: jnp.sum(moe(x, p, CONFIG, engine=engine)[0] ** 2), (0, 1)))(x, params)
    dy = 2 * block_by_numpy(x, params, CONFIG, np.zeros(x.shape)).y
    check_gradients(*got, block_by_numpy(x, params, CONFIG, dy), MESH)


@pytest.mark.parametrize("way", mark_rest(["custom_partitioning", "none", "shard_map", "explicit"], 1))
def test_vmap_of_the_block(way):
    """Breaks if a batch of blocks, each with its own tokens and parameters, is not one after the other, forward or
    backward: a rule that batched a sort, an exchange or a gather wrongly would."""
    params = jax.tree.map(lambda *v: jnp.stack(v), make_params(CONFIG), make_params(CONFIG, 1))
    x = jnp.asarray(random(1, 2, 32, 16))
    engine = way if way in ENGINES else "auto"

    def loss(x, params):
        y, stats = moe(x, params, CONFIG, engine=engine)
        return sum(loss_of(y, stats)), (y, stats)

    mesh = mesh_with({}, fsdp=1) if way == "none" else make_mesh("2x4", way)
    with jax.set_mesh(mesh):
        if way != "none":
            stacked = jax.tree.map(lambda s: P(None, *s), moax.param_specs(CONFIG))
            params = put(mesh, stacked, params)
        grads, outputs = jax.jit(jax.vmap(jax.grad(loss, (0, 1), has_aux=True)))(x, params)
    for i in range(2):
        got, own, one = (jax.tree.map(lambda v, i=i: np.asarray(v)[i], tree) for tree in (grads, params, outputs))
        want = block_by_numpy(x[i], own, CONFIG, cotangent((32, 16)), d_losses=(1, 1))
        check((one, got), want, MESH)


# Collectives.


def on_2x4(fn, *args, in_specs, out_specs):
    mesh = make_mesh("2x4")
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))(*args)


@pytest.mark.parametrize(
    "gather",
    [
        (("fsdp",), ()),
        ((), ("ep",)),
        (("fsdp", "ep"), ()),
        (("ep", "fsdp"), ()),
        (("ep",), ("fsdp",)),
    ],
)
def test_gather_and_scatter_are_transposed(gather):
    """Breaks if shards are gathered in another order than the mesh has cut them, or devices swap gradients."""
    w = rows(8, 16)
    layout = P(*(names or None for names in gather))
    whole = on_2x4(
        lambda w: gather_weight(w, gather)[None],
        w,
        in_specs=layout,
        out_specs=P(("fsdp", "ep")),
    )
    np.testing.assert_array_equal(whole, np.broadcast_to(w, (DEVICES, 8, 16)))
    # Each device's gradient of the whole weight, its own number times w: the sum over the gathered axes, in shards.
    others = tuple(n for n in ("fsdp", "ep") if n not in sum(gather, ()))

    def grad(w):
        mine = (1.0 + lax.axis_index(("fsdp", "ep")).astype(jnp.float32)) * w
        shard = scatter_gradient(mine, gather)
        return lax.psum(shard, others) if others else shard

    got = on_2x4(grad, w, in_specs=P(), out_specs=layout)
    np.testing.assert_array_equal(got, sum(range(1, DEVICES + 1)) * w)


def test_a_block_that_shards_share_has_one_scale():
    """Breaks if shards that end inside a block scale it by maxima of their own, or if its bytes widen on the wire: 4
    shards of 6 rows lie over blocks of 8 rows, and each is quantized as the whole matrix is."""
    w = random(0, 2, 24, 5)
    recipe = Recipe(Format(block=8), Format(block=8, tile=2), Format(block=8))

    def fn(w):
        gather = (), ("ep",), ()
        shard = quantize_shard(w, recipe, "fprop", gather)
        whole = gather_qshard(shard, gather, ((), (), ()), scales_first=False)
        q = make_weight_operand(whole, recipe, "fprop")
        return q.data, q.scale

    mesh = make_mesh("2x4")
    run = jax.shard_map(fn, mesh=mesh, in_specs=P(None, "ep"), out_specs=P(), check_vma=False)
    data, scale = jax.jit(run)(w)
    whole = quantize(jnp.asarray(w), recipe.w, (1, 8, 2))
    np.testing.assert_array_equal(scale, whole.scale)
    np.testing.assert_array_equal(data, whole.data)
    with jax.set_mesh(mesh):
        traffic = collectives(run, w)
    expected = [("all-gather", "uint8"), ("all-reduce", "float32")]
    assert sorted((c.kind, c.dtype) for c in traffic) == expected


def test_reduce_max():
    """Breaks if an amax is one shard's, or if no axes to reduce over is an error."""
    x = rows(8, 2)
    got = on_2x4(
        lambda x: reduce_max(x, ("fsdp", "ep")),
        x,
        in_specs=P(("fsdp", "ep")),
        out_specs=P(),
    )
    np.testing.assert_array_equal(got[0], x.max(0))
    assert reduce_max(x, ()) is x


def test_vary_like():
    """Breaks if a constant that starts a loop inside a `shard_map` with `check_vma` has another type than what it turns
    into."""

    def fn(x):
        start = vary_like(jnp.zeros(()), x, jnp.ones(()))
        assert jax.typeof(start).manual_axis_type.varying == {"fsdp", "ep"}
        assert vary_like(x, start) is x
        return lax.fori_loop(0, 3, lambda _, total: total + x.sum(), start)[None]

    tokens = P(("fsdp", "ep"))
    got = jax.jit(jax.shard_map(fn, mesh=make_mesh("2x4"), in_specs=tokens, out_specs=tokens))(jnp.ones(8))
    np.testing.assert_array_equal(got, np.full(8, 3.0))


def test_meshes_of_the_suite_have_eight_devices():
    """Breaks if a mesh by name leaves devices out, so that a wrong sum over them would not show."""
    assert {int(np.prod(list(sizes.values()))) for sizes in MESHES.values()} == {DEVICES}
