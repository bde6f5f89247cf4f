"""These functions check a program's collectives. A user's own tests call them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from moax.checks import check_count
from moax.inspect.listing import Collective, Over, Program, axis_names, join, over, read, table, weight_scatters
from moax.mesh.axes import Names, as_names
from moax.mesh.specs import AnyMesh
from moax.text import plural

_WHY = (
    "A weight crosses unquantized where the recipe does not quantize it, and where the program moves it to another "
    "layout first. Lay weights out as moax.param_specs says, and give the step their shardings as out_shardings: on "
    "Auto axes a shard_map (engine='shard_map') moves weights of another layout, and no line in the log says so."
)


def assert_no_wide_weight_gather(
    fn: Program | Sequence[Collective],
    *args: Any,
    axes: Over = "fsdp",
    min_elements: int | None = None,
    weights: PyTree | None = None,
    mesh: AnyMesh | None = None,
    **kwargs: Any,
) -> list[Collective]:
    """Asserts that weights cross the mesh as bytes, and that their gradients leave by reduce-scatter.

    The assertion fails for each of these collectives, if its elements are floats of two or more bytes:

    - an all-gather over `axes` of `min_elements` or more elements, whatever it carries;
    - any all-gather, all-to-all, permute or broadcast, over any axis, that carries one of `weights`, or whose result
      becomes a result of the program that has the shape of one of `weights`, such as its gradient;
    - an all-reduce that does the same over an axis that splits this weight: it moves the weight, or sums a gradient of
      which each device keeps a part, so that a reduce-scatter would do.

    It passes an all-to-all of activations, a reduce-scatter, and an all-reduce of the gradient of a weight over axes
    that do not split the weight, such as dp. `Collective.carries` and `Collective.reaches` say how values are followed.

    Args:
      fn, args, kwargs, mesh: as for `collectives`; `fn` may also be the list that `collectives` returned.
      axes: a mesh axis, or several.
      min_elements: collectives of fewer elements pass. The default is the size of the smallest shard among those
        `weights` that `axes` split. It holds for all-gathers over `axes` alone, and tells a weight from its scales.
      weights: a tree of arrays or ShapeDtypeStructs with shardings. Leave out biases, which are not quantized. A
        parameter or result of the program is a weight where it has the shape of one of these. Where there are no
        `weights`, or none is found, each parameter that crosses `axes` counts as a weight.

    Returns:
      All collectives of the program.

    Raises:
      AssertionError: weights or their gradients cross unquantized; the message lists the collectives.
      ValueError: the mesh is not known, or lacks one of the axes, or both `min_elements` and `weights` are missing.
    """
    found, names = _judged(fn, args, kwargs, axes, mesh)
    least = _min_elements(min_elements, weights, names)
    known = [leaf for leaf in jax.tree.leaves(weights) if any(_involves(c, leaf) for c in found)]

    def refused(c: Collective) -> bool:
        wide = _is_float(c) and not c.dtype.startswith(("float8", "float4"))
        if not wide or c.bytes == 0 or c.kind == "reduce-scatter" or c.size < (min_elements or 0):
            return False
        gathers_or_moves = c.kind == "all-gather" or (not known and _moves_any(c, least))
        if c.size >= least and set(names) & set(c.axes) and gathers_or_moves:
            return True
        return any(c.kind != "all-reduce" or _placed(w)[0] & set(c.axes) for w in known if _involves(c, w))

    what = f"of unquantized weights or their gradients, or gathers over {join(names)} of {least} elements or more"
    _refuse([c for c in found if refused(c)], "collective", f"{what}:", _WHY)
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
    """Asserts that weight gradients are reduce-scattered over `axes`.

    The program must have one of `moax.inspect.weight_scatters` over `axes`, and no all-reduce over `axes` of
    `min_elements` floats or more. Arguments, result and errors are those of `assert_no_wide_weight_gather`.

    Where jit's own partitioner reduces gradients, the CPU compiler makes an all-reduce and a slice, and fails this
    check; a GPU's compiler makes one reduce-scatter.
    """
    found, names = _judged(fn, args, kwargs, axes, mesh)
    least = _min_elements(min_elements, weights, names)
    whole = [c for c in over(found, names) if c.kind == "all-reduce" and _is_float(c) and c.size >= least]
    _refuse(whole, "all-reduce", f"over {join(names)} of {least} floats or more:")
    if not weight_scatters(found, names):
        raise AssertionError(f"no reduce-scatter over {join(names)}; the collectives are\n{table(found)}")
    return found


def _judged(fn, args, kwargs, axes, mesh) -> tuple[list[Collective], Names]:
    """Returns the collectives to check, and the names of `axes`; raises ValueError where the mesh has no such axis."""
    names = axis_names(axes)
    if not isinstance(fn, str) and isinstance(fn, Sequence):
        return list(fn), names
    found, known = read(fn, args, kwargs, mesh)
    if not known and any(c.group_size > 1 for c in found):
        raise ValueError(f"{axes=}: the program's mesh is not known; pass mesh=")
    if known and (missing := [n for n in names if n not in known]):
        raise ValueError(f"{axes=}: the mesh has no axis {join(missing)}; its axes are {join(known)}")
    return found, names


def _min_elements(min_elements: int | None, weights: PyTree | None, names: Names) -> int:
    """Returns `min_elements`, or the size of the smallest shard of `weights` over the axes `names`."""
    if min_elements is not None:
        check_count("min_elements", min_elements)
        return min_elements
    if weights is None:
        raise ValueError("pass min_elements=, or weights=, whose smallest shard gives min_elements")
    sizes = [math.prod(shape) for split, shape in map(_placed, jax.tree.leaves(weights)) if split & set(names)]
    if not sizes:
        raise ValueError(f"weights: none is sharded over {join(names)}; pass min_elements=")
    return min(sizes)


def _placed(leaf) -> tuple[set[str], tuple[int, ...]]:
    """Returns the mesh axes that split an array, and its shape on one device."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return set(), tuple(leaf.shape)
    return {name for entry in sharding.spec for name in as_names(entry)}, sharding.shard_shape(leaf.shape)


def _involves(c: Collective, leaf) -> bool:
    """Returns whether a collective carries a parameter, or reaches a result, of the shape of a weight."""
    whole, shard = tuple(leaf.shape), _placed(leaf)[1]
    return any(v.whole == whole or (v.whole is None and v.shape in (whole, shard)) for v in (*c.carries, *c.reaches))


def _moves_any(c: Collective, least: int) -> bool:
    """Returns whether a collective moves a parameter of `least` elements, or sums a result of which it keeps a part."""
    if any(math.prod(value.shape) >= least for value in c.carries):
        return True
    return c.kind == "all-reduce" and any(least <= math.prod(value.shape) < c.size for value in c.reaches)


def _is_float(c: Collective) -> bool:
    return c.dtype.startswith(("float", "bfloat", "complex"))


def _refuse(offenders: Sequence[Collective], noun: str, what: str, why: str = "") -> None:
    """Raises AssertionError that lists the offenders, if there are any."""
    if offenders:
        listed = "\n  ".join([f"{plural(len(offenders), noun)} {what}", *map(str, offenders)])
        raise AssertionError(f"{listed}\n{why}".rstrip())
