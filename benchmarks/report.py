"""The rows of results: a table on the terminal, and a JSON file {"header": ..., "rows": [...]}."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from moax import backend

OURS, JNP = "moax", "jnp"
SONIC = ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")  # the packages of SonicMoE's kernels
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
      error: distance to the float64 result of the operands that enter the product, norm over norm.
      error_worst: the same of the worst expert.
      error_rounding: the same of the float64 result rounded to bf16.
      error_unquantized: distance to the float64 result of the operands before quantization.
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
    error_rounding: float | None = None
    error_unquantized: float | None = None
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
    """Returns what all rows share: device, driver, versions, commit, command, date and limits."""
    return {
        "device": backend.device_kind(),
        "driver": _driver(),
        "versions": _versions("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "torch", *SONIC),
        "git_sha": sha or git_sha(),
        "command": shlex.join(_without_folder(part) for part in command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "limits": limits,
    }


def to_json(head: dict[str, Any], rows: list[Row]) -> str:
    """Returns header and rows as JSON; each row repeats the device, the JAX version, the commit and the command."""
    origin = {
        "device": head["device"],
        "jax": head["versions"].get("jax"),
        "git_sha": head["git_sha"],
        "command": head["command"],
    }
    body = {"header": head, "rows": [{**dataclasses.asdict(row), **origin} for row in rows]}
    return json.dumps(_finite(body), indent=1, allow_nan=False)


def save(path: str | Path, head: dict[str, Any], rows: list[Row] | list[dict[str, Any]]) -> None:
    """Writes header and rows to the file `path` as JSON, a line a row.

    Empty fields are left out, and so is the list of a row's kernels, which `--json` prints.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    written = [json.dumps(_finite(_measured(row)), allow_nan=False) for row in rows]
    text = json.dumps({"header": _finite(head)}, indent=1)[:-2] + ',\n "rows": [\n  '
    Path(path).write_text(text + ",\n  ".join(written) + "\n ]\n}\n")


def _measured(row: Row | dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row that hold something, and `us`, which is None where nothing ran."""
    fields = row if isinstance(row, dict) else dataclasses.asdict(row)
    fields = fields | {"extra": {k: v for k, v in fields.get("extra", {}).items() if k != "kernels"}}
    return {name: value for name, value in fields.items() if name == "us" or value not in (None, "", {})}


def show(title: str, head: dict[str, Any], rows: list[Row], stream=None) -> None:
    """Prints a table with a line for each row, then details, then the rows that could not run."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=stream)
    console = console if console.is_terminal else Console(file=stream, width=180)
    limits = head["limits"]
    measured = {name: limit for name, limit in limits.items() if limit["value"]}
    known = ", ".join(f"{name} {limit['value']:.4g} {limit['unit']}" for name, limit in measured.items())
    table = Table(title=f"{title} on {head['device']}", caption=f"limits of this run: {known or 'none'}")
    columns = ("case", "direction", "recipe", "impl", "tile", "us", "TFLOP/s", "TB/s", "of limit", "error", "peers")
    for column in columns:
        right = column in ("us", "TFLOP/s", "TB/s", "of limit", "error")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    before, several = None, len({row.op for row in rows}) > 1
    for row in rows:
        if row.us is None:
            continue
        if before not in (None, (row.op, row.case, row.direction)):
            table.add_section()
        before = (row.op, row.case, row.direction)
        peers = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in row.peers.items())
        what = f"{row.op} {row.case}" if several else row.case
        cells = (what, row.direction, row.recipe, row.impl, row.tile or row.path)
        numbers = (_number(row.us, ".1f"), _number(row.tflops, ".0f"), _number(row.tb_s, ".2f"))
        rest = (_number(row.fraction, ".2f"), _number(row.error, ".1e"), peers)
        style = "bold" if row.impl == OURS else ""
        table.add_row(*(Text(cell) for cell in (*cells, *numbers, *rest)), style=style)
    if table.row_count:
        console.print(table)
    for row in rows:
        for line in _details(row):
            console.print(Text(line))
    for row in rows:
        if row.us is None:
            what = f"{row.op} {row.case} {row.direction} {row.recipe} {row.impl}"
            console.print(Text(f"not available: {what}: {row.note}"))


def _details(row: Row) -> list[str]:
    """Returns lines of details: time by stage of a block, tokens of a step, memory, and remarks on a peer."""
    text = []
    stages = {name: us for name, us in row.extra.get("stages_us", {}).items() if us}
    where = f"{row.case} {row.direction} {row.recipe}" + ("" if row.impl == OURS else f" {row.impl}")
    if row.op in ("block", "train", "imbalance") and row.us and row.note:
        text.append(f"{where}: {row.note}")
    if "tokens_per_s" in row.extra:
        peak, last = row.extra["peak_bytes"], row.extra["losses"][-1]
        held = "" if peak is None else f", peak {peak / 1e9:.2f} GB"
        text.append(f"{where}: {row.extra['tokens_per_s']:,.0f} tokens/s of a device{held}; loss {last:.3f} at the end")
    if computed := row.extra.get("fsdp8_computed"):
        text.append(
            f"{where}: computed, not measured: {computed['us'] / 1e3:.2f} ms a step, {computed['tokens_per_s']:,.0f} "
            f"tokens/s, where each of 8 ranks quantizes 1/8 of the weights ({computed['quantization_us'] / 1e3:.2f} ms)"
        )
    if stages and row.us:
        parts = ", ".join(f"{name} {us / 1e3:.2f}" for name, us in stages.items())
        text.append(f"{where}: ms by stage: {parts}; kernels {sum(stages.values()) / 1e3:.2f} of {row.us / 1e3:.2f}")
    if row.us and "event_us" in row.extra:
        kernels, events = row.extra["kernel_us"] / 1e3, row.extra["event_us"] / 1e3
        text.append(f"{where}: kernels {kernels:.2f} ms, {events:.2f} by events, {row.us / 1e3:.2f} wall")
    if ratios := row.extra.get("kernel_peers"):
        text.append(f"{where}: by kernels alone: {', '.join(f'{name} {r:.2f}x' for name, r in ratios.items())}")
    if row.us and "exposed_us" in row.extra:
        text.append(
            f"{where}: {row.extra['exposed_us'] / 1e3:.2f} ms in which nothing computes (communication and gaps)"
        )
    errors = row.extra.get("errors", {})
    if errors:
        worst = {name: f" ({of['worst']:.1e})" for name, of in errors.items() if "worst" in of}
        said = errors.get("note") or ", ".join(f"{n} {of['error']:.1e}{worst.get(n, '')}" for n, of in errors.items())
        text.append(f"{where}: errors against float32 (of the worst expert): {said}")
    if row.direction == "fwd+bwd" and "params_bytes" in row.extra:
        peak = row.extra["peak_bytes"]
        held = f"peak {'?' if peak is None else format(peak / 1e9, '.2f')} GB, parameters "
        held += f"{row.extra['params_bytes'] / 1e9:.2f}"
        if "saved_bytes" in row.extra:
            needed = sum(row.extra["saved_needed_bytes"].values()) / 1e9
            saved = row.extra["saved_bytes"] / 1e9
            held += f", saved for backward {saved:.2f} (rows and hidden need {needed:.2f})"
        text.append(f"{where}: {held}")
    return text


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


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
    if backend.platform() != "gpu":
        return None
    versions = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return versions.splitlines()[0] if versions else None


def _versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, JAX and the installed ones of `packages`."""
    import importlib.metadata

    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found.setdefault("jax", jax.__version__)
    return found


def git_sha() -> str | None:
    """Returns the commit of this clone, with `-dirty` where its code differs from the commit; None without git."""
    root, code = str(Path(__file__).parent.parent), ("src", "benchmarks", ":(exclude)benchmarks/results")
    sha = _output_of("git", "-C", root, "rev-parse", "HEAD")
    return sha and sha + ("-dirty" if _output_of("git", "-C", root, "status", "--porcelain", "--", *code) else "")


def _without_folder(part: str) -> str:
    """Returns the name of a file without its folder, which means nothing on another machine."""
    return part.rsplit("/", 1)[-1] if part.startswith("/") else part


def _output_of(*command: str) -> str | None:
    """Returns what a command prints, or None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
