"""`assert_no_wide_weight_gather` sees weights and gradients cross by any collective, and passes what must cross."""

import dataclasses
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import moax
from moax.inspect import Collective, assert_no_wide_weight_gather, collectives, weight_gathers, weight_scatters
from support import make_mesh
from support.hlo import abstract, mapped, text_of

SHAPE = (8, 16, 32)  # of the weight w, [E, H, F]
LAID = (("ep", "fsdp"), None, None)


@pytest.fixture
def mesh():
    return make_mesh("dp2x2x2")


def refused(fn, *args, weights, **options) -> list[str]:
    """Returns the lines of the assertion's message that list collectives, up to the op; [] where it passes."""
    try:
        assert_no_wide_weight_gather(fn, *args, weights=weights, **options)
    except AssertionError as error:
        return [line.strip().split(", from ")[0] for line in str(error).splitlines() if line.startswith("  ")]
    return []


# Programs that jit's partitioner makes of a change of layout.


@pytest.mark.parametrize(
    "to, kinds",
    [
        ((("ep", "fsdp"), None, None), []),
        ((("fsdp", "ep"), None, None), ["collective-permute"]),
        (("ep", "fsdp", None), ["all-to-all"]),
        (("ep", None, None), ["all-gather"]),
        ((("fsdp", "dp"), None, None), ["collective-permute"]),
        ((None, "ep", "fsdp"), ["all-gather"]),
    ],
    ids=str,
)
def test_changes_of_layout(mesh, to, kinds):
    """Breaks if the assertion misses a kind of collective, an axis that is not fsdp, or the name of the weight."""
    w = abstract(mesh, SHAPE, jnp.float32, *LAID)
    x = abstract(mesh, (24, 16), jnp.float32, ("dp", "fsdp", "ep"))

    def f(params, x):
        laid = lax.with_sharding_constraint(2 * params["w"], NamedSharding(mesh, P(*to)))
        return jnp.einsum("th,ehf->etf", x, laid)

    moved = [c for c in collectives(jax.jit(f), {"w": w}, x) if any(v.name == "params['w']" for v in c.carries)]
    assert [c.kind for c in moved][: len(kinds)] == kinds
    lines = refused(jax.jit(f), {"w": w}, x, weights=w)
    assert [line.split()[0] for line in lines] == [c.kind for c in moved]
    assert all(" of params['w'], " in line and re.search(r", [\d,]+ bytes$", line) for line in lines)


# Programs that a shard_map states.


def step(body, mesh, w_spec=LAID, out=LAID):
    """A jitted program of x and w, by a body of their shards [2, 16] and [2, 16, 32], that returns one array."""
    tokens = P(("dp", "fsdp", "ep"))
    return jax.jit(mapped(mesh, (tokens, P(*w_spec)), P(*out))(body))


def operands(mesh):
    x = abstract(mesh, (16, 16), jnp.bfloat16, ("dp", "fsdp", "ep"))
    return x, abstract(mesh, SHAPE, jnp.bfloat16, *LAID)


def unknown(mesh):
    """A weight that the program does not have, of which a device holds 1024 elements, as of w."""
    return abstract(mesh, (math.prod(SHAPE),), jnp.float32, ("ep", "fsdp"))


def product(x, w):
    return jnp.einsum("th,ehf->etf", x, w)


def by_all_gather(x, w):
    return product(x, lax.all_gather(w, "fsdp", tiled=True))


def by_all_to_all(x, w):
    return product(x[:, :8], lax.all_to_all(w, "ep", 1, 0, tiled=True))


def by_permute(x, w):
    return product(x, lax.ppermute(w, "fsdp", [(0, 1), (1, 0)]))


def by_all_reduce(x, w):
    """Each device puts its shard into zeros; the sum is the whole weight."""
    whole = lax.dynamic_update_slice(
        jnp.zeros((4, *w.shape[1:]), w.dtype),
        w,
        (2 * lax.axis_index("fsdp"), 0, 0),
    )
    return product(x, lax.psum(whole, "fsdp"))


def by_masked_sum(x, w):
    mine = jnp.arange(4)[:, None, None] // 2 == lax.axis_index("fsdp")
    return product(
        x,
        lax.psum(jnp.where(mine, jnp.concatenate([w, w]), jnp.zeros((), w.dtype)), "fsdp"),
    )


def after_quantization(x, w):
    """The bytes cross, and then the weight that was made of them crosses again."""
    bits = lax.bitcast_convert_type((w * 16).astype(jnp.float8_e4m3fn), jnp.uint8)
    whole = lax.all_gather(bits, "fsdp", tiled=True)
    return by_permute(x, lax.bitcast_convert_type(whole, jnp.float8_e4m3fn).astype(jnp.bfloat16))


def in_a_loop(x, w):
    def body(total, layer):
        return total + by_permute(x, layer[None]), None

    return lax.scan(body, jnp.zeros((1, 2, 32), x.dtype), w)[0]


def in_a_branch(x, w):
    return lax.cond(x[0, 0] > 0, lambda: by_permute(x, w), lambda: product(x, w))


@pytest.mark.parametrize(
    "body, kinds",
    [
        (by_all_gather, ["all-gather"]),
        (by_all_to_all, ["all-to-all"]),
        (by_permute, ["collective-permute"]),
        (by_all_reduce, ["all-reduce"]),
        (by_masked_sum, ["all-reduce"]),
        (after_quantization, ["collective-permute"]),
        (in_a_loop, ["collective-permute"]),
        (in_a_branch, ["collective-permute"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_collectives_that_move_a_weight(mesh, body, kinds):
    """Breaks if a weight is lost on its way through casts, slices, masks, loops, branches or other collectives."""
    x, w = operands(mesh)
    lines = refused(step(body, mesh, out=(("dp", "fsdp", "ep"), None, None)), x, w, weights=[w])
    assert [line.split()[0] for line in lines] == kinds
    assert all("bfloat16[" in line and " of w, " in line for line in lines)


def gradient(x, w):
    """What one device adds to the gradient [4, 16, 32] of the weights of a rank of ep."""
    return jnp.einsum("th,tf->hf", x, jnp.einsum("th,ehf->tf", x, w))[None] * jnp.ones((4, 1, 1), x.dtype)


def whole_sum(x, w):
    """The gradient is summed whole over dp and fsdp, and a device keeps its part of fsdp."""
    return lax.dynamic_slice_in_dim(
        lax.psum(gradient(x, w), ("dp", "fsdp")),
        2 * lax.axis_index("fsdp"),
        2,
    )


def scattered_sum(x, w):
    """The gradient is scattered over fsdp, and summed over dp, which does not split w."""
    return lax.psum(lax.psum_scatter(gradient(x, w), "fsdp", tiled=True), "dp")


def gathered_sum(x, w):
    return lax.all_gather(scattered_sum(x, w), "ep", tiled=True)


def test_gradients(mesh):
    """Breaks if an all-reduce passes where a reduce-scatter would do, or an all-reduce over dp is refused."""
    x, w = (jax.ShapeDtypeStruct(a.shape, jnp.float32, sharding=a.sharding) for a in operands(mesh))
    (line,) = refused(step(whole_sum, mesh), x, w, weights=w)
    assert line == "all-reduce float32[4, 16, 32] over dp,fsdp into result, 12,288 bytes"
    assert len(refused(step(whole_sum, mesh), x, w, weights=unknown(mesh))) == 1
    traffic = assert_no_wide_weight_gather(step(scattered_sum, mesh), x, w, weights=w)
    expected = [("reduce-scatter", (2, 16, 32), ("fsdp",))]
    assert [(c.kind, c.shape, c.axes) for c in weight_scatters(traffic)] == expected
    assert not refused(step(scattered_sum, mesh), x, w, weights=unknown(mesh))
    (line,) = refused(step(gathered_sum, mesh, out=("fsdp", None, None)), x, w, weights=w)
    assert line.startswith("all-gather float32[4, 16, 32] over ep into result, ")


def exchanged(x, w):
    """Activations, which are larger than a shard of w, go to the ranks of their experts and back."""
    rows = jnp.tile(x * 2, (64, 1))
    rows = lax.all_to_all(rows, "ep", 0, 0, tiled=True)
    y = jnp.einsum("th,ehf->tf", rows, w)
    y = lax.all_to_all(y, "ep", 0, 0, tiled=True)
    return lax.psum_scatter(y, ("dp", "fsdp"), tiled=True)[None]


def test_activations_may_cross(mesh):
    """Breaks if the assertion takes activations for weights."""
    x, w = operands(mesh)
    program = step(exchanged, mesh, out=(("dp", "fsdp", "ep"), None, None))
    assert {c.kind for c in collectives(program, x, w)} == {"all-to-all", "reduce-scatter"}
    assert not refused(program, x, w, weights=w)
    assert not refused(program, x, w, weights=unknown(mesh))


# Texts, in the forms that GPU compilers print.

NAMED = AbstractMesh((2, 4), ("fsdp", "ep"))
W = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(NAMED, P("fsdp", "ep")))
PARAMETER = '%p = f32[4,4]{1,0} parameter(0), metadata={op_name="params.w"}'
FSDP = "channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true"


def listed(*lines: str, before: str = "") -> list[str]:
    return refused(text_of(PARAMETER, *lines, before=before), weights=W, mesh=NAMED)


def test_wrapped_and_tuple_forms():
    """Breaks if values are lost in a computation that an async-start wraps, in a fusion, or in a tuple of a loop."""
    before = f"""
    %wrapped (w: bf16[4,4]) -> bf16[4,4] {{
      %w = bf16[4,4]{{1,0}} parameter(0)
      ROOT %a = bf16[4,4]{{1,0}} all-to-all(%w), dimensions={{0}}, {FSDP}
    }}

    %fused (a: f32[4,4], b: f32[]) -> bf16[4,4] {{
      %a.1 = f32[4,4]{{1,0}} parameter(0)
      %b.1 = f32[] parameter(1)
      %wide = f32[4,4]{{1,0}} broadcast(%b.1), dimensions={{}}
      %m = f32[4,4]{{1,0}} multiply(%a.1, %wide)
      ROOT %cast = bf16[4,4]{{1,0}} convert(%m)
    }}

    %body (s: (s32[], bf16[4,4], bf16[4,4])) -> (s32[], bf16[4,4], bf16[4,4]) {{
      %s = (s32[], bf16[4,4]{{1,0}}, bf16[4,4]{{1,0}}) parameter(0)
      %i = s32[] get-tuple-element(%s), index=0
      %one = bf16[4,4]{{1,0}} get-tuple-element(%s), index=1
      %two = bf16[4,4]{{1,0}} get-tuple-element(%s), index=2
      %go = ((bf16[4,4]{{1,0}}), bf16[4,4]{{1,0}}, s32[]) async-start(%two), calls=%wrapped
      %went = bf16[4,4]{{1,0}} async-done(%go), calls=%wrapped
      ROOT %next = (s32[], bf16[4,4]{{1,0}}, bf16[4,4]{{1,0}}) tuple(%i, %one, %one)
    }}
    """
    lines = (
        "%f = bf16[4,4]{1,0} fusion(%p, %z), kind=kLoop, calls=%fused",
        "%t = (s32[], bf16[4,4]{1,0}, bf16[4,4]{1,0}) tuple(%i, %f, %other)",
        "ROOT %loop = (s32[], bf16[4,4]{1,0}, bf16[4,4]{1,0}) while(%t), condition=%q, body=%body",
    )
    (traffic,) = listed(*lines, before=before)
    assert traffic.startswith("all-to-all bfloat16[4, 4] over fsdp of params.w")


X = '%x = f32[3,4]{1,0} parameter(1), metadata={op_name="x"}'


@pytest.mark.parametrize(
    "line",
    [
        "f32[4,4]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        'f32[4,4]{1,0} custom-call(%p, %q), custom_call_target="mosaic_gpu_v2"',
        "f32[4,4]{1,0} reduce(%r, %p), dimensions={2}, to_apply=%add",
        "f32[4,4]{1,0} add(%x, %x)",
        "f32[4,4]{1,0} gather(%x, %p), offset_dims={1}",
        "f32[4,4]{1,0} dynamic-slice(%x, %p), dynamic_slice_sizes={4,4}",
        "f32[4,4]{1,0} dynamic-update-slice(%x, %x, %p)",
        "f32[4,4]{1,0} scatter(%x, %p, %x), to_apply=%add",
        "f32[4,4]{1,0} broadcast(%s), dimensions={}",
        "u8[4,4]{1,0} convert(%p)",
    ],
    ids=lambda line: line.split()[1].split("(")[0],
)
def test_what_is_no_weight(line):
    """Breaks if bytes, an activation, or the result of a product, a kernel or a reduction is taken for a weight."""
    moved = f"%m = {line.split('[')[0]}[4,4]{{1,0}} collective-permute(%c), source_target_pairs={{{{0,4}},{{4,0}}}}"
    assert len(collectives(text_of(PARAMETER, X, f"%c = {line}", moved), mesh=NAMED)) == 1
    assert not listed(X, f"%c = {line}", moved)


# What the assertion asks and says.


@pytest.fixture
def flat():
    return make_mesh("2x4")


def quantized(w):
    """[K, N] -> u8 bits of it, a scale for each row."""
    scale = jnp.abs(w).max(1, keepdims=True).astype(jnp.float32)
    return (w.astype(jnp.float32) / scale * 127).astype(jnp.int8), scale


def weight_step(mesh, *, quantize: bool):
    """x @ w for w sharded over fsdp, and the gradient of w; the weight crosses as bytes, or not."""

    def f(x, w):  # [1, 16], [8, 32]
        parts = quantized(w) if quantize else (w,)
        whole = [lax.all_gather(p, "fsdp", tiled=True) for p in parts]
        y = x @ math.prod([p.astype(jnp.float32) for p in whole[1:]], start=whole[0].astype(jnp.float32))
        return y, lax.psum_scatter(x.T @ y, "fsdp", tiled=True)

    tokens = P(("fsdp", "ep"))
    x = abstract(mesh, (8, 16), jnp.float32, ("fsdp", "ep"))
    w = abstract(mesh, (16, 32), jnp.bfloat16, "fsdp")
    return jax.jit(mapped(mesh, (tokens, P("fsdp")), (tokens, P("fsdp")))(f)), x, w


def test_no_wide_weight_gather(flat):
    f, x, w = weight_step(flat, quantize=True)
    traffic = assert_no_wide_weight_gather(f, x, w, weights={"w": w})
    assert {c.dtype for c in weight_gathers(traffic)} == {"int8", "float32"}
    assert assert_no_wide_weight_gather(traffic, weights=w) == traffic
    small = abstract(flat, (32,), jnp.float32, "fsdp")  # a shard has as many elements as all scales
    with pytest.raises(
        AssertionError,
        match=r"gathers over fsdp of 16 .*\n.*float32\[16, 1\] over fsdp",
    ):
        assert_no_wide_weight_gather(traffic, weights=(w, small))


def test_wide_weight_gather_is_named(flat):
    f, x, w = weight_step(flat, quantize=False)
    message = (
        r"1 collective of unquantized weights .*, or gathers over fsdp of 256 elements or more:\s+"
        r"all-gather bfloat16\[16, 32\] over fsdp of w, 512 bytes, from .*all_gather"
    )
    with pytest.raises(AssertionError, match=message):
        assert_no_wide_weight_gather(f, x, w, weights=w)
    assert_no_wide_weight_gather(
        f,
        x,
        w,
        axes="ep",
        weights=abstract(flat, (4,), jnp.float32, "ep"),
    )
    with pytest.raises(AssertionError, match="gathers over fsdp,ep of 256"):
        assert_no_wide_weight_gather(f, x, w, axes=("fsdp", "ep"), weights=w, mesh=flat)


def test_smallest_shard(flat):
    """Breaks if the smallest weight is one that the axes do not split, such as the replicated router."""
    weights = {
        "router": abstract(flat, (4, 8), jnp.float32),
        "wi": abstract(flat, (8, 16, 32), jnp.float32, ("ep", "fsdp")),
        "wo": abstract(flat, (8, 32, 8), jnp.float32, "ep", None, "fsdp"),
        "bias": None,
    }
    wide = [Collective("all-gather", "float32", (8 * 32 * 8 // 8 - less,), ("fsdp",), 2, 64, "") for less in (0, 1)]
    with pytest.raises(AssertionError, match="1 collective of .* of 256 elements or more"):
        assert_no_wide_weight_gather(wide, weights=weights)
    for bad in (weights["router"], [jnp.ones(3)], None):
        with pytest.raises(ValueError, match="weights: none is sharded over fsdp"):
            assert_no_wide_weight_gather(wide, weights=bad)


def test_nothing_passes_for_lack_of_a_name(flat):
    f, x, w = weight_step(flat, quantize=False)
    with pytest.raises(
        ValueError,
        match="axes='data': the mesh has no axis data; its axes are fsdp,ep",
    ):
        assert_no_wide_weight_gather(f, x, w, axes="data", weights=w)
    lost = text_of(f"%a = f32[8]{{0}} all-gather(%p), dimensions={{0}}, {FSDP}")
    with pytest.raises(ValueError, match="mesh is not known; pass mesh="):
        assert_no_wide_weight_gather(lost, weights=w)


# The block.

CONFIG = moax.MoEConfig(d_model=32, d_ff=64, num_experts=8, top_k=2)
ON_FSDP = {"wi": P("ep", "fsdp"), "wo": P("ep", "fsdp")}  # as MaxText has them
TURNED = {"wi": P(("fsdp", "ep")), "wo": P(("fsdp", "ep"))}


def block(mesh, recipe="fp8_block", operand_specs=None, gradient_specs=None, **options):
    """A training step of the block on shapes: (the jitted step, its arguments, its weights).

    `operand_specs` has the specs of weights that do not lie as declared, and `gradient_specs` those of gradients.
    """

    def loss(params, x):
        y, stats = moax.moe(x, params, CONFIG, recipe=recipe, **options)
        return jnp.square(y.astype(jnp.float32)).mean() + stats.aux_loss

    def laid_out(other):
        specs = dataclasses.replace(moax.param_specs(CONFIG, mesh=mesh), **(other or {}))
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    params = jax.tree.map(
        lambda place, shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place),
        laid_out(operand_specs),
        moax.params.param_shapes(CONFIG),
    )
    x = abstract(mesh, (64, 32), jnp.bfloat16, ("dp", "fsdp", "ep"))
    step = jax.jit(jax.grad(loss), out_shardings=laid_out(operand_specs if gradient_specs is None else gradient_specs))
    return step, (params, x), (params.wi, params.wo)


def kinds(lines):
    return Counter((line.split()[0], re.findall(r" (of|into) (\S+?),? ", line + " ")[0]) for line in lines)


@pytest.mark.parametrize(
    "options",
    [{"exchange": "all_to_all"}, {"exchange": "all_gather", "engine": "shard_map"}],
    ids=["all_to_all", "shard_map"],
)
@pytest.mark.more
def test_a_block_passes(mesh, options):
    """Breaks if the assertion refuses an exchange over ep, the router's gradient, or a sum of gradients over dp."""
    with jax.set_mesh(mesh):
        step, args, weights = block(mesh, **options)
        traffic = assert_no_wide_weight_gather(step, *args, weights=weights)
        assert_no_wide_weight_gather(traffic, weights=jax.tree.leaves(args[0]))
    assert {c.kind for c in traffic} >= {"all-gather", "reduce-scatter", "all-reduce"}
    quantized = [c for c in traffic if c.dtype == "uint8" and c.kind == "all-gather"]
    assert {value.name for c in quantized for value in c.carries} == {"params.wi", "params.wo"}
    scattered = [c for c in traffic if c.kind == "reduce-scatter" and c.reaches]
    assert {value.name for c in scattered for value in c.reaches} == {"result.wi", "result.wo"}


@pytest.mark.more
@pytest.mark.parametrize(
    "operand_specs, gradient_specs, kind, options",
    [
        pytest.param(
            ON_FSDP,
            None,
            "all-to-all",
            {"engine": "shard_map"},
            id="shard_map, weights on fsdp",
        ),
        pytest.param(TURNED, None, "collective-permute", {"engine": "shard_map"}, id="turned"),
        pytest.param({}, {"wi": P(), "wo": P()}, "all-gather", {}, id="whole gradient"),
    ],
)
def test_a_block_with_moved_weights(mesh, operand_specs, gradient_specs, kind, options):
    """Breaks if a layout that the block does not have moves weights or gradients unquantized, and the check passes."""
    with jax.set_mesh(mesh):
        step, args, weights = block(mesh, operand_specs=operand_specs, gradient_specs=gradient_specs, **options)
        traffic = kinds(refused(step, *args, weights=weights))
    values = [("into", "result.wi"), ("into", "result.wo")]
    values += [("of", "params.wi"), ("of", "params.wo")] if operand_specs else []
    assert {(kind, value) for value in values} <= set(traffic)
