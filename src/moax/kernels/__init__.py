"""The local functions of one device, and the table of their implementations.

| name        | runs on                                                                                      |
|-------------|----------------------------------------------------------------------------------------------|
| `hopper`    | NVIDIA GPUs of compute capability 9.0, bfloat16, Pallas Mosaic GPU                            |
| `xla`       | every backend and every dtype                                                                |

`select_kernels` chooses once, by the platform, the dtype, the widths and the caller's `kernels`. After that no code
asks which implementation runs: `implementation(name)` is a module with the functions of `Implementation`. The package
of an implementation has `NOTE`, a line for a user who reads a list of them, `PUTS_ROWS`, whether it has `put_rows`, and
`why_not(dtype, widths)`. An implementation keeps its operand formats private: its `matmul` and `wgrad` take what its
own `quantize_for_matmul` and `gather_shard` return. A further implementation is one package and one line of
`IMPLEMENTATIONS`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, cast, runtime_checkable

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moax.backend import log_once, platform
from moax.checks import Unsupported
from moax.groups import Groups
from moax.mesh.axes import Names
from moax.recipe import Contracted, Format, Recipe, Recipes
from moax.types import QArray, QShard

# `auto` takes the first that can run.
IMPLEMENTATIONS = {"hopper": "moax.kernels.hopper", "xla": "moax.kernels.xla"}
DEFAULT = "xla"  # this implementation runs everywhere

Operand = Any  # rows or weights in the form that one implementation's products take
Role = Literal["x", "dy"]  # the field of a recipe that has the format of rows


@runtime_checkable
class Packed(Protocol):
    """A packing: it moves rows from groups at multiples of any `align` to the layout `groups` of products."""

    groups: Groups

    def pack(self, x: Float[Array, "M ..."]) -> Float[Array, "P ..."]:
        """Returns the rows of x in the layout of `groups`, with 0 in the padding that a product reads."""

    def unpack(self, y: Float[Array, "P N"]) -> Float[Array, "M N"]:
        """Returns the rows of a product in the layout of x, with 0 in padding."""


@runtime_checkable
class Implementation(Protocol):
    """The local functions of one device that each implementation has.

    Rows have the layout of a `Groups`. Their padding may hold anything, in arguments and in results. `recipe` and
    `role` give the format of rows: `recipe.x` or `recipe.dy`. Where one scale holds for a whole tensor, its maximum is
    taken over the mesh axes `amax_over` too. A weight's shard [E, K, *C] is gathered over the mesh axes `gather` of
    each dim. `contracted` is `rows` for a product over K, and `columns` for a product over *C.
    """

    def supports_fp8(self, recipe: Recipe) -> bool:
        """Returns whether products of this recipe multiply in FP8; else operands are dequantized."""

    def align_rows(self, recipe: Recipe) -> int:
        """Returns the number of rows of which each group's first row must be a multiple."""

    def find_groups(self, group_sizes: Int[Array, " E"], align: int, num_rows: int) -> Groups:
        """Returns the Groups of `num_rows` rows, with groups that start at multiples of `align`."""

    def pack_rows(self, group_sizes: Int[Array, " E"] | None, align: int, num_rows: int) -> Packed:
        """Returns the packing of rows whose groups start at multiples of any `align`, or of one group (None)."""

    def top_k(self, x: Float[Array, "T E"], k: int) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
        """Returns the k largest of each row of x, and their indices i32; of equal ones the lowest index is first."""

    def build_permutation(
        self, experts: Int[Array, "R K"], num_groups: int, align: int, num_rows: int,
        weights: Float[Array, "R K"] | None = None, keep: Callable | None = None,
    ) -> tuple[Int[Array, " N"], Int[Array, "R K"], Int[Array, " G"], Float[Array, " N"] | None]:  # fmt: skip
        """Returns `gather_idx`, `scatter_idx` and group sizes of a `Plan`, and the weight of each of N sorted rows.

        Experts lie in [0, num_groups]. The weight is 0 in padding, and None without `weights` f32.
        keep(arrived) -> (begin, sizes) takes and returns arrays [G]: the arrivals begin[g] to begin[g] + sizes[g] - 1
        of group g become rows. None keeps all that arrived.
        """

    def gather_rows(
        self, x: Float[Array, "R H"], gather_idx: Int[Array, " N"], groups: Groups | None = None
    ) -> Float[Array, "N H"]:
        """rows[n] = x[gather_idx[n]], 0 where it is R or more, but for rows past the `groups`."""

    def gather_sum(
        self, rows: Float[Array, "N H"], scatter_idx: Int[Array, "R K"], weights: Array | None = None
    ) -> Float[Array, "R H"]:
        """y[r] = sum_k weights[r, k] rows[scatter_idx[r, k]] in float32, over the indices below N; None: weights 1."""

    def matmul_gathers_rows(self, format: Format | None, width: int, hidden: int) -> bool:
        """Returns whether products shall gather rows of `width` elements; `hidden` is F of this device."""

    def quantize_for_matmul(
        self, x: Array, recipe: Recipe, role: Role, groups: Groups, amax_over: Names = (),
        *, rows: bool = True, columns: bool = True,
    ) -> tuple[Operand, Operand]:  # fmt: skip
        """Returns rows [M, ..., C] as two Operands: for a product over columns (forward, dgrad), and for wgrad.

        The first may be None if the caller takes no `rows`, and the second if it takes no `columns`.
        """

    def gather_and_quantize(
        self, x: Array, gather_idx: Array, recipe: Recipe, role: Role, groups: Groups, amax_over: Names = (),
        *, rows: bool = True, columns: bool = True, in_products: bool = False,
    ) -> tuple[Operand, Operand]:  # fmt: skip
        """Runs `quantize_for_matmul` on the rows x[gather_idx], in one read where the implementation can.

        With `in_products`, where `matmul_gathers_rows` says so, the products gather the rows from x instead.
        """

    def stores_weight_transposed(self, recipe: Recipe, contracted: Contracted) -> bool:
        """Returns whether a quantized shard of a weight has the dims (E, *C, K)."""

    def quantize_shard(
        self, w: Array, recipe: Recipe, contracted: Contracted, gather: Sequence[Names], amax_over: Names
    ) -> QShard:
        """Returns the bytes and scales of a weight's shard."""

    def gather_shard(self, shard: QShard, recipe: Recipe, contracted: Contracted, gather: Sequence[Names]) -> Operand:
        """Returns the whole weight as an Operand from a quantized shard; an array [E, K, C] is an Operand too."""

    def matmul(
        self, x: Operand, w: Operand, groups: Groups, dtype: DTypeLike, bias: Array | None = None,
        *, transpose: bool = False,
    ) -> Float[Array, "M N"]:  # fmt: skip
        """y[m] = x[m] w[g(m)] + bias[g(m)], or with `transpose` dx[m] = dy[m] w[g(m)]^T."""

    def matmul_activate(
        self, x: Operand, w: Operand, groups: Groups, dtype: DTypeLike, act: Callable, gates: int,
        bias: Array | None = None,
    ) -> tuple[Float[Array, "M GF"], Operand | None]:  # fmt: skip
        """h[m] = x[m] w[g(m)] + bias[g(m)], and the Operand of a = act(h) [M, F] where one kernel computes both.

        `gates` is G.
        """

    def wgrad(
        self, x: Operand, dy: Operand, groups: Groups, dtype: DTypeLike, out_dtype: DTypeLike | None = None,
        total: Array | None = None,
    ) -> Float[Array, "E K N"]:  # fmt: skip
        """dw[g] = sum over rows m of group g: x[m]^T dy[m], summed in float32.

        Operands that are not FP8 have `dtype`, and dw has `out_dtype`; None means `dtype`. With `total` [E, K, N] it
        returns total + dw in the dtype of `total`, rounded once, without a second array of this size.
        """

    def bias_grad(self, dy: Float[Array, "M *C"], groups: Groups) -> Float[Array, "E *C"]:
        """dbias[g] = sum over rows m of group g: dy[m], in float32. dy must be 0 in padding."""

    def activate(
        self, h: Array, act: Callable, recipe: Recipe, groups: Groups, *, weights: Array | None, amax_over: Names
    ) -> Operand:
        """Returns the Operand of act(h), times the weight of each row; h [N, G, F], weights [N] or None."""

    def activate_grad(
        self, h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, groups: Groups,
        weights: Float[Array, " N"],
    ) -> tuple[Float[Array, "N F"], Float[Array, "N G F"], Float[Array, " N"]]:  # fmt: skip
        """Returns act(h) times the weights, d_h, and inner [N] = <d_a, act(h)>; d_a is not weighted yet."""

    def activate_grad_quantize(
        self, h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, recipes: Recipes, groups: Groups, *,
        weights: Float[Array, " N"], amax_over: Names,
    ) -> tuple[Operand, Operand, Operand, Float[Array, " N"]]:  # fmt: skip
        """Runs `activate_grad` and returns a for wgrad of wo, d_h for dgrad and for wgrad of wi, and inner."""

    def quantize(self, x: Array, format: Format, block: tuple[int | None, ...], amax_over: Names = ()) -> QArray:
        """Returns the values and scales of x in blocks of any lengths, as `moax.ops.quantize` returns them."""

    def put_rows(self, arrays: Sequence, source: Any, places: Any, way: int, out_rows: int, axes: Any) -> tuple:
        """out[i + shift[p]] on rank p = x[source[i]] for end[p - 1] <= i < end[p], for each array x.

        `places[way]` has (shift, end) of each rank. A `source` of None sends row i itself. `axes` has (name, size) of
        each axis of ep. A row that no rank wrote may hold anything.
        """

    def dequantize_wire(
        self, data: Array, words: Array, ends: Array | None, format: Format, dtype: DTypeLike
    ) -> Float[Array, "R H"]:
        """Returns the rows [R, H] before ends[-1], from their bytes `data` and `words` [R, W] i32, which begin with the
        scales.
        """


def implementation(name: str) -> Implementation:
    """Returns the implementation of a name that `select_kernels` returned."""
    return cast(Implementation, importlib.import_module(f"{IMPLEMENTATIONS[name]}.functions"))


def find_peer_kernels() -> str | None:
    """Returns the name of the first implementation whose `put_rows` writes into the memory of peers, or None."""
    able = (n for n, path in IMPLEMENTATIONS.items() if is_installed(n) and importlib.import_module(path).PUTS_ROWS)
    return next(able, None)


def select_kernels(kernels: str = "auto", dtype: DTypeLike | None = None, **widths: int) -> str:
    """Returns the name of the implementation that runs.

    Args:
      kernels: a name of `IMPLEMENTATIONS`, or `auto`, which is the first implementation that can run. On a GPU the log
        says once why an earlier one cannot.
      dtype: the dtype of the computation; None asks about the machine alone.
      **widths: the sizes of contiguous dims on one device, in elements, by the name that errors give them.

    Raises:
      ValueError: there is no implementation of this name.
      Unsupported: the implementation that was chosen by name cannot run.
    """
    if kernels not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"kernels={kernels!r} must be one of {', '.join(map(repr, ('auto', *IMPLEMENTATIONS)))}")
    refused = {}
    for name in IMPLEMENTATIONS if kernels == "auto" else (kernels,):
        why = f"this installation has no {IMPLEMENTATIONS[name]}"
        if is_installed(name):
            why = importlib.import_module(IMPLEMENTATIONS[name]).why_not(dtype, widths)
        if why is None:
            if refused and platform() == "gpu":
                reasons = "; ".join(refused.values())
                log_once(f"kernels='auto': {reasons}; the implementation {name!r} runs, which is slower")
            return name
        refused[name] = why
    raise Unsupported(f"kernels={kernels!r}: {refused[kernels]}; use 'auto' or {DEFAULT!r}")


def find_note(name: str) -> str:
    """Returns the line that says where the implementation of this name runs."""
    return importlib.import_module(IMPLEMENTATIONS[name]).NOTE


def supports_fp8(name: str, recipe: Recipe) -> bool:
    """Returns whether the implementation of this name is installed and multiplies in FP8 by this recipe."""
    return is_installed(name) and implementation(name).supports_fp8(recipe)


def is_installed(name: str) -> bool:
    """Returns whether this installation has the implementation of this name."""
    return importlib.util.find_spec(IMPLEMENTATIONS[name]) is not None
