"""The functions of an implementation, with docstrings that hold for all of them.

Rows have the layout of a `Groups`. Their padding may hold anything, in arguments and in results. `recipe` and `role`
give the format of rows: `recipe.x` or `recipe.dy`. A weight's shard [E, K, *C] is gathered over the mesh axes `gather`
of each dim. `use` is `fprop` for a matmul over K, and `dgrad` for a matmul over *C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moax.kernels import Operand, Role
from moax.kernels.groups import Groups, Packing
from moax.kernels.results import ActivationGrads, Permutation, QuantizedActivationGrads
from moax.mesh.axes import Names
from moax.recipe import Recipe, Use
from moax.types import QShard


class Kernels(Protocol):
    """The type of a module of `IMPLEMENTATIONS`."""

    def supports_fp8(self, recipe: Recipe) -> bool:
        """Returns whether matmuls of this recipe multiply in FP8; else operands are dequantized to the dtype.

        In FP8 one kernel sorts and quantizes rows of x, so that they are cheap to make for wgrad alone.
        """
        ...

    def stores_weight_transposed(self, recipe: Recipe, use: Use) -> bool:
        """Returns whether a quantized shard of a weight has the dims (E, *C, K)."""
        ...

    def choose_rows(self, recipe: Recipe, role: Role, width: int, hidden: int) -> tuple[int, bool]:
        """Returns how matmuls by this recipe take rows of `width` elements, where `hidden` is F of this device.

        The first row of each group must be a multiple of the first result. The second result says whether matmuls shall
        gather the rows of this role from the order in which they arrived.
        """
        ...

    def find_groups(
        self, group_sizes: Int[Array, " E"] | None, align: int, num_rows: int,
        expected: int | None = None,
    ) -> Groups:  # fmt: skip
        """Returns the Groups of `num_rows` rows. With `group_sizes` None one group holds all rows."""
        ...

    def pack_rows(self, group_sizes: Int[Array, " E"] | None, align: int, num_rows: int) -> Packing:
        """Returns the packing of rows whose groups start at multiples of any `align`, or of one group (None)."""
        ...

    def top_k(
        self, x: Float[Array, "T E"], k: int,
    ) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:  # fmt: skip
        """Returns the k largest of each row of x, and their indices i32; of equal ones the lowest index is first."""
        ...

    def build_permutation(
        self, experts: Int[Array, "R K"], num_groups: int, align: int, num_rows: int,
        weights: Float[Array, "R K"] | None = None, keep: Callable | None = None,
    ) -> Permutation:  # fmt: skip
        """Returns the Permutation of experts in [0, num_groups], with `weights` f32 or None.

        keep(arrived) -> (begin, sizes) takes and returns arrays [G]: the arrivals begin[g] to begin[g] + sizes[g] - 1
        of group g become rows. None keeps all that arrived.
        """
        ...

    def gather_rows(
        self, x: Float[Array, "R H"], gather_idx: Int[Array, " N"], groups: Groups | None = None
    ) -> Float[Array, "N H"]:
        """rows[n] = x[gather_idx[n]], 0 where gather_idx[n] is R or more. Rows past the `groups` may hold anything."""
        ...

    def gather_sum(
        self, rows: Float[Array, "N H"], scatter_idx: Int[Array, "R K"],
        weights: Float[Array, "R K"] | None = None,
    ) -> Float[Array, "R H"]:  # fmt: skip
        """y[r] = sum_k weights[r, k] rows[scatter_idx[r, k]] in float32, over the indices below N; None: weights 1."""
        ...

    def quantize_for_matmul(
        self, x: Array, recipe: Recipe, role: Role, groups: Groups, *,
        gather_idx: Int[Array, " N"] | None = None, in_matmul: bool = False,
        fprop_or_dgrad: bool = True, wgrad: bool = True,
    ) -> tuple[Operand, Operand]:  # fmt: skip
        """Returns rows [M, ..., C] as two Operands: for fprop (of x) or dgrad (of dy), and for wgrad.

        With `gather_idx` it takes the rows x[gather_idx], in one read where the implementation can. With `in_matmul`
        too, where `choose_rows` says so, the matmuls gather these rows from x instead. The first Operand may be None
        without `fprop_or_dgrad`, and the second one without `wgrad`.
        """
        ...

    def quantize_shard(
        self, w: Array, recipe: Recipe, use: Use, gather: Sequence[Names],
    ) -> QShard:  # fmt: skip
        """Returns the bytes and scales of a weight's shard [E, K, *C], in the blocks of the whole weight."""
        ...

    def make_weight_operand(self, whole: QShard, recipe: Recipe, use: Use) -> Operand:
        """Returns a quantized weight that is whole as an Operand; an array [E, K, C] is an Operand too."""
        ...

    def matmul(
        self, x: Operand, w: Operand, groups: Groups, dtype: DTypeLike, bias: Array | None = None,
        *, transpose: bool = False,
    ) -> Float[Array, "M N"]:  # fmt: skip
        """y[m] = x[m] w[g(m)] + bias[g(m)], or with `transpose` dx[m] = dy[m] w[g(m)]^T."""
        ...

    def matmul_activate(
        self, x: Operand, w: Operand, groups: Groups, dtype: DTypeLike, act: Callable, gates: int,
        bias: Array | None = None,
    ) -> tuple[Float[Array, "M GF"], Operand | None]:  # fmt: skip
        """h[m] = x[m] w[g(m)] + bias[g(m)], and the Operand of a = act(h) [M, F] where one kernel computes both.

        `gates` is G, the projections of h [M, G F].
        """
        ...

    def wgrad(
        self, x: Operand, dy: Operand, groups: Groups, dtype: DTypeLike,
        out_dtype: DTypeLike | None = None, total: Array | None = None,
    ) -> Float[Array, "E K N"]:  # fmt: skip
        """dw[g] = sum over rows m of group g: x[m]^T dy[m], summed in float32.

        Operands that are not FP8 have `dtype`, and dw has `out_dtype`; None means `dtype`. With `total` [E, K, N] it
        returns total + dw in the dtype of `total`, rounded once, without a second array of this size.
        """
        ...

    def bias_grad(self, dy: Float[Array, "M *C"], groups: Groups) -> Float[Array, "E *C"]:
        """dbias[g] = sum over rows m of group g: dy[m], in float32. dy must be 0 in padding."""
        ...

    def activate(self, h: Float[Array, "N G F"], act: Callable, recipe: Recipe, groups: Groups) -> Operand:
        """Returns the Operand of act(h), computed in float32."""
        ...

    def activate_grad(
        self, h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, groups: Groups,
        weights: Float[Array, " N"],
    ) -> ActivationGrads:  # fmt: skip
        """Returns act(h) times the weights, and the gradients for d_a, which is not weighted yet."""
        ...

    def activate_grad_quantize(
        self, h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, recipe: Recipe,
        groups: Groups, *, weights: Float[Array, " N"],
    ) -> QuantizedActivationGrads:  # fmt: skip
        """Runs `activate_grad`, and quantizes a for wgrad of wo, and d_h for dgrad and for wgrad of wi."""
        ...
