"""Reads the MoE layer of a checkpoint into MoEParams, one expert at a time.

A host takes each expert that its own devices hold once, cuts its matrix as the mesh shards it, and writes the parts
into donated buffers on the devices. It has one matrix of one expert in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moax.checks import check_value
from moax.config import MoEConfig
from moax.hf.blocks import Pairs, find_blocks, match_block
from moax.hf.config import read_model_type
from moax.hf.families import layouts_of
from moax.hf.files import Checkpoint, Stored
from moax.hf.headers import name_source
from moax.mesh.axes import Axes
from moax.mesh.specs import named
from moax.params import DIMS, STATE, MoEParams, param_shapes, param_specs

Slices = tuple[slice, ...]
# jit refuses arrays of one device while another mesh is set.
NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
_write = jax.jit(lax.dynamic_update_slice, donate_argnums=0)


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
      layer: the names of the block contain `layers.{layer}.` or `blocks.{layer}.`, after the start of the model's own
        layers: `model.`, `model.language_model.` or `thinker.model.`, and not `mtp.` or `talker.`.
      prefix: the names of the block start with this prefix, such as `mtp.layers.0.mlp.`. Without `layer` and `prefix`,
        all names belong to the block.
      dtype: dtype of the parameters; `router_bias` is float32. None takes that of the checkpoint, and bfloat16 where
        the checkpoint is quantized. bfloat16 holds fp4 with its scales exactly, and rounds fp8 with 128 x 128 scale
        blocks once.
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
    check_value("config", config, MoEConfig)
    state = Checkpoint(source) if isinstance(source, str | Path) else source
    if layer is not None and prefix is not None:
        raise ValueError(f"layer={layer} and prefix={prefix!r}: give one of them")
    if model_type is None:
        model_type = _model_type_of(state)
    blocks = find_blocks(state, layer, prefix or "", layouts_of(model_type))
    matches = [match_block(state, *block, config) for block in blocks]
    # Where both layouts have the same names, the shapes tell them apart.
    errors, pairs = min(matches, key=lambda match: len(match[0]))
    if errors:
        raise errors[0]
    mesh = mesh or jax.sharding.get_mesh()
    shardings = named(mesh, param_specs(config, axes, mesh)) if not mesh.empty else None
    fields: dict[str, Any] = dict.fromkeys(DIMS)
    for field, group in itertools.groupby(pairs, key=lambda pair: pair[0].field):
        pairs_of_field = list(group)
        tensors = [stored for _, stored in pairs_of_field]
        field_dtype = _find_dtype(tensors, np.float32 if field in STATE else dtype)
        if shardings is None:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        else:
            sharding = getattr(shardings, field)
        shape = getattr(param_shapes(config), field)
        fields[field] = _assemble(shape, field_dtype, sharding, pairs_of_field)
    return MoEParams(**fields)


def config_file(source: Any) -> Path | None:
    """Returns the path of the config.json beside a `Checkpoint`, where there is one."""
    if not isinstance(source, Checkpoint):
        return None
    folder = source.path if source.path.is_dir() else source.path.parent
    file = folder / "config.json"
    if not file.is_file():
        return None
    return file


def _model_type_of(source: Any) -> str:
    """Returns the model type of the config.json beside a checkpoint."""
    file = config_file(source)
    if file is None:
        raise ValueError("model_type=None, and no config.json beside the checkpoint says it; give one of MODEL_TYPES")
    return read_model_type(file)


def _find_dtype(tensors: Sequence[Stored], dtype: jax.typing.DTypeLike | None) -> np.dtype:
    """Returns the dtype of a parameter: `dtype`, or, if it is None, the one dtype of all its tensors."""
    data, _ = tensors[0]
    field_dtype = np.dtype(tensors[0].dtype if dtype is None else dtype)
    if not jnp.issubdtype(field_dtype, jnp.floating):
        raise ValueError(f"dtype={field_dtype} must be a floating-point dtype")
    if dtype is None:
        for stored in tensors:
            if stored.dtype != field_dtype:
                raise ValueError(f"{data.name} is {field_dtype} and {stored.data.name} {stored.dtype}; give dtype=")
    if jax.dtypes.canonicalize_dtype(field_dtype) != field_dtype:
        raise ValueError(f"{data.name} would be {field_dtype}, which JAX has with jax_enable_x64 alone; give dtype=")
    return field_dtype


def _assemble(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: jax.sharding.Sharding,
    pairs: Pairs,
) -> jax.Array:
    """Returns the array of a field, whose tensors are read one after the other, if this host holds a part of them."""
    indices = sharding.addressable_devices_indices_map(shape)
    slices = {device: index or () for device, index in indices.items()}
    with jax.set_mesh(NO_MESH):
        shard_shape = sharding.shard_shape(shape)
        shards = {device: jnp.zeros(shard_shape, dtype, device=device) for device in slices}
        for whole, stored in pairs:
            parts = whole.by_expert()
            for i, tensor in enumerate(parts):
                region = tensor.region
                cuts = {device: overlap(shard, region, shape) for device, shard in slices.items()}
                if not any(cuts.values()):
                    continue
                values = tensor.to_params(stored.read(dtype, i, len(parts)))
                for device, cut in cuts.items():
                    if cut is not None:
                        start, in_region = cut
                        part = jax.device_put(values[in_region], device)
                        shards[device] = _write(shards[device], part, start)
                jax.block_until_ready(list(shards.values()))
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards.values()))


def overlap(
    shard: Slices,
    region: Slices,
    shape: Sequence[int],
) -> tuple[tuple[np.int32, ...], Slices] | None:
    """Returns the common part of a shard and a region of an array: its start in the shard, its slices of the region."""
    start = []
    in_region = []
    for cut, part, size in zip(shard, region, shape, strict=True):
        begin, end, _ = cut.indices(size)
        low = max(begin, part.start)
        high = min(end, part.stop)
        if low >= high:
            return None
        start.append(np.int32(low - begin))
        in_region.append(slice(low - part.start, high - part.start))
    return tuple(start), tuple(in_region)
