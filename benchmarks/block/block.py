"""`python -m benchmarks block`: `moax.moe` forward, and with backward, on one device or with `--mesh` on several.

    work   6 T K H F forward, 18 T K H F forward with backward (gated experts)

Each model and recipe has a process of its own over all devices of the mesh (`block_worker`), and so has the layer of
each peer: SonicMoE's on one device (`peers.sonic`), PyTorch's on a mesh (`peers.torch_block`). All processes compile at
the same time, which takes most of the time and hardly needs the GPU. Then they are measured one after the other, the
peers first. Tokens, rates and memory are those of one device.

The time of a layer is the wall clock of back-to-back calls. `kernel_us` is the sum of the kernels of a call (CUPTI),
and so are the times of stages; `kernel_peers` has the ratios of these sums, which no host bounds. The rows also have
the peak memory of the process, the bytes that forward keeps for backward, and the bytes that backward needs: the sorted
rows and the hidden activations.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks import limits
from benchmarks.block.worker import Worker, answers
from benchmarks.cases import slice_of
from benchmarks.report import OURS, Row
from benchmarks.timing import Repeats
from moax import MoEConfig
from moax.config import BufferFactor
from moax.kernels.device import find_device
from moax.mesh.axes import ROLES
from moax.models import MODELS
from moax.recipe import RECIPES as NAMED


@dataclasses.dataclass(frozen=True)
class Block:
    """The block of a model."""

    name: str
    config: MoEConfig
    tokens: tuple[int, ...] = (8192, 16384)
    note: str = ""


PERF = (
    Block("qwen3-30b", MODELS["qwen3-30b"].config, (8192, 16384, 32768)),
    *(Block(name, MODELS[name].config) for name in ("mixtral-8x7b", "gpt-oss-120b")),
    Block(
        "dsv3-slice",
        slice_of("deepseek-v3", 8),
        note="32 of 256 experts, 8 of them for a token: as many rows as one of 8 ranks receives at an even load",
    ),
    Block("sonic-7b", MoEConfig(d_model=1536, d_ff=256, num_experts=128, top_k=8), (24576,), "SonicMoE's 7B model"),
    Block("sonic-1024", MoEConfig(d_model=4096, d_ff=1024, num_experts=128, top_k=8), (32768,), "SonicMoE's README"),
    Block("sonic-1536", MoEConfig(d_model=4096, d_ff=1536, num_experts=128, top_k=8), (32768,), "SonicMoE's README"),
)
TINY = (Block("tiny", MoEConfig(d_model=64, d_ff=32, num_experts=4, top_k=2), (64,)),)
PLAIN = ("none", "fp8_block")
KEPT = "fp8_block+kept"  # with weights that are quantized once, before the measured calls
RECIPES = ("none", *NAMED, KEPT)
ROWWISE = "fp8_rowwise"  # PyTorch has this format and bf16.
SONIC, TORCH = "sonic", "torch"
WORKERS = {
    OURS: "benchmarks.block.block_worker",
    SONIC: "benchmarks.peers.sonic",
    TORCH: "benchmarks.peers.torch_block",
}


@dataclasses.dataclass(frozen=True)
class How:
    """How the layers run; a mesh of no axes is one device."""

    mesh: tuple[tuple[str, int], ...] = ()
    recipes: tuple[str, ...] = PLAIN
    kernels: str = "auto"
    exchange: str = "auto"
    overlap: bool = False
    peers: tuple[str, ...] = ()
    buffer_factor: BufferFactor = "auto"

    def __str__(self) -> str:
        return "".join(f",{name}={size}" for name, size in self.mesh).replace(",", " ", 1)

    @property
    def sizes(self) -> dict[str, int]:
        """The axis sizes; a mesh always has fsdp and ep, since the layer of PyTorch names them."""
        mesh_sizes = dict(self.mesh)
        names = (name for name in ROLES if name in mesh_sizes or name in ("fsdp", "ep"))
        return {name: mesh_sizes.get(name, 1) for name in names if self.mesh}

    @property
    def options(self) -> dict[str, Any]:
        """The options of `moax.moe`, and of its compiler, that a row of a mesh tells."""
        names = ("exchange", "overlap", "buffer_factor")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raises ValueError where the machine has GPUs, but fewer than the mesh; without a GPU devices are emulated."""
        devices = math.prod(self.sizes.values())
        if find_device().platform == "gpu" and devices > jax.device_count():
            raise ValueError(f"--mesh{self} is a mesh of {devices} devices, but JAX has {jax.device_count()}")

    def request(self, block: Block, recipe: str, repeats: Repeats, tokens: tuple[int, ...] | None = None) -> dict:
        """Returns the request to a worker; see `block_worker`."""
        return {
            "config": dataclasses.asdict(block.config),
            "recipe": recipe,
            "tokens": sorted(tokens or block.tokens),
            "kernels": self.kernels,
            "exchange": self.exchange,
            "overlap": self.overlap,
            "buffer_factor": self.buffer_factor,
            "mesh": self.sizes,
            "repeats": dataclasses.asdict(repeats),
        }


def rows(
    blocks: list[Block],
    variants: list[How],
    repeats: Repeats,
    peaks: dict[str, Any],
    tokens: tuple[int, ...] | None = None,
) -> Iterator[Row]:
    """Yields rows of forward, and of forward with backward, for each block, layer and number of tokens."""
    first = variants[0]
    first.check()
    layers = [(first, peer, "none") for peer in first.peers]
    layers += [(first, TORCH, ROWWISE)] if TORCH in first.peers and set(first.recipes) - {"none"} else []
    layers += [(variant, OURS, recipe) for variant in variants for recipe in variant.recipes]
    workers = [
        ((block, variant, impl, recipe), Worker(WORKERS[impl], variant.request(block, recipe, repeats, tokens)))
        for block in blocks
        for variant, impl, recipe in layers
    ]
    known: dict[tuple[str, str], dict[tuple[str, str], Row]] = defaultdict(dict)
    for (block, variant, impl, recipe), answer in answers(workers):
        for row in direction_rows(block, recipe, answer, peaks):
            row.impl = answer.get("impl", impl)
            row.case = f"{row.case}{variant}"
            if variant.mesh:
                row.extra |= {"mesh": variant.sizes}
                row.extra |= variant.options if impl == OURS else {}
            beside(row, known[row.case, row.direction])
            if variant.mesh and impl == OURS:
                row.case += f" {variant.exchange}"
            yield row


def beside(row: Row, known: dict[tuple[str, str], Row]) -> None:
    """Compares a row of moax with the rows of peers, or adds a peer's row to them."""
    if row.us and row.impl != OURS:
        known[row.impl, row.recipe] = row
    elif row.us:
        alike = {key[0] if key[1] == "none" else " ".join(key): known[key] for key in known
                 if row.recipe != "none" or key[1] == "none"}  # fmt: skip
        row.peers = {name: (peer.us or 0.0) / row.us for name, peer in alike.items()}
        ours, theirs = row.extra.get("kernel_us"), {name: peer.extra.get("kernel_us") for name, peer in alike.items()}
        if ratios := {name: us / ours for name, us in theirs.items() if ours and us}:
            row.extra["kernel_peers"] = ratios


def direction_rows(block: Block, recipe: str, answer: dict, peaks: dict[str, Any]) -> Iterator[Row]:
    """Yields the rows of forward, and of forward with backward, from a worker's answer for one number of tokens."""
    config, tokens = block.config, answer["tokens"]
    forward = 6 if config.gates == 2 else 4
    work = tokens * config.top_k * config.d_model * config.d_ff
    for direction, factor in (("fwd", forward), ("fwd+bwd", 3 * forward)):
        row = Row("block", f"{block.name} T{tokens}", direction, recipe=recipe, note=answer.get("note", ""))
        if measured := answer.get(direction):
            row.us, row.method, row.path = measured["us"], "wall", measured["path"]
            limits.rate(row, peaks, factor * work)
            row.extra = {**measured, **answer["memory"], "block_note": block.note}
        yield row
