"""What the machine is, and which implementation runs; the only file that reads the platform."""

from __future__ import annotations

import functools
import importlib.util
import logging
from typing import Literal

import jax

Kernels = Literal["auto", "xla", "mosaic"]
KERNELS = ("auto", "xla", "mosaic")
H200_SMS = 132
HOPPER = ("H100", "H200", "H800", "H20", "GH200")
KERNEL_WIDTH = 32  # elements: 32 bytes of FP8, the least box that the copy engine swizzles
logger = logging.getLogger("moax")


class Unsupported(NotImplementedError):
    """An implementation that was chosen by name cannot do what is asked; the message says why."""


@functools.cache
def log_once(message: str) -> None:
    """Logs a fallback, the first time it happens."""
    logger.warning(message)


def platform() -> str:
    """`cpu`, `gpu` or another backend that jit compiles for by default."""
    return jax.default_backend()


def device_kind() -> str:
    """The name of the device that jit compiles for: of the mesh in force where it has one, else of the first here."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described is not None else jax.local_devices()[0].device_kind


def on_hopper() -> bool:
    """Whether jit compiles for a GPU of compute capability 9.0."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return any(name in described.device_kind for name in HOPPER)
    return platform() == "gpu" and getattr(jax.local_devices()[0], "compute_capability", None) == "9.0"


def count_sms() -> int:
    """Multiprocessors of the GPU that jit compiles for; an H200's where there is none (to compile for one)."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.num_cores:
        return described.num_cores
    return jax.local_devices()[0].core_count if platform() == "gpu" else H200_SMS


def select_kernels(kernels: Kernels, dtype=None, **widths: int) -> Literal["xla", "mosaic"]:
    """The implementation of products and moves: every backend has `xla`, Hopper GPUs `mosaic`.

    Args:
      kernels: `xla`, `mosaic`, or `auto`: mosaic where it can run, else xla, which is logged once on a GPU.
      dtype: that is computed in. widths: sizes of contiguous dims on one device, by name.

    Raises ValueError for an unknown name, and Unsupported where `mosaic` by name cannot run.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} must be one of {', '.join(map(repr, KERNELS))}")
    if kernels == "xla":
        return "xla"
    why = _why_not_mosaic(dtype, widths)
    if why is None:
        return "mosaic"
    if kernels == "mosaic":
        raise Unsupported(f"kernels='mosaic': {why}; use 'auto' or 'xla'")
    if platform() == "gpu":
        log_once(f"kernels='auto': {why}; the XLA implementation runs, which is slower")
    return "xla"


def _why_not_mosaic(dtype, widths: dict[str, int]) -> str | None:
    if importlib.util.find_spec("moax.kernels") is None:
        return "this installation has no moax.kernels"
    if not on_hopper():
        return f"the kernels are for NVIDIA GPUs of compute capability 9.0, this is {device_kind()!r}"
    if dtype is not None and dtype != jax.numpy.bfloat16:
        return f"the kernels compute in bfloat16, not {jax.numpy.dtype(dtype).name}"
    for name, size in widths.items():
        if size % KERNEL_WIDTH or not size:
            return f"{name} of {size} elements a device is no multiple of {KERNEL_WIDTH}, which the copy engine needs"
    return None
