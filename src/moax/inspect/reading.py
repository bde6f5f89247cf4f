"""This module reads the collectives of an HLO program: what they make, over which devices, how often, and of what."""

from __future__ import annotations

import dataclasses
import re

from moax.inspect.flow import Flow, Value, trace
from moax.inspect.groups import Groups, device_groups
from moax.inspect.hlo import KINDS, Element, read_program


@dataclasses.dataclass(frozen=True)
class HloCollective:
    """One collective instruction.

    Attributes:
      kind: one of `KINDS`.
      elements: its results; it has several where XLA combined several collectives into one.
      flows: for each result, the parameters that it carries and the results of the program that it reaches.
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
    flows: tuple[Flow, ...]
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


def read_collectives(text: str) -> tuple[list[HloCollective], list[Value]]:
    """Returns every collective of an optimized HLO program, in the order of the text, and the program's results.

    An asynchronous collective stands at its start. ValueError is raised for device groups of an unknown form.
    """
    program = read_program(text)
    flow, results = trace(program)
    read = []
    for computation, instructions in program.computations.items():
        times, open_loop = program.times(computation)
        for one in instructions:
            if one.kind not in KINDS or program.wraps_collective(one):
                continue
            groups, names = device_groups(one.kind, one.attributes, program.replicas, program.partitions)
            elements, flows = one.elements, flow(computation, one)
            in_pieces = len(elements) == len(groups[0]) > 1 and "dimensions=" not in one.attributes
            if one.kind == "all-to-all" and in_pieces:
                # XLA made an operand of the piece for each peer; the user has one array.
                elements = (elements[0]._replace(shape=(len(elements), *elements[0].shape)),)
                flows = (Flow.union(flows),)
            read.append(
                HloCollective(
                    kind=one.kind,
                    elements=elements,
                    flows=flows,
                    groups=groups,
                    names=names,
                    times=times,
                    open_loop=open_loop,
                    promoted=re.search(r"to_apply=%?[\w.\-]+_promoted\b", one.attributes) is not None,
                    op_name=one.op_name,
                )
            )
    return read, results
