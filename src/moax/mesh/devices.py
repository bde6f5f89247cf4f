"""`make_mesh` makes a mesh over the devices of all processes, with its last axes on the fastest wires."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def make_mesh(
    sizes: Mapping[str, int], *, axis_type: AxisType = AxisType.Auto, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Makes the mesh of these axes over all devices, in row-major order, with the devices of a host side by side.

    Name axes from the farthest apart to the nearest: `{"dp": 4, "fsdp": 16, "ep": 8}` on hosts of 8 GPUs keeps each
    group of ep on the NVLink of one host, and fsdp and dp cross the network. `jax.make_mesh` does the same on one host,
    and refuses GPUs of several hosts.

    Args:
      sizes: the number of devices along each axis, by name; the product is the number of all devices.
      axis_type: the type of every axis.
      devices: the devices of the mesh; None takes all devices of all processes.

    Raises:
      ValueError: the product of the sizes is not the number of devices.
    """
    devices = order(jax.devices() if devices is None else devices)
    if math.prod(sizes.values()) != len(devices):
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"sizes {given} make a mesh of {math.prod(sizes.values())} devices; there are {len(devices)}")
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes), (axis_type,) * len(sizes))


def order(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Returns the devices sorted by `slice_index`, then by id, so that the devices of a host are side by side."""
    # `jax.devices()` sorts by process, and a launcher may put neighbouring processes on different hosts. A slice is a
    # host, or a group of hosts that NVLink connects.
    return sorted(devices, key=lambda device: (getattr(device, "slice_index", 0), device.id))
