"""This program reads a profile of JAX: how long collectives run on each GPU, and with nothing computing beside them.

    python -m benchmarks.profiles PROFILE --steps 5

A time counts as hidden where a collective and a kernel that computes run at once, which is the intersection of their
intervals. Where two collectives run at once, the sum of their rows is more than the row of all collectives.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData

from lm import program
from moax.inspect.hlo import KINDS
from moax.text import align

NAME = "python -m benchmarks.profiles"
DESCRIPTION = """\
Reads a profile of JAX, and tells how much of each collective's time has computation beside it on the same GPU, as the
intersection of intervals. Times are milliseconds of a step: ms is while a collective of the kind runs, hidden the part
with computation beside it, exposed the rest.
"""
ALL = "all collectives"
Interval = tuple[float, float]  # start and end

COMPUTE = "compute"
COPY = "copy"
# An op has the name of XLA's instruction, all-gather-start.3, or that of JAX's function, all_gather.3 and ppermute.1.
OF_JAX = {"ppermute": "collective-permute", **dict.fromkeys(("psum", "pmax", "pmin"), "all-reduce")}
OF_OP = re.compile(rf"({'|'.join((*KINDS, *OF_JAX))})(-start|-done)?(\.[\w.]+)?$")
# (a pattern of a kernel's name, its kind), for kernels whose op does not name a collective. NCCL sends an all-to-all
# and a permute with one kernel, which only the op tells apart.
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
        if match := OF_OP.match(self.op.replace("_", "-")):
            return OF_JAX.get(match[1], match[1])
        return next((kind for pattern, kind in OF_KERNEL if pattern.search(self.name)), COMPUTE)


def read_profile(path: str | Path) -> list[Kernel]:
    """Returns what ran on the GPUs while JAX's profiler was on."""
    path = Path(path)
    files = [path] if path.is_file() else _newest(path)
    if not files:
        raise ValueError(f"{path}: there is no *.xplane.pb; jax.profiler.trace writes a folder with such files")
    kernels: list[Kernel] = []
    for file in files:
        if len(files) == 1:
            host = ""
        else:
            host = file.name.removesuffix(".xplane.pb") + " "
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


class Hidden(NamedTuple):
    """The time of the collectives of one kind on one GPU, in milliseconds of a step."""

    kind: str
    count: float
    ms: float
    hidden_ms: float

    @property
    def exposed_ms(self) -> float:
        """The part of `ms` while nothing computes."""
        return self.ms - self.hidden_ms


class Overlap(NamedTuple):
    """What one GPU did, in milliseconds of a step."""

    device: str
    ms: float
    compute_ms: float
    idle_ms: float
    kinds: tuple[Hidden, ...]

    @property
    def exposed_ms(self) -> float:
        """The time while a collective runs and nothing computes."""
        return self.kinds[0].exposed_ms


def overlaps(kernels: Iterable[Kernel], steps: int = 1) -> tuple[Overlap, ...]:
    """Returns, for each GPU, how much of its collectives has computation beside it."""
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1, the number of steps in the profile")
    by_device: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_device.setdefault(kernel.device, []).append(kernel)
    return tuple(_of_device(device, by_device[device], steps) for device in sorted(by_device, key=_numbered))


def overlap_table(overlapped: Sequence[Overlap]) -> str:
    """Returns the overlaps as a table: for each GPU a line of all collectives and a line of each kind."""
    rows: list[tuple[str, ...] | None] = [
        (
            "device",
            "kind",
            "count",
            "ms",
            "hidden",
            "exposed",
            "hidden share",
        )
    ]
    for one in overlapped:
        rows.append(None)
        for i, kind in enumerate(one.kinds):
            share = f"{kind.hidden_ms / kind.ms:.0%}" if kind.ms else "-"
            times = (f"{v:.3f}" for v in (kind.ms, kind.hidden_ms, kind.exposed_ms))
            rows.append((one.device if i == 0 else "", kind.kind, f"{kind.count:g}", *times, share))
    whole = [
        f"{o.device}: {o.ms:.3f} ms a step, {o.compute_ms:.3f} ms compute, {o.idle_ms:.3f} ms idle" for o in overlapped
    ]
    return "\n".join([align(rows, right=(2, 3, 4, 5, 6)), "", *whole])


def _of_device(device: str, kernels: list[Kernel], steps: int) -> Overlap:
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for kernel in kernels:
        by_kind.setdefault(kernel.kind, []).append((kernel.start, kernel.end))
    everything = union(interval for intervals in by_kind.values() for interval in intervals)
    compute = union(by_kind.pop(COMPUTE, []))
    by_kind.pop(COPY, None)

    def per_step(ns: float) -> float:
        return ns / steps / 1e6

    def hidden(kind: str, intervals: list[tuple[float, float]]) -> Hidden:
        busy = union(intervals)
        both = length(intersect(busy, compute))
        return Hidden(kind, len(intervals) / steps, per_step(length(busy)), per_step(both))

    kinds = sorted(
        (hidden(kind, by_kind[kind]) for kind in by_kind),
        key=lambda row: -row.exposed_ms,
    )
    together = hidden(ALL, [interval for intervals in by_kind.values() for interval in intervals])
    span = max(k.end for k in kernels) - min(k.start for k in kernels)
    idle = span - length(everything)
    return Overlap(
        device,
        per_step(span),
        per_step(length(compute)),
        per_step(idle),
        (together, *kinds),
    )


def _numbered(device: str) -> tuple[str, int]:
    """Returns a key that sorts GPU:2 before GPU:10."""
    name, _, number = device.rpartition(":")
    return (name, int(number)) if number.isdecimal() else (device, 0)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the times in at least one interval.

    (0, 4), (2, 5), (5, 6) and (8, 9) are (0, 6) and (8, 9).
    """
    joined: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Returns the times in both unions.

    (0, 6), (8, 9) and (5, 10) share (5, 6) and (8, 9).
    """
    shared = []
    i = 0
    j = 0
    while i < len(a) and j < len(b):
        start = max(a[i][0], b[j][0])
        end = min(a[i][1], b[j][1])
        if start < end:
            shared.append((start, end))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return shared


def length(intervals: Iterable[Interval]) -> float:
    """Returns the sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m benchmarks.profiles ARGV`, and returns the exit code; see `lm.program`."""
    parser = argparse.ArgumentParser(
        prog=NAME, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "profile",
        metavar="PROFILE",
        help="a folder that jax.profiler.trace wrote, or a file *.xplane.pb",
    )
    add(
        "--steps",
        type=int,
        default=1,
        metavar="N",
        help="steps in the profile (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    return program.run(NAME, lambda: show(args.profile, args.steps))


def show(profile: str, steps: int) -> int:
    """Prints the overlap of each GPU of a profile. Returns 0."""
    print(overlap_table(overlaps(read_profile(profile), steps)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
