"""What one device computes: one table of implementations of the same local functions.

| name        | runs on                                                                                      |
|-------------|----------------------------------------------------------------------------------------------|
| `hopper`    | NVIDIA GPUs of compute capability 9.0, bfloat16, Pallas Mosaic GPU                            |
| `xla`       | every backend and every dtype                                                                |
| `blackwell` | NVIDIA GPUs of compute capability 10.0, by name alone: no such GPU has run it                 |

`select_kernels` chooses once, from the platform, the dtype, the widths and the caller's word. After that nothing asks
which implementation runs: `implementation(name)` is a module with the functions of `Implementation`. An implementation
keeps its operand formats private: its `matmul` and `wgrad` take what its own `quantize_for_matmul` and
`quantize_and_gather` return. A further implementation is one module and one line of `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moax.backend import log_once, platform
from moax.errors import Unsupported
from moax.groups import Groups
from moax.mesh.axes import Names
from moax.recipe import Contracted, Format, Recipe
from moax.types import QArray

# `auto` takes the first that can run. `xla` runs anywhere, so what follows it runs by name alone.
IMPLEMENTATIONS = {
    "hopper": "moax.kernels.hopper",
    "xla": "moax.kernels.xla",
    "blackwell": "moax.kernels.blackwell",
}
DEFAULT = "xla"  # what runs anywhere

Operand = Any  # rows or weights as one implementation's products take them
Role = Literal["x", "dy"]  # which format of a recipe rows have


@runtime_checkable
class Packed(Protocol):
    """Rows of groups at multiples of any `align`, brought to where the products of an implementation want them."""

    groups: Groups

    def pack(self, x: Float[Array, "M ..."]) -> Float[Array, "P ..."]:
        """The rows of x as products take them, 0 in padding wherever a product would read it."""
        ...

    def unpack(self, y: Float[Array, "P N"]) -> Float[Array, "M N"]:
        """The rows of a product, back where the rows of x were, 0 in padding."""
        ...


@runtime_checkable
class Implementation(Protocol):
    """The local functions of one device that each implementation has.

    Rows lie as `Groups` says. x, dy and h are arrays; what a product takes is an `Operand` of the implementation's own.
    `recipe` and `role` name the format of rows: `recipe.x` or `recipe.dy`. `amax_over` names mesh axes over which the
    maximum of a tensor of one block is agreed on.
    """

    def why_not(self, dtype: DTypeLike | None, widths: dict[str, int]) -> str | None:
        """Why this implementation cannot run here with these sizes of contiguous dims; None where it can."""
        ...

    def takes_fp8(self, recipe: Recipe) -> bool:
        """Whether products of this recipe multiply in FP8; otherwise operands are dequantized before the product."""
        ...

    def align_rows(self, recipe: Recipe) -> int:
        """The multiple of rows at which each group must start."""
        ...

    def find_groups(self, group_sizes: Int[Array, " E"], align: int, num_rows: int) -> Groups:
        """How `num_rows` rows lie whose groups start at multiples of `align`."""
        ...

    def pack_rows(self, group_sizes: Int[Array, " E"] | None, align: int, num_rows: int) -> Packed:
        """The packing of rows whose groups start at multiples of any `align`; None: one group holds all rows."""
        ...

    def gather_rows(
        self, x: Float[Array, "R H"], source: Int[Array, " N"], groups: Groups | None = None
    ) -> Float[Array, "N H"]:
        """rows[n] = x[source[n]], 0 where source[n] >= R. Rows past the last group of `groups` may hold anything."""
        ...

    def gather_sum(
        self, rows: Float[Array, "N H"], position: Int[Array, "R K"], weights: Array | None = None
    ) -> Float[Array, "R H"]:
        """y[r] = sum_k weights[r, k] rows[position[r, k]] in float32, over the positions below N."""
        ...

    def quantize_for_matmul(
        self, x: Array, recipe: Recipe, role: Role, groups: Groups, amax_over: Names = ()
    ) -> tuple[Operand, Operand]:
        """Rows [M, ..., C] as a product over columns takes them (forward, dgrad), and as wgrad does."""
        ...

    def gather_and_quantize(
        self, x: Array, source: Array, recipe: Recipe, role: Role, groups: Groups, amax_over: Names = ()
    ) -> tuple[Operand, Operand]:
        """`quantize_for_matmul` of the rows x[source], in one read where the implementation can."""
        ...

    def quantize_and_gather(
        self,
        w: Array,
        recipe: Recipe,
        contracted: Contracted,
        gather: Sequence[Names],
        amax_over: Names,
        dtype: DTypeLike,
    ) -> Operand:
        """A weight's shard [E, K, *C] -> the whole weight as a product takes it: quantized, then gathered as bytes."""
        ...

    def matmul(
        self,
        x: Operand,
        w: Operand,
        groups: Groups,
        dtype: DTypeLike,
        bias: Array | None = None,
        *,
        transpose: bool = False,
    ) -> Float[Array, "M N"]:
        """y[m] = x[m] w[g(m)] + bias[g(m)], or dgrad with `transpose`. Padding of y may hold anything."""
        ...

    def wgrad(self, x: Operand, dy: Operand, groups: Groups, dtype: DTypeLike) -> Float[Array, "E K N"]:
        """dw[g] = sum over rows m of group g: x[m]^T dy[m], summed in float32."""
        ...

    def bias_grad(self, dy: Float[Array, "M *C"], groups: Groups) -> Float[Array, "E *C"]:
        """dbias[g] = sum over rows m of group g: dy[m], in float32. dy must be 0 in padding."""
        ...

    def activate(
        self, h: Array, act: Callable, recipe: Recipe, groups: Groups, *, weights: Array | None, amax_over: Names
    ) -> Operand:
        """act(h) times each row's weight, as the next product takes it; h [N, G, F], weights [N] or None."""
        ...

    def activate_grad(
        self, h: Array, d_a: Array, act: Callable, recipe: Recipe, groups: Groups, *,
        weights: Array | None, amax_over: Names, keep: bool,
    ) -> tuple[Operand, Operand, Operand, Any, Float[Array, " N"]]:  # fmt: skip
        """Backward of `activate`, for d_a [N, F] before the weights multiply it.

        Returns (a as wgrad takes it; d_h as dgrad does; d_h as wgrad does; d_h [N, G, F] if `keep`, else None;
        <d_a, act(h)> of each row).
        """
        ...

    def quantize(self, x: Array, format: Format, block: tuple[int | None, ...], amax_over: Names = ()) -> QArray:
        """Values and scales of any blocks, as `moax.ops.quantize` returns them."""
        ...

    def put_rows(
        self, arrays: Sequence, source: Any, places: Any, way: int, out_rows: int, axes: Any, sms: int | None
    ) -> tuple:
        """out[i + shift[p]] on rank p = x[source[i]] for end[p - 1] <= i < end[p], for each array x.

        places[way] holds (shift, end); source None stands for 0, 1, ...; axes: (name, size) of each axis of ep; sms:
        multiprocessors that copy, None for the implementation's own number. Rows that nobody wrote hold anything.
        """
        ...

    def dequantize_wire(
        self, data: Array, words: Array, ends: Array | None, format: Format, dtype: DTypeLike
    ) -> Float[Array, "R H"]:
        """Rows [R, H] of bytes, and of words [R, W] i32 that begin with their scales; rows from ends[-1] on may hold
        anything."""
        ...


def implementation(name: str) -> Implementation:
    """The implementation of a name that `select_kernels` returned."""
    return cast(Implementation, importlib.import_module(IMPLEMENTATIONS[name]))


def select_kernels(kernels: str = "auto", dtype: DTypeLike | None = None, **widths: int) -> str:
    """The name of the implementation that runs.

    Args:
      kernels: a name of `IMPLEMENTATIONS`, or `auto`: the first that can run. A GPU that cannot run the very first says
        so in the log, once.
      dtype: of the computation; None asks about the machine alone.
      widths: sizes of contiguous dims on one device, by name.

    Raises:
      ValueError: an unknown name.
      Unsupported: an implementation that was chosen by name cannot run.
    """
    if kernels not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"kernels={kernels!r} must be one of {', '.join(map(repr, ('auto', *IMPLEMENTATIONS)))}")
    refused = {}
    for name in IMPLEMENTATIONS if kernels == "auto" else (kernels,):
        why = why_not(name, dtype, **widths)
        if why is None:
            if refused and platform() == "gpu":
                reasons = "; ".join(refused.values())
                log_once(f"kernels='auto': {reasons}; the implementation {name!r} runs, which is slower")
            return name
        refused[name] = why
    raise Unsupported(f"kernels={kernels!r}: {refused[kernels]}; use 'auto' or {DEFAULT!r}")


def why_not(name: str, dtype: DTypeLike | None = None, **widths: int) -> str | None:
    """Why the implementation of this name cannot run; None where it can."""
    if not is_installed(name):
        return f"this installation has no {IMPLEMENTATIONS[name]}"
    return implementation(name).why_not(dtype, widths)


def takes_fp8(name: str, recipe: Recipe) -> bool:
    """Whether the implementation of this name is installed and multiplies in FP8 by this recipe."""
    return is_installed(name) and implementation(name).takes_fp8(recipe)


def is_installed(name: str) -> bool:
    """Whether this installation has the implementation of this name."""
    return importlib.util.find_spec(IMPLEMENTATIONS[name]) is not None
