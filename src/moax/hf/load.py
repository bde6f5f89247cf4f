"""A checkpoint's MoE layer -> MoEParams: one expert at a time, each part straight onto the devices that hold it.

A host reads the experts that its own devices hold, each once, and has one matrix of one expert in memory: it is cut as
the mesh wants it and written into buffers that are on the devices already, and donated from write to write.
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
    """The parameters of one MoE layer of a published model; bit for bit, where its weights are not quantized.

    Args:
      source: a `Checkpoint`, or the path of one, of which a host reads only what its devices hold, one expert at a
        time; or any names and arrays, NumPy's or JAX's. For many layers make one `Checkpoint`: it reads all headers.
      config: see `config_from_hf`.
      layer: the block is the one in `layers.{layer}.`, whatever stands before.
      prefix: or it is what these names start with, as `model.layers.3.mlp.`. Neither: all names are the block's own.
      dtype: of the parameters, but for `router_bias`, which keeps its own; None: that of the checkpoint, bfloat16
        where it is quantized (mxfp4, which that holds exactly; fp8 with scales of 128 x 128 blocks, rounded once).
      mesh: of devices; None: the one in force (`jax.set_mesh`), else the first device.
      axes: the roles of mesh axes. The layout is that of `param_specs`.

    Returns:
      MoEParams; see there for shapes.

    Raises:
      ValueError: a tensor that is missing, has another shape than the config wants, or that the config has no place
        for; both `layer` and `prefix`; a dim that its mesh axes do not divide.
      Unsupported: a dtype, a quantization or a set of names that moax.hf does not read.
    """
    state = Checkpoint(source) if isinstance(source, str | Path) else source
    found = _find_tensors(state, _find_prefix(state, layer, prefix), config)
    mesh = mesh or jax.sharding.get_mesh()
    shardings = None if mesh.empty else named(mesh, param_specs(config, axes, mesh))
    shapes, fields = param_shapes(config), dict.fromkeys(DIMS)
    for field in DIMS:
        pairs = [(tensor, stored) for tensor, stored in found if tensor.field == field]
        if pairs:
            to = _dtype_of(pairs, None if field == "router_bias" else dtype)
            on = getattr(shardings, field) if shardings else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            fields[field] = assemble(getattr(shapes, field), to, on, _blocks(pairs, config, to))
    return params_by_name(fields)


def _find_prefix(state: Mapping[str, Any], layer: int | None, prefix: str | None) -> str:
    if layer is None:
        return prefix or ""
    if prefix is not None:
        raise ValueError(f"layer={layer} and prefix={prefix!r}: give one of them")
    blocks = "|".join(BLOCKS)
    matches = [re.match(rf"(?:.*\.)?layers\.(\d+)\.(?:{blocks})\.", name) for name in state]
    found = sorted({m[0] for m in matches if m and int(m[1]) == layer})
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"layer={layer} is {' and '.join(found)}; give prefix= of the one that you mean")
    layers = sorted({int(m[1]) for m in matches if m})
    known = f"there are {layers[0]} to {layers[-1]}" if layers else "no name has layers.N.mlp in it"
    raise ValueError(f"layer={layer} is not in the checkpoint: {known}")


def _find_tensors(state: Mapping[str, Any], prefix: str, config: MoEConfig) -> list[tuple[Tensor, Stored]]:
    """Every tensor of the block, checked."""
    ours = [name for name in state if name.startswith(prefix)]

    def has(spelling: str, field: str) -> bool:
        names = [row.name.format(e=0) for row in SPELLINGS[spelling][1] if row.field == field]
        return any(locate(state, prefix + name) for name in names)

    # The names of experts tell the spelling, and the router's where two have the same: what else is missing is named.
    spellings = sorted((s for s in SPELLINGS if has(s, "wo")), key=lambda s: not has(s, "router"))
    if not spellings:
        some = ", ".join(sorted(ours)[:3]) or "nothing"
        raise ValueError(f"{prefix!r} has no experts in a spelling that moax.hf knows, but {some}; give an MoE layer's")
    found, missing, used = [], [], set()
    for tensor in tensors_of(spellings[0], config):
        stored = locate(state, prefix + tensor.name)
        if stored is None:
            missing.append(tensor)
            continue
        stored.check()
        want, have = tensor.shape(config), stored.shape()
        if have != want:
            raise ValueError(f"{stored.name} has shape {have}; this config needs {want}")
        found.append((tensor, stored))
        used |= {stored.name, stored.scales}
    if missing:
        more = f", and {len(missing) - 1} more," if len(missing) > 1 else ""
        first = f"{prefix}{missing[0].name} of shape {missing[0].shape(config)}"
        raise ValueError(f"{first}{more} is not in the checkpoint, and this config needs it")
    left = sorted(set(ours) - used)
    if left:
        raise ValueError(f"{left[0]} is in the checkpoint, but this config has no such parameter")
    return found


def _dtype_of(pairs: Sequence[tuple[Tensor, Stored]], dtype: jax.typing.DTypeLike | None) -> np.dtype:
    """Of a parameter: the one that is asked for, else the one that all of its tensors have."""
    first = pairs[0][1]
    to = np.dtype(first.dtype() if dtype is None else dtype)
    if not jnp.issubdtype(to, jnp.floating):
        raise ValueError(f"dtype={to} must be a floating-point dtype")
    other = next((stored for _, stored in pairs if stored.dtype() != to), None)
    if dtype is None and other is not None:
        raise ValueError(f"{first.name} is {to} and {other.name} {other.dtype()}; give dtype=")
    if jax.dtypes.canonicalize_dtype(to) != to:
        raise ValueError(f"{first.name} would be {to}, which JAX has with jax_enable_x64 alone; give another dtype=")
    return to


def _blocks(pairs: Sequence[tuple[Tensor, Stored]], config: MoEConfig, dtype: np.dtype) -> Iterator[Block]:
    """The tensors of a field as blocks of it: an expert each."""

    def block(tensor: Tensor, stored: Stored, e: int | None = None) -> Block:
        return Block(tensor.corner(), tensor.block(config), lambda: tensor.to_params(stored.read(e, dtype), config))

    for tensor, stored in pairs:
        if tensor.by_expert():
            yield from (block(tensor.of_expert(e), stored, e) for e in range(config.num_experts))
        else:
            yield block(tensor, stored)
