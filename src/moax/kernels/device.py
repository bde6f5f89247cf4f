"""The machine that jit compiles for. No other file asks which one it is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # in the name of a device
H200_SMS = 132  # multiprocessors
HOPPER_WIDTH = 32  # the copy engine swizzles boxes of at least so many FP8 elements


def find_device() -> Any:
    """Returns the device that the mesh in force describes, else the first one of this process."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]


def sums_in_pieces() -> bool:
    """Returns whether an all-to-all and a sum take the place of a reduce-scatter, for `mesh.collectives`.

    Processes on CPUs talk through gloo, whose reduce-scatter returns wrong values at times (jax-ml/jax#40830).
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
