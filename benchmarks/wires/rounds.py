"""A function of one device's shards on a mesh of `ep`: called once, and in rounds of one program.

The host takes longer to launch a call than the devices to exchange some rows, so that wall clock of single calls is the
host's. In a program of ROUNDS rounds it is the machine's. A round begins when the one before has ended and computes
all of it: its operands and the results before it pass one optimization barrier, so that nothing is the same in every
round and computed before the first; and one element of each result is added to what the program returns, so that no
result is left out. Of a round that is one small kernel.
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

from moax.mesh.specs import spec
from moax.tune.timing import Repeats, call_time, kernel_time

ROUNDS = 10
EP = spec("ep")  # of all operands and results


def mesh_of(devices: int | None) -> Mesh:
    """The first `devices` of the machine as ep, or all.

    Raises:
      ValueError: there are fewer, or it is one.
    """
    here = jax.local_devices()
    count = len(here) if devices is None else devices
    if not 2 <= count <= len(here):
        raise ValueError(f"--devices {count}: an exchange is between 2 devices or more; here are {len(here)}")
    return jax.make_mesh((count,), ("ep",), axis_types=(AxisType.Auto,), devices=here[:count])


def keep(args: tuple, results: Any) -> tuple:
    """Operands of the next round: those of this one."""
    return args


@functools.cache
def single(local: Callable, mesh: Mesh) -> Callable:
    """`local` of the shards of global arrays."""
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=EP, out_specs=EP, check_vma=False))


@functools.cache
def rounds(local: Callable, mesh: Mesh, feed: Callable = keep, count: int = ROUNDS) -> Callable:
    """`count` rounds of `local` in one program. feed: (operands, results) of a round -> operands of the next."""

    def one(_, carry):
        args, seen = carry
        results = local(*args)
        args, results = lax.optimization_barrier((feed(args, results), results))
        first = [lax.slice(v, (0,) * v.ndim, (1,) * v.ndim).reshape(1) for v in jax.tree.leaves(results)]
        return args, sum((v.astype(jnp.float32) for v in first), seen)

    def loop(*args):
        return lax.fori_loop(0, count, one, (args, jnp.zeros(1, jnp.float32)))[1]

    return single(loop, mesh)


def measure(
    local: Callable, args: tuple, mesh: Mesh, nbytes: int, repeats: Repeats, feed: Callable = keep
) -> dict[str, Any]:
    """us: of a round in one program; call_us: of single calls; and of such a call by kernel time, where there is one.

    kernel_us: the mean of the devices; longest: its longest kernel, which is the one that moves the rows.
    """
    call = single(local, mesh)
    found: dict[str, Any] = {"us": call_time(rounds(local, mesh, feed), args, repeats).us / ROUNDS}
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
