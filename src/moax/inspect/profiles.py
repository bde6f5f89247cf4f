"""This module reads what ran on each GPU from a profile of JAX: the kernels of all streams, with their times."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData

from moax.inspect.hlo import KINDS

COMPUTE, COPY, EXCHANGE = "compute", "copy", "moax exchange"
# An op has the name of XLA's instruction, all-gather-start.3, or that of JAX's function, all_gather.3 and ppermute.1.
OF_JAX = {"ppermute": "collective-permute", **dict.fromkeys(("psum", "pmax", "pmin"), "all-reduce")}
OF_OP = re.compile(rf"({'|'.join((*KINDS, *OF_JAX))})(-start|-done)?(\.[\w.]+)?$")
# (a pattern of a kernel's name, its kind), for kernels whose op does not name a collective. NCCL sends an all-to-all
# and a permute with one kernel, which only the op tells apart. XLA makes GPUs wait for one another before a kernel that
# writes to peers.
OF_KERNEL = tuple(
    (re.compile(pattern, re.IGNORECASE), kind)
    for pattern, kind in (
        (r"nccl\w*AllGather", "all-gather"),
        (r"nccl\w*ReduceScatter", "reduce-scatter"),
        (r"nccl\w*AllReduce|^AllReduceKernel|::AllReduceKernel|^p(sum|max|min)_", "all-reduce"),
        (r"nccl\w*(AllToAll|AlltoAll)", "all-to-all"),
        (r"RaggedAllToAll", "ragged-all-to-all"),
        (r"nccl\w*SendRecv", "send-receive"),
        (r"nccl\w*Kernel", "other collective"),
        (r"put_rows|MultiGpuBarrier", EXCHANGE),
        (r"^(Memcpy|Memset)", COPY),
    )
)


class Kernel(NamedTuple):
    """One execution of a kernel, or one copy, on a GPU.

    Attributes:
      device: the GPU, as the profile names it.
      name: the name of the kernel.
      op: the instruction of the program that it belongs to; "" where the profile names none.
      start, end: nanoseconds since the profile began.
    """

    device: str
    name: str
    op: str
    start: float
    end: float

    @property
    def kind(self) -> str:
        """The kind of collective, such as `all-gather`, or `moax exchange`, `copy` or `compute`."""
        if found := OF_OP.match(self.op.replace("_", "-")):
            return OF_JAX.get(found[1], found[1])
        return next((kind for pattern, kind in OF_KERNEL if pattern.search(self.name)), COMPUTE)


def profile_kernels(f: Callable, *args: Any, steps: int) -> list[Kernel]:
    """Runs `f(*args)` under JAX's profiler, and returns what ran on the GPUs.

    The first call is made before the profile, so that the profile holds no compilation.

    Args:
      f: a jitted or compiled function, which leaves its arguments alive.
      args: its arguments.
      steps: the number of profiled calls, one after another.

    Raises:
      ValueError: nothing ran on a GPU.
    """
    jax.block_until_ready(f(*args))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                jax.block_until_ready(f(*args))
        return read_profile(folder)


def read_profile(path: str | Path) -> list[Kernel]:
    """Returns what ran on the GPUs while JAX's profiler was on.

    Args:
      path: a file `*.xplane.pb`, or a folder that `jax.profiler.trace` or `jax.profiler.start_trace` wrote. Of a folder
        with several profiles, the newest one is read, with the files of all its hosts.

    Returns:
      The kernels and copies of all streams of all GPUs.

    Raises:
      ValueError: there is no profile, or nothing in it ran on a GPU.
    """
    path = Path(path)
    files = [path] if path.is_file() else _newest(path)
    if not files:
        raise ValueError(f"{path}: there is no *.xplane.pb; jax.profiler.trace writes a folder with such files")
    kernels: list[Kernel] = []
    for file in files:
        host = "" if len(files) == 1 else file.name.removesuffix(".xplane.pb") + " "
        kernels.extend(_kernels(ProfileData.from_file(str(file)), host))
    if not kernels:
        raise ValueError(f"{path}: nothing ran on a GPU in this profile; profile a step on GPUs, after its first call")
    return kernels


def _newest(folder: Path) -> list[Path]:
    """Returns the files of the newest profile in a folder; [] for none."""
    files = list(folder.rglob("*.xplane.pb"))
    if not files:
        return []
    newest = max(files, key=lambda file: file.stat().st_mtime).parent
    return sorted(file for file in files if file.parent == newest)


def _kernels(data: ProfileData, host: str) -> Iterator[Kernel]:
    """Yields the events of the streams of GPUs; other lines of a profile repeat them by step, module and op."""
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        device = host + plane.name.removeprefix("/device:")
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    op = dict(event.stats).get("hlo_op", "")
                    yield Kernel(device, event.name, str(op), event.start_ns, event.end_ns)
