"""The result of an estimate: the memory of a device, what it sends and the time of a step, and these as text."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from moax.block.plan import BlockPlan
from moax.config import MoEConfig
from moax.estimate.hardware import RESERVE, Hardware
from moax.exchange.transport import Transfer
from moax.kernels import supports_fp8
from moax.mesh.axes import Axes, Names
from moax.mesh.specs import local_shape
from moax.params import expert_specs, param_shapes
from moax.text import align, plural
from moax.types import Kept


class Memory(NamedTuple):
    """Bytes on one device, all layers together.

    Attributes:
      weights, gradients: the parameters and their gradients, in the dtype of the parameters.
      quantized: the weights of the experts as `moax.quantize_params` makes them; 0 where each call quantizes them.
      gradient_sum: the sum of the gradients over microbatches, in the dtype of the parameters; 0 for one microbatch.
        It counts beside the whole gradients of one microbatch.
      optimizer: the state of the optimizer.
      saved: the arrays that forward keeps for backward, with the input of each layer.
      temporary: the most bytes of other arrays that live at once in one layer. XLA's schedule may need a third more.
      other: the bytes that the caller adds for the rest of the model.
    """

    weights: int
    quantized: int
    gradients: int
    gradient_sum: int
    optimizer: int
    saved: int
    temporary: int
    other: int = 0

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(self)


class Once(NamedTuple):
    """What a step does once for one layer, before its microbatches, on one device.

    Attributes:
      bytes: the bytes of the quantized weights that the step holds beside the parameters. A weight that already has the
        dtype of the matmuls, and that no device gathers, is the parameter itself: it adds none.
      transfers: the arrays that are sent, by the name of their scope in a profile.
      traffic: the bytes of device memory that are read and written.
    """

    bytes: int = 0
    transfers: Mapping[str, list[Transfer]] = types.MappingProxyType({})
    traffic: int = 0


class SavedArray(NamedTuple):
    """An array of one layer that forward keeps for backward, on one device.

    Attributes:
      name: "x" for the input of the layer, a name of `moax.CHECKPOINT_NAMES`, or else the scope that makes the array.
        An array that has no name and no scope has "".
      dtype, shape: those of the part on one device.
      bytes: the size of this part.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of blocks on a mesh. Bytes, operations and seconds are of one device and one step, forward and backward.

    Attributes:
      config, mesh, tokens, layers, hardware, microbatches, kept: the arguments of `estimate`.
      plan: how the experts run: transport, implementation, and the sizes of all buffers.
      memory: see `Memory`.
      saved_arrays: the arrays of one layer that `memory.saved` counts, the input first.
      once: what a step does once for one layer, before its microbatches; see `Once`.
      transfers: the arrays that one layer sends in each microbatch, by the name of their scope in a profile; `sum` has
        those of none.
      operations: the operations of one layer's matmuls in a microbatch, with the shared expert and latent experts.
      traffic: the bytes of device memory that one layer reads and writes in each microbatch.
    """

    config: MoEConfig
    mesh: Mapping[str, int]
    tokens: int
    layers: int
    hardware: Hardware
    microbatches: int
    kept: Kept | None
    plan: BlockPlan
    memory: Memory
    saved_arrays: tuple[SavedArray, ...]
    once: Once
    transfers: Mapping[str, list[Transfer]]
    operations: int
    traffic: int

    @property
    def fits(self) -> bool:
        """Whether `memory` fits into the memory of a GPU, less a reserve of a tenth for XLA and NCCL."""
        return self.memory.total <= (1 - RESERVE) * self.hardware.memory

    @property
    def verdict(self) -> str:
        """A sentence that says whether `memory` fits, and what is left out of it."""
        usable = (1 - RESERVE) * self.hardware.memory / 1e9
        words = "fits" if self.fits else "does not fit"
        text = (
            f"{words}: {self.memory.total / 1e9:.1f} GB of {usable:.1f} GB, which are {self.hardware.memory / 1e9:.0f} "
            f"GB less a reserve of {RESERVE:.0%}"
        )
        if not self.memory.optimizer:
            text += "; the state of the optimizer is left out"
        if not self.memory.other:
            text += "; embeddings, attention and other layers are left out"
        return text

    @property
    def seconds(self) -> float:
        """The seconds of all layers."""
        return sum(self.times.values())

    @property
    def times(self) -> dict[str, float]:
        """The seconds of the matmuls, of device memory, and of the collectives of each scope, all layers together."""
        matmuls = self.operations / self._rate_of_matmuls
        traffic = self.microbatches * self.traffic + self.once.traffic
        times = {"matmuls": self.microbatches * matmuls, "device memory": traffic / self.hardware.hbm}
        for scope, transfers in self._sent.items():
            times[scope] = sum(transfer.bytes / self.link(transfer.axes) for transfer in transfers)
        return {name: self.layers * seconds for name, seconds in times.items()}

    @property
    def _sent(self) -> dict[str, list[Transfer]]:
        """The arrays that one layer sends in a step: those before the microbatches, then those of each one."""
        sent = {scope: list(transfers) for scope, transfers in self.once.transfers.items()}
        for scope, transfers in self.transfers.items():
            sent[scope] = sent.get(scope, []) + self.microbatches * transfers
        return sent

    @property
    def _rate_of_matmuls(self) -> float:
        """The operations/s of matmuls."""
        if self.plan.kernels == "xla":
            return self.hardware.xla
        if supports_fp8(self.plan.kernels, self.plan.recipe):
            return self.hardware.fp8
        return self.hardware.bf16

    def link(self, axes: Names) -> float:
        """Returns the bytes/s of a device in a ring along `axes`: of NVLink, or of all NICs of the ring on one host."""
        stride = 1  # devices from one to the next along an axis
        devices_of_host = 1
        devices = 1
        for name, size in reversed(tuple(self.mesh.items())):
            if name in axes:
                devices *= size
                devices_of_host *= min(size, max(1, self.hardware.host // stride))
            stride *= size
        if devices_of_host == devices:
            return self.hardware.nvlink
        return min(self.hardware.nvlink, devices_of_host * self.hardware.network)

    def __str__(self) -> str:
        """The layout of parameters, the memory, and the bytes and times of a step, as text."""
        memory = align(self._memory_rows(), right=(1,))
        steps = align(self._step_rows(), right=(1, 2))
        return "\n\n".join([self._head(), align(self._param_rows()), f"{memory}\n\n{self.verdict}", steps])

    def _head(self) -> str:
        """Returns the lines before the tables."""
        config = self.config
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one GPU"
        further = ""
        if config.shared_d_ff:
            further += f", a shared expert of {config.shared_d_ff}"
        if config.d_latent:
            further += f", latent experts of rows of {config.d_latent}"
        parts = ""
        if self.microbatches > 1:
            parts = f" in {self.microbatches} microbatches"
        weights = ""
        if self.kept is not None:
            weights = f", weights {self.kept} for the step"
        return (
            f"{plural(self.layers, 'MoE layer')} of {config.num_experts} experts, {config.top_k} a "
            f"token; width {config.d_model}, experts of {config.d_ff}, "
            f"{config.activation}{further}\n{self.hardware.kind}, mesh {mesh}: {self.tokens} "
            f"tokens a GPU{parts}, exchange {self.plan.first.exchange.transport}, kernels "
            f"{self.plan.kernels}{weights}"
        )

    def _param_rows(self) -> list[Any]:
        """Returns the rows of the table of parameters."""
        axes = self.plan.axes
        specs = expert_specs(self.config, Axes(), axes)
        rows: list[Any] = [("parameter", "shape", "mesh axes", "shard"), None]
        for name, shape in vars(param_shapes(self.config)).items():
            if shape is not None:
                spec = getattr(specs, name)
                shard = local_shape(shape, spec, axes)
                rows.append((name, str(shape), str(tuple(spec)), str(shard)))
        return rows

    def _memory_rows(self) -> list[Any]:
        """Returns the rows of the table of memory."""
        sizes = self.memory._asdict()
        for name in ("quantized", "gradient_sum", "other"):
            if not sizes[name]:
                del sizes[name]
        sizes |= {"total": self.memory.total}
        rows = [(name, f"{size / 1e9:.2f}") for name, size in sizes.items()]
        return [("memory of a device", "GB"), None, *rows]

    def _step_rows(self) -> list[Any]:
        """Returns the rows of the table of a step."""
        rows: list[Any] = [("in a step", "MB sent", "ms"), None]
        for name, seconds in self.times.items():
            sent = ""
            if name in self._sent:
                sent = f"{self.wire_bytes(name) / 1e6:,.1f}"
            rows.append((name, sent, f"{seconds * 1e3:,.2f}"))
        total_sent = f"{self.wire_bytes() / 1e6:,.1f}"
        rows.append(("total", total_sent, f"{self.seconds * 1e3:,.2f}"))
        return rows

    def wire_bytes(self, scope: str | None = None) -> int:
        """Returns the bytes that a device sends in a step over all layers, of one scope or of all."""
        sent = self._sent
        scopes = sent if scope is None else (scope,)
        transfers = [transfer for name in scopes for transfer in sent.get(name, ())]
        return self.layers * sum(transfer.bytes for transfer in transfers)
