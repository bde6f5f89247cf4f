"""`MoEConfig` and `RouterConfig` say what a Mixture-of-Experts block computes, and `Options` how it runs.

They are frozen, hashable and checked. `MoEStats` is what the block reports.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple, TypedDict

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moax.activations import Activation, check_activation, gates_of
from moax.checks import check_fields, check_keywords, check_value, suggest_fields
from moax.mesh.axes import Axes
from moax.mesh.collectives import get_grad_reduce
from moax.mesh.specs import Engine
from moax.recipe import Recipe, get_recipe
from moax.types import Routing, exportable

BufferFactor = float | Literal["auto"] | None
LIMITED_FACTOR = 1.25  # what `buffer_factor="auto"` is with more than two ranks of ep


@suggest_fields
@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How logits [T, E] become K experts and K weights for each token.

    Attributes:
      score: `softmax` over all experts of a token, `sigmoid` of each logit, or `sqrt_softplus` of each logit, which is
        sqrt(log(1 + exp(logit))) (DeepSeek-V4).
      order: `score_then_topk` scores all experts and keeps the best K. `topk_then_score` keeps the best K logits and
        scores these K alone; their softmax sums to 1 by itself (Mixtral, GPT-OSS). The softmax of one logit is 1 for
        every logit, so K = 1 of several experts needs another order or score.
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
        check_fields(self, "RouterConfig: ", positive=("scale",))
        if self.top_groups > self.num_groups:
            groups = f"top_groups={self.top_groups} must be at most num_groups={self.num_groups}"
            raise ValueError(f"RouterConfig: {groups}")
        if self.histogram and (not self.bias or self.num_groups > 1):
            needs = f"bias=True and num_groups=1; they are {self.bias} and {self.num_groups}"
            raise ValueError(f"RouterConfig: histogram=True needs {needs}")

    def check_experts(self, num_experts: int, top_k: int) -> None:
        """Raises ValueError where this router cannot choose `top_k` of `num_experts`, or could never learn to."""
        check_value("route: num_experts", num_experts, int)
        check_value("route: top_k", top_k, int)
        if top_k > num_experts:
            raise ValueError(f"top_k={top_k} must be at most num_experts={num_experts}")
        if top_k == 1 < num_experts and self.order == "topk_then_score" and self.score == "softmax":
            raise ValueError(
                "top_k=1 with order='topk_then_score' and score='softmax' makes every weight 1, so that the router has "
                "no gradient; use order='score_then_topk', which also serves a caller's routing=(ids, weights)"
            )
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


@suggest_fields
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
      weights_at: the place where the routing weights multiply: an expert's `output`, or its `input` (Llama 4), which is
        another function, expert(weight x), and which experts with biases cannot have.

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
    weights_at: Literal["output", "input"] = "output"
    shared_gate: bool = False
    activation_limit: float | None = None
    d_latent: int | None = None

    def __post_init__(self):
        if isinstance(self.activation, list):
            object.__setattr__(self, "activation", tuple(self.activation))
        positive = ("activation_limit", "capacity_factor")
        check_fields(self, "MoEConfig: ", positive=positive, zero=("shared_d_ff",))
        check_activation("MoEConfig: activation", self.activation)
        if self.use_bias and self.weights_at == "input":
            raise ValueError("MoEConfig: weights_at='input' needs use_bias=False")
        if self.shared_gate and not self.shared_d_ff:
            raise ValueError("MoEConfig: shared_gate=True needs a shared expert; set shared_d_ff")
        if self.gates != 2 and self.activation_limit is not None:
            limit = f"activation_limit={self.activation_limit!r}"
            raise ValueError(f"MoEConfig: {limit} needs an activation with a gate")
        self.router.check_experts(self.num_experts, self.top_k)

    @functools.cached_property
    def gates(self) -> int:
        """G: the number of projections of a hidden unit, 2 (gate and up) or 1 (up alone)."""
        return gates_of(self.activation)

    @functools.cached_property
    def d_rows(self) -> int:
        """The width of the rows that experts read and write: L of latent experts, and H of others."""
        return self.d_model if self.d_latent is None else self.d_latent


@suggest_fields
@dataclasses.dataclass(frozen=True)
class Options:
    """How a block runs. `moax.moe` takes an `Options`, or its fields as keywords.

    Attributes:
      recipe: `fp8_block`, `mxfp8`, a `Recipe`, or None to quantize nothing.
      axes: the role of each mesh axis; see `moax.Axes`.
      exchange: the transport of tokens: `all_gather`, `all_to_all`, or `auto`: the one of them that costs less in a
        balanced step on the mesh at hand. With a capacity factor `auto` is all_gather, which drops nothing on the way.
        No token travels where ep has size 1.
      kernels: the implementation: `hopper` (Hopper GPUs, bfloat16, widths that are multiples of 32), `xla`, or `auto`.
        `auto` takes hopper where it can run, and xla elsewhere. On a GPU, the log says once why hopper cannot run.
      engine: the way from global arrays to shards on a mesh of Auto axes. `custom_partitioning`, which is `auto`, takes
        each weight in the sharding that it has, and does not reshard it. `shard_map` takes weights in the layout of
        `param_specs`, to which JAX reshards others without a word; `jax.export` needs it. Explicit axes always use
        `shard_map`.
      buffer_factor: the size of every buffer whose load depends on the routing, as a multiple of the balanced load. A
        step whose routing needs more runs further overflow rounds in the same buffers: no token is dropped, and
        `stats.rounds` counts the rounds. Below 1, every step takes several rounds, in less memory. Buffers never exceed
        the worst case, and None allocates it. `auto` is None where ep has at most two ranks, whose worst case is twice
        the balanced load, and 1.25 where it has more. `capacity_factor` bounds the rows that the exchange moves
        already, in one round.
      save_rows: whether forward keeps the sorted rows for backward, which is faster, or backward receives and gathers
        the rows again, which takes less memory. None keeps the rows but where ep has size 1 and one kernel gathers and
        quantizes them: there backward needs little time for the rows. Where matmuls gather rows of x themselves, and
        no rows travel, forward keeps none. With adapters forward keeps the rows in each of these cases.
      grad_reduce_dtype: how the gradients of weights are summed over fsdp and dp, before they are cast to the dtype of
        their parameters. None sums them in the dtype of x. `float32` and `bfloat16` compute, send and sum them in this
        dtype. Inside the caller's own `shard_map` the option covers the sum over fsdp alone. The caller, or JAX for the
        caller, sums over dp after the cast, in the dtype of the parameter.

    Raises:
      ValueError: a field has a value that it cannot have. The message names the field.
    """

    recipe: str | Recipe | None = None
    axes: Axes = Axes()
    exchange: str = "auto"
    kernels: str = "auto"
    engine: Engine = "auto"
    buffer_factor: BufferFactor = "auto"
    save_rows: bool | None = None
    grad_reduce_dtype: DTypeLike | None = None

    def __post_init__(self):
        get_recipe(self.recipe)
        check_fields(self, "", positive=("buffer_factor",))
        object.__setattr__(self, "grad_reduce_dtype", get_grad_reduce(self.grad_reduce_dtype))


def replace_options(caller: str, options: Options, keywords: OptionKeywords) -> Options:
    """Returns the options with these fields; TypeError, which names the caller, where `Options` lacks a keyword's."""
    check_value("options", options, Options)
    fields = [field.name for field in dataclasses.fields(Options)]
    check_keywords(caller, keywords, fields, "moax.Options")
    return dataclasses.replace(options, **keywords) if keywords else options


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options` as keywords of a function."""

    recipe: str | Recipe | None
    axes: Axes
    exchange: str
    kernels: str
    engine: Engine
    buffer_factor: BufferFactor
    save_rows: bool | None
    grad_reduce_dtype: DTypeLike | None


class MoEStats(NamedTuple):
    """The losses and counts of one block, over the whole mesh, for a training loop.

    Attributes:
      aux_loss, z_loss: [] f32, times their coefficients; a training loop adds them to its loss.
      tokens_per_expert: [E] i32, the assignments that the router made to each expert.
      dropped: [] i32, the assignments that found no room.
      rounds: [] i32, the rounds of the rank that made the most, 1 where every buffer has room; see
        `moax.Options.buffer_factor`.
      routing: the Routing that the block used, with experts and weights [..., K] for x [..., H]; None unless the caller
        asked for it.
      histogram: [E, 1000] i32, the histogram of the Routing. The histograms of microbatches with one bias add up.
    """

    aux_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    tokens_per_expert: Int[Array, " E"]
    dropped: Int[Array, ""]
    rounds: Int[Array, ""]
    routing: Routing | None = None
    histogram: Int[Array, "E 1000"] | None = None


class StatsKey(jax.tree_util.SequenceKey):
    """The key of a field of `MoEStats` in the path of a leaf.

    It has an index, which `nnx.tabulate` of Flax needs to print a NamedTuple, and is printed by the name of the field:
    `jax.tree_util.keystr` gives ".dropped".
    """

    def __str__(self) -> str:
        return f".{MoEStats._fields[self.idx]}"


STATS_KEYS = tuple(map(StatsKey, range(len(MoEStats._fields))))
jax.tree_util.register_pytree_with_keys(
    MoEStats,
    lambda stats: (tuple(zip(STATS_KEYS, stats, strict=True)), None),
    lambda _, values: MoEStats(*values),
    lambda stats: (tuple(stats), None),
)
exportable(MoEStats)
