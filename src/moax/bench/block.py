"""`moax bench block`: `moax.moe` on one device, forward and forward with backward, each model in a process of its own.

All compile at once, which takes most of the time and only processors; then they are measured one after the other.

    work   6 T K H F forward, 18 T K H F with backward (gated experts)

`--mesh` measures it on a mesh, beside layers of JAX alone and of PyTorch (`mesh_block`).

Layer time is the wall clock of back-to-back calls; the split by stage is kernel time (CUPTI). Memory: the peak of the
process, and what forward leaves to backward beside what it has to: the sorted rows and the hidden activations.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from moax import MoEConfig, RouterConfig
from moax.bench import limits
from moax.bench.block_worker import READY
from moax.bench.report import Row, why
from moax.bench.timing import Repeats

SECONDS = 500  # for all to compile, and for one to be measured
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
WORKER = "moax.bench.block_worker"


def rows(
    blocks: list[Block],
    repeats: Repeats,
    found: dict[str, Any],
    *,
    recipes: tuple[str, ...] = RECIPES,
    tokens: tuple[int, ...] | None = None,
    kernels: str = "auto",
    chunks: int = 1,
) -> Iterator[Row]:
    """Rows of forward, and of forward with backward, for each block, recipe and number of tokens."""
    asked = dict(repeats=repeats, kernels=kernels, chunks=chunks)
    workers = [
        (block, recipe, Worker(WORKER, request(block, recipe, sorted(tokens or block.tokens), **asked)))
        for block in blocks
        for recipe in recipes
    ]
    try:
        for _, _, worker in workers:
            worker.wait()
        for block, recipe, worker in workers:
            for answer in worker.measure():
                yield from direction_rows(block, recipe, answer, found)
    finally:
        for _, _, worker in workers:
            worker.close()


def request(
    block: Block, recipe: str, tokens: list[int], repeats: Repeats, kernels: str, chunks: int = 1
) -> dict[str, Any]:
    """What a worker is asked for."""
    return {
        "config": dataclasses.asdict(block.config),
        "recipe": recipe,
        "tokens": tokens,
        "kernels": kernels,
        "chunks": chunks,
        "repeats": dataclasses.asdict(repeats),
    }


class Worker:
    """A process of `module` that compiles a block, waits, and measures it for each number of tokens, ascending."""

    def __init__(self, module: str, request: dict[str, Any]):
        self.tokens, self.errors = request["tokens"], tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        self.limit = threading.Timer(SECONDS, self.process.kill)
        self.limit.start()

    def wait(self) -> None:
        """Until it has compiled, or has ended."""
        for line in self.process.stdout or ():
            if line.strip() == READY:
                break
        self.limit.cancel()

    def measure(self) -> list[dict]:
        """What it says of each number of tokens."""
        try:
            said, _ = self.process.communicate("go\n", timeout=SECONDS)
            answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
            self.errors.seek(0)
            reason = f"exit code {self.process.returncode}: {self.errors.read().strip()[-600:]}"
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.process.kill()  # now, not when all are done: it may hold a GPU's memory
            answers, reason = [], why(error)
        heard = {answer["tokens"] for answer in answers}
        return answers + [{"tokens": size, "note": reason} for size in self.tokens if size not in heard]

    def close(self) -> None:
        """Ends the process, where it has not."""
        self.limit.cancel()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None and not stream.closed:
                stream.close()


def direction_rows(block: Block, recipe: str, answer: dict, found: dict[str, Any]) -> Iterator[Row]:
    """Forward, and forward with backward, of what a worker said of one number of tokens."""
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
            product = "bf16" if recipe in ("none", "mxfp8") else "fp8"  # mxfp8 multiplies what it dequantized
            row.limit, row.fraction = limits.fraction(found, row.us, factor * work, 0.0, product)
            row.extra = {**measured, **answer["memory"], "block_note": block.note}
        yield row
