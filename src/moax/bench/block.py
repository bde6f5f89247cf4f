"""`moax bench block`: `moax.moe` on one device, forward and forward with backward, each model in a process of its own.

    work   6 T K H F forward, 18 T K H F with backward (gated experts)

Layer time is the wall clock of back-to-back calls; the split by stage is kernel time (CUPTI). Memory: the peak of the
process, and what forward leaves to backward beside what it has to: the sorted rows and the hidden activations.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from moax import MoEConfig, RouterConfig
from moax.bench import limits
from moax.bench.report import Row, why
from moax.bench.timing import Repeats

SECONDS = 400
MIXTRAL = RouterConfig(order="topk_then_score")
SIGMOID = RouterConfig(score="sigmoid", bias=True, scale=2.5)


@dataclasses.dataclass(frozen=True)
class Block:
    """A model's block; `note`: what part of it."""

    name: str
    config: MoEConfig
    tokens: tuple[int, ...] = (8192, 16384)
    note: str = ""


PERF = (
    Block("qwen3-30b", MoEConfig(2048, 768, 128, 8)),
    Block("mixtral-8x7b", MoEConfig(4096, 14336, 8, 2, router=MIXTRAL)),
    Block(
        "gpt-oss-120b",
        MoEConfig(
            2880,
            2880,
            128,
            4,
            activation="swiglu_oai",
            use_bias=True,
            router=dataclasses.replace(MIXTRAL, logits_bias=True),
        ),
    ),
    Block(
        "dsv3-slice",
        MoEConfig(7168, 2048, 32, 8, router=SIGMOID),
        note="32 of 256 experts, 8 a token: the rows of one rank of 8 that have as many tokens each",
    ),
)
TINY = (Block("tiny", MoEConfig(64, 32, 4, 2), (64,)),)
RECIPES = ("none", "fp8_block")


def rows(
    blocks: list[Block],
    repeats: Repeats,
    found: dict[str, Any],
    *,
    recipes: tuple[str, ...] = RECIPES,
    tokens: tuple[int, ...] | None = None,
    kernels: str = "auto",
) -> Iterator[Row]:
    """Rows of forward, and of forward with backward, for each block, recipe and number of tokens."""
    for block in blocks:
        for recipe in recipes:
            sizes = sorted(tokens or block.tokens)
            for answer in _run(block, recipe, sizes, repeats, kernels):
                yield from _rows(block, recipe, answer, found)


def _run(block: Block, recipe: str, tokens: list[int], repeats: Repeats, kernels: str) -> list[dict]:
    """What the process says of each number of tokens, ascending: its peak of memory can only grow."""
    request = {
        "config": dataclasses.asdict(block.config),
        "recipe": recipe,
        "tokens": tokens,
        "kernels": kernels,
        "repeats": dataclasses.asdict(repeats),
    }
    command = [sys.executable, "-m", "moax.bench.block_worker", json.dumps(request)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        reason = f"exit code {done.returncode}: {done.stderr.strip()[-600:]}"
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        answers, reason = [], why(error)
    said = {answer["tokens"] for answer in answers}
    return answers + [{"tokens": size, "note": reason} for size in tokens if size not in said]


def _rows(block: Block, recipe: str, answer: dict, found: dict[str, Any]) -> Iterator[Row]:
    config, tokens = block.config, answer["tokens"]
    forward = 6 if config.gates == 2 else 4
    work = tokens * config.top_k * config.d_model * config.d_ff
    for direction, factor in (("fwd", forward), ("fwd+bwd", 3 * forward)):
        row = Row("block", f"{block.name} T{tokens}", direction, recipe=recipe)
        row.note = answer.get("note", "")
        measured = answer.get(direction)
        if measured:
            row.us, row.method, row.path = measured["us"], "wall", measured["path"]
            row.tflops = factor * work / row.us * 1e-6
            product = "bf16" if recipe == "none" else "fp8"
            row.limit, row.fraction = limits.fraction(found, row.us, factor * work, 0.0, product)
            row.extra = {**measured, **answer["memory"], "block_note": block.note}
        yield row
