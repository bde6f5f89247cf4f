"""This module times a function of one device's shards on a mesh of `ep`: in single calls, and in rounds of one program.

The host takes longer to launch a call than the devices take to exchange some rows, so that the time of single calls is
that of the host. The time of a program of ROUNDS rounds is that of the devices. Two means keep XLA from skipping work:

- The operands of a round and the results of the round before pass one optimization barrier. No round can therefore
  start early, and XLA cannot compute a part of it before the loop.
- The program adds one element of each result to its own result, so that XLA must compute every result. This addition
  takes one small kernel in each round.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh

from benchmarks.timing import Repeats, call_time, kernel_time
from moax.mesh.specs import Spec

ROUNDS = 10
EP = Spec("ep")  # the spec of all operands and results


def mesh_of(devices: int | None) -> Mesh:
    """Returns the mesh of the first `devices` devices as ep; None takes all devices."""
    local = jax.local_devices()
    count = len(local) if devices is None else devices
    if not 2 <= count <= len(local):
        raise ValueError(f"--devices {count}: an exchange needs 2 devices or more; JAX has {len(local)}")
    return jax.make_mesh((count,), ("ep",), axis_types=(AxisType.Auto,), devices=local[:count])


@functools.cache
def single(local: Callable, mesh: Mesh) -> Callable:
    """Returns `local`, a function of one device's shards, as a jitted function of global arrays."""
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=EP, out_specs=EP, check_vma=False))


@functools.cache
def rounds(local: Callable, mesh: Mesh, count: int = ROUNDS) -> Callable:
    """Returns `count` rounds of `local`, a function of one device's shards, as one jitted program."""

    def one(_, carry):
        args, seen = carry
        args, results = lax.optimization_barrier((args, local(*args)))
        first = [lax.slice(v, (0,) * v.ndim, (1,) * v.ndim).reshape(1) for v in jax.tree.leaves(results)]
        return args, sum((v.astype(jnp.float32) for v in first), seen)

    def loop(*args):
        return lax.fori_loop(0, count, one, (args, jnp.zeros(1, jnp.float32)))[1]

    return single(loop, mesh)


def measure(local: Callable, args: tuple, mesh: Mesh, nbytes: int, repeats: Repeats) -> dict[str, Any]:
    """Measures `local` in rounds and in single calls."""
    call = single(local, mesh)
    found: dict[str, Any] = {"us": call_time(rounds(local, mesh), args, repeats).us / ROUNDS}
    found["call_us"] = call_time(call, args, repeats).us
    timing = kernel_time(call, args, dataclasses.replace(repeats, warmups=1))
    if not timing.kernels:
        return found
    us, (name, longest) = timing.us / mesh.size, max(timing.kernels, key=lambda kernel: kernel[1])
    return found | {
        "kernel_us": us,
        "kernel_gb_s": nbytes / us * 1e-3,
        "longest": name,
        "longest_us": longest,
        "longest_gb_s": nbytes / longest * 1e-3,
    }
