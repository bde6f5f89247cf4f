"""What the suites share: meshes by name, an op run each way a mesh allows, float64 oracles, relative errors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import moax
from moax.ops import dequantize, quantize
from moax.params import param_shapes
from moax.recipe import Format, Recipe

MESHES: dict[str, dict[str, int]] = {
    "8x1": {"fsdp": 8, "ep": 1},
    "1x8": {"fsdp": 1, "ep": 8},
    "2x4": {"fsdp": 2, "ep": 4},
    "4x2": {"fsdp": 4, "ep": 2},
    "dp2x2x2": {"dp": 2, "fsdp": 2, "ep": 2},
    "tp2x2x2": {"fsdp": 2, "ep": 2, "tp": 2},
}
TOKENS = ("dp", "fsdp", "ep")

# How an op meets a mesh: not at all; on Auto axes, by either engine; on Explicit axes; in the user's own shard_map
# (check_vma False, True), differentiated from outside it, or (inside) within it.
ENGINES = ("custom_partitioning", "shard_map")
WAYS = (*ENGINES, "explicit", "user", "user_vma", "user_inside")


def make_mesh(name: str, way: str = "custom_partitioning") -> jax.sharding.Mesh:
    """The mesh of this name, with the axis types that `way` needs."""
    sizes, kind = MESHES[name], AxisType.Explicit if way == "explicit" else AxisType.Auto
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def spec(mesh: str, *entries) -> PartitionSpec:
    """A PartitionSpec of the axes that the mesh of this name has."""
    names = [e if isinstance(e, tuple) else (e,) for e in entries]
    return PartitionSpec(*(tuple(n for n in e if n in MESHES[mesh]) or None for e in names))


def size(mesh: str, *names: str) -> int:
    """Devices of the mesh of this name along these axes; axes that it lacks count as 1."""
    return int(np.prod([MESHES[mesh].get(n, 1) for n in names]))


def put(mesh: jax.sharding.Mesh, specs: Any, tree: Any) -> Any:
    """The arrays of `tree` on the mesh, laid out by `specs`, a tree prefix of it."""
    is_spec = lambda s: isinstance(s, PartitionSpec)  # noqa: E731
    place = lambda s, t: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, s)), t)  # noqa: E731
    return jax.tree.map(place, specs, tree, is_leaf=is_spec)


def in_user_shard_map() -> bool:
    """Whether the caller is inside a `shard_map`: there, sums that an op leaves to its caller are due."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function, its operands in place, and the mesh in force (None without one)."""

    fn: Any
    args: tuple
    mesh: jax.sharding.Mesh | None

    def __call__(self):
        """The results, as NumPy arrays."""
        return jax.tree.map(np.asarray, self.placed())

    def placed(self):
        """The results where they were computed."""
        return self.under(self.fn)

    def under(self, fn: Callable):
        """fn(*args), the mesh in force."""
        if self.mesh is None:
            return fn(*self.args)
        with jax.set_mesh(self.mesh):
            return fn(*self.args)


def program(
    way: str,
    mesh: str,
    fn: Callable,
    args: tuple,
    in_specs: Any = None,
    out_specs: Any = None,
    aux_specs: Any = (),
    *,
    cotangents: Any = None,
    wrt: tuple[int, ...] = (0,),
) -> Program:
    """fn(*args, engine=...) -> (floats, aux), put on a mesh; way "none" is a single device.

    The program returns (floats, aux), and with `cotangents` (like floats) the gradients of the args `wrt` as a third.
    Specs are PartitionSpecs, or tree prefixes of them: of args, floats, aux.
    """
    engine = way if way in ENGINES else "auto"
    given = functools.partial(fn, engine=engine)
    on = None if way == "none" else make_mesh(mesh, way)

    def with_gradients(forward, args, cotangents):
        some = lambda *given: forward(*(given[wrt.index(i)] if i in wrt else a for i, a in enumerate(args)))  # noqa: E731
        floats, pull, aux = jax.vjp(some, *(args[i] for i in wrt), has_aux=True)
        if way == "explicit":  # a cotangent must have the very type of its result
            cotangents = jax.tree.map(lambda c, y: jax.sharding.reshard(c, jax.typeof(y).sharding), cotangents, floats)
        return floats, aux, pull(cotangents)

    if way in ("user", "user_vma"):
        outs = (out_specs, aux_specs)
        given = jax.shard_map(given, mesh=on, in_specs=in_specs, out_specs=outs, check_vma=way == "user_vma")
    full = given if cotangents is None else functools.partial(with_gradients, given)
    operands, specs = (args, in_specs) if cotangents is None else ((args, cotangents), (in_specs, out_specs))
    if way == "user_inside":
        outs = (out_specs, aux_specs) + (() if cotangents is None else (tuple(in_specs[i] for i in wrt),))
        full = jax.shard_map(full, mesh=on, in_specs=specs, out_specs=outs, check_vma=True)
    placed = jax.tree.map(jnp.asarray, operands) if on is None else put(on, specs, operands)
    return Program(jax.jit(full), placed, on)


def exact(formula: Callable, args: tuple, cotangents: Any = None):
    """formula(*args) in float64, and with cotangents its gradients by autodiff: NumPy in, NumPy out."""

    def wide(x):
        x = np.asarray(x)
        return jnp.asarray(x, jnp.float64 if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        args = jax.tree.map(wide, args)
        if cotangents is None:
            return jax.tree.map(np.asarray, formula(*args))
        out, pull = jax.vjp(formula, *args)
        return jax.tree.map(np.asarray, (out, pull(jax.tree.map(wide, cotangents))))


def fake(x, format: Format | None, block, cut: tuple[int, int] | None = None) -> np.ndarray:
    """x rounded to the format and back, float64; `cut`: (dim, n): each of the n shards of a dim by itself."""
    if format is None:
        return np.asarray(x, np.float64)
    dim, n = (0, 1) if cut is None or format.block is None else cut
    parts = [_round_trip(p, format, block) for p in np.split(np.asarray(x), n, axis=dim)]
    return np.concatenate([np.asarray(p, np.float64) for p in parts], axis=dim)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _round_trip(x, format, block):
    return dequantize(quantize(x, format, block=block))


def fake_operands(x, w, dy, recipe: Recipe, real=None, *, shards: int = 1):
    """What the products see of x [M, K], w [E, K, *C], dy [M, *C], each rounded along the dim that is contracted:
    (x, w) of forward, (x of wgrad, w of dgrad), (dy of dgrad, dy of wgrad).

    `real`: which rows are; the others are 0. `shards`: how the mesh cuts the rows.
    """
    real = np.ones(len(x), bool) if real is None else real
    x, dy = (np.where(real.reshape(-1, *[1] * (v.ndim - 1)), v, 0.0).astype(np.float32) for v in (x, dy))

    def rows(v, format, along):
        flat = v.reshape(len(v), -1)
        return fake(flat, format, format and format.row_block(2, along), (0, shards)).reshape(v.shape)

    def weight(along):
        flat = w.reshape(*w.shape[:2], -1)
        return fake(flat, recipe.w, recipe.w and recipe.w.weight_block(3, along)).reshape(w.shape)

    return (
        rows(x, recipe.x, "columns"), weight("rows"), rows(x, recipe.x, "rows"),
        weight("columns"), rows(dy, recipe.dy, "columns"), rows(dy, recipe.dy, "rows"),
    )  # fmt: skip


def interpret(fn: Callable, *args, races: bool = True):
    """fn(*args) in Pallas' GPU interpreter, which prints the races that it finds: none may be there.

    races=False for kernels whose two consumers both read a stage into registers and both release it: the interpreter
    orders a wait after one of the arrivals it waited for, and takes the other's reads for a race.
    """
    printed = io.StringIO()
    mode = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=races))
    with contextlib.redirect_stdout(printed), mode:
        results = jax.tree.map(np.asarray, jax.jit(fn)(*args))
    if "RACE" in printed.getvalue():
        raise AssertionError(printed.getvalue()[:4000])
    return results


def rel_error(got, want, per: int | None = None) -> float:
    """max |got - want| / max |want|; with `per` the greatest of those of each slice of that dim (an expert, say), so
    that a small slice hides behind no large one. Infinite where want is all zero and got is not; a NaN is never
    small."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, want {want.shape}")
    dims = tuple(d for d in range(want.ndim) if d != per)
    off, scale = np.abs(got - want).max(dims, initial=0.0), np.abs(want).max(dims, initial=0.0)
    ratio = np.where(scale > 0, off / np.where(scale > 0, scale, 1.0), np.where(off == 0, 0.0, np.inf))
    return float(np.max(ratio, initial=0.0))


def rel_norm(got, want, per: int | None = None) -> float:
    """|got - want| / |want| in the Euclidean norm; with `per` the greatest of those of each slice of that dim. For sums
    over many tokens, whose single elements may cancel to nearly nothing. A NaN is never small."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, want {want.shape}")
    dims = tuple(d for d in range(want.ndim) if d != per)
    off, scale = np.sqrt(((got - want) ** 2).sum(dims)), np.sqrt((want**2).sum(dims))
    ratio = np.where(scale > 0, off / np.where(scale > 0, scale, 1.0), np.where(off == 0, 0.0, np.inf))
    return float(np.max(ratio, initial=0.0))


def some(cases: Iterable, count: int) -> list:
    """The cases, those after the first `count` for `make test-matrix`: each costs a compilation, and CI has minutes."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if i < count else pytest.mark.matrix) for i, case in enumerate(cases)]


def random(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """A standard normal array."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def integers(seed: int, *shape: int, bound: int = 8) -> np.ndarray:
    """Small integers as float32: their sums and products are exact in any order."""
    return np.random.default_rng(seed).integers(-bound, bound + 1, shape).astype(np.float32)


def make_params(config: moax.MoEConfig, seed: int = 0, bias: float = 0.3) -> moax.MoEParams:
    """Weights of the size that `moax.init` gives them, and biases that are not 0, by NumPy: each shape that jax.random
    draws costs a compilation."""
    contracted = {"router": 0, "wi": 1, "wo": 1, "shared_wi": 0, "shared_wo": 0}

    def draw(index, name, shape):
        scale = shape[contracted[name]] ** -0.5 if name in contracted else bias
        return jnp.asarray(scale * random(100 * seed + index, *shape))

    shapes = dataclasses.asdict(param_shapes(config))
    return moax.MoEParams(**{n: s and draw(i, n, s) for i, (n, s) in enumerate(shapes.items())})
