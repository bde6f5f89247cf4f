"""The shapes of published models, in one table for estimates, benchmarks, tuning and checks.

MODELS["qwen3-30b"].config                          the MoE block of one layer, as a MoEConfig
find_model("qwen3-30b").on_rank(4, tokens=8192)     the share of one of 4 ranks: 32 experts, 65536 rows
"""

from __future__ import annotations

import dataclasses

from moax.config import MoEConfig, RouterConfig


@dataclasses.dataclass(frozen=True)
class RankShape:
    """The grouped matmuls that one rank of a model's block computes, at an even load.

    Attributes:
      rows: expert-sorted rows N of the rank: T K, since at an even load a rank receives as many rows as it sends.
      groups: experts of the rank, each of which is one group of rows.
      d_model: model width H.
      d_ff: expert width F.
      hidden: columns of the first matmul: 2 F for gated experts (gate and up projection side by side), else F.
    """

    rows: int
    groups: int
    d_model: int
    d_ff: int
    hidden: int


@dataclasses.dataclass(frozen=True)
class Model:
    """The MoE block of a published model.

    Attributes:
      config: the block of one layer.
      layers: how many of the model's layers are such blocks.
      source: the published `config.json` that the sizes were read from.
    """

    config: MoEConfig
    layers: int
    source: str

    def on_rank(self, ranks: int, tokens: int) -> RankShape:
        """Returns what one rank of an `ep` axis computes.

        Args:
          ranks: size of `ep`; it must divide the model's experts.
          tokens: tokens T of each rank.

        Returns:
          The shapes at an even load.

        Raises:
          ValueError: `ranks` does not divide the experts.
        """
        config = self.config
        return RankShape(
            rows=tokens * config.top_k,
            groups=self._experts(ranks),
            d_model=config.d_model,
            d_ff=config.d_ff,
            hidden=config.gates * config.d_ff,
        )

    def slice(self, ranks: int) -> MoEConfig:
        """Returns the block with the experts of one of `ranks` ranks alone, so that one device can run it.

        A token still takes K experts, and all of them are on this device. T tokens make T K rows: a rank of the whole
        model receives as many when each rank has T tokens. The slice has no shared expert, since every rank has that
        one. It has no groups of experts either, since a rank may hold less than one group.

        Raises:
          ValueError: `ranks` does not divide the experts.
        """
        router = dataclasses.replace(self.config.router, num_groups=1, top_groups=1)
        return dataclasses.replace(
            self.config, num_experts=self._experts(ranks), router=router, shared_d_ff=0, shared_gate=False
        )

    def _experts(self, ranks: int) -> int:
        """Returns the experts of one rank. Raises ValueError where `ranks` does not divide the experts."""
        experts = self.config.num_experts
        if ranks < 1 or experts % ranks:
            raise ValueError(f"ranks={ranks} must divide the {experts} experts of {self.source}")
        return experts // ranks


# The weights are the softmax of the K chosen logits, which sums to 1 by itself.
_LATE = RouterConfig(order="topk_then_score", normalize=False)

# `layers` is num_hidden_layers of the source, less the leading dense layers (first_k_dense_replace).
MODELS: dict[str, Model] = {
    "qwen3-30b": Model(
        config=MoEConfig(d_model=2048, d_ff=768, num_experts=128, top_k=8, router=_LATE),
        layers=48,
        source="Qwen/Qwen3-30B-A3B",
    ),
    "qwen3-235b": Model(
        config=MoEConfig(d_model=4096, d_ff=1536, num_experts=128, top_k=8, router=_LATE),
        layers=94,
        source="Qwen/Qwen3-235B-A22B",
    ),
    "qwen3-next": Model(
        config=MoEConfig(
            d_model=2048, d_ff=512, num_experts=512, top_k=10, router=_LATE, shared_d_ff=512, shared_gate=True
        ),
        layers=48,
        source="Qwen/Qwen3-Next-80B-A3B-Instruct",
    ),
    "olmoe": Model(
        config=MoEConfig(d_model=2048, d_ff=1024, num_experts=64, top_k=8, router=RouterConfig(normalize=False)),
        layers=16,
        source="allenai/OLMoE-1B-7B-0924",
    ),
    "mixtral-8x7b": Model(
        config=MoEConfig(d_model=4096, d_ff=14336, num_experts=8, top_k=2, router=_LATE),
        layers=32,
        source="mistralai/Mixtral-8x7B-v0.1",
    ),
    "deepseek-v3": Model(
        config=MoEConfig(
            d_model=7168,
            d_ff=2048,
            num_experts=256,
            top_k=8,
            router=RouterConfig(score="sigmoid", bias=True, num_groups=8, top_groups=4, scale=2.5),
            shared_d_ff=2048,
        ),
        layers=58,
        source="deepseek-ai/DeepSeek-V3",
    ),
    "kimi-k2": Model(
        config=MoEConfig(
            d_model=7168,
            d_ff=2048,
            num_experts=384,
            top_k=8,
            router=RouterConfig(score="sigmoid", bias=True, scale=2.827),
            shared_d_ff=2048,
        ),
        layers=60,
        source="moonshotai/Kimi-K2-Instruct",
    ),
    "gpt-oss-120b": Model(
        config=MoEConfig(
            d_model=2880,
            d_ff=2880,
            num_experts=128,
            top_k=4,
            activation="swiglu_oai",
            use_bias=True,
            router=dataclasses.replace(_LATE, logits_bias=True),
        ),
        layers=36,
        source="openai/gpt-oss-120b",
    ),
}


def find_model(name: str) -> Model:
    """Returns the model of a name, a key of `MODELS`.

    Raises:
      ValueError: there is no model of this name.
    """
    if name not in MODELS:
        raise ValueError(f"model={name!r} must be one of {', '.join(map(repr, MODELS))}, or a MoEConfig")
    return MODELS[name]
