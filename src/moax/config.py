"""`MoEConfig` and `RouterConfig` say what a Mixture-of-Experts block computes.

They are frozen, hashable and checked.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Literal

import numpy as np

from moax.checks import is_int, is_number

Activation = str | Callable | tuple[str | Callable, str | Callable]
GATED = ("swiglu", "geglu", "swiglu_oai", "reglu", "glu")
UNGATED = (
    "silu", "gelu", "relu2", "relu", "relu6", "swish", "tanh", "elu", "selu", "celu", "leaky_relu", "soft_sign",
    "hard_tanh", "hard_silu", "hard_swish", "mish", "quick_gelu", "squared_relu", "identity", "linear",
)  # fmt: skip
NOT_ZERO = ("sigmoid", "log_sigmoid", "hard_sigmoid", "softplus", "squareplus", "sparse_plus")  # of a pair alone
SCORES = ("softmax", "sigmoid", "sqrt_softplus")
SWIGLU_OAI_LIMIT, SWIGLU_OAI_ALPHA = 7.0, 1.702  # the default limit of gate and up, and the factor in the sigmoid


def _check_positive(owner: str, **fields) -> None:
    """Raises ValueError for a field of `owner` that is no int of at least 1."""
    for name, value in fields.items():
        if not is_int(value) or value < 1:
            raise ValueError(f"{owner}: {name}={value!r} must be an int of at least 1")


def _check_choice(owner: str, name: str, value, choices: tuple[str, ...]) -> None:
    """Raises ValueError if value is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{owner}: {name}={value!r} must be one of {', '.join(map(repr, choices))}")


def _check_flag(owner: str, **fields) -> None:
    """Raises ValueError for a field of `owner` that is no bool."""
    for name, value in fields.items():
        if not isinstance(value, bool | np.bool_):
            raise ValueError(f"{owner}: {name}={value!r} must be True or False")


def _check_number(owner: str, name: str, value, *, least: float, exclusive: bool = False) -> None:
    """Raises ValueError unless value is a finite number of at least `least`, or above it if `exclusive`."""
    number = is_number(value) and math.isfinite(value)
    if not number or value < least or (exclusive and value == least):
        raise ValueError(f"{owner}: {name}={value!r} must be a finite number {'>' if exclusive else '>='} {least}")


def _as_python(config) -> None:
    """Replaces numbers and flags of NumPy in a config by those of Python, so that equal configs have equal text."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, np.generic):
            object.__setattr__(config, field.name, value.item())


def _check_activation(owner: str, value) -> None:
    """Raises ValueError unless value is an activation: a name, a pair, or a function of one or two arrays."""
    if callable(value):
        gates_of(value)
        return
    pair = isinstance(value, tuple) and len(value) == 2
    for part in value if pair else (value,):
        if pair and callable(part):
            continue
        _check_choice(owner, "activation", part, UNGATED + NOT_ZERO if pair else GATED + UNGATED)


def gates_of(activation: Activation) -> int:
    """Returns G: 2 for an activation of (gate, up), 1 for an activation of up alone.

    Raises:
      ValueError: a function takes neither one nor two arrays.
    """
    if not callable(activation):
        return 2 if isinstance(activation, tuple) or activation in GATED else 1
    named = inspect.signature(activation).parameters.values()
    count = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in named)
    if count not in (1, 2):
        raise ValueError(f"activation={activation!r} must be a function of (up) or of (gate, up); it takes {count}")
    return count


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How logits [T, E] become K experts and K weights for each token.

    Attributes:
      score: `softmax` over all experts of a token, `sigmoid` of each logit, or `sqrt_softplus` of each logit, which is
        sqrt(log(1 + exp(logit))) (DeepSeek-V4).
      order: `score_then_topk` scores all experts and keeps the best K. `topk_then_score` keeps the best K logits and
        scores these K alone; their softmax sums to 1 by itself (Mixtral, GPT-OSS).
      normalize: whether the K weights are divided by their sum, where K > 1.
      num_groups, top_groups: group-limited routing (DeepSeek-V3). Experts form `num_groups` equal groups, and a token
        may choose experts of the `top_groups` groups with the best group score. With 8 experts in 4 groups, experts 2
        and 3 are group 1.
      group_score: the score of a group. `top2` is the sum of its two best scores (DeepSeek-V3), `max` its best score,
        and `sum_topk` the sum of its `top_k // top_groups` best scores (Megatron, Transformer Engine).
      scale: a factor on the weights (DeepSeek's routed scaling factor).
      bias: whether the parameters hold `router_bias` [E], which is added to the scores for selection alone.
      histogram: whether the stats have the histogram of `moax.update_router_bias(rule="quantile")`, which training
        needs; with `bias`, and without groups.
      logits_bias: whether the parameters hold `logits_bias` [E], a trained bias of the logits (GPT-OSS).
      aux_loss: the coefficient of the load-balance loss; a balanced router pays the coefficient.
      sequence_aux_loss: the coefficient of the same loss of each sequence, averaged over sequences (DeepSeek-V3's
        complementary loss). `moax.moe` adds it to `aux_loss`; x must then be [..., S, H]. A row of S tokens is a
        sequence, or several by `segment_ids`.
      z_loss: the coefficient of mean(logsumexp(logits)^2) (ST-MoE).
      expert_scale: whether the parameters hold `expert_scale` [E], a trained factor on the final weights of each expert
        (Gemma 4). The weight of a token for expert 3 is multiplied by expert_scale[3].

    Raises:
      ValueError: a field has a value that it cannot have. The message names the field.
    """

    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    order: Literal["score_then_topk", "topk_then_score"] = "score_then_topk"
    normalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max", "sum_topk"] = "top2"
    scale: float = 1.0
    bias: bool = False
    logits_bias: bool = False
    aux_loss: float = 0.0
    z_loss: float = 0.0
    sequence_aux_loss: float = 0.0
    expert_scale: bool = False
    histogram: bool = False

    def __post_init__(self):
        owner = "RouterConfig"
        _check_choice(owner, "score", self.score, SCORES)
        _check_choice(owner, "order", self.order, ("score_then_topk", "topk_then_score"))
        _check_choice(owner, "group_score", self.group_score, ("top2", "max", "sum_topk"))
        _check_flag(owner, normalize=self.normalize, bias=self.bias, logits_bias=self.logits_bias)
        _check_flag(owner, expert_scale=self.expert_scale, histogram=self.histogram)
        _check_positive(owner, num_groups=self.num_groups, top_groups=self.top_groups)
        if self.top_groups > self.num_groups:
            raise ValueError(f"{owner}: top_groups={self.top_groups} must be at most num_groups={self.num_groups}")
        if self.histogram and (not self.bias or self.num_groups > 1):
            raise ValueError(
                f"{owner}: histogram=True needs bias=True and num_groups=1; they are {self.bias} and {self.num_groups}"
            )
        _check_number(owner, "scale", self.scale, least=0.0, exclusive=True)
        _check_number(owner, "aux_loss", self.aux_loss, least=0.0)
        _check_number(owner, "z_loss", self.z_loss, least=0.0)
        _check_number(owner, "sequence_aux_loss", self.sequence_aux_loss, least=0.0)
        _as_python(self)

    def check_experts(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where this router cannot choose `top_k` of `num_experts`."""
        _check_positive("route", num_experts=num_experts, top_k=top_k)
        if top_k > num_experts:
            raise ValueError(f"top_k={top_k} must be at most num_experts={num_experts}")
        if num_experts % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide num_experts={num_experts}")
        eligible = num_experts // self.num_groups * self.top_groups
        if top_k > eligible:
            raise ValueError(
                f"top_k={top_k} must be at most the {eligible} experts of top_groups={self.top_groups} groups "
                f"(num_experts={num_experts}, num_groups={self.num_groups})"
            )
        if self.num_groups > 1 and self.group_score == "sum_topk" and top_k % self.top_groups:
            raise ValueError(
                f"group_score='sum_topk' needs top_k={top_k} divisible by top_groups={self.top_groups}; "
                "use 'top2' or 'max' otherwise"
            )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """The sizes and the equations of one block.

    Attributes:
      d_model: the model width H.
      d_ff: the expert width F.
      num_experts: the number of experts E.
      top_k: the experts per token K.
      activation: a name, such as `swiglu`, or `relu` and other functions of `jax.nn`; a pair (f, g) of names or
        functions, for f(gate) * g(up); or a function of (up) or of (gate, up). See `moax.ops.activation`.
      activation_limit: the limit L of a gated activation, which takes min(gate, L) and min(max(up, -L), L) in place of
        gate and up; None sets no limit, and 7 for `swiglu_oai`.
      use_bias: whether `init` makes the expert biases `bi` and `bo`. The block takes either of them without the other.
      router: see `RouterConfig`.
      shared_d_ff: the width S of the shared expert, which every token takes; 0 for no shared expert.
      shared_gate: whether the parameters hold `shared_gate` [H]; the output of the shared expert is then multiplied by
        sigmoid(x . shared_gate) (Qwen2-MoE).
      d_latent: the width L of latent experts (Nemotron 3): they read a projection of x to L, and one more projects the
        sum of their outputs back to H. The router and the shared expert read x itself. None: experts read x.
      capacity_factor: None drops no assignment. A number limits the expert-sorted rows of a rank to this multiple of
        the balanced load T K. The busiest experts lose the rows beyond the limit, and `MoEStats.dropped` counts them.
      weights_at: the place where the routing weights multiply: an expert's `output`, its `hidden` activation before the
        second product, or its `input` (Llama 4). `output` and `hidden` give the same function with different rounding.
        `input` is another function, expert(weight x), and experts with biases cannot have it.

    Raises:
      ValueError: a field has a value that it cannot have, or K does not fit the router. The message names the field.
    """

    d_model: int
    d_ff: int
    num_experts: int
    top_k: int
    activation: Activation = "swiglu"
    use_bias: bool = False
    router: RouterConfig = RouterConfig()
    shared_d_ff: int = 0
    capacity_factor: float | None = None
    weights_at: Literal["output", "hidden", "input"] = "output"
    shared_gate: bool = False
    activation_limit: float | None = None
    d_latent: int | None = None

    def __post_init__(self):
        owner = "MoEConfig"
        _check_positive(owner, d_model=self.d_model, d_ff=self.d_ff, num_experts=self.num_experts, top_k=self.top_k)
        _check_positive(owner, d_latent=1 if self.d_latent is None else self.d_latent)
        if isinstance(self.activation, list):
            object.__setattr__(self, "activation", tuple(self.activation))
        _check_activation(owner, self.activation)
        _check_choice(owner, "weights_at", self.weights_at, ("output", "hidden", "input"))
        _check_flag(owner, use_bias=self.use_bias, shared_gate=self.shared_gate)
        if self.use_bias and self.weights_at == "input":
            raise ValueError(f"{owner}: weights_at='input' needs use_bias=False")
        if self.shared_gate and not self.shared_d_ff:
            raise ValueError(f"{owner}: shared_gate=True needs a shared expert; set shared_d_ff")
        if self.activation_limit is not None:
            _check_number(owner, "activation_limit", self.activation_limit, least=0.0, exclusive=True)
            if gates_of(self.activation) != 2:
                raise ValueError(f"{owner}: activation_limit={self.activation_limit!r} needs an activation with a gate")
        if not isinstance(self.router, RouterConfig):
            raise ValueError(f"{owner}: router={self.router!r} must be a RouterConfig")
        if not is_int(self.shared_d_ff) or self.shared_d_ff < 0:
            raise ValueError(f"{owner}: shared_d_ff={self.shared_d_ff!r} must be an int, 0 for no shared expert")
        if self.capacity_factor is not None:
            _check_number(owner, "capacity_factor", self.capacity_factor, least=0.0, exclusive=True)
        self.router.check_experts(self.num_experts, self.top_k)
        _as_python(self)

    @property
    def gates(self) -> int:
        """G: the number of projections of a hidden unit, 2 (gate and up) or 1 (up alone)."""
        return gates_of(self.activation)

    @property
    def d_rows(self) -> int:
        """The width of the rows that experts read and write: L of latent experts, and H of others."""
        return self.d_model if self.d_latent is None else self.d_latent
