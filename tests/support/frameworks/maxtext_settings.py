"""One MaxText layer for each row of docs/how-to/maxtext-megatron.md, beside the same layer with moax's block."""

from __future__ import annotations

import dataclasses

from maxtext_rows import DEEPSEEK, NAME, THEIRS, configure
from rows import names_of, names_row, perturb, row, shape_of, worst

import jax  # isort: skip
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.configs import types
from maxtext.layers.initializers import nd_dense_init
from maxtext.layers.moe import MoEBiasVar, RoutedAndSharedMoE, RoutedMoE
from maxtext.utils import maxtext_utils

import moax
from moax import inspect
from moax.adapters import maxtext as adapter

BY_EXPERTS = dataclasses.replace(adapter.AXES, fsdp_dim="experts")
ONE = "ici_fsdp_parallelism=8"
SIGMOID_LOSS = """model_name=deepseek3-tiny first_num_dense_layers=1 routed_bias=False load_balance_loss_weight=0.01
moe_use_megatron_seq_aux_loss=True"""
LAYERS = [  # the setting of the row, MaxText's settings, options of moax, sequences
    ("norm_topk_prob=True", f"model_name=mixtral-8x7b norm_topk_prob=True {ONE}", {}, 8),
    ("norm_topk_prob=False", f"model_name=mixtral-8x7b norm_topk_prob=False {ONE}", {}, 8),
    (
        "routed_score_func=softmax, DeepSeek",
        f"model_name=deepseek2-16b routed_scaling_factor=2.5 {ONE}",
        {},
        8,
    ),
    ("routed_score_func=sigmoid, groups, scale", f"{DEEPSEEK} {ONE}", {}, 8),
    ("routed_bias_update_rate", f"{DEEPSEEK} routed_bias_update_rate=0.001 {ONE}", {}, 8),
    (
        "routed_bias_update_rate, counts of a microbatch",
        f"{DEEPSEEK} routed_bias_update_rate=0.001 gradient_accumulation_steps=2 {ONE}",
        {},
        8,
    ),
    ("prefuse_moe_weights", f"model_name=mixtral-8x7b prefuse_moe_weights=True {ONE}", {}, 8),
    ("mlp_activations_limit, DeepSeek", f"{DEEPSEEK} mlp_activations_limit=0.5 {ONE}", {}, 8),
    ("routed_bias, mlp_bias, GPT-OSS", f"model_name=gpt-oss-20b {ONE}", {}, 8),
    (
        "load_balance_loss_weight, one sequence",
        "model_name=mixtral-8x7b load_balance_loss_weight=0.01",
        {},
        1,
    ),
    ("moe_use_megatron_seq_aux_loss, one sequence", SIGMOID_LOSS, {}, 1),
    (
        "shard_exp_on_fsdp",
        f"model_name=mixtral-8x7b shard_exp_on_fsdp=True {ONE}",
        dict(axes=BY_EXPERTS),
        8,
    ),
]


def make(settings: str, sequences: int, kind=RoutedMoE):
    """Returns a layer of MaxText as a function of its parameters, the parameters, x, the config and the mesh."""
    config = configure(settings)
    mesh = maxtext_utils.get_mesh_from_config(config, None if sequences > 1 else jax.devices()[:1])
    common = dict(
        config=config,
        mesh=mesh,
        kernel_init=nd_dense_init(1.0, "fan_in", "truncated_normal"),
        kernel_axes=("embed", None),
        dtype=config.dtype,
        weight_dtype=config.weight_dtype,
    )
    if kind is RoutedMoE:
        common |= dict(
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            intermediate_dim=config.moe_mlp_dim,
        )
    layer = kind(**common, rngs=nnx.Rngs(params=0))
    graph, params, rest = nnx.split(layer, (nnx.Param, MoEBiasVar), ...)
    x = jax.random.normal(jax.random.key(3), (sequences, 32, config.emb_dim))
    return lambda params, x: nnx.merge(graph, params, rest, copy=True)(x), jax.jit(perturb)(params), x, config, mesh


def layer_results(settings: str, sequences: int, call, kind=RoutedMoE):
    """Returns (y, balance loss, update of the bias), the gradients of x and of all parameters, and the mesh."""
    RoutedMoE.__call__ = call
    run, params, x, config, mesh = make(settings, sequences, kind)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        dy = jax.random.normal(jax.random.key(4), x.shape)

        def loss(params, x):
            y, balance, update = run(params, x)
            balance = 0.0 if balance is None else balance
            return jnp.vdot(y, dy) + 100 * balance, (y, balance, () if update is None else update)

        (_, outputs), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, x)
    return outputs, jax.tree.map(jnp.asarray, (nnx.to_pure_dict(grads[0]), grads[1])), mesh


def settings() -> None:
    """Prints a row for each of LAYERS."""
    for what, settings, options, sequences in LAYERS:
        want, want_grads, mesh = layer_results(settings, sequences, THEIRS)
        adapter.install(**options)
        got, got_grads, _ = layer_results(settings, sequences, RoutedMoE.__call__)
        row(
            NAME,
            what,
            shape_of(mesh),
            None,
            layer=worst(got, want),
            gradients=worst(got_grads, want_grads),
        )


def pair(tree, axis: int):
    """Returns the weights of gate and up, stacked."""
    return jnp.stack([tree["wi_0"], tree["wi_1"]], axis)


def shared_experts() -> None:
    """Prints the row of `shared_experts`: MaxText's two layers are one block of moax with `shared_d_ff`."""
    RoutedMoE.__call__ = THEIRS
    run, params, x, config, mesh = make(f"{DEEPSEEK} shared_experts=2", 1, RoutedAndSharedMoE)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        want = run(params, x)[0]
        values = nnx.to_pure_dict(params)
        routed = values["MoeBlock_0"]
        shared = values["shared_experts"]
        kernels = {name: shared[name]["kernel"] for name in ("wi_0", "wi_1", "wo")}
        router = moax.RouterConfig(
            score="sigmoid",
            bias=True,
            num_groups=4,
            top_groups=2,
            scale=config.routed_scaling_factor,
        )
        width = kernels["wo"].shape[0]
        ours = moax.MoEConfig(64, 128, 8, 4, router=router, shared_d_ff=width)
        weights = moax.MoEParams(
            routed["gate"]["kernel"],
            pair(routed, 2),
            routed["wo"],
            router_bias=routed["gate"]["bias"],
            shared_wi=pair(kernels, 1),
            shared_wo=kernels["wo"],
        )
        got = moax.moe(x, weights, ours, axes=adapter.AXES)[0]
    row(NAME, f"shared_experts=2, {width} wide", shape_of(mesh), None, layer=worst(got, want))


def wire() -> None:
    """Prints how many bytes of floats cross for weights with fp8_block in MaxText's layout: there must be none."""
    settings = "model_name=mixtral-8x7b ici_fsdp_parallelism=2 ici_expert_parallelism=2 ici_tensor_parallelism=2"
    adapter.install(recipe="fp8_block")
    run, params, x, config, mesh = make(settings, 8)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        wi = ("expert", "fsdp", "tensor")
        specs = dict(wi_0=wi, wi_1=wi, wo=("expert", "tensor", "fsdp"))

        def place(path, value):
            return jax.device_put(
                value,
                jax.NamedSharding(mesh, jax.P(*specs.get(path[0].key, ()))),
            )

        params = jax.tree_util.tree_map_with_path(place, params)
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P(("fsdp", "expert"))))
        step = jax.jit(jax.grad(lambda params, x: run(params, x)[0].sum()))
        traffic = inspect.collectives(step, params, x, mesh=mesh)
    gathers = inspect.weight_gathers(traffic, adapter.AXES.fsdp)
    wide = sum(c.bytes for c in gathers if c.dtype != "uint8" and c.size >= 64 * 64)
    assert any(c.dtype == "uint8" for c in gathers), "no weight crosses fsdp as bytes"
    row(
        NAME,
        "bytes of weights that cross fsdp as floats",
        shape_of(mesh),
        "fp8_block",
        limit=0,
        bytes=float(wide),
    )


def names() -> None:
    """Prints how many of MaxText's names on the page are no fields of its config."""
    names_row(
        NAME,
        names_of("maxtext-megatron.md", "MaxText"),
        set(types.MaxTextConfig.model_fields),
    )


if __name__ == "__main__":
    names()
    settings()
    shared_experts()
    wire()
