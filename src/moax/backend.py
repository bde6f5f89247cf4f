"""What the machine is, and which implementation runs; the only file that reads the platform."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import jax

Kernels = Literal["auto", "xla", "mosaic"]
KERNELS = ("auto", "xla", "mosaic")
H200_SMS = 132
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


def select_kernels(kernels: Kernels) -> Literal["xla"]:
    """The implementation of the products: every backend has `xla`.

    Raises ValueError for an unknown name, and Unsupported for `mosaic`: this build has no Mosaic kernels.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels={kernels!r} must be one of {', '.join(map(repr, KERNELS))}")
    if kernels == "mosaic":
        raise Unsupported("kernels='mosaic': this version has no Mosaic GPU kernels; use 'auto' or 'xla'")
    if kernels == "auto" and platform() == "gpu":
        log_once("kernels='auto': no Mosaic GPU kernels in this version; the XLA implementation runs")
    return "xla"


def count_sms() -> int:
    """Multiprocessors of the GPU that jit compiles for; an H200's where there is none (to compile for one)."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and getattr(described, "num_cores", None):
        return described.num_cores
    return jax.local_devices()[0].core_count if platform() == "gpu" else H200_SMS
