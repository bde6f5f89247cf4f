"""What `python -m benchmarks.trainer` measures: models, meshes, and the ways to compute the MoE layer on each mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from benchmarks.report import OURS
from moax.block.plan import WHOLE_RANKS
from moax.config import BufferFactor

MICROBATCHES = 4  # the microbatches of a step that the name of a case does not tell
SYNTHETIC = "synthetic"
BALANCED = "balanced"
TEXT = "text"
LOADS = (SYNTHETIC, BALANCED, TEXT)
AXES = ("fsdp", "expert")
COMMON = """override_model_config=True dataset_type=synthetic packing=False per_device_batch_size=2
max_target_length=4096 scan_layers=False megablox=False learning_rate=3e-4 run_name=step enable_checkpointing=False
enable_tensorboard=False enable_goodput_recording=False monitor_goodput=False skip_jax_distributed_system=True
log_config=False"""
TINY = """model_name=qwen3-30b-a3b base_emb_dim=256 base_num_query_heads=4 base_num_kv_heads=2 head_dim=64 num_experts=8
num_experts_per_tok=2 base_mlp_dim=128 base_moe_mlp_dim=128 vocab_size=512 max_target_length=128 hardware=cpu"""


@dataclasses.dataclass(frozen=True)
class Model:
    """MaxText's settings of a model, and its layers.

    Attributes:
      settings: MaxText's settings.
      h100, h200: the layers that fit one GPU with AdamW in float32.
      mesh: the layers on a mesh.
    """

    settings: str
    h100: int
    h200: int
    mesh: int


# A parameter takes 16 bytes: itself, two moments, and the sum of gradients. A layer of Qwen3-30B has 0.62e9 parameters,
# so four GPUs hold four times the layers of one. `scan_layers=False` unrolls the layers, so that the time to compile
# grows with them: 8 layers take 23 GB of each of four GPUs, and twice the compilation of one GPU's 4 layers.
CASES = {
    "qwen3-30b": Model("model_name=qwen3-30b-a3b hardware=gpu", 4, 6, 8),
    "mixtral-8x7b": Model("model_name=mixtral-8x7b hardware=gpu", 1, 2, 4),
    "tiny": Model(TINY, 2, 2, 2),
}


@dataclasses.dataclass(frozen=True)
class Mesh:
    """The sizes of MaxText's axes `fsdp` and `expert`; all other axes have size 1."""

    fsdp: int = 1
    expert: int = 1

    @property
    def size(self) -> int:
        """The GPUs of the mesh."""
        return self.fsdp * self.expert

    @property
    def name(self) -> str:
        """The mesh as `--mesh` takes it, without axes of size 1."""
        sizes = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return ",".join(sizes) or "fsdp=1"

    @property
    def settings(self) -> str:
        """MaxText's settings. They name every axis that MaxText would else give all remaining GPUs."""
        return f"ici_fsdp_parallelism={self.fsdp} ici_expert_parallelism={self.expert} ici_data_parallelism=1"


def read_mesh(text: str) -> Mesh:
    """Returns the mesh of a text such as "fsdp=2,expert=2"."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"--mesh {text}: {part!r} must be fsdp=N or expert=N, each axis once, as in fsdp=2,expert=2"
            )
        sizes[axis] = int(size)
    return Mesh(**sizes)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to compute the MoE layer: MaxText's settings for its own layer, or moax's recipe.

    Attributes:
      name: `moax`, or the name of MaxText's way.
      settings: MaxText's settings.
      recipe: moax's recipe.
      kept: what moax does with the weights once a step: "kept" casts or quantizes them, and "gathered" also gathers
        them over fsdp.
      note: what a reader must know of the row.
      rank: the ways of rank 0 of all cases are measured before those of rank 1.
      overlap: whether XLA compiles with `moax.OVERLAP_OPTIONS`.
      buffer_factor: moax's option; None is the worst case, whose step has no loop of overflow rounds.
    """

    name: str
    settings: str = ""
    recipe: str | None = None
    kept: str | None = None
    note: str = ""
    rank: int = 0
    overlap: bool = False
    buffer_factor: BufferFactor = "auto"

    @property
    def label(self) -> str:
        """The recipe as a row and the command of `moax.adapters.maxtext` name it."""
        label = self.recipe or "none"
        if self.kept:
            label += f"+{self.kept}"
        if self.buffer_factor is None:
            label += "+whole"
        return label


TOKAMAX = "sparse_matmul=True use_tokamax_gmm=True"
RAGGED_DOT = "sparse_matmul=True use_tokamax_gmm=False"
CAST = "weights cast to bfloat16 once a step"
DROPS = "drops what finds no room"
WHOLE = "buffers of the worst case"
CAPACITY = Way("maxtext-capacity1.25", "sparse_matmul=False capacity_factor=1.25", note=DROPS)
# The ways of one GPU.
WAYS = (
    Way("maxtext-tokamax", TOKAMAX),
    Way(OURS),
    Way(OURS, kept="kept", note=CAST),
    Way(OURS, recipe="fp8_block", kept="kept"),
    Way(OURS, recipe="fp8_block"),
    CAPACITY,
    Way(
        "maxtext-tokamax-float32-router",
        TOKAMAX + " float32_gate_logits=True",
        note="the router in float32, as moax's",
        rank=1,
    ),
    Way(
        "maxtext-dense",
        "sparse_matmul=False capacity_factor=-1.0",
        note="every expert computes every token",
        rank=1,
    ),
    Way("maxtext-ragged_dot", RAGGED_DOT, rank=1),
)
# How MaxText sends tokens to their experts where the experts are sharded. Without a limited buffer its ring passes the
# sizes of all groups beside the weights of one GPU, which neither tokamax on GPUs nor jax.lax.ragged_dot takes.
# Only the sort by `use_ragged_sort` has such a buffer, by kernels for TPUs or by these fallbacks.
EXCHANGES = {
    "-all_to_all": " use_ring_of_experts=False",  # jax.lax.ragged_all_to_all
    # Each GPU gathers all tokens, and scatters the sums.
    "-ring": " use_ring_of_experts=True use_ragged_sort=True ragged_buffer_factor=1.5"
    " ragged_gather_fallback=True ragged_gather_reduce_fallback=True",
}
# fsdp splits a weight along H. With the setting it splits whole experts, where the expert axis has one rank.
LAYOUTS = {"": "", "-experts": " shard_exp_on_fsdp=True"}
NOTES = {"-ring": "drops what exceeds 1.5 times the balanced rows of a GPU"}


def list_ways(mesh: Mesh | None, microbatches: int) -> list[Way]:
    """Returns the ways on a mesh, or on one GPU; the most important come first.

    With one microbatch no way is "kept": a cast once a step gained nothing on two GPUs (LOG.md, 2026-11-28).
    """
    ways = WAYS if mesh is None else tuple(_on_mesh(mesh))
    if microbatches == 1:
        ways = [dataclasses.replace(way, rank=0) if way.name == OURS else way for way in ways if way.kept != "kept"]
    return sorted(ways, key=lambda way: way.rank)


def _on_mesh(mesh: Mesh) -> Iterator[Way]:
    layout = ""
    if mesh.expert > 1:
        choices = EXCHANGES
    elif mesh.fsdp > 1:
        choices = LAYOUTS
        layout = LAYOUTS["-experts"].strip()
    else:
        choices = {"": ""}
    overlap = mesh.fsdp > 1
    for name, settings in choices.items():
        yield Way("maxtext-tokamax" + name, TOKAMAX + settings, note=NOTES.get(name, ""))
    yield Way(OURS, layout, kept="kept", note=CAST, overlap=overlap)
    yield Way(OURS, layout, recipe="fp8_block", kept="kept", overlap=overlap)
    if mesh.fsdp > 1:
        note = "weights gathered once a step"
        yield Way(OURS, layout, kept="gathered", note=f"{CAST}, and gathered", overlap=overlap)
        yield Way(OURS, layout, recipe="fp8_block", kept="gathered", note=note, overlap=overlap)
    yield Way(OURS, layout, rank=1, overlap=overlap)
    yield Way(OURS, layout, recipe="fp8_block", rank=1, overlap=overlap)
    if mesh.expert > WHOLE_RANKS:
        whole = Way(OURS, layout, buffer_factor=None, note=WHOLE, rank=1, overlap=overlap)
        yield whole
        yield dataclasses.replace(whole, kept="kept", note=f"{CAST}, {WHOLE}")
        yield dataclasses.replace(whole, recipe="fp8_block", kept="kept")
    yield dataclasses.replace(CAPACITY, rank=1)
    for name, settings in choices.items():
        note = ", ".join(filter(None, ("compiled with moax.OVERLAP_OPTIONS", NOTES.get(name))))
        yield Way(f"maxtext-tokamax{name}-overlap", TOKAMAX + settings, note=note, rank=1, overlap=True)
    for name, settings in choices.items():
        yield Way("maxtext-ragged_dot" + name, RAGGED_DOT + settings, note=NOTES.get(name, ""), rank=2)


def name_case(model: str, mesh: Mesh | None, microbatches: int, load: str) -> str:
    """Returns the case of a row: the model, and what differs from one GPU, four microbatches and synthetic tokens."""
    words = [model]
    if mesh is not None:
        words.append(mesh.name)
    if microbatches != MICROBATCHES:
        words.append(f"x{microbatches}")
    if load != SYNTHETIC:
        words.append(load)
    return " ".join(words)


def choose_layers(model: Model, mesh: Mesh | None, large: bool) -> int:
    """Returns the layers of a model on a mesh, or on one GPU, which is an H200 where `large`."""
    if mesh is not None and mesh.size > 1:
        return model.mesh
    if large:
        return model.h200
    return model.h100


def xla_flags(options: Iterable[tuple[str, object]]) -> str:
    """Returns compiler options as XLA_FLAGS takes them."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options)
