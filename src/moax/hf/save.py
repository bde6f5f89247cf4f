"""MoEParams -> tensors with the names of a published model, in memory or as safetensors files.

The inverse of `moax.hf.load`: one expert at a time is copied from the devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moax.config import MoEConfig
from moax.errors import Unsupported
from moax.hf.config import config_to_hf
from moax.hf.dequantize import QUANTIZED
from moax.hf.families import layout_of, layouts_of
from moax.hf.files import NAMES, Output, find_entry, write_files
from moax.hf.load import NO_MESH, has_experts, overlap
from moax.hf.tensor_layouts import LAYER, Tensor, block_test, resolve, tensors_of
from moax.params import DIMS, MoEParams, check_params, param_shapes

SHARD_BYTES = 5 * 2**30
_read = jax.jit(lax.dynamic_slice, static_argnums=2)


def params_to_hf(
    params: MoEParams[jax.Array],
    config: MoEConfig,
    model_type: str,
    *,
    layer: int | None = None,
    prefix: str | None = None,
    stacked: bool | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> dict[str, np.ndarray]:
    """Returns the parameters of a layer under the names of a published model, as contiguous arrays.

    `params_from_hf` reads the result back bit for bit.

    Args:
      params: see `MoEParams`; their arrays may have any sharding over the devices of this process.
      config: see `MoEConfig`.
      model_type: one of `MODEL_TYPES`.
      layer: each name starts as in a published model of this type: `model.layers.{layer}.` and the name of the block.
      prefix: each name starts with this prefix. Without `layer` and `prefix`, names start as in the block.
      stacked: True stacks the experts, as transformers 5 holds them in memory; None does as the published model.
      dtype: dtype of the tensors; the selection bias keeps its own. None keeps that of the parameters.

    Raises:
      ValueError: the params do not fit the config, a bias is None, or an array lies on devices of other processes.
      Unsupported: the model cannot have this config, or has no such layout.
    """
    if layer is not None and prefix is not None:
        raise ValueError(f"layer={layer} and prefix={prefix!r}: give one of them")
    if layer is not None:
        layout = layout_of(model_type, stacked)
        prefix = layout.prefix(f"{layout.stem}{layer}.")
    outputs = _outputs(params, config, model_type, prefix or "", stacked, dtype)
    return {
        name: np.concatenate([part.reshape(-1) for part in output.parts()]).reshape(output.shape)
        for name, output in outputs.items()
    }


def save_hf(
    folder: str | Path,
    layers: Mapping[int, MoEParams[jax.Array]],
    config: MoEConfig,
    model_type: str,
    *,
    others: Mapping[str, Any] | None = None,
    hf_config: Mapping[str, Any] | None = None,
    stacked: bool | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes a checkpoint: config.json, safetensors files, and their index where there are several files.

    This host holds one expert in memory at a time. To write a fine-tuned model back, pass the checkpoint that it came
    from as `others`.

    Args:
      folder: the folder, which is made where it is missing; it must hold no safetensors files.
      layers: the parameters of each MoE layer, by the index of the layer.
      config, model_type, stacked, dtype: as for `params_to_hf`.
      others: the other tensors of the model, by name: a `Checkpoint`, or arrays. They are copied as they are, without
        those of the blocks in `layers`.
      hf_config: further values of config.json. The values that `config` decides override them.
      shard_bytes: the most bytes of the tensors of one file; a single larger tensor has a file of its own.

    Returns:
      The paths of the safetensors files.

    Raises:
      ValueError: the folder holds safetensors files, or `params_to_hf` raises it.
      Unsupported: `params_to_hf` raises it, or `others` are quantized, since one config.json cannot describe both.
    """
    folder, outputs = Path(folder), {}
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes} must be at least 1")
    if any(folder.glob("*.safetensors")):
        raise ValueError(f"folder {str(folder)!r} holds safetensors files already; give a new one")
    ours, others = config_to_hf(config, model_type), others or {}
    stem, layout = _stem(others, model_type), layout_of(model_type, stacked)
    for layer, params in layers.items():
        outputs |= _outputs(params, config, model_type, layout.prefix(f"{stem}{layer}."), stacked, dtype)
    replaced = {  # whether a tensor belongs to a block that is written anew, by the start of its name
        at: [block_test(old.prefix(at), old) for old in layouts_of(model_type)]
        for at in (f"{stem}{layer}." for layer in layers)
    }
    for name in others:
        match = LAYER.match(name)
        if not (match and any(test(name) for test in replaced.get(match[0], ()))):
            outputs[name] = _copy(others, name)
    folder.mkdir(parents=True, exist_ok=True)
    values = dict(hf_config or {}) | ours
    values.pop("quantization_config", None)  # The files hold no quantized tensors.
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return write_files(folder, outputs, shard_bytes)


def _stem(others: Mapping[str, Any], model_type: str) -> str:
    """Returns the part before a layer's number in the names of the MoE layers in `others`; else the published one."""
    stems = {m[0]: m[0][: m.start(1)] for m in map(LAYER.match, others) if m}
    blocks = [(at, layout) for at in stems for layout in layouts_of(model_type)]
    moe = {stems[at] for at, layout in blocks if has_experts(others, layout.prefix(at), layout)}
    found = sorted(moe or set(stems.values())) or [layout_of(model_type, None).stem]
    if len(found) > 1:
        raise Unsupported(f"others: layers start with {' and with '.join(map(repr, found))}; pass one model")
    return found[0]


def _outputs(params, config, model_type, prefix, stacked, dtype) -> dict[str, Output]:
    """Returns every tensor of a block, by name; raises as `params_to_hf`."""
    config_to_hf(config, model_type)  # It raises where no model of this type has the config.
    check_params(params, config)
    for field, want in (("bi", param_shapes(config).bi), ("bo", param_shapes(config).bo)):
        value = getattr(params, field)
        if value is None and want is not None:
            raise ValueError(f"params.{field} is None; this config needs an array of shape {want}")
        if value is not None and want is None:
            raise Unsupported(f"params.{field} of shape {value.shape} has no name in a {model_type} model")
    for field in DIMS:
        value = getattr(params, field)
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise ValueError(f"params.{field} lies on devices of other processes; copy it to this process first")
    tensors = tensors_of(layout_of(model_type, stacked), config)
    return {resolve(prefix, tensor.name): _output(getattr(params, tensor.field), tensor, dtype) for tensor in tensors}


def _output(value, tensor: Tensor, dtype: jax.typing.DTypeLike | None) -> Output:
    """Returns a tensor of the field `value` as it is written."""
    to = np.dtype(value.dtype if dtype is None or tensor.field == "router_bias" else dtype)
    if to not in NAMES or not jnp.issubdtype(to, jnp.floating) or to.itemsize < 2:
        raise ValueError(f"dtype={to} must be one of float64, float32, float16 and bfloat16")

    def parts() -> Iterator[np.ndarray]:
        for part in tensor.by_expert():
            yield part.from_params(_to_host(value, part.region).astype(to, copy=False))

    return Output(to, tensor.shape, parts)


def _to_host(array, region: tuple[slice, ...]) -> np.ndarray:
    """Returns a region of a JAX or NumPy array, from the shards that hold parts of it."""
    if not isinstance(array, jax.Array):
        return np.asarray(array[region])
    block = np.empty([cut.stop - cut.start for cut in region], array.dtype)
    shards = {str(shard.index): shard for shard in array.addressable_shards}  # This keeps one shard of equal replicas.
    with jax.set_mesh(NO_MESH):
        for shard in shards.values():
            if common := overlap(shard.index, region, array.shape):
                start, in_region = common
                block[in_region] = np.asarray(_read(shard.data, start, block[in_region].shape))
    return block


def _copy(state: Mapping[str, Any], name: str) -> Output:
    """Returns the tensor `name` of `others` as it is."""
    if name.endswith(QUANTIZED):
        raise Unsupported(f"others: {name} is quantized; convert the whole model first, or pass every MoE layer")
    entry = find_entry(state, name)
    if entry.dtype not in NAMES:
        raise ValueError(f"others: {name} has dtype {entry.dtype}, which safetensors does not have")
    return Output(entry.dtype, entry.shape, lambda: iter([entry.read()]))
