"""This module reads the computations and instructions of an optimized HLO program of XLA's CPU or GPU compiler."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Element(NamedTuple):
    """One array of an instruction's result.

    Attributes:
      dtype: NumPy's name, such as "bfloat16".
      bits: bits of one element.
      shape: the shape on one device.
    """

    dtype: str
    bits: int
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements of the array."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the array."""
        return -(-self.size * self.bits // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation, such as `%y = f32[8]{0} add(%a, %b), metadata={...}`.

    Attributes:
      name: the name of the result, here "y".
      type: the text of the result's type, here "f32[8]{0}".
      opcode: the operation, here "add".
      arguments: the text between the parentheses, here "%a, %b".
      attributes: the text after the parentheses.
      root: whether its result is the result of the computation.
    """

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str
    root: bool

    @property
    def kind(self) -> str:
        """The opcode without the ending -start of an asynchronous operation."""
        return self.opcode.removesuffix("-start")

    @property
    def starts(self) -> bool:
        """Whether this instruction starts an asynchronous operation."""
        return self.opcode.endswith("-start")

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands; a text may print the type of an operand before its name."""
        return tuple(operand.split()[-1].lstrip("%") for operand in split(self.arguments))

    @functools.cached_property
    def elements(self) -> tuple[Element, ...]:
        """The arrays of the result. The type of a start is (operands, results, ...), or for some kinds the results."""
        if self.starts and self.type.startswith("("):
            parts = split(self.type[1:-1])
            if len(parts) > 1 and len(leaves(parts[0])) == len(self.operands):
                return leaves(parts[1])
        return leaves(self.type)

    @property
    def calls(self) -> tuple[tuple[str, str], ...]:
        """(attribute, computation) for each computation that the instruction calls, such as ("body", "while_body")."""
        return tuple(
            (match.group(1), callee.strip().lstrip("%"))
            for match in _CALLED.finditer(self.attributes)
            for callee in match.group(2).strip("{}").split(",")
        )

    @property
    def op_name(self) -> str:
        """The op of the user's program that the instruction comes from; of a parameter, the argument's name."""
        match = _OP_NAME.search(self.attributes)
        return match.group(1) if match else ""


@dataclasses.dataclass(frozen=True)
class Program:
    """An HLO program.

    Attributes:
      computations: the instructions of each computation, in the order of the text, by the computation's name.
      entry: the name of the computation that the program runs.
      replicas, partitions: their product is the number of devices.
    """

    computations: Mapping[str, Sequence[Instruction]]
    entry: str
    replicas: int
    partitions: int
    _known_sizes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def callers(self) -> dict[str, list[tuple[str, int, bool]]]:
        """{computation: [(caller, calls in one run of the caller, whether that number is unknown)]}."""
        callers: dict[str, list[tuple[str, int, bool]]] = {}
        for name, instructions in self.computations.items():
            for one in instructions:
                if one.opcode.endswith(("-done", "-update")):
                    continue  # This line names the computation that its start runs.
                trips = _TRIPS.search(one.attributes)
                for how, callee in one.calls:
                    many = int(trips.group(1)) if trips and how == "body" else 1
                    callers.setdefault(callee, []).append((name, many, how == "body" and trips is None))
        return callers

    def times(self, computation: str) -> tuple[int, bool]:
        """Returns how often it runs, all branches taken, and whether a loop around it has no trip count."""
        if computation == self.entry or computation not in self.callers:
            return 1, False
        above = [(many, unknown, *self.times(caller)) for caller, many, unknown in self.callers[computation]]
        return sum(m * times for m, _, times, _ in above), any(u or is_open for _, u, _, is_open in above)

    def size(self, computation: str, name: str) -> int:
        """Returns the elements of the result of an instruction; 0 where the computation has none of this name."""
        return self._sizes(computation).get(name, 0)

    def _sizes(self, computation: str) -> dict[str, int]:
        if computation not in self._known_sizes:
            instructions = self.computations[computation]
            self._known_sizes[computation] = {one.name: sum(e.size for e in one.elements) for one in instructions}
        return self._known_sizes[computation]

    def wraps_collective(self, one: Instruction) -> bool:
        """Returns whether the instruction starts a computation that holds a collective."""
        called = [callee for _, callee in one.calls]
        return one.starts and any(inner.kind in KINDS for c in called for inner in self.computations.get(c, ()))


_HEADER = re.compile(r"^\s*(ENTRY\s+)?%?([\w.\-]+)\s.*\{\s*$")
_NAME = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s*$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


def read_program(text: str) -> Program:
    """Reads the text of an HLO program."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        header = _HEADER.match(line) if " = " not in line else None
        if header:
            current = computations.setdefault(header.group(2), [])
            entry = header.group(2) if header.group(1) else entry
        elif current is not None and (one := _instruction(line)) is not None:
            current.append(one)
    return Program(computations, entry, _count(text, "replica_count"), _count(text, "num_partitions"))


def device_count(text: str) -> int:
    """Returns the number of devices that the program runs on, which its header states."""
    return _count(text, "replica_count") * _count(text, "num_partitions")


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


def split(text: str) -> list[str]:
    """Splits text at the commas outside all brackets: "a, f(b, c)" -> ["a", "f(b, c)"]."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"[(\[{}\]),]", text):
        c = match.group()
        depth += 1 if c in "([{" else -1 if c in ")]}" else 0
        if c == "," and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in (*parts, text[start:]) if part.strip()]


def leaves(type_text: str) -> tuple[Element, ...]:
    """Returns the arrays of an HLO type: "(f32[2,3]{1,0}, u8[4])" has two."""
    types = re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", re.sub(r"\{[^}]*\}", "", type_text))
    arrays = [(dtype, shape) for dtype, shape in types if dtype != "token"]
    return tuple(
        Element(*dtype_name(d), tuple(int(n.strip(" <=")) for n in s.split(",") if n.strip())) for d, s in arrays
    )


def _count(text: str, name: str) -> int:
    """Returns the number `name` of the program's header; 1 where the header does not state it."""
    match = re.search(rf"^\s*HloModule\b.*\b{name}=(\d+)", text, re.MULTILINE)
    return int(match.group(1)) if match else 1


def _instruction(line: str) -> Instruction | None:
    """Reads a line of a computation; None for a line that is no instruction."""
    left, equals, rest = line.partition(" = ")
    name = _NAME.match(left)
    if not equals or name is None:
        return None
    rest = rest.lstrip()
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    arguments, attributes = rest[opcode.end() : close - 1], rest[close:]
    return Instruction(name.group(2), rest[:end], opcode.group(1), arguments, attributes, name.group(1) is not None)


def _closing(text: str, opening: int) -> int:
    """Returns the index after the parenthesis that closes the one at index `opening`: 6 for "(a(b))" and 0."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, opening):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


_PARENTHESIS = re.compile(r"[()]")
