"""The sizes of the model, the settings of a run, and four presets."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax

import moax
from moax import MoEConfig, RouterConfig

VOCAB = 256
BALANCE = ("bias", "aux", "sequence", "none")
REMAT = ("none", "full", "moe")
ATTENTION = ("auto", "cudnn", "xla")
DTYPES = ("float32", "bfloat16")
AUX_COEFFICIENT = 0.01
OPTIONS = ("recipe", "exchange", "engine", "buffer_factor", "grad_reduce_dtype")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the language model; every layer is attention, then an MoE.

    Attributes:
      d_model: width H of the residual stream.
      d_ff: width F of one expert.
      num_layers: number of layers L.
      num_heads: attention heads N.
      head_dim: width D of a head, even, for RoPE; 0 for d_model // num_heads.
      num_kv_heads: heads M of keys and values, each for N // M heads of queries; 0 for N.
      num_experts, top_k: E experts of a layer, K of them for a token.
      shared_d_ff: width of the expert that every token takes; 0 for none.
      capacity_factor: None drops no token; a number bounds the rows of a rank at that multiple of the balanced load.
      tied: one [256, H] matrix embeds bytes and predicts them.
      balance: how the load of the experts is balanced. `bias` takes sigmoid scores and a selection bias that changes
        after each step (loss-free balancing); `aux` takes softmax scores and a load-balance loss of the batch;
        `sequence` takes softmax scores and a load-balance loss of each sequence; `none` takes softmax scores alone.
      activation: the activation of the experts, by name; see `moax.ops.activate`.
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_experts: int
    top_k: int
    head_dim: int = 0
    num_kv_heads: int = 0
    shared_d_ff: int = 0
    capacity_factor: float | None = None
    tied: bool = False
    balance: Literal["bias", "aux", "sequence", "none"] = "bias"
    activation: str = "swiglu"

    def __post_init__(self):
        _at_least_one(self, "num_layers", "num_heads")
        _one_of(self, "balance", BALANCE)
        if not self.head_dim and self.d_model % (2 * self.num_heads):
            raise ValueError(
                f"ModelConfig: d_model={self.d_model} must be a multiple of 2 * num_heads={2 * self.num_heads}"
            )
        if self.head_dim < 0 or self.head_dim % 2:
            raise ValueError(f"ModelConfig: head_dim={self.head_dim} must be even, or 0 for d_model // num_heads")
        if self.num_kv_heads < 0 or self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig: num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}, or be 0 for it"
            )
        self.moe()

    @property
    def heads(self) -> tuple[int, int, int]:
        """The heads of queries, the heads of keys and values, and the width of a head."""
        return self.num_heads, self.num_kv_heads or self.num_heads, self.head_dim or self.d_model // self.num_heads

    def moe(self) -> MoEConfig:
        """Returns the config of the MoE block, which is the same in every layer."""
        router = RouterConfig(
            score="sigmoid" if self.balance == "bias" else "softmax",
            bias=self.balance == "bias",
            aux_loss=AUX_COEFFICIENT if self.balance == "aux" else 0.0,
            sequence_aux_loss=AUX_COEFFICIENT if self.balance == "sequence" else 0.0,
        )
        return MoEConfig(
            d_model=self.d_model,
            d_ff=self.d_ff,
            num_experts=self.num_experts,
            top_k=self.top_k,
            router=router,
            activation=self.activation,
            shared_d_ff=self.shared_d_ff,
            capacity_factor=self.capacity_factor,
        )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The settings of a run. `config.json` holds them, and `--resume` reads them.

    Attributes:
      model: the model's sizes.
      name, out: the run's files go to `out/name`.
      text: a file or folder to train on; None for the source files of Python's standard library.
      mesh: sizes of the mesh axes, as (("fsdp", 2), ("ep", 4)); empty for all devices on fsdp.
      steps: number of updates.
      batch: sequences of a step, over the whole mesh.
      seq: bytes S of a sequence.
      microbatches: a step computes its batch in so many equal parts, one after the other, and adds up their gradients:
        less memory for activations. The experts' weights are quantized once a step.
      lr: peak learning rate of AdamW. It falls along a cosine to a tenth.
      warmup: steps of the linear warm-up.
      weight_decay: AdamW's decay of the matrices.
      clip: bound of the global norm of the gradients.
      bias_rate: by how much the selection bias changes in a step, where balance is `bias`.
      seed: seed of the initial weights and of the order of the data.
      recipe, exchange, engine, buffer_factor, grad_reduce_dtype: see `moax.Options`. The recipe and the dtype also hold
        for the dense layers: the projections into attention take the recipe of wi, and the one out of it that of wo.
      dtype: dtype of activations; master weights and the optimizer are float32.
      attention: `cudnn` holds no [S, S] scores in memory, `xla` does; `auto` takes cuDNN on a Hopper GPU where the
        heads fit its kernels, and XLA elsewhere.
      remat: backward recomputes nothing (`none`), everything (`full`), or all but `moax.CHECKPOINT_NAMES` (`moe`).
      eval_every: steps between two evaluations of the held-out loss.
      eval_batches: fixed batches of an evaluation.
      save_every: steps between two checkpoints; 0 saves at the end alone. Every run saves at its end.
    """

    model: ModelConfig
    name: str = "run"
    out: str = "runs"
    text: str | None = None
    mesh: tuple[tuple[str, int], ...] = ()
    steps: int = 1000
    batch: int = 16
    seq: int = 128
    microbatches: int = 1
    lr: float = 1e-3
    warmup: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    bias_rate: float = 1e-3
    seed: int = 0
    recipe: str | None = None
    exchange: str = "auto"
    engine: str = "auto"
    dtype: str = "bfloat16"
    attention: Literal["auto", "cudnn", "xla"] = "auto"
    remat: Literal["none", "full", "moe"] = "none"
    buffer_factor: float | None = 1.25
    grad_reduce_dtype: str | None = None
    eval_every: int = 100
    eval_batches: int = 8
    save_every: int = 500

    def __post_init__(self):
        _at_least_one(self, "steps", "batch", "seq", "warmup", "microbatches", "eval_every", "eval_batches")
        _one_of(self, "dtype", DTYPES)
        _one_of(self, "attention", ATTENTION)
        _one_of(self, "remat", REMAT)
        _ = self.options  # Options checks its own fields
        if self.batch % self.microbatches:
            raise ValueError(f"TrainConfig: microbatches={self.microbatches} must divide batch={self.batch}")
        for name in ("save_every", "seed", "weight_decay", "bias_rate"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise ValueError(f"TrainConfig: {name}={value!r} must be a finite number, at least 0")
        for name in ("lr", "clip"):
            if not (math.isfinite(value := getattr(self, name)) and value > 0):
                raise ValueError(f"TrainConfig: {name}={value!r} must be a finite number above 0")
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ValueError(f"TrainConfig: name={self.name!r} must be a folder's name, without '/' or a leading '.'")

    @property
    def options(self) -> moax.Options:
        """How the MoE blocks run."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in OPTIONS}
        return moax.Options(**fields)

    def to_json(self) -> dict[str, Any]:
        """Returns the settings as a nested dict that JSON can hold; `from_json` is the inverse."""
        return dataclasses.asdict(self) | {"mesh": dict(self.mesh)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainConfig:
        """Rebuilds the settings from the result of `to_json`.

        Raises:
          ValueError: `data` has a field that the settings do not have.
        """
        model, run = dict(data["model"]), {key: value for key, value in data.items() if key != "model"}
        for owner, given in ((ModelConfig, model), (cls, run)):
            if unknown := given.keys() - {field.name for field in dataclasses.fields(owner)}:
                raise ValueError(f"{owner.__name__} has no field {', '.join(sorted(unknown))}")
        return cls(model=ModelConfig(**model), **(run | {"mesh": tuple(run.get("mesh", {}).items())}))


def check_batch(config: TrainConfig, mesh: jax.sharding.Mesh) -> None:
    """Checks that the sequences of a microbatch divide over dp, fsdp and ep of the mesh, and their bytes over cp.

    Raises:
      ValueError: they do not; the message names the nearest sizes that do.
    """
    rows = ("--batch", config.batch, ("dp", "fsdp", "ep"), config.microbatches)
    for flag, size, names, parts in (rows, ("--seq", config.seq, ("cp",), 1)):
        axes = {name: n for name, n in mesh.shape.items() if name in names}
        devices = math.prod(axes.values())
        unit = devices * parts
        if size % unit:
            fits = " or ".join(str(n * unit) for n in (size // unit, size // unit + 1) if n)
            cut = f" in {parts} microbatches" if parts > 1 else ""
            raise ValueError(
                f"{flag} {size} does not divide{cut} over {' x '.join(axes)} = {devices} devices; {fits} would do"
            )


def _at_least_one(config: Any, *names: str) -> None:
    for name in names:
        if not isinstance(value := getattr(config, name), int) or value < 1:
            raise ValueError(f"{type(config).__name__}: {name}={value!r} must be an int of at least 1")


def _one_of(config: Any, name: str, choices: tuple[str, ...]) -> None:
    if (value := getattr(config, name)) not in choices:
        raise ValueError(f"{type(config).__name__}: {name}={value!r} must be one of {', '.join(map(repr, choices))}")


# Parameters / active parameters: tiny 3.5 M / 1.1 M, small 109 M / 21 M, medium 655 M / 127 M, large 3.5 B / 673 M.
# Training holds 16 bytes a parameter (float32 weight, gradient, two moments): large suits one H200 or more.
PRESETS = {
    "tiny": TrainConfig(
        model=ModelConfig(d_model=128, d_ff=256, num_layers=4, num_heads=4, num_experts=8, top_k=2),
        steps=120, batch=16, seq=128, lr=4e-3, warmup=20, dtype="float32",
        bias_rate=1e-2, eval_every=20, eval_batches=4, save_every=60,
    ),
    "small": TrainConfig(
        model=ModelConfig(d_model=512, d_ff=512, num_layers=8, num_heads=8, num_experts=16, top_k=2),
        steps=2000, batch=32, seq=512, lr=1e-3, warmup=100, eval_every=200, save_every=500,
    ),
    "medium": TrainConfig(
        model=ModelConfig(d_model=1024, d_ff=512, num_layers=12, num_heads=16, num_experts=32, top_k=4),
        steps=5000, batch=64, seq=1024, lr=6e-4, warmup=200, remat="moe", eval_every=500, save_every=1000,
    ),
    "large": TrainConfig(
        model=ModelConfig(d_model=2048, d_ff=1024, num_layers=16, num_heads=16, num_experts=32, top_k=4),
        steps=10000, batch=16, seq=2048, lr=3e-4, warmup=500, remat="full", eval_every=500, save_every=1000,
    ),
}  # fmt: skip
