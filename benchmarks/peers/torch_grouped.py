"""PyTorch's grouped matmuls, in a process of their own: python3 -m benchmarks.peers.torch_grouped REQUEST

    fwd    x [M, K] w[g(m)] [K, N]     dgrad  dy [M, N] w[g(m)]^T     wgrad  dy^T [N, M] x [M, K], rows of each group

REQUEST is JSON: {"cases": [{"name", "sizes", "contracted", "columns"}], "warmups", "measured"}. The program prints a
line of JSON for each result: case, direction, recipe (`none`: bf16; `fp8_rowwise`: e4m3, a scale for each row), us
(CUDA events), error and error_worst (against float64, relative), or a note with the reason.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.block.worker import environment
from benchmarks.cases import DIRECTIONS
from benchmarks.cases import Case as Shape
from benchmarks.report import Row, why
from benchmarks.timing import Repeats

SECONDS = 400
NAME = {"none": "torch_grouped_mm", "fp8_rowwise": "torch_scaled_grouped_mm"}
SAMPLE = 4  # compared rows of a group
COLUMNS = 32
DEVICE = "cuda"


class Case(NamedTuple):
    """A shape: `sizes` are the rows of each group, `contracted` is K, `columns` is N."""

    name: str
    sizes: list[int]
    contracted: int
    columns: int


def rows(cases: Sequence[Shape], repeats: Repeats) -> list[Row]:
    """Returns a row for each case, direction and recipe; its note has the reason where PyTorch does not run."""
    shapes = [Case(c.name, c.sizes.tolist(), c.contracted, c.columns)._asdict() for c in cases]
    request = {"cases": shapes, "warmups": repeats.warmups, "measured": repeats.measured}
    command = [sys.executable, "-m", "benchmarks.peers.torch_grouped", json.dumps(request)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment(),
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        reason = f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        lines = []
        reason = why(error)
    measured = {(line["case"], line["direction"], line["recipe"]): line for line in lines}
    return [
        _row(case, direction, recipe, measured.get((case.name, direction, recipe), {"note": reason}))
        for case in cases
        for direction in DIRECTIONS
        for recipe in NAME
    ]


def _row(case: Shape, direction: str, recipe: str, result: dict) -> Row:
    dtype = "bfloat16" if recipe == "none" else "e4m3"
    row = Row(
        "gemm",
        case.name,
        direction,
        NAME[recipe],
        recipe,
        dtype,
        "peer",
        note=result.get("note", ""),
    )
    if result.get("us"):
        row.us = result["us"]
        row.method = "events"
        row.tflops = case.flops / row.us * 1e-6
        row.error = result["error"]
        row.error_worst = result["error_worst"]
    return row


def main(argv: list[str]) -> int:
    """Measures the request `argv[0]`, and prints the results. Returns 0."""
    request = json.loads(argv[0])
    for case in (Case(**fields) for fields in request["cases"]):
        for recipe in NAME:
            for direction in DIRECTIONS:
                result: dict[str, Any] = {
                    "case": case.name,
                    "direction": direction,
                    "recipe": recipe,
                }
                try:
                    result |= measure(
                        case,
                        direction,
                        recipe,
                        request["warmups"],
                        request["measured"],
                    )
                except Exception as error:  # The other measurements go on.
                    result["note"] = why(error)
                print(json.dumps(result), flush=True)
    return 0


def measure(case: Case, direction: str, recipe: str, warmups: int, measured: int) -> dict[str, Any]:
    """Returns {us, error, error_worst, note} of one matmul."""
    import torch  # pyrefly: ignore[missing-import]

    torch.cuda.empty_cache()
    torch.manual_seed(0)
    fp8 = recipe != "none"
    sizes = list(case.sizes)
    note = ""
    if fp8 and direction == "wgrad" and any(n % 16 for n in sizes):
        # Rows are the contiguous dim of both operands there; the kernel wants 16 bytes.
        rounded = [n // 16 * 16 for n in sizes]
        rounded[rounded.index(max(rounded))] += sum(sizes) - sum(rounded)
        sizes = rounded
        note = "group sizes rounded to multiples of 16, which it needs"
    rows = sum(sizes)
    groups = len(sizes)
    ends = torch.tensor(sizes, device=DEVICE).cumsum(0).to(torch.int32)
    width = {"fwd": case.contracted, "dgrad": case.columns, "wgrad": case.columns}[direction]
    left = torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16)
    if direction == "wgrad":
        left = left.t()
        right = torch.randn(rows, case.contracted, device=DEVICE, dtype=torch.bfloat16)
    else:  # w as nn.Linear has it, [G, N, K]
        w = torch.randn(groups, case.columns, case.contracted, device=DEVICE, dtype=torch.bfloat16)
        w *= case.contracted**-0.5
        right = w.transpose(-2, -1) if direction == "fwd" else w
    exact = (left, right)

    def product():
        return torch._grouped_mm(left, right, offs=ends)

    if fp8:
        *operands, exact_a, exact_b = quantize(torch, left, right, sizes, direction)
        options = dict(offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)
        exact = (exact_a, exact_b)
        product = functools.partial(torch._scaled_grouped_mm, *operands, **options)
    total, worst = errors(product(), exact, sizes, direction)
    us = seconds(torch, product, warmups, measured) * 1e6
    return {"us": us, "error": total, "error_worst": worst, "note": note}


def quantize(torch, left, right, sizes: list[int], direction: str):
    """Returns row-wise e4m3 operands as `_scaled_grouped_mm` takes them, their scales, and what they stand for."""
    f8 = torch.float8_e4m3fn

    def scaled(x, dim):
        scale = x.abs().amax(dim, keepdim=True).float().clamp(min=1e-12) / 448.0
        return (x.float() / scale).to(f8), scale

    if direction != "wgrad":
        a, scale_a = scaled(left, 1)
        b, scale_b = scaled(right.transpose(-2, -1).contiguous(), 2)  # [G, out, contracted]
        stands = a.float() * scale_a, (b.transpose(-2, -1), scale_b.transpose(-2, -1))
        return a, b.transpose(-2, -1), scale_a.flatten(), scale_b[..., 0], *stands
    stands = []
    data = []
    scales = []
    for x in (left, right.t()):
        parts = [scaled(x[:, lo:hi], 1) for lo, hi in spans(sizes) if hi > lo]
        data.append(torch.cat([d for d, _ in parts], 1))
        stands.append(torch.cat([d.float() * s for d, s in parts], 1))
        ones = torch.ones(x.shape[0], device=x.device)
        scaled_parts = iter(parts)
        scales.append(torch.cat([next(scaled_parts)[1].flatten() if n else ones for n in sizes]))
    return data[0], data[1].t(), *scales, stands[0], stands[1].t()


def errors(out, operands, sizes: list[int], direction: str) -> tuple[float, float]:
    """Returns the relative distance to float64 of some rows and columns: over all groups, and of the worst group."""
    left, right = operands
    columns = slice(0, None, max(1, out.shape[-1] // COLUMNS))
    difference = norm = worst = 0.0
    for g, (lo, hi) in enumerate(spans(sizes)):
        if direction == "wgrad":
            sampled = slice(0, None, max(1, out.shape[1] // SAMPLE))
            want = left[sampled, lo:hi].double() @ right[lo:hi, columns].double()
            got = out[g, sampled, columns].double()
        elif hi > lo:
            sampled = slice(lo, hi, max(1, (hi - lo) // SAMPLE))
            if isinstance(right, tuple):  # e4m3 data and scale
                b = right[0][g][:, columns].double() * right[1][g][:, columns].double()
            else:
                b = right[g][:, columns].double()
            want = left[sampled].double() @ b
            got = out[sampled, columns].double()
        else:
            continue
        d = float(((got - want) ** 2).sum())
        n = float((want**2).sum())
        difference = difference + d
        norm = norm + n
        if n:
            error = (d / n) ** 0.5
        else:
            error = 0.0 if d == 0.0 else float("inf")
        worst = max(worst, error)
    return (difference / norm) ** 0.5, worst


def spans(sizes: list[int]) -> list[tuple[int, int]]:
    """Returns the first row, and the row after the last one, of each group."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def seconds(torch, f, warmups: int, measured: int) -> float:
    """Returns the median time between CUDA events around each call, in a queue that never runs dry."""
    for _ in range(warmups):
        f()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(measured + 1)]
    torch.cuda.synchronize()
    f()
    marks[0].record()
    for mark in marks[1:]:
        f()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)) * 1e-3


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
