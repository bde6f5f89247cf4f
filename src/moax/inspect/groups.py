"""This module reads the device groups of a collective from the text of an HLO program, and names their mesh axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np

from moax.inspect.hlo import split

Groups = tuple[tuple[int, ...], ...]

_GROUPS = re.compile(
    r"replica_groups=("
    r"mesh\[[^\]]*\](?:,\s*device_ids=\([^()]*(?:\([^()]*\))?\))?\s*\{[^}]*\}"
    r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|\{\s*\{.*?\}\s*\}|\{\s*\})"
)
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(([^()]*(?:\([^()]*\))?)\))?")


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


def device_groups(kind: str, attributes: str, replicas: int, partitions: int) -> tuple[Groups, tuple[str, ...]]:
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
    wanted = [_axis_reference(a) for a in split(text[text.rindex("{") + 1 : -1])]
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
    pairs = (entry.rpartition("=") for entry in split(text))
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
