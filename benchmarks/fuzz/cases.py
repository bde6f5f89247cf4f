"""The random cases: a block by its seed, and the inputs of each of its draws."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import moax
from moax.activations import GATED, UNGATED
from moax.params import param_shapes

RECIPES = (None, "fp8_block", "mxfp8")
WIDE = (640, 768, 1024, 1408, 1536, 2048, 2880, 4096)
BUFFER_FACTORS = (0.1, 0.5, 1.0, 1.25, 2.0, None)
ELEMENTS = 1 << 27  # of the largest array that the reference holds, and of a weight
LEADING = 2  # the steps of a scan, and the size of a batch of vmap
LOADS = ("equal", "skewed", "one", "half")
FIXED_LOADS = ("every", "rank")  # one expert has every token; one rank of ep has all tokens
CERTAIN = 1e3  # the logits of an expert that every token chooses, where the caller gives the experts
STRONG = 8.0  # the logits by which a router prefers or avoids an expert


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and how a block runs on it.

    Attributes:
      sizes: (role, devices) of each mesh axis; the name of an axis is its role.
      explicit: whether the axes are Explicit; they are Auto elsewhere.
      exchange: an option of `moax.moe`.
      batch: B of x [B, S, H]; None means x [T, H].
    """

    sizes: tuple[tuple[str, int], ...]
    explicit: bool
    exchange: str
    batch: int | None = None

    def __str__(self) -> str:
        sizes = ",".join(f"{role}={size}" for role, size in self.sizes)
        words = [f"mesh={sizes}", "Explicit" if self.explicit else "Auto", self.exchange]
        words += [f"B{self.batch}"] * (self.batch is not None)
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class Case:
    """One random block, and what is static in its program.

    Attributes:
      seed: the seed of the block, and with a draw that of the values.
      config: the block.
      tokens: T.
      recipe, buffer_factor: options of `moax.moe`.
      routing: None, "experts", or "weights" for experts with weights: what the caller gives in place of a routing.
      masked: whether there is a mask; tokens of padding are full of NaN.
      quantized: whether `moax.quantize_params` quantizes the weights.
      remat: whether `jax.checkpoint` is around the block.
      way: "plain", "scan" over layers, or "vmap" over layers.
      layout: the mesh that the block runs on; None means one device.
      load: the loads of the experts, one of LOADS or of FIXED_LOADS; None means that each draw has its own.
      name: the name of a case that no seed draws.
    """

    seed: int
    config: moax.MoEConfig
    tokens: int
    recipe: str | None
    buffer_factor: float | None
    routing: str | None
    masked: bool
    quantized: bool
    remat: bool
    way: str
    layout: Layout | None = None
    load: str | None = None
    name: str = ""

    @property
    def label(self) -> str:
        """The name of the case, or its seed."""
        return self.name or str(self.seed)

    def __str__(self) -> str:
        c = self.config
        sizes = f"T{self.tokens} H{c.d_model} F{c.d_ff} E{c.num_experts} K{c.top_k}"
        words: list[str] = [f"{self.recipe or 'bf16'} {sizes}", str(c.activation)]
        words += [f"weights_at={c.weights_at}", f"{c.router.score}/{c.router.order}", self.way]
        words += [f"buffer={self.buffer_factor}"] * (self.buffer_factor != 1.25)
        words += [f"routing={self.routing}"] * (self.routing is not None)
        words += [str(self.layout)] * (self.layout is not None)
        flags = dict(bias=c.use_bias, mask=self.masked, quantized=self.quantized, remat=self.remat)
        return " ".join([*words, *(name for name, on in flags.items() if on)])


def draw(seed: int, tiny: bool = False) -> Case:
    """Returns the case of a seed. A tiny one has sizes that a CPU computes in a moment."""
    rng = np.random.default_rng(seed)

    def log_uniform(largest: int) -> int:
        return int(np.exp(rng.uniform(0, np.log(largest + 1))))

    def width() -> int:
        narrow = 32 * int(rng.integers(1, 17))
        wide = int(rng.choice(WIDE))
        if tiny:
            return 32 * int(rng.integers(1, 5))
        return narrow if rng.random() < 0.75 else wide

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    d_model = width()
    d_ff = width()
    tokens = log_uniform(4096)
    experts = log_uniform(256)
    experts = max(1, min(experts, ELEMENTS // (3 * d_model * d_ff)))
    tokens = max(1, min(tokens, ELEMENTS // (experts * (d_model + 3 * d_ff))))
    if tiny:
        tokens = 1 + tokens % 96
        experts = 1 + experts % 16
    top_k = int(rng.integers(1, min(8, experts) + 1))
    activation = str(rng.choice(list(GATED if chance(0.6) else UNGATED)))
    weights_at: Any = str(rng.choice(["output", "input"], p=[0.75, 0.25]))
    score: Any = str(rng.choice(["softmax", "sigmoid", "sqrt_softplus"]))
    order: Any = "topk_then_score" if top_k > 1 and chance(0.3) else "score_then_topk"
    router = moax.RouterConfig(score=score, order=order)
    use_bias = chance(0.3) and weights_at != "input"
    config = moax.MoEConfig(
        d_model,
        d_ff,
        experts,
        top_k,
        activation=activation,
        weights_at=weights_at,
        use_bias=use_bias,
        router=router,
    )
    recipe = RECIPES[rng.integers(len(RECIPES))]
    return Case(
        seed=seed,
        config=config,
        tokens=tokens,
        recipe=recipe,
        buffer_factor=BUFFER_FACTORS[rng.integers(len(BUFFER_FACTORS))] if chance(0.5) else 1.25,
        routing=str(rng.choice(["experts", "weights"])) if chance(0.4) else None,
        masked=chance(0.4),
        quantized=recipe is not None and chance(0.4),
        remat=chance(0.3),
        way=str(rng.choice(["plain", "scan", "vmap"], p=[0.6, 0.2, 0.2])),
    )


def _experts_of_rank(case: Case) -> int:
    """Returns the experts of one rank of ep."""
    ranks = 1
    if case.layout is not None:
        ranks = dict(case.layout.sizes).get("ep", 1)
    return case.config.num_experts // ranks


def make_inputs(case: Case, index: int) -> tuple[str, dict[str, Any]]:
    """Returns the words and the arrays of one draw, arrays with a leading dim of layers, or None."""
    c = case.config
    rng = np.random.default_rng([case.seed, 1, index])
    layers = 1 if case.way == "plain" else LEADING

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal((layers, *shape), np.float32)).astype(jnp.bfloat16)

    load = case.load or str(rng.choice(LOADS))
    order = rng.permutation(c.num_experts)
    logits = {
        "equal": np.zeros(c.num_experts),
        "skewed": -np.log1p(order) * rng.choice([1.0, 4.0]),
        "one": np.where(order == 0, STRONG, 0.0),
        "every": np.where(np.arange(c.num_experts) == 0, CERTAIN, 0.0),
        "rank": np.where(np.arange(c.num_experts) < _experts_of_rank(case), CERTAIN, 0.0),
        "half": np.where(order < max(c.top_k, c.num_experts // 2), 0.0, -STRONG),
    }[load]

    # Arrays of NumPy: each operation of JAX outside of `jax.jit` would be a program to compile.
    scales = dict(router=c.d_model**-0.5, wi=c.d_model**-0.5, wo=c.d_ff**-0.5)
    weight_values = {}
    for name, shape in vars(param_shapes(c)).items():
        if shape is not None:
            weight_values[name] = normal(*shape, scale=scales.get(name, 1.0))
    x, dy = (normal(case.tokens, c.d_model) for _ in range(2))
    words = [f"load={load}"]
    ids = None
    weights = None
    mask = None
    if case.routing:
        noise = rng.gumbel(size=(layers, case.tokens, c.num_experts)) + 2 * logits
        ids = np.argsort(-noise, axis=-1)[..., : c.top_k].astype(np.int32)
        if case.routing == "weights":
            share = float(rng.choice([0.0, 0.1, 0.9]))
            ids = np.where(rng.random(ids.shape) < share, c.num_experts, ids).astype(np.int32)
            weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
            words.append(f"nobody={share}")
    else:
        # The first column of x is 1, so that the router adds these logits for each token.
        x[..., 0] = 1.0
        weight_values["router"][:, 0] = np.maximum(logits, -STRONG)
    if case.masked:
        mask = rng.random((layers, case.tokens)) < rng.choice([0.67, 1.0])
        if rng.random() < 0.5:
            mask[:] = np.arange(case.tokens) < int(rng.integers(case.tokens + 1))
        words.append(f"valid={mask.sum()}/{mask.size}")
    params = moax.MoEParams(**weight_values)
    return " ".join(words), dict(params=params, x=x, dy=dy, ids=ids, weights=weights, mask=mask)
