"""How gradients of weights are summed over devices: in which dtype, by how many roundings, and by how many bytes.

Covers: `grad_reduce_dtype` x meshes x engines of the block, the dense layer and the grouped matmul; the collective
alone over every order of axes; what the compiled programs send.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import moax
from lm import command
from moax import Axes, estimate, inspect, ops
from moax.mesh.collectives import scatter_gradient
from support import make_mesh, make_params, mark_rest, put, random, spec
from support.block import cotangent
from support.meshes import TOKENS

CONFIG = moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2, shared_d_ff=32, use_bias=True)


def bf16(v):
    return np.asarray(v, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize(
    "gather",
    [
        (("fsdp",), ()),
        ((), ("ep",)),
        (("fsdp", "ep"), ()),
        (("ep", "fsdp"), ()),
        (("ep",), ("fsdp",)),
        ((), ()),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pieces_in_place_of_a_reduce_scatter(gather, dtype):
    """Breaks if the sums of processes on CPUs are others than those of a reduce-scatter, but for one rounding."""
    terms = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 8, 16)), dtype)

    def scatter(terms):
        either = [scatter_gradient(terms[0, 0], gather, in_pieces=in_pieces) for in_pieces in (True, False)]
        return [shard[None, None] for shard in either]

    layout = P("fsdp", "ep")
    mapped = jax.shard_map(
        scatter,
        mesh=make_mesh("2x4"),
        in_specs=layout,
        out_specs=layout,
        check_vma=False,
    )
    got, want = jax.jit(mapped)(terms)
    assert got.dtype == want.dtype == terms.dtype
    few = 1e-6 if dtype == "float32" else 2.0**-6  # the reduce-scatter of each dim rounds its sums
    np.testing.assert_allclose(
        *(np.asarray(v, np.float32) for v in (got, want)),
        rtol=few,
        atol=few,
    )


@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
def test_no_reduce_scatter_through_gloo(exchange, monkeypatch):
    """Breaks if processes on CPUs sum by gloo's reduce-scatter, which returns wrong values at times."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    # No other test has these sizes, so that no trace is cached.
    config = moax.MoEConfig(32, 40, 8, 2, shared_d_ff=24)

    def loss(params, x):
        return moax.moe(x, params, config, exchange=exchange, engine="shard_map")[0].sum()

    with jax.set_mesh(make_mesh("2x4")):
        params = jax.eval_shape(lambda key: moax.init(key, config), jax.random.key(0))
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(
            params,
            jax.ShapeDtypeStruct((64, 32), jnp.bfloat16),
        )
    assert "all_to_all" in str(jaxpr) and "reduce_scatter" not in str(jaxpr)


def block_step(reduce, mesh: str, way: str, fsdp_dim: str = "auto", params_in=jnp.float32):
    """(the jitted gradients of wi and wo, its arguments) of a block in bfloat16, and its mesh."""
    on = make_mesh(mesh, way)
    axes = Axes(fsdp_dim=fsdp_dim)
    options = dict(
        axes=axes,
        engine=way if way == "shard_map" else "auto",
        grad_reduce_dtype=reduce,
    )
    params = jax.tree.map(lambda v: jnp.asarray(v, params_in), make_params(CONFIG))
    with jax.set_mesh(on):
        where = moax.param_specs(CONFIG, axes)
        params = put(on, where, params)
        x = put(on, spec(mesh, TOKENS), random(1, 512, CONFIG.d_model).astype(jnp.bfloat16))

    def loss(params, x):
        return jnp.sum(moax.moe(x, params, CONFIG, **options)[0].astype(jnp.float32) ** 2)

    return (
        jax.jit(jax.grad(loss), out_shardings=jax.tree.map(lambda v: v.sharding, params)),
        (
            params,
            x,
        ),
        on,
    )


@functools.cache
def gradients(*case):
    """The gradients of a block as NumPy arrays."""
    step, args, on = block_step(*case)
    with jax.set_mesh(on):
        return {n: np.asarray(getattr(step(*args), n)) for n in ("wi", "wo", "shared_wi", "shared_wo")}


@pytest.mark.more
def test_float32_is_not_rounded():
    """Breaks if the gradient of a float32 parameter passes bfloat16 at its end, or sums are float32 in any case."""
    case = "dp2x2x2", "explicit", "model"
    for name, want in gradients("float32", *case).items():
        assert np.any(bf16(want) != want), f"the gradient of {name} was rounded to bfloat16"
        assert error(gradients(None, *case)[name], want.astype(np.float64)) > 1e-3, name


@pytest.mark.more
def test_float32_is_the_sum_of_what_devices_compute():
    """Breaks if a float32 sum is not that of one device, which has no sum: tokens of 8 devices, one product."""
    one = gradients("float32", "8x1", "custom_partitioning", "auto")
    params = make_params(CONFIG)
    x = random(1, 512, CONFIG.d_model).astype(jnp.bfloat16)

    def loss(p):
        return jnp.sum(
            moax.moe(x, p, CONFIG, grad_reduce_dtype="float32")[0].astype(jnp.float32) ** 2,
        )

    for name, got in one.items():
        assert error(got, np.asarray(getattr(jax.jit(jax.grad(loss))(params), name), np.float64)) < 1e-5, name


@pytest.mark.parametrize("reduce", mark_rest(("float32", "bfloat16", None), 1))
def test_bfloat16_parameters(reduce):
    """Breaks if a gradient does not have the dtype of its parameter, whatever it was summed in."""
    step, args, on = block_step(reduce, "8x1", "custom_partitioning", params_in=jnp.bfloat16)
    with jax.set_mesh(on):
        expected = {jnp.dtype(jnp.bfloat16)}
        assert {v.dtype for v in jax.tree.leaves(jax.eval_shape(step, *args))} == expected


@pytest.mark.more
def test_rounds_sum_in_float32():
    """Breaks if the gradients of a step in several passes are added in bfloat16."""
    params = make_params(CONFIG)
    x = random(1, 256, CONFIG.d_model).astype(jnp.bfloat16)
    dy = cotangent(x.shape)

    def compute_gradient(factor, reduce):
        options = moax.Options(
            buffer_factor=factor,
            grad_reduce_dtype=reduce,
            exchange="all_to_all",
        )

        def loss(p):
            return jnp.vdot(moax.moe(x, p, CONFIG, options)[0].astype(jnp.float32), dy)

        with jax.set_mesh(make_mesh("2x4")):
            return np.asarray(jax.jit(jax.grad(loss))(params).wi, np.float64)

    assert error(compute_gradient(0.2, "float32"), compute_gradient(None, "float32")) < 1e-5
    assert error(compute_gradient(0.2, None), compute_gradient(None, "float32")) > 1e-3


@pytest.mark.parametrize("reduce", mark_rest(("float32", None, "bfloat16"), 1))
def test_bytes_on_the_wire(reduce):
    """Breaks if a sum sends another dtype than it says, or `moax.inspect` does not count it."""
    mesh = make_mesh("dp2x2x2")
    config = moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2)
    traffic = inspect.inspect_block(
        config,
        tokens=64,
        mesh=mesh,
        recipe="fp8_block",
        grad_reduce_dtype=reduce,
    )
    dtype = reduce or "bfloat16"
    item = jnp.dtype(dtype).itemsize
    scattered = inspect.weight_scatters(traffic)
    assert {(c.kind, c.dtype) for c in scattered} == {("reduce-scatter", dtype)}
    of_device = 4 * 3 * 64 * 128  # elements of the 4 experts of a rank
    assert inspect.total_bytes(scattered) == of_device // 2 * item
    weights = (".wi", ".wo")
    over_dp = [c for c in traffic if c.kind == "all-reduce" and any(v.name.endswith(weights) for v in c.reaches)]
    assert {(c.kind, c.dtype, c.axes) for c in over_dp} == {("all-reduce", dtype, ("dp",))}
    assert inspect.total_bytes(over_dp) == of_device // 2 * item
    options = dict(kernels="xla", grad_reduce_dtype=reduce)
    estimated = estimate.estimate(config, {"dp": 2, "fsdp": 2, "ep": 2}, 8, **options)
    foretold = [t for t in estimated.transfers["scatter_gradient"] if math.prod(t.shape) > 1000]
    moved = lambda listed: sorted((c.kind, c.dtype, c.axes, c.bytes) for c in listed)  # noqa: E731
    assert moved(foretold) == moved([*scattered, *over_dp])
    assert not [c for c in traffic if c.kind == "all-reduce" and "fsdp" in c.axes and c.size >= 64 * 128]
    assert {c.dtype for c in inspect.weight_gathers(traffic) if c.size >= 64 * 128} == {"uint8"}


def test_ops():
    """Breaks if the dense layer or the grouped matmul sums otherwise than the block."""
    mesh = make_mesh("8x1")
    x = random(2, 64, 32).astype(jnp.bfloat16)
    w = random(3, 32, 48)
    for op in (
        ops.dense,
        lambda x, w, **options: ops.grouped_matmul(x, w[None], jnp.full(8, 8), **options),
    ):
        with jax.set_mesh(mesh):
            args = put(mesh, (P("fsdp"), P("fsdp")), (x, w))

            def loss(w, x, reduce, op=op):
                return jnp.sum(op(x, w, grad_reduce_dtype=reduce).astype(jnp.float32) ** 2)

            gradient = jax.jit(jax.grad(loss), static_argnums=2)
            wide, narrow = (gradient(args[1], args[0], reduce) for reduce in ("float32", None))
        y = bf16(np.asarray(x, np.float64) @ bf16(w))
        want = np.asarray(x, np.float64).T @ bf16(2 * y)
        assert error(wide, want) < 1e-4 < error(narrow, want)


@pytest.mark.parametrize("wrong", ["fp32", jnp.float16, jnp.int32, 1, True, ["float32"]], ids=repr)
def test_wrong_names(wrong):
    """Breaks if a misspelt dtype sums in the dtype of x without a word."""
    for call in (
        lambda: moax.Options(grad_reduce_dtype=wrong),
        lambda: ops.dense(jnp.ones((2, 4)), jnp.ones((4, 2)), grad_reduce_dtype=wrong),
    ):
        with pytest.raises(
            ValueError,
            match="grad_reduce_dtype=.* must be one of 'float32', 'bfloat16', or None",
        ):
            call()


def test_a_trainer_asks_for_it():
    """Breaks if `python -m lm train` loses an option on its way to the block, or a run does not resume with it."""
    arguments = command.parser().parse_args(
        [
            "train",
            "--grad-reduce-dtype",
            "bfloat16",
            "--recipe",
            "fp8_block",
        ]
    )
    config = command.train_config(arguments)
    config = type(config).from_json(config.to_json())
    options = config.options
    assert options.grad_reduce_dtype == "bfloat16"
    assert options.recipe == "fp8_block"
    with pytest.raises(ValueError, match="grad_reduce_dtype='fp32' must be one of"):
        dataclasses.replace(config, grad_reduce_dtype="fp32")


def test_dtypes_are_names():
    """Breaks if jnp.float32 and "float32" are different options, which would compile twice."""
    for dtype in (jnp.float32, np.float32, np.dtype("float32"), "float32"):
        assert moax.Options(grad_reduce_dtype=dtype) == moax.Options(grad_reduce_dtype="float32")
    assert moax.Options(grad_reduce_dtype=jnp.bfloat16).grad_reduce_dtype == "bfloat16"
