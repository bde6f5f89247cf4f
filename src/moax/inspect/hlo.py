"""This module reads the text of an optimized HLO program: its instructions, how often they run, and their devices.

`trace` follows arrays from parameters to collectives, and on to results, through operations that keep their elements,
such as casts, slices, transposes, sums and products with arrays of the same shape, loops and collectives. It stops
where another array is made: at a product that contracts a dim, a reduction, a comparison, a broadcast, and a kernel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

KINDS = frozenset(
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)
Groups = tuple[tuple[int, ...], ...]

_HEADER = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s.*\{\s*$")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)(?:, ([\w\-]+=.*))?\s*$")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_GROUPS = re.compile(
    r"replica_groups=(?:(\{\{.*?\}\})|\{\}|\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)|"
    r"mesh\[([^\]]*)\](?:, device_ids=\(((?:[^()]|\([^()]*\))*)\))? \{([^}]*)\})"
)
_PAIRS = re.compile(r"source_target_pairs=(\{\{.*?\}\}|\{\})")

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


class Element(NamedTuple):
    """One array of an instruction's result: NumPy's name of its dtype, bits of an element, and shape on one device."""

    dtype: str
    bits: int
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation: `%name = type opcode(arguments), attributes`; the root is the result."""

    root: bool
    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @property
    def kind(self) -> str:
        """The opcode without the ending -start of an asynchronous operation."""
        return self.opcode.removesuffix("-start")

    @property
    def is_collective(self) -> bool:
        """Whether it is a collective, and no start of a computation that holds the collective."""
        return self.kind in KINDS and "calls=" not in self.attributes

    @functools.cached_property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)

    @functools.cached_property
    def elements(self) -> tuple[Element, ...]:
        """The arrays of the result. The type of a start is (operands, results, ...), or for some kinds the results."""
        types = re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", re.sub(r"\{[^}]*\}", "", self.type))
        arrays = tuple(Element(*dtype_name(d), _ints(shape)) for d, shape in types if d != "token")
        count = len(self.operands) if self.opcode.endswith("-start") else 0
        arrays = arrays[count : 2 * count] or arrays
        if self.kind == "all-to-all" and len(arrays) > 1 and "dimensions=" not in self.attributes:
            # XLA made an operand of the piece for each peer; the user has one array.
            return (arrays[0]._replace(shape=(len(arrays), *arrays[0].shape)),)
        return arrays

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(attribute, computation) for each computation that the instruction calls, such as ("body", "while_body")."""
        found = _CALLED.findall(self.attributes)
        return [(how, callee) for how, names in found for callee in re.findall(r"[\w.\-]+", names)]

    @property
    def op_name(self) -> str:
        """The op of the user's program that the instruction comes from; of a parameter, the argument's name."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Hlo:
    """An HLO program.

    Attributes:
      computations: {computation: {name: instruction}}, in the order of the text, which has callees before callers.
      entry: the computation that the program runs.
      devices: the number of devices.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str
    devices: int

    @functools.cached_property
    def runs(self) -> dict[str, tuple[int, bool]]:
        """{computation: (how often it runs with all branches taken, whether a loop around it has no trip count)}."""
        runs: dict[str, tuple[int, bool]] = {}
        for name in reversed(self.computations):
            times, is_open = runs.setdefault(name, (1, False))
            for one in self.computations[name].values():
                if one.opcode.endswith(("-done", "-update")):
                    continue  # This line names the computation that its start runs.
                trips = _TRIPS.search(one.attributes)
                for how, callee in one.calls:
                    before, was_open = runs.get(callee, (0, False))
                    many = int(trips[1]) if trips and how == "body" else 1
                    runs[callee] = before + times * many, was_open or is_open or (how == "body" and trips is None)
        return runs


def read_hlo(text: str) -> Hlo:
    """Reads the text of an HLO program; ValueError is raised for a program of several replicas."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if match := _INSTRUCTION.match(line):
            current[match[2]] = Instruction(bool(match[1]), *(part or "" for part in match.groups()[1:]))
        elif " = " not in line and (header := _HEADER.match(line)):
            current = computations.setdefault(header[2], {})
            entry = header[2] if header[1] else entry
    head = text.lstrip().partition("\n")[0]
    count = {name: int(n) for name, n in re.findall(r"\b(replica_count|num_partitions)=(\d+)", head)}
    if count.get("replica_count", 1) > 1:
        raise ValueError("the program has replicas; moax.inspect reads programs of jit, which have partitions alone")
    return Hlo(computations, entry, count.get("num_partitions", 1))


def device_groups(one: Instruction, devices: int) -> Groups:
    """Returns the devices of each group of a collective, as positions in the device assignment of the program.

    A group of a permute is a source and its target.
    """
    if pairs := _PAIRS.search(one.attributes):
        return tuple(tuple({*pair}) for pair in _id_lists(pairs[1])) or ((0,),)
    match = _GROUPS.search(one.attributes)
    replicas = one.kind in ("all-gather", "all-reduce", "reduce-scatter") and "use_global" not in one.attributes
    if "replica_groups=" in one.attributes and (match is None or (replicas and devices > 1)):
        raise ValueError(f"{one.attributes!r} has replica_groups of a form that moax.inspect does not know")
    lists, rows, order, mesh, device_ids, varying = match.groups("") if match else ("",) * 6
    if lists:
        return _id_lists(lists)
    if rows:
        return tuple(map(tuple, _iota(order).reshape(_ints(rows)).tolist()))
    if not mesh:
        return (tuple(range(devices)),)
    sizes = {name: int(size) for name, size in re.findall(r"([^',\s]+)'?=(\d+)", mesh)}
    places = first = np.arange(math.prod(sizes.values()))
    # The text may name a part of an axis: 'a':(2)4 is the middle dim of 'a' as dims 2 x 4 x rest.
    for name, before, part in re.findall(r"([^',:\s]+)'?(?::\((\d+)\)(\d+))?", varying):
        inner = math.prod(list(sizes.values())[list(sizes).index(name) + 1 :])
        size = int(part or sizes[name])
        stride = inner * sizes[name] // (int(before or 1) * size)
        first = first - places // stride % size * stride  # the place of the first device of the group
    ids = places if not device_ids else _iota(device_ids) if "[" in device_ids else np.array(_ints(device_ids))
    return tuple(tuple(ids[first == place].tolist()) for place in np.unique(first))


def varying_axes(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of a mesh of these sizes over which some group varies; () where it lacks a device.

    On {"fsdp": 2, "ep": 4} device i is (i // 4, i % 4): ((0, 4), (1, 5), (2, 6), (3, 7)) vary over fsdp alone.
    """
    if not sizes or max(map(max, groups)) >= math.prod(sizes.values()):
        return ()
    coordinates = [np.unravel_index(np.asarray(group), tuple(sizes.values())) for group in groups]
    return tuple(n for i, n in enumerate(sizes) if any((c[i] != c[i][0]).any() for c in coordinates))


def dtype_name(hlo: str) -> tuple[str, int]:
    """Returns NumPy's name and the bits of an HLO type: f8e4m3fn -> ("float8_e4m3fn", 8), u8 -> ("uint8", 8)."""
    match = re.fullmatch(r"(bf|f|s|u|c)(\d+)(e\d\w*)?", hlo)
    if match is None:
        return ("bool", 8) if hlo == "pred" else (hlo, 0)
    kind = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}[match[1]]
    return f"{kind}{match[2]}{'_' + match[3] if match[3] else ''}", int(match[2])


def _iota(text: str) -> np.ndarray:
    """Reads a list of ids: `[4,2]T(1,0)` -> arange(8).reshape(4, 2).transpose(1, 0), flat."""
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(order) or range(ids.ndim)).reshape(-1)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _id_lists(text: str) -> Groups:
    return tuple(map(_ints, re.findall(r"\{([\d,\s]+)\}", text)))


def trace(program: Hlo, results: Sequence[Value]) -> dict[Array, tuple[tuple[Value, ...], tuple[Value, ...]]]:
    """Returns {array of a collective: (the parameters whose elements it has, the results that have its elements)}.

    `results` has the names and whole shapes of the results; the text tells only their number.
    """
    found: dict[Array, frozenset[Source]] = {}

    @functools.cache
    def run(computation: str, operands: tuple[Sources, ...]) -> Sources:
        """Runs a computation on sources in the place of arrays; `found` has those of each array of a collective."""
        made: dict[str, Sources] = {}
        result: Sources = _NONE
        for one in program.computations.get(computation, {}).values():
            if one.opcode == "parameter":
                made[one.name] = operands[int(one.arguments)] if int(one.arguments) < len(operands) else _NONE
            else:
                made[one.name] = step(computation, one, tuple(made.get(name, _NONE) for name in one.operands))
            result = made[one.name] if one.root else result
        return result

    def step(computation: str, one: Instruction, operands: tuple[Sources, ...]) -> Sources:
        opcode, called = one.opcode, [callee for _, callee in one.calls if callee in program.computations]
        if opcode in _ENDS or (opcode == "custom-call" and not _PLACING.search(one.attributes)):
            return _NONE
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element":
            index = int(re.findall(r"index=(\d+)", one.attributes)[0])
            return operands[0][index] if isinstance(operands[0], tuple) else operands[0]
        if opcode == "while":
            state, body = operands[0], dict(one.calls)["body"]
            while (after := _join(state, run(body, (state,)))) != state:
                state = after
            return state
        if opcode == "conditional":
            return _join(*(run(callee, (given,)) for callee, given in zip(called, operands[1:], strict=False)))
        if one.is_collective:  # Its results have the sources of its operands, and themselves as a source.
            arrays = [(computation, one.name, i) for i in range(len(one.elements))]
            given = operands if len(operands) == len(arrays) else (_flat(operands),) * len(arrays)
            for array, operand in zip(arrays, given, strict=True):
                found[array] = found.get(array, _NONE) | _flat(operand)
            made = tuple(_flat(operand) | {array} for array, operand in zip(arrays, given, strict=True))
            return made if len(made) > 1 else _flat(made)
        if called and (opcode in ("fusion", "call") or opcode.endswith("-start")):
            return run(called[0], operands)
        if opcode == "broadcast":
            source = program.computations[computation].get(one.operands[0])
            if source is None or math.prod(source.elements[0].shape) != math.prod(one.elements[0].shape):
                return _NONE
        if opcode == "scatter":  # (arrays, indices, updates)
            count = len(operands) // 2
            return _flat(operands[:count] + operands[count + 1 :])
        operands = operands[: _INDICES.get(opcode)]
        return operands[0] if len(operands) == 1 else _flat(operands)

    entry, named = program.computations.get(program.entry, {}).values(), dict[int, Value]()
    for one in entry:
        if one.opcode == "parameter":
            name = re.sub(r"\\(.)", r"\1", one.op_name) or f"parameter {one.arguments}"
            named[int(one.arguments)] = Value(name, one.elements[0].shape if one.elements else ())
    made = run(program.entry, tuple(frozenset([i]) for i in range(len(named))))
    shapes = [element.shape for one in entry if one.root for element in one.elements]
    if len(results) != len(shapes):
        results = [Value(f"result[{i}]" if len(shapes) > 1 else "result", ()) for i in range(len(shapes))]
    members = [_flat(member) for member in made] if isinstance(made, tuple) else [made] * len(shapes)
    ends = [(value._replace(shape=shape), m) for value, shape, m in zip(results, shapes, members, strict=True)]
    return {
        array: (tuple(named[i] for i in sorted(s for s in sources if isinstance(s, int))),
                tuple(value for value, of in ends if array in of))
        for array, sources in found.items()
    }  # fmt: skip


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
