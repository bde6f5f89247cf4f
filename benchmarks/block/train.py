"""`python -m benchmarks train --mesh fsdp=2,ep=2`: a step of the language model of `lm/` on a mesh, or on one GPU.

    work   6 P T + 6 L S N D T    P active parameters, L layers, causal attention of N heads of D, sequences of S tokens

Each recipe has a process of its own over all devices of the mesh (`train_worker`), with the same text and seed. Tokens
and work are those of one device. A softmax without a balance loss chooses the experts.

`--mesh fsdp=1 --only qwen3-30b-L4` measures layers of Qwen3-30B-A3B, without their norms of q and k, on
random bytes: forward, backward and AdamW over 1, 2, 4 and 8 microbatches of 4 x 4096 bytes. Weights are quantized once
a step. On GPUs `stages_us` has the kernels of a step by part, from one profile. `fsdp8_computed` is no measurement: it
is the step less 7/8 of the time that the quantization of weights takes, as a rank of 8 quantizes 1/8 of them; the wires
and the smaller share of the optimizer do not count.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from benchmarks import limits
from benchmarks.block.block import How
from benchmarks.block.worker import Worker, answers
from benchmarks.report import Row
from benchmarks.timing import Repeats
from lm.config import PRESETS, ModelConfig, TrainConfig
from lm.model import count
from moax.models import MODELS

WORKER = "benchmarks.block.train_worker"
# The compiled step of qwen3-30b takes 62 GiB with 4 layers in several microbatches, and 91 with 6.
LAYERS = (4, 6)


@dataclasses.dataclass(frozen=True)
class Run:
    """A model, and the sequences of a device in each microbatch of a step; `random` takes random bytes for the text."""

    name: str
    model: ModelConfig
    sequences: int
    length: int
    dtype: str = "bfloat16"
    microbatches: int = 1
    random: bool = False

    @property
    def tokens(self) -> int:
        """Tokens T of a device in a step."""
        return self.sequences * self.microbatches * self.length

    @property
    def work(self) -> float:
        """Floating-point operations of a device in a step; recomputation in backward does not count."""
        _, active = count(self.model)
        heads, _, dim = self.model.heads
        return 6.0 * self.tokens * (active + self.model.num_layers * self.length * heads * dim)

    def config(self, settings: How, recipe: str) -> TrainConfig:
        """Returns the settings of a step on the mesh of `how`."""
        sizes = settings.sizes
        batch = self.sequences * self.microbatches
        for axis in ("dp", "fsdp", "ep"):
            batch *= sizes.get(axis, 1)
        return TrainConfig(
            self.model,
            mesh=tuple(sizes.items()),
            batch=batch,
            seq=self.length,
            microbatches=self.microbatches,
            recipe=None if recipe == "none" else recipe,
            exchange=settings.exchange,
            dtype=self.dtype,
            buffer_factor=settings.buffer_factor,
        )


def _unbalanced(preset: str) -> ModelConfig:
    return dataclasses.replace(PRESETS[preset].model, balance="none")


def _qwen3(layers: int) -> tuple[Run, ...]:
    """Returns the steps of so many layers of Qwen3-30B-A3B, over 1, 2, 4 and 8 microbatches."""
    moe = MODELS["qwen3-30b"].config
    sizes = dict(d_model=moe.d_model, d_ff=moe.d_ff, num_experts=moe.num_experts, top_k=moe.top_k)
    model = ModelConfig(
        **sizes,
        num_layers=layers,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        balance="none",
    )
    return tuple(Run(f"qwen3-30b-L{layers} x{n}", model, 4, 4096, microbatches=n, random=True) for n in (1, 2, 4, 8))


PERF = (
    Run("medium", _unbalanced("medium"), 8, 1024),
    Run("large", _unbalanced("large"), 4, 2048),
    *(run for layers in LAYERS for run in _qwen3(layers)),
)
TINY = (
    Run("tiny", _unbalanced("tiny"), 1, 32, "float32"),
    Run("tiny x2", _unbalanced("tiny"), 1, 32, "float32", microbatches=2, random=True),
)


def rows(runs: list[Run], settings: How, repeats: Repeats, peaks: dict[str, Any]) -> Iterator[Row]:
    """Yields a row for each model and recipe; `found` are the limits."""
    settings.check()
    workers = []
    for run, recipe in itertools.product(runs, settings.recipes):
        request = {
            "config": run.config(settings, recipe).to_json(),
            "tokens": [run.tokens],
            "random": run.random,
        }
        workers.append(
            (
                (run, recipe),
                Worker(WORKER, request | {"repeats": dataclasses.asdict(repeats)}),
            )
        )
    for (run, recipe), answer in answers(workers):
        yield _row(run, recipe, settings, answer, peaks)


def _row(
    run: Run,
    recipe: str,
    settings: How,
    answer: dict[str, Any],
    peaks: dict[str, Any],
) -> Row:
    row = Row(
        "train",
        f"{run.name} T{run.tokens}{settings}",
        "step",
        recipe=recipe,
        dtype=run.dtype,
    )
    row.note = answer.get("note", "")
    row.extra = {
        "mesh": settings.sizes,
        "exchange": settings.exchange,
        "buffer_factor": settings.buffer_factor,
    }
    if "us" in answer:
        row.us = answer["us"]
        row.method = "wall"
        row.path = answer["path"]
        limits.rate(row, peaks, run.work)
        row.extra |= {
            "tokens_per_s": run.tokens / row.us * 1e6,
            "flops": run.work,
            **answer["extra"],
        }
        if weights := answer["extra"].get("stages_us", {}).get("quantization of weights"):
            us = row.us - 7 / 8 * weights
            row.extra["fsdp8_computed"] = {
                "us": us,
                "tokens_per_s": run.tokens / us * 1e6,
                "quantization_us": weights,
            }
    return row
