"""Blocks of an array on a mesh, written and read one at a time: a host has one of them in memory.

A block is given by its first index, its `corner`, and its shape, of the array's rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# With a mesh in force jit refuses arrays of a single device.
NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
_write = jax.jit(lax.dynamic_update_slice, donate_argnums=0)
_read = jax.jit(lax.dynamic_slice, static_argnums=2)


class Block(NamedTuple):
    """A block that is read when a device of this host needs some of it."""

    corner: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class Overlap(NamedTuple):
    """What a shard and a block have in common: its first index in the shard, its shape, and its slices of the block."""

    start: tuple[np.int32, ...]
    shape: tuple[int, ...]
    of_block: tuple[slice, ...]


def overlap(
    shard: Sequence[slice], whole: Sequence[int], corner: Sequence[int], shape: Sequence[int]
) -> Overlap | None:
    """Of the shard [*shard] of an array of shape `whole` and a block of it; None where they do not meet."""
    starts, lows, highs = [], [], []
    for cut, size, first, length in zip(shard, whole, corner, shape, strict=True):
        begin, end, _ = cut.indices(size)
        starts.append(begin)
        lows.append(max(begin, first))
        highs.append(min(end, first + length))
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        return None
    return Overlap(
        tuple(np.int32(low - start) for low, start in zip(lows, starts, strict=True)),
        tuple(high - low for low, high in zip(lows, highs, strict=True)),
        tuple(slice(low - c, high - c) for low, high, c in zip(lows, highs, corner, strict=True)),
    )


def assemble(
    shape: tuple[int, ...], dtype: np.dtype, sharding: jax.sharding.Sharding, blocks: Iterable[Block]
) -> jax.Array:
    """The array that `blocks` make up. Each goes into buffers that are on the devices, donated from write to write, and
    is dropped before the next is read."""
    where = {d: index or () for d, index in sharding.addressable_devices_indices_map(shape).items()}
    local = sharding.shard_shape(shape)
    with jax.set_mesh(NO_MESH):
        shards = {device: jnp.zeros(local, dtype, device=device) for device in where}
        for block in blocks:
            found = [(device, overlap(index, shape, block.corner, block.shape)) for device, index in where.items()]
            meets = [(device, common) for device, common in found if common is not None]
            if not meets:
                continue
            values = block.read()
            for device, common in meets:
                part = jax.device_put(values[common.of_block], device)
                shards[device] = _write(shards[device], part, common.start)
            jax.block_until_ready([shards[device] for device, _ in meets])
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards.values()))


def to_host(array, corner: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """A block of an array, JAX's or NumPy's, from the shards that hold some of it."""
    if not isinstance(array, jax.Array):
        return np.asarray(array[tuple(slice(c, c + n) for c, n in zip(corner, shape, strict=True))])
    block = np.empty(shape, array.dtype)
    shards = {str(shard.index): shard for shard in array.addressable_shards}  # one of each set of replicas
    with jax.set_mesh(NO_MESH):
        for shard in shards.values():
            common = overlap(shard.index, array.shape, corner, shape)
            if common is not None:
                block[common.of_block] = np.asarray(_read(shard.data, common.start, common.shape))
    return block
