"""The tokens that the benchmark `exchange` moves: their experts, and their rows and bytes."""

from __future__ import annotations

import dataclasses

import numpy as np

from moax.models import find_model

KINDS = (("none", "dispatch"), ("none", "combine"), ("fp8", "dispatch"))  # (wire, direction); sums are not quantized
BLOCK = 128  # elements of an FP8 row that share a scale of 4 bytes


@dataclasses.dataclass(frozen=True)
class Tokens:
    """T tokens of a device, of width H, each for K of E experts.

    `routing` is `uniform`; `zipf`, where expert popularity is 1 / rank; or `one`: all experts are of one rank.
    """

    name: str
    tokens: int
    width: int
    experts: int
    top_k: int
    routing: str = "uniform"

    @classmethod
    def of(cls, name: str, model: str, tokens: int, routing: str = "uniform") -> Tokens:
        """Returns the tokens of one device of the model named `model`."""
        config = find_model(model).config
        return cls(name, tokens, config.d_model, config.num_experts, config.top_k, routing)

    def choose(self, devices: int) -> np.ndarray:
        """Draws the experts of the tokens of all devices, [T devices, K] i32; they are the same in every run.

        The K experts of a token are distinct.
        """
        draw = np.random.default_rng([11, self.tokens, self.experts])
        scores = draw.gumbel(size=(self.tokens * devices, self.experts)).astype(np.float32)
        if self.routing == "zipf":
            scores -= np.log(draw.permutation(np.arange(1, self.experts + 1, dtype=np.float32)))
        if self.routing == "one":
            scores[:, self.experts // devices :] = -np.inf
        return np.argsort(-scores, axis=1)[:, : self.top_k].astype(np.int32)

    def between(self, devices: int) -> np.ndarray:
        """Counts rows: between[s, d] rows go from device s to device d in dispatch."""
        owner = (self.choose(devices) // (self.experts // devices)).reshape(devices, self.tokens, self.top_k)
        return np.stack([(owner == rank).any(-1).sum(-1) for rank in range(devices)], axis=1)

    def row_bytes(self, wire: str) -> int:
        """Returns the bytes of a row on the wire, scales included; `wire` is `none` or `fp8`."""
        return self.width * 2 if wire == "none" else self.width + 4 * -(-self.width // BLOCK)


def busiest(between: np.ndarray) -> int:
    """Returns the rows that the busiest device sends to, or receives from, other devices."""
    away = between * (1 - np.eye(len(between), dtype=between.dtype))
    return int(max(away.sum(0).max(), away.sum(1).max()))


SIZES = (("mixtral", "mixtral-8x7b", 8192), ("qwen3", "qwen3-30b", 8192), ("dsv3", "deepseek-v3", 4096))
PERF = tuple(
    Tokens.of(f"{name} {routing}", model, tokens, routing)
    for name, model, tokens in SIZES
    for routing in ("uniform", "zipf", "one")
)
TINY = tuple(Tokens(f"tiny {routing}", 32, 128, 16, 2, routing) for routing in ("uniform", "one"))
