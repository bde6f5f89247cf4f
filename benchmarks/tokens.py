"""What `moax bench permute` and `exchange` move: tokens; and their experts, rows and bytes between devices."""

from __future__ import annotations

import dataclasses

import numpy as np

KINDS = (("none", "dispatch"), ("none", "combine"), ("fp8", "dispatch"))  # wire, direction; sums travel as they are
BLOCK = 128  # elements of a row in FP8 that share a scale of 4 bytes


@dataclasses.dataclass(frozen=True)
class Tokens:
    """T tokens a device of width H, K of E experts each; routing: uniform, zipf (shares 1/rank), or all to one rank.

    permute draws its own, which are uniform.
    """

    name: str
    tokens: int
    width: int
    experts: int
    top_k: int
    routing: str = "uniform"

    def choose(self, devices: int) -> np.ndarray:
        """Experts of the tokens of all devices [T devices, K], distinct for each token, the same in every run."""
        draw = np.random.default_rng([11, self.tokens, self.experts])
        scores = draw.gumbel(size=(self.tokens * devices, self.experts)).astype(np.float32)
        if self.routing == "zipf":
            scores -= np.log(draw.permutation(np.arange(1, self.experts + 1, dtype=np.float32)))
        if self.routing == "one":
            scores[:, self.experts // devices :] = -np.inf
        return np.argsort(-scores, axis=1)[:, : self.top_k].astype(np.int32)

    def between(self, devices: int) -> np.ndarray:
        """How many rows dispatch moves from device (dim 0) to device (dim 1)."""
        owner = (self.choose(devices) // (self.experts // devices)).reshape(devices, self.tokens, self.top_k)
        return np.stack([(owner == rank).any(-1).sum(-1) for rank in range(devices)], axis=1)

    def row_bytes(self, wire: str) -> int:
        """Of a row on its way, scales included."""
        return self.width * 2 if wire == "none" else self.width + 4 * -(-self.width // BLOCK)


def busiest(between: np.ndarray) -> int:
    """Rows that leave or reach the device that sends or receives most, to and from the others."""
    away = between * (1 - np.eye(len(between), dtype=between.dtype))
    return int(max(away.sum(0).max(), away.sum(1).max()))


SIZES = (("mixtral", 8192, 4096, 8, 2), ("qwen3", 8192, 2048, 128, 8), ("dsv3", 4096, 7168, 256, 8))
PERF = tuple(Tokens(f"{s[0]} {routing}", *s[1:], routing) for s in SIZES for routing in ("uniform", "zipf", "one"))
TINY = tuple(Tokens(f"tiny {routing}", 32, 128, 16, 2, routing) for routing in ("uniform", "one"))
