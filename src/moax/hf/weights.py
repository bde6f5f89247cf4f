"""The MoE layer of a checkpoint <-> MoEParams, one expert at a time.

To read, a host takes each expert that its own devices hold once, cuts its matrix as the mesh shards it, and writes the
parts into donated buffers on the devices. To write, it copies one expert from the devices. It has one matrix of one
expert in memory.
"""

from __future__ import annotations

import itertools
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
from moax.hf.config import config_to_hf, read_model_type
from moax.hf.families import layout_of, layouts_of
from moax.hf.files import MXFP4, NAMES, QUANTIZED, Checkpoint, Output, State, Stored, find_entry, locate, write_files
from moax.hf.headers import name_source
from moax.hf.tensor_layouts import LAYER, BlockLayout, Tensor, block_test, resolve, tensors_of
from moax.mesh.axes import Axes
from moax.mesh.specs import named
from moax.params import DIMS, MoEParams, check_params, param_shapes, param_specs

Pairs = list[tuple[Tensor, Stored]]
Slices = tuple[slice, ...]
SHARD_BYTES = 5 * 2**30
NO_MESH = jax.sharding.Mesh(np.empty((), object), ())  # jit refuses arrays of one device while another mesh is set
_write = jax.jit(lax.dynamic_update_slice, donate_argnums=0)
_read = jax.jit(lax.dynamic_slice, static_argnums=2)


@name_source
def params_from_hf(
    source: Mapping[str, Any] | str | Path,
    config: MoEConfig,
    *,
    layer: int | None = None,
    prefix: str | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    mesh: jax.sharding.Mesh | None = None,
    axes: Axes = Axes(),
    model_type: str | None = None,
) -> MoEParams[jax.Array]:
    """Reads the parameters of one MoE layer of a published model, bit for bit where its weights are not quantized.

    Args:
      source: a `Checkpoint`, the path of one, or a mapping from names to NumPy or JAX arrays. Of a checkpoint a host
        reads only the experts of its devices, one at a time. For many layers make one `Checkpoint`, since making it
        reads all headers.
      config: see `config_from_hf`.
      layer: the names of the block contain `layers.{layer}.` or `blocks.{layer}.`, after any start.
      prefix: the names of the block start with this prefix, such as `model.layers.3.mlp.`. Without `layer` and
        `prefix`, all names belong to the block.
      dtype: dtype of the parameters; `router_bias` keeps its own. None takes that of the checkpoint, and bfloat16 where
        the checkpoint is quantized. bfloat16 holds mxfp4 exactly, and rounds fp8 with 128 x 128 scale blocks once.
      mesh: the mesh of the parameters, sharded as `param_specs` says. None takes the mesh that `jax.set_mesh` set, else
        the first device.
      axes: the roles of mesh axes.
      model_type: one of `MODEL_TYPES`, whose names the checkpoint has. None takes that of the config.json beside the
        checkpoint.

    Returns:
      MoEParams; its docstring has the shapes.

    Raises:
      ValueError: a tensor is missing, has another shape than the config needs, or has no place in the config; both
        `layer` and `prefix` are given; there is neither a model type nor a config.json; the mesh axes of a dim do not
        divide it.
      Unsupported: moax.hf does not know a dtype, a quantization or the model type.
    """
    state = Checkpoint(source) if isinstance(source, str | Path) else source
    if layer is not None and prefix is not None:
        raise ValueError(f"layer={layer} and prefix={prefix!r}: give one of them")
    layouts = layouts_of(_model_type_of(state) if model_type is None else model_type)
    matches = [_match(state, *block, config) for block in _find_blocks(state, layer, prefix or "", layouts)]
    # Where both layouts have the same names, the shapes tell them apart.
    errors, pairs = min(matches, key=lambda match: len(match[0]))
    if errors:
        raise errors[0]
    mesh = mesh or jax.sharding.get_mesh()
    shardings = None if mesh.empty else named(mesh, param_specs(config, axes, mesh))
    fields: dict[str, Any] = dict.fromkeys(DIMS)
    for field, group in itertools.groupby(pairs, key=lambda pair: pair[0].field):
        of_field = list(group)
        to = _find_dtype([stored for _, stored in of_field], None if field == "router_bias" else dtype)
        on = getattr(shardings, field) if shardings else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        fields[field] = _assemble(getattr(param_shapes(config), field), to, on, of_field)
    return MoEParams(**fields)


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
      layer: each name starts as in a published model of this type: `model.layers.{layer}.` and the name of the block.
      prefix: each name starts with this prefix. Without `layer` and `prefix`, names start as in the block.
      stacked: whether to stack the experts, as transformers 5 holds them in memory, and not as the published model.
      dtype: dtype of the tensors; the selection bias keeps its own. None keeps that of the parameters.

    Raises:
      ValueError: the params do not fit the config, a bias is None, or an array lies on devices of other processes.
      Unsupported: no model of this type has this config.
    """
    if layer is not None and prefix is not None:
        raise ValueError(f"layer={layer} and prefix={prefix!r}: give one of them")
    if layer is not None:
        layout = layout_of(model_type, stacked)
        prefix = f"{layout.stem}{layer}.{layout.block}"
    return {
        name: np.concatenate([part.reshape(-1) for part in output.parts()]).reshape(output.shape)
        for name, output in _outputs(params, config, model_type, prefix or "", stacked, dtype).items()
    }


def save_hf(
    folder: str | Path,
    layers: Mapping[int, MoEParams[jax.Array]],
    config: MoEConfig,
    model_type: str,
    *,
    others: Mapping[str, Any] | None = None,
    hf_config: Mapping[str, Any] | None = None,
    stacked: bool = False,
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
    check_value("shard_bytes", shard_bytes, int)
    if any(folder.glob("*.safetensors")):
        raise ValueError(f"folder {str(folder)!r} holds safetensors files already; give a new one")
    ours, others = config_to_hf(config, model_type), others or {}
    stem, layout = _stem(others, model_type), layout_of(model_type, stacked)
    for layer, params in layers.items():
        outputs |= _outputs(params, config, model_type, f"{stem}{layer}.{layout.block}", stacked, dtype)
    replaced = {  # whether a tensor belongs to a block that is written anew, by the start of its name
        at: [block_test(at + old.block, old) for old in layouts_of(model_type)]
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


def _model_type_of(source: Any) -> str:
    """Returns the model type of the config.json beside a checkpoint."""
    if isinstance(source, Checkpoint):
        file = (source.path if source.path.is_dir() else source.path.parent) / "config.json"
        if file.is_file():
            return read_model_type(file)
    raise ValueError("model_type=None, and no config.json beside the checkpoint says it; give one of MODEL_TYPES")


def _moe_blocks(state: State, layouts: Sequence[BlockLayout]) -> Iterator[tuple[int, str, BlockLayout]]:
    """Yields (layer, start of its names, layout) where a down projection is there."""
    for number, start in sorted({(int(m[1]), m[0]) for m in map(LAYER.match, state) if m}):
        for layout in layouts:
            names = [start + layout.block + row.name.format(e=0) for row in layout.rows if row.field == "wo"]
            if any(name in state or name + MXFP4[0] in state for name in names):
                yield number, start, layout


def _find_blocks(
    state: State, layer: int | None, prefix: str, layouts: Sequence[BlockLayout]
) -> list[tuple[str, BlockLayout]]:
    """Returns the prefix of the block, in the layer or as given, with the layouts that it may have."""
    if layer is None:
        return [(prefix, layout) for layout in layouts]
    blocks = list(_moe_blocks(state, layouts))
    found = [(start + layout.block, layout) for number, start, layout in blocks if number == layer]
    if not found:
        known = f"its MoE layers are {blocks[0][0]} to {blocks[-1][0]}" if blocks else "no layers.N has experts"
        raise ValueError(f"layer={layer} is not in the checkpoint: {known}")
    prefixes = sorted({at for at, _ in found})
    if len(prefixes) > 1:
        raise ValueError(f"layer={layer} is {' and '.join(prefixes)}; give prefix= of the block that you mean")
    return found


def _match(state: State, prefix: str, layout: BlockLayout, config: MoEConfig) -> tuple[list[Exception], Pairs]:
    """Returns the errors of `params_from_hf` in a layout, and each tensor with its place."""
    pairs, errors = [], []
    for tensor in tensors_of(layout, config):
        name = resolve(prefix, tensor.name)
        try:
            if (stored := locate(state, name)) is None:
                raise ValueError(f"{name} of shape {tensor.shape} is not in the checkpoint, and this config needs it")
            stored.check(tensor.shape)
            pairs.append((tensor, stored))
        except (Unsupported, ValueError) as error:
            errors.append(error)
    in_block, used = block_test(prefix, layout), {entry.name for _, stored in pairs for entry in stored if entry}
    # A layout with errors need not look for more, in a checkpoint of 90,000 names.
    left = [] if errors else sorted(name for name in state if in_block(name) and name not in used)
    errors += [ValueError(f"{name} is in the checkpoint, but this config has no such parameter") for name in left]
    return errors, pairs


def _find_dtype(tensors: Sequence[Stored], dtype: jax.typing.DTypeLike | None) -> np.dtype:
    """Returns the dtype of a parameter: `dtype`, or, if it is None, the one dtype of all its tensors."""
    first = tensors[0]
    to = np.dtype(first.dtype if dtype is None else dtype)
    if not jnp.issubdtype(to, jnp.floating):
        raise ValueError(f"dtype={to} must be a floating-point dtype")
    if dtype is None and (other := next((stored for stored in tensors if stored.dtype != to), None)):
        raise ValueError(f"{first.data.name} is {to} and {other.data.name} {other.dtype}; give dtype=")
    if jax.dtypes.canonicalize_dtype(to) != to:
        raise ValueError(f"{first.data.name} would be {to}, which JAX has with jax_enable_x64 alone; give dtype=")
    return to


def _assemble(shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, pairs: Pairs) -> jax.Array:
    """Returns the array of a field, whose tensors are read one after the other, if this host holds a part of them."""
    slices = {d: index or () for d, index in sharding.addressable_devices_indices_map(shape).items()}
    with jax.set_mesh(NO_MESH):
        shards = {device: jnp.zeros(sharding.shard_shape(shape), dtype, device=device) for device in slices}
        for whole, stored in pairs:
            parts = whole.by_expert()
            for i, tensor in enumerate(parts):
                cuts = {device: _overlap(at, tensor.region, shape) for device, at in slices.items()}
                if not any(cuts.values()):
                    continue
                values = tensor.to_params(stored.read(dtype, i, len(parts)))
                for device, cut in cuts.items():
                    if cut is not None:
                        start, in_region = cut
                        shards[device] = _write(shards[device], jax.device_put(values[in_region], device), start)
                jax.block_until_ready(list(shards.values()))
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards.values()))


def _stem(others: State, model_type: str) -> str:
    """Returns the part before a layer's number in the names of the MoE layers in `others`; else the published one."""
    moe = {start.removesuffix(f"{number}.") for number, start, _ in _moe_blocks(others, layouts_of(model_type))}
    found = moe or {m[0][: m.start(1)] for m in map(LAYER.match, others) if m} or {layout_of(model_type).stem}
    if len(found) > 1:
        starts = " and with ".join(map(repr, sorted(found)))
        raise Unsupported(f"others: layers start with {starts}; pass the tensors of one model")
    return found.pop()


def _outputs(params, config, model_type, prefix, stacked, dtype) -> dict[str, Output]:
    """Returns every tensor of a block, by name; raises as `params_to_hf`."""
    config_to_hf(config, model_type)  # It raises where no model of this type has the config.
    check_params(params, config)
    for field, want in vars(param_shapes(config)).items():
        value = getattr(params, field)
        if (value is None) != (want is None):
            error, have = (ValueError, None) if value is None else (Unsupported, f"of shape {value.shape}")
            raise error(f"params.{field} is {have}; in a {model_type} model of this config it is {want}")
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


def _copy(state: State, name: str) -> Output:
    """Returns the tensor `name` of `others` as it is."""
    if name.endswith(QUANTIZED):
        raise Unsupported(f"others: {name} is quantized; convert the whole model first, or pass every MoE layer")
    entry = find_entry(state, name)
    if entry.dtype not in NAMES:
        raise ValueError(f"others: {name} has dtype {entry.dtype}, which safetensors does not have")
    return Output(entry.dtype, entry.shape, lambda: iter([entry.read()]))


def _to_host(array, region: Slices) -> np.ndarray:
    """Returns a region of a JAX or NumPy array, from the shards that hold parts of it."""
    if not isinstance(array, jax.Array):
        return np.asarray(array[region])
    block = np.empty([cut.stop - cut.start for cut in region], array.dtype)
    shards = {str(shard.index): shard for shard in array.addressable_shards}  # This keeps one shard of equal replicas.
    with jax.set_mesh(NO_MESH):
        for shard in shards.values():
            if common := _overlap(shard.index, region, array.shape):
                start, in_region = common
                block[in_region] = np.asarray(_read(shard.data, start, block[in_region].shape))
    return block


def _overlap(shard: Slices, region: Slices, shape: Sequence[int]) -> tuple[tuple[np.int32, ...], Slices] | None:
    """Returns the start in a shard, and the slices of a region, of what both have of an array of this shape."""
    start, in_region = [], []
    for cut, part, size in zip(shard, region, shape, strict=True):
        begin, end, _ = cut.indices(size)
        low, high = max(begin, part.start), min(end, part.stop)
        if low >= high:
            return None
        start.append(np.int32(low - begin))
        in_region.append(slice(low - part.start, high - part.start))
    return tuple(start), tuple(in_region)
