"""The README: its numbers are those of committed results. Its programs are run by test_docs.py.

Covers: every number of its tables.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_numbers_are_committed():
    """Breaks if the table shows a number that no committed result holds, or leaves a row of it out."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "wire.json").read_text())["rows"]
    gathered = {(r["model"], r["recipe"]): r["gathered"] for r in rows}
    lines = re.findall(r"^\| ([\w.-]+) \| ([\d,]+) \| ([\d,]+) \(([\d.]+)\) \| ([\d,]+) \(([\d.]+)\) \|$", README, re.M)
    assert {line[0] for line in lines} == {model for model, _ in gathered}
    for model, plain, block, block_ratio, mx, mx_ratio in lines:
        shown = {None: plain, "fp8_block": block, "mxfp8": mx}
        assert {r: int(v.replace(",", "")) for r, v in shown.items()} == {r: gathered[model, r] for r in shown}
        for recipe, ratio in (("fp8_block", block_ratio), ("mxfp8", mx_ratio)):
            assert f"{gathered[model, recipe] / gathered[model, None]:.3f}" == ratio


def test_speeds_are_committed():
    """Breaks if the table shows a speed that was not measured, or leaves a slower row of ours out."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200_gemm.json").read_text())["rows"]
    measured = {(r["case"], r["direction"], r["impl"], r["recipe"]): f"{r['tflops']:.0f}" for r in rows if r["us"]}
    columns = (
        ("moax", "none"), ("torch_grouped_mm", "none"), ("pallas_mgpu", "none"), ("ragged_dot", "none"),
        ("moax", "fp8_block"), ("torch_scaled_grouped_mm", "fp8_rowwise"),
    )  # fmt: skip
    lines = re.findall(r"^\| (\w+) \| (fwd|dgrad|wgrad) \| (.*) \|$", README, re.M)
    assert {(case, direction) for case, direction, _ in lines} == {key[:2] for key in measured}
    for case, direction, cells in lines:
        want = [measured[case, direction, *column] for column in columns]
        assert cells.split(" | ") == want, (case, direction)


def test_blocks_are_committed():
    """Breaks if the table of blocks shows a time that was not measured, or leaves one out."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "h200x2_block.json").read_text())["rows"]
    both = [row for row in rows if row["direction"] == "fwd+bwd"]
    measured = {(r["case"].split()[0], r["impl"], r["recipe"]): f"{r['us'] / 1e3:.2f}" if r["us"] else "" for r in both}
    columns = (
        ("moax", "fp8_block"), ("moax", "none"), ("torch", "none"), ("torch", "fp8_rowwise"), ("public", "none"),
        ("native", "none"),
    )  # fmt: skip
    lines = re.findall(r"^\| ([\w-]+) \|((?: ?[\d.]* \|){6})$", README, re.M)
    cells = {model: [cell.strip() for cell in row.split("|")[:-1]] for model, row in lines}
    shown = {(model, *at): cell for model, row in cells.items() for at, cell in zip(columns, row, strict=True)}
    assert shown == measured
