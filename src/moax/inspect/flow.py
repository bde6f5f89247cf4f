"""This module follows values through an HLO program: from its parameters to collectives, and from these to its results.

A value flows through everything that leaves it the array that it was: casts, slices, transposes, sums and products with
arrays of its shape, loops and collectives. It ends where another array is made of it: in a product that contracts a
dim, in a reduction, in a comparison, in a broadcast to more elements, and in a kernel.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from moax.inspect.hlo import KINDS, Instruction, Program


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


class Flow(NamedTuple):
    """What an array of a collective is made of, and what is made of it, as positions of parameters and results.

    Attributes:
      carries: the parameters whose elements it moves.
      reaches: the positions of the program's results that its elements reach.
    """

    carries: tuple[Value, ...]
    reaches: tuple[int, ...]

    @staticmethod
    def union(flows: Iterable[Flow]) -> Flow:
        """Returns the flow of an array that is made of all these arrays."""
        carries, reaches = (tuple(dict.fromkeys(sum(side, ()))) for side in zip(*flows, strict=True))
        return Flow(carries, reaches)


# An array's sources are parameters (ints) and arrays of collectives (computation, instruction, element). The sources of
# a tuple are the tuple of its members' sources.
Source = int | tuple[str, str, int]
Sources = frozenset[Source] | tuple["Sources", ...]

_NONE: frozenset[Source] = frozenset()
_ENDS = {
    "compare", "constant", "convolution", "cholesky", "dot", "fft", "get-dimension-size", "infeed", "iota", "is-finite",
    "partition-id", "ragged-dot", "recv", "reduce", "reduce-window", "replica-id", "rng", "rng-bit-generator",
    "scaled-dot", "sort", "topk", "triangular-solve",
}  # fmt: skip
# Calls that change where an array lies, or nothing at all.
_PLACING = re.compile(r'custom_call_target="(annotate_device_placement|MoveTo\w+|Sharding|LayoutConstraint|X64\w+)"')


def trace(program: Program) -> tuple[Callable[[str, Instruction], tuple[Flow, ...]], list[Value]]:
    """Follows every parameter and every collective of a program.

    Returns:
      flow(computation, collective), which returns the `Flow` of each array of a collective, and the program's results.
    """
    entry = program.computations.get(program.entry, ())
    parameters = {int(one.arguments): one for one in entry if one.opcode == "parameter"}
    named = {
        i: Value(
            re.sub(r"\\(.)", r"\1", one.op_name) or f"parameter {i}", one.elements[0].shape if one.elements else ()
        )
        for i, one in parameters.items()
    }
    tracer = _Tracer(program)
    count = max(parameters, default=-1) + 1
    made = tracer.run(program.entry, tuple(frozenset([i]) for i in range(count)))
    root = next((one for one in entry if one.root), None)
    shapes = [element.shape for element in root.elements] if root else []
    several = root is not None and root.type.startswith("(")
    results = [Value(f"result[{i}]" if several else "result", shape) for i, shape in enumerate(shapes)]
    reaches: dict[Source, list[int]] = {}
    for i, member in enumerate(made if isinstance(made, tuple) else [made] * len(results)):
        for source in _flat(member):
            reaches.setdefault(source, []).append(i)

    def flow(computation: str, one: Instruction) -> tuple[Flow, ...]:
        keys = [(computation, one.name, i) for i in range(len(one.elements))]
        return tuple(
            Flow(
                tuple(named[i] for i in sorted(s for s in tracer.found.get(key, ()) if isinstance(s, int))),
                tuple(reaches.get(key, ())),
            )
            for key in keys
        )

    return flow, results


@dataclasses.dataclass
class _Tracer:
    """Runs computations on sources in the place of arrays.

    Attributes:
      program: the program.
      found: the sources of each array of each collective, in all runs of its computation.
      known: the results of runs, by computation and operands.
    """

    program: Program
    found: dict[Source, frozenset[Source]] = dataclasses.field(default_factory=dict)
    known: dict[tuple[str, Sequence[Sources]], Sources] = dataclasses.field(default_factory=dict)

    def run(self, computation: str, operands: tuple[Sources, ...]) -> Sources:
        """Returns the sources of the result of a computation."""
        key = (computation, operands)
        if key not in self.known:
            made: dict[str, Sources] = {}
            result: Sources = _NONE
            for one in self.program.computations.get(computation, ()):
                made[one.name] = self._step(computation, one, made, operands)
                result = made[one.name] if one.root else result
            self.known[key] = result
        return self.known[key]

    def _step(self, computation, one: Instruction, made: dict[str, Sources], parameters) -> Sources:
        """Returns the sources of an instruction's result."""
        if one.opcode == "parameter":
            return parameters[int(one.arguments)] if int(one.arguments) < len(parameters) else _NONE
        if one.opcode in _ENDS or (one.opcode == "custom-call" and not _PLACING.search(one.attributes)):
            return _NONE
        operands = tuple(made.get(name, _NONE) for name in one.operands)
        if one.opcode == "tuple":
            return operands
        if one.opcode == "get-tuple-element":
            index = int(re.findall(r"index=(\d+)", one.attributes)[0])
            return operands[0][index] if isinstance(operands[0], tuple) else operands[0]
        if one.opcode == "while":
            return self._loop(one, operands[0])
        called = [callee for _, callee in one.calls if callee in self.program.computations]
        if one.opcode == "conditional":
            runs = [self.run(callee, (given,)) for callee, given in zip(called, operands[1:], strict=False)]
            return _join(*runs)
        if one.opcode.endswith(("-done", "-update")) or one.opcode in ("optimization-barrier", "copy", "domain"):
            return operands[0] if operands else _NONE
        if one.kind in KINDS and not self.program.wraps_collective(one):
            return self._collective(computation, one, operands)
        if called and (one.opcode in ("fusion", "call") or one.starts):
            return self.run(called[0], operands)
        if one.opcode == "broadcast" and self.program.size(computation, one.operands[0]) != one.elements[0].size:
            return _NONE
        return _flat(tuple(operands[i] for i in range(len(operands)) if not _is_index(one.opcode, i, len(operands))))

    def _loop(self, one: Instruction, state: Sources) -> Sources:
        """Returns the sources of a loop's state after any number of trips."""
        body = dict(one.calls)["body"]
        while (after := _join(state, self.run(body, (state,)))) != state:
            state = after
        return state

    def _collective(self, computation: str, one: Instruction, operands: tuple[Sources, ...]) -> Sources:
        """Notes the sources of a collective's arrays. Its results have these sources, and themselves as a source."""
        count = len(one.elements)
        given = operands if len(operands) == count else (_flat(operands),) * count
        pieces = one.kind == "all-to-all" and count > 1
        made = []
        for i, operand in enumerate(given):
            key = (computation, one.name, i)
            self.found[key] = self.found.get(key, _NONE) | _flat(operand)
            made.append(_flat(operands if pieces else operand) | {key})
        return tuple(made) if one.type.startswith("(") and count > 1 else _flat(tuple(made))


def _is_index(opcode: str, position: int, count: int) -> bool:
    """Returns whether an operand says where elements lie, and is no part of the result."""
    if opcode == "scatter":
        return position == count // 2
    return position >= {"gather": 1, "dynamic-slice": 1, "dynamic-update-slice": 2}.get(opcode, count)


def _flat(sources: Sources) -> frozenset[Source]:
    """Returns the union of the sources of all members."""
    if isinstance(sources, frozenset):
        return sources
    return frozenset().union(*map(_flat, sources))


def _join(first: Sources, *others: Sources) -> Sources:
    """Returns the sources of an array, or of a tuple, that may be any of these."""
    for other in others:
        if isinstance(first, tuple) and isinstance(other, tuple) and len(first) == len(other):
            first = tuple(map(_join, first, other))
        else:
            first = _flat(first) | _flat(other)
    return first
