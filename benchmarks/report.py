"""The rows of results: a table on the terminal, and a JSON file {"header": ..., "rows": [...]}."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from lm.machine import git_sha, output_of
from moax.kernels.device import find_device
from moax.text import align

OURS = "moax"
SONIC = ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")  # the packages of SonicMoE's kernels
CODE = ("src", "benchmarks", ":(exclude)benchmarks/results")  # what a measured commit has
HOPPER = "hopper"  # `Row.path` of a program that runs moax's kernels for Hopper GPUs


@dataclasses.dataclass
class Row:
    """One measurement. A field that was not measured is None, and `note` says why.

    Attributes:
      op, case, direction: what was measured.
      impl: `moax`, or the name of a peer.
      recipe: the recipe of the operands.
      dtype: the dtype of the operands.
      path: the implementation that ran: `hopper` or `xla`, PyTorch's `eager` or `compiled`, or the version of QuACK.
      tile: the tile of the kernel.
      method: the clock; see `benchmarks.timing`.
      us: microseconds of a call.
      tflops, tb_s: TFLOP/s and TB/s; only real rows count.
      limit: the binding physical limit.
      fraction: the rate over the rate that the limit allows.
      error: distance to the float64 result of the operands that enter the matmul, norm over norm.
      error_worst: the same of the worst expert.
      peers: {peer: its time over moax's}.
      note: a remark, or the reason why nothing was measured.
      extra: further values of the benchmark.
    """

    op: str
    case: str
    direction: str
    impl: str = OURS
    recipe: str = "none"
    dtype: str = "bfloat16"
    path: str = ""
    tile: str = ""
    method: str = ""
    us: float | None = None
    tflops: float | None = None
    tb_s: float | None = None
    limit: str = ""
    fraction: float | None = None
    error: float | None = None
    error_worst: float | None = None
    peers: dict[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


def why(error: BaseException) -> str:
    """Returns an error as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}".rstrip(": ")


def compare(rows: Iterable[Row]) -> None:
    """Fills `peers` of moax's rows from the rows of peers with the same op, case and direction.

    A quantized row is compared with quantized rows alone, and a bf16 row with bf16 rows.
    """
    rows = list(rows)
    for ours in rows:
        for peer in rows:
            same = (peer.op, peer.case, peer.direction) == (ours.op, ours.case, ours.direction)
            alike = same and (peer.recipe == "none") == (ours.recipe == "none")
            if ours.impl == OURS != peer.impl and alike and ours.us and peer.us:
                ours.peers[peer.impl] = peer.us / ours.us


def header(command: list[str], sha: str | None, limits: dict[str, Any]) -> dict[str, Any]:
    """Returns what all rows share: device, driver, versions, commit, command, date, limits and NCCL's variables."""
    return {
        "device": find_device().device_kind,
        "driver": _driver(),
        "versions": _versions(
            "jax",
            "jaxlib",
            "jax-cuda13-plugin",
            "nvidia-cudnn-cu13",
            "torch",
            *SONIC,
        ),
        "git_sha": sha or git_sha(*CODE),
        "command": shlex.join(_without_folder(part) for part in command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "limits": limits,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("NCCL_")},
    }


def to_json(head: dict[str, Any], rows: list[Row] | list[dict[str, Any]]) -> str:
    """Returns header and rows as JSON, a line a row, without the fields that are empty."""
    written = [json.dumps(_finite(_measured(row)), allow_nan=False) for row in rows]
    text = json.dumps({"header": _finite(head)}, indent=1)[:-2] + ',\n "rows": [\n  '
    return text + ",\n  ".join(written) + "\n ]\n}\n"


def save(path: str | Path, head: dict[str, Any], rows: list[Row] | list[dict[str, Any]]) -> None:
    """Writes header and rows to the file `path` as JSON, without the list of a row's kernels, which `--json` prints."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    listed = [_measured(row) for row in rows]
    for row in listed:
        row.get("extra", {}).pop("kernels", None)
    Path(path).write_text(to_json(head, listed))


def _measured(row: Row | dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row that hold something, and `us`, which is None where nothing ran."""
    if isinstance(row, dict):
        return row
    return {name: v for name, v in dataclasses.asdict(row).items() if name == "us" or v not in (None, "", {})}


def show(head: dict[str, Any], rows: list[Row]) -> None:
    """Prints a table with a line for each row, then what else was measured, then the rows that could not run."""
    limits = {name: limit for name, limit in head["limits"].items() if limit["value"]}
    known = ", ".join(f"{name} {limit['value']:.4g} {limit['unit']}" for name, limit in limits.items())
    print(f"{head['device']}; limits of this run: {known or 'none'}")
    numbers = {"us": ".1f", "tflops": ".0f", "tb_s": ".2f", "fraction": ".2f", "error": ".1e"}
    names = ("what", "direction", "recipe", "impl", "tile or path", *numbers, "peers")
    lines: list[tuple[str, ...] | None] = [names, None]
    for row in (row for row in rows if row.us is not None):
        values = (getattr(row, name) for name in numbers)
        cells = ("" if v is None else format(v, form) for v, form in zip(values, numbers.values(), strict=True))
        what = (f"{row.op} {row.case}", row.direction, row.recipe, row.impl, row.tile or row.path)
        lines.append(
            (
                *what,
                *cells,
                ", ".join(f"{name} {ratio:.2f}x" for name, ratio in row.peers.items()),
            )
        )
    print(align(lines, right=(5, 6, 7, 8, 9)))
    for row in rows:
        where = f"{row.op} {row.case} {row.direction} {row.recipe} {row.impl}"
        if row.us is None:
            print(f"not available: {where}: {row.note}")
        elif row.extra or row.note:
            extra = (f"{name} {_short(value)}" for name, value in row.extra.items() if name != "kernels")
            print(f"{where}: " + ", ".join(filter(None, (row.note, *extra))))


def _short(value) -> str:
    """Returns a value in few letters: times of a dict in brackets, and of a list its last one."""
    if isinstance(value, dict):
        return f"({', '.join(f'{name} {_short(entry)}' for name, entry in value.items() if entry)})"
    if isinstance(value, list | tuple):
        return f"[.., {_short(value[-1])}]" if value else "[]"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _finite(value):
    """Returns `value` with NaN and infinities as strings, since JSON has no such numbers."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _driver() -> str | None:
    """Returns the version of the GPU's driver; None where JAX does not run on a GPU."""
    if find_device().platform != "gpu":
        return None
    versions = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0] if versions else None


def _versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, JAX and the installed ones of `packages`."""
    import importlib.metadata

    versions = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions.setdefault("jax", jax.__version__)
    return versions


def _without_folder(part: str) -> str:
    """Returns the name of a file without its folder, which means nothing on another machine."""
    return part.rsplit("/", 1)[-1] if part.startswith("/") else part
