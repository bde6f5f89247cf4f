"""This package lists the collectives of a compiled function: kind, dtype, shape, bytes, mesh axes, and their op.

    print(table(collectives(jitted, *args)))                                      # for people
    assert_no_wide_weight_gather(jitted, *args, weights=(params.wi, params.wo))   # for a user's own test

The list does not have pairs of send and receive, since these are no collectives of XLA.
"""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from moax.block.moe import moe
from moax.checks import check_value
from moax.config import MoEConfig, OptionKeywords, Options, replace_options
from moax.exchange.transport import Transfer, ring_bytes
from moax.inspect.hlo import Element, device_groups, read_hlo, trace, varying_axes
from moax.inspect.hlo import Value as Value
from moax.kernels.device import find_device
from moax.mesh.axes import AnyMesh, Names, as_names
from moax.params import operand_shapes
from moax.text import align, plural

Program = Callable[..., Any] | jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled | str
Over = str | Sequence[str]  # one or several mesh axes

NAME_WIDTH = 80  # the characters of an op in a table
NAME_START = 30  # those of them before an ellipsis
# The dtypes that XLA's CPU compiler widens: it runs bf16 collectives in f32, and f8 collectives in f16. A GPU does not.
_WIDENED = ("bf16",)
_WIDENED_SMALL = ("f8e4m3fn", "f8e5m2", "f8e8m0fnu", "f8e4m3b11fnuz", "f8e4m3fnuz", "f8e5m2fnuz", "f8e4m3", "f8e3m4")
_PROMOTED = re.compile(r"to_apply=%?[\w.\-]+_promoted\b")
_WHY = (
    "A weight crosses unquantized where the recipe does not quantize it, and where the program "
    "moves it to another layout first. Lay weights out as moax.param_specs says, and give the "
    "step their shardings as out_shardings: on Auto axes a shard_map (engine='shard_map') moves "
    "weights of another layout, and no line in the log says so."
)


@dataclasses.dataclass(frozen=True)
class Collective(Transfer):
    """One array that a collective makes; a collective of several arrays is several `Collective`s.

    Attributes:
      kind: XLA's name: "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", ...
      dtype: NumPy's name: "uint8", "bfloat16", "float8_e4m3fn".
      shape: the shape of the result on one device. An all-to-all that XLA:CPU cut into one piece for each peer has the
        shape (peers, *piece).
      axes: the mesh axes over which the group varies, in the order of the mesh; () where the mesh is not known.
      group_size: the devices g of a group; a source and a target of a permute are one.
      bytes: the bytes that one device sends in one execution, by the ring algorithm. With b bytes of `shape`, an
        all-gather or all-to-all sends b (g-1)/g, an all-reduce 2 b (g-1)/g, a reduce-scatter b (g-1), a permute or
        broadcast b. A ragged all-to-all counts as if its buffer were full.
      op_name: the op it comes from, as in a profile; `custom_partitioning` keeps no scopes from inside an op.
      times: executions in one call: the product of the trip counts of the scans around it, all branches taken.
      open_loop: whether it is in a loop whose trip count the program does not state, such as a `while_loop`. That loop
        counts once in `times`.
      carries: the parameters of the program that the array is made of without a matmul or a reduction in between, such
        as a weight that was cast, quantized or cut. Equality ignores `carries` and `reaches`.
      reaches: the results of the program that are made of the array in the same way, such as a gradient.
    """

    op_name: str
    times: int = 1
    open_loop: bool = False
    carries: tuple[Value, ...] = dataclasses.field(default=(), compare=False)
    reaches: tuple[Value, ...] = dataclasses.field(default=(), compare=False)

    @property
    def size(self) -> int:
        """Elements of `shape`."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        text = f"{self.kind} {self.dtype}{list(self.shape)} over {','.join(self.axes) or '-'}"
        for word, values in (("of", self.carries), ("into", self.reaches)):
            if values:
                text += f" {word} {','.join([value.name for value in values[:3]])}"
                if len(values) > 3:
                    text += f" and {len(values) - 3} more"
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
    listed, _ = _read(fn, args, kwargs, mesh)
    return listed


def inspect_block(
    config: MoEConfig,
    tokens: int,
    options: Options = Options(),
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    param_dtype: jax.typing.DTypeLike = jnp.float32,
    backward: bool = True,
    **keywords: Unpack[OptionKeywords],
) -> list[Collective]:
    """Compiles `y, stats = moax.moe(x, params, config)` on a mesh, and lists its collectives; it runs nothing.

    The step has one round; see `moax.Options.buffer_factor`.

    Args:
      config: the block.
      tokens: rows of x [tokens, H] of the whole mesh; x is sharded over the token axes, dp, fsdp, ep and cp.
      options: how the block runs.
      mesh: the mesh; None takes the mesh that `jax.set_mesh` set.
      dtype: dtype of x, and of the operands of matmuls.
      param_dtype: dtype of the parameters but `router_bias`, which is float32. They are sharded as `moax.param_specs`
        says.
      backward: True compiles forward and backward; False compiles forward alone. Gradients have the sharding of their
        parameters, as in a training step.
      **keywords: fields of `Options` that replace those of `options`.

    Raises:
      ValueError: an argument is of the wrong kind, there is no mesh, or the token axes do not divide the tokens.
    """
    check_value("config", config, MoEConfig)
    check_value("tokens", tokens, int)
    for name, value in {"dtype": dtype, "param_dtype": param_dtype}.items():
        check_value(name, value, jnp.floating)
    options = replace_options("inspect_block", options, keywords)
    mesh = mesh or jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError("inspect_block: no mesh; pass mesh=, or call it under `with jax.set_mesh(mesh)`")
    params, x = operand_shapes(config, tokens, options.axes, mesh, dtype, param_dtype)
    shardings = jax.tree.map(lambda array: array.sharding, (params, x))

    def forward(params, x):
        return moe(x, params, config, options)

    def loss(params, x):
        y, stats = forward(params, x)
        return jnp.square(y.astype(jnp.float32)).mean() + stats.aux_loss + stats.z_loss

    step = jax.value_and_grad(loss, argnums=(0, 1))
    with jax.set_mesh(mesh):
        if backward:
            jitted = jax.jit(step, out_shardings=(None, shardings))
        else:
            jitted = jax.jit(forward)
        return [c for c in collectives(jitted, params, x, mesh=mesh) if not c.open_loop]


def total_bytes(
    found: Iterable[Collective],
    kind: str | None = None,
    axes: Over | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> int:
    """Sums the bytes that one device sends in one call of the program: the sum of `bytes * times`.

    A kind such as "all-gather", mesh axes, or a dtype counts the collectives that have it alone.
    """
    counted = list(found)
    if axes is not None:
        counted = _over(counted, axes)
    if kind is not None:
        counted = [c for c in counted if c.kind == kind]
    if dtype is not None:
        counted = [c for c in counted if c.dtype == jnp.dtype(dtype).name]
    return sum(c.bytes * c.times for c in counted)


def weight_gathers(found: Iterable[Collective], axes: Over = "fsdp") -> list[Collective]:
    """Selects the all-gathers over any of the mesh axes `axes`; the block gathers nothing but weights over fsdp."""
    return [c for c in _over(found, axes) if c.kind == "all-gather"]


def weight_scatters(found: Iterable[Collective], axes: Over = "fsdp") -> list[Collective]:
    """Selects the reduce-scatters over any of `axes`; over fsdp the block sums nothing but gradients of weights so."""
    return [c for c in _over(found, axes) if c.kind == "reduce-scatter"]


def table(found: Iterable[Collective]) -> str:
    """Returns the collectives as a table of text: a line for each, then one for each kind and its axes, then the total.

    Equal collectives share a line. `bytes/device` has the bytes that one device sends in one call. The name of an op
    loses its middle beyond 80 characters: its start says whether it is of backward, and its end names the op.
    """
    listed = list(found)
    if not listed:
        return "no collectives"
    rows: list[Any] = [("kind", "dtype", "shape", "axes", "times", "bytes/device", "op"), None]
    for c, count in Counter(listed).items():
        times = c.times * count
        shape = "x".join(map(str, c.shape)) or "scalar"
        axes = ",".join(c.axes) or "-"
        times_text = f"{times}+" if c.open_loop else str(times)
        total = f"{c.bytes * times:,}"
        rows.append((c.kind, c.dtype, shape, axes, times_text, total, _keep_ends(c.op_name)))
    rows.append(None)
    for kind, axes in sorted({(c.kind, c.axes) for c in listed}):
        members = [c for c in listed if (c.kind, c.axes) == (kind, axes)]
        rows.append(_sum_row(kind, ",".join(axes), members))
    rows.append(_sum_row("total", "", listed))
    return align(rows, right=(4, 5))


def _keep_ends(name: str) -> str:
    """Returns a name in which an ellipsis stands for the middle of a longer one."""
    if len(name) <= NAME_WIDTH:
        return name
    return f"{name[:NAME_START]}...{name[NAME_START + 3 - NAME_WIDTH :]}"


def _sum_row(kind: str, axes: str, members: Sequence[Collective]) -> tuple[str, ...]:
    """Returns the row of a table with the sums of several collectives."""
    times = sum(c.times for c in members)
    return (kind, "", "", axes, str(times), f"{total_bytes(members):,}", "")


def assert_no_wide_weight_gather(
    fn: Program | Sequence[Collective],
    *args: Any,
    weights: PyTree,
    axes: Over = "fsdp",
    mesh: AnyMesh | None = None,
    **kwargs: Any,
) -> list[Collective]:
    """Asserts that weights cross the mesh as bytes, and that their gradients leave by reduce-scatter.

    The assertion fails for each of these collectives, if its elements are floats of two or more bytes:

    - an all-gather over `axes` of as many elements as the smallest shard of `weights` has, or more, whatever it
      carries: this tells a weight from its scales;
    - any all-gather, all-to-all, permute or broadcast, over any axis, that carries one of `weights`, or whose result
      becomes a result of the program that has the shape of one of `weights`, such as its gradient;
    - an all-reduce that does the same over an axis that splits this weight: it moves the weight, or sums a gradient of
      which each device keeps a part, so that a reduce-scatter would do.

    It passes an all-to-all of activations, a reduce-scatter, and an all-reduce of the gradient of a weight over axes
    that do not split the weight, such as dp. `Collective.carries` and `Collective.reaches` say how values are followed.

    Args:
      fn, args, kwargs, mesh: as for `collectives`; `fn` may also be the list that `collectives` returned.
      weights: a tree of arrays or ShapeDtypeStructs with shardings. Leave out biases, which are not quantized. A
        parameter or result of the program is a weight where it has the shape of one of these. Where none is found, each
        parameter that crosses `axes` counts as a weight.
      axes: a mesh axis, or several.

    Returns:
      All collectives of the program.

    Raises:
      AssertionError: weights or their gradients cross unquantized; the message lists the collectives.
      ValueError: the mesh is not known, or lacks one of the axes, or splits none of `weights` over them.
    """
    names = _axis_names(axes)
    if not isinstance(fn, str) and isinstance(fn, Sequence):
        listed = list(fn)
    else:
        listed, mesh_axes = _read(fn, args, kwargs, mesh)
        if not mesh_axes and any(c.group_size > 1 for c in listed):
            raise ValueError(f"{axes=}: the program's mesh is not known; pass mesh=")
        missing = [name for name in names if name not in mesh_axes]
        if mesh_axes and missing:
            raise ValueError(f"{axes=}: the mesh has no axis {','.join(missing)}; its axes are {','.join(mesh_axes)}")
    leaves = jax.tree.leaves(weights)
    sizes = [math.prod(shape) for split, shape in map(_placed, leaves) if split & set(names)]
    if not sizes:
        raise ValueError(f"weights: none is sharded over {','.join(names)}; pass arrays with their shardings")
    smallest = min(sizes)
    moved_weights = [leaf for leaf in leaves if any(_involves(c, leaf) for c in listed)]

    def is_refused(c: Collective) -> bool:
        is_float = c.dtype.startswith(("float", "bfloat", "complex"))
        is_wide = is_float and not c.dtype.startswith(("float8", "float4"))
        if not is_wide or c.bytes == 0 or c.kind == "reduce-scatter":
            return False
        moves_weight = c.kind == "all-gather"
        if not moved_weights:
            carries = any(math.prod(value.shape) >= smallest for value in c.carries)
            # Each device keeps a part of the sum.
            is_cut = any(smallest <= math.prod(value.shape) < c.size for value in c.reaches)
            moves_weight = moves_weight or carries or (c.kind == "all-reduce" and is_cut)
        if moves_weight and c.size >= smallest and set(names) & set(c.axes):
            return True
        involved = [weight for weight in moved_weights if _involves(c, weight)]
        if c.kind != "all-reduce":
            return bool(involved)
        return any(_placed(weight)[0] & set(c.axes) for weight in involved)

    offenders = [c for c in listed if is_refused(c)]
    if offenders:
        gathers = f"gathers over {','.join(names)} of {smallest} elements or more"
        head = f"{plural(len(offenders), 'collective')} of unquantized weights or their gradients, or {gathers}:"
        raise AssertionError("\n  ".join([head, *map(str, offenders)]) + f"\n{_WHY}")
    return listed


def _placed(leaf) -> tuple[set[str], tuple[int, ...]]:
    """Returns the mesh axes that split an array, and its shape on one device."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return set(), tuple(leaf.shape)
    names = {name for entry in sharding.spec for name in as_names(entry)}
    return names, sharding.shard_shape(leaf.shape)


def _involves(c: Collective, leaf) -> bool:
    """Returns whether a collective carries a parameter, or reaches a result, of the shape of a weight."""
    whole = tuple(leaf.shape)
    _, shard = _placed(leaf)
    for value in (*c.carries, *c.reaches):
        if value.whole == whole or (value.whole is None and value.shape in (whole, shard)):
            return True
    return False


def _over(listed: Iterable[Collective], axes: Over) -> list[Collective]:
    names = set(_axis_names(axes))
    return [c for c in listed if names & set(c.axes)]


def _axis_names(axes: Over) -> Names:
    names = as_names(axes)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"axes={axes!r} must be a mesh axis or several; of a moax.Axes, give a role: axes.fsdp")
    return names


def _read(fn: Any, args, kwargs, mesh: AnyMesh | None) -> tuple[list[Collective], Names]:
    """Returns the collectives, and the names of the mesh axes; () where the mesh is not known."""
    is_program = isinstance(fn, str) or hasattr(fn, "as_text")
    if is_program and (args or kwargs):
        raise ValueError(f"fn is a {type(fn).__name__}, lowered or compiled for its arguments; pass no others")
    if not is_program:
        if not (callable(fn) or hasattr(fn, "lower")):
            raise ValueError(f"fn={fn!r} must be a function, lowered or compiled by jit or not, or an HLO text")
        lower = getattr(fn, "lower", None) or jax.jit(fn).lower
        fn = lower(*args, **kwargs)
    meshes = _meshes((args, kwargs))
    unwidened = False
    if hasattr(fn, "compile"):
        fn, unwidened = _compile(fn, [mesh, *meshes])
    meshes += _meshes([getattr(fn, "input_shardings", ()), getattr(fn, "output_shardings", ())])
    leaves, _ = jax.tree_util.tree_flatten_with_path(getattr(fn, "out_info", ()))
    results = []
    for path, leaf in leaves:
        results.append(Value(f"result{jax.tree_util.keystr(path)}", (), tuple(leaf.shape)))
    program = read_hlo(fn if isinstance(fn, str) else fn.as_text())
    sizes = _mesh_sizes(mesh, meshes, program.devices)
    flows = trace(program, results)
    listed = []
    for computation, instructions in program.computations.items():
        for instruction in instructions.values():
            if not instruction.is_collective:
                continue
            groups = device_groups(instruction, program.devices)
            group_size = max(map(len, groups))
            # XLA:CPU computes a bfloat16 reduction by a promoted function.
            promoted = unwidened and _PROMOTED.search(instruction.attributes)
            for i, element in enumerate(instruction.elements):
                if promoted and len(instruction.elements) == 1 and element.dtype == "float32":
                    element = Element("bfloat16", 16, element.shape)
                result_bytes = -(-math.prod(element.shape) * element.bits // 8)
                times, open_loop = program.runs[computation]
                carries, reaches = flows.get((computation, instruction.name, i), ((), ()))
                collective = Collective(
                    kind=instruction.kind,
                    dtype=element.dtype,
                    shape=element.shape,
                    axes=varying_axes(groups, sizes),
                    group_size=group_size,
                    bytes=ring_bytes(instruction.kind, result_bytes, group_size),
                    op_name=instruction.op_name,
                    times=times,
                    open_loop=open_loop,
                    carries=carries,
                    reaches=reaches,
                )
                listed.append(collective)
    return listed, tuple(sizes)


def _meshes(tree) -> list[AnyMesh]:
    """Returns the meshes of the NamedShardings in a tree, or of its arrays."""
    shardings = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(tree)]
    return [s.mesh for s in shardings if isinstance(s, NamedSharding) and not s.mesh.empty]


def _compile(lowered: Any, meshes: Sequence[AnyMesh | None]) -> tuple[Any, bool]:
    """Returns the compiled program, and whether XLA's CPU compiler was kept from widening its collectives."""
    concrete = [mesh for mesh in meshes if isinstance(mesh, Mesh)]
    devices = [device for mesh in concrete for device in mesh.devices.flat[:1]]
    # A program for a GPU is perhaps compiled ahead of time.
    if find_device().platform != "cpu" or not set(devices) <= set(jax.devices()):
        return lowered.compile(), False
    # The combiner would merge widened reductions with others.
    for dtypes in (_WIDENED + _WIDENED_SMALL, _WIDENED):
        passes = [f"float-normalization-{dtype}" for dtype in dtypes] + ["cpu-all-reduce-combiner"]
        options = {"xla_disable_hlo_passes": ",".join(passes)}
        try:
            return lowered.compile(compiler_options=options), True
        except jax.errors.JaxRuntimeError:
            continue  # The CPU cannot compute with these dtypes without widening them.
    warnings.warn("the collectives are those of XLA:CPU, which moves bf16 as f32 and f8 as f16", stacklevel=4)
    return lowered.compile(), False


def _mesh_sizes(mesh: AnyMesh | None, meshes: Sequence[AnyMesh], devices: int) -> Mapping[str, int]:
    """Returns the axis sizes of `mesh`, or of the first mesh that fits the program; {} where none does."""
    if mesh is None:
        for known in (*meshes, jax.sharding.get_abstract_mesh()):
            if not known.empty and known.size == devices:
                return dict(known.shape)
        return {}
    order = next((list(m.devices.flat) for m in meshes if isinstance(m, Mesh)), None)
    reordered = order and isinstance(mesh, Mesh) and list(mesh.devices.flat) != order
    if mesh.size != devices or reordered:
        raise ValueError(f"mesh={mesh} must have the program's {devices} devices, in their order")
    return dict(mesh.shape)
