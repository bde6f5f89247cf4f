"""The GPUs that an estimate knows, with the rates that programs reach on them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A GPU and its links, with the rates that programs reach on it.

    Attributes:
      kind: its name in JAX, by which moax chooses its kernels.
      memory: the bytes of a GPU.
      bf16, fp8: operations/s of grouped matmuls.
      xla: operations/s of the grouped matmuls of `kernels="xla"`.
      hbm: bytes/s of device memory, reads plus writes.
      nvlink, network: bytes/s that a GPU sends to GPUs of its host, and through its NIC.
      host: the GPUs of one host.
      cores: the multiprocessors of a GPU.
    """

    kind: str
    memory: float
    bf16: float
    fp8: float
    xla: float
    hbm: float
    nvlink: float
    network: float
    host: int = 8
    cores: int = 132


# H200: means over forward, dgrad and wgrad of the medians in benchmarks/results/h200_gemm.json and
# h200_xla_products.json; a copy; NCCL between four. H100: its memory is slower by the data sheets. A NIC has 400 Gb/s.
HARDWARE: dict[str, Hardware] = {
    "h100": Hardware("NVIDIA H100", 80e9, 760e12, 1130e12, 257e12, 2.99e12, 280e9, 45e9),
    "h200": Hardware("NVIDIA H200", 141e9, 760e12, 1130e12, 257e12, 4.29e12, 280e9, 45e9),
}
RESERVE = 0.1  # of a GPU's memory, for XLA, NCCL and the pieces between arrays


def find_hardware(hardware: Hardware | str) -> Hardware:
    """Returns the hardware of a name in `HARDWARE`, or the caller's own.

    Raises:
      ValueError: there is no hardware of this name.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware not in HARDWARE:
        raise ValueError(f"hardware={hardware!r} must be one of {', '.join(map(repr, HARDWARE))}, or a Hardware")
    return HARDWARE[hardware]
