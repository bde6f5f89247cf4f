"""The MoE layer of a checkpoint -> MoEParams, one expert at a time.

A host reads each expert that its own devices hold once, and has one matrix of one expert in memory. It cuts the matrix
as the mesh shards it, and writes the parts into buffers that lie on the devices. Each write donates the buffer of the
write before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moax.config import MoEConfig
from moax.errors import Unsupported
from moax.hf.blocks import Block, assemble
from moax.hf.config import MODEL_TYPES, read_config
from moax.hf.files import Checkpoint
from moax.hf.names import LAYER, Tensor, block_test, resolve, spellings_of, tensors_of
from moax.hf.spellings import Spelling
from moax.hf.stored import Stored, locate
from moax.mesh.axes import Axes
from moax.mesh.place import named
from moax.params import DIMS, MoEParams, param_shapes, params_by_name
from moax.sharding import param_specs


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
    """Reads the parameters of one MoE layer of a published model.

    The values are those of the checkpoint, bit for bit, where its weights are not quantized.

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
      mesh: the mesh of the parameters. None takes the mesh that `jax.set_mesh` set, else the first device.
      axes: the roles of mesh axes. The parameters lie as `param_specs` says.
      model_type: one of `MODEL_TYPES`, whose names the checkpoint has. None takes that of the config.json beside the
        checkpoint. Where there is none, the names and shapes tell the family; GPT-OSS and openai_privacy_filter have
        the same ones, and are then read as GPT-OSS.

    Returns:
      MoEParams; its docstring has the shapes.

    Raises:
      ValueError: a tensor is missing, has another shape than the config needs, or has no place in the config; both
        `layer` and `prefix` are given; the mesh axes of a dim do not divide it.
      Unsupported: moax.hf does not read a dtype, a quantization or the names of the checkpoint, or does not know the
        model type.
    """
    state = Checkpoint(source) if isinstance(source, str | Path) else source
    model_type = _model_type_of(state) if model_type is None else model_type
    tensors = _find_tensors(state, *_find_block(state, layer, prefix, config, model_type), config)
    mesh = mesh or jax.sharding.get_mesh()
    shardings = None if mesh.empty else named(mesh, param_specs(config, axes, mesh))
    shapes, fields = param_shapes(config), dict.fromkeys(DIMS)
    for field in DIMS:
        pairs = [(tensor, stored) for tensor, stored in tensors if tensor.field == field]
        if pairs:
            to = find_dtype(pairs, None if field == "router_bias" else dtype)
            on = getattr(shardings, field) if shardings else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            fields[field] = assemble(getattr(shapes, field), to, on, _blocks(pairs, config, to))
    return params_by_name(fields)


def _model_type_of(source: Any) -> str | None:
    """Returns the model type of the config.json beside a checkpoint; None where there is none that moax.hf knows."""
    path = source.path if isinstance(source, Checkpoint) else None
    file = None if path is None else (path if path.is_dir() else path.parent) / "config.json"
    if file is None or not file.is_file():
        return None
    model_type = read_config(file).get("model_type")
    return model_type if model_type in MODEL_TYPES else None


def _has_experts(state: Mapping[str, Any], prefix: str, spelling: Spelling) -> bool:
    """Whether the checkpoint has the down projection of an expert at this prefix."""
    return any(locate(state, prefix + row.name.format(e=0)) for row in spelling.rows if row.field == "wo")


def _find_block(
    state: Mapping[str, Any], layer: int | None, prefix: str | None, config: MoEConfig, model_type: str | None
) -> tuple[str, Spelling]:
    """Returns the prefix of a block and its spelling; see `params_from_hf`."""
    if layer is not None and prefix is not None:
        raise ValueError(f"layer={layer} and prefix={prefix!r}: give one of them")
    spellings = spellings_of(model_type)
    if layer is None:
        found = [(prefix or "", spelling) for spelling in spellings if _has_experts(state, prefix or "", spelling)]
        if not found:
            ours = sorted(name for name in state if name.startswith(prefix or ""))
            raise ValueError(
                f"{prefix or ''!r} has no experts in a spelling that moax.hf knows, but "
                f"{', '.join(ours[:3]) or 'nothing'}; give the prefix of an MoE layer"
            )
    else:
        stems = {(m[0], int(m[1])) for m in map(LAYER.match, state) if m}
        found = _blocks_in({stem for stem, number in stems if number == layer}, state, spellings)
        if not found:
            layers = sorted({n for stem, n in stems if _blocks_in({stem}, state, spellings)})
            known = f"its MoE layers are {layers[0]} to {layers[-1]}" if layers else "no layers.N has experts"
            raise ValueError(f"layer={layer} is not in the checkpoint: {known}")
    prefixes = sorted({at for at, _ in found})
    if len(prefixes) > 1:
        raise ValueError(f"layer={layer} is {' and '.join(prefixes)}; give prefix= of the block that you mean")
    # Spellings may share the names of the experts; the other names and the shapes tell them apart.
    return min(found, key=lambda block: _mismatches(state, *block, config))


def _blocks_in(
    stems: Collection[str], state: Mapping[str, Any], spellings: Sequence[Spelling]
) -> list[tuple[str, Spelling]]:
    """Returns every prefix of a block in these layers, with each spelling that it may have."""
    prefixes = [(stem + (f"{s.block}." if s.block else ""), s) for stem in sorted(stems) for s in spellings]
    return [block for block in prefixes if _has_experts(state, *block)]


def _mismatches(state: Mapping[str, Any], prefix: str, spelling: Spelling, config: MoEConfig) -> tuple[int, ...]:
    """Returns how badly a spelling fits: no name for a parameter, missing tensors, wrong shapes, or biases that the
    config does not have.
    """
    try:
        tensors = list(tensors_of(spelling, config))
    except Unsupported:
        return 1, 0, 0, 0
    biases = {"bi", "bo", "logits_bias"}.intersection(row.field for row in spelling.rows)
    biases -= {tensor.field for tensor in tensors}
    found = [(tensor, locate(state, resolve(prefix, tensor.name))) for tensor in tensors]
    have = [(tensor, stored) for tensor, stored in found if stored is not None]
    wrong = [tensor for tensor, stored in have if not stored.readable() or stored.shape() != tensor.shape(config)]
    return 0, len(found) - len(have), len(wrong), len(biases)


def _find_tensors(
    state: Mapping[str, Any], prefix: str, spelling: Spelling, config: MoEConfig
) -> list[tuple[Tensor, Stored]]:
    """Returns every tensor of the block with its place in the checkpoint, or raises as `params_from_hf`."""
    pairs, missing, used = [], [], set()
    for tensor in tensors_of(spelling, config):
        name = resolve(prefix, tensor.name)
        stored = locate(state, name)
        if stored is None:
            missing.append((name, tensor))
            continue
        stored.check()
        want, have = tensor.shape(config), stored.shape()
        if have != want:
            raise ValueError(f"{stored.name} has shape {have}; this config needs {want}")
        pairs.append((tensor, stored))
        used |= {stored.name, stored.scales}
    if missing:
        more = f", and {len(missing) - 1} more," if len(missing) > 1 else ""
        first = f"{missing[0][0]} of shape {missing[0][1].shape(config)}"
        raise ValueError(f"{first}{more} is not in the checkpoint, and this config needs it")
    in_block = block_test(prefix, spelling)
    left = sorted(name for name in state if in_block(name) and name not in used)
    if left:
        raise ValueError(f"{left[0]} is in the checkpoint, but this config has no such parameter")
    return pairs


def find_dtype(pairs: Sequence[tuple[Any, Stored]], dtype: jax.typing.DTypeLike | None) -> np.dtype:
    """Returns the dtype of a parameter: `dtype`, or, where it is None, the one dtype of all its tensors."""
    first = pairs[0][1]
    to = np.dtype(first.dtype() if dtype is None else dtype)
    if not jnp.issubdtype(to, jnp.floating):
        raise ValueError(f"dtype={to} must be a floating-point dtype")
    other = next((stored for _, stored in pairs if stored.dtype() != to), None)
    if dtype is None and other is not None:
        raise ValueError(f"{first.name} is {to} and {other.name} {other.dtype()}; give dtype=")
    if jax.dtypes.canonicalize_dtype(to) != to:
        raise ValueError(f"{first.name} would be {to}, which JAX has with jax_enable_x64 alone; give a narrower dtype=")
    return to


def _blocks(pairs: Sequence[tuple[Tensor, Stored]], config: MoEConfig, dtype: np.dtype) -> Iterator[Block]:
    """Yields the tensors of a field as blocks of the field; stacked experts give one block for each expert."""

    def block(tensor: Tensor, stored: Stored, e: int | None = None) -> Block:
        return Block(
            tensor.corner(),
            tensor.block(config),
            lambda: tensor.to_params(stored.read(e, dtype, config.num_experts), config),
        )

    for tensor, stored in pairs:
        if tensor.by_expert():
            yield from (block(tensor.of_expert(e), stored, e) for e in range(config.num_experts))
        else:
            yield block(tensor, stored)
