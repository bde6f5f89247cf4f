"""The ops and the block by the Mosaic kernels, against float64: on a Hopper GPU (`make test-gpu`) every case, elsewhere
in Pallas' interpreter a few small ones.

Covers: the block with fp8_block interpreted; types inside a shard_map; the choice of kernels and its reasons.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import moax
from moax import backend
from moax.groups import zero_rows
from moax.kernels import implementation, select_kernels
from moax.kernels.hopper.pallas import pipeline
from moax.ops import dense, grouped_matmul
from moax.recipe import get_recipe
from support import ON_GPU, fake_operands, interpret, make_params, random, rel_error, rel_norm, some, spread
from support.bits import differing
from support.gpus import dirty
from support.oracle.ops import first_rows, grouped_matmul_vjp
from support.products import PATTERNS, problem

pytestmark = [pytest.mark.loose]
gpu = pytest.mark.gpu
RECIPES = (None, "fp8_block", "mxfp8", "fp8_tensor")
BF16_ULP = 2.0**-8


@pytest.fixture
def mosaic(monkeypatch):
    """Runs fn(*args) by the kernels: twice on a GPU, to the same bits; in the interpreter elsewhere."""

    def run(fn, *args):
        if ON_GPU:
            step = jax.jit(fn)
            assert not differing(lambda: step(*args), 1, dirty)
            return jax.tree.map(np.asarray, step(*args))
        monkeypatch.setattr(backend, "on_hopper", lambda: True)
        monkeypatch.setattr(pipeline, "count_sms", lambda: 2)  # several tiles for each thread block
        return interpret(fn, *args, races=False)

    return run


def narrow(*values):
    """bfloat16 of each, and what that is in float32; None and integers stay."""
    bf16 = [v if v is None or v.dtype != np.float32 else jnp.asarray(v).astype(jnp.bfloat16) for v in values]
    return bf16, [v if v is None or v.dtype != jnp.bfloat16 else np.asarray(v.astype(jnp.float32)) for v in bf16]


def gradients(sizes, recipe, align):
    """x, w, dy, bias -> y, dx, dw, dbias by the kernels."""

    def run(x, w, dy, *bias):
        fn = lambda x, w, *bias: grouped_matmul(  # noqa: E731
            x, w, sizes, *bias, recipe=recipe, align=align, kernels="hopper"
        )
        y, pull = jax.vjp(fn, x, w, *bias)
        return y, *pull(dy)

    return run


def check_grouped(mosaic, sizes, align, width, columns, recipe, bias=True):
    num_rows = first_rows(sizes, align)[1] + 24
    num_rows += -num_rows % align
    (x, w, sizes, b, dy), real = problem(sizes, align, num_rows, width, columns)
    (x, w, b, dy), (fx, fw, fb, fdy) = narrow(x, w, b if bias else None, dy)
    got = mosaic(gradients(jnp.asarray(sizes), recipe, align), x, w, dy, *([b] if bias else []))
    quantized = None if recipe is None else fake_operands(fx, fw, fdy, get_recipe(recipe), real)
    want = grouped_matmul_vjp(fx, fw, sizes, fb, fdy, align, quantized=quantized)
    for v in got[:2]:
        np.testing.assert_array_equal(np.float64(v)[~real], 0.0)
    for name, g, w, per in zip(("y", "dx", "dw", "db"), got, want, (None, None, 0, 0), strict=False):
        rounded = np.asarray(jnp.asarray(w, jnp.bfloat16).astype(jnp.float32))
        # y with a bias is rounded before it too; dbias is summed in float32 of rounded dy, and kept in bf16.
        allowed = (2.0 if bias else 1.2) * rel_norm(rounded, w, per)
        assert rel_norm(g, w, per) <= allowed, f"{name}: {rel_norm(g, w, per)}, {allowed} allowed"


@pytest.mark.more
def test_grouped_matmul_interpreted(mosaic):
    """Groups that are not aligned, an empty one, NaN between them: repacked to whole blocks and back, both ways."""
    check_grouped(mosaic, (3, 0, 130), 1, 64, (32,), None)


@gpu
@pytest.mark.parametrize(("pattern", "columns", "recipe"), spread(14, PATTERNS, [(160,), (2, 96)], RECIPES), ids=str)
def test_group_sizes(mosaic, pattern, columns, recipe):
    """Every degenerate size by the kernels, rows of padding full of NaN and 1e30."""
    check_grouped(mosaic, PATTERNS[pattern], get_recipe(recipe).row_alignment, 160, columns, recipe)


@gpu
@pytest.mark.parametrize(("width", "recipe"), spread(6, (96, 768, 1408, 2880, 7168), RECIPES))
def test_widths(mosaic, width, recipe):
    """Contracted dims and columns that are no multiple of a tile, a stage or a block of scales."""
    align = get_recipe(recipe).row_alignment
    check_grouped(mosaic, (300, 0, 1, 129, 257), align, width, (2880,), recipe, bias=False)
    check_grouped(mosaic, (300, 0, 1, 129, 257), 128, 1408, (2, width), recipe, bias=False)


@gpu
@pytest.mark.parametrize("groups", some((512, 1, 64), 1))
def test_many_groups(mosaic, groups):
    """As many experts as any model has, most of them with few rows."""
    sizes = np.random.default_rng(groups).integers(0, 5, groups) ** 3
    check_grouped(mosaic, tuple(int(n) for n in sizes), 1, 256, (256,), None, bias=False)


@gpu
@pytest.mark.parametrize(
    ("widths", "dtype", "recipe"),
    spread(4, ((768, 2048), (160, 288), (2880, 1536)), (jnp.bfloat16, jnp.float32), (None, "fp8_block")),
    ids=str,
)
def test_wgrad_adds_to_a_total(widths, dtype, recipe):
    """Breaks if a sum over passes loses a tile, rounds twice in one pass, takes a tile of the pass before, or lands in
    the slice that it was read from: alone, under vmap and in a scan over totals, the bits are those of the gradient in
    float32 that is added and rounded in each pass."""
    local, recipe, sizes = implementation("hopper"), get_recipe(recipe), jnp.asarray((300, 0, 1, 129, 257), jnp.int32)
    align = local.align_rows(recipe)
    groups = local.find_groups(sizes, align, first_rows(np.asarray(sizes), align)[1])
    rows = groups.real.shape[0]
    x, dy = (jnp.asarray(random(i, rows, w), jnp.bfloat16) for i, w in enumerate(widths))
    start = jnp.asarray(random(2, 2, len(sizes), *widths), dtype)

    def columns(rows, role):
        return local.quantize_for_matmul(zero_rows(rows, groups.real), recipe, role, groups)[1]

    def add(total):
        return local.wgrad(columns(x, "x"), columns(dy, "dy"), groups, jnp.bfloat16, total=total)

    def add_twice(total):
        return jax.lax.fori_loop(0, 2, lambda _, total: add(total), total)

    def check(got, want):
        np.testing.assert_array_equal(np.asarray(got.astype(jnp.float32)), want)

    alone = jax.jit(lambda: local.wgrad(columns(x, "x"), columns(dy, "dy"), groups, jnp.bfloat16, jnp.float32))()
    once = (start.astype(jnp.float32) + alone).astype(dtype).astype(jnp.float32)
    want = np.asarray((once + alone).astype(dtype).astype(jnp.float32))
    check(jax.jit(add_twice)(start[0]), want[0])
    check(jax.jit(jax.vmap(add_twice))(start), want)
    check(jax.jit(lambda start: jax.lax.map(add, start))(start), np.asarray(once))


@gpu
@pytest.mark.parametrize(("rows", "recipe"), spread(4, (1, 100, 1024), RECIPES))
def test_dense(mosaic, rows, recipe):
    """One group of all rows, whose number need be no multiple of anything."""
    (x, w, dy), (fx, fw, fdy) = narrow(random(0, rows, 256), random(1, 256, 384) / 16, random(2, rows, 384))

    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: dense(x, w, recipe=recipe, kernels="hopper"), x, w)
        return y, *pull(dy)

    got = mosaic(run, x, w, dy)
    xf, wf, xw, wd, dd, dyw = (fx, fw[None], fx, fw[None], fdy, fdy)
    if recipe is not None:
        xf, wf, xw, wd, dd, dyw = fake_operands(fx, fw[None], fdy, get_recipe(recipe))
    want = (xf @ wf[0], dd @ wd[0].T, xw.T @ dyw)
    for g, w in zip(got, want, strict=True):
        assert rel_norm(g, w) < 2 * BF16_ULP


BLOCKS = {
    "swiglu": dict(d_model=256, d_ff=128, num_experts=4, top_k=2),
    "hidden": dict(d_model=128, d_ff=256, num_experts=4, top_k=3, weights_at="hidden"),
    "relu2": dict(d_model=256, d_ff=384, num_experts=8, top_k=1, activation="relu2"),
    "capacity": dict(d_model=256, d_ff=128, num_experts=8, top_k=2, capacity_factor=0.75),
    "oai": dict(d_model=2880, d_ff=2880, num_experts=16, top_k=4, activation="swiglu_oai", use_bias=True),
    "narrow": dict(d_model=768, d_ff=96, num_experts=128, top_k=8),
}
SHORT_BLOCKS = [
    *[("swiglu", recipe) for recipe in RECIPES],
    *[("hidden", None), ("relu2", "fp8_block"), ("capacity", None), ("narrow", "fp8_block")],
]
# Error of a block against the same in float32, by norm: bounds on the method, measured on CPU and GPU.
BOUNDS = {None: 0.012, "fp8_block": 0.09, "mxfp8": 0.09, "fp8_tensor": 0.2}


def check_block(mosaic, config, tokens, recipe):
    """The block's output and every gradient, by the kernels in bf16 and by XLA in float32."""
    config = moax.MoEConfig(**config)
    params = make_params(config, bias=0.0)
    x, dy = jnp.asarray(random(2, tokens, config.d_model)), jnp.asarray(random(3, tokens, config.d_model))

    def run(kernels, recipe, dtype):
        def step(x, params, dy):
            fn = lambda x, params: moax.moe(x, params, config, recipe=recipe, kernels=kernels)  # noqa: E731
            y, pull, stats = jax.vjp(fn, x, params, has_aux=True)
            return y, pull(dy), stats

        return step, (x.astype(dtype), params, dy.astype(dtype))

    step, args = run("xla", None, jnp.bfloat16)
    routed = jax.tree.map(np.asarray, jax.jit(step)(*args))
    step, args = run("hopper", recipe, jnp.bfloat16)
    got = mosaic(step, *args)
    # The same routing: both compute it in float32 from the same bf16 tokens.
    assert int(got[2].dropped) == int(routed[2].dropped)
    np.testing.assert_array_equal(got[2].tokens_per_expert, routed[2].tokens_per_expert)
    wide, args = run("xla", None, jnp.float32)
    args = (args[0].astype(jnp.bfloat16).astype(jnp.float32), args[1], args[2].astype(jnp.bfloat16).astype(jnp.float32))
    want = jax.tree.map(np.asarray, jax.jit(wide)(*args))
    bound = BOUNDS[recipe]
    assert rel_norm(got[0], want[0]) < bound, "y"
    assert rel_norm(got[1][0], want[1][0]) < bound, "dx"
    for name in ("router", "wi", "wo", "bi", "bo"):
        g, w = getattr(got[1][1], name), getattr(want[1][1], name)
        if g is not None:
            assert rel_norm(g, w) < 2 * bound, name


@pytest.mark.more
@pytest.mark.parametrize(
    ("d_ff", "recipe", "weights_at"),
    [(128, "fp8_block", "output"), (128, None, "output"), (96, None, "output"), (128, "fp8_block", "input")],
)
def test_block_interpreted(mosaic, d_ff, recipe, weights_at):
    """The whole way of the data through the kernels: permuted or gathered, quantized both ways, multiplied, activated
    by the product or after it. Narrow widths have a bias."""
    config = dict(d_model=128, d_ff=d_ff, num_experts=2, top_k=1, use_bias=d_ff == 96, weights_at=weights_at)
    check_block(mosaic, config, 24, recipe)


@gpu
@pytest.mark.parametrize(
    ("name", "recipe"),
    some([*SHORT_BLOCKS, *((n, r) for n in BLOCKS for r in (None, "fp8_block") if (n, r) not in SHORT_BLOCKS)], 8),
)
def test_block(mosaic, name, recipe):
    """Each kind of block by the kernels: no more than rounding away from float32, routing and drops the same."""
    check_block(mosaic, BLOCKS[name], 1024 if name != "oai" else 640, recipe)


@pytest.mark.more
def test_types_inside_a_shard_map(monkeypatch):
    """Breaks if what a kernel makes is typed as the same on every device, inside a `shard_map` with `check_vma`:
    gradients are then refused, or not summed where they should be, in the first pass or in the loop of the others."""
    monkeypatch.setattr(backend, "on_hopper", lambda: True)
    mesh = jax.make_mesh((2, 2), ("fsdp", "ep"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    config = moax.MoEConfig(d_model=256, d_ff=128, num_experts=4, top_k=2, use_bias=True)
    specs, tokens = moax.param_specs(config, mesh=mesh), PartitionSpec(("fsdp", "ep"))

    def local(x, params):
        def loss(x, p):
            y = moax.moe(x, p, config, recipe="fp8_block", kernels="hopper", buffer_factor=0.5)[0]
            return y.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(x, params)

    params = jax.eval_shape(lambda: moax.init(jax.random.key(0), config, dtype=jnp.bfloat16))
    step = jax.shard_map(local, mesh=mesh, in_specs=(tokens, specs), out_specs=(tokens, specs), check_vma=True)
    traced = jax.jit(step).trace(jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), params)
    assert "mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()


@gpu
def test_auto_takes_the_kernels():
    """`auto` on a Hopper GPU that silently ran XLA would be ten times slower."""
    assert select_kernels("auto", jnp.bfloat16, width=256) == "hopper"
    x, w = jnp.ones((256, 256), jnp.bfloat16), jnp.ones((2, 256, 256), jnp.bfloat16)
    text = jax.jit(lambda x, w: grouped_matmul(x, w, jnp.array([128, 128]))).lower(x, w).as_text()
    assert "mosaic_gpu" in text


def test_reasons(monkeypatch):
    """By name the kernels refuse, saying why; `auto` falls back."""
    monkeypatch.setattr(backend, "on_hopper", lambda: True)
    for dtype, widths, why in ((jnp.float32, {}, "bfloat16, not float32"), (jnp.bfloat16, {"d_ff": 40}, "d_ff of 40")):
        assert select_kernels("auto", dtype, **widths) == "xla"
        with pytest.raises(moax.Unsupported, match=why):
            select_kernels("hopper", dtype, **widths)


def test_a_fallback_is_said_once(monkeypatch, caplog):
    """Breaks if `auto` runs slower kernels on a GPU without a word, or says so at every call."""
    monkeypatch.setattr(backend, "platform", lambda: "gpu")
    backend.log_once.cache_clear()
    for _ in range(2):
        assert select_kernels("auto", jnp.float32) == "xla"
    (message,) = caplog.messages
    assert message.startswith("kernels='auto': ") and "'xla' runs, which is slower" in message


def test_no_hopper():
    """On a CPU the reason names the device."""
    if ON_GPU:
        pytest.skip("this is a GPU")
    with pytest.raises(moax.Unsupported, match=r"compute capability 9\.0, this is 'cpu'"):
        select_kernels("hopper")


def test_rel_error_of_nan():
    """The comparison here must not pass a NaN."""
    assert not rel_error(np.array([np.nan]), np.ones(1)) < 1
    assert not rel_norm(np.array([np.nan]), np.ones(1)) < 1
