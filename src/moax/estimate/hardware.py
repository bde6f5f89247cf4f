"""What `moax.estimate` knows by name of GPUs: what their data sheets promise, and what programs reach."""

from __future__ import annotations

import dataclasses


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


def _scaled(name: str, *, memory: int, bf16: float, fp8: float, hbm: float, nvlink: float, network: float) -> Hardware:
    """A GPU of these peaks that reaches the fractions of them that an H200 reaches: nothing of it is measured."""
    part = {kind: rate / H200.nvlink_peak * nvlink for kind, rate in H200.nvlink.items()}
    forward, dgrad, wgrad = (rate / H200.bf16_peak * bf16 for rate in H200.bf16)
    forward8, dgrad8, wgrad8 = (rate / H200.fp8_peak * fp8 for rate in H200.fp8)
    return Hardware(
        name,
        memory=memory,
        bf16_peak=bf16,
        fp8_peak=fp8,
        hbm_peak=hbm,
        nvlink_peak=nvlink,
        network_peak=network,
        bf16=(forward, dgrad, wgrad),
        fp8=(forward8, dgrad8, wgrad8),
        hbm=H200.hbm / H200.hbm_peak * hbm,
        nvlink=part,
        network=H200.network / H200.network_peak * network,
    )


HARDWARE: dict[str, Hardware] = {
    # NVIDIA's H100 SXM data sheet: 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways. Achievable: the fractions of an H200.
    "h100": _scaled("h100", memory=80 * 10**9, bf16=989e12, fp8=1979e12, hbm=3.35e12, nvlink=450e9, network=50e9),
    "h200": H200,
    # NVIDIA's DGX B200 data sheet, an eighth of it: 180 GB, 8 TB/s, 36 and 72 PFLOP/s of bf16 and fp8 with sparsity,
    # NVLink 1.8 TB/s both ways, a 400 Gb/s NIC for each GPU. Achievable: the fractions of an H200, which supposes
    # kernels as good there; moax has none for it yet.
    "b200": _scaled("b200", memory=180 * 10**9, bf16=2250e12, fp8=4500e12, hbm=8e12, nvlink=900e9, network=50e9),
}


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
