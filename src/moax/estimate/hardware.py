"""What `moax.estimate` knows by name: published models, and GPUs with what they reach."""

from __future__ import annotations

import dataclasses

from moax.config import MoEConfig, RouterConfig


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model's MoE block, and how many of its layers have one."""

    config: MoEConfig
    layers: int


_LATE = RouterConfig(order="topk_then_score")

# Sizes and layer counts: each model's public config.json (num_hidden_layers less first_k_dense_replace).
MODELS: dict[str, Model] = {
    "qwen3-30b": Model(MoEConfig(2048, 768, 128, 8), 48),
    "qwen3-235b": Model(MoEConfig(4096, 1536, 128, 8), 94),
    "mixtral-8x7b": Model(MoEConfig(4096, 14336, 8, 2, router=_LATE), 32),
    "deepseek-v3": Model(
        MoEConfig(
            7168, 2048, 256, 8, shared_d_ff=2048,
            router=RouterConfig(score="sigmoid", bias=True, num_groups=8, top_groups=4, scale=2.5),
        ),
        58,
    ),
    "kimi-k2": Model(
        MoEConfig(
            7168, 2048, 384, 8, shared_d_ff=2048, router=RouterConfig(score="sigmoid", bias=True, scale=2.827)
        ),
        60,
    ),
    "gpt-oss-120b": Model(
        MoEConfig(
            2880, 2880, 128, 4, activation="swiglu_oai", use_bias=True,
            router=RouterConfig(order="topk_then_score", logits_bias=True),
        ),
        36,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One GPU and its wires: peaks from data sheets, and what programs reach.

    Attributes:
      memory: bytes of a GPU. usable: the fraction of it that a program can have.
      bf16_peak, fp8_peak: FLOP/s, dense. hbm_peak, nvlink_peak, network_peak: bytes/s of a GPU; the wires one way.
      bf16, fp8: FLOP/s of a grouped product, achievable: forward, dgrad, wgrad.
      hbm: bytes/s, read plus written, achievable.
      nvlink: bytes/s one way, achievable, by kind of collective.
      network: bytes/s one way to GPUs of other hosts, achievable.
      host: GPUs of one host, all on NVLink.
    """

    name: str
    memory: int
    bf16_peak: float
    fp8_peak: float
    hbm_peak: float
    nvlink_peak: float
    network_peak: float
    bf16: tuple[float, float, float]
    fp8: tuple[float, float, float]
    hbm: float
    nvlink: dict[str, float]
    network: float
    host: int = 8
    usable: float = 0.92


# Peaks: NVIDIA's H200 SXM data sheet (141 GB, 4.8 TB/s; dense, without sparsity), HGX with a 400 Gb/s NIC for each GPU.
# bf16, fp8: medians of mixtral, qwen3, dsv3 of ours in benchmarks/results/h200_gemm.json (recipes none, fp8_block).
# hbm: the copy in that file's header. nvlink: NCCL on four H200s, PERFORMANCE.md, "Limits"; an all-reduce,
# not measured there, as a reduce-scatter. network: not measured; 0.9 of the NIC's rate is an assumption.
H200 = Hardware(
    "h200", memory=141 * 10**9, bf16_peak=989e12, fp8_peak=1979e12, hbm_peak=4.8e12, nvlink_peak=450e9,
    network_peak=50e9,
    bf16=(794e12, 761e12, 729e12), fp8=(1242e12, 1187e12, 988e12), hbm=4.29e12,
    nvlink={"all-gather": 268e9, "reduce-scatter": 266e9, "all-reduce": 266e9, "all-to-all": 317e9},
    network=45e9,
)  # fmt: skip


def _scaled(name: str, memory: int, bf16: float, fp8: float, hbm: float, nvlink: float, network: float) -> Hardware:
    """A GPU of these peaks that reaches the fractions of them that an H200 reaches: nothing of it is measured."""
    part = {kind: rate / H200.nvlink_peak * nvlink for kind, rate in H200.nvlink.items()}
    forward, dgrad, wgrad = (rate / H200.bf16_peak * bf16 for rate in H200.bf16)
    forward8, dgrad8, wgrad8 = (rate / H200.fp8_peak * fp8 for rate in H200.fp8)
    return Hardware(
        name, memory, bf16, fp8, hbm, nvlink, network, (forward, dgrad, wgrad), (forward8, dgrad8, wgrad8),
        H200.hbm / H200.hbm_peak * hbm, part, H200.network / H200.network_peak * network,
    )  # fmt: skip


HARDWARE: dict[str, Hardware] = {
    # NVIDIA's H100 SXM data sheet: 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways. Achievable: the fractions of an H200.
    "h100": _scaled("h100", 80 * 10**9, 989e12, 1979e12, 3.35e12, 450e9, 50e9),
    "h200": H200,
    # NVIDIA's DGX B200 data sheet, an eighth of it: 180 GB, 8 TB/s, 36 and 72 PFLOP/s of bf16 and fp8 with sparsity,
    # NVLink 1.8 TB/s both ways, a 400 Gb/s NIC for each GPU. Achievable: the fractions of an H200, which supposes
    # kernels as good there; moax has none for it yet.
    "b200": _scaled("b200", 180 * 10**9, 2250e12, 4500e12, 8e12, 900e9, 50e9),
}


def find_model(name: str) -> Model:
    """The model of a name.

    Raises:
      ValueError: there is none of that name.
    """
    if name not in MODELS:
        raise ValueError(f"model={name!r} must be one of {', '.join(map(repr, MODELS))}, or a MoEConfig")
    return MODELS[name]


def find_hardware(hardware: str | Hardware) -> Hardware:
    """The hardware of a name; a `Hardware` as it is.

    Raises:
      ValueError: there is none of that name.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware not in HARDWARE:
        raise ValueError(f"hardware={hardware!r} must be one of {', '.join(map(repr, HARDWARE))}, or a Hardware")
    return HARDWARE[hardware]
