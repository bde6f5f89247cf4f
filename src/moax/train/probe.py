"""What FP8 does to a state: the error of each gradient by expert, and the values that quantization loses.

error[l, e] = |d - d32| / |d32|        d: the gradient of one projection of expert e, d32: the same in float32
underflow   a value that is not 0 and becomes 0        saturated   a value that becomes the largest of its format
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Float, UInt8

import moax
from moax import MoEParams, ops
from moax.hf.blocks import NO_MESH
from moax.kernels.scales import DTYPES
from moax.ops.permutation import weights_of_rows
from moax.recipe import FULL, Format, Recipes, get_recipes
from moax.train import model as lm
from moax.train import step as steps
from moax.train.presets import ModelConfig, TrainConfig

PROJECTIONS = ("gate", "up", "down")
# These programs run once. XLA would compile and time many kernels of its own for each of their products in float32, of
# which `kernels/xla` has one for each number of rows; cuBLAS has a kernel for each already.
ONCE = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def measure(
    state: steps.TrainState, batch: UInt8[Array, "B S1"], config: TrainConfig
) -> tuple[dict[str, Float[np.ndarray, "L E"]], dict[str, dict[str, list[int]]]]:
    """Returns the errors of the gradients of a state, and the values that its recipe loses.

    Args:
      state: the state of a run, on the mesh that is set.
      batch: [B, S + 1] u8, the batch of all gradients, which is one microbatch.
      config: the settings of the run.

    Returns:
      The errors of `errors`, and the counts of `lost_values`.
    """
    wi, wo, xs, dys = _gradients(state, batch, config)
    found = errors((wi, wo), _gradients(state, batch, _in_float32(config))[:2])
    return found, lost_values(state, xs, dys, config)


def errors(got: tuple[Array, Array], want: tuple[Array, Array]) -> dict[str, Float[np.ndarray, "L E"]]:
    """Returns the errors of gradients of wi and wo, by projection, layer and expert; NaN for an expert without a token.

    Args:
      got, want: gradients of wi [L, E, H, G, F] and wo [L, E, F, H].
    """

    @jax.jit
    def squares(got, want):
        off = [jnp.square(a - b) for a, b in zip(got, want, strict=True)]
        return [[v[0].sum((2, 4)), v[1].sum((2, 3))] for v in (off, [jnp.square(b) for b in want])]

    (wi, wo), (wi_all, wo_all) = jax.device_get(squares(got, want))
    with np.errstate(invalid="ignore", divide="ignore"):
        first, last = np.sqrt(wi / wi_all), np.sqrt(wo / wo_all)
    names = PROJECTIONS[-1 - first.shape[-1] :]  # without a gate: up and down
    found = {name: first[..., g] for g, name in enumerate(names[:-1])} | {names[-1]: last}
    return {name: np.where(np.isfinite(e), e, np.nan) for name, e in found.items()}


def lost_values(
    state: steps.TrainState, xs: Float[Array, "L B S H"], dys: Float[Array, "L B S H"], config: TrainConfig
) -> dict[str, dict[str, list[int]]]:
    """Counts the values of each operand that the recipe of a run loses, by layer.

    The operands are x and a (the rows of both products), dy and dh (their gradients), wi and wo, in the blocks of
    forward and dgrad. They are computed in float32 and on one device.

    Args:
      state, config: as in `measure`.
      xs, dys: the inputs of the MoE of each layer, and the gradients of its outputs.

    Returns:
      For each operand that the recipe quantizes, the counts `values` (those that are not 0), `underflow` and
      `saturated`, each a list over layers.
    """
    recipe = get_recipes(config.recipe)
    if all(of == FULL for of in recipe.both):
        return {}
    xs, dys, moe, bias = jax.device_get((xs, dys, state.params.layers.moe, state.router_bias))
    count = jax.jit(partial(_count, model=config.model, recipe=recipe), compiler_options=ONCE)
    found = []
    with jax.set_mesh(NO_MESH):
        for layer in range(config.model.num_layers):
            of = jax.tree.map(lambda v, i=layer: jnp.asarray(v[i]), (moe, xs, dys))
            found.append(jax.device_get(count(*of, None if bias is None else jnp.asarray(bias[layer]))))
    return {
        operand: {name: [int(row[operand][name]) for row in found] for name in ("values", "underflow", "saturated")}
        for operand in (found[0] if found else {})
    }


def _in_float32(config: TrainConfig) -> TrainConfig:
    """Returns the settings of the gradients to compare with, which are one program for all recipes."""
    return dataclasses.replace(config, recipe=None, dtype="float32", name="float32")


@partial(jax.jit, static_argnames="config", compiler_options=ONCE)
def _gradients(state: steps.TrainState, batch, config: TrainConfig):
    """Returns the gradients of wi and wo, the inputs of the MoE of each layer and the gradients of its outputs.

    Those of wi and wo are [L, E, ...], the others [L, B, S, H]. In float32, products are no TF32.
    """
    tokens, execution = batch.astype(jnp.int32), steps.execution(config)

    def block(x, *args, **keywords):
        y, stats = moax.moe(x, *args, **keywords)
        return y, (stats, x)

    def loss(moe: MoEParams[Array], added):
        params = dataclasses.replace(state.params, layers=dataclasses.replace(state.params.layers, moe=moe))
        logits, (stats, xs) = lm.forward(
            params, state.router_bias, tokens[:, :-1], config.model, execution, block, added=added
        )
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return entropy + stats.aux_loss.sum() + stats.z_loss.sum(), xs

    shape = (config.model.num_layers, batch.shape[0], batch.shape[1] - 1, config.model.d_model)
    with jax.default_matmul_precision("highest" if config.dtype == "float32" else "default"):
        grads, xs = jax.grad(loss, (0, 1), has_aux=True)(state.params.layers.moe, jnp.zeros(shape, config.dtype))
    return grads[0].wi, grads[0].wo, xs, grads[1]


def _count(moe: MoEParams[Array], x, dy, bias, model: ModelConfig, recipe: Recipes) -> dict[str, dict[str, Any]]:
    """Returns the counts of one layer, for its inputs x and the gradients dy of its outputs, both [B, S, H]."""
    config, rows_of = model.moe(), partial(ops.permute, num_groups=model.num_experts)
    x, dy = (v.reshape(-1, model.d_model).astype(jnp.float32) for v in (x, dy))
    chosen = moax.route(ops.router_logits(x, moe.router), config.router, config.top_k, bias)
    rows, plan = rows_of(x, chosen.experts)
    d_rows, _ = rows_of(dy, chosen.experts)
    h = ops.grouped_matmul(rows, moe.wi, plan.group_sizes)
    a, pull = jax.vjp(lambda h: ops.activate(h, config.activation, config.activation_limit), h)
    d_a = ops.grouped_matmul(d_rows, moe.wo.swapaxes(1, 2), plan.group_sizes)
    (d_h,) = pull(d_a * weights_of_rows(plan, chosen.weights)[:, None])
    first, last = recipe.both
    operands = dict(x=(rows, first.x), a=(a, last.x), dy=(d_rows, last.dy), dh=(d_h, first.dy))
    operands |= dict(wi=(moe.wi.reshape(*moe.wi.shape[:2], -1), first.w), wo=(moe.wo, last.w))
    return {
        name: _lost(value.reshape(len(value), -1) if name[0] != "w" else value, format)
        for name, (value, format) in operands.items()
        if format is not None
    }


def _lost(value: Float[Array, "..."], format: Format) -> dict[str, Array]:
    """Returns the counts of one operand: rows [N, C], or a weight [E, K, C]."""
    block = format.row_block(2, "columns") if value.ndim == 2 else format.weight_block(3, "rows")
    data = ops.quantize(value, format, block=block).data
    data = lax.bitcast_convert_type(data, DTYPES[format.dtype]).astype(jnp.float32)
    real = value != 0
    return dict(values=real.sum(), underflow=(real & (data == 0)).sum(), saturated=(jnp.abs(data) == format.max).sum())
