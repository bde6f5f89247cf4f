"""Low-rank adapters of frozen experts, against the block of merged weights in NumPy.

Covers: kinds of meshes x frozen weights as they are or kept quantized; several passes; places of the routing weights;
what the compiled step computes; wrong arguments.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import Axes, Format, Recipe, inspect, lora
from support import make_mesh, make_params, mark_rest, put, random, rel_norm
from support.block import BASE as WITH_SHARED
from support.block import MESH, cotangent, loss_of, make_x
from support.oracle.block import block as block_by_numpy
from support.oracle.formats import round_weight

# Only weights are rounded, so that the oracle can add A B to them.
WEIGHTS = Recipe(None, Format(block=128, tile=128), None)
BASE = dataclasses.replace(WITH_SHARED, shared_d_ff=0)  # a recipe rounds a shared expert too
RANK, SCALE = 3, 2.0
ADAPTERS = lora.Adapters(
    **{
        name: jnp.asarray(random(10 + i, *getattr(lora.adapter_shapes(BASE, RANK), name)) * 0.2)
        for i, name in enumerate(("wi_a", "wi_b", "wo_a", "wo_b"))
    },
    scale=SCALE,
)
PLAIN = dataclasses.replace(BASE, use_bias=False, weights_at="input")
CASES = [
    ("2x4", "custom_partitioning", True, BASE, {}),
    ("tp2x2x2", "explicit", False, BASE, {}),
    ("2x4", "custom_partitioning", True, BASE, dict(buffer_factor=0.3, exchange="all_to_all")),
    ("none", "none", True, BASE, dict(save_rows=False)),
    ("none", "none", False, PLAIN, dict(buffer_factor=0.4)),
]


def expected(config, prequantized: bool):
    """The result of the merged block, and the gradients of the adapters by the chain rule."""
    params = make_params(config)
    wide = {n: np.asarray(getattr(ADAPTERS, n), np.float64) for n in lora.DIMS}
    wi, wo = (np.asarray(w, np.float64) for w in (params.wi, params.wo))
    if prequantized:
        wi, wo = (round_weight(w, WEIGHTS.w, "rows") for w in (params.wi, params.wo))
    wi = wi + SCALE * np.einsum("ehr,ergf->ehgf", wide["wi_a"], wide["wi_b"])
    wo = wo + SCALE * np.einsum("efr,erh->efh", wide["wo_a"], wide["wo_b"])
    merged = dataclasses.replace(params, wi=wi, wo=wo)
    x = np.asarray(make_x(config)).reshape(-1, config.d_model)
    want = block_by_numpy(x, merged, config, cotangent(x.shape), d_losses=(1, 1))
    d_wi = SCALE * want.dparams["wi"]
    d_wo = SCALE * want.dparams["wo"]
    gradients = dict(
        wi_a=np.einsum("ehgf,ergf->ehr", d_wi, wide["wi_b"]),
        wi_b=np.einsum("ehr,ehgf->ergf", wide["wi_a"], d_wi),
        wo_a=np.einsum("efh,erh->efr", d_wo, wide["wo_b"]),
        wo_b=np.einsum("efr,efh->erh", wide["wo_a"], d_wo),
    )
    return want, gradients


def step(config, prequantized: bool, **options):
    """A jitted function of (adapters, x, params, quantized): y, and the gradients of the first three."""

    def loss(adapters, x, params, quantized):
        y, stats = moax.moe(
            x,
            params,
            config,
            adapters=adapters,
            quantized=quantized,
            recipe=WEIGHTS if prequantized else None,
            **options,
        )
        return sum(loss_of(y, stats)), y

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))


def placed(mesh, way, config, prequantized: bool):
    """The operands of `step` on a mesh; kept weights have no wi and wo beside them."""
    x = make_x(config)
    params = make_params(config)
    adapters = ADAPTERS
    if mesh is not None:
        specs = dataclasses.replace(lora.adapter_specs(config), scale=SCALE)
        params = put(mesh, moax.param_specs(config), params)
        adapters = put(mesh, specs, adapters)
        x = put(mesh, moax.params.token_spec(Axes()), x)
    if not prequantized:
        return adapters, x, params, None
    quantized = moax.quantize_params(params, config, recipe=WEIGHTS, dtype=jnp.float32)
    return adapters, x, dataclasses.replace(params, wi=None, wo=None), quantized


@pytest.mark.parametrize(("mesh", "way", "prequantized", "config", "options"), mark_rest(CASES, 1))
def test_is_the_merged_block(mesh, way, prequantized, config, options):
    """Breaks if a product of the adapters is missing, scaled twice, summed over too few devices, or reads rows of
    another expert; if a frozen weight gets a gradient, or kept weights need the weights themselves."""
    on = None if mesh == "none" else make_mesh(mesh, way)
    with jax.set_mesh(on or jax.make_mesh((1,), ("fsdp",))):
        (d_adapters, dx, d_params), y = step(config, prequantized, **options)(*placed(on, way, config, prequantized))
    want, gradients = expected(config, prequantized)
    assert rel_norm(np.asarray(y).reshape(want.y.shape), want.y) < MESH
    assert rel_norm(np.asarray(dx).reshape(want.dx.shape), want.dx) < MESH
    for name, value in gradients.items():
        assert rel_norm(getattr(d_adapters, name), value, per=0) < MESH, name
    for name in ("router", "bi", "bo"):
        if getattr(d_params, name) is not None:
            assert rel_norm(getattr(d_params, name), want.dparams[name]) < MESH, name
    assert prequantized == (d_params.wi is None)
    assert prequantized or not np.any(d_params.wi) and not np.any(d_params.wo)


@pytest.mark.more
def test_what_a_step_computes():
    """Breaks if a step on frozen experts scatters the gradient of a weight, or gathers a weight in more than bytes."""
    on = make_mesh("2x4")
    with jax.set_mesh(on):
        args = placed(on, "custom_partitioning", BASE, True)
        program = step(BASE, True).lower(*args).compile()
    traffic = inspect.collectives(program)
    assert not [c for c in traffic if c.kind == "reduce-scatter" and np.prod(c.shape[-2:]) >= BASE.d_model * BASE.d_ff]
    gathers = inspect.weight_gathers(traffic)
    assert {c.dtype for c in gathers if np.prod(c.shape) > 64} == {"uint8"}, gathers


def test_new_adapters_change_nothing():
    """Breaks if `init` makes adapters that change the block, or `merge` changes the weights then."""
    adapters = lora.init(jax.random.key(0), BASE, 4, scale=0.5)
    merged = lora.merge(make_params(BASE), adapters)
    jax.tree.map(np.testing.assert_array_equal, merged, make_params(BASE))
    assert adapters.wi_a.shape == (8, 32, 4)
    assert adapters.wo_b.shape == (8, 4, 32)
    assert adapters.scale == 0.5
    assert 0.8 < float(adapters.wi_a.std()) * 32**0.5 < 1.2


WRONG = {
    "rank": (lambda: lora.init(jax.random.key(0), BASE, 0), "rank=0"),
    "scale": (lambda: lora.init(jax.random.key(0), BASE, 2, scale=float("nan")), "scale=nan"),
    "scale of arrays": (dict(scale=jnp.ones(())), "adapters.scale=.* must be a finite number"),
    "scale of a flag": (dict(scale=True), "adapters.scale=True must be a finite number"),
    "axes": (lambda: lora.init(jax.random.key(0), BASE, 2, axes="ep"), "axes is a str"),
    "specs": (lambda: lora.adapter_specs(None), "config is None"),
    "merged half": (lambda: lora.merge(make_params(BASE), dataclasses.replace(ADAPTERS, wi_b=None)), "wi_a and .*wi_b"),
    "merged others": (
        lambda: lora.merge(make_params(BASE), dataclasses.replace(ADAPTERS, wo_b=jnp.zeros((8, RANK, 40)))),
        "params.wo, adapters.wo_a, adapters.wo_b have shapes",
    ),
    "merged kept": (
        lambda: lora.merge(dataclasses.replace(make_params(BASE), wi=None, wo=None), ADAPTERS),
        "params.wi is None",
    ),
    "swapped": (lambda: lora.merge(ADAPTERS, make_params(BASE)), "params is an Adapters"),
    "shape": (dict(wi_b=jnp.zeros((8, RANK, 2, 40))), "adapters.wi_b has shape"),
    "half a pair": (dict(wo_a=None), "must both be given, or both be None"),
    "kind": ("adapters", "adapters is a str"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    """Breaks if adapters of another block are multiplied, or a mistake ends in an error of JAX."""
    arguments, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        if callable(arguments):
            arguments()
        adapters = dataclasses.replace(ADAPTERS, **arguments) if isinstance(arguments, dict) else arguments
        jax.eval_shape(lambda: moax.moe(make_x(BASE), make_params(BASE), BASE, adapters=adapters))


def test_no_weights_at_all():
    """Breaks if a block without weights is not told so in the name of the argument."""
    params = dataclasses.replace(make_params(BASE), wi=None, wo=None)
    with pytest.raises(ValueError, match="params.wi is None"):
        moax.moe(make_x(BASE), params, BASE)
