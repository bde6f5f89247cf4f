"""This module writes and reads blocks of an array on a mesh one at a time, so that a host holds one block in memory.

A block has a `corner`, which is its first index in the array, and a shape of the array's rank: corner (2, 0) and shape
(1, 4) are the elements [2:3, 0:4].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# jit refuses arrays of a single device while a mesh is set; code below sets this empty mesh.
NO_MESH = jax.sharding.Mesh(np.empty((), object), ())
_write = jax.jit(lax.dynamic_update_slice, donate_argnums=0)
_read = jax.jit(lax.dynamic_slice, static_argnums=2)


class Block(NamedTuple):
    """A block whose values `read()` returns; it is called only if a device of this host holds a part of the block."""

    corner: tuple[int, ...]
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


class Overlap(NamedTuple):
    """The part that a shard and a block share.

    Attributes:
      start: the first index of the part in the shard.
      shape: the shape of the part.
      of_block: the slices of the block that give the part.
    """

    start: tuple[np.int32, ...]
    shape: tuple[int, ...]
    of_block: tuple[slice, ...]


def overlap(
    shard: Sequence[slice], whole: Sequence[int], corner: Sequence[int], shape: Sequence[int]
) -> Overlap | None:
    """Returns the part that a shard and a block of the same array share; None where they share nothing.

    Example: shard [4:8] of 8 rows and the block of corner 6 and 1 row share 1 row, whose start in the shard is 2.

    Args:
      shard: the slices of the array that the shard holds.
      whole: the shape of the array.
      corner, shape: the block.
    """
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
    """Returns the array that consists of `blocks`.

    Each block is written into buffers on the devices, and dropped before the next block is read. A write donates the
    buffer.

    Args:
      shape, dtype, sharding: of the array.
      blocks: the blocks; elements of no block are 0.
    """
    slices = {d: index or () for d, index in sharding.addressable_devices_indices_map(shape).items()}
    local = sharding.shard_shape(shape)
    with jax.set_mesh(NO_MESH):
        shards = {device: jnp.zeros(local, dtype, device=device) for device in slices}
        for block in blocks:
            parts = [(device, overlap(index, shape, block.corner, block.shape)) for device, index in slices.items()]
            overlaps = [(device, common) for device, common in parts if common is not None]
            if not overlaps:
                continue
            values = block.read()
            for device, common in overlaps:
                part = jax.device_put(values[common.of_block], device)
                shards[device] = _write(shards[device], part, common.start)
            jax.block_until_ready([shards[device] for device, _ in overlaps])
    return jax.make_array_from_single_device_arrays(shape, sharding, list(shards.values()))


def to_host(array, corner: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """Returns the block of `corner` and `shape` of a JAX or NumPy array, from the shards that hold parts of it."""
    if not isinstance(array, jax.Array):
        return np.asarray(array[tuple(slice(c, c + n) for c, n in zip(corner, shape, strict=True))])
    block = np.empty(shape, array.dtype)
    shards = {str(shard.index): shard for shard in array.addressable_shards}  # This keeps one shard of equal replicas.
    with jax.set_mesh(NO_MESH):
        for shard in shards.values():
            common = overlap(shard.index, array.shape, corner, shape)
            if common is not None:
                block[common.of_block] = np.asarray(_read(shard.data, common.start, common.shape))
    return block
