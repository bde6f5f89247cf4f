"""The GPUs that `moax.estimate` knows by name: the peaks of their data sheets, and the rates that programs reach."""

from __future__ import annotations

import dataclasses

Rates = tuple[float, float, float]  # FLOP/s: forward, dgrad, wgrad


@dataclasses.dataclass(frozen=True)
class Products:
    """What the grouped products of one implementation reach: in bf16, and in FP8 (None: as operands dequantized)."""

    bf16: Rates
    fp8: Rates | None = None


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One GPU and its wires: the peaks of data sheets, and the rates that programs reach.

    Attributes:
      name: the name in `HARDWARE`.
      memory: bytes of a GPU.
      bf16_peak, fp8_peak: peak FLOP/s of a dense product.
      hbm_peak: peak bytes/s of device memory.
      nvlink_peak, network_peak: peak bytes/s of the wires of a GPU, one way.
      dense: reached FLOP/s of a dense product in bf16: forward, dgrad, wgrad.
      products: reached FLOP/s of grouped products, by the name of the implementation. An implementation that does not
        run on this GPU has no entry.
      hbm: reached bytes/s of device memory, reads plus writes.
      nvlink: reached bytes/s one way, by kind of collective; "put" is a kernel that writes to peers.
      network: reached bytes/s one way to GPUs of other hosts.
      host: number of GPUs of one host, all of which NVLink connects.
      usable: the fraction of the memory that a program can have.
      basis: the origin of the rates, as the end of a sentence that begins with "their rates are".
    """

    name: str
    memory: int
    bf16_peak: float
    fp8_peak: float
    hbm_peak: float
    nvlink_peak: float
    network_peak: float
    dense: Rates
    products: dict[str, Products]
    hbm: float
    nvlink: dict[str, float]
    network: float
    host: int = 8
    usable: float = 0.92
    basis: str = "as given"


# The sources of the numbers; files are in benchmarks/results/.
# peaks      NVIDIA's H200 SXM data sheet (141 GB, 4.8 TB/s; without sparsity), HGX with a 400 Gb/s NIC for each GPU
# dense, hopper  medians over mixtral, qwen3 and dsv3 of moax's rows in h200_gemm.json (recipes none, fp8_block)
# xla        medians over the same shapes in h200_xla_products.json (algorithm switch)
# hbm        the copy in the header of h200_gemm.json
# nvlink     NCCL on four H200s by `python -m benchmarks limits`; all-reduce takes the rate of reduce-scatter
# put        the kernel alone in h200x2_exchange.json
# network    an assumption: 0.9 of the rate of the NIC
H200 = Hardware(
    "h200", memory=141 * 10**9, bf16_peak=989e12, fp8_peak=1979e12, hbm_peak=4.8e12, nvlink_peak=450e9,
    network_peak=50e9,
    dense=(794e12, 761e12, 729e12), hbm=4.29e12, products={
        "hopper": Products((794e12, 761e12, 729e12), (1242e12, 1187e12, 988e12)),
        "xla": Products((285e12, 251e12, 239e12)),
    },
    nvlink={"all-gather": 268e9, "reduce-scatter": 266e9, "all-reduce": 266e9, "all-to-all": 317e9, "put": 301e9},
    network=45e9, basis="measured on an H200",
)  # fmt: skip


SCALED = "not measured but those of an H200, scaled by the peaks of the data sheets"


def _scaled(
    name: str,
    kernels: tuple[str, ...],
    *,
    memory: int,
    bf16: float,
    fp8: float,
    hbm: float,
    nvlink: float,
    network: float,
) -> Hardware:
    """Returns a GPU of these peaks, which is assumed to reach the same fractions of its peaks as an H200."""
    h = H200
    of_bf16, of_fp8, of_nvlink = bf16 / h.bf16_peak, fp8 / h.fp8_peak, nvlink / h.nvlink_peak
    reached = {kernel: h.products[kernel] for kernel in kernels}
    return Hardware(
        name, memory=memory, bf16_peak=bf16, fp8_peak=fp8, hbm_peak=hbm, nvlink_peak=nvlink, network_peak=network,
        dense=_scale(h.dense, of_bf16), hbm=h.hbm / h.hbm_peak * hbm,
        products={
            kernel: Products(_scale(p.bf16, of_bf16), None if p.fp8 is None else _scale(p.fp8, of_fp8))
            for kernel, p in reached.items()
        },
        nvlink={kind: rate * of_nvlink for kind, rate in h.nvlink.items()},
        network=h.network / h.network_peak * network, basis=SCALED,
    )  # fmt: skip


def _scale(rates: Rates, ratio: float) -> Rates:
    forward, dgrad, wgrad = rates
    return forward * ratio, dgrad * ratio, wgrad * ratio


HARDWARE: dict[str, Hardware] = {
    # NVIDIA's H100 SXM data sheet: 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways.
    "h100": _scaled(
        "h100", ("hopper", "xla"), memory=80 * 10**9, bf16=989e12, fp8=1979e12, hbm=3.35e12, nvlink=450e9, network=50e9
    ),
    "h200": H200,
    # NVIDIA's DGX B200 data sheet, an eighth of it: 180 GB, 8 TB/s, 36 and 72 PFLOP/s of bf16 and fp8 with sparsity,
    # NVLink 1.8 TB/s both ways, a 400 Gb/s NIC for each GPU.
    "b200": _scaled(
        "b200", ("xla",), memory=180 * 10**9, bf16=2250e12, fp8=4500e12, hbm=8e12, nvlink=900e9, network=50e9
    ),
}  # fmt: skip


def find_hardware(hardware: str | Hardware) -> Hardware:
    """Returns the hardware of a name; a `Hardware` is returned as it is.

    Raises:
      ValueError: `HARDWARE` has no GPU of this name.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware not in HARDWARE:
        raise ValueError(f"hardware={hardware!r} must be one of {', '.join(map(repr, HARDWARE))}, or a Hardware")
    return HARDWARE[hardware]
