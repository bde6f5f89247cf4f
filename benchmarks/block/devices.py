"""The kernels of each GPU of a call, from a profile of JAX, which has one plane for each GPU."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
from jax.profiler import ProfileData

PLANE, STREAM = re.compile(r"^/device:GPU:\d+"), "Stream"
COPIES = ("Memcpy", "Memset")  # A profile lists them among the kernels of a stream.


def kernels_by_device(f: Callable, args: tuple, calls: int = 3) -> list[list[tuple[str, float]]]:
    """Profiles `calls` calls of `f(*args)`, and returns the (name, microseconds) of the kernels of each GPU.

    A time is the mean over the calls: a kernel that a call launches once is in the list `calls` times, each with the
    `calls`-th part of its time. [] is returned where the profile has no kernel of a GPU.
    """
    jax.block_until_ready(f(*args))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready([f(*args) for _ in range(calls)])
        found = [kernels_of(ProfileData.from_file(str(file))) for file in Path(folder).rglob("*.xplane.pb")]
    return [[(name, us / calls) for name, us in kernels] for device in found for kernels in device]


def kernels_of(profile: ProfileData) -> list[list[tuple[str, float]]]:
    """Returns the (name, microseconds) of the kernels of each GPU of a profile, in the order of its planes."""
    devices = []
    for plane in profile.planes:
        if PLANE.match(plane.name):
            streams = [line for line in plane.lines if line.name.startswith(STREAM)]
            events = [event for line in streams for event in line.events if not event.name.startswith(COPIES)]
            devices.append([(event.name, event.duration_ns / 1e3) for event in events])
    return [kernels for kernels in devices if kernels]
