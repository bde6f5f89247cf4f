"""What describes a family of MoE models: `Family`, the keys of its config.json, and the layouts of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from moax.activations import Activation
from moax.config import RouterConfig
from moax.hf.tensor_layouts import BlockLayout, block_layout


def glu(prefix: str, names: str = "gate_proj up_proj down_proj") -> str:
    """Returns the rows of the three matrices of each expert `{e}`, or of the shared expert."""
    gate, up, down = (f"{prefix}.{name}.weight" for name in names.split())
    if "{e}" in prefix:
        return f"{gate} wi:0 F H; {up} wi:1 F H; {down} wo H F"
    return f"{gate} shared_wi:0 S H; {up} shared_wi:1 S H; {down} shared_wo H S"


GATE = "gate.weight router E H"
ROUTER = "router.weight router E H"
CORRECTION = "gate.e_score_correction_bias router_bias E"
BLOCK_CORRECTION = "e_score_correction_bias router_bias E"
PROJ = glu("experts.{e}")
W123 = glu("experts.{e}", "w1 w3 w2")
STACKED = "experts.gate_up_proj wi E GF H; experts.down_proj wo E H F"
TRANSPOSED = "experts.gate_up_proj wi E H GF; experts.down_proj wo E F H"
SHARED = glu("shared_experts")
ONE_SHARED = glu("shared_expert")
PUBLISHED = block_layout("mlp", GATE, CORRECTION, SHARED, PROJ)
IN_MEMORY = block_layout("mlp", GATE, CORRECTION, SHARED, STACKED)
MIXTRAL_LAYOUT = block_layout("block_sparse_moe", GATE, CORRECTION, SHARED, W123)


def per_expert(block: str, *rows: str, experts: str = PROJ) -> dict[str, Any]:
    """Returns the layouts of a family whose experts are separate as published and stacked in memory."""
    return dict(
        published=block_layout(block, *rows, experts),
        memory=block_layout(block, *rows, STACKED),
    )


WIDTH = "intermediate_size"
MOE_WIDTH = "moe_intermediate_size"
MAYBE_NORMALIZED = "norm_topk_prob=false"
NORMALIZED = "norm_topk_prob=true"
GROUPS = ("n_group|num_expert_group=1", "topk_group=1")
TEXT_AND_WHOLE = ("{}_text", "{}")


class Layers(NamedTuple):
    """Keys of the MoE layers i: first <= i <= last, i % step == offset % step, and i is not in the list `dense`.

    A config.json that has a mark for each layer under `marks`, or a list of indices, needs no such rule.
    """

    marks: str = "mlp_layer_types|moe_layer_freq"
    first: str = "=0"
    last: str = "=-1"
    step: str = "=1"
    offset: str = "=-1"
    dense: str = "=[]"


def after(dense: str) -> Layers:
    """Returns the rule that the first `dense` layers are dense."""
    return Layers(first=dense, step="moe_layer_freq=1", offset="=0")


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the config.json and the tensors of a family describe its MoE layers.

    A key string has a name in config.json, further names that are read where the first one is missing, and the default
    of transformers in JSON: "n_group|num_expert_group=1". A size without a default must exist, and "=1" is always 1. A
    dot enters a dict: "ffn_config.moe_top_k". Where a key is None, `router`, or the default of `MoEConfig`, decides.
    """

    published: BlockLayout = PUBLISHED
    # As transformers 5 holds and also saves it; None: as published.
    memory: BlockLayout | None = IN_MEMORY
    # A further layout, which is read, and written where `others` of `save_hf` has it.
    read: BlockLayout | None = None
    # Values of `model_type`, of which the first one is written; {} is the family.
    types: tuple[str, ...] = ("{}",)
    d_model: str = "hidden_size"
    d_ff: str = MOE_WIDTH
    experts: str = "num_experts|num_local_experts|n_routed_experts"
    top_k: str = "num_experts_per_tok|experts_per_token"
    # The activation of the gate; None: the activation is `activation`.
    act: str | None = 'hidden_act="silu"'
    limit: str | None = None
    normalize: str | None = None
    scale: str | None = None
    groups: tuple[str, ...] = ()  # the number of groups and of chosen groups
    # The `topk_method` that limits routing to groups; None: groups always count.
    group_method: str | None = None
    shared: tuple[str, ...] = ()  # the width of the shared expert, or two factors of it
    latent: str | None = None  # the width of latent experts
    layers: Layers = Layers()
    # The one value of a key that moax supports, if it is there.
    fixed: dict[str, Any] = field(default_factory=dict)
    # The same, of keys that count with a shared expert.
    shared_fixed: dict[str, Any] = field(default_factory=dict)
    router: RouterConfig = RouterConfig()
    activation: Activation = "swiglu"
    use_bias: bool = False
    shared_gate: bool = False
    weights_at: Literal["output", "input"] = "output"
