"""Every public function that takes or returns parameters runs on Auto axes, on Explicit axes, and without a mesh.

Covers: the public names of moax and of its public modules; eagerly and under jit; values equal those without a mesh.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import hf, lora
from moax.params import reshard_params
from support import TOKENS, make_mesh, make_params, put, random, rel_error, rel_norm, spec
from support.block import MESH

# tp splits F into whole blocks of 128, so that every mesh has the scales of one device.
CONFIG = moax.MoEConfig(64, 256, 8, 2, router=moax.RouterConfig(bias=True))
HF = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 8,
    "num_experts_per_tok": 2, "num_hidden_layers": 1,
}  # fmt: skip
MESHES = ["2x4", "tp2x2x2"]
WAYS = ["custom_partitioning", "explicit"]
RANK = 4


class Operands:
    """The operands of the cases, on the mesh in force."""

    def __init__(self, mesh: str | None, way: str):
        self.mesh = None if mesh is None else make_mesh(mesh, way)
        params = make_params(CONFIG)
        adapters = self.make_adapters()
        x = random(1, 64, CONFIG.d_model)
        if mesh is not None:
            params = put(self.mesh, moax.param_specs(CONFIG, mesh=self.mesh), params)
            specs = dataclasses.replace(
                lora.adapter_specs(CONFIG, mesh=self.mesh),
                scale=adapters.scale,
            )
            adapters = put(self.mesh, specs, adapters)
            x = put(self.mesh, spec(mesh, TOKENS), x)
        self.params = params
        self.adapters = adapters
        self.x = x

    def make_adapters(self) -> lora.Adapters:
        shapes = lora.adapter_shapes(CONFIG, RANK)
        arrays = {name: random(i, *shape) for i, (name, shape) in enumerate(vars(shapes).items()) if name != "scale"}
        return lora.Adapters(**arrays, scale=0.5)


def quantized_bytes(o: Operands) -> list:
    """The bytes of wi and wo; with tp their scales lie in another order."""
    quantized = moax.quantize_params(o.params, CONFIG, recipe="fp8_block", dtype=jnp.float32)
    return [shard.data for shard in (*quantized.wi, *quantized.wo)]


# name -> a function of the operands; what it returns is compared with that without a mesh.
CASES: dict[str, Callable[[Operands], Any]] = {
    "moax.init": lambda o: moax.init(jax.random.key(0), CONFIG),
    "moax.moe": lambda o: moax.moe(o.x, o.params, CONFIG)[0],
    "moax.quantize_params": quantized_bytes,
    "moax.trainable_mask": lambda o: moax.trainable_mask(o.params),
    "moax.update_router_bias": lambda o: moax.update_router_bias(
        o.params.router_bias, jnp.arange(8, dtype=jnp.int32), rate=0.1
    ),
    "moax.lora.init": lambda o: lora.init(jax.random.key(0), CONFIG, RANK),
    "moax.lora.merge": lambda o: lora.merge(o.params, o.adapters),
    "moax.lora.scaled": lambda o: lora.scaled(o.adapters),
    "moax.params.reshard_params": lambda o: (
        o.params if o.mesh is None else reshard_params(o.params, moax.param_specs(CONFIG, mesh=o.mesh))
    ),
}
# These functions read and write files.
EAGER = {"moax.hf.params_from_hf", "moax.hf.params_to_hf", "moax.hf.save_hf"}
# These take no parameters, or read their types alone.
WITHOUT = {
    "moax.make_mesh",
    "moax.load_metrics",
    "moax.route",
    "moax.param_specs",
    "moax.params.param_shapes",
    "moax.params.param_dtype_of",
    "moax.params.check_params",
    "moax.params.token_spec",
    "moax.params.operand_shapes",
    "moax.params.dense_spec_on",
    "moax.params.dense_spec",
    "moax.params.expert_specs",
    "moax.params.shard_specs",
    "moax.lora.dim_sizes",
    "moax.lora.adapter_shapes",
    "moax.lora.adapter_specs",
    "moax.lora.check_adapters",
    "moax.hf.config_from_hf",
    "moax.hf.config_to_hf",
    "moax.hf.moe_layers",
}


def public_functions() -> set[str]:
    """The public functions of moax, and of its modules whose functions take parameters."""
    results = {f"moax.{name}" for name in moax._HOMES if isinstance(getattr(moax, name), types.FunctionType)}
    for module in ("moax.lora", "moax.hf", "moax.params"):
        for name, value in vars(importlib.import_module(module)).items():
            own = inspect.isfunction(value) and value.__module__.startswith(module)
            if own and not name.startswith("_") and moax._HOMES.get(name) != module:
                results.add(f"{module}.{name}")
    return results


def test_every_public_function_has_a_case():
    """Breaks if a public name takes or returns parameters, and no case of this file runs it on meshes."""
    assert public_functions() == {*CASES, *EAGER, *WITHOUT}


def assert_equal(got, want) -> None:
    """Compares two trees of results."""
    leaves = jax.tree.leaves(got)
    wanted = jax.tree.leaves(want)
    assert len(leaves) == len(wanted)
    for a, b in zip(leaves, wanted, strict=True):
        assert rel_error(np.asarray(a, np.float32), np.asarray(b, np.float32)) < MESH


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", CASES)
def test_runs_on_every_mesh(name, mesh, way, jitted):
    """Breaks if a public function of parameters raises on Auto or on Explicit axes, eagerly or under jit, or if its
    results depend on the mesh."""
    case = CASES[name]
    want = case(Operands(None, way))
    operands = Operands(mesh, way)
    with jax.set_mesh(operands.mesh):
        got = (
            jax.jit(case_of(case, operands))(operands.params, operands.adapters, operands.x)
            if jitted
            else case(operands)
        )
    assert_equal(got, want)


def case_of(case, operands: Operands):
    """The case as a function of arrays, for jit."""

    def run(params, adapters, x):
        arguments = types.SimpleNamespace(params=params, adapters=adapters, x=x, mesh=operands.mesh)
        return case(arguments)

    return run


@pytest.mark.parametrize("way", WAYS)
def test_files_on_every_mesh(tmp_path, way):
    """Breaks if parameters on a mesh cannot be written to a checkpoint and read onto the mesh again."""
    config = hf.config_from_hf(HF)
    params = make_params(config)
    mesh = make_mesh("2x4", way)
    on_mesh = put(mesh, moax.param_specs(config, mesh=mesh), params)
    with jax.set_mesh(mesh):
        state = hf.params_to_hf(on_mesh, config, "mixtral")
        back = hf.params_from_hf(state, config, model_type="mixtral")
        hf.save_hf(tmp_path, {0: on_mesh}, config, "mixtral", hf_config=HF)
        saved = hf.params_from_hf(hf.Checkpoint(tmp_path), config, layer=0)
    for tree in (back, saved):
        assert_equal(tree, params)
        assert tree.wi.sharding.spec == on_mesh.wi.sharding.spec


@pytest.mark.parametrize(
    "entries",
    [(), ("ep",), (("ep", "fsdp"),), (None, "fsdp"), (None, None, "fsdp")],
)
def test_merge_takes_adapters_in_any_layout(entries):
    """Breaks if adapters that lie otherwise than weights on Explicit axes raise, or make other weights."""
    want = lora.merge(Operands(None, "explicit").params, Operands(None, "explicit").adapters)
    operands = Operands("2x4", "explicit")
    wi_a = jax.device_put(
        operands.adapters.wi_a,
        jax.sharding.NamedSharding(operands.mesh, jax.P(*entries)),
    )
    adapters = dataclasses.replace(operands.adapters, wi_a=wi_a)
    assert_equal(jax.jit(lora.merge)(operands.params, adapters), want)


@pytest.mark.parametrize("rule", ["sign", "quantile"])
def test_biases_and_counts_in_two_layouts(rule):
    """Breaks if a bias that lies otherwise than the counts on Explicit axes raises, or becomes another bias."""
    mesh = make_mesh("2x4", "explicit")
    bias = random(1, 2, 8)
    tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
    histogram = jnp.asarray(np.random.default_rng(0).integers(0, 9, (2, 8, 1000)), jnp.int32)
    want = moax.update_router_bias(
        bias,
        tokens,
        rule=rule,
        histogram=histogram if rule == "quantile" else None,
    )

    def place(x, *entries):
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P(*entries)))

    counts = place(tokens, "fsdp"), place(histogram, None, "fsdp")
    histogram = counts[1] if rule == "quantile" else None
    got = moax.update_router_bias(
        place(bias, None, "ep"),
        counts[0],
        rule=rule,
        histogram=histogram,
    )
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)  # a quantile less their mean is small


@pytest.mark.parametrize("way", WAYS)
def test_parameters_of_the_router_in_any_layout(way):
    """Breaks if a trainer cannot shard the small parameters of the router over fsdp, as it shards all others."""
    router = moax.RouterConfig(bias=True, logits_bias=True, expert_scale=True)
    config = moax.MoEConfig(64, 64, 8, 2, router=router)
    params = make_params(config)
    x = random(1, 64, 64)

    def gradients(params, x):
        return jax.jit(jax.grad(lambda p, x: jnp.sum(moax.moe(x, p, config)[0] ** 2)))(params, x)

    want = gradients(params, x)
    mesh = make_mesh("2x4", way)
    split = dict.fromkeys(("router_bias", "logits_bias", "expert_scale"), jax.P("fsdp"))
    specs = dataclasses.replace(moax.param_specs(config, mesh=mesh), **split)
    with jax.set_mesh(mesh):
        got = gradients(put(mesh, specs, params), put(mesh, spec("2x4", TOKENS), x))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_norm(a, b) < MESH
