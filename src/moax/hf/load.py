"""The MoE layer of a checkpoint -> MoEParams, one expert at a time.

A host reads each expert that its own devices hold once, and has one matrix of one expert in memory. It cuts the matrix
as the mesh shards it, and writes the parts into buffers that lie on the devices. Each write donates the buffer of the
write before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moax.config import MoEConfig
from moax.hf.blocks import Block, assemble
from moax.hf.files import Checkpoint
from moax.hf.names import BLOCKS, DIMS, SPELLINGS, Tensor, tensors_of
from moax.hf.stored import Stored, locate
from moax.mesh.axes import Axes
from moax.mesh.place import named
from moax.params import MoEParams, param_shapes, params_by_name
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
) -> MoEParams[jax.Array]:
    """Reads the parameters of one MoE layer of a published model.

    The values are those of the checkpoint, bit for bit, where its weights are not quantized.

    Args:
      source: a `Checkpoint`, the path of one, or a mapping from names to NumPy or JAX arrays. Of a checkpoint a host
        reads only the experts of its devices, one at a time. For many layers make one `Checkpoint`, since making it
        reads all headers.
      config: see `config_from_hf`.
      layer: the names of the block contain `layers.{layer}.`, after any start.
      prefix: the names of the block start with this prefix, such as `model.layers.3.mlp.`. Without `layer` and
        `prefix`, all names belong to the block.
      dtype: dtype of the parameters; `router_bias` keeps its own. None takes that of the checkpoint, and bfloat16 where
        the checkpoint is quantized. bfloat16 holds mxfp4 exactly, and rounds fp8 with 128 x 128 scale blocks once.
      mesh: the mesh of the parameters. None takes the mesh that `jax.set_mesh` set, else the first device.
      axes: the roles of mesh axes. The parameters lie as `param_specs` says.

    Returns:
      MoEParams; its docstring has the shapes.

    Raises:
      ValueError: a tensor is missing, has another shape than the config needs, or has no place in the config; both
        `layer` and `prefix` are given; the mesh axes of a dim do not divide it.
      Unsupported: moax.hf does not read a dtype, a quantization or the names of the checkpoint.
    """
    state = Checkpoint(source) if isinstance(source, str | Path) else source
    tensors = _find_tensors(state, _find_prefix(state, layer, prefix), config)
    mesh = mesh or jax.sharding.get_mesh()
    shardings = None if mesh.empty else named(mesh, param_specs(config, axes, mesh))
    shapes, fields = param_shapes(config), dict.fromkeys(DIMS)
    for field in DIMS:
        pairs = [(tensor, stored) for tensor, stored in tensors if tensor.field == field]
        if pairs:
            to = _dtype_of(pairs, None if field == "router_bias" else dtype)
            on = getattr(shardings, field) if shardings else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            fields[field] = assemble(getattr(shapes, field), to, on, _blocks(pairs, config, to))
    return params_by_name(fields)


def _find_prefix(state: Mapping[str, Any], layer: int | None, prefix: str | None) -> str:
    """Returns the start of the names of the block; see `params_from_hf`."""
    if layer is None:
        return prefix or ""
    if prefix is not None:
        raise ValueError(f"layer={layer} and prefix={prefix!r}: give one of them")
    blocks = "|".join(BLOCKS)
    matches = [re.match(rf"(?:.*\.)?layers\.(\d+)\.(?:{blocks})\.", name) for name in state]
    prefixes = sorted({m[0] for m in matches if m and int(m[1]) == layer})
    if len(prefixes) == 1:
        return prefixes[0]
    if prefixes:
        raise ValueError(f"layer={layer} is {' and '.join(prefixes)}; give prefix= of the block that you mean")
    layers = sorted({int(m[1]) for m in matches if m})
    known = f"its MoE layers are {layers[0]} to {layers[-1]}" if layers else "none of its names contains layers.N.mlp"
    raise ValueError(f"layer={layer} is not in the checkpoint: {known}")


def _find_tensors(state: Mapping[str, Any], prefix: str, config: MoEConfig) -> list[tuple[Tensor, Stored]]:
    """Returns every tensor of the block with its place in the checkpoint, or raises as `params_from_hf`."""
    ours = [name for name in state if name.startswith(prefix)]

    def has(spelling: str, field: str) -> bool:
        names = [row.name.format(e=0) for row in SPELLINGS[spelling][1] if row.field == field]
        return any(locate(state, prefix + name) for name in names)

    # The names of the experts tell the spelling. Where two spellings share them, the name of the router decides.
    spellings = sorted((s for s in SPELLINGS if has(s, "wo")), key=lambda s: not has(s, "router"))
    if not spellings:
        some = ", ".join(sorted(ours)[:3]) or "nothing"
        raise ValueError(
            f"{prefix!r} has no experts in a spelling that moax.hf knows, but {some}; give the prefix of an MoE layer"
        )
    pairs, missing, used = [], [], set()
    for tensor in tensors_of(spellings[0], config):
        stored = locate(state, prefix + tensor.name)
        if stored is None:
            missing.append(tensor)
            continue
        stored.check()
        want, have = tensor.shape(config), stored.shape()
        if have != want:
            raise ValueError(f"{stored.name} has shape {have}; this config needs {want}")
        pairs.append((tensor, stored))
        used |= {stored.name, stored.scales}
    if missing:
        more = f", and {len(missing) - 1} more," if len(missing) > 1 else ""
        first = f"{prefix}{missing[0].name} of shape {missing[0].shape(config)}"
        raise ValueError(f"{first}{more} is not in the checkpoint, and this config needs it")
    left = sorted(set(ours) - used)
    if left:
        raise ValueError(f"{left[0]} is in the checkpoint, but this config has no such parameter")
    return pairs


def _dtype_of(pairs: Sequence[tuple[Tensor, Stored]], dtype: jax.typing.DTypeLike | None) -> np.dtype:
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
        return Block(tensor.corner(), tensor.block(config), lambda: tensor.to_params(stored.read(e, dtype), config))

    for tensor, stored in pairs:
        if tensor.by_expert():
            yield from (block(tensor.of_expert(e), stored, e) for e in range(config.num_experts))
        else:
            yield block(tensor, stored)
