"""`python -m benchmarks block --mesh fsdp=2,ep=2`: the block on a mesh, beside layers of JAX alone and of PyTorch.

Each layer has a process of its own over all devices of the mesh (`mesh_worker`), that of PyTorch one for each device
(`peers.torch_block`). First come those that have to compile alone; the others compile at once, then they are measured
one after the other, ours last. Tokens, rates and memory are those of a device, times wall clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks.block import block
from benchmarks.block.block import Block
from benchmarks.block.worker import Worker, answers
from benchmarks.peers import TORCH
from benchmarks.report import OURS, Row
from moax import MoEConfig, backend
from moax.mesh.axes import ROLES
from moax.tune.timing import Repeats

PEERS = ("native", "public", TORCH)  # of benchmarks/peers
ALONE = ("native",)  # XLA expands ragged_dot and tunes it on operands of that size, which takes a GPU's memory
ROWWISE = "fp8_rowwise"  # what PyTorch has beside bf16
WORKER, TORCH_WORKER = "benchmarks.block.mesh_worker", "benchmarks.peers.torch_block"
TUTORIAL = Block(
    "tutorial",
    MoEConfig(d_model=1024, d_ff=4096, num_experts=8, top_k=2),
    (4096,),
    "docs/tutorial: 16384 tokens on 4 devices",
)
PERF = (TUTORIAL, *block.PERF)


@dataclasses.dataclass(frozen=True)
class How:
    """mesh: (axis, devices) of each axis; recipes, kernels, exchange and chunks of `moax.moe`; peers:
    layers beside it."""

    mesh: tuple[tuple[str, int], ...]
    recipes: tuple[str, ...] = block.RECIPES
    kernels: str = "auto"
    exchange: str = "auto"
    peers: tuple[str, ...] = PEERS
    chunks: int = 1

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.mesh)

    @property
    def sizes(self) -> dict[str, int]:
        """The mesh with fsdp and ep, which the layers of JAX name whatever their sizes."""
        given = dict(self.mesh)
        return {name: given.get(name, 1) for name in ROLES if name in given or name in ("fsdp", "ep")}


def rows(
    blocks: list[Block], how: How, repeats: Repeats, found: dict[str, Any], tokens: tuple[int, ...] | None = None
) -> Iterator[Row]:
    """Rows of forward, and of forward with backward, for each block and layer.

    Raises:
      ValueError: the mesh has more devices than there are GPUs.
    """
    check_devices(how)
    quantized = TORCH in how.peers and any(recipe != "none" for recipe in how.recipes)
    layers = [(peer, "none") for peer in how.peers] + ([(TORCH, ROWWISE)] if quantized else [])
    layers += [(OURS, recipe) for recipe in how.recipes]
    asked = [(of, impl, recipe) for of in blocks for impl, recipe in layers]
    peers: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for group in compile_groups(asked):
        for (of, impl, recipe), answer in _answers(group, how, repeats, tokens):
            for row in block.direction_rows(of, recipe, answer, found):
                row.case, row.impl = f"{row.case} {how}", impl
                row.extra |= {"mesh": how.sizes}
                row.extra |= {"exchange": how.exchange, "chunks": how.chunks} if impl == OURS else {}
                known = peers[row.case, row.direction]
                if impl != OURS and row.us:
                    known[impl if recipe == "none" else f"{impl} {recipe}"] = row.us
                elif row.us:  # bf16 beside bf16 alone, what is quantized beside all
                    alike = {peer: us for peer, us in known.items() if recipe != "none" or peer in how.peers}
                    row.peers = {peer: us / row.us for peer, us in alike.items()}
                yield row


def compile_groups[Of](asked: list[tuple[Of, str, str]]) -> list[list[tuple[Of, str, str]]]:
    """(what, layer, recipe) of those that compile at once: each that has to be alone, then all others."""
    alone = [[one] for one in asked if one[1] in ALONE]
    return [*alone, [one for one in asked if one[1] not in ALONE]]


def check_devices(how: How) -> None:
    """Raises ValueError where there are GPUs, but too few of them; other devices are emulated."""
    devices = math.prod(how.sizes.values())
    if backend.platform() == "gpu" and devices > jax.device_count():
        raise ValueError(f"--mesh {how} is a mesh of {devices} devices, but {jax.device_count()} are here")


def _answers(
    asked: list[tuple[Block, str, str]], how: How, repeats: Repeats, tokens: tuple[int, ...] | None
) -> Iterator[tuple[tuple[Block, str, str], dict[str, Any]]]:
    """((block, layer, recipe), what its process says of a number of tokens) of those that compile at once."""
    workers = []
    for of, impl, recipe in asked:
        request = block.request(of, recipe, sorted(tokens or of.tokens), repeats, how.kernels, how.chunks)
        request |= {"mesh": how.sizes, "exchange": how.exchange, "impl": impl}
        workers.append(((of, impl, recipe), Worker(TORCH_WORKER if impl == TORCH else WORKER, request)))
    return answers(workers)
