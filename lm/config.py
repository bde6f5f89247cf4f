"""The sizes of the model, the settings of a run, and four presets. A setting says what the option of its name does."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax

import moax
from lm.program import factor, factor_or_auto, mesh_of
from moax import MoEConfig, RouterConfig

VOCAB = 256
# `jax.random.key` keeps 32 bits of a seed, so that a larger one would begin as another does. No setting needs more.
MAX_INT = 2**32 - 1
AUX_COEFFICIENT = 0.01
# What `buffer_factor="auto"` is where a step may need several rounds; see `moax.Options`.
LIMITED_FACTOR = 1.25
OPTIONS = ("recipe", "exchange", "engine", "buffer_factor", "grad_reduce_dtype")


def setting(about: str, default: Any = dataclasses.MISSING, **metadata: Any) -> Any:
    """Returns a field that is an option of `python -m lm train`.

    `how` may have the option's `flag`, `metavar` and `type`, its `choices`, its `least` value, or a bound, `above`.
    """
    return dataclasses.field(default=default, metadata={"about": about} | metadata)


def mesh_over_devices(sizes: tuple[tuple[str, int], ...]) -> jax.sharding.Mesh:
    """Returns the mesh of these axes over all devices; no sizes put all devices on fsdp."""
    return moax.make_mesh(dict(sizes) or {"fsdp": jax.device_count()})


def _check(config: Any) -> None:
    """Checks the choices and the bounds of all settings."""
    for field in dataclasses.fields(config):
        limits = field.metadata
        value = getattr(config, field.name)
        must = ""
        if field.type == "int":
            what = "an int"
            is_number = isinstance(value, int)
        else:
            what = "a finite number"
            is_number = isinstance(value, (int, float))
        low = limits.get("least", limits.get("above"))
        if "choices" in limits and value not in limits["choices"]:
            must = f"one of {', '.join(map(repr, limits['choices']))}"
        elif low is not None and not (is_number and math.isfinite(value) and value >= low):
            must = f"{what} of at least {low}"
        elif "above" in limits and value == low:
            must = f"{what} above {low}"
        elif field.type == "int" and value > MAX_INT:
            must = f"an int of at most {MAX_INT}"
        if must:
            raise ValueError(f"{type(config).__name__}: {field.name}={value!r} must be {must}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the language model; every layer is attention, then an MoE."""

    d_model: int = setting("width of the residual stream", metavar="H")
    d_ff: int = setting("width of an expert", metavar="F")
    num_layers: int = setting("number of layers", flag="layers", metavar="L", least=1)
    num_heads: int = setting("number of attention heads", flag="heads", metavar="N", least=1)
    num_experts: int = setting("experts of a layer", flag="experts", metavar="E")
    top_k: int = setting("experts of a token", metavar="K")
    head_dim: int = setting("width of a head, even, for RoPE; 0: H / N", 0, metavar="D")
    num_kv_heads: int = setting(
        "heads of keys and values, each for N / M heads of queries; 0: N",
        0,
        flag="kv-heads",
        metavar="M",
    )
    shared_d_ff: int = setting(
        "width of an expert that every token takes; 0: no such expert",
        0,
        metavar="S",
    )
    capacity_factor: float | None = setting(
        "bound the rows of a rank at X times the even load, drop and count the rest; none: drop nothing",
        None,
        type=factor,
        metavar="X",
    )
    tied: bool = setting("one [256, H] matrix embeds and predicts bytes", False)
    balance: Literal["bias", "aux", "sequence", "none"] = setting(
        "keep experts busy by a selection bias of sigmoid scores that changes after each step (bias), by a loss of the "
        "batch (aux) or of each sequence, or not at all; all but bias have softmax scores",
        "bias",
        choices=("bias", "aux", "sequence", "none"),
    )
    activation: str = setting(
        "the activation of the experts, as in MoEConfig",
        "swiglu",
        metavar="NAME",
    )

    def __post_init__(self):
        _check(self)
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
        num_kv_heads = self.num_kv_heads or self.num_heads
        head_dim = self.head_dim or self.d_model // self.num_heads
        return self.num_heads, num_kv_heads, head_dim

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

    The recipe and `grad_reduce_dtype` also hold for the dense layers into attention and out of it.
    """

    model: ModelConfig
    name: str = setting("folder of the run inside OUT; NAME-2 where that is taken", "run")
    out: str = setting("folder of all runs", "runs")
    text: str | None = setting(
        "a file or folder to train on; by default the source of Python's standard library",
        None,
        metavar="PATH",
    )
    origin: str | None = setting(
        "begin with another run's checkpoint, as runs/tiny/checkpoints/60; a run's folder means its newest. "
        "Settings that you do not give come from that run, and its model, seed, batch, sequence and text stay",
        None,
        flag="from",
        metavar="CHECKPOINT",
    )
    mesh: tuple[tuple[str, int], ...] = setting(
        "sizes of the axes dp, fsdp, cp, ep, tp, as fsdp=2,ep=4; by default all devices are on fsdp",
        (),
        type=mesh_of,
        metavar="AXES",
    )
    steps: int = setting("number of updates", 1000, least=1)
    batch: int = setting("sequences of a step, over the whole mesh", 16, least=1)
    seq: int = setting("bytes of a sequence", 128, least=1)
    microbatches: int = setting(
        "compute a step's batch in N parts, one after the other, with less memory and with "
        "the experts' weights quantized once",
        1,
        metavar="N",
        least=1,
    )
    lr: float = setting(
        "peak learning rate of AdamW; it falls along a cosine to a tenth",
        1e-3,
        above=0,
    )
    warmup: int = setting("steps of the linear warm-up", 20, metavar="STEPS", least=1)
    weight_decay: float = setting("AdamW's decay of the matrices", 0.1, least=0)
    clip: float = setting("bound of the global norm of the gradients", 1.0, above=0)
    bias_rate: float = setting(
        "change of the selection bias in a step, with --balance bias",
        1e-3,
        least=0,
    )
    seed: int = setting("seed of the weights and of the order of the data", 0, least=0)
    recipe: str | None = setting(
        "how matmuls are quantized: none, fp8_block or mxfp8",
        None,
        metavar="NAME",
    )
    exchange: str = setting(
        "how tokens reach the ranks of their experts, as in moax.Options",
        "auto",
        metavar="NAME",
    )
    engine: str = setting("how ops are partitioned, as in moax.Options", "auto", metavar="NAME")
    dtype: str = setting(
        "dtype of activations; master weights and the optimizer are float32",
        "bfloat16",
        choices=("float32", "bfloat16"),
    )
    attention: Literal["auto", "cudnn", "xla"] = setting(
        "xla holds [S, S] scores in memory, cudnn does not; auto takes cuDNN on a Hopper GPU where the heads fit it",
        "auto",
        choices=("auto", "cudnn", "xla"),
    )
    remat: Literal["none", "full", "moe"] = setting(
        "recompute in backward: nothing, everything, or all but the MoE",
        "none",
        choices=("none", "full", "moe"),
    )
    buffer_factor: float | Literal["auto"] | None = setting(
        "buffers for X times the balanced load, in more rounds where a step needs more; none: for the worst case; "
        "auto: none with at most two ranks of ep, else 1.25",
        "auto",
        type=factor_or_auto,
        metavar="X",
    )
    grad_reduce_dtype: str | None = setting(
        "the dtype in which gradients of weights are summed, float32 or bfloat16; by default that of activations",
        None,
        metavar="DTYPE",
    )
    eval_every: int = setting(
        "compute the held-out loss every so many steps",
        100,
        metavar="STEPS",
        least=1,
    )
    eval_batches: int = setting("fixed batches of an evaluation", 8, metavar="N", least=1)
    save_every: int = setting(
        "save a checkpoint every so many steps; 0: at the end alone", 500, metavar="STEPS", least=0
    )

    def __post_init__(self):
        _check(self)
        _ = self.options  # Options checks its own fields
        if self.batch % self.microbatches:
            raise ValueError(f"TrainConfig: microbatches={self.microbatches} must divide batch={self.batch}")
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
        model = dict(data["model"])
        run = {key: value for key, value in data.items() if key != "model"}
        for owner, settings in ((ModelConfig, model), (cls, run)):
            if unknown := settings.keys() - {field.name for field in dataclasses.fields(owner)}:
                raise ValueError(f"{owner.__name__} has no field {', '.join(sorted(unknown))}")
        return cls(
            model=ModelConfig(**model),
            **(run | {"mesh": tuple(run.get("mesh", {}).items())}),
        )


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
            cut = f"into {parts} microbatches over" if parts > 1 else "by"
            over = f"{' x '.join(axes)} = {devices} devices"
            raise ValueError(f"{flag} {size} is not divisible {cut} {over}; {fits} would do")


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
