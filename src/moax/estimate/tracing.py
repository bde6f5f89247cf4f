"""The steps of a traced function on one device: its collectives, and the memory that its arrays need.

JAX traces a function on a mesh of described devices. Its jaxpr has every collective and the shape of every shard, so
that nothing is compiled, and no formula repeats how the function works.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
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
    "all_to_all": "all-to-all",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
}
CALLS = {
    "jit": "jaxpr",
    "shard_map": "jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_vmap_call": "call",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
# Each result of these is an operand.
SAME = frozenset(
    "optimization_barrier name reshard moax_first_derivative pcast run_state reshape squeeze expand_dims "
    "bitcast_convert_type".split()
)
# The result takes the place of operand 0.
IN_PLACE = frozenset("scatter scatter-add dynamic_update_slice".split())
# XLA computes these where their result is read: the result has memory only if a step that is none of these reads it.
FUSED = frozenset(
    "abs add add_any and axis_index broadcast_in_dim ceil clamp concatenate convert_element_type "
    "copy div eq erf exp exp2 floor ge gt integer_pow iota is_finite le log log1p logistic lt max "
    "min moax_reverse_mode mul ne neg not or pad population_count pow pvary rem rev round rsqrt "
    "select_n shift_left shift_right_arithmetic shift_right_logical "
    "sign slice split sqrt square stop_gradient sub tanh transpose xor".split()
)


class Step(NamedTuple):
    """One equation of a traced function."""

    eqn: Any
    scope: str  # the innermost `jax.named_scope` around it, or ""
    read: tuple[int, ...]  # the numbers of the arrays
    results: tuple[int, ...]
    inner: int  # the bytes that its loop or its branches need beside them


class Shard(NamedTuple):
    """The dtype and the shape of an array on one device."""

    dtype: str
    shape: tuple[int, ...]


class Trace:
    """The steps of a function on one device, in order. Calls are inlined, and a loop is one step.

    Arrays have numbers: `inputs` and `outputs` are those of arguments and results. `bytes` has the sizes of arrays,
    `shards` their dtypes and shapes, and `names` the names that `checkpoint_name` gave some of them.
    """

    def __init__(self, jaxpr: Any):
        self.steps: list[Step] = []
        self.bytes: list[int] = []
        self.shards: list[Shard] = []
        self.names: dict[int, str] = {}
        self.inputs = tuple(self._new(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
        self.outputs = self._inline(jaxpr, self.inputs, "")
        self._touched = self._find_memory()

    def transfers(self, axes: ResolvedAxes) -> dict[str, list[Transfer]]:
        """Returns the collectives by scope, without those inside a loop: a balanced step runs no further round."""
        transfers = defaultdict(list)
        for step in self.steps:
            params = step.eqn.params
            kind = KINDS.get(step.eqn.primitive.name)
            if kind is None:
                continue
            names = as_names(params.get("axes", params.get("axis_name")))
            for result in step.eqn.outvars:
                transfer = collective(kind, result.aval.dtype.name, result.aval.shape, axes, names)
                transfers[step.scope or "sum"].append(transfer)
        return dict(transfers)

    def traffic(self, uncounted: Mapping[int, float] = {}) -> int:
        """Returns the bytes of device memory that all steps outside of loops read and write.

        No step touches the share `uncounted[array]` of an array: the part of a buffer that holds no rows.
        """
        traffic = 0.0
        for step, (read, written) in zip(self.steps, self._touched, strict=True):
            if step.eqn.primitive.name != "while":
                for array in read | written:
                    traffic += self.bytes[array] * (1 - uncounted.get(array, 0))
        return round(traffic)

    def total(self, arrays: Any) -> int:
        """Returns the bytes of these arrays together."""
        return sum(self.bytes[array] for array in set(arrays))

    def origin(self, array: int) -> str:
        """Returns the name that `checkpoint_name` gave an array, or else the scope of the step that made it, or ""."""
        if array in self.names:
            return self.names[array]
        for step in self.steps:
            if array in step.results and step.scope.isidentifier():  # `jvp()` is no scope of the block
                return step.scope
        return ""

    def peak(self, uncounted: Any = ()) -> int:
        """Returns the most bytes that live at once, without the inputs and the arrays `uncounted`."""
        last_step = {array: i for i, (read, _) in enumerate(self._touched) for array in read}
        last_step |= {array: len(self.steps) for array in self.outputs}
        ignored = {*self.inputs, *uncounted}
        live = set[int]()
        live_bytes = 0
        peak_bytes = 0
        for i, (step, (read, written)) in enumerate(zip(self.steps, self._touched, strict=True)):
            new = written - ignored - live
            live |= new
            live_bytes += self.total(new)
            peak_bytes = max(peak_bytes, live_bytes + step.inner)
            dead = {array for array in (read | new) & live if last_step.get(array, -1) <= i}
            live -= dead
            live_bytes -= self.total(dead)
        return peak_bytes

    def _find_memory(self) -> list[tuple[set[int], set[int]]]:
        """Returns the arrays in memory that each step reads and writes."""
        in_memory = {*self.inputs, *self.outputs}
        for step in self.steps:
            if step.eqn.primitive.name not in FUSED:
                in_memory.update(step.read, step.results)
        sources: dict[int, set[int]] = {array: {array} for array in in_memory}
        touched = []
        for step in self.steps:
            read = set[int]().union(*(sources.get(array, ()) for array in step.read))
            sources |= {array: read for array in step.results if array not in in_memory}
            written = in_memory.intersection(step.results)
            touched.append((read if written else set[int](), written))
        return touched

    def _new(self, aval: Any) -> int:
        """Returns the number of a new array."""
        shard = _find_shard(aval)
        self.bytes.append(math.prod(shard.shape) * aval.dtype.itemsize)
        self.shards.append(shard)
        return len(self.bytes) - 1

    def _inline(self, jaxpr: Any, arguments: tuple[int, ...], scope: str) -> tuple[int, ...]:
        """Appends the steps of a jaxpr with these arguments, and returns its results."""
        numbers = dict(zip((*jaxpr.constvars, *jaxpr.invars), arguments, strict=True))

        def find(v: Any) -> int:
            return self._new(v.aval) if isinstance(v, Literal) else numbers[v]

        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            read = tuple(map(find, eqn.invars))
            inner_scope = str(eqn.source_info.name_stack).rpartition("/")[2] or scope
            # `quantize_params` stops the gradients of its arguments, which are in memory already.
            stops_argument = name == "stop_gradient" and read[0] in self.inputs
            if name in SAME or stops_argument:
                results = read[: len(eqn.outvars)]
                if name == "name":
                    self.names[results[0]] = eqn.params["name"]
                    self.shards[results[0]] = _find_shard(eqn.outvars[0].aval)
            elif name in CALLS:
                callee = eqn.params[CALLS[name]]
                consts = tuple(self._new(jax.typeof(const)) for const in getattr(callee, "consts", ()))
                results = self._inline(getattr(callee, "jaxpr", callee), consts + read, inner_scope)
            else:
                if name == "while":  # A loop writes its sums in the place of their first values.
                    results = read[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :]
                elif name in IN_PLACE:
                    results = read[:1]
                else:
                    results = tuple(self._new(v.aval) for v in eqn.outvars)
                self.steps.append(Step(eqn, inner_scope, read, results, _inner_bytes(eqn)))
            numbers |= zip(eqn.outvars, results, strict=True)
        return tuple(map(find, jaxpr.outvars))


def _find_shard(aval: Any) -> Shard:
    """Returns the part of an array on one device."""
    sizes = aval.sharding.mesh.shape
    dims = []
    for size, entry in zip(aval.shape, aval.sharding.spec, strict=True):
        dims.append(size // math.prod(sizes[name] for name in as_names(entry)))
    return Shard(aval.dtype.name, tuple(dims))


def _inner_bytes(eqn: Any) -> int:
    """Returns the bytes that the body of a loop, or the larger branch of a condition, needs."""
    if eqn.primitive.name not in ("while", "scan", "cond"):
        return 0
    bodies = [body for body in jax.tree.leaves(eqn.params) if hasattr(body, "jaxpr")]
    return max((Trace(body.jaxpr).peak() for body in bodies), default=0)


def trace(fn: Callable, *args: Any) -> Trace:
    """Returns the trace of `fn` at trees of ShapeDtypeStruct, without steps whose results nothing reads."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    used_results = [True] * len(jaxpr.outvars)
    used, _ = partial_eval.dce_jaxpr(jaxpr, used_results, instantiate=True)
    return Trace(used)
