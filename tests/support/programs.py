"""An op as a jitted program, put on a mesh in each way that a mesh allows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from support.meshes import ENGINES, make_mesh, put


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function, its operands on their devices, and the mesh to set (None without one)."""

    fn: Any
    args: tuple
    mesh: jax.sharding.Mesh | None

    def __call__(self):
        """Returns the results as NumPy arrays."""
        return jax.tree.map(np.asarray, self.placed())

    def placed(self):
        """Returns the results on their devices."""
        return self.under(self.fn)

    def under(self, fn: Callable):
        """Calls fn(*args) while the mesh is set."""
        if self.mesh is None:
            return fn(*self.args)
        with jax.set_mesh(self.mesh):
            return fn(*self.args)


def program(
    way: str,
    mesh: str,
    fn: Callable,
    args: tuple,
    in_specs: Any = None,
    out_specs: Any = None,
    aux_specs: Any = (),
    *,
    cotangents: Any = None,
    wrt: tuple[int, ...] = (0,),
) -> Program:
    """Puts fn(*args, engine=...) -> (floats, aux) on a mesh; way "none" is a single device.

    The program returns (floats, aux), and with `cotangents` (like floats) the gradients of the args `wrt` as a third.
    Specs are PartitionSpecs, or tree prefixes of them: of args, floats, aux.
    """
    engine = way if way in ENGINES else "auto"
    run = functools.partial(fn, engine=engine)
    on = None if way == "none" else make_mesh(mesh, way)

    def with_gradients(forward, args, cotangents):
        def apply(*inputs):
            return forward(*(inputs[wrt.index(i)] if i in wrt else a for i, a in enumerate(args)))

        floats, pull, aux = jax.vjp(apply, *(args[i] for i in wrt), has_aux=True)
        if way == "explicit":  # A cotangent must have exactly the type of its result.
            cotangents = jax.tree.map(
                lambda c, y: jax.sharding.reshard(c, jax.typeof(y).sharding),
                cotangents,
                floats,
            )
        return floats, aux, pull(cotangents)

    if way in ("user", "user_vma"):
        outs = (out_specs, aux_specs)
        run = jax.shard_map(
            run,
            mesh=on,
            in_specs=in_specs,
            out_specs=outs,
            check_vma=way == "user_vma",
        )
    full = run if cotangents is None else functools.partial(with_gradients, run)
    operands, specs = (args, in_specs) if cotangents is None else ((args, cotangents), (in_specs, out_specs))
    if way == "user_inside":
        outs = (out_specs, aux_specs) + (() if cotangents is None else (tuple(in_specs[i] for i in wrt),))
        full = jax.shard_map(full, mesh=on, in_specs=specs, out_specs=outs, check_vma=True)
    placed = jax.tree.map(jnp.asarray, operands) if on is None else put(on, specs, operands)
    return Program(jax.jit(full), placed, on)
