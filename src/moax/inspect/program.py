"""The collectives of a compiled program, and the checks of a user's own tests on them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from moax.backend import platform
from moax.inspect import hlo
from moax.mesh.axes import Axes, Names, as_names
from moax.mesh.specs import AnyMesh
from moax.text import align

Program = Callable[..., Any] | jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled | str
Over = str | Names | Axes  # axes that a collective is over

# XLA's CPU compiler runs bf16 collectives in f32 and f8 ones in f16, by these passes; a GPU moves them as they are.
# The combiner would merge reductions that were widened with others that were not.
_WIDENED = ("bf16",)
_WIDENED_SMALL = ("f8e4m3fn", "f8e5m2", "f8e8m0fnu", "f8e4m3b11fnuz", "f8e4m3fnuz", "f8e5m2fnuz", "f8e4m3", "f8e3m4")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that a collective makes; a collective of several arrays is several of these.

    Attributes:
      kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
        "collective-broadcast".
      dtype: NumPy's name: "uint8", "bfloat16", "float8_e4m3fn".
      shape: of the result on one device: gathered, reduced, scattered. An all-to-all that XLA:CPU has cut into one
        piece for each peer is (peers, *piece).
      bytes: what one device sends in one execution, by the ring algorithm, for b the bytes of `shape` and groups of
        g: all-gather and all-to-all b (g-1)/g, all-reduce 2 b (g-1)/g, reduce-scatter b (g-1), permute and broadcast
        b. A ragged all-to-all is counted as if its buffer were full.
      axes: the mesh axes over which the group varies, in the mesh's order; () where the mesh is not known.
      op_name: the op it comes from, as in a profile; `custom_partitioning` keeps no scopes from inside an op.
      group_size: g.
      times: executions in one call of the function: the trip counts of the scans around it, multiplied. A branch of
        a `cond` counts as taken.
      open_loop: it is in a loop whose trip count the program does not state (`while_loop`), counted once in `times`.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    axes: Names
    op_name: str
    group_size: int = 1
    times: int = 1
    open_loop: bool = False

    @property
    def size(self) -> int:
        """Elements of `shape`."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.kind} {self.dtype}{list(self.shape)} over {_join(self.axes)} from {self.op_name or '?'}"


def collectives(
    fn: Program, *args: Any, mesh: AnyMesh | None = None, as_run: bool = False, **kwargs: Any
) -> list[Collective]:
    """The collectives of `fn(*args, **kwargs)`, compiled for the arguments' shardings; nothing runs.

    Args:
      fn: a function, jitted or not; or what jit's `lower` or `compile` made of one, or an optimized HLO text, each
        without args.
      args, kwargs: arrays, or ShapeDtypeStructs with shardings.
      mesh: whose axes to name; by default that of the arguments' shardings, else of the compiled program's, else the
        one set by `jax.set_mesh`.
      as_run: read the program that a CPU runs, whose compiler widens bf16 and f8 collectives. By default the dtypes
        are those the function asked for, which is what a GPU moves. What is already compiled is read as it is.

    Returns:
      The collectives in the order of the program's text.

    Raises:
      ValueError: args with a compiled program, or a mesh of another size or order of devices.
    """
    return _read(fn, args, kwargs, mesh, as_run)[0]


def total_bytes(
    found: Iterable[Collective],
    kind: str | None = None,
    axes: Over | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> int:
    """The bytes that one device sends in one call of the program: the sum of `bytes * times`.

    Args:
      found: collectives, as `collectives` returns them.
      kind: count this kind alone, such as "all-gather"; None counts all kinds.
      axes: count the collectives whose groups vary over any of these mesh axes: a name, several names, or a
        `moax.Axes`, which stands for its fsdp. None counts all.
      dtype: count arrays of this dtype alone; None counts all.

    Returns:
      Bytes of one device, an int.
    """
    names = None if axes is None else _names(axes)
    return sum(
        c.bytes * c.times
        for c in found
        if (kind is None or c.kind == kind)
        and (names is None or set(names) & set(c.axes))
        and (dtype is None or c.dtype == jnp.dtype(dtype).name)
    )


def weight_gathers(found: Iterable[Collective], axes: Over = "fsdp") -> list[Collective]:
    """The all-gathers of weights: those whose groups vary over any of `axes`.

    Args:
      found: collectives, as `collectives` returns them.
      axes: a mesh axis, several, or a `moax.Axes`, which stands for its fsdp: the block gathers nothing but weights
        over fsdp.

    Returns:
      The all-gathers, in the order of `found`.
    """
    return [c for c in found if c.kind == "all-gather" and set(_names(axes)) & set(c.axes)]


def table(found: Iterable[Collective]) -> str:
    """The collectives as a table of text, for people.

    Args:
      found: collectives, as `collectives` returns them.

    Returns:
      A line for each collective, where equal ones share a line and `times` counts them all; then a line for each kind
      and its axes; then the total. The column `bytes/device` has the bytes that one device sends in one call. Names of
      ops are cut at 80 characters, for a GPU's compiler that combines collectives joins their names. Without a
      collective: "no collectives".
    """
    found = list(found)
    if not found:
        return "no collectives"
    rows = [("kind", "dtype", "shape", "axes", "times", "bytes/device", "op"), None]
    for c, count in Counter(found).items():
        times, shape = c.times * count, "x".join(map(str, c.shape)) or "scalar"
        often = f"{times}+" if c.open_loop else str(times)
        rows.append((c.kind, c.dtype, shape, _join(c.axes), often, f"{c.bytes * times:,}", c.op_name[:80]))
    totals: dict[tuple[str, Names], list[Collective]] = {}
    for c in found:
        totals.setdefault((c.kind, c.axes), []).append(c)
    sums = [(kind, _join(axes), of) for (kind, axes), of in sorted(totals.items())] + [("total", "", found)]
    rows += [None, *((k, "", "", a, str(sum(c.times for c in of)), f"{total_bytes(of):,}", "") for k, a, of in sums)]
    return align(rows, right=(4, 5))


def assert_no_wide_weight_gather(
    fn: Program | Sequence[Collective],
    *args: Any,
    axes: Over = "fsdp",
    min_elements: int | None = None,
    weights: PyTree | None = None,
    mesh: AnyMesh | None = None,
    **kwargs: Any,
) -> list[Collective]:
    """Weights cross `axes` as bytes: no floating-point all-gather of two or more bytes an element over them makes
    `min_elements` or more. Scales are floats too: `min_elements` tells a weight from its scales.

    Args:
      fn, args, kwargs, mesh: as for `collectives`; or fn is the list that it returned.
      axes: a mesh axis, several, or a `moax.Axes`: its fsdp.
      min_elements: by default the smallest shard of `weights`, a tree of arrays or ShapeDtypeStructs: of those
        sharded over `axes`. Leave out biases, which are not quantized.

    Returns:
      All collectives of the program.

    Raises:
      AssertionError: a floating-point weight crosses `axes`; the message lists each of them.
      ValueError: nothing to judge by: an axis that the mesh lacks (an axis of a `moax.Axes` counts as size 1 there), or
        an unknown mesh.
    """
    found, names = _judged(fn, args, kwargs, axes, mesh)
    least = _min_elements(min_elements, weights, names)
    offenders = [c for c in weight_gathers(found, names) if _is_wide(c) and c.size >= least]
    _refuse(offenders, f"floating-point all-gathers over {_join(names)} of {least} elements or more")
    return found


def assert_reduce_scattered(
    fn: Program | Sequence[Collective],
    *args: Any,
    axes: Over = "fsdp",
    min_elements: int | None = None,
    weights: PyTree | None = None,
    mesh: AnyMesh | None = None,
    **kwargs: Any,
) -> list[Collective]:
    """Weight gradients leave by reduce-scatter over `axes`: there is one, and no all-reduce over them of
    `min_elements` floats or more. Arguments, result and errors as for `assert_no_wide_weight_gather`.

    Gradients that jit's own partitioner reduces are all-reduced and sliced on CPU, where a GPU's compiler makes it one
    reduce-scatter.
    """
    found, names = _judged(fn, args, kwargs, axes, mesh)
    least = _min_elements(min_elements, weights, names)
    over = [c for c in found if set(names) & set(c.axes)]
    offenders = [c for c in over if c.kind == "all-reduce" and _is_float(c) and c.size >= least]
    _refuse(offenders, f"all-reduces over {_join(names)} of {least} floats or more")
    if not any(c.kind == "reduce-scatter" for c in over):
        raise AssertionError(f"no reduce-scatter over {_join(names)}; the collectives are\n{table(found)}")
    return found


def _read(fn, args, kwargs, mesh, as_run) -> tuple[list[Collective], Names]:
    """The collectives, and the names of the mesh's axes; () where there is no mesh."""
    meshes = [m for m in map(_mesh_of, jax.tree.leaves((args, kwargs))) if m is not None]
    given = isinstance(fn, str) or hasattr(fn, "as_text")
    if given and (args or kwargs):
        raise ValueError(f"fn is a {type(fn).__name__}, lowered or compiled for its arguments; pass no others")
    asked = False
    if not isinstance(fn, str) and not (given and not hasattr(fn, "compile")):
        fn, asked = _compile(_lower(fn, args, kwargs), not as_run and _emulates([mesh, *meshes]))
    text = fn if isinstance(fn, str) else fn.as_text()
    if not isinstance(fn, str):
        meshes += [m for m in map(_mesh_of, jax.tree.leaves(_shardings(fn))) if m is not None]
    sizes = _mesh_sizes(mesh, meshes, text)
    return [c for one in hlo.read_collectives(text) for c in _of_instruction(one, sizes, asked)], tuple(sizes)


def _lower(fn, args, kwargs):
    if hasattr(fn, "compile"):
        return fn
    if isinstance(fn, jax.stages.Traced):
        return fn.lower()
    if not callable(fn):
        raise ValueError(f"fn={fn!r} must be a function, lowered or compiled by jit or not, or an HLO text")
    lower = getattr(fn, "lower", None) or jax.jit(fn).lower
    return lower(*args, **kwargs)


def _compile(lowered, unwidened: bool):
    """The compiled program, and whether its collectives have the dtypes that the function asked for."""
    for dtypes in (_WIDENED + _WIDENED_SMALL, _WIDENED) if unwidened else ():
        passes = [f"float-normalization-{dtype}" for dtype in dtypes] + ["cpu-all-reduce-combiner"]
        try:
            return lowered.compile(compiler_options={"xla_disable_hlo_passes": ",".join(passes)}), True
        except jax.errors.JaxRuntimeError:
            continue  # the CPU cannot compute with these dtypes as they are
    compiled = lowered.compile()
    if unwidened:
        warnings.warn("the collectives are those of XLA:CPU, which moves bf16 as f32 and f8 as f16", stacklevel=4)
    return compiled, False


def _emulates(meshes) -> bool:
    """Whether the program is for the CPU's devices: not for a mesh of another machine's, compiled for ahead of time."""
    devices = [m.devices.flat[0] for m in meshes if isinstance(m, jax.sharding.Mesh) and not m.empty]
    return platform() == "cpu" and (not devices or devices[0] in jax.devices())


def _mesh_of(leaf):
    placed = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
    return placed.mesh if isinstance(placed, NamedSharding) and not placed.mesh.empty else None


def _shardings(compiled) -> list:
    try:
        return [compiled.input_shardings, compiled.output_shardings]
    except (AttributeError, NotImplementedError):
        return []


def _mesh_sizes(mesh, meshes: Sequence, text: str) -> dict[str, int]:
    """Axis sizes of the mesh whose axes to name: `mesh`, else the first of the program's that fits it."""
    devices = hlo.device_count(text)
    if mesh is not None:
        own = next((list(m.devices.flat) for m in meshes if isinstance(m, jax.sharding.Mesh)), None)
        reordered = own and isinstance(mesh, jax.sharding.Mesh) and list(mesh.devices.flat) != own
        if mesh.size != devices or reordered:
            raise ValueError(f"mesh={mesh} must have the program's {devices} devices, in their order")
        return dict(mesh.shape)
    current = jax.sharding.get_abstract_mesh()
    fitting = [dict(m.shape) for m in [*meshes, current] if not m.empty and m.size == devices]
    named = hlo.named_mesh(text)
    return fitting[0] if fitting else named if math.prod(named.values()) == devices else {}


def _of_instruction(one: hlo.HloCollective, sizes: dict[str, int], asked: bool) -> list[Collective]:
    axes = hlo.varying_axes(one.groups, sizes) if sizes else one.names
    elements = one.elements
    if asked and one.promoted and [e.dtype for e in elements] == ["float32"]:
        elements = (hlo.Element("bfloat16", 16, elements[0].shape),)
    ran = (one.op_name, one.group_size, one.times, one.open_loop)
    return [Collective(one.kind, e.dtype, e.shape, one.sent(e), axes, *ran) for e in elements]


def _names(axes) -> Names:
    return as_names(axes.fsdp if isinstance(axes, Axes) else axes)


def _judged(fn, args, kwargs, axes, mesh) -> tuple[list[Collective], Names]:
    names = _names(axes)
    if not isinstance(fn, str) and isinstance(fn, Sequence):
        return list(fn), names
    found, known = _read(fn, args, kwargs, mesh, as_run=False)
    if not known and any(c.group_size > 1 and not c.axes for c in found):
        raise ValueError(f"{axes=}: the program's mesh is not known; pass mesh=")
    missing = [] if isinstance(axes, Axes) else [n for n in names if known and n not in known]
    if missing:
        raise ValueError(f"{axes=}: the mesh has no axis {_join(missing)}; its axes are {_join(known)}")
    return found, names


def _min_elements(min_elements, weights, names: Names) -> int:
    if min_elements is not None:
        if isinstance(min_elements, bool) or not isinstance(min_elements, int) or min_elements < 1:
            raise ValueError(f"{min_elements=} must be an int of at least 1")
        return min_elements
    if weights is None:
        raise ValueError("pass min_elements=, or weights= to take their smallest shard's")
    sizes = []
    for leaf in jax.tree.leaves(weights):
        spec = leaf.sharding.spec if _mesh_of(leaf) is not None else ()
        if any(set(as_names(entry)) & set(names) for entry in spec):
            sizes.append(math.prod(leaf.sharding.shard_shape(leaf.shape)))
    if not sizes:
        raise ValueError(f"weights: none is sharded over {_join(names)}; pass min_elements=")
    return min(sizes)


def _is_float(c: Collective) -> bool:
    return c.dtype.startswith(("float", "bfloat", "complex"))


def _is_wide(c: Collective) -> bool:
    return _is_float(c) and not c.dtype.startswith(("float8", "float4"))


def _refuse(offenders: Sequence[Collective], what: str) -> None:
    if offenders:
        raise AssertionError("\n  ".join([f"{len(offenders)} {what}:", *map(str, offenders)]))


def _join(names: Sequence[str]) -> str:
    return ",".join(names) or "-"
