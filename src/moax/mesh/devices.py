"""A mesh over the devices of all processes, its last axes on the nearest wires."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def make_mesh(
    sizes: Mapping[str, int], *, axis_type: AxisType = AxisType.Auto, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The mesh of these axes over all devices, those of a host side by side and in row-major order.

    Name axes from the farthest apart to the nearest: `{"dp": 4, "fsdp": 16, "ep": 8}` on hosts of 8 GPUs keeps each
    group of ep on the NVLink of one host, and has fsdp and dp cross the network. `jax.make_mesh` does the same on one
    host, and refuses GPUs of several.

    Args:
      sizes: devices along each axis; their product is the number of devices.
      axis_type: of all axes.
      devices: None for all devices of all processes.

    Raises:
      ValueError: the sizes are not those of the devices.
    """
    devices = order(jax.devices() if devices is None else devices)
    if math.prod(sizes.values()) != len(devices):
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"sizes {given}: a mesh of {math.prod(sizes.values())} devices, but {len(devices)} are here")
    return Mesh(np.array(devices).reshape(tuple(sizes.values())), tuple(sizes), (axis_type,) * len(sizes))


def crossing(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which some neighbours are devices of different processes."""
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    return tuple(name for dim, name in enumerate(mesh.axis_names) if np.diff(processes, axis=dim).any())


def order(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Devices of a host side by side: by `slice_index`, which counts hosts (or what else NVLink ties together), then by
    id. `jax.devices()` goes by process, and processes may be dealt to hosts in turn."""
    return sorted(devices, key=lambda device: (getattr(device, "slice_index", 0), device.id))
