"""`python -m benchmarks block --mesh fsdp=2,ep=2`: the block on a mesh, beside a layer of JAX alone and one of PyTorch.

A layer of JAX has one process over all devices of the mesh (`block_worker`). The layer of PyTorch has one process for
each device (`peers.torch_block`). The layers in `ALONE` compile and run first, each by itself. The others compile at
the same time, and are then measured one after the other, moax last. Tokens, rates and memory are those of one device;
times are wall clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.block import block
from benchmarks.block.block import PLAIN, Block
from benchmarks.block.worker import Worker, answers
from benchmarks.peers import TORCH
from benchmarks.report import OURS, Row
from benchmarks.timing import Repeats
from moax import MoEConfig, backend
from moax.mesh.axes import ROLES

PEERS = ("native", TORCH)
ALONE = ("native",)  # XLA expands ragged_dot, and tunes it on expanded operands, which fill the memory of a GPU.
ROWWISE = "fp8_rowwise"  # PyTorch has this format and bf16.
WORKER, TORCH_WORKER = "benchmarks.block.block_worker", "benchmarks.peers.torch_block"
TUTORIAL = Block(
    "tutorial",
    MoEConfig(d_model=1024, d_ff=4096, num_experts=8, top_k=2),
    (4096,),
    "docs/tutorial: 16384 tokens on 4 devices",
)
PERF = (TUTORIAL, *block.PERF)


@dataclasses.dataclass(frozen=True)
class How:
    """How the layers run."""

    mesh: tuple[tuple[str, int], ...]
    recipes: tuple[str, ...] = PLAIN
    kernels: str = "auto"
    exchange: str = "auto"
    peers: tuple[str, ...] = PEERS
    buffer_factor: float | None = 1.25

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.mesh)

    @property
    def sizes(self) -> dict[str, int]:
        """The axis sizes; fsdp and ep are always there, since the layers of JAX name them."""
        given = dict(self.mesh)
        return {name: given.get(name, 1) for name in ROLES if name in given or name in ("fsdp", "ep")}


def rows(
    blocks: list[Block], how: How, repeats: Repeats, found: dict[str, Any], tokens: tuple[int, ...] | None = None
) -> Iterator[Row]:
    """Yields rows of forward, and of forward with backward, for each block and layer."""
    check_devices(how)
    quantized = TORCH in how.peers and any(recipe != "none" for recipe in how.recipes)
    layers = [(peer, "none") for peer in how.peers] + ([(TORCH, ROWWISE)] if quantized else [])
    layers += [(OURS, recipe) for recipe in how.recipes]
    asked = [(case, impl, recipe) for case in blocks for impl, recipe in layers]
    known: dict[tuple[str, str], dict[tuple[str, str], Row]] = defaultdict(dict)
    for group in compile_groups(asked):
        for (case, impl, recipe), answer in _answers(group, how, repeats, tokens):
            for row in block.direction_rows(case, recipe, answer, found):
                row.case, row.impl = f"{row.case} {how}", impl
                row.extra |= {"mesh": how.sizes}
                row.extra |= {"exchange": how.exchange, "buffer_factor": how.buffer_factor} if impl == OURS else {}
                block.beside(row, known[row.case, row.direction])
                yield row


def compile_groups[Case](asked: list[tuple[Case, str, str]]) -> list[list[tuple[Case, str, str]]]:
    """Splits (case, layer, recipe) tuples into groups that compile at the same time.

    Each layer in `ALONE` has a group of its own; the last group has all other layers.
    """
    alone = [[one] for one in asked if one[1] in ALONE]
    return [*alone, [one for one in asked if one[1] not in ALONE]]


def check_devices(how: How) -> None:
    """Raises ValueError where the machine has GPUs, but fewer than the mesh; without a GPU devices are emulated."""
    devices = math.prod(how.sizes.values())
    if backend.platform() == "gpu" and devices > jax.device_count():
        raise ValueError(f"--mesh {how} is a mesh of {devices} devices, but JAX has {jax.device_count()}")


def _answers(
    asked: list[tuple[Block, str, str]], how: How, repeats: Repeats, tokens: tuple[int, ...] | None
) -> Iterator[tuple[tuple[Block, str, str], dict[str, Any]]]:
    """Yields ((block, layer, recipe), the answer for one number of tokens) of layers that compile at the same time."""
    workers = []
    for case, impl, recipe in asked:
        request = block.request(case, recipe, sorted(tokens or case.tokens), repeats, how.kernels, how.buffer_factor)
        request |= {"mesh": how.sizes, "exchange": how.exchange, "impl": impl}
        workers.append(((case, impl, recipe), Worker(TORCH_WORKER if impl == TORCH else WORKER, request)))
    return answers(workers)
