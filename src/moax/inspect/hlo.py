"""This module reads the collectives from the text of an optimized HLO program of XLA's CPU or GPU compiler."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Element:
    """One array that a collective makes.

    Attributes:
      dtype: NumPy's name, such as "bfloat16".
      bits: bits of one element.
      shape: the shape on one device.
    """

    dtype: str
    bits: int
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return -(-math.prod(self.shape) * self.bits // 8)


@dataclasses.dataclass(frozen=True)
class HloCollective:
    """One collective instruction.

    Attributes:
      kind: one of `KINDS`.
      elements: its results; it has several where XLA combined several collectives into one.
      groups: the groups of devices that exchange with one another, as positions in the device assignment of the
        program. The groups of a permute are the sets that its source-target pairs connect.
      names: the mesh axes that the text names for the groups; () where it names no axis of the user.
      times: how often the program runs it: the product of the trip counts of the loops around it.
      open_loop: whether one of these loops states no trip count; that loop counts once in `times`.
      promoted: whether XLA made this reduction from a reduction of a narrower type.
      op_name: the op that it comes from, as profiles name it.
    """

    kind: str
    elements: tuple[Element, ...]
    groups: Groups
    names: tuple[str, ...]
    times: int
    open_loop: bool
    promoted: bool
    op_name: str

    @property
    def group_size(self) -> int:
        """Devices of the largest group."""
        return max(map(len, self.groups))

    def sent(self, result: Element) -> int:
        """Returns the bytes that a device sends for `result`, one of `elements`, by the ring algorithm."""
        b, g = result.bytes, self.group_size
        if self.kind in ("collective-permute", "collective-broadcast"):
            return b if g > 1 else 0
        if self.kind == "reduce-scatter":
            return b * (g - 1)
        return -(-b * (g - 1) * (2 if self.kind == "all-reduce" else 1) // g)


_HEADER = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s.*\{\s*$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_GROUPS = re.compile(
    r"replica_groups=("
    r"mesh\[[^\]]*\](?:,\s*device_ids=\([^()]*(?:\([^()]*\))?\))?\s*\{[^}]*\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|\{\s*\{.*?\}\s*\}|\{\s*\})"
)
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(([^()]*(?:\([^()]*\))?)\))?")


def read_collectives(text: str) -> list[HloCollective]:
    """Returns every collective of an optimized HLO program, in the order of the text.

    An asynchronous collective stands at its start. ValueError is raised for device groups of an unknown form.
    """
    replicas, partitions = _count(text, "replica_count"), _count(text, "num_partitions")
    bodies, entry = _computations(text)
    callers = _callers(bodies)
    read = []
    for name, lines in bodies.items():
        for line in lines:
            instruction = _instruction(line)
            if instruction is None:
                continue
            kind, start, types, operands, attributes = instruction
            called = [callee for _, callee in _calls(attributes) if callee in bodies]
            if kind not in KINDS or (start and any(_holds_collective(bodies[c]) for c in called)):
                continue  # This start wraps a computation; the collective is inside that computation.
            times, open_loop = _times(name, entry, callers)
            elements = _elements(types, operands, start)
            groups, names = _device_groups(kind, attributes, replicas, partitions)
            if kind == "all-to-all" and len(elements) == len(groups[0]) > 1 and "dimensions=" not in attributes:
                # XLA made an operand of the piece for each peer; the user has one array.
                first = elements[0]
                elements = (dataclasses.replace(first, shape=(len(elements), *first.shape)),)
            op_name = re.search(r'op_name="((?:[^"\\]|\\.)*)"', attributes)
            promoted = re.search(r"to_apply=%?[\w.\-]+_promoted\b", attributes) is not None
            read.append(
                HloCollective(
                    kind=kind,
                    elements=elements,
                    groups=groups,
                    names=names,
                    times=times,
                    open_loop=open_loop,
                    promoted=promoted,
                    op_name=op_name.group(1) if op_name else "",
                )
            )
    return read


def device_count(text: str) -> int:
    """Returns the number of devices that the program runs on, which its header states."""
    return _count(text, "replica_count") * _count(text, "num_partitions")


def named_mesh(text: str) -> dict[str, int]:
    """Returns {axis: size} of the program's first mesh with the user's axis names and row-major devices, or {}."""
    for match in _MESH.finditer(text):
        sizes = dict(_axis_sizes(match.group(1)))
        if match.group(2) is None and not any(map(_made_up, sizes)):
            return sizes
    return {}


def varying_axes(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of a mesh of these sizes over which some group varies.

    Example: on the mesh {"fsdp": 2, "ep": 4} device i is (i // 4, i % 4). The groups ((0, 4), (1, 5), (2, 6), (3, 7))
    vary over fsdp alone. () is returned where a group has a device that the mesh does not have.
    """
    if max(map(max, groups)) >= math.prod(sizes.values()):
        return ()
    coordinates = [np.unravel_index(np.asarray(group), tuple(sizes.values())) for group in groups]
    return tuple(n for i, n in enumerate(sizes) if any((c[i] != c[i][0]).any() for c in coordinates))


def dtype_name(hlo: str) -> tuple[str, int]:
    """Returns NumPy's name and the bits of an HLO type: f8e4m3fn -> ("float8_e4m3fn", 8), u8 -> ("uint8", 8)."""
    if hlo == "pred":
        return "bool", 8
    match = re.fullmatch(r"(bf|f|s|u|c)(\d+)((?:e\d\w*)?)", hlo)
    if match is None:
        return hlo, 0
    kind = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}[match.group(1)]
    tail = "_" + match.group(3) if match.group(3) else ""
    return f"{kind}{match.group(2)}{tail}", int(match.group(2))


def _count(text: str, name: str) -> int:
    """Returns the number `name` of the program's header; 1 where the header does not state it."""
    match = re.search(rf"^\s*HloModule\b.*\b{name}=(\d+)", text, re.MULTILINE)
    return int(match.group(1)) if match else 1


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Returns the lines of instructions of each computation, by its name, and the name of the entry computation."""
    bodies: dict[str, list[str]] = {}
    entry, current = "", None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        header = _HEADER.match(line) if " = " not in line else None
        if header:
            current = bodies.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif current is not None and " = " in line:
            current.append(line)
    return bodies, entry


def _instruction(line: str) -> tuple[str, bool, str, list[str], str] | None:
    """Returns (opcode without -start, had it -start, type, operands, attributes); None for no collective's line."""
    if not any(kind in line for kind in KINDS):
        return None
    rest = line.split(" = ", 1)[1].lstrip()
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    name = opcode.group(1)
    start = name.endswith("-start")
    return name.removesuffix("-start"), start, rest[:end], _split(rest[opcode.end() : close - 1]), rest[close:]


def _holds_collective(lines: Sequence[str]) -> bool:
    """Whether one of the lines is a collective."""
    return any((read := _instruction(line)) is not None and read[0] in KINDS for line in lines)


def _closing(text: str, opening: int) -> int:
    """Returns the index after the parenthesis that closes the one at index `opening`: 6 for "(a(b))" and 0."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i + 1
    return len(text)


def _split(text: str) -> list[str]:
    """Splits text at the commas outside all brackets: "a, f(b, c)" -> ["a", "f(b, c)"]."""
    parts, depth = [""], 0
    for c in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(c, 0)
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [part.strip() for part in parts if part.strip()]


def _leaves(type_text: str) -> list[Element]:
    """Returns the arrays of an HLO type: "(f32[2,3]{1,0}, u8[4])" has two."""
    types = re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", re.sub(r"\{[^}]*\}", "", type_text))
    arrays = [(dtype, shape) for dtype, shape in types if dtype != "token"]
    return [Element(*dtype_name(d), tuple(int(n.strip(" <=")) for n in s.split(",") if n.strip())) for d, s in arrays]


def _elements(type_text: str, operands: Sequence[str], start: bool) -> tuple[Element, ...]:
    """Returns the results. The type of a start is (operands, results, context, ...), or for some kinds the results."""
    if start and type_text.startswith("("):
        parts = _split(type_text[1:-1])
        if len(parts) > 1 and len(_leaves(parts[0])) == len(operands):
            return tuple(_leaves(parts[1]))
    return tuple(_leaves(type_text))


def _calls(attributes: str) -> Iterator[tuple[str, str]]:
    """Yields (attribute, computation) for each computation that an instruction calls, as ("body", "while_body")."""
    for match in _CALLED.finditer(attributes):
        for callee in match.group(2).strip("{}").split(","):
            yield match.group(1), callee.strip().lstrip("%")


def _callers(bodies: Mapping[str, Sequence[str]]) -> dict[str, list[tuple[str, int, bool]]]:
    """Returns {computation: [(caller, calls in one run of the caller, whether that number is unknown)]}."""
    callers: dict[str, list[tuple[str, int, bool]]] = {}
    for name, lines in bodies.items():
        for line in lines:
            if re.search(r"\s[\w\-]+-(done|update)\(", line):
                continue  # This line names the computation that its start runs.
            trips = _TRIPS.search(line)
            for how, callee in _calls(line):
                many = int(trips.group(1)) if trips and how == "body" else 1
                callers.setdefault(callee, []).append((name, many, how == "body" and trips is None))
    return callers


def _times(name: str, entry: str, callers: Mapping[str, Sequence[tuple[str, int, bool]]]) -> tuple[int, bool]:
    """Returns how often a computation runs, all branches taken, and whether a loop around it has no trip count."""
    if name == entry or name not in callers:
        return 1, False
    above = [(many, unknown, *_times(caller, entry, callers)) for caller, many, unknown in callers[name]]
    return sum(m * times for m, _, times, _ in above), any(u or open_loop for _, u, _, open_loop in above)


def _device_groups(kind: str, attributes: str, replicas: int, partitions: int) -> tuple[Groups, tuple[str, ...]]:
    """Returns the groups of a collective, as positions in the device assignment, and the axes that the text names.

    The position of partition p of replica r is r * partitions + p.
    """
    if kind in ("collective-permute", "collective-broadcast"):
        pairs = re.search(r"source_target_pairs=(\{.*?\}\s*\}|\{\s*\})", attributes)
        if pairs:
            return _connected(_id_lists(pairs.group(1))), ()
    match = _GROUPS.search(attributes)
    groups, names = _read_groups(match.group(1)) if match else ((), ())
    channel, flattened = "channel_id=" in attributes, "use_global_device_ids=true" in attributes
    if flattened or partitions == 1:
        return groups or (tuple(range(replicas * partitions)),), names
    if not channel:  # The ids are replicas, and each partition has groups of its own.
        of_replicas = groups or (tuple(range(replicas)),)
        return tuple(tuple(r * partitions + p for r in g) for p in range(partitions) for g in of_replicas), names
    if kind in ("all-gather", "all-reduce", "reduce-scatter"):  # The ids are replicas, and a group has all partitions.
        of_replicas = groups or (tuple(range(replicas)),)
        return tuple(tuple(r * partitions + p for r in g for p in range(partitions)) for g in of_replicas), names
    of_partitions = groups or (tuple(range(partitions)),)
    return tuple(tuple(r * partitions + p for p in g) for r in range(replicas) for g in of_partitions), names


def _read_groups(text: str) -> tuple[Groups, tuple[str, ...]]:
    """Reads the text of device groups, and the axes that it names.

    text                        groups          axes
    `{{0,1},{2,3}}`             (0,1), (2,3)    ()
    `[2,2]<=[4]`                (0,1), (2,3)    ()
    `[2,2]<=[2,2]T(1,0)`        (0,2), (1,3)    ()
    `mesh['a'=2,'b'=2] {'b'}`   (0,1), (2,3)    ("b",)
    """
    if text.startswith("{"):
        return _id_lists(text), ()
    if text.startswith("["):
        dims, _, order = text.partition("<=")
        return _rows(_iota(order).reshape(_ints(dims))), ()
    mesh = _MESH.match(text)
    if mesh is None:
        raise ValueError(f"replica_groups={text!r} is of a form that moax.inspect does not know")
    sizes = _axis_sizes(mesh.group(1))
    count = math.prod(size for _, size in sizes)
    order = mesh.group(2)
    ids = np.arange(count) if order is None else _iota(order) if order.startswith("[") else np.array(_ints(order))
    shape: list[int] = []
    names, varying = [], []
    wanted = [_axis_reference(a) for a in _split(text[text.rindex("{") + 1 : -1])]
    for name, size in sizes:
        # The text may name a part of an axis: 'a':(2)4 is the middle dim of 'a' as dims 2 x 4 x rest.
        cuts = sorted({1, size, *(c for n, pre, part in wanted if n == name and part for c in (pre, pre * part))})
        for low, high in zip(cuts, cuts[1:], strict=False):
            if any(n == name and (not part or pre <= low < pre * part) for n, pre, part in wanted):
                varying.append(len(shape))
                names.append(name)
            shape.append(high // low)
    fixed = [i for i in range(len(shape)) if i not in varying]
    size = math.prod(shape[i] for i in varying)
    named = () if any(map(_made_up, names)) else tuple(dict.fromkeys(names))
    return _rows(ids.reshape(shape).transpose(fixed + varying).reshape(-1, size)), named


def _axis_sizes(text: str) -> list[tuple[str, int]]:
    """Reads the axes of a mesh: "'a'=2,'b'=4" -> [("a", 2), ("b", 4)]."""
    pairs = (entry.rpartition("=") for entry in _split(text))
    return [(name.strip("'\" "), int(size)) for name, _, size in pairs]


def _axis_reference(text: str) -> tuple[str, int, int]:
    """Reads an axis or a part of it: `'a'` -> (a, 1, 0); `'a':(2)4` -> (a, 2, 4), the dim of size 4 after one of 2."""
    match = re.fullmatch(r"(.*):\((\d+)\)(\d+)", text)
    name, pre, size = match.groups() if match else (text, 1, 0)
    return name.strip("'\" "), int(pre), int(size)


def _made_up(name: str) -> bool:
    """Whether XLA made this axis name up, since it had lost the user's names."""
    return re.fullmatch(r"axis_\d+", name) is not None


def _iota(text: str) -> np.ndarray:
    """Reads a list of ids: `[4,2]T(1,0)` -> arange(8).reshape(4, 2).transpose(1, 0), flat."""
    dims, _, order = text.rpartition("<=")[2].partition("T")
    ids = np.arange(math.prod(_ints(dims))).reshape(_ints(dims))
    return ids.transpose(_ints(order) or range(ids.ndim)).reshape(-1)


def _ints(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", text)]


def _rows(ids: np.ndarray) -> Groups:
    return tuple(map(tuple, ids.tolist()))


def _id_lists(text: str) -> Groups:
    return tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d,\s]+)\}", text))


def _connected(pairs: Groups) -> Groups:
    """Returns the sets that (source, target) pairs connect: (0, 1), (1, 2), (4, 5) -> (0, 1, 2), (4, 5)."""
    sets: list[set[int]] = []
    for pair in pairs:
        joined = set(pair).union(*(s for s in sets if s & set(pair)))
        sets = [s for s in sets if not s & joined] + [joined]
    return tuple(tuple(sorted(s)) for s in sets) or ((0,),)
