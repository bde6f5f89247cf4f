"""moax.inspect: hand-written HLO in the forms that XLA's CPU and GPU compilers print, then programs compiled here."""

import itertools
import math
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import moax.inspect as inspect
from moax.config import MoEConfig
from moax.inspect import (
    Collective,
    assert_no_wide_weight_gather,
    collectives,
    hlo,
    total_bytes,
)
from support import MESHES, make_mesh
from support.hlo import abstract, mapped, text_of


@pytest.fixture
def mesh():
    return make_mesh("2x4")


def read(*lines: str, mesh="2x4", **kwargs) -> list[Collective]:
    sizes = MESHES[mesh]
    named = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    return collectives(text_of(*lines, **kwargs), mesh=named)


GATHER = "channel_id=1, dimensions={0}, use_global_device_ids=true"
FSDP = "replica_groups=mesh['fsdp'=2,'ep'=4] {'fsdp'}"


def test_cpu_text():
    (c,) = read(
        "ROOT %all_gather.3 = u8[16,8]{1,0} all-gather(%param.1), channel_id=1, replica_groups=mesh['fsdp'=2,'ep'=4] "
        "{'fsdp'}, dimensions={0}, use_global_device_ids=true, "
        'metadata={op_name="jit(<lambda>)/transpose(jvp())/\\"a\\"/all_gather" stack_frame_id=4}'
    )
    op_name = 'jit(<lambda>)/transpose(jvp())/"a"/all_gather'  # the text escapes quotes, the name has none of it
    assert c == Collective("all-gather", "uint8", (16, 8), ("fsdp",), 2, 64, op_name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (r"v[\'params\'][\'moe\'][\'wi\'].value", "v['params']['moe']['wi'].value"),
        (r"jit(f)/moe-\303\251/\347\233\256", "jit(f)/moe-é/目"),
        (r"a\\303/b\nc", r"a\303/b\nc"),
        (r"cut \303", "cut \N{REPLACEMENT CHARACTER}"),
        ("moe-é", "moe-é"),
    ],
)
def test_names_have_no_escapes(text, name):
    """Breaks if the quotes of a Linen parameter, or the letters of a layer's name, are printed as XLA escapes them."""
    (c,) = read(f'%x = u8[16,8] all-gather(%p), {GATHER}, {FSDP}, metadata={{op_name="{text}" stack_frame_id=4}}')
    assert c.op_name == name


def test_gpu_combined_start_and_done():
    """One combined gather of data and scales: an element each; the done is not counted again."""
    types = "((u8[8,32]{1,0}, f32[8,4]{1,0:S(1)}), (u8[16,32]{1,0}, f32[16,4]{1,0}))"
    traffic = read(
        f"%all-gather-start = {types} all-gather-start(%p.2, /*index=1*/%p.3), {GATHER}, "
        'replica_groups=[4,2]<=[2,4]T(1,0), metadata={op_name="x"}, backend_config={"is_sync":false}',
        "%all-gather-done = (u8[16,32]{1,0}, f32[16,4]{1,0}) all-gather-done(%all-gather-start)",
    )
    assert [(c.dtype, c.shape, c.bytes, c.axes) for c in traffic] == [
        ("uint8", (16, 32), 256, ("fsdp",)),
        ("float32", (16, 4), 128, ("fsdp",)),
    ]


WEIGHT = '%p = f32[4,8]{1,0} parameter(0), metadata={op_name="params.w"}', "%c = bf16[4,8]{1,0} convert(%p)"


@pytest.mark.parametrize(
    "line, kind, arrays",
    [
        ("(bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(bf16[4,8]{1,0} %c)", "all-gather", [((8, 8), 64, True)]),
        ("((bf16[4,8]{1,0}), bf16[8,8]{1,0}) all-gather-start(%c)", "all-gather", [((8, 8), 64, True)]),
        ("bf16[4,8]{1,0} all-reduce-start(%c)", "all-reduce", [((4, 8), 64, True)]),
        ("((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-reduce-start(%c)", "all-reduce", [((4, 8), 64, True)]),
        ("((bf16[8,8]), bf16[4,8], u32[]) reduce-scatter-start(%c)", "reduce-scatter", [((4, 8), 64, True)]),
        ("((bf16[4,8]), bf16[4,8], u32[]) all-to-all-start(bf16[4,8] %c)", "all-to-all", [((4, 8), 32, True)]),
        ("bf16[4,8] ragged-all-to-all(%c, %o, %a, %b, /*index=4*/%d)", "ragged-all-to-all", [((4, 8), 32, True)]),
        ("bf16[4,8]{1,0} collective-broadcast(%c)", "collective-broadcast", [((4, 8), 64, True)]),
        ("((bf16[1,8], bf16[4,8]), (bf16[2,8], bf16[8,8])) all-gather-start(%half, %c)", "all-gather",
         [((2, 8), 16, False), ((8, 8), 64, True)]),
        ("(bf16[4,8], bf16[4,8]) all-reduce(%half, %c)", "all-reduce", [((4, 8), 64, False), ((4, 8), 64, True)]),
        ("(bf16[2,8], bf16[2,8]) all-to-all(%half, %c)", "all-to-all", [((2, 2, 8), 32, True)]),
    ],
)  # fmt: skip
def test_forms(line, kind, arrays):
    """Breaks if a form is read as another array, or a weight is lost in it, or an array beside it is taken for it."""
    traffic = read(*WEIGHT, f"%x = {line}, channel_id=1, use_global_device_ids=true, {FSDP}")
    assert [(c.shape, c.bytes, c.carries != ()) for c in traffic] == arrays
    assert {(c.kind, c.dtype, c.axes) for c in traffic} == {(kind, "bfloat16", ("fsdp",))}


@pytest.mark.parametrize(
    "types",
    ["(bf16[4]{0}, bf16[4]{0}, u32[], u32[])", "((bf16[4]{0}), bf16[4]{0})", "bf16[4]{0}"],
)
@pytest.mark.parametrize(
    "mesh, pairs, axes, group",
    [
        ("2x4", "{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("ep",), 2),
        ("2x4", "{{0,4},{4,0}}", ("fsdp",), 2),
        ("dp2x2x2", "{{0,0},{1,1},{2,4},{3,5},{4,2},{5,3},{6,6},{7,7}}", ("dp", "fsdp"), 2),
        ("dp2x2x2", "{{0,0},{1,1}}", (), 1),
    ],
)
def test_permute(types, mesh, pairs, axes, group):
    name = "collective-permute-start" if types.startswith("(") else "collective-permute"
    (c,) = read(
        *WEIGHT,
        f"%x = {types} {name}(%c), channel_id=1, source_target_pairs={pairs}",
        mesh=mesh,
    )
    assert (c.shape, c.axes, c.group_size, c.bytes) == ((4,), axes, group, 8 if group > 1 else 0)
    assert [value.name for value in c.carries] == ["params.w"]


def test_async_wrapper():
    """What GPU programs of older XLA print: a computation that holds the collective, named by start and done."""
    before = """
    %wrapped_reduce_scatter (p: bf16[16,8]) -> bf16[8,8] {
      %p = bf16[16,8]{1,0} parameter(0)
      ROOT %reduce-scatter.1 = bf16[8,8]{1,0} reduce-scatter(%p), channel_id=3, replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true, dimensions={0}, to_apply=%add
    }
    """  # noqa: E501
    type_ = "((bf16[16,8]{1,0}), bf16[8,8]{1,0}, u32[])"
    for start, done in (
        ("async-start", "async-done"),
        ("reduce-scatter-start", "reduce-scatter-done"),
    ):
        (c,) = read(
            f"%s = {type_} {start}(%x), calls=%wrapped_reduce_scatter",
            f"%u = {type_} async-update(%s), calls=%wrapped_reduce_scatter",
            f"ROOT %d = bf16[8,8]{{1,0}} {done}(%u), calls=%wrapped_reduce_scatter",
            before=before,
        )
        expected = ("reduce-scatter", (8, 8), 128, ("fsdp",), 1)
        assert (c.kind, c.shape, c.bytes, c.axes, c.times) == expected


@pytest.mark.parametrize(
    "mesh, groups, axes, size",
    [
        ("2x4", "{{0,1,2,3},{4,5,6,7}}", ("ep",), 4),
        ("2x4", "{{0,4}, {1,5}, {2,6}, {3,7}}", ("fsdp",), 2),
        ("2x4", "{{0,1,2,3,4,5,6,7}}", ("fsdp", "ep"), 8),
        ("2x4", "{}", ("fsdp", "ep"), 8),
        ("2x4", "[2,4]<=[8]", ("ep",), 4),
        ("2x4", "[4,2]<=[2,4]T(1,0)", ("fsdp",), 2),
        ("2x4", "[1,8]<=[8]", ("fsdp", "ep"), 8),
        ("2x4", "[8,1]<=[8]", (), 1),
        ("2x4", "{{0,1},{2,3},{4,5},{6,7}}", ("ep",), 2),
        ("dp2x2x2", "[2,4]<=[2,2,2]T(1,0,2)", ("dp", "ep"), 4),
        ("dp2x2x2", "[4,2]<=[2,2,2]T(0,2,1)", ("fsdp",), 2),
        ("dp2x2x2", "[4,2]<=[4,2]", ("ep",), 2),
        ("2x4", "mesh['fsdp'=2,'ep'=4] {'ep','fsdp'}", ("fsdp", "ep"), 8),
        ("2x4", "mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("ep",), 4),
        ("2x4", "mesh['axis_0'=8] {'axis_0'}", ("fsdp", "ep"), 8),
        ("2x4", "mesh[a=8] {a:(2)4}", ("ep",), 4),
        ("dp2x2x2", "mesh['a'=8] {'a':(1)2}", ("dp",), 2),
        ("dp2x2x2", "mesh['a'=8] {'a':(1)2,'a':(4)2}", ("dp", "ep"), 4),
        ("dp2x2x2", "mesh['a'=8] {'a':(2)2}", ("fsdp",), 2),
        ("2x4", "mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'y'}", ("fsdp",), 2),
        ("2x4", "mesh['x'=4,'y'=2], device_ids=(0,4,1,5,2,6,3,7) {'x'}", ("ep",), 4),
    ],
)
def test_replica_groups(mesh, groups, axes, size):
    (c,) = read(
        f"%a = f32[64]{{0}} all-gather(%p), channel_id=1, replica_groups={groups}, dimensions={{0}}, "
        "use_global_device_ids=true, frontend_attributes={}",
        mesh=mesh,
    )
    assert (c.axes, c.group_size, c.bytes) == (axes, size, 256 * (size - 1) // size)


@pytest.mark.parametrize(
    "groups, expected",
    [("{{0,1},{2,3}}", ((0, 1), (2, 3))), ("{}", ((0, 1, 2, 3),))],
)
def test_ids_of_an_all_to_all_are_partitions(groups, expected):
    """Breaks if the groups of an all-to-all, whose text has no use_global_device_ids, are not read."""
    one = hlo.read_hlo(
        text_of(f"%x = f32[8]{{0}} all-to-all(%p), channel_id=1, replica_groups={groups}"),
    )
    assert hlo.device_groups(one.computations["main.0_spmd"]["x"], 4) == expected


def test_replicas_are_refused():
    """Breaks if ids of replicas are read as ids of partitions."""
    with pytest.raises(ValueError, match="the program has replicas"):
        collectives("HloModule f, replica_count=4\n\nENTRY %main (p: f32[8]) -> f32[8] {\n}\n")


@pytest.mark.parametrize("groups", ["mesh{'a'} {'a'}, use_global_device_ids=true", "{{0}}"])
def test_unknown_form_of_groups(groups):
    """Breaks if groups of an unknown form, or ids of replicas, are read as if all devices took part."""
    with pytest.raises(ValueError, match="form that moax.inspect does not know"):
        read(f"%x = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}")


LOOPS = """
%region_0 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %ar = f32[8]{0} all-reduce(%g), channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%add
}

%outer (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %inner = (s32[], /*index=1*/f32[8]{0}) while(%t), condition=%c, body=%region_0, backend_config={"known_trip_count":{"n":"3"}}
}

%branch (p: f32[8]) -> f32[8] {
  ROOT %ag = f32[8]{0} all-gather(%p), channel_id=2, replica_groups=[4,2]<=[8], dimensions={0}, use_global_device_ids=true
}
"""  # noqa: E501


def test_trip_counts_multiply():
    four = 'while(%t), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"4"},"x":{}}'
    inner, second = read(
        f"%w = (s32[], f32[8]{{0}}) {four}",
        "%b = f32[8]{0} conditional(%i, %p, %p), branch_computations={%branch, %branch}",
        before=LOOPS,
    )
    assert (inner.kind, inner.times, inner.open_loop) == ("all-reduce", 12, False)
    assert (second.kind, second.times, second.open_loop) == ("all-gather", 2, False)
    assert total_bytes([inner]) == 12 * 2 * 32 * 7 // 8


def test_loops_without_a_trip_count_count_once():
    unknown = """
    %open (p: (s32[], f32[8])) -> (s32[], f32[8]) {
      %inner.1 = f32[8]{0} call(%t), to_apply=%outer
    }
    """
    lines = "%w = (s32[], f32[8]{0}) while(%t), condition=%c, body=%open"
    once, _ = read(lines, before=LOOPS + dedent(unknown))
    assert (once.times, once.open_loop) == (3, True)
    assert " 3+ " in inspect.table([once])


def test_whatever_is_no_collective():
    assert not read(
        "%all-gather-fusion = f32[8]{0} fusion(%all-gather.1), kind=kLoop, calls=%fused",
        '%gte = f32[8]{0} get-tuple-element(%all-reduce), index=0, metadata={op_name="all-gather(x)"}',
        "%all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)",
    )


@pytest.mark.parametrize(
    "text, name, bits",
    [
        ("pred", "bool", 8),
        ("u8", "uint8", 8),
        ("s4", "int4", 4),
        ("s32", "int32", 32),
        ("bf16", "bfloat16", 16),
        ("f16", "float16", 16),
        ("f32", "float32", 32),
        ("c64", "complex64", 64),
        ("f8e4m3fn", "float8_e4m3fn", 8),
        ("f8e5m2", "float8_e5m2", 8),
        ("f8e8m0fnu", "float8_e8m0fnu", 8),
        ("f8e4m3b11fnuz", "float8_e4m3b11fnuz", 8),
        ("f4e2m1fn", "float4_e2m1fn", 4),
    ],
)
def test_dtypes(text, name, bits):
    assert hlo.dtype_name(text) == (jnp.dtype(name).name, bits)
    (c,) = read(f"%x = {text}[2,3]{{1,0:E(4)}} all-gather(%p), {GATHER}, {FSDP}")
    assert (c.dtype, c.bytes) == (name, math.ceil(6 * bits / 8 / 2))


# Programs compiled on 8 emulated devices.

WIDE = [jnp.float32, jnp.bfloat16]
SMALL = [jnp.uint8, jnp.float8_e4m3fn]


@pytest.mark.parametrize("dtype", WIDE + SMALL, ids=lambda d: jnp.dtype(d).name)
def test_compiled_collectives(mesh, dtype):
    """Known collectives of each kind, with the dtype that was asked for, also where XLA:CPU widens it."""
    size = jnp.dtype(dtype).itemsize
    wide = dtype in WIDE

    def f(x):  # [8, 8] on a device
        moved = [
            lax.all_gather(x, "fsdp", axis=0, tiled=True),
            lax.all_gather(x, ("fsdp", "ep"), axis=1, tiled=True),
            lax.all_to_all(x, "ep", 0, 0, tiled=True),
            lax.ppermute(x, "ep", [(i, (i + 1) % 4) for i in range(4)]),
        ]
        reduced = [lax.psum_scatter(x, "fsdp", tiled=True), lax.psum(x, "ep")] if wide else []
        return moved, reduced

    anywhere = P(("fsdp", "ep"))
    outs = [anywhere] * 4, [anywhere] * (2 if wide else 0)
    traffic = collectives(
        mapped(mesh, P("fsdp", "ep"), outs)(f),
        abstract(mesh, (16, 32), dtype, "fsdp", "ep"),
    )
    b = 64 * size
    expected = {
        ("all-gather", ("fsdp",)): (2 * 64, b),
        ("all-gather", ("fsdp", "ep")): (8 * 64, 7 * b),
        ("all-to-all", ("ep",)): (64, b * 3 // 4),
        ("collective-permute", ("ep",)): (64, b),
    }
    if wide:
        expected |= {
            ("reduce-scatter", ("fsdp",)): (32, b // 2),
            ("all-reduce", ("ep",)): (64, 2 * b * 3 // 4),
        }
    assert {(c.kind, c.axes): (c.size, c.bytes) for c in traffic} == expected
    assert len(traffic) == len(expected)
    assert {c.dtype for c in traffic} == {jnp.dtype(dtype).name}
    assert all("shard_map" in c.op_name for c in traffic)


def test_axes_of_every_subset():
    mesh = make_mesh("dp2x2x2")
    subsets = [s for n in (1, 2, 3) for s in itertools.combinations(mesh.axis_names, n)]
    f = mapped(mesh, P(("dp", "fsdp", "ep")), [P()] * len(subsets))(
        lambda x: [lax.psum(x * n, s) for n, s in enumerate(subsets)]
    )
    traffic = collectives(f, abstract(mesh, (8, 4), jnp.float32, ("dp", "fsdp", "ep")))
    assert sorted(c.axes for c in traffic) == sorted(subsets[1:] + subsets[:1])
    assert {c.group_size for c in traffic} == {2, 4, 8}


@pytest.mark.parametrize("way", ["auto", "explicit"])
def test_what_jit_inserts(way):
    """Collectives of the partitioner, whose groups no longer name the user's axes."""
    mesh = make_mesh("dp2x2x2", way)
    to = NamedSharding(mesh, P("fsdp"))
    move = jax.sharding.reshard if way == "explicit" else lax.with_sharding_constraint
    f = jax.jit(lambda x: move(x, to))
    traffic = collectives(f, abstract(mesh, (16, 32), jnp.float32, ("dp", "fsdp", "ep")))
    assert [(c.kind, c.axes, c.bytes) for c in traffic] == [
        ("collective-permute", ("dp", "fsdp"), 256),
        ("all-gather", ("dp", "ep"), 768),
    ]


def test_reductions_of_two_dtypes_keep_theirs(mesh):
    f = mapped(mesh, (P("fsdp"), P("fsdp")), (P(), P()))(lambda x, y: (lax.psum(x, "ep"), lax.psum(y, "ep")))
    traffic = collectives(
        f,
        abstract(mesh, (4, 4), jnp.bfloat16, "fsdp"),
        abstract(mesh, (4, 2), jnp.float32, "fsdp"),
    )
    assert {c.dtype: c.shape for c in traffic} == {"bfloat16": (2, 4), "float32": (2, 2)}


def test_reduction_that_xla_made_from_a_product(mesh):
    """A bf16 all-reduce that jit inserts is one of bf16 too."""
    x = abstract(mesh, (8, 16), jnp.bfloat16, None, "ep")
    w = abstract(mesh, (16, 8), jnp.bfloat16, "ep")
    f = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(mesh, P()))
    (c,) = collectives(f, x, w)
    assert (c.kind, c.dtype, c.axes) == ("all-reduce", "bfloat16", ("ep",))
    (c,) = collectives(f.lower(x, w).compile())
    assert c.dtype == "float32"


def gather(mesh):
    return jax.jit(mapped(mesh, P("fsdp"), P())(lambda w: lax.all_gather(w, "fsdp", tiled=True)))


def test_a_compiled_program_is_read_as_it_is(mesh):
    """Breaks if a bf16 array is listed as XLA:CPU moves it, as f32, or a compiled program as it was asked for."""
    f = gather(mesh)
    w = abstract(mesh, (16, 4), jnp.bfloat16, "fsdp")
    traffic = collectives(f, w) + collectives(f.lower(w).compile())
    assert [(c.dtype, c.bytes) for c in traffic] == [("bfloat16", 64), ("float32", 128)]


def test_what_it_reads(mesh):
    """Functions, jitted or not, traced, lowered or compiled, and texts; arrays or their shapes."""
    jitted = gather(mesh)
    w = abstract(mesh, (16, 4), jnp.float32, "fsdp")
    array = jax.device_put(jnp.zeros(w.shape, w.dtype), w.sharding)
    expected = collectives(jitted, w)
    assert [(c.kind, c.axes) for c in expected] == [("all-gather", ("fsdp",))]
    lowered = jitted.lower(w)
    compiled = lowered.compile()
    for program in (jitted.trace(w), lowered, compiled):
        assert collectives(program) == expected
    assert collectives(compiled.as_text(), mesh=mesh) == expected
    assert collectives(lambda v: jitted(v), array)[0].axes == ("fsdp",)
    assert collectives(lambda *, v, n: jitted(v), v=array, n=3)[0].axes == ("fsdp",)


def test_mesh_in_force_names_the_axes():
    mesh = make_mesh("2x4")
    with jax.set_mesh(mesh):
        f = jax.jit(
            lambda x: lax.with_sharding_constraint(lax.with_sharding_constraint(x, P("ep")), P()),
        )
        traffic = collectives(f, jax.ShapeDtypeStruct((8, 4), jnp.float32))
    assert {c.axes for c in traffic} == {("ep",)}


def test_text_without_a_mesh():
    """Breaks if axes of a program whose mesh is not known have names, or its devices are not counted."""
    (c,) = collectives(text_of(f"%a = f32[8]{{0}} all-gather(%p), {GATHER}, {FSDP}"))
    assert (c.axes, c.group_size) == ((), 2)


def test_scan(mesh):
    def f(x, ws):
        return lax.scan(lambda c, w: (jnp.tanh(c @ lax.all_gather(w, "fsdp", tiled=True)), None), x, ws)[0]

    x = abstract(mesh, (8, 16), jnp.float32, ("fsdp", "ep"))
    ws = abstract(mesh, (5, 16, 16), jnp.float32, None, "fsdp")
    tokens = P(("fsdp", "ep"))
    traffic = collectives(mapped(mesh, (tokens, P(None, "fsdp")), tokens)(f), x, ws)
    assert [(c.times, c.bytes, c.open_loop) for c in traffic] == [(5, 16 * 16 * 4 // 2, False)]
    assert total_bytes(traffic) == 5 * 512


def test_while_loop_of_unknown_length(mesh):
    def f(x):
        return lax.while_loop(lambda c: c.sum() < 9, lambda c: lax.psum(c, "ep"), x)

    traffic = collectives(
        mapped(mesh, P("fsdp"), P("fsdp"))(f),
        abstract(mesh, (4,), jnp.float32, "fsdp"),
    )
    assert [(c.axes, c.times, c.open_loop) for c in traffic] == [(("ep",), 1, True)]


def test_nothing_to_see():
    assert collectives(jnp.sin, jnp.ones(3)) == []
    assert inspect.table([]) == "no collectives"


# Sums and tables.


def sample() -> list[Collective]:
    return [
        Collective("all-gather", "uint8", (16, 8), ("fsdp",), 2, 64, "f/gather"),
        Collective("all-gather", "float32", (4, 2), ("fsdp",), 2, 16, "f/gather", times=3),
        Collective("all-gather", "bfloat16", (8, 8), ("ep",), 4, 96, "f/dispatch"),
        Collective("all-reduce", "float32", (), ("fsdp", "ep"), 8, 7, "f/loss"),
        Collective("all-gather", "uint8", (16, 8), ("fsdp",), 2, 64, "f/gather"),
    ]


def test_total_bytes():
    traffic = sample()
    assert total_bytes(traffic) == 64 + 48 + 96 + 7 + 64
    assert total_bytes(traffic, kind="all-reduce") == 7
    assert total_bytes(traffic, axes="fsdp") == 64 + 48 + 7 + 64
    assert total_bytes(traffic, "all-gather", ("fsdp", "ep")) == 64 + 48 + 96 + 64
    assert total_bytes(traffic, dtype=jnp.uint8) == total_bytes(traffic, dtype="uint8") == 128
    assert inspect.weight_gathers(traffic, "fsdp") == [traffic[0], traffic[1], traffic[4]]


def test_table():
    expected = """\
        kind        dtype     shape   axes     times  bytes/device  op
        ----------  --------  ------  -------  -----  ------------  ----------
        all-gather  uint8     16x8    fsdp         2           128  f/gather
        all-gather  float32   4x2     fsdp         3            48  f/gather
        all-gather  bfloat16  8x8     ep           1            96  f/dispatch
        all-reduce  float32   scalar  fsdp,ep      1             7  f/loss
        ----------  --------  ------  -------  -----  ------------  ----------
        all-gather                    ep           1            96
        all-gather                    fsdp         5           176
        all-reduce                    fsdp,ep      1             7
        total                                      7           279"""
    assert inspect.table(sample()) == dedent(expected)


def test_table_keeps_both_ends_of_a_name():
    """Breaks if a long name loses its start, which tells backward, or its end, which tells the op, or if it grows."""
    name = f"jit(step)/transpose(jvp())/{'Layer/' * 20}moe/gather_weight"
    *_, op = inspect.table([Collective("all-gather", "uint8", (8,), ("fsdp",), 2, 8, name)]).splitlines()[2].split()
    assert op == f"{name[:30]}...{name[-47:]}" and len(op) == 80
    assert "transpose(" in op and op.endswith("Layer/moe/gather_weight")


def test_wrong_arguments(mesh):
    f = gather(mesh)
    w = abstract(mesh, (16, 4), jnp.float32, "fsdp")
    with pytest.raises(
        ValueError,
        match="fn is a Lowered, lowered or compiled for its arguments; pass no others",
    ):
        collectives(f.lower(w), w)
    with pytest.raises(ValueError, match="fn=3 must be a function"):
        collectives(3)
    with pytest.raises(ValueError, match="must have the program's 8 devices, in their order"):
        collectives(f, w, mesh=AbstractMesh((2,), ("fsdp",)))
    turned = jax.sharding.Mesh(mesh.devices.T, ("ep", "fsdp"))
    with pytest.raises(ValueError, match="must have the program's 8 devices, in their order"):
        collectives(f, w, mesh=turned)


def test_what_the_cpu_cannot_compile_unwidened_is_said(mesh):
    class Lowered(jax.stages.Lowered):
        asked = 0

        def __init__(self):
            pass

        def compile(self, compiler_options=None, *args, **kwargs):
            if compiler_options:
                self.asked += 1
                raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: f8")
            return gather(mesh).lower(abstract(mesh, (16, 4), jnp.bfloat16, "fsdp")).compile()

        def as_text(self, *args, **kwargs) -> str:
            raise NotImplementedError

    lowered = Lowered()
    with pytest.warns(UserWarning, match="XLA:CPU, which moves bf16 as f32"):
        (c,) = collectives(lowered)
    assert (c.dtype, c.axes, lowered.asked) == ("float32", ("fsdp",), 2)


def test_arithmetic_on_f8_compiles_with_it_widened(mesh):
    f = mapped(mesh, P("fsdp"), P())(lambda x: lax.all_gather(jnp.sin(x.astype(jnp.float8_e5m2)), "fsdp", tiled=True))
    (c,) = collectives(f, abstract(mesh, (16, 4), jnp.bfloat16, "fsdp"))
    assert c.dtype == "float16"


# The block.

CONFIG = MoEConfig(d_model=32, d_ff=64, num_experts=8, top_k=2)


@pytest.mark.more
def test_a_block_with_a_recipe():
    """Breaks if `inspect_block` does not compile the recipe, or lists what the assertion cannot judge."""
    mesh = make_mesh("2x4")
    weights = abstract(mesh, (8, 64, 32), jnp.float32, ("ep", "fsdp"))
    traffic = inspect.inspect_block(CONFIG, 64, mesh=mesh, recipe="fp8_block")
    plain = inspect.inspect_block(CONFIG, 64, mesh=mesh, recipe=None)
    assert inspect.weight_scatters(assert_no_wide_weight_gather(traffic, weights=weights))
    with pytest.raises(AssertionError, match="bfloat16"):
        assert_no_wide_weight_gather(plain, weights=weights)
    sent = total_bytes(inspect.weight_gathers(traffic))
    unquantized = total_bytes(inspect.weight_gathers(plain))
    assert 0 < sent <= 0.53 * unquantized


@pytest.mark.parametrize("way", ["auto", "explicit"])
def test_forward_has_no_gradient(way):
    with jax.set_mesh(make_mesh("2x4", way)):
        traffic = inspect.inspect_block(CONFIG, tokens=64, exchange="all_gather", backward=False)
    assert not [c for c in traffic if c.kind == "reduce-scatter" and "fsdp" in c.axes]
    assert {c.dtype for c in inspect.weight_gathers(traffic)} == {"bfloat16"}


def test_a_block_needs_a_mesh_that_divides_it():
    with pytest.raises(ValueError, match="inspect_block: no mesh"):
        inspect.inspect_block(CONFIG, tokens=64)
    with pytest.raises(ValueError, match="tokens: dim 0 of size 63 is not divisible by"):
        inspect.inspect_block(CONFIG, tokens=63, mesh=make_mesh("2x4"))
