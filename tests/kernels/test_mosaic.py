"""The ops and the block by the Mosaic kernels, against float64: on a Hopper GPU (`make test-gpu`) every case, elsewhere
in Pallas' interpreter a few small ones.

A test on a GPU compiles one program. Its time is that of the compiler, so what may vary at run time (the sizes of
groups, the routing, what padding holds) is an operand, and the numbers to compare with are NumPy's.

Covers: matmuls x sizes of groups x widths x recipes, with gradients; the block x recipes x widths x routings, with
prequantized weights, overflow rounds and a capacity; types inside a shard_map; the choice of kernels and its reasons.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import moax
from moax.checks import log_once
from moax.kernels import implementation, select_kernels
from moax.kernels.groups import zero_rows
from moax.kernels.hopper.pallas import pipeline
from moax.ops import dense, grouped_matmul
from moax.recipe import get_recipe
from support import (
    ON_GPU,
    fake_operands,
    interpret,
    kernels_of,
    make_params,
    mark_rest,
    random,
    rel_error,
    rel_norm,
    spread,
)
from support.bits import differing
from support.gpus import dirty, pretend
from support.matmuls import PATTERNS, problem
from support.oracle.block import block as block_by_numpy
from support.oracle.ops import choose_experts, first_rows, grouped_matmul_vjp

pytestmark = [pytest.mark.loose]
gpu = pytest.mark.gpu
RECIPES = (None, "fp8_block", "mxfp8")
BF16_ULP = 2.0**-8


@pytest.fixture
def mosaic(monkeypatch):
    """fn -> fn by the kernels: on a GPU compiled once, and each call runs three times, to the same bits; in the
    interpreter elsewhere."""

    def on_a_gpu(fn):
        step = jax.jit(fn)

        def run(*args):
            assert not differing(lambda: step(*args), 2, dirty)
            return jax.tree.map(np.asarray, step(*args))

        return run

    def interpreted(fn):
        pretend(monkeypatch)
        monkeypatch.setattr(pipeline, "count_sms", lambda: 2)  # several tiles for each thread block
        return functools.partial(interpret, fn, races=False)

    return on_a_gpu if ON_GPU else interpreted


def narrow(*values):
    """bfloat16 of each, and the same in float32; None and integers stay."""
    bf16 = [v if v is None or v.dtype != np.float32 else v.astype(jnp.bfloat16) for v in values]
    return bf16, [v if v is None or v.dtype != jnp.bfloat16 else v.astype(np.float32) for v in bf16]


def check_grouped(mosaic, draws, align, width, columns, recipe, bias=True):
    """A matmul and its gradients by the kernels, for each draw of the sizes of as many groups, in one program."""

    def gradients(sizes, x, w, dy, *bias):
        fn = lambda x, w, *bias: grouped_matmul(  # noqa: E731
            x, w, sizes, *bias, recipe=recipe, align=align, kernels="hopper"
        )
        y, pull = jax.vjp(fn, x, w, *bias)
        return y, *pull(dy)

    num_rows = max(first_rows(sizes, align)[1] for sizes in draws) + 24
    num_rows += -num_rows % align
    run = mosaic(gradients)
    for sizes in draws:
        (x, w, sizes, b, dy), real = problem(sizes, align, num_rows, width, columns)
        (x, w, b, dy), (fx, fw, fb, fdy) = narrow(x, w, b if bias else None, dy)
        got = run(sizes, x, w, dy, *([b] if bias else []))
        quantized = None if recipe is None else fake_operands(fx, fw, fdy, get_recipe(recipe), real)
        want = grouped_matmul_vjp(fx, fw, sizes, fb, fdy, align, quantized=quantized)
        for v in got[:2]:
            np.testing.assert_array_equal(np.float64(v)[~real], 0.0)
        for name, g, w, per in zip(
            ("y", "dx", "dw", "db"),
            got,
            want,
            (None, None, 0, 0),
            strict=False,
        ):
            rounded = w.astype(jnp.bfloat16).astype(np.float32)
            # y with a bias is rounded before it too; dbias is summed in float32 of rounded dy, and kept in bf16.
            allowed = (2.0 if bias else 1.2) * rel_norm(rounded, w, per)
            assert rel_norm(g, w, per) <= allowed, f"{sizes}, {name}: {rel_norm(g, w, per)}, {allowed} allowed"


@pytest.mark.more
def test_grouped_matmul_interpreted(mosaic):
    """Groups that are not aligned, an empty one, NaN between them: repacked to whole blocks and back, both ways."""
    check_grouped(mosaic, [(3, 0, 130)], 1, 64, (32,), None)


@gpu
@pytest.mark.parametrize(
    ("columns", "recipe"),
    spread(
        [((160,), None), ((2, 96), "fp8_block"), ((160,), "fp8_block"), ((2, 96), "mxfp8")],
        ((160,), (2, 96)),
        RECIPES,
    ),
    ids=str,
)
def test_group_sizes(mosaic, columns, recipe):
    """Every degenerate size by the kernels, rows of padding full of NaN and 1e30."""
    check_grouped(
        mosaic,
        list(PATTERNS.values()),
        get_recipe(recipe).row_alignment,
        160,
        columns,
        recipe,
    )


WIDTHS = (
    (96, (2880,)),
    (1408, (2, 96)),
    (7168, (960,)),
    (768, (2880,)),
    (1408, (2, 7168)),
    (1408, (2, 768)),
    (1408, (2880,)),
    (2880, (2880,)),
    (1408, (2, 1408)),
    (1408, (2, 2880)),
)


@gpu
@pytest.mark.parametrize(
    ("widths", "recipe"),
    spread(zip(WIDTHS, ("fp8_block", None, "mxfp8", "fp8_block"), strict=False), WIDTHS, RECIPES),
    ids=str,
)
def test_widths(mosaic, widths, recipe):
    """Contracted dims and columns that are no multiple of a tile, a stage or a block of scales."""
    width, columns = widths
    align = get_recipe(recipe).row_alignment if len(columns) == 1 else 128
    check_grouped(mosaic, [(300, 0, 1, 129, 257)], align, width, columns, recipe, bias=False)


@gpu
@pytest.mark.parametrize("groups", mark_rest((512, 1, 64), 1))
def test_many_groups(mosaic, groups):
    """As many experts as any model has, most of them with few rows."""
    sizes = np.random.default_rng(groups).integers(0, 5, groups) ** 3
    check_grouped(mosaic, [tuple(int(n) for n in sizes)], 1, 256, (256,), None, bias=False)


@gpu
@pytest.mark.parametrize(
    ("widths", "dtype", "recipe"),
    spread(
        [((768, 2048), "bfloat16", "fp8_block"), ((160, 288), "float32", None)],
        ((768, 2048), (160, 288), (2880, 1536)),
        ("bfloat16", "float32"),
        (None, "fp8_block"),
    ),
    ids=str,
)
def test_wgrad_adds_to_a_total(widths, dtype, recipe):
    """Breaks if a sum over passes loses a tile, rounds twice in one pass, takes a tile of the pass before, or lands in
    the slice that it was read from: alone, under vmap and in a scan over totals, the bits are those of the gradient in
    float32 that is added and rounded in each pass."""
    local = implementation("hopper")
    recipe = get_recipe(recipe)
    draws = ((300, 0, 1, 129, 257), (0, 0, 5, 0, 640))
    align, _ = local.choose_rows(recipe, "x", 64, 64)
    num_rows = max(first_rows(sizes, align)[1] for sizes in draws)
    x, dy = (random(i, num_rows, w).astype(jnp.bfloat16) for i, w in enumerate(widths))
    start = random(2, 2, 5, *widths).astype(jnp.dtype(dtype))

    @jax.jit
    def step(sizes, x, dy, start):
        groups = local.find_groups(sizes, align, num_rows)

        def columns(rows, role):
            return local.quantize_for_matmul(zero_rows(rows, groups.real), recipe, role, groups)[1]

        wgrad = functools.partial(
            local.wgrad,
            columns(x, "x"),
            columns(dy, "dy"),
            groups,
            jnp.bfloat16,
        )
        add = lambda total: wgrad(total=total)  # noqa: E731

        def add_twice(total):
            return jax.lax.fori_loop(0, 2, lambda _, total: add(total), total)

        return (
            wgrad(jnp.float32),
            add_twice(start[0]),
            jax.vmap(add_twice)(start),
            jax.lax.map(add, start),
        )

    for sizes in draws:
        alone, *got = jax.tree.map(np.asarray, step(np.int32(sizes), x, dy, start))
        once = (np.float32(start) + alone).astype(start.dtype)
        twice = (np.float32(once) + alone).astype(start.dtype)
        for g, want in zip(got, (twice[0], twice, once), strict=True):
            np.testing.assert_array_equal(np.float32(g), np.float32(want))


@gpu
@pytest.mark.parametrize(
    ("rows", "recipe"),
    spread([(100, "mxfp8"), (1, None)], (1, 100, 1024), RECIPES),
)
def test_dense(mosaic, rows, recipe):
    """One group of all rows, whose number need be no multiple of anything."""
    (x, w, dy), (fx, fw, fdy) = narrow(
        random(0, rows, 256),
        random(1, 256, 384) / 16,
        random(2, rows, 384),
    )

    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: dense(x, w, recipe=recipe, kernels="hopper"), x, w)
        return y, *pull(dy)

    got = mosaic(run)(x, w, dy)
    xf = fx
    wf = fw[None]
    xw = fx
    wd = fw[None]
    dd = fdy
    dyw = fdy
    if recipe is not None:
        xf, wf, xw, wd, dd, dyw = fake_operands(fx, fw[None], fdy, get_recipe(recipe))
    want = (xf @ wf[0], dd @ wd[0].T, xw.T @ dyw)
    for g, w in zip(got, want, strict=True):
        assert rel_norm(g, w) < 2 * BF16_ULP


BLOCKS = {
    "swiglu": dict(d_model=256, d_ff=128, num_experts=4, top_k=2),
    "top 3": dict(d_model=128, d_ff=256, num_experts=4, top_k=3),
    "relu2": dict(d_model=256, d_ff=384, num_experts=8, top_k=1, activation="relu2"),
    "capacity": dict(d_model=256, d_ff=128, num_experts=8, top_k=2, capacity_factor=0.75),
    "oai": dict(
        d_model=2880,
        d_ff=2880,
        num_experts=16,
        top_k=4,
        activation="swiglu_oai",
        use_bias=True,
    ),
    "narrow": dict(d_model=768, d_ff=96, num_experts=128, top_k=8),
    # Matmuls narrower than a tile, in each direction; see benchmarks/LOG.md, 2026-11-24.
    "H 64": dict(d_model=64, d_ff=192, num_experts=8, top_k=2, use_bias=True),
    "H 96": dict(
        d_model=96,
        d_ff=64,
        num_experts=8,
        top_k=2,
        activation="swiglu_oai",
        use_bias=True,
    ),
    "H 320": dict(d_model=320, d_ff=32, num_experts=8, top_k=2, weights_at="input"),
}
# A block, a recipe, and what it does beside: weights that `quantize_params` makes, or overflow rounds.
SHORT_BLOCKS = [
    ("narrow", "fp8_block", ""),
    ("swiglu", "mxfp8", ""),
    ("top 3", None, "rounds"),
    ("relu2", "fp8_block", "rounds"),
    ("swiglu", "fp8_block", "kept"),
    ("capacity", None, ""),
    ("swiglu", None, ""),
    ("H 64", None, ""),
    ("H 96", "mxfp8", ""),
    ("H 320", "fp8_block", "kept"),
]
MORE_BLOCKS = [
    ("swiglu", "fp8_block", ""),
    ("swiglu", "mxfp8", "kept"),
    ("swiglu", "fp8_block", "gathered"),
    ("oai", "fp8_block", "rounds"),
]
MORE_BLOCKS += [c for c in itertools.product(BLOCKS, (None, "fp8_block"), ("",)) if c not in SHORT_BLOCKS + MORE_BLOCKS]
# Error of a block against the same in float32, by norm: bounds on the method, measured on CPU and GPU.
BOUNDS = {None: 0.012, "fp8_block": 0.09, "mxfp8": 0.09}


def routed_clearly(config, router, tokens: int, common: float):
    """Tokens [T, H] in bf16 with a common part, whose experts no rounding of the logits changes."""
    x = random(2, 3 * tokens, config.d_model) + np.float32(common) * random(4, config.d_model)
    x = x.astype(jnp.bfloat16)
    logits = -np.sort(-(np.float64(x) @ np.float64(router)), axis=1)
    gaps = logits[:, : config.top_k] - logits[:, 1 : config.top_k + 1]
    return x[gaps.min(1) > 1e-4][:tokens]


def find_kept(experts, config):
    """Which assignments [T, K] fit into the capacity of one device: the busiest experts drop their last ones."""
    assignments = [np.flatnonzero(experts.ravel() == e) for e in range(config.num_experts)]
    sizes = np.array([len(a) for a in assignments])
    mask = np.zeros(experts.size, bool)
    while sizes.sum() > np.ceil((config.capacity_factor or 1.0) * experts.size):
        sizes[config.num_experts - 1 - np.argmax(sizes[::-1])] -= 1  # of equals, the last
    for a, size in zip(assignments, sizes, strict=True):
        mask[a[:size]] = True
    return mask.reshape(experts.shape)


def check_block(mosaic, config, tokens, recipe, kind="", commons=(0.0,)):
    """The block's output and every gradient in bf16 by the kernels, and by NumPy in float64: for tokens that differ in
    all, and for tokens with a common part, which leave experts empty."""
    config = moax.MoEConfig(**config)
    options = dict(recipe=recipe, kernels="hopper")
    options |= dict(buffer_factor=0.4) if kind == "rounds" else {}
    params = make_params(config, bias=0.1)

    def step(x, params, dy):
        quantized = None
        if kind in ("kept", "gathered"):
            quantized = moax.quantize_params(params, config, **options, dtype=x.dtype, gather=kind == "gathered")

        def fn(x, params):
            return moax.moe(x, params, config, quantized=quantized, **options)

        y, pull, stats = jax.vjp(fn, x, params, has_aux=True)
        return y, pull(dy), stats

    run = mosaic(step)
    dy = random(3, tokens, config.d_model).astype(jnp.bfloat16)
    for common in commons:
        x = routed_clearly(config, params.router, tokens, common)
        assert len(x) == tokens
        y, (dx, dparams), stats = run(x, params, dy)
        x, dy_wide = (np.float64(v) for v in (x, dy))
        mask = find_kept(
            choose_experts(x @ np.float64(params.router), config.router, config.top_k),
            config,
        )
        want = block_by_numpy(x, params, config, dy_wide, has_room=mask)
        assert int(stats.dropped) == want.stats["dropped"]
        np.testing.assert_array_equal(stats.tokens_per_expert, want.stats["tokens_per_expert"])
        assert kind != "rounds" or stats.rounds > 1
        bound = BOUNDS[recipe]
        assert rel_norm(y, want.y) < bound, "y"
        assert rel_norm(dx, want.dx) < bound, "dx"
        for name, value in want.dparams.items():
            assert rel_norm(getattr(dparams, name), value) < 2 * bound, name


@pytest.mark.more
@pytest.mark.parametrize(
    ("d_ff", "recipe", "weights_at"),
    [
        (128, "fp8_block", "output"),
        (128, None, "output"),
        (96, None, "output"),
        (128, "fp8_block", "input"),
    ],
)
def test_block_interpreted(mosaic, d_ff, recipe, weights_at):
    """The whole way of the data through the kernels: permuted or gathered, quantized both ways, multiplied, activated
    by the matmul or after it. Narrow widths have a bias."""
    config = dict(
        d_model=128,
        d_ff=d_ff,
        num_experts=2,
        top_k=1,
        use_bias=d_ff == 96,
        weights_at=weights_at,
    )
    check_block(mosaic, config, 24, recipe)


@gpu
@pytest.mark.parametrize(
    ("name", "recipe", "kind"),
    mark_rest([*SHORT_BLOCKS, *MORE_BLOCKS], len(SHORT_BLOCKS)),
)
def test_block(mosaic, name, recipe, kind):
    """Each kind of block by the kernels: no more than rounding away from float64, routing and drops the same."""
    check_block(mosaic, BLOCKS[name], 1024 if name != "oai" else 640, recipe, kind, (0.0, 3.0))


@pytest.mark.more
@pytest.mark.parametrize("gather", [False, True])
def test_types_inside_a_shard_map(monkeypatch, gather):
    """Breaks if what a kernel makes is typed as the same on every device, inside a `shard_map` with `check_vma`:
    gradients are then refused, or not summed where they should be, in the first pass or in the loop of the others."""
    pretend(monkeypatch)
    mesh = jax.make_mesh((2, 2), ("fsdp", "ep"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    config = moax.MoEConfig(d_model=256, d_ff=128, num_experts=4, top_k=2, use_bias=True)
    specs = moax.param_specs(config, mesh=mesh)
    tokens = PartitionSpec(("fsdp", "ep"))

    def local(x, params):
        quantized = None
        if gather:
            quantized = moax.quantize_params(params, config, recipe="fp8_block", kernels="hopper", gather=True)

        def loss(x, p):
            options = moax.Options(recipe="fp8_block", kernels="hopper", buffer_factor=0.5)
            y = moax.moe(x, p, config, options, quantized=quantized)[0]
            return y.astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(x, params)

    params = jax.eval_shape(lambda: moax.init(jax.random.key(0), config, dtype=jnp.bfloat16))
    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(tokens, specs),
        out_specs=(tokens, specs),
        check_vma=True,
    )
    traced = jax.make_jaxpr(step)(jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), params)
    assert kernels_of(traced.jaxpr)


@gpu
def test_auto_takes_the_kernels():
    """`auto` on a Hopper GPU that silently ran XLA would be ten times slower."""
    assert select_kernels("auto", jnp.bfloat16, width=256) == "hopper"
    x = jnp.ones((256, 256), jnp.bfloat16)
    w = jnp.ones((2, 256, 256), jnp.bfloat16)
    text = jax.jit(lambda x, w: grouped_matmul(x, w, jnp.array([128, 128]))).lower(x, w).as_text()
    assert "mosaic_gpu" in text


def test_reasons(monkeypatch):
    """By name the kernels refuse, saying why; `auto` falls back."""
    pretend(monkeypatch)
    for dtype, widths, why in (
        (jnp.float32, {}, "bfloat16, not float32"),
        (jnp.bfloat16, {"d_ff": 40}, "d_ff of 40"),
    ):
        assert select_kernels("auto", dtype, **widths) == "xla"
        with pytest.raises(moax.Unsupported, match=why):
            select_kernels("hopper", dtype, **widths)


def test_a_fallback_is_said_once(monkeypatch, caplog):
    """Breaks if `auto` runs slower kernels on a GPU without a word, or says so at every call."""
    pretend(monkeypatch, platform="gpu")
    log_once.cache_clear()
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
