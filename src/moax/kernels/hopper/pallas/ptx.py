"""Short calls of kernels, and what Pallas lacks: loads and stores where each thread has an index, by inlined PTX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Int, Num

from moax.mesh.collectives import vary_like

THREADS = 128  # the threads of a warpgroup
ARRAYS = (jax.Array, np.ndarray)  # the arguments of a kernel that are traced; the others are static
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # it makes a copy a bulk copy, without a tensor map
# Before jax 0.12 every store of an array to a reference may be unoptimized.
store = getattr(plgpu, "store", lambda to, value, optimized: to.__setitem__(..., value))
# The operands are the result, the array in SMEM and the index.
TAKE = """{
.reg .b32 at;
mad.lo.u32 at, $2, 4, $1;
ld.shared.b32 $0, [at];
}"""
# The operands are the array in GMEM, the index and the value.
PUT = """{{
.reg .b64 at;
.reg .pred inside;
setp.lt.u32 inside, $1, {size};
mad.wide.u32 at, $1, 4, $0;
@inside st.global.b32 [at], $2;
}}"""


def launch(
    kernel: Callable, out, grid: dict[str, int], scratch, *, warpgroups: int | None = 1, **params,
) -> Callable:  # fmt: skip
    """Makes a kernel of `warpgroups` that share a tile; None makes one warpgroup that orders its own copies."""
    threads: Any = {}
    if warpgroups is None:
        params["unsafe_no_auto_barriers"] = True
    else:
        threads = dict(num_threads=warpgroups, thread_name="wg")
        params["reduction_scratch_bytes"] = 0  # the warpgroups would share SMEM for reductions over warps too
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(**params),
        **threads,
    )


def trace_once[**P, R](call: Callable[P, R]) -> Callable[P, R]:
    """Wraps a function that calls a kernel: a module of StableHLO has the kernel once for equal arguments.

    Without it the layers of a model that JAX differentiates in different ways would each have kernels of their own.

    The types of the results vary over the same mesh axes as the operands. JAX types the results of a kernel as equal on
    every device, which `shard_map` with `check_vma` would believe.
    """

    def call_leaves(structure: Any, constants: tuple[Any, ...], arrays: list[Array | None]) -> R:
        pairs = zip(constants, arrays, strict=True)
        leaves = [constant if array is None else array for constant, array in pairs]
        args, options = jax.tree.unflatten(structure, leaves)
        return call(*args, **options)

    call_leaves.__name__ = call.__name__  # profiles and jaxprs show it
    jitted = jax.jit(call_leaves, static_argnums=(0, 1))

    @functools.wraps(call)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        leaves, structure = jax.tree.flatten((args, options))
        arrays = [leaf if isinstance(leaf, ARRAYS) else None for leaf in leaves]
        constants = [None if isinstance(leaf, ARRAYS) else leaf for leaf in leaves]
        results = jitted(structure, tuple(constants), arrays)
        return jax.tree.map(lambda result: vary_like(result, arrays), results)

    return wrapped


def layout_of(size: int) -> Any:
    """Returns the layout of indices [size], a multiple of 128: element i is in thread i % 128."""
    return plgpu.Layout.WG_STRIDED((size,), 1)


def take(ref: Any, index: Int[Array, " I"]) -> Int[Array, " I"]:
    """Returns ref[index[i]] for each i: ref [S] i32 in SMEM; index in [0, S), in the layout of `layout_of`."""
    layout = layout_of(index.shape[0])

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout), return_type=plgpu.ShapeDtypeStruct(index.shape, jnp.int32, layout=layout)
    )
    def load(ctx, ref, index):
        del ctx
        values = [run_ptx(TAKE, utils.memref_ptr(ref), i, result=i32()) for i in _values(index)]
        return to_fragments(values, layout)

    return load(ref, index)


def put(ref: Any, index: Int[Array, " I"], values: Num[Array, " I"]) -> None:
    """Writes values[i] to ref[index[i]] in GMEM, i32 or f32, for each i whose index is below S and not negative.

    Index [I] i32 is in the layout of `layout_of`; `values` are in the dtype of `ref` and this layout, or one value.
    """
    layout = layout_of(index.shape[0])
    code = PUT.format(size=ref.shape[0])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout, layout))
    def write(ctx, ref, index, values):
        del ctx
        for i, value in zip(_values(index), _values(values), strict=True):
            run_ptx(code, utils.memref_ptr(ref), i, arith.bitcast(i32(), value))

    write(ref, index, plgpu.layout_cast(values, layout))


def i32() -> Any:
    """Returns the type i32 of MLIR."""
    return ir.IntegerType.get_signless(32)


def to_fragments(values: list[Any], layout: Any) -> mgpu.FragmentedArray:
    """Returns the array of i32 in this layout whose elements of this thread are `values`."""
    registers = np.array([vector.broadcast(ir.VectorType.get((1,), i32()), v) for v in values], dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)


def _values(x: mgpu.FragmentedArray) -> list[Any]:
    """Returns the elements of this thread."""
    registers = x.registers.flat
    return [vector.extract(register, dynamic_position=[], static_position=[0]) for register in registers]


def run_ptx(code: str, *operands: Any, result: Any = None) -> Any:
    """Inlines PTX whose operands are pointers and integers, after the result if there is one. Returns the result."""
    kinds = ["l" if str(operand.type) == "!llvm.ptr" else "r" for operand in operands]
    outs = ["=r"]
    if result is None:
        outs = []
        result = ir.Type.parse("!llvm.void")
    constraints = ",".join([*outs, *kinds, "~{memory}"])
    return llvm.inline_asm(result, list(operands), code, constraints, has_side_effects=True)
