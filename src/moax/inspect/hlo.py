"""This module reads the text of an optimized HLO program: its instructions, how often they run, and their devices.

`trace` follows arrays from parameters to collectives, and on to results, through operations that keep their elements,
such as casts, slices, transposes, sums and products with arrays of the same shape, loops and collectives. It stops
where another array is made: at a matmul, a reduction, a comparison, a broadcast, and a kernel.
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
# XLA escapes quotes and backslashes, and writes each byte that is not ASCII in octal digits.
_ESCAPE = re.compile(rb"""\\(?:([2-3][0-7]{2})|(["'\\]))""")
_PAIRS = re.compile(r"source_target_pairs=(\{\{.*?\}\}|\{\})")

# An array's sources are parameters (ints) and arrays of collectives (computation, instruction, element). The sources of
# a tuple are the tuple of its members' sources.
Array = tuple[str, str, int]
Source = int | Array
type Sources = frozenset[Source] | tuple[Sources, ...]

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
        if self.opcode.endswith("-start"):
            count = len(self.operands)
            arrays = arrays[count : 2 * count] or arrays
        if self.kind == "all-to-all" and len(arrays) > 1 and "dimensions=" not in self.attributes:
            # XLA made an operand of the piece for each peer; the user has one array.
            return (arrays[0]._replace(shape=(len(arrays), *arrays[0].shape)),)
        return arrays

    @property
    def num_elements(self) -> int:
        """The number of elements of the first array of the result."""
        return math.prod(self.elements[0].shape)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """(attribute, computation) for each computation that the instruction calls, such as ("body", "while_body")."""
        calls = []
        for attribute, names in _CALLED.findall(self.attributes):
            calls += [(attribute, callee) for callee in re.findall(r"[\w.\-]+", names)]
        return calls

    @property
    def op_name(self) -> str:
        """The op of the user's program that the instruction comes from; of a parameter, the argument's name."""
        match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        if match is None:
            return ""
        return _unescape(match[1])


def _unescape(text: str) -> str:
    """Returns a name without XLA's escapes: `\\'a\\'` is `'a'`, and `\\303\\251` is `é`. A newline stays `\\n`."""

    def read(match: re.Match[bytes]) -> bytes:
        octal, character = match.groups()
        if octal:
            return bytes([int(octal, 8)])
        return character

    return _ESCAPE.sub(read, text.encode()).decode(errors="replace")


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
            for instruction in self.computations[name].values():
                if instruction.opcode.endswith(("-done", "-update")):
                    continue  # This line names the computation that its start runs.
                trips = _TRIPS.search(instruction.attributes)
                for attribute, callee in instruction.calls:
                    times_before, was_open = runs.get(callee, (0, False))
                    is_body = attribute == "body"
                    trip_count = int(trips[1]) if trips and is_body else 1
                    opens = is_body and trips is None
                    runs[callee] = (times_before + times * trip_count, was_open or is_open or opens)
        return runs


def read_hlo(text: str) -> Hlo:
    """Reads the text of an HLO program; ValueError is raised for a program of several replicas."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    current = {}
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        if match := _INSTRUCTION.match(line):
            root, *fields = match.groups("")
            current[match[2]] = Instruction(bool(root), *fields)
        elif " = " not in line and (header := _HEADER.match(line)):
            current = computations.setdefault(header[2], {})
            if header[1]:
                entry = header[2]
    head = text.lstrip().partition("\n")[0]
    counts = re.findall(r"\b(replica_count|num_partitions)=(\d+)", head)
    count = {name: int(number) for name, number in counts}
    if count.get("replica_count", 1) > 1:
        raise ValueError("the program has replicas; moax.inspect reads programs of jit, which have partitions alone")
    return Hlo(computations, entry, count.get("num_partitions", 1))


def device_groups(instruction: Instruction, devices: int) -> Groups:
    """Returns the devices of each group of a collective, as positions in the device assignment of the program.

    A group of a permute is a source and its target.
    """
    attributes = instruction.attributes
    if pairs := _PAIRS.search(attributes):
        return tuple(tuple({*pair}) for pair in _id_lists(pairs[1])) or ((0,),)
    match = _GROUPS.search(attributes)
    is_of_replicas = instruction.kind in ("all-gather", "all-reduce", "reduce-scatter")
    has_replicas = is_of_replicas and "use_global" not in attributes
    if "replica_groups=" in attributes and (match is None or (has_replicas and devices > 1)):
        raise ValueError(f"{attributes!r} has replica_groups of a form that moax.inspect does not know")
    if match is None:
        return (tuple(range(devices)),)
    lists, rows, order, mesh, device_ids, varying = match.groups("")
    if lists:
        return _id_lists(lists)
    if rows:
        return tuple(map(tuple, _iota(order).reshape(_ints(rows)).tolist()))
    if not mesh:
        return (tuple(range(devices)),)
    return _groups_of_mesh(mesh, device_ids, varying)


def _groups_of_mesh(mesh: str, device_ids: str, varying: str) -> Groups:
    """Returns the groups of devices that differ in the axes `varying` alone."""
    sizes = {name: int(size) for name, size in re.findall(r"([^',\s]+)'?=(\d+)", mesh)}
    places = np.arange(math.prod(sizes.values()))
    leaders = places  # the place of the first device of the group of each device
    # The text may name a part of an axis: 'a':(2)4 is the middle dim of 'a' as dims 2 x 4 x rest.
    for name, before, part in re.findall(r"([^',:\s]+)'?(?::\((\d+)\)(\d+))?", varying):
        inner = math.prod(list(sizes.values())[list(sizes).index(name) + 1 :])
        size = int(part or sizes[name])
        stride = inner * sizes[name] // (int(before or 1) * size)
        leaders = leaders - places // stride % size * stride
    if not device_ids:
        ids = places
    elif "[" in device_ids:
        ids = _iota(device_ids)
    else:
        ids = np.array(_ints(device_ids))
    return tuple(tuple(ids[leaders == place].tolist()) for place in np.unique(leaders))


def varying_axes(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of a mesh of these sizes over which some group varies; () where it lacks a device.

    On {"fsdp": 2, "ep": 4} device i is (i // 4, i % 4): ((0, 4), (1, 5), (2, 6), (3, 7)) vary over fsdp alone.
    """
    if not sizes or max(map(max, groups)) >= math.prod(sizes.values()):
        return ()
    coordinates = [np.unravel_index(np.asarray(group), tuple(sizes.values())) for group in groups]
    axes = []
    for i, name in enumerate(sizes):
        if any((group[i] != group[i][0]).any() for group in coordinates):
            axes.append(name)
    return tuple(axes)


def dtype_name(hlo: str) -> tuple[str, int]:
    """Returns NumPy's name and the bits of an HLO type: f8e4m3fn -> ("float8_e4m3fn", 8), u8 -> ("uint8", 8)."""
    match = re.fullmatch(r"(bf|f|s|u|c)(\d+)(e\d\w*)?", hlo)
    if hlo == "pred":
        return "bool", 8
    if match is None:
        return hlo, 0
    kind = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}[match[1]]
    name = f"{kind}{match[2]}"
    if match[3]:
        name += f"_{match[3]}"
    return name, int(match[2])


def _iota(text: str) -> np.ndarray:
    """Reads a list of ids: `[4,2]T(1,0)` -> arange(8).reshape(4, 2).transpose(1, 0), flat."""
    dims, _, order = text.partition("T")
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(order) or range(ids.ndim)).reshape(-1)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _id_lists(text: str) -> Groups:
    return tuple(map(_ints, re.findall(r"\{([\d,\s]+)\}", text)))


def trace(
    program: Hlo,
    results: Sequence[Value],
) -> dict[Array, tuple[tuple[Value, ...], tuple[Value, ...]]]:
    """Returns {array of a collective: (the parameters whose elements it has, the results that have its elements)}.

    `results` has the names and whole shapes of the results; the text tells only their number.
    """
    entry = program.computations.get(program.entry, {}).values()
    params: dict[int, Value] = {}
    for instruction in entry:
        if instruction.opcode == "parameter":
            name = instruction.op_name or f"parameter {instruction.arguments}"
            shape = instruction.elements[0].shape if instruction.elements else ()
            params[int(instruction.arguments)] = Value(name, shape)
    flow = _Flow(program)
    sources_of_root = flow.run(program.entry, tuple(frozenset([i]) for i in range(len(params))))
    shapes = []
    for instruction in entry:
        if instruction.root:
            shapes += [element.shape for element in instruction.elements]
    if len(results) != len(shapes):
        names = ["result"] if len(shapes) == 1 else [f"result[{i}]" for i in range(len(shapes))]
        results = [Value(name, ()) for name in names]
    if isinstance(sources_of_root, tuple):
        sources_of_results = [_flat(member) for member in sources_of_root]
    else:
        sources_of_results = [sources_of_root] * len(shapes)
    values = [value._replace(shape=shape) for value, shape in zip(results, shapes, strict=True)]
    flows = {}
    for array, sources in flow.sources.items():
        indices = sorted(source for source in sources if isinstance(source, int))
        carries = tuple(params[i] for i in indices)
        pairs = zip(values, sources_of_results, strict=True)
        reaches = tuple(value for value, sources_of_value in pairs if array in sources_of_value)
        flows[array] = (carries, reaches)
    return flows


class _Flow:
    """Follows sources through a program; `sources` has the sources of each array of a collective."""

    def __init__(self, program: Hlo):
        self.program = program
        self.sources: dict[Array, frozenset[Source]] = {}
        self.run = functools.cache(self._run)

    def _run(self, computation: str, operands: tuple[Sources, ...]) -> Sources:
        """Runs a computation on sources in the place of arrays."""
        sources: dict[str, Sources] = {}
        result: Sources = _NONE
        for instruction in self.program.computations.get(computation, {}).values():
            name = instruction.name
            if instruction.opcode == "parameter":
                index = int(instruction.arguments)
                sources[name] = operands[index] if index < len(operands) else _NONE
            else:
                inputs = tuple(sources.get(operand, _NONE) for operand in instruction.operands)
                sources[name] = self._step(computation, instruction, inputs)
            if instruction.root:
                result = sources[name]
        return result

    def _step(self, computation: str, instruction: Instruction, operands: tuple[Sources, ...]) -> Sources:
        """Returns the sources of the result of an instruction."""
        opcode = instruction.opcode
        called = [callee for _, callee in instruction.calls if callee in self.program.computations]
        is_kernel = opcode == "custom-call" and not _PLACING.search(instruction.attributes)
        if opcode in _ENDS or is_kernel:
            return _NONE
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element":
            index = int(re.findall(r"index=(\d+)", instruction.attributes)[0])
            return operands[0][index] if isinstance(operands[0], tuple) else operands[0]
        if opcode == "while":
            return self._run_loop(dict(instruction.calls)["body"], operands[0])
        if opcode == "conditional":
            pairs = zip(called, operands[1:], strict=False)
            return _join(*(self.run(callee, (operand,)) for callee, operand in pairs))
        if instruction.is_collective:
            return self._cross(computation, instruction, operands)
        if called and (opcode in ("fusion", "call") or opcode.endswith("-start")):
            return self.run(called[0], operands)
        if opcode == "broadcast":
            source = self.program.computations[computation].get(instruction.operands[0])
            if source is None or source.num_elements != instruction.num_elements:
                return _NONE
        if opcode == "scatter":  # (arrays, indices, updates)
            count = len(operands) // 2
            return _flat(operands[:count] + operands[count + 1 :])
        operands = operands[: _INDICES.get(opcode)]
        return operands[0] if len(operands) == 1 else _flat(operands)

    def _run_loop(self, body: str, state: Sources) -> Sources:
        """Returns the sources of the state of a loop after any number of turns."""
        while True:
            next_state = _join(state, self.run(body, (state,)))
            if next_state == state:
                return state
            state = next_state

    def _cross(self, computation: str, instruction: Instruction, operands: tuple[Sources, ...]) -> Sources:
        """Returns the sources of the results of a collective: those of its operands, and the results themselves."""
        arrays = [(computation, instruction.name, i) for i in range(len(instruction.elements))]
        if len(operands) != len(arrays):
            operands = (_flat(operands),) * len(arrays)
        results = []
        for array, operand in zip(arrays, operands, strict=True):
            self.sources[array] = self.sources.get(array, _NONE) | _flat(operand)
            results.append(_flat(operand) | {array})
        return tuple(results) if len(results) > 1 else _flat(tuple(results))


def _flat(sources: Sources) -> frozenset[Source]:
    """Returns the union of the sources of all members."""
    if isinstance(sources, frozenset):
        return sources
    return frozenset().union(*map(_flat, sources))


def _join(*alternatives: Sources) -> Sources:
    """Returns the sources of an array, or of a tuple, that may be any of these."""
    joined, *others = alternatives
    for other in others:
        if isinstance(joined, tuple) and isinstance(other, tuple) and len(joined) == len(other):
            joined = tuple(map(_join, joined, other))
        else:
            joined = _flat(joined) | _flat(other)
    return joined
