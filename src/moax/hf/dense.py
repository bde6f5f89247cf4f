"""The FFN of a dense checkpoint -> MoEParams whose block computes the same function.

With a dense width D and experts of width F there are D / F shards. Expert e is the shard e mod (D / F) of the dense
FFN: columns of gate and up, and rows of down. E = 8 experts of D / F = 2 shards are four copies of the dense FFN.

    expert[e](x) = act(x gate[:, e], x up[:, e]) down[e] s         s = (D / F) / (sum of a token's K weights)

The experts of a copy have the same column of the router, so their logits are equal: a token takes K / (D / F) copies,
each of them whole, and the weighted sum is the dense FFN (He et al., "Upcycling LLMs into Mixture of Experts", 2024,
whose word for a copy is a virtual group; Komatsuzaki et al., "Sparse upcycling", 2022, for D = F).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from moax.checks import check_key, check_kind, is_number
from moax.config import MoEConfig
from moax.errors import Unsupported
from moax.hf.blocks import Block, assemble
from moax.hf.files import Checkpoint
from moax.hf.load import find_dtype
from moax.hf.names import LAYER
from moax.hf.stored import Stored, locate
from moax.mesh.axes import Axes
from moax.mesh.place import named
from moax.params import DIMS, MoEParams, param_shapes, params_by_name
from moax.sharding import param_specs

# The names of gate, up and down in a dense layer: most families, and Llama's own files.
NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def upcycle(
    source: Mapping[str, Any] | str | Path,
    config: MoEConfig,
    *,
    layer: int | None = None,
    prefix: str | None = None,
    key: PRNGKeyArray | Array | None = None,
    noise: float = 0.02,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    axes: Axes = Axes(),
) -> MoEParams[jax.Array]:
    """Makes the parameters of an MoE layer that computes the FFN of a dense layer.

    The block equals the dense FFN, to rounding, for every router whose K weights sum to a constant: those that
    normalize, and `topk_then_score`. With other routers it does for a router of zeros.

    Args:
      source: a `Checkpoint`, the path of one, or a mapping from names to NumPy or JAX arrays. The FFN is
        `gate_proj.weight` and `up_proj.weight` [D, H] and `down_proj.weight` [H, D], or `w1`, `w3` and `w2`; without a
        gate it has `up_proj` and `down_proj` alone. A host holds one of these matrices at a time.
      config: the block to make. Its d_ff F divides D; D / F divides num_experts and top_k. Its activation must be that
        of the dense FFN, which the names do not say.
      layer: the names of the FFN contain `layers.{layer}.` or `blocks.{layer}.`, after any start.
      prefix: the names of the FFN start with this prefix, such as `model.layers.3.mlp.`; give it or `layer`, or neither
        where all names belong to the FFN.
      key: a PRNG key for the noise of the router; None makes a router of zeros, which sends every token to the first
        experts until training has moved it.
      noise: the standard deviation of the router's elements.
      dtype: the dtype of the parameters; None takes that of the checkpoint.
      mesh: the mesh of the parameters. None takes the mesh that `jax.set_mesh` set, else the first device.
      axes: the roles of mesh axes. The parameters lie as `param_specs` says.

    Returns:
      MoEParams. s multiplies `wo`: exactly where it is a power of two. Biases are None, `logits_bias` and `router_bias`
      are 0, and `expert_scale` is 1.

    Raises:
      ValueError: a tensor is missing, sizes do not divide, both `layer` and `prefix` are given, or the mesh axes of a
        dim do not divide it.
      Unsupported: the config has a shared expert or weights at the input, or the dense FFN has biases.
    """
    check_kind("config", config, MoEConfig)
    if key is not None:
        check_key("key", key)
    if not is_number(noise) or not 0 <= noise < math.inf:
        raise ValueError(f"noise={noise!r} must be a finite number of at least 0")
    if config.shared_d_ff or config.weights_at == "input":
        option = f"shared_d_ff={config.shared_d_ff}" if config.shared_d_ff else "weights_at='input'"
        raise Unsupported(f"config has {option}; upcycle makes routed experts whose weights multiply their output")
    state = Checkpoint(source) if isinstance(source, str | Path) else source
    tensors = _find(state, layer, prefix, config)
    shards = _count_shards(tensors, config)
    to = find_dtype([(None, stored) for stored in tensors.values()], dtype)
    mesh = mesh or jax.sharding.get_mesh()
    shardings = None if mesh.empty else named(mesh, param_specs(config, axes, mesh))
    made = {"wi": _first(tensors, shards, config, to), "wo": _second(tensors["down"], shards, config, to)}
    shapes = param_shapes(config)
    small = {"router": _router(key, noise, shards, config), "logits_bias": 0.0, "router_bias": 0.0, "expert_scale": 1.0}
    for name, value in small.items():
        shape = getattr(shapes, name)
        if shape is not None:
            made[name] = iter([Block((0,) * len(shape), shape, functools.partial(_filled, shape, value, to))])
    fields = dict.fromkeys(DIMS)
    for name, blocks in made.items():
        on = getattr(shardings, name) if shardings else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        fields[name] = assemble(getattr(shapes, name), to, on, blocks)
    return params_by_name(fields)


def _find(state: Mapping[str, Any], layer: int | None, prefix: str | None, config: MoEConfig) -> dict[str, Stored]:
    """Returns the tensors `gate` (where the activation has one), `up` and `down`; raises as `upcycle`."""
    if layer is not None and prefix is not None:
        raise ValueError(f"layer={layer} and prefix={prefix!r}: give one of them")
    found = {}
    for names in NAMES:
        for name in state:
            start, ends = name.removesuffix(f"{names[-1]}.weight"), name.endswith(f"{names[-1]}.weight")
            number = LAYER.match(name)
            here = start == (prefix or "") if layer is None else number is not None and int(number[1]) == layer
            if ends and here and "expert" not in start and start[-1:] in ("", "."):
                found[start] = names
    if len(found) != 1:
        where = repr(prefix or "") if layer is None else f"layer={layer}"
        what = f"the dense FFNs {', '.join(sorted(found))}: give prefix= of one" if found else "no dense FFN"
        raise ValueError(f"{where} has {what}; its names end with down_proj.weight or w2.weight")
    ((start, names),) = found.items()
    if biases := [name for name in state if name.startswith(start) and name.endswith(".bias")]:
        raise Unsupported(f"{biases[0]}: upcycle reads an FFN without biases")
    wanted = dict(zip(("gate", "up", "down"), names, strict=True))
    gate = locate(state, f"{start}{wanted['gate']}.weight")
    if (gate is not None) != (config.gates == 2):
        raise ValueError(
            f"{start}{wanted['gate']}.weight is {'in' if gate else 'not in'} the checkpoint, and activation="
            f"{config.activation!r} {'needs it' if config.gates == 2 else 'has no gate'}"
        )
    tensors = {part: locate(state, f"{start}{name}.weight") for part, name in wanted.items()}
    if tensors["up"] is None:
        raise ValueError(f"{start}{wanted['up']}.weight is not in the checkpoint")
    return {part: stored for part, stored in tensors.items() if stored is not None}


def _count_shards(tensors: Mapping[str, Stored], config: MoEConfig) -> int:
    """Returns D / F; raises ValueError where a size does not fit."""
    for stored in tensors.values():
        stored.check()
    width, dense = tensors["down"].shape()
    for part, stored in tensors.items():
        want = (width, dense) if part == "down" else (dense, width)
        if stored.shape() != want or width != config.d_model:
            fits = (config.d_model, dense) if part == "down" else (dense, config.d_model)
            raise ValueError(f"{stored.name} has shape {stored.shape()}; d_model={config.d_model} needs {fits}")
    shards, rest = divmod(dense, config.d_ff)
    if rest:
        raise ValueError(f"config.d_ff={config.d_ff} must divide the width {dense} of the dense FFN")
    for name, value in (("num_experts", config.num_experts), ("top_k", config.top_k)):
        if value % shards:
            raise ValueError(f"config.{name}={value} must be a multiple of the {shards} shards of width {config.d_ff}")
    if config.num_experts // config.router.num_groups % shards:
        raise ValueError(
            f"num_groups={config.router.num_groups} leaves groups of {config.num_experts // config.router.num_groups} "
            f"experts; each must hold whole copies of {shards} experts"
        )
    return shards


def _first(tensors: Mapping[str, Stored], shards: int, config: MoEConfig, dtype: np.dtype) -> Iterator[Block]:
    """Yields the blocks of wi [E, H, G, F], one projection after the other."""
    shape = (1, config.d_model, 1, config.d_ff)
    for g, part in enumerate(part for part in ("gate", "up") if part in tensors):
        whole = functools.cache(functools.partial(tensors[part].read, None, dtype))  # one matrix in memory

        def read(shard: int, whole=whole) -> np.ndarray:
            return whole()[shard * config.d_ff : (shard + 1) * config.d_ff].T.reshape(shape)

        for e in range(config.num_experts):
            yield Block((e, 0, g, 0), shape, functools.partial(read, e % shards))


def _second(down: Stored, shards: int, config: MoEConfig, dtype: np.dtype) -> Iterator[Block]:
    """Yields the blocks of wo [E, F, H], times s."""
    shape, factor = (1, config.d_ff, config.d_model), np.float32(shards / sum_of_weights(config))
    whole = functools.cache(functools.partial(down.read, None, dtype))

    def read(shard: int) -> np.ndarray:
        part = whole()[:, shard * config.d_ff : (shard + 1) * config.d_ff].T.reshape(shape)
        return (part.astype(np.float32) * factor).astype(dtype)

    for e in range(config.num_experts):
        yield Block((e, 0, 0), shape, functools.partial(read, e % shards))


def sum_of_weights(config: MoEConfig) -> float:
    """Returns the sum of a token's K weights where its logits are all 0."""
    router, top_k = config.router, config.top_k
    softmax = 1 / (top_k if router.order == "topk_then_score" else config.num_experts)
    one = {"softmax": softmax, "sigmoid": 0.5, "sqrt_softplus": math.sqrt(math.log(2))}[router.score]
    return router.scale * (1.0 if router.normalize and top_k > 1 else top_k * one)


def _router(key, noise: float, shards: int, config: MoEConfig) -> np.ndarray:
    """Returns the router [H, E] f32: one random column for each copy, for all experts of the copy."""
    copies = config.num_experts // shards
    if key is None:
        return np.zeros((config.d_model, config.num_experts), np.float32)
    columns = noise * np.asarray(jax.random.normal(key, (config.d_model, copies), jnp.float32))
    return np.repeat(columns, shards, axis=1)


def _filled(shape: tuple[int, ...], value: Any, dtype: np.dtype) -> np.ndarray:
    """Returns an array of this shape with these values, or this value everywhere."""
    return np.broadcast_to(value, shape).astype(dtype)
