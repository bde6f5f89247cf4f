"""Pallas' GPU interpreter, with what stands for PTX there, and the lowering of a kernel for CUDA without a GPU."""

from __future__ import annotations

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

# JAX keeps the traces of kernels. A trace of one number here is not taken for another, whatever was patched for it.
TRACES = jax.make_user_context()
NUMBERS = itertools.count()
KERNEL = "mosaic_gpu_v2"  # the name of each call of a kernel in StableHLO


def take(ref, index):
    """Does what `ptx.take` does, for the interpreter."""
    return jnp.take(ref[...], index, mode="fill")


def put(ref, index, values):
    """Does what `ptx.put` does, for the interpreter, which runs one store after the other."""
    inside = (index >= 0) & (index < ref.shape[0])
    order = jnp.argsort(~inside)

    def store(i, _):
        ref[index[order[i]]] = values[order[i]]

    lax.fori_loop(0, inside.sum(), store, None)


def load_sources(source, start, rows, real=None):
    """Does what `gather.load_sources` does, for the interpreter."""
    thread = jnp.arange(128, dtype=jnp.int32)
    row = thread // 32 * (rows // 4) + thread % 32 % (rows // 4)
    inside = (row < (rows if real is None else real)) & (start + row < source.shape[0])
    return jnp.where(inside, jnp.take(source[...], start + row, mode="clip"), -1)


def copy_rows(x, column, sources, stage, transforms):
    """Does what `gather.copy_rows` does, for the interpreter, at once."""
    rows, width = stage.shape
    row = jnp.arange(rows, dtype=jnp.int32)
    source = sources[row // (rows // 4) * 32 + row % (rows // 4)]
    whole = jnp.pad(x[...], ((0, 0), (0, width)))
    part = lax.dynamic_slice_in_dim(whole, column, width, axis=1)
    results = jnp.take(
        part,
        jnp.where(source < 0, x.shape[0], source),
        axis=0,
        mode="fill",
        fill_value=0,
    )
    stage[...] = results


@contextlib.contextmanager
def without_ptx() -> Iterator[None]:
    """Puts functions that the interpreter knows in the place of those that inline PTX."""
    from moax.kernels.hopper.pallas import gather, matmul, ptx, wgrad

    copies = dict(load_sources=load_sources, copy_rows=copy_rows)
    with contextlib.ExitStack() as stack:
        for module, names in (
            (ptx, dict(take=take, put=put)),
            (gather, dict(_wait_rows=lambda later: None)),
            (matmul, copies),
            (wgrad, copies),
        ):
            stack.enter_context(mock.patch.multiple(module, **names))
        yield


def interpret(fn: Callable, *args, races: bool = True):
    """Runs fn(*args) in Pallas' GPU interpreter, which prints the races that it finds: none may be there.

    races=False for kernels whose two consumers both read a stage into registers and both release it: the interpreter
    orders a wait after one of the arrivals it waited for, and takes the other's reads for a race.
    """
    printed = io.StringIO()
    mode = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races))
    with contextlib.redirect_stdout(printed), mode, without_ptx(), flattened_operands(), TRACES(next(NUMBERS)):
        results = jax.tree.map(np.asarray, jax.jit(fn)(*args))
    if "RACE" in printed.getvalue():
        raise AssertionError(printed.getvalue()[:4000])
    return results


@contextlib.contextmanager
def flattened_operands() -> Iterator[None]:
    """Lets the interpreter multiply by an operand whose trailing dims the kernel flattens, which it does not know.

    It then reads the whole operand [K, G, C], and the product takes it as [K, G C].
    """
    to_access = interpret_utils.to_access
    matmul = np.matmul

    def without_reshape(transforms, shape):
        return to_access(
            tuple(t for t in transforms if not isinstance(t, state_types.ReshapeTransform)),
            shape,
        )

    class Flattening:
        def __getattr__(self, name):
            return getattr(np, name)

        def matmul(self, a, b, **keywords):
            return matmul(a, b.reshape(b.shape[0], -1) if b.ndim == 3 else b, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpret_utils, "to_access", without_reshape)
        patch.setattr(gpu_callbacks, "np", Flattening())
        yield


def lower(fn: Callable, *args) -> str:
    """The StableHLO of fn(*args), lowered for CUDA; raises where Mosaic refuses it, or where no kernel is in it."""
    with TRACES(next(NUMBERS)):
        program = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    if KERNEL not in program:
        raise AssertionError("no kernel was lowered")
    return program


def kernels_of(jaxpr) -> Iterator:
    """Returns the equations of a jaxpr that call a kernel, those inside of other equations included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map":
            yield eqn
            continue
        for value in jax.tree.leaves(
            eqn.params,
            is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr"),
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernels_of(inner)
