"""The machine that jit compiles for. No other file asks which one it is."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # in the name of a device
H200_SMS = 132  # multiprocessors
COPY_BYTES = 16  # a bulk copy moves a multiple of so many bytes
HOPPER_WIDTH = 32  # the copy engine swizzles boxes of at least so many FP8 elements


def find_device() -> Any:
    """Returns the device that the mesh in force describes, else the first one of this process."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]


def sums_in_pieces() -> bool:
    """Returns whether an all-to-all and a sum take the place of a reduce-scatter, for `mesh.collectives`.

    Processes on CPUs talk through gloo, whose reduce-scatter returns wrong values at times (jax issue 40830).
    """
    return find_device().platform == "cpu" and jax.distributed.is_initialized()


def collectives_may_race() -> bool:
    """Returns whether XLA may run two collectives at once, and pair one device's first with another device's second.

    XLA for CPUs does so where no data goes from one collective to the other.
    """
    return find_device().platform == "cpu"


def needs_overlap_options() -> bool:
    """Returns whether collectives run beside kernels here by `moax.OVERLAP_OPTIONS` alone, as on GPUs."""
    return find_device().platform == "gpu"


def rounds_in_matmul() -> bool:
    """Returns whether a matmul of 16-bit operands writes a 16-bit result at once, which is half the bytes.

    A CPU multiplies bfloat16 to float32 alone.
    """
    return find_device().platform == "gpu"


def count_sms() -> int:
    """Returns the multiprocessors of the GPU that jit compiles for; those of an H200 where there is no GPU."""
    device = find_device()
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or H200_SMS


def why_not_hopper(
    dtype: DTypeLike | None = None, widths: dict[str, int] | None = None,
) -> str | None:  # fmt: skip
    """Returns why the kernels for Hopper cannot run where jit compiles for, with this dtype and these widths, or None.

    A dtype of None, and no widths, ask about the machine alone.
    """
    device = find_device()
    capability = getattr(device, "compute_capability", None)
    is_hopper = capability == "9.0"
    if not capability:  # a mesh of described devices knows no capability
        is_hopper = any(name in device.device_kind for name in HOPPER)
    if not is_hopper:
        kind = device.device_kind
        return f"the kernels of moax are for NVIDIA GPUs of compute capability 9.0, this is {kind!r}"
    if dtype is not None and dtype != jnp.bfloat16:
        return f"the kernels compute in bfloat16, not {jnp.dtype(dtype).name}"
    for name, size in (widths or {}).items():
        if size % HOPPER_WIDTH or not size:
            width = f"{name} of {size} elements a device"
            return f"{width} is no multiple of {HOPPER_WIDTH}, which the copy engine needs"
    return None


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
        # Inside a shard_map, whose mesh JAX checks by the same rule when it lowers the kernel.
        return None
    if mesh.empty:
        return "no jax.set_mesh(mesh) is in force, and types of arrays do not say which devices a mesh has"
    ids = [device.id for device in mesh.devices.flat]
    if ids != list(range(len(ids))):
        return f"the mesh must be of the first {len(ids)} devices of the machine in order, not of {ids}"
    ordinals = tuple(device.local_hardware_id for device in mesh.devices.flat)
    if jax.default_backend() == "gpu" and not _reach(ordinals):
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
    driver = ctypes.CDLL("libcuda.so.1")
    handles = []
    for ordinal in ordinals:
        handle = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(handle), ordinal):
            return False
        handles.append(handle)
    answer = ctypes.c_int()
    for reader, owner in itertools.permutations(handles, 2):
        error = driver.cuDeviceCanAccessPeer(ctypes.byref(answer), reader, owner)
        if error or not answer.value:
            return False
    return True
