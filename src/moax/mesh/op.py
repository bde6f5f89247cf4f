"""`Op` makes a function of one device's shards an op on global arrays, on every kind of mesh.

    permute = Op("permute", permute_forward, "r h, r k -> n h, @n")

The rule is the layout of operands and results, the sums over devices, and the Shardy rule:

- A letter is a dim. t, r and n are split over the axes of tokens, and `split` names axes of further letters; other
  dims are whole. Operands and results with a letter in common are split alike: "t h, h e -> t e".
- A result is summed over the axes that split an operand, and no dim of this result: with "t h, t e -> h e" each device
  has a term of the result, and the terms are summed over the axes of t.
- "@n" is a tree of arrays, or None. Their leading dims are split as n, and have no dim in common with other arrays.
  "@" is a tree of whole arrays, and "=" a tree of whole arrays that all devices have already.
- "{n | r k}" is a tree with these entries. "*c" is any number of dims, and "(b i)" a dim of blocks b of i elements.

A weight may have several layouts. Ops on weights compute theirs by a function `sharding` in place of the rule.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from moax.backend import log_once
from moax.mesh.axes import Names, as_names
from moax.mesh.collectives import vary_like, varying
from moax.mesh.lowering import name_call, refuse_derivative, refuse_many_devices
from moax.mesh.specs import FREE, Spec, check_divides, constrain, pad
from moax.mesh.view import MeshView

DIM = re.compile(r"[@=]|\([^)]*\)|\*?\w+")
TOKENS = ("t", "r", "n")  # the letters that the axes of tokens split in every rule


class OpSharding(NamedTuple):
    """The layout of an op.

    Attributes:
      operands: a spec for each leaf of the operands.
      results: a spec for each result, which holds for all of its leaves.
      reduce: for each result, the axes over which the local results are summed.
      layout: what the local function takes as its second argument; see `Op`.
    """

    operands: PyTree[Spec | None]
    results: Sequence[Spec]
    reduce: Sequence[Names]
    layout: Any = None


class Rule(NamedTuple):
    """A parsed rule: the dims of each leaf of the operands and of each result, and (name, size) of dims in blocks."""

    leaves: tuple[tuple[str, ...], ...]
    results: tuple[tuple[str, ...], ...]
    sizes: tuple[tuple[str, int], ...] = ()


class Op:
    """An op on global arrays: op(view, static, *operands) -> a tuple of results.

    Args:
      name: the name of the op in profiles, compiled programs and errors.
      local: local(static, *operands) -> a tuple of results. It computes on shards and calls collectives by axis name.
        `static` is hashable and has the attribute `axes`, the mesh axes by role.
      rule: the rule; or a function of (static, operands) that returns it, and the sizes of dims inside blocks.
      split: {letter: the axes that split it}, as a role of `ResolvedAxes`, or as a function of `static`.
      sharding: sharding(static, operands, found) -> OpSharding, in place of the layout that the rule gives. `found` has
        the spec of each operand leaf, None where it is unknown. The local function is then local(static, layout,
        *operands). It raises ValueError for a spec that the op cannot take.
    """

    def __init__(
        self,
        name: str,
        local: Callable,
        rule: str | Callable[[Any, tuple], str | tuple[str, tuple]],
        split: Mapping[str, str | Callable[[Any], Names]] | None = None,
        sharding: Callable[[Any, tuple, PyTree], OpSharding] | None = None,
    ):
        self.name, self.local, self._rule, self._split, self._sharding = name, local, rule, split or {}, sharding
        self._compiled = jax.jit(self._run, static_argnums=(0, 1))

    def __call__(self, view: MeshView, static: Hashable, *operands):
        """Returns the results of the op on `operands`, computed by the engine of `view`."""
        with jax.named_scope(self.name):
            if view.engine == "custom_partitioning":
                return _bind(_Call(self, view, static, self.rule(static, operands)))(*operands)
            traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands))
            if traced and view.mesh is None:
                operands = refuse_many_devices(self.name, operands)
            run = self._run if traced or view.engine == "local" else self._compiled
            return run(view, static, *operands)

    def reshard(self, view: MeshView, static: Hashable, *operands):
        """Returns the operands with the layout that the op needs, and with types that vary over the same axes.

        Ops with a `custom_vjp` call it on their operands first, so that gradients have the types of operands. JAX then
        sums a gradient over the axes over which the type of its array did not vary.
        """
        if not view.explicit:
            return jax.tree.map(lambda x: vary_like(x, operands), operands)
        found = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, operands)
        return self._reshard(view, self.sharding(static, operands, found), operands)

    def rule(self, static: Any, operands: tuple) -> Rule:
        """Returns the parsed rule of the op for these operands."""
        made = self._rule(static, operands) if callable(self._rule) else self._rule
        text, sizes = (made, ()) if isinstance(made, str) else made
        given, results = (side.split(",") for side in text.split("->"))
        leaves, stars = [], {}  # the dims of "*c" are c0, c1, ...

        def expand(entry: str) -> tuple[str, ...]:
            dims = (stars.get(dim, ()) if dim[0] == "*" else (dim,) for dim in DIM.findall(entry))
            return tuple(itertools.chain(*dims))

        for entry, operand in zip(given, operands, strict=True):
            arrays = jax.tree.leaves(operand)
            parts = entry.strip(" {}").split("|")
            for part, array in zip(parts * (len(arrays) if len(parts) == 1 else 1), arrays, strict=bool(arrays)):
                dims = DIM.findall(part)
                for star in (dim for dim in dims if dim[0] == "*" and dim not in stars):
                    stars[star] = [f"{star[1:]}{i}" for i in range(array.ndim - len(dims) + 1)]
                leaves.append(expand(part))
        return Rule(tuple(leaves), tuple(map(expand, results)), sizes)

    def sharding(self, static: Any, operands: tuple, found: PyTree) -> OpSharding:
        """Returns the layout of the op; `found` has the spec of each operand leaf, None where it is unknown."""
        if self._sharding is not None:
            return self._sharding(static, operands, found)
        rule, axes = self.rule(static, operands), static.axes
        split = dict.fromkeys(TOKENS, axes.tokens)
        split |= {k: getattr(axes, v) if isinstance(v, str) else v(static) for k, v in self._split.items()}

        def axes_of(entry):
            return [name for dim in entry for name in split.get(dim, ())]

        def spec_of(entry):
            return Spec(*(split.get(dim, ()) for dim in entry if dim not in "@="))

        over = dict.fromkeys(name for entry in rule.leaves for name in axes_of(entry))
        reduce = [() if dims == ("=",) else tuple(n for n in over if n not in axes_of(dims)) for dims in rule.results]
        specs = jax.tree.unflatten(jax.tree.structure(operands), map(spec_of, rule.leaves))
        return OpSharding(specs, [spec_of(entry) for entry in rule.results], reduce)

    def propagated(self, view: MeshView, static: Any, operands: tuple, found: PyTree) -> OpSharding:
        """Returns `sharding` where XLA chose the specs that were found, and the declared one where no op can take them.

        A spec that XLA chose is no mistake of the caller, but the log says what it costs.
        """
        try:
            sharding = self.sharding(static, operands, found)
        except ValueError as error:
            log_once(f"{self.name}: {error}; the declared layout is used instead, which may move it unquantized")
            return self.sharding(static, operands, jax.tree.map(lambda x: None, operands))
        tree, tokens = jax.tree.structure(operands), set(view.axes.tokens)
        for specs in zip(tree.flatten_up_to(found), tree.flatten_up_to(sharding.operands), strict=True):
            here, there = (as_names(next(iter(of or ()), None)) for of in specs)
            if here != there and set(here) == set(there) == tokens:
                log_once(
                    f"moax moves tokens from their order over mesh axes {here} into that over {there}; "
                    "moax.Axes(tokens=...) can say the order"
                )
        return sharding

    def _reshard(self, view, sharding, operands):
        """Returns the operands in the layout of the op; raises ValueError where a size does not divide."""
        leaves, tree = jax.tree.flatten(operands)
        specs = tree.flatten_up_to(sharding.operands)
        for i, (leaf, to) in enumerate(zip(leaves, specs, strict=True)):
            check_divides(f"{self.name}: operand {i}", leaf.shape, to, view.axes)
        if view.explicit:
            leaves = [jax.sharding.reshard(x, NamedSharding(view.mesh, s)) for x, s in zip(leaves, specs, strict=True)]
        return tree.unflatten(leaves)

    def _run(self, view, static, *operands):
        """Runs the op by the local function or by `shard_map`."""
        found = jax.tree.map(lambda x: jax.typeof(x).sharding.spec if view.explicit else None, operands)
        sharding = self.sharding(static, operands, found)
        if view.engine == "local":
            return self.compute_shards(static, sharding, *operands, reduce=False)
        leaves, tree = jax.tree.flatten(self._reshard(view, sharding, operands))
        specs = tree.flatten_up_to(sharding.operands)
        mapped = jax.shard_map(
            lambda *shards: self.compute_shards(static, sharding, *tree.unflatten(shards)),
            mesh=view.mesh, in_specs=tuple(specs), out_specs=tuple(sharding.results), axis_names=view.mapped,
            # Inside a `shard_map` over other axes, types that vary over these must stay what they are.
            check_vma=any(map(varying, leaves)),
        )  # fmt: skip
        return mapped(*leaves)

    def compute_shards(self, static, sharding: OpSharding, *operands, reduce: bool = True):
        """Returns the results of one device; with `reduce`, summed over the axes of `sharding.reduce`."""
        layout = () if self._sharding is None else (sharding.layout,)
        results = self.local(static, *layout, *operands)
        over = sharding.reduce if reduce else [()] * len(results)
        return tuple(lax.psum(r, axes) if axes else r for r, axes in zip(results, over, strict=True))


def differentiable(
    forward: Callable, backward: Callable, once: str | None = None, plain: Callable | None = None
) -> Callable:
    """Makes run(view, static, *operands), which returns the results of `forward` and has the gradients of `backward`.

    Args:
      forward: forward(view, static, *operands) -> (results, saved). Both call `Op`s, so each direction has its rule.
      backward: backward(view, static, saved, cotangents) -> a gradient for each operand.
      once: the name of an op without second derivatives, which then raise Unsupported; None lets JAX derive them.
      plain: plain(view, static, *operands) -> results, which runs where nothing is differentiated; None runs `forward`.
    """
    run = jax.custom_vjp(plain or (lambda *operands: forward(*operands)[0]), nondiff_argnums=(0, 1))

    def guard(tree):  # the operands refuse, because a derivative of a result would first differentiate the op
        return tree if once is None else refuse_derivative(once, tree)

    def guarded_forward(view, static, *operands):
        guarded = guard(operands)
        results, saved = forward(view, static, *guarded)
        # A residual that is an operand stays this operand, because JAX would save a guarded one beside it.
        own = dict(zip(map(id, jax.tree.leaves(guarded)), jax.tree.leaves(operands), strict=True))
        return results, jax.tree.map(lambda v: own.get(id(v), v), saved)

    run.defvjp(guarded_forward, lambda view, static, *of_backward: backward(view, static, *guard(of_backward)))
    return run


def with_gradient(op: Op, grad: Op, save: Callable, pull: Callable, once: str | None = None) -> Callable:
    """Makes run(view, static, *operands) of an op and the op of its gradient.

    save(operands, results) returns the residuals, and pull(run, residuals, cotangents) a gradient for each operand,
    where run(*operands) runs `grad`. For `once` see `differentiable`.
    """

    def forward(view, static, *operands):
        results = op(view, static, *operands)
        return results, save(operands, results)

    run = differentiable(forward, lambda view, static, *of: pull(functools.partial(grad, view, static), *of), once)
    return lambda view, static, *operands: run(view, static, *op.reshard(view, static, *operands))


@functools.lru_cache(maxsize=4096)
def _bind(call: _Call) -> Callable:
    """Returns the function of global operands that makes the call; equal calls have the same function."""
    partitioned = custom_partitioning(call.compute)
    partitioned.def_partition(call.partition, sharding_rule=call.make_rule)

    @custom_vmap
    def function(*operands):
        return call.place(operands, partitioned(*refuse_derivative(call.op.name, operands)))

    @function.def_vmap
    def batch(size, batched, *operands):
        op = _Batch(call.op.name, call.op, tuple(jax.tree.leaves(batched)))
        results = _bind(_Call(op, call.view, call.static, op.rule(call.static, operands)))(*operands)
        return results, jax.tree.map(lambda _: True, results)

    derivable = jax.custom_jvp(function)
    # `custom_partitioning` has no derivatives, so those of the call run by `shard_map`, as they do on Explicit axes.
    derivable.defjvp(functools.partial(jax.jvp, call.compute))
    return derivable


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of an op by `custom_partitioning`, as a hashable value."""

    op: Op | _Batch
    view: MeshView
    static: Hashable
    rule: Rule

    def compute(self, *operands):
        """Returns the results by `shard_map`: `custom_partitioning` needs a function of global arrays for its types."""
        return self.op(self.view._replace(engine="shard_map"), self.static, *operands)

    def partition(self, mesh, operands, results):
        """Serves as the partition callback of `custom_partitioning`."""
        # JAX passes an empty mesh, and shardings without specs, where no argument of the program has a sharding.
        mesh = self.view.mesh if mesh.empty else mesh
        found = jax.tree.map(lambda x: getattr(x.sharding, "spec", None), operands)
        sharding, tree = self.op.propagated(self.view, self.static, operands, found), jax.tree.structure(operands)
        taken = tree.unflatten(NamedSharding(mesh, of) for of in tree.flatten_up_to(sharding.operands))
        each = zip(results, [NamedSharding(mesh, of) for of in sharding.results], strict=True)
        made = tuple(jax.tree.map(lambda _, to=to: to, result) for result, to in each)
        return mesh, functools.partial(self.op.compute_shards, self.static, sharding), made, taken

    def place(self, operands, results):
        """Returns the results; Shardy would replicate a dim that no operand names, so such a dim is constrained."""
        shared = [dim for dims in self.rule.leaves for dim in _letters(dims)]
        known = {name for dim in shared for name in (dim, *dim.strip("()").split())}
        specs = self.op.propagated(self.view, self.static, operands, jax.tree.map(lambda x: None, operands)).results

        def place_one(result, of: Spec, dims):
            follows = [dim in known for dim in _letters(dims)]
            if len(follows) == len(dims) and all(follows):
                return result
            entries = itertools.zip_longest(follows, of)
            to = Spec(*(FREE if follow else entry for follow, entry in entries))
            return jax.tree.map(lambda x: constrain(x, to), result)

        return tuple(map(place_one, results, specs, self.rule.results))

    def make_rule(self, mesh, operand_types, result_types):
        """Returns the Shardy rule of the call, as the rule callback of `custom_partitioning`."""
        name_call(self, mesh, operand_types, result_types)
        fresh = (f"z{i}" for i in itertools.count())

        def entry(dims, type_) -> str:  # the dims of a tree have no letter in common with other arrays
            letters = _letters(dims)
            own = len(type_.shape) - len(letters) if len(letters) < len(dims) else 0
            return " ".join([*letters, *itertools.islice(fresh, own)])

        # A tree of results has any number of leaves, and comes after all single results.
        made = list(self.rule.results)
        made += made[-1:] * (len(result_types) - len(made))
        operands, results = map(entry, self.rule.leaves, operand_types), map(entry, made, result_types)
        return f"{', '.join(operands)} -> {', '.join(results)}", dict(self.rule.sizes)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """An op under `jax.vmap`: leaves of the operands that are `batched`, and all results, have one more leading dim.

    The mesh axes without a role that split this dim keep splitting it: 4 stages over mesh axis "stage" of 4 devices are
    one stage a device.
    """

    name: str
    op: Op | _Batch
    batched: tuple[bool, ...]

    def __call__(self, view: MeshView, static: Hashable, *operands):
        """Returns the results of the op on all elements of the batch."""
        leaves, tree = jax.tree.flatten(operands)
        run = functools.partial(self.op, view, static)
        return jax.vmap(lambda *one: run(*tree.unflatten(one)), [0 if b else None for b in self.batched])(*leaves)

    def rule(self, static, operands) -> Rule:
        """Returns the rule of the op with a letter of the batch in front."""
        leaves, results, sizes = self.op.rule(static, self._one(operands))
        letter = f"v{len(results[0])}"  # each level of `jax.vmap` adds a dim to a result
        split = ((letter, *dims) if b else dims for dims, b in zip(leaves, self.batched, strict=True))
        return Rule(tuple(split), tuple((letter, *dims) for dims in results), sizes)

    def propagated(self, view: MeshView, static, operands, found) -> OpSharding:
        """Returns the layout of the batch, and as its `layout` that of one element."""
        leaves, tree = jax.tree.flatten(operands)
        specs = tree.flatten_up_to(found)
        split = (
            tuple(name for name in pad(of, leaf.ndim)[0] if name not in view.axes.all)
            for leaf, of, batched in zip(leaves, specs, self.batched, strict=True)
            if batched and of is not None
        )
        over = next(filter(None, split), ())
        inner = [of if of is None else Spec(*tuple(of)[b:]) for of, b in zip(specs, self.batched, strict=True)]
        one = self.op.propagated(view, static, self._one(operands), tree.unflatten(inner))
        wanted = zip(tree.flatten_up_to(one.operands), self.batched, strict=True)
        taken = tree.unflatten([Spec(over, *of) if b else of for of, b in wanted])
        return OpSharding(taken, [Spec(over, *of) for of in one.results], one.reduce, one)

    def compute_shards(self, static, sharding: OpSharding, *operands):
        """Returns the results of one device for its elements of the batch, one after the other."""
        leaves, tree = jax.tree.flatten(operands)

        def one(rows):
            rows = iter(rows)
            shards = [next(rows) if b else leaf for leaf, b in zip(leaves, self.batched, strict=True)]
            return self.op.compute_shards(static, sharding.layout, *tree.unflatten(shards))

        rows = list(itertools.compress(leaves, self.batched))
        if rows[0].shape[0] == 1:  # as on a mesh that gives each device one element
            return jax.tree.map(lambda y: y[None], one([x[0] for x in rows]))
        return lax.map(one, rows)

    def _one(self, operands):
        """Returns the types of the operands of one element."""
        leaves, tree = jax.tree.flatten(operands)
        types = zip(leaves, self.batched, strict=True)
        return tree.unflatten(jax.ShapeDtypeStruct(x.shape[b:], x.dtype) for x, b in types)


def _letters(dims: Sequence[str]) -> list[str]:
    """Returns the dims that an array may have in common with others: none of a tree, but for its batch."""
    return list(itertools.takewhile(lambda dim: dim not in "@=", dims))
