"""We follow arrays through operations that keep their elements: from parameters to collectives, and on to results.

Such operations are casts, slices, transposes, sums and products with arrays of the same shape, loops and collectives.
We stop where another array is made: at a product that contracts a dim, a reduction, a comparison, a broadcast to more
elements, and a kernel.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from moax.inspect.hlo import Hlo, Instruction


class Value(NamedTuple):
    """A parameter or a result of a program.

    Attributes:
      name: the argument's name, such as "params.wi", or the result's, such as "result[1].wi".
      shape: the shape on one device.
      whole: the shape on all devices; None where the text does not tell it.
    """

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...] | None = None


# An array's sources are parameters (ints) and arrays of collectives (computation, instruction, element). The sources of
# a tuple are the tuple of its members' sources.
Array = tuple[str, str, int]
Source = int | Array
Sources = frozenset[Source] | tuple["Sources", ...]

_NONE: frozenset[Source] = frozenset()
_ENDS = {
    "compare", "constant", "convolution", "cholesky", "dot", "fft", "get-dimension-size", "infeed", "iota", "is-finite",
    "partition-id", "ragged-dot", "recv", "reduce", "reduce-window", "replica-id", "rng", "rng-bit-generator",
    "scaled-dot", "sort", "topk", "triangular-solve",
}  # fmt: skip
# Calls that change where an array is stored, or nothing at all.
_PLACING = re.compile(r'custom_call_target="(annotate_device_placement|MoveTo\w+|Sharding|LayoutConstraint|X64\w+)"')
# {opcode: the number of operands before those that say where elements are}
_INDICES = {"gather": 1, "dynamic-slice": 1, "dynamic-update-slice": 2}


def trace(program: Hlo, results: Sequence[Value]) -> dict[Array, tuple[list[Value], list[Value]]]:
    """Returns {array of a collective: (the parameters whose elements it has, the results that have its elements)}.

    `results` has the names and whole shapes of the results; the text tells only their number.
    """
    entry = program.computations.get(program.entry, {}).values()
    named = {int(one.arguments): _parameter(one) for one in entry if one.opcode == "parameter"}
    tracer = _Tracer(program)
    made = tracer.run(program.entry, tuple(frozenset([i]) for i in range(len(named))))
    shapes = [element.shape for one in entry if one.root for element in one.elements]
    if len(results) != len(shapes):
        results = [Value(f"result[{i}]" if len(shapes) > 1 else "result", ()) for i in range(len(shapes))]
    members = [_flat(member) for member in made] if isinstance(made, tuple) else [made] * len(shapes)
    ends = [(value._replace(shape=shape), m) for value, shape, m in zip(results, shapes, members, strict=True)]
    flows = {}
    for key, sources in tracer.found.items():
        carried = [named[i] for i in sorted(s for s in sources if isinstance(s, int))]
        flows[key] = carried, [value for value, of in ends if key in of]
    return flows


def _parameter(one: Instruction) -> Value:
    name = re.sub(r"\\(.)", r"\1", one.op_name) or f"parameter {one.arguments}"
    return Value(name, one.elements[0].shape if one.elements else ())


class _Tracer:
    """Runs computations on sources in the place of arrays; `found` has the sources of each array of a collective."""

    def __init__(self, program: Hlo):
        self.computations = program.computations
        self.found: dict[Array, frozenset[Source]] = {}
        self.run = functools.cache(self._run)

    def _run(self, computation: str, operands: tuple[Sources, ...]) -> Sources:
        """Returns the sources of the result of a computation."""
        made: dict[str, Sources] = {}
        result: Sources = _NONE
        for one in self.computations.get(computation, {}).values():
            if one.opcode == "parameter":
                made[one.name] = operands[int(one.arguments)] if int(one.arguments) < len(operands) else _NONE
            else:
                made[one.name] = self._step(computation, one, tuple(made.get(name, _NONE) for name in one.operands))
            result = made[one.name] if one.root else result
        return result

    def _step(self, computation: str, one: Instruction, operands: tuple[Sources, ...]) -> Sources:
        """Returns the sources of an instruction's result."""
        opcode, called = one.opcode, [callee for _, callee in one.calls if callee in self.computations]
        if opcode in _ENDS or (opcode == "custom-call" and not _PLACING.search(one.attributes)):
            return _NONE
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element":
            index = int(re.findall(r"index=(\d+)", one.attributes)[0])
            return operands[0][index] if isinstance(operands[0], tuple) else operands[0]
        if opcode == "while":
            state, body = operands[0], dict(one.calls)["body"]
            while (after := _join(state, self.run(body, (state,)))) != state:
                state = after
            return state
        if opcode == "conditional":
            return _join(*(self.run(callee, (given,)) for callee, given in zip(called, operands[1:], strict=False)))
        if one.is_collective:
            return self._collective(computation, one, operands)
        if called and (opcode in ("fusion", "call") or opcode.endswith("-start")):
            return self.run(called[0], operands)
        if opcode == "broadcast":
            source = self.computations[computation].get(one.operands[0])
            if source is None or math.prod(source.elements[0].shape) != math.prod(one.elements[0].shape):
                return _NONE
        if opcode == "scatter":  # (arrays, indices, updates)
            count = len(operands) // 2
            return _flat(operands[:count] + operands[count + 1 :])
        operands = operands[: _INDICES.get(opcode)]
        return operands[0] if len(operands) == 1 else _flat(operands)

    def _collective(self, computation: str, one: Instruction, operands: tuple[Sources, ...]) -> Sources:
        """Notes the sources of a collective's arrays. Its results have these sources, and themselves as a source."""
        count = len(one.elements)
        given = operands if len(operands) == count else (_flat(operands),) * count
        made = []
        for i, operand in enumerate(given):
            key = (computation, one.name, i)
            self.found[key] = self.found.get(key, _NONE) | _flat(operand)
            made.append(_flat(operand) | {key})
        return tuple(made) if count > 1 else _flat(tuple(made))


def _flat(sources: Sources) -> frozenset[Source]:
    """Returns the union of the sources of all members."""
    return sources if isinstance(sources, frozenset) else frozenset().union(*map(_flat, sources))


def _join(first: Sources, *others: Sources) -> Sources:
    """Returns the sources of an array, or of a tuple, that may be any of these."""
    for other in others:
        if isinstance(first, tuple) and isinstance(other, tuple) and len(first) == len(other):
            first = tuple(map(_join, first, other))
        else:
            first = _flat(first) | _flat(other)
    return first
