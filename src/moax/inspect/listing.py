"""This module lists the collectives of a program."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from moax.backend import platform
from moax.inspect.flow import Value, trace
from moax.inspect.hlo import Element, Hlo, device_groups, read_hlo, varying_axes
from moax.mesh.axes import Names, as_names
from moax.mesh.specs import AnyMesh
from moax.text import align

Program = Callable[..., Any] | jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled | str
Over = str | Sequence[str]  # one or several mesh axes

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
      group_size: the devices g of a group; a source and a target of a permute are one.
      times: executions in one call: the product of the trip counts of the scans around it, all branches taken.
      open_loop: whether it is in a loop whose trip count the program does not state, such as a `while_loop`. That loop
        counts once in `times`.
      carries: the parameters of the program that the array is made of without a product or a reduction in between, such
        as a weight that was cast, quantized or cut. Equality ignores `carries` and `reaches`.
      reaches: the results of the program that are made of the array in the same way, such as a gradient.
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
        text = f"{self.kind} {self.dtype}{list(self.shape)} over {join(self.axes)}"
        for word, values in (("of", self.carries), ("into", self.reaches)):
            if values:
                more = f" and {len(values) - 3} more" if len(values) > 3 else ""
                text += f" {word} {join([value.name for value in values[:3]])}{more}"
        return f"{text}, {self.bytes:,} bytes, from {self.op_name or '?'}"


def collectives(fn: Program, *args: Any, mesh: AnyMesh | None = None, **kwargs: Any) -> list[Collective]:
    """Lists the collectives of `fn(*args, **kwargs)`. It compiles `fn` for the arguments' shardings, and runs nothing.

    The dtypes are those of the function, which a GPU moves; XLA's CPU compiler would widen bf16 and f8. A compiled `fn`
    is read as it is.

    Args:
      fn: a function, jitted or not. Without args it may also be traced, lowered or compiled, or an optimized HLO text.
      args, kwargs: arrays, or ShapeDtypeStructs with shardings.
      mesh: the mesh whose axes to name. The default is that of the arguments' shardings, then that of the compiled
        program, then the mesh that `jax.set_mesh` set.

    Returns:
      The collectives in the order of the program's text.

    Raises:
      ValueError: a compiled program was given with args, or the mesh has another size or order of devices.
    """
    return read(fn, args, kwargs, mesh)[0]


def total_bytes(
    found: Iterable[Collective],
    kind: str | None = None,
    axes: Over | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> int:
    """Sums the bytes that one device sends in one call of the program: the sum of `bytes * times`.

    A kind such as "all-gather", mesh axes, or a dtype counts the collectives that have it alone.
    """
    counted = found if axes is None else over(found, axes)
    counted = [c for c in counted if kind in (None, c.kind) and (dtype is None or c.dtype == jnp.dtype(dtype).name)]
    return sum(c.bytes * c.times for c in counted)


def weight_gathers(found: Iterable[Collective], axes: Over = "fsdp") -> list[Collective]:
    """Selects the all-gathers over any of the mesh axes `axes`; the block gathers nothing but weights over fsdp."""
    return [c for c in over(found, axes) if c.kind == "all-gather"]


def weight_scatters(found: Iterable[Collective], axes: Over = "fsdp") -> list[Collective]:
    """Selects the collectives that sum gradients of weights over any of `axes`, and leave each device its shard.

    They are reduce-scatters, and the all-to-alls of uint16 that `grad_reduce_dtype="bfloat16_sum_float32"` makes.
    """
    pieces = ("all-to-all", "uint16")
    return [c for c in over(found, axes) if c.kind == "reduce-scatter" or (c.kind, c.dtype) == pieces]


def table(found: Iterable[Collective]) -> str:
    """Returns the collectives as a table of text: a line for each, then one for each kind and its axes, then the total.

    Equal collectives share a line. `bytes/device` has the bytes that one device sends in one call. Names of ops are cut
    at 80 characters, since a GPU's compiler joins the names of collectives that it combines.
    """
    found = list(found)
    if not found:
        return "no collectives"
    rows = [("kind", "dtype", "shape", "axes", "times", "bytes/device", "op"), None]
    for c, count in Counter(found).items():
        times, shape = c.times * count, "x".join(map(str, c.shape)) or "scalar"
        often = f"{times}+" if c.open_loop else str(times)
        rows.append((c.kind, c.dtype, shape, join(c.axes), often, f"{c.bytes * times:,}", c.op_name[:80]))
    rows.append(None)
    for kind, axes in (*sorted({(c.kind, c.axes) for c in found}), ("total", ())):
        members = [c for c in found if (c.kind, c.axes) == (kind, axes) or kind == "total"]
        times = sum(c.times for c in members)
        rows.append((kind, "", "", ",".join(axes), str(times), f"{total_bytes(members):,}", ""))
    return align(rows, right=(4, 5))


def over(found: Iterable[Collective], axes: Over) -> list[Collective]:
    """Returns the collectives over any of `axes`."""
    names = set(axis_names(axes))
    return [c for c in found if names & set(c.axes)]


def axis_names(axes: Over) -> Names:
    """Returns the names of mesh axes; raises ValueError for anything else, which no collective would match."""
    names = as_names(axes)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"axes={axes!r} must be a mesh axis or several; of a moax.Axes, give a role: axes.fsdp")
    return names


def join(names: Sequence[str]) -> str:
    """Returns the names with commas between them; "-" for no names."""
    return ",".join(names) or "-"


def read(fn: Any, args, kwargs, mesh: AnyMesh | None) -> tuple[list[Collective], Names]:
    """Returns the collectives, and the names of the mesh axes; () where the mesh is not known."""
    given = isinstance(fn, str) or hasattr(fn, "as_text")
    if given and (args or kwargs):
        raise ValueError(f"fn is a {type(fn).__name__}, lowered or compiled for its arguments; pass no others")
    if not (given or callable(fn) or hasattr(fn, "lower")):
        raise ValueError(f"fn={fn!r} must be a function, lowered or compiled by jit or not, or an HLO text")
    meshes = _meshes((args, kwargs))
    compiled: Any = fn
    unwidened = False
    if not given or hasattr(fn, "compile"):
        lowered = fn if given else (getattr(fn, "lower", None) or jax.jit(fn).lower)(*args, **kwargs)
        compiled, unwidened = _compile(lowered, [mesh, *meshes])
    meshes += _meshes([_told(compiled, "input_shardings"), _told(compiled, "output_shardings")])
    leaves = jax.tree_util.tree_flatten_with_path(_told(compiled, "out_info"))[0]
    results = [Value(f"result{jax.tree_util.keystr(path)}", (), tuple(leaf.shape)) for path, leaf in leaves]
    program = read_hlo(compiled if isinstance(compiled, str) else compiled.as_text())
    sizes = _mesh_sizes(mesh, meshes, program.devices)
    return list(_collectives(program, results, sizes, unwidened)), tuple(sizes)


def _told(compiled, what: str):
    """Returns an attribute of a compiled program; () where it does not tell it."""
    try:
        return getattr(compiled, what)
    except (AttributeError, NotImplementedError):
        return ()


def _meshes(tree) -> list[AnyMesh]:
    """Returns the meshes of the NamedShardings in a tree, or of its arrays."""
    shardings = (getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(tree))
    return [s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty]


def _compile(lowered: Any, meshes: Sequence[AnyMesh | None]) -> tuple[Any, bool]:
    """Returns the compiled program, and whether XLA's CPU compiler was kept from widening its collectives."""
    devices = [device for mesh in meshes if isinstance(mesh, Mesh) for device in mesh.devices.flat[:1]]
    if platform() != "cpu" or not set(devices) <= set(jax.devices()):  # for a GPU, perhaps compiled ahead of time
        return lowered.compile(), False
    for dtypes in (_WIDENED + _WIDENED_SMALL, _WIDENED):
        passes = [f"float-normalization-{dtype}" for dtype in dtypes] + ["cpu-all-reduce-combiner"]
        try:
            return lowered.compile(compiler_options={"xla_disable_hlo_passes": ",".join(passes)}), True
        except jax.errors.JaxRuntimeError:
            continue  # The CPU cannot compute with these dtypes without widening them.
    warnings.warn("the collectives are those of XLA:CPU, which moves bf16 as f32 and f8 as f16", stacklevel=4)
    return lowered.compile(), False


def _mesh_sizes(mesh: AnyMesh | None, meshes: Sequence[AnyMesh], devices: int) -> Mapping[str, int]:
    """Returns the axis sizes of `mesh`, or of the first mesh that fits the program; {} where none does."""
    if mesh is None:
        known = [*meshes, jax.sharding.get_abstract_mesh()]
        return next((dict(m.shape) for m in known if not m.empty and m.size == devices), {})
    own = next((list(m.devices.flat) for m in meshes if isinstance(m, Mesh)), None)
    reordered = own and isinstance(mesh, Mesh) and list(mesh.devices.flat) != own
    if mesh.size != devices or reordered:
        raise ValueError(f"mesh={mesh} must have the program's {devices} devices, in their order")
    return dict(mesh.shape)


def _collectives(
    program: Hlo, results: Sequence[Value], sizes: Mapping[str, int], unwidened: bool
) -> Iterator[Collective]:
    """Yields a `Collective` for each array; `unwidened` undoes XLA's promotion of bf16 reductions."""
    flows = trace(program, results)
    for computation, instructions in program.computations.items():
        times, open_loop = program.runs[computation]
        for one in (i for i in instructions.values() if i.is_collective):
            groups = device_groups(one, program.devices)
            promoted = unwidened and re.search(r"to_apply=%?[\w.\-]+_promoted\b", one.attributes)
            for i, element in enumerate(one.elements):
                if promoted and len(one.elements) == 1 and element.dtype == "float32":
                    element = Element("bfloat16", 16, element.shape)
                devices = max(map(len, groups))
                carries, reaches = flows.get((computation, one.name, i), ((), ()))
                yield Collective(
                    kind=one.kind,
                    dtype=element.dtype,
                    shape=element.shape,
                    bytes=_sent(one.kind, element.bytes, devices),
                    axes=varying_axes(groups, sizes) if sizes else (),
                    op_name=one.op_name,
                    group_size=devices,
                    times=times,
                    open_loop=open_loop,
                    carries=tuple(carries),
                    reaches=tuple(reaches),
                )


def _sent(kind: str, b: int, g: int) -> int:
    """Returns the bytes that one of `g` devices sends for a result of `b` bytes, by the ring algorithm."""
    if kind in ("collective-permute", "collective-broadcast"):
        return b if g > 1 else 0
    if kind == "reduce-scatter":
        return b * (g - 1)
    return -(-b * (g - 1) * (2 if kind == "all-reduce" else 1) // g)
