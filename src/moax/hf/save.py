"""Writes MoEParams as the MoE layers of a checkpoint, one expert at a time.

It copies one matrix of one expert from the devices, and has no more than that in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moax.checks import Unsupported, check_value
from moax.config import MoEConfig
from moax.hf.blocks import PACKED, has_experts, match_block, stem_for
from moax.hf.config import change_config, config_to_hf, load_config, read_config
from moax.hf.families import family_of, layout_of, layouts_of
from moax.hf.files import INDEX, NAMES, QUANTIZED, Entry, Output, State, find_entry, write_files
from moax.hf.tensor_layouts import BlockLayout, Tensor, block_test, resolve, tensors_of
from moax.hf.weights import NO_MESH, Slices, config_file, overlap
from moax.params import MoEParams, check_params, param_shapes

SHARD_BYTES = 5 * 2**30
NUMBER = "{layer}"
_read = jax.jit(lax.dynamic_slice, static_argnums=2)


def params_to_hf(
    params: MoEParams[jax.Array],
    config: MoEConfig,
    model_type: str,
    *,
    layer: int | None = None,
    prefix: str | None = None,
    stacked: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
) -> dict[str, np.ndarray]:
    """Returns the parameters of a layer under the names of a published model; `params_from_hf` reads them bit for bit.

    Args:
      params: see `MoEParams`; their arrays may have any sharding over the devices of this process.
      config: see `MoEConfig`.
      model_type: one of `MODEL_TYPES`.
      layer: each name starts as in a published model of text: `model.layers.{layer}.` and the name of the block.
      prefix: each name starts with this prefix. Without `layer` and `prefix`, names start as in the block.
      stacked: whether to stack the experts, as transformers 5 holds them in memory, and not as the published model.
      dtype: dtype of the tensors; the selection bias keeps its own. None keeps that of the parameters.

    Raises:
      ValueError: the params do not fit the config, a bias is None, or an array lies on devices of other processes.
      Unsupported: no model of this type has this config.
    """
    layout = layout_of(model_type, stacked)
    if layer is not None and prefix is not None:
        raise ValueError(f"layer={layer} and prefix={prefix!r}: give one of them")
    if layer is not None:
        prefix = f"{layout.stem}{layer}.{layout.block}"
    arrays = {}
    for name, output in _outputs(params, config, model_type, prefix or "", layout, dtype).items():
        parts = [part.reshape(-1) for part in output.parts()]
        arrays[name] = np.concatenate(parts).reshape(output.shape)
    return arrays


def save_hf(
    folder: str | Path,
    layers: Mapping[int, MoEParams[jax.Array]],
    config: MoEConfig,
    model_type: str | None = None,
    *,
    others: Mapping[str, Any] | None = None,
    hf_config: Mapping[str, Any] | None = None,
    prefix: str | None = None,
    stacked: bool | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes a checkpoint: config.json, safetensors files, and their index where there are several files.

    This host holds one expert in memory at a time. To write a fine-tuned model back, pass the checkpoint that it came
    from as `others`.

    Args:
      folder: the folder, which is made where it is missing; it must hold no safetensors files, and no index of them.
      layers: the parameters of each MoE layer, by the index of the layer.
      config, dtype: as for `params_to_hf`.
      model_type: one of `MODEL_TYPES`. None takes that of the config.json of `others`, or of `hf_config`.
      others: the other tensors of the model, by name: a `Checkpoint`, or arrays. They are copied as they are, without
        those of the blocks in `layers`. A `Checkpoint` brings the config.json beside it.
      hf_config: further values of config.json, which replace those of `others`. Where they do not describe the MoE
        layers of `config`, the values that `config` decides are changed, in the `text_config` of a multimodal model.
        Without `others` and `hf_config`, config.json has those values alone.
      prefix: the names of the block of a layer start with this prefix, in which `{layer}` is the index of the layer:
        `mtp.layers.{layer}.mlp.`. None takes the start of the names of the model's own MoE layers in `others`.
      stacked: whether to stack the experts, as for `params_to_hf`. None writes them as `others` has them, and as the
        published model where `others` has none.
      shard_bytes: the most bytes of the tensors of one file; a single larger tensor has a file of its own.

    Returns:
      The paths of the safetensors files.

    Raises:
      ValueError: the folder holds safetensors files or their index; `others` has no config.json and `hf_config` is
        None; `model_type` and config.json are of two families; `prefix` lacks `{layer}`; or `params_to_hf` raises it.
      Unsupported: `params_to_hf` raises it; `others` are quantized, since config.json says that no tensor is; or
        `others` have two stacks of MoE layers, of which `prefix` names none.
    """
    folder = Path(folder)
    others = others or {}
    check_value("shard_bytes", shard_bytes, int)
    for path in (*sorted(folder.glob("*.safetensors")), folder / INDEX):
        if path.is_file():
            raise ValueError(f"folder {str(folder)!r} holds {path.name} already; give a new one")
    if prefix is not None and NUMBER not in prefix:
        raise ValueError(f"prefix={prefix!r} must have {NUMBER} for the index of a layer: 'mtp.layers.{NUMBER}.mlp.'")
    values = _base_config(others, hf_config)
    model_type = _check_type(values, model_type)
    written = change_config(values, config, model_type)
    layouts = layouts_of(model_type)
    stem = stem_for(others, layouts) if prefix is None else None

    def block_of(layer: int, layout: BlockLayout) -> str:
        if prefix is None:
            return f"{stem}{layer}.{layout.block}"
        return prefix.replace(NUMBER, str(layer))

    if stacked is None:
        blocks = [(block_of(layer, layout), layout) for layer in layers for layout in layouts]
        layout = _layout_in(others, config, blocks) or layouts[0]
    else:
        layout = layout_of(model_type, stacked)
    outputs = {}
    replaced = []
    for layer, params in layers.items():
        block = block_of(layer, layout)
        outputs |= _outputs(params, config, model_type, block, layout, dtype)
        # The old tensors may have the names of another layout, whose block may have another name in its layer.
        start = block.removesuffix(layout.block)
        for old_layout in layouts:
            old_block = start + old_layout.block if block.endswith(layout.block) else block
            replaced.append(block_test(old_block, old_layout))
    for name in others:
        if not any(belongs(name) for belongs in replaced):
            outputs[name] = _copy(others, name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return write_files(folder, outputs, shard_bytes)


def _base_config(others: State, hf_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the values of config.json before those of the MoE layers are changed."""
    file = config_file(others)
    if others and file is None and hf_config is None:
        raise ValueError("others has no config.json beside it; give hf_config=, the values of the model's config.json")
    return {**(load_config(file) if file else {}), **(hf_config or {})}


def _check_type(values: Mapping[str, Any], model_type: str | None) -> str:
    """Returns the model type: the given one, which must be of the family of config.json, else that of config.json."""
    type_of_config = read_config(values).get("model_type")
    if model_type is None:
        if type_of_config is None:
            raise ValueError("model_type=None, and neither others nor hf_config says it; give one of MODEL_TYPES")
        return type_of_config
    if type_of_config is not None and family_of(type_of_config) != family_of(model_type):
        raise ValueError(
            f"model_type={model_type!r}, and config.json has {type_of_config!r}; give none, or one of its family"
        )
    return model_type


def _layout_in(
    others: State,
    config: MoEConfig,
    blocks: Sequence[tuple[str, BlockLayout]],
) -> BlockLayout | None:
    """Returns the layout of the first of the blocks that `others` has; None where it has none of them."""
    prefixes = [prefix for prefix, layout in blocks if has_experts(others, prefix, layout)]
    if not prefixes:
        return None
    possible = [block for block in blocks if block[0] == prefixes[0] and has_experts(others, *block)]

    def count_errors(block: tuple[str, BlockLayout]) -> int:
        errors, _ = match_block(others, *block, config)
        return len(errors)

    # Where two layouts have the same names, the shapes tell them apart.
    _, layout = min(possible, key=count_errors)
    return layout


def _outputs(
    params: MoEParams[jax.Array],
    config: MoEConfig,
    model_type: str,
    prefix: str,
    layout: BlockLayout,
    dtype: jax.typing.DTypeLike | None,
) -> dict[str, Output]:
    """Returns every tensor of a block, by name; raises as `params_to_hf`."""
    config_to_hf(config, model_type)  # It raises where no model of this type has the config.
    check_params(params, config)
    for field, shape in vars(param_shapes(config)).items():
        value = getattr(params, field)
        model = f"a {model_type} model of this config"
        if value is None and shape is not None:
            raise ValueError(f"params.{field} is None; in {model} it is {shape}")
        if value is not None and shape is None:
            raise Unsupported(f"params.{field} is of shape {value.shape}; in {model} it is None")
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            raise ValueError(f"params.{field} lies on devices of other processes; copy it to this process first")
    outputs = {}
    for tensor in tensors_of(layout, config):
        value = getattr(params, tensor.field)
        outputs[resolve(prefix, tensor.name)] = _output(value, tensor, dtype)
    return outputs


def _output(value, tensor: Tensor, dtype: jax.typing.DTypeLike | None) -> Output:
    """Returns a tensor of the field `value` as it is written."""
    keeps_dtype = dtype is None or tensor.field == "router_bias"
    written = np.dtype(value.dtype if keeps_dtype else dtype)
    if written not in NAMES or not jnp.issubdtype(written, jnp.floating) or written.itemsize < 2:
        raise ValueError(f"dtype={written} must be one of float64, float32, float16 and bfloat16")

    def parts() -> Iterator[np.ndarray]:
        for part in tensor.by_expert():
            yield part.from_params(_to_host(value, part.region).astype(written, copy=False))

    return Output(written, tensor.shape, parts)


def _copy(state: State, name: str) -> Output:
    """Returns the tensor `name` of `others` as it is."""
    entry = find_entry(state, name)
    if entry.dtype not in NAMES:
        raise ValueError(f"others: {name} has dtype {entry.dtype}, which safetensors does not have")
    if _is_quantized(entry):
        raise Unsupported(f"others: {name} is quantized; convert the whole model first, or pass every MoE layer")
    return Output(entry.dtype, entry.shape, lambda: iter([entry.read()]))


def _is_quantized(entry: Entry) -> bool:
    """Whether a tensor is a quantized weight, or scales of one: config.json says that none is."""
    if entry.name.endswith((*QUANTIZED, *PACKED)) or entry.dtype.name.startswith("float8"):
        return True
    return entry.name.endswith("weight") and not jnp.issubdtype(entry.dtype, jnp.floating)


def _to_host(array, region: Slices) -> np.ndarray:
    """Returns a region of a JAX or NumPy array, from the shards that hold parts of it."""
    if not isinstance(array, jax.Array):
        return np.asarray(array[region])
    block = np.empty([cut.stop - cut.start for cut in region], array.dtype)
    # This keeps one shard of equal replicas.
    shards = {str(shard.index): shard for shard in array.addressable_shards}
    with jax.set_mesh(NO_MESH):
        for shard in shards.values():
            common = overlap(shard.index, region, array.shape)
            if common is not None:
                start, in_region = common
                block[in_region] = np.asarray(_read(shard.data, start, block[in_region].shape))
    return block
