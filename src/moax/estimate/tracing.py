"""The steps of a traced function on one device: its collectives, and the memory that its arrays need.

JAX traces a function on a mesh of described devices. Its jaxpr has every collective and the shape of every shard, so
that nothing is compiled, and no formula repeats how the function works.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.interpreters import partial_eval

from moax.exchange.transport import Transfer, collective
from moax.mesh.axes import ResolvedAxes, as_names

KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
}
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
    "exp2 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne neg not or pad "
    "population_count pow pvary rem rev round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical "
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
        self._real, self._read = self._materialize()

    def transfers(self, axes: ResolvedAxes) -> dict[str, list[Transfer]]:
        """Returns the collectives by scope, without those inside a loop: a balanced step runs no further round."""
        found = defaultdict(list)
        for step in self.steps:
            kind, params = KINDS.get(step.eqn.primitive.name), step.eqn.params
            if kind is None:
                continue
            names = as_names(params.get("axes", params.get("axis_name")))
            for v in step.eqn.outvars:
                found[step.scope or "sum"].append(collective(kind, v.aval.dtype.name, v.aval.shape, axes, names))
        return dict(found)

    def traffic(self) -> int:
        """Returns the bytes of device memory that all steps outside of loops read and write."""
        return sum(
            self.total((*read, *(array for array in step.made if array in self._real)))
            for step, read in zip(self.steps, self._read, strict=True)
            if step.eqn.primitive.name != "while"
        )

    def total(self, arrays: Any) -> int:
        """Returns the bytes of these arrays together."""
        return sum(self.bytes[array] for array in set(arrays))

    def peak(self, uncounted: Any = ()) -> int:
        """Returns the most bytes that live at once, without the inputs and the arrays `uncounted`."""
        last = {array: i for i, read in enumerate(self._read) for array in read}
        last |= {array: len(self.steps) for array in self.outputs}
        others, live, now, most = {*self.inputs, *uncounted}, set[int](), 0, 0
        for i, (step, read) in enumerate(zip(self.steps, self._read, strict=True)):
            made = {array for array in step.made if array in self._real} - others - live
            live |= made
            now += self.total(made)
            most = max(most, now + step.inner)
            gone = {array for array in {*read, *made} & live if last.get(array, -1) <= i}
            live -= gone
            now -= self.total(gone)
        return most

    def _materialize(self) -> tuple[set[int], list[set[int]]]:
        """Returns the arrays that have memory, and those of them that each step reads."""
        real = {*self.inputs, *self.outputs}
        for step in self.steps:
            if step.eqn.primitive.name not in FUSED:
                real.update(step.read, step.made)
        sources: dict[int, set[int]] = {array: {array} for array in real}
        reads = []
        for step in self.steps:
            found = set[int]().union(*(sources.get(array, ()) for array in step.read))
            sources |= {array: found for array in step.made if array not in real}
            reads.append(found if any(array in real for array in step.made) else set[int]())
        return real, reads

    def _new(self, aval: Any) -> int:
        self.bytes.append(_shard_bytes(aval))
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
                inner = max((Trace(body).peak() for body in _bodies(eqn)), default=0)
                self.steps.append(Step(eqn, at, read, made, inner))
            known |= zip(eqn.outvars, made, strict=True)
        return tuple(map(find, jaxpr.outvars))


def _bodies(eqn: Any) -> Iterator[Any]:
    """Yields the jaxprs of a loop or of its branches."""
    if eqn.primitive.name in ("while", "scan", "cond"):
        for value in eqn.params.values():
            yield from (v.jaxpr for v in (value if isinstance(value, tuple) else (value,)) if hasattr(v, "jaxpr"))


def _shard_bytes(aval: Any) -> int:
    """Returns the bytes of an array on one device; 0 of a value that is no array."""
    if not isinstance(aval, jax.core.ShapedArray):
        return 0
    sizes, names = aval.sharding.mesh.shape, (name for entry in aval.sharding.spec for name in as_names(entry))
    return math.prod(aval.shape) * aval.dtype.itemsize // math.prod(sizes[name] for name in names)


def trace(fn: Callable, *args: Any) -> Trace:
    """Returns the trace of `fn` at trees of ShapeDtypeStruct, without steps whose results nothing reads."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return Trace(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0])
