"""This module tells how much of the time of collectives has computation beside it on the same GPU.

A time counts as hidden where a collective and a kernel that computes run at once, which is the intersection of their
intervals. Where two collectives run at once, the sum of their rows is more than the row of all collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from moax.inspect.intervals import intersect, length, union
from moax.inspect.profiles import COMPUTE, COPY, Kernel, profile_kernels
from moax.text import align

ALL = "all collectives"


class Hidden(NamedTuple):
    """The time of the collectives of one kind on one GPU, in milliseconds of a step.

    Attributes:
      kind: a kind of collective, `moax exchange`, or `all collectives`.
      count: executions in a step.
      ms: while at least one of them runs.
      hidden_ms: the part of `ms` while a kernel computes too.
    """

    kind: str
    count: float
    ms: float
    hidden_ms: float

    @property
    def exposed_ms(self) -> float:
        """The part of `ms` while nothing computes."""
        return self.ms - self.hidden_ms


class Overlap(NamedTuple):
    """What one GPU did, in milliseconds of a step.

    Attributes:
      device: the GPU.
      ms: from the start of the first kernel to the end of the last one.
      compute_ms: while at least one kernel computes.
      idle_ms: while no kernel, collective or copy runs.
      kinds: the collectives by kind, the most exposed kind first; the first row is that of all collectives.
    """

    device: str
    ms: float
    compute_ms: float
    idle_ms: float
    kinds: tuple[Hidden, ...]

    @property
    def exposed_ms(self) -> float:
        """The time while a collective runs and nothing computes."""
        return self.kinds[0].exposed_ms

    def as_dict(self) -> dict:
        """Returns the fields and the exposed times as a tree for JSON."""
        kinds = [{**kind._asdict(), "exposed_ms": kind.exposed_ms} for kind in self.kinds]
        return {**self._asdict(), "exposed_ms": self.exposed_ms, "kinds": kinds}


def overlaps(kernels: Iterable[Kernel], steps: int = 1) -> tuple[Overlap, ...]:
    """Returns, for each GPU, how much of its collectives has computation beside it.

    Args:
      kernels: what ran, as `read_profile` returns it.
      steps: the number of steps that the profile holds; every number is divided by it.

    Returns:
      One `Overlap` for each GPU, sorted by its name.

    Raises:
      ValueError: steps is less than 1.
    """
    _check(steps)
    by_device: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        by_device.setdefault(kernel.device, []).append(kernel)
    return tuple(_of_device(device, by_device[device], steps) for device in sorted(by_device, key=_numbered))


def measure_overlap(f: Callable, *args: Any, steps: int = 5) -> tuple[Overlap, ...]:
    """Runs `f(*args)` under JAX's profiler and returns the overlap of each GPU, per call.

    The first call is made before the profile, so that the profile holds no compilation.

    Args:
      f: a jitted or compiled function, which leaves its arguments alive.
      args: its arguments.
      steps: the number of profiled calls, one after another.

    Raises:
      ValueError: steps is less than 1, or nothing ran on a GPU.
    """
    _check(steps)
    return overlaps(profile_kernels(f, *args, steps=steps), steps)


def overlap_table(found: Sequence[Overlap]) -> str:
    """Returns the overlaps as a table: for each GPU a line of all collectives and a line of each kind."""
    rows: list[tuple[str, ...] | None] = [("device", "kind", "count", "ms", "hidden", "exposed", "hidden share")]
    for one in found:
        rows.append(None)
        for i, kind in enumerate(one.kinds):
            share = f"{kind.hidden_ms / kind.ms:.0%}" if kind.ms else "-"
            times = (f"{v:.3f}" for v in (kind.ms, kind.hidden_ms, kind.exposed_ms))
            rows.append((one.device if i == 0 else "", kind.kind, f"{kind.count:g}", *times, share))
    whole = [f"{o.device}: {o.ms:.3f} ms a step, {o.compute_ms:.3f} ms compute, {o.idle_ms:.3f} ms idle" for o in found]
    return "\n".join([align(rows, right=(2, 3, 4, 5, 6)), "", *whole])


def _check(steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps={steps} must be at least 1, the number of steps in the profile")


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

    kinds = sorted((hidden(kind, by_kind[kind]) for kind in by_kind), key=lambda row: -row.exposed_ms)
    together = hidden(ALL, [interval for intervals in by_kind.values() for interval in intervals])
    span = max(k.end for k in kernels) - min(k.start for k in kernels)
    idle = span - length(everything)
    return Overlap(device, per_step(span), per_step(length(compute)), per_step(idle), (together, *kinds))


def _numbered(device: str) -> tuple[str, int]:
    """Returns a key that sorts GPU:2 before GPU:10."""
    name, _, number = device.rpartition(":")
    return (name, int(number)) if number.isdecimal() else (device, 0)
