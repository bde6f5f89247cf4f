"""Explicit axes: whatever legal layout the arrays of a caller have, the block computes the same, or says what is wrong.

Covers: the tokens, the router's input, masks, segments, a caller's routing, the small parameters, the weights of every
token, adapters and quantized weights, each over axes that moax would not choose; weights, and gate and up, in a layout
that cannot work.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moax
from moax import lora, ops, reference
from support import make_mesh, make_params, put, random, rel_norm
from support.block import MESH

ROUTER = moax.RouterConfig(bias=True, logits_bias=True, expert_scale=True, aux_loss=1e-2)
CONFIG = moax.MoEConfig(32, 48, 8, 2, router=ROUTER, use_bias=True, shared_d_ff=16, shared_gate=True)
LATENT = moax.MoEConfig(32, 48, 8, 2, d_latent=16)
SHAPE = (8, 4)  # of the tokens
DRAW = np.random.default_rng(0)
ARRAYS = {
    "x": random(1, *SHAPE, 32),
    "router_input": random(2, *SHAPE, 32),
    "mask": DRAW.random(SHAPE) > 0.2,
    "segment_ids": DRAW.integers(-1, 3, SHAPE).astype(np.int32),
    "experts": DRAW.permuted(np.tile(np.arange(8, dtype=np.int32), (*SHAPE, 1)), axis=-1)[..., :2],
    "weights": np.abs(random(3, *SHAPE, 2)) + 0.1,
}
STAGES = {"fsdp": 2, "ep": 2, "stage": 2}
OTHER = moax.Axes(other="stage")

# The layout of each array that is not whole, and the config. Arrays that are left out are None, but for x.
CASES = {
    "a choice and its weights": (
        CONFIG,
        dict(x=P("tp"), experts=P(None, "fsdp", "tp"), weights=P("tp", None, "ep"), mask=P("tp")),
    ),
    "a choice alone": (CONFIG, dict(x=P(None, "ep", "tp"), experts=P("tp", None, "fsdp"), mask=P("ep", "tp"))),
    "padding of two kinds": (
        CONFIG,
        dict(x=P("fsdp", "ep", "tp"), router_input=P(None, "tp"), mask=P("fsdp", "tp"), segment_ids=P("tp", "fsdp")),
    ),
    "parameters of every token": (
        CONFIG,
        dict(x=P("ep"), router=P("tp", "fsdp"), router_bias=P("tp"), logits_bias=P("ep"), expert_scale=P("tp"),
             bi=P(None, "tp", "fsdp"), bo=P("tp", "ep"), shared_wi=P("tp", "fsdp"), shared_wo=P("ep", "tp"),
             shared_gate=P("tp")),
    ),
    "latent experts and adapters": (
        LATENT,
        dict(latent_down=P("fsdp", "tp"), latent_up=P("tp", "ep"), wi_a=P("tp", "fsdp"), wi_b=P(None, "ep", "tp"),
             wo_a=P("fsdp", "tp"), wo_b=P("ep", None, "tp")),
    ),
}  # fmt: skip


def is_spec(value) -> bool:
    return isinstance(value, P)


def operands_of(config: moax.MoEConfig, layouts: dict) -> tuple[dict, dict]:
    """Returns the arrays with a gradient and those of integers, without a mesh."""
    params = make_params(config)
    shapes = vars(lora.adapter_shapes(config, 4))
    adapters = {name: random(i, *shapes[name]) for i, name in enumerate(lora.DIMS) if name in layouts}
    chosen = {name: jnp.asarray(value) for name, value in ARRAYS.items() if name == "x" or name in layouts}
    floats = {name: value for name, value in chosen.items() if value.dtype == jnp.float32}
    if adapters:
        floats["adapters"] = lora.Adapters(**adapters, scale=0.5)
    return floats | {"params": params}, {name: value for name, value in chosen.items() if name not in floats}


def on_mesh(mesh, config: moax.MoEConfig, tree: dict, layouts: dict) -> dict:
    """Returns the arrays of a tree on the mesh, whole, or as declared, but for `layouts`."""

    def specs_of(value, declared):
        specs = {name: layouts.get(name, spec) for name, spec in vars(declared).items()}
        return dataclasses.replace(value, **{name: specs[name] for name in specs if getattr(value, name) is not None})

    results = {}
    for name, value in tree.items():
        if name == "params":
            results[name] = put(mesh, specs_of(value, moax.param_specs(config, mesh=mesh)), value)
        elif name == "adapters":
            specs = dataclasses.replace(lora.adapter_specs(config, mesh=mesh), scale=value.scale)
            results[name] = put(mesh, specs_of(value, specs), value)
        else:
            results[name] = jax.device_put(value, NamedSharding(mesh, layouts.get(name, P())))
    return results


def gradients(config: moax.MoEConfig, floats: dict, integers: dict):
    """Returns y and the gradient of each array, by the block."""

    def loss(floats):
        routing = integers.get("experts")
        if "weights" in floats:
            routing = (routing, floats["weights"])
        y, stats = moax.moe(
            floats["x"],
            floats["params"],
            config,
            router_input=floats.get("router_input"),
            routing=routing,
            mask=integers.get("mask"),
            segment_ids=integers.get("segment_ids"),
            adapters=floats.get("adapters"),
        )
        return jnp.sum(y**2) + stats.aux_loss, y

    grads, y = jax.jit(jax.grad(loss, has_aux=True))(floats)
    return y, grads


def entries(x) -> tuple:
    """Returns the spec of an array, an entry for each dim."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return (*spec, *[None] * (x.ndim - len(spec)))


@pytest.mark.parametrize("name", CASES)
def test_any_layout_of_a_caller_computes_the_same(name):
    """Breaks if the block raises JAX's `ShardingTypeError` for a legal layout of an array, computes something else, or
    gives a gradient or y another layout than that of its array."""
    config, layouts = CASES[name]
    floats, integers = operands_of(config, layouts)
    y_without_mesh, wanted = gradients(config, floats, integers)
    mesh = make_mesh("tp2x2x2", "explicit")
    with jax.set_mesh(mesh):
        placed = on_mesh(mesh, config, floats, layouts)
        y, grads = gradients(config, placed, on_mesh(mesh, config, integers, layouts))
    assert rel_norm(y, y_without_mesh) < MESH
    assert entries(y) == entries(placed["x"])
    for grad, want, array in zip(*map(jax.tree.leaves, (grads, wanted, placed)), strict=True):
        assert rel_norm(grad, want) < MESH
        assert entries(grad) == entries(array)


def test_a_choice_agrees_with_the_reference():
    """Breaks if a caller's choice whose K is split over tp is another choice than that of the reference."""
    layouts = CASES["a choice and its weights"][1] | {"mask": P()}
    floats, integers = operands_of(CONFIG, layouts)
    integers["mask"] = jnp.ones(SHAPE, bool)
    rows = jnp.reshape(floats["x"], (-1, 32))
    experts, weights = (jnp.reshape(v, (-1, 2)) for v in (integers["experts"], floats["weights"]))
    want, _ = jax.jit(lambda *v: reference.moe(v[0], v[1], CONFIG, experts=v[2], weights=v[3]))(
        rows, floats["params"], experts, weights
    )
    mesh = make_mesh("tp2x2x2", "explicit")
    with jax.set_mesh(mesh):
        placed = (on_mesh(mesh, CONFIG, tree, layouts) for tree in (floats, integers))
        y, _ = gradients(CONFIG, *placed)
    assert rel_norm(np.reshape(y, (-1, 32)), want) < MESH


@pytest.mark.parametrize("entries", [(), (None, "tp", None)], ids=str)
def test_quantized_weights_in_any_layout(entries):
    """Breaks if bytes that a caller has moved on Explicit axes raise an error of JAX, or stand for other weights."""
    config = moax.MoEConfig(32, 48, 8, 2)
    mesh = make_mesh("tp2x2x2", "explicit")
    options = moax.Options(recipe="fp8_block")
    with jax.set_mesh(mesh):
        params = put(mesh, moax.param_specs(config), make_params(config))
        quantized = moax.quantize_params(params, config, options, dtype=jnp.float32)
        moved = jax.tree.map(
            lambda v: jax.device_put(v, P(*entries[: v.ndim])) if v.shape[1] % 2 == 0 else v, quantized
        )
        x = jax.device_put(ARRAYS["x"], P("fsdp"))
        y, want = (moax.moe(x, params, config, options, quantized=q)[0] for q in (moved, quantized))
    np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize(
    "config, name, spec, says",
    [
        (
            CONFIG,
            "shared_wi",
            P(None, "tp", None),
            "params.shared_wi has the layout P(None, 'tp', None): dim 1 is sharded over mesh axis 'tp'; the mesh axes "
            "('fsdp', 'ep') alone may split the dim, as in moax.param_specs, P(('fsdp', 'ep'), None, 'tp')",
        ),
        (CONFIG, "shared_wo", P(None, "stage"), "params.shared_wo has the layout P(None, 'stage'): dim 1 is sharded"),
        (LATENT, "latent_up", P("stage"), "params.latent_up has the layout P('stage', None): dim 0 is sharded over"),
        (CONFIG, "wi", P("ep", None, None, "stage"), "dim 3 is sharded over mesh axis 'stage'; the mesh axes"),
    ],
)
def test_a_weight_that_would_move_unquantized(config, name, spec, says):
    """Breaks if a weight crosses in full precision without a word, or the message does not name the weight, its layout,
    the mesh axis and what would be right."""
    mesh = make_mesh("tp2x2x2", "explicit")
    axes = moax.Axes()
    if "stage" in str(spec):
        kinds = (AxisType.Explicit,) * len(STAGES)
        mesh = jax.make_mesh(tuple(STAGES.values()), tuple(STAGES), axis_types=kinds)
        axes = OTHER
    specs = dataclasses.replace(moax.param_specs(config, axes, mesh=mesh), **{name: spec})
    with jax.set_mesh(mesh):
        params = put(mesh, specs, make_params(config))
        with pytest.raises(ValueError, match=re.escape(says)):
            moax.moe(ARRAYS["x"], params, config, axes=axes)


def test_gate_and_up_on_two_devices():
    """Breaks if the public `activate` raises an error of JAX that names no argument where axes split gate and up."""
    mesh = make_mesh("tp2x2x2", "explicit")
    with jax.set_mesh(mesh):
        h = jax.device_put(random(1, 16, 2, 8), P("fsdp", "tp"))
        with pytest.raises(ValueError, match=r"h has the layout .*: dim 1 is sharded over mesh axes \['tp'\]; "):
            ops.activate(h, "swiglu")
