"""Pallas' GPU interpreter, and the lowering of a kernel for CUDA on a machine without a GPU."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu


def interpret(fn: Callable, *args, races: bool = True):
    """fn(*args) in Pallas' GPU interpreter, which prints the races that it finds: none may be there.

    races=False for kernels whose two consumers both read a stage into registers and both release it: the interpreter
    orders a wait after one of the arrivals it waited for, and takes the other's reads for a race.
    """
    printed = io.StringIO()
    mode = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races))
    with contextlib.redirect_stdout(printed), mode:
        results = jax.tree.map(np.asarray, jax.jit(fn)(*args))
    if "RACE" in printed.getvalue():
        raise AssertionError(printed.getvalue()[:4000])
    return results


def lower(fn: Callable, *args) -> None:
    """Lowers fn(*args) for CUDA; raises where Mosaic refuses it, or where no kernel is in it."""
    if "mosaic_gpu_v2" not in jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text():
        raise AssertionError("no kernel was lowered")


def kernels_of(jaxpr) -> Iterator:
    """The equations of a jaxpr that call a kernel, those inside of other equations included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map":
            yield eqn
            continue
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from kernels_of(inner)
