"""This module lists the collectives of a program."""

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

from moax.backend import platform
from moax.inspect.flow import Value
from moax.inspect.groups import named_mesh, varying_axes
from moax.inspect.hlo import Element, device_count
from moax.inspect.reading import HloCollective, read_collectives
from moax.mesh.axes import Axes, Names, as_names
from moax.mesh.specs import AnyMesh
from moax.text import align

Program = Callable[..., Any] | jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled | str
Over = str | Names | Axes  # axes that a collective is over

# By these passes XLA's CPU compiler runs bf16 collectives in f32, and f8 collectives in f16. A GPU does not widen them.
# The combiner is a problem too: it would merge widened reductions with others.
_WIDENED = ("bf16",)
_WIDENED_SMALL = ("f8e4m3fn", "f8e5m2", "f8e8m0fnu", "f8e4m3b11fnuz", "f8e4m3fnuz", "f8e5m2fnuz", "f8e4m3", "f8e3m4")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One array that a collective makes; a collective of several arrays is several `Collective`s.

    Attributes:
      kind: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
        "collective-broadcast".
      dtype: NumPy's name: "uint8", "bfloat16", "float8_e4m3fn".
      shape: the shape of the result on one device. An all-to-all that XLA:CPU cut into one piece for each peer has the
        shape (peers, *piece).
      bytes: the bytes that one device sends in one execution, by the ring algorithm. With b bytes of `shape` and groups
        of g devices, an all-gather or all-to-all sends b (g-1)/g, an all-reduce 2 b (g-1)/g, a reduce-scatter b (g-1),
        a permute or broadcast b. A ragged all-to-all counts as if its buffer were full.
      axes: the mesh axes over which the group varies, in the order of the mesh; () where the mesh is not known.
      op_name: the op it comes from, as in a profile; `custom_partitioning` keeps no scopes from inside an op.
      group_size: the devices g of a group.
      times: executions in one call of the function: the product of the trip counts of the scans around it. A branch
        of a `cond` counts as taken.
      open_loop: whether it is in a loop whose trip count the program does not state, such as a `while_loop`. That loop
        counts once in `times`.
      carries: the parameters of the program that the array is made of without a product or a reduction in between, such
        as a weight that was cast, quantized or cut. `Value.name` is the name of the argument, as in "params.wi".
      reaches: the results of the program that are made of the array in the same way, such as the gradient that comes of
        a reduce-scatter. `Value.name` is "result" and the place in the tree of results, as in "result[1].wi". Neither
        `carries` nor `reaches` takes part in `==`.
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
    carries: tuple[Value, ...] = dataclasses.field(default=(), compare=False)
    reaches: tuple[Value, ...] = dataclasses.field(default=(), compare=False)

    @property
    def size(self) -> int:
        """Elements of `shape`."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        what = f"{self.kind} {self.dtype}{list(self.shape)} over {join(self.axes)}"
        of = f" of {_name(self.carries)}" if self.carries else ""
        into = f" into {_name(self.reaches)}" if self.reaches else ""
        return f"{what}{of}{into}, {self.bytes:,} bytes, from {self.op_name or '?'}"


def collectives(
    fn: Program, *args: Any, mesh: AnyMesh | None = None, as_run: bool = False, **kwargs: Any
) -> list[Collective]:
    """Lists the collectives of `fn(*args, **kwargs)`. It compiles `fn` for the arguments' shardings, and runs nothing.

    Args:
      fn: a function, jitted or not. Without args it may also be a lowered or compiled function, or an optimized HLO
        text.
      args, kwargs: arrays, or ShapeDtypeStructs with shardings.
      mesh: the mesh whose axes to name. The default is that of the arguments' shardings, then that of the compiled
        program, then the mesh that `jax.set_mesh` set.
      as_run: read the program that a CPU runs, whose compiler widens bf16 and f8 collectives. By default the dtypes
        are those of the function, which a GPU moves. A compiled `fn` is read as it is.

    Returns:
      The collectives in the order of the program's text.

    Raises:
      ValueError: a compiled program was given with args, or the mesh has another size or order of devices.
    """
    return read(fn, args, kwargs, mesh, as_run)[0]


def total_bytes(
    found: Iterable[Collective],
    kind: str | None = None,
    axes: Over | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> int:
    """Sums the bytes that one device sends in one call of the program: the sum of `bytes * times`.

    Args:
      found: collectives, as `collectives` returns them.
      kind: count this kind alone, such as "all-gather"; None counts all kinds.
      axes: count the collectives whose groups vary over any of these mesh axes: a name, several names, or a
        `moax.Axes`, which stands for its fsdp. None counts all.
      dtype: count arrays of this dtype alone; None counts all.

    Returns:
      Bytes of one device, an int.
    """
    names = None if axes is None else axis_names(axes)
    return sum(
        c.bytes * c.times
        for c in found
        if (kind is None or c.kind == kind)
        and (names is None or set(names) & set(c.axes))
        and (dtype is None or c.dtype == jnp.dtype(dtype).name)
    )


def weight_gathers(found: Iterable[Collective], axes: Over = "fsdp") -> list[Collective]:
    """Selects the all-gathers of weights: those whose groups vary over any of `axes`.

    Args:
      found: collectives, as `collectives` returns them.
      axes: a mesh axis, several axes, or a `moax.Axes`, which stands for its fsdp. The block gathers nothing but
        weights over fsdp.

    Returns:
      The all-gathers, in the order of `found`.
    """
    return [c for c in found if c.kind == "all-gather" and set(axis_names(axes)) & set(c.axes)]


def weight_scatters(found: Iterable[Collective], axes: Over = "fsdp") -> list[Collective]:
    """Selects the collectives that sum gradients of weights over any of `axes`, and leave each device its shard.

    They are reduce-scatters, and the all-to-alls of `grad_reduce_dtype="bfloat16_sum_float32"`, whose elements are
    uint16.

    Args:
      found, axes: as for `weight_gathers`.

    Returns:
      The collectives, in the order of `found`.
    """
    names = set(axis_names(axes))
    over = [c for c in found if names & set(c.axes)]
    return [c for c in over if c.kind == "reduce-scatter" or (c.kind, c.dtype) == ("all-to-all", "uint16")]


def table(found: Iterable[Collective]) -> str:
    """Returns the collectives as a table of text.

    Args:
      found: collectives, as `collectives` returns them.

    Returns:
      A line for each collective, then a line for each kind and its axes, then the total. Equal collectives share a
      line, whose `times` counts all of them. The column `bytes/device` has the bytes that one device sends in one call.
      Names of ops are cut at 80 characters, since a GPU's compiler joins the names of collectives that it combines.
      The text is "no collectives" where there are none.
    """
    found = list(found)
    if not found:
        return "no collectives"
    rows = [("kind", "dtype", "shape", "axes", "times", "bytes/device", "op"), None]
    for c, count in Counter(found).items():
        times, shape = c.times * count, "x".join(map(str, c.shape)) or "scalar"
        often = f"{times}+" if c.open_loop else str(times)
        rows.append((c.kind, c.dtype, shape, join(c.axes), often, f"{c.bytes * times:,}", c.op_name[:80]))
    totals: dict[tuple[str, Names], list[Collective]] = {}
    for c in found:
        totals.setdefault((c.kind, c.axes), []).append(c)
    sums = [(kind, join(axes), equal) for (kind, axes), equal in sorted(totals.items())] + [("total", "", found)]
    rows.append(None)
    for kind, axes, members in sums:
        rows.append((kind, "", "", axes, str(sum(c.times for c in members)), f"{total_bytes(members):,}", ""))
    return align(rows, right=(4, 5))


def read(fn, args, kwargs, mesh, as_run) -> tuple[list[Collective], Names]:
    """Returns the collectives, and the names of the mesh axes; () where there is no mesh."""
    meshes = [m for m in map(named_mesh_of, jax.tree.leaves((args, kwargs))) if m is not None]
    given = isinstance(fn, str) or hasattr(fn, "as_text")
    if given and (args or kwargs):
        raise ValueError(f"fn is a {type(fn).__name__}, lowered or compiled for its arguments; pass no others")
    asked = False
    if not isinstance(fn, str) and not (given and not hasattr(fn, "compile")):
        fn, asked = _compile(_lower(fn, args, kwargs), not as_run and _emulates([mesh, *meshes]))
    text = fn if isinstance(fn, str) else fn.as_text()
    if not isinstance(fn, str):
        meshes += [m for m in map(named_mesh_of, jax.tree.leaves(_shardings(fn))) if m is not None]
    sizes = _mesh_sizes(mesh, meshes, text)
    instructions, results = read_collectives(text)
    results = results if isinstance(fn, str) else _name_results(fn, results)
    return [c for one in instructions for c in _of_instruction(one, results, sizes, asked)], tuple(sizes)


def _lower(fn, args, kwargs):
    """Returns `fn` lowered for its arguments; a lowered `fn` is returned as it is."""
    if hasattr(fn, "compile"):
        return fn
    if isinstance(fn, jax.stages.Traced):
        return fn.lower()
    if not callable(fn):
        raise ValueError(f"fn={fn!r} must be a function, lowered or compiled by jit or not, or an HLO text")
    lower = getattr(fn, "lower", None) or jax.jit(fn).lower
    return lower(*args, **kwargs)


def _compile(lowered, unwidened: bool):
    """Returns the compiled program, and whether its collectives have the dtypes that the function asked for."""
    for dtypes in (_WIDENED + _WIDENED_SMALL, _WIDENED) if unwidened else ():
        passes = [f"float-normalization-{dtype}" for dtype in dtypes] + ["cpu-all-reduce-combiner"]
        try:
            return lowered.compile(compiler_options={"xla_disable_hlo_passes": ",".join(passes)}), True
        except jax.errors.JaxRuntimeError:
            continue  # The CPU cannot compute with these dtypes without widening them.
    compiled = lowered.compile()
    if unwidened:
        warnings.warn("the collectives are those of XLA:CPU, which moves bf16 as f32 and f8 as f16", stacklevel=4)
    return compiled, False


def _emulates(meshes) -> bool:
    """Whether the program is for the devices of this CPU, and not compiled ahead of time for another machine."""
    devices = [m.devices.flat[0] for m in meshes if isinstance(m, jax.sharding.Mesh) and not m.empty]
    return platform() == "cpu" and (not devices or devices[0] in jax.devices())


def named_mesh_of(leaf):
    """Returns the mesh of a NamedSharding, or of an array that has one; None otherwise."""
    placed = leaf if isinstance(leaf, NamedSharding) else getattr(leaf, "sharding", None)
    return placed.mesh if isinstance(placed, NamedSharding) and not placed.mesh.empty else None


def _shardings(compiled) -> list:
    """Returns the shardings of a compiled program's inputs and outputs; [] where it does not tell them."""
    try:
        return [compiled.input_shardings, compiled.output_shardings]
    except (AttributeError, NotImplementedError):
        return []


def _mesh_sizes(mesh, meshes: Sequence, text: str) -> dict[str, int]:
    """Returns the axis sizes of the mesh whose axes to name; {} where no mesh fits.

    It is `mesh`, else the first of `meshes` and of the mesh that is set that has as many devices as the program, else
    the mesh that the program's text names.
    """
    devices = device_count(text)
    if mesh is not None:
        own = next((list(m.devices.flat) for m in meshes if isinstance(m, jax.sharding.Mesh)), None)
        reordered = own and isinstance(mesh, jax.sharding.Mesh) and list(mesh.devices.flat) != own
        if mesh.size != devices or reordered:
            raise ValueError(f"mesh={mesh} must have the program's {devices} devices, in their order")
        return dict(mesh.shape)
    current = jax.sharding.get_abstract_mesh()
    fitting = [dict(m.shape) for m in [*meshes, current] if not m.empty and m.size == devices]
    named = named_mesh(text)
    return fitting[0] if fitting else named if math.prod(named.values()) == devices else {}


def _name_results(compiled, results: Sequence[Value]) -> list[Value]:
    """Returns the results with their places in the tree of results, and their shapes on all devices, where known."""
    try:
        known = jax.tree_util.tree_flatten_with_path(compiled.out_info)[0]
    except (AttributeError, NotImplementedError):
        return list(results)
    if len(known) != len(results):
        return list(results)
    return [
        value._replace(name=f"result{jax.tree_util.keystr(path)}", whole=tuple(leaf.shape))
        for value, (path, leaf) in zip(results, known, strict=True)
    ]


def _of_instruction(
    one: HloCollective, results: Sequence[Value], sizes: dict[str, int], asked: bool
) -> list[Collective]:
    """Returns a `Collective` for each array of an instruction; `asked` undoes XLA's promotion of bf16 reductions."""
    axes = varying_axes(one.groups, sizes) if sizes else one.names
    elements = one.elements
    if asked and one.promoted and [e.dtype for e in elements] == ["float32"]:
        elements = (Element("bfloat16", 16, elements[0].shape),)
    ran = (one.op_name, one.group_size, one.times, one.open_loop)
    return [
        Collective(
            one.kind, e.dtype, e.shape, one.sent(e), axes, *ran, flow.carries, tuple(results[i] for i in flow.reaches)
        )
        for e, flow in zip(elements, one.flows, strict=True)
    ]


def axis_names(axes: Over) -> Names:
    """Returns the names of mesh axes; a `moax.Axes` stands for its fsdp."""
    return as_names(axes.fsdp if isinstance(axes, Axes) else axes)


def _name(values: Sequence[Value], most: int = 3) -> str:
    """Returns the names of the first values, with commas between them, and the number of the others."""
    others = f" and {len(values) - most} more" if len(values) > most else ""
    return join([value.name for value in values[:most]]) + others


def join(names: Sequence[str]) -> str:
    """Returns the names with commas between them; "-" for no names."""
    return ",".join(names) or "-"
