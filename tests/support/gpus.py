"""All GPUs of the machine, for one process at a time, and GPUs that this machine does not have."""

from __future__ import annotations

import fcntl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from moax.kernels import device as machine


@contextmanager
def alone() -> Iterator[None]:
    """Waits until no other test of this machine runs a program of several GPUs.

    Kernels that wait for those of other devices would wait for the time slices of other processes too. Tests compile
    before they enter, so that compilations run side by side.
    """
    with open(Path(tempfile.gettempdir()) / "moax-gpus.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def pretend(monkeypatch, platform: str = "cpu", device_kind: str = "NVIDIA H200") -> None:
    """Lets moax choose kernels as on this device. The platform `cpu` is that of the interpreter, which runs them."""
    device = SimpleNamespace(platform=platform, device_kind=device_kind)
    asked = machine.find_device
    for module in list(sys.modules.values()):  # some have the function under its own name
        if getattr(module, "find_device", None) is asked:
            monkeypatch.setattr(module, "find_device", lambda: device)


def dirty(elements: int = 1 << 26) -> None:
    """Leaves NaN in the memory that arrays to come are made of."""
    for device in jax.local_devices():
        jax.block_until_ready(jax.device_put(jnp.full(elements, jnp.nan), device)).delete()
