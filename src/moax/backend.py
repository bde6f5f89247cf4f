"""Facts about the machine that jit compiles for. No other file reads the platform."""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging

import jax

H200_SMS = 132
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
COPY_BYTES = 16  # a bulk copy moves a multiple of so many bytes
logger = logging.getLogger("moax")


@functools.cache
def log_once(message: str) -> None:
    """Logs a message, once in a process."""
    logger.warning(message)


def _device():
    """Returns the device that the mesh in force describes, else the first one of this process."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]


def platform() -> str:
    """Returns the backend of the device that the mesh in force names, else of this process: `cpu`, `gpu` or another."""
    return _device().platform


def device_kind() -> str:
    """Returns the name of the device of the mesh in force, else of this process, such as "NVIDIA H200"."""
    return _device().device_kind


def why_not_hopper() -> str | None:
    """Returns why kernels for Hopper cannot run where jit compiles for; None for compute capability 9.0."""
    device = _device()  # a mesh of described devices knows no capability
    capability = getattr(device, "compute_capability", None)
    if capability == "9.0" if capability else any(name in device.device_kind for name in HOPPER):
        return None
    return f"the kernels of moax are for NVIDIA GPUs of compute capability 9.0, this is {device.device_kind!r}"


def count_sms() -> int:
    """Returns the multiprocessors of the GPU that jit compiles for; those of an H200 where there is no GPU."""
    device = _device()
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or H200_SMS


def why_not_peers(row_bytes: int | None = None) -> str | None:
    """Returns why kernels cannot write into the memory of the other devices of the mesh in force; None where they can.

    Where `row_bytes`, the bytes of a row that travels, is None, the question is about this machine alone.
    """
    if why := why_not_hopper():
        return why
    if jax.process_count() > 1:
        return f"it works within one process, this is one of {jax.process_count()}"
    if row_bytes is None:
        return None
    if row_bytes % COPY_BYTES or not row_bytes:
        return f"rows of {row_bytes} bytes are no multiple of {COPY_BYTES}, which the copy engine needs"
    mesh = _placed_mesh()
    if mesh is None:
        return None  # inside a shard_map, whose mesh JAX checks by the same rule when it lowers the kernel
    if mesh.empty:
        return "no jax.set_mesh(mesh) is in force, and types of arrays do not say which devices a mesh has"
    ids = [device.id for device in mesh.devices.flat]
    if ids != list(range(len(ids))):
        return f"the mesh must be of the first {len(ids)} devices of the machine in order, not of {ids}"
    if jax.default_backend() == "gpu" and not _reach(tuple(device.local_hardware_id for device in mesh.devices.flat)):
        return "the GPUs of the mesh cannot reach one another's memory"
    return None


def _placed_mesh():
    """Returns the mesh of `jax.set_mesh` with its devices, even while a function is traced; None in a `shard_map`."""
    with jax.core.eval_context():
        try:
            return jax.sharding.get_mesh()
        except ValueError:
            return None


@functools.cache
def _reach(ordinals: tuple[int, ...]) -> bool:
    """Returns whether each of these GPUs can read and write the memory of all others, by the answer of the driver."""
    driver, can = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    handles = {n: ctypes.c_int() for n in ordinals}
    if any(driver.cuDeviceGet(ctypes.byref(handle), n) for n, handle in handles.items()):
        return False
    return all(
        driver.cuDeviceCanAccessPeer(ctypes.byref(can), a, b) == 0 and can.value == 1
        for a, b in itertools.permutations(handles.values(), 2)
    )
