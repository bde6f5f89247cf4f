"""The steps of a traced function on one device: its collectives, and the memory that its arrays need.

JAX traces a function on a mesh of described devices. Its jaxpr has every collective and the shape of every shard, so
that nothing is compiled, and no formula repeats how the function works.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from moax.exchange.transport import Transfer, collective
from moax.mesh.axes import ResolvedAxes, as_names

KINDS = {"psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "all_to_all": "all-to-all",
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter"}  # fmt: skip
CALLS = {"jit": "jaxpr", "shard_map": "jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr", "custom_vmap_call": "call",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}  # fmt: skip
# Each result of these is an operand.
SAME = frozenset(
    "optimization_barrier name reshard moax_first_derivative pcast run_state reshape squeeze expand_dims "
    "bitcast_convert_type".split()
)
IN_PLACE = frozenset("scatter scatter-add dynamic_update_slice".split())  # the result takes the place of operand 0
# XLA computes these where their result is read: the result has memory only if a step that is none of these reads it.
FUSED = frozenset(
    "abs add add_any and axis_index broadcast_in_dim ceil clamp concatenate convert_element_type copy div eq erf exp "
    "exp2 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min moax_reverse_mode mul ne neg not or "
    "pad population_count pow pvary rem rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical "
    "sign slice split sqrt square stop_gradient sub tanh transpose xor".split()
)


class Step(NamedTuple):
    """One equation of a traced function."""

    eqn: Any
    scope: str  # the innermost `jax.named_scope` around it, or ""
    read: tuple[int, ...]  # the numbers of the arrays
    made: tuple[int, ...]
    inner: int  # the bytes that its loop or its branches need beside them


class Trace:
    """The steps of a function on one device, in order. Calls are inlined, and a loop is one step.

    Arrays have numbers: `inputs` and `outputs` are those of arguments and results, and `bytes` has their sizes.
    """

    def __init__(self, jaxpr: Any):
        self.steps: list[Step] = []
        self.bytes: list[int] = []
        self.inputs = tuple(self._new(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
        self.outputs = self._inline(jaxpr, self.inputs, "")
        self._touched = self._find_memory()

    def transfers(self, axes: ResolvedAxes) -> dict[str, list[Transfer]]:
        """Returns the collectives by scope, without those inside a loop: a balanced step runs no further round."""
        found = defaultdict(list)
        for step in self.steps:
            if kind := KINDS.get(step.eqn.primitive.name):
                names = as_names(step.eqn.params.get("axes", step.eqn.params.get("axis_name")))
                moved = [collective(kind, v.aval.dtype.name, v.aval.shape, axes, names) for v in step.eqn.outvars]
                found[step.scope or "sum"] += moved
        return dict(found)

    def traffic(self) -> int:
        """Returns the bytes of device memory that all steps outside of loops read and write."""
        touched = zip(self.steps, self._touched, strict=True)
        return sum(self.total(read | made) for step, (read, made) in touched if step.eqn.primitive.name != "while")

    def total(self, arrays: Any) -> int:
        """Returns the bytes of these arrays together."""
        return sum(self.bytes[array] for array in set(arrays))

    def peak(self, uncounted: Any = ()) -> int:
        """Returns the most bytes that live at once, without the inputs and the arrays `uncounted`."""
        last = {array: i for i, (read, _) in enumerate(self._touched) for array in read}
        last |= {array: len(self.steps) for array in self.outputs}
        others, live, now, most = {*self.inputs, *uncounted}, set[int](), 0, 0
        for i, (step, (read, made)) in enumerate(zip(self.steps, self._touched, strict=True)):
            new = made - others - live
            live |= new
            now += self.total(new)
            most = max(most, now + step.inner)
            gone = {array for array in (read | new) & live if last.get(array, -1) <= i}
            live -= gone
            now -= self.total(gone)
        return most

    def _find_memory(self) -> list[tuple[set[int], set[int]]]:
        """Returns the arrays in memory that each step reads and makes."""
        real = {*self.inputs, *self.outputs}
        for step in self.steps:
            if step.eqn.primitive.name not in FUSED:
                real.update(step.read, step.made)
        sources: dict[int, set[int]] = {array: {array} for array in real}
        touched = []
        for step in self.steps:
            found = set[int]().union(*(sources.get(array, ()) for array in step.read))
            sources |= {array: found for array in step.made if array not in real}
            made = real.intersection(step.made)
            touched.append((found if made else set[int](), made))
        return touched

    def _new(self, aval: Any) -> int:
        """Returns the number of a new array; a value that is no array has 0 bytes."""
        size = 0
        if isinstance(aval, jax.core.ShapedArray):
            at, axes = aval.sharding.mesh.shape, (name for entry in aval.sharding.spec for name in as_names(entry))
            size = math.prod(aval.shape) * aval.dtype.itemsize // math.prod(at[name] for name in axes)
        self.bytes.append(size)
        return len(self.bytes) - 1

    def _inline(self, jaxpr: Any, given: tuple[int, ...], scope: str) -> tuple[int, ...]:
        """Appends the steps of a jaxpr whose arguments are `given`, and returns its results."""
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True))

        def find(v: Any) -> int:
            return self._new(v.aval) if isinstance(v, Literal) else known[v]

        for eqn in jaxpr.eqns:
            name, read = eqn.primitive.name, tuple(map(find, eqn.invars))
            at = str(eqn.source_info.name_stack).rpartition("/")[2] or scope
            if name in SAME:
                made = read[: len(eqn.outvars)]
            elif name in CALLS:
                inner = eqn.params[CALLS[name]]
                consts = tuple(self._new(jax.typeof(c)) for c in getattr(inner, "consts", ()))
                made = self._inline(getattr(inner, "jaxpr", inner), consts + read, at)
            else:
                if name == "while":  # A loop writes its sums in the place of their first values.
                    made = read[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :]
                else:
                    made = read[:1] if name in IN_PLACE else tuple(self._new(v.aval) for v in eqn.outvars)
                bodies = jax.tree.leaves(eqn.params) if name in ("while", "scan", "cond") else []
                inner = max((Trace(body.jaxpr).peak() for body in bodies if hasattr(body, "jaxpr")), default=0)
                self.steps.append(Step(eqn, at, read, made, inner))
            known |= zip(eqn.outvars, made, strict=True)
        return tuple(map(find, jaxpr.outvars))


def trace(fn: Callable, *args: Any) -> Trace:
    """Returns the trace of `fn` at trees of ShapeDtypeStruct, without steps whose results nothing reads."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return Trace(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0])
