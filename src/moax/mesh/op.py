"""`Op` makes a function of one device's shards an op on global arrays, on every kind of mesh.

    permute = Op("permute", permute_forward, "r h, r k -> n h, @n")

The rule is the layout of operands and results, the sums over devices, and the Shardy rule:

- A letter is a dim. t, r and n are split over the axes of tokens; other dims are whole. Operands and results with a
  letter in common are split alike: "t h, h e -> t e".
- A result is summed over the axes that split an operand, and no dim of this result: with "t h, t e -> h e" each device
  has a term of the result, and the terms are summed over the axes of t.
- "@n" is a tree of arrays, or None. Their leading dims are split as n, and have no dim in common with other arrays.
  "@" is a tree of whole arrays.
- "{n | r k}" is a tree with these entries. "*c" is any number of dims, and "(b i)" a dim of blocks b of i elements.

A weight may have several layouts. Ops on weights compute theirs by a function `sharding` in place of the rule.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from moax.checks import log_once
from moax.mesh.axes import Names, as_names
from moax.mesh.collectives import vary_like, varying
from moax.mesh.lowering import name_call, refuse_derivative, refuse_forward_mode, refuse_many_devices
from moax.mesh.specs import FREE, MeshView, Spec, WholeWeight, check_divides, constrain, pad

DIM = re.compile(r"@|\([^)]*\)|\*?\w+")
TOKENS = ("t", "r", "n")  # the letters that the axes of tokens split in every rule


class OpSharding(NamedTuple):
    """The layout of an op."""

    operands: PyTree[Spec | None]  # a spec for each leaf
    results: Sequence[Spec]  # a spec for each result, which holds for all of its leaves
    reduce: Sequence[Names]  # for each result, the axes over which the local results are summed
    layout: Any = None  # what the local function takes as its second argument; see `Op`


class Dims(NamedTuple):
    """The dims of an array: those it may share with other arrays, and the leading ones of a tree; None for no tree."""

    shared: tuple[str, ...]
    own: tuple[str, ...] | None = None


class Rule(NamedTuple):
    """A parsed rule: the dims of each leaf of the operands and of each result, and (name, size) of dims in blocks."""

    leaves: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op on global arrays: op(view, static, *operands) -> a tuple of results.

    Attributes:
      name: the name of the op in profiles, compiled programs and errors.
      local: local(static, *operands) -> a result, or a tuple of them. It computes on shards and calls collectives by
        axis name. `static` is hashable and has the attribute `axes`, the mesh axes by role.
      rule: the rule; or a function of (static, operands) that returns it, and the sizes of dims inside blocks.
      sharding: sharding(static, operands, found) -> OpSharding, in place of the layout that the rule gives. `found` has
        the spec of each operand leaf, None where it is unknown. The local function is then local(static, layout,
        *operands). It raises ValueError for a spec that the op cannot take.
      content: what stands for the functions in the text that `name_call` makes a key of: names where all are moax's
        own, whose sources are part of the key, else the functions, which have an address and so no key.
    """

    name: str
    local: Callable = dataclasses.field(repr=False)
    rule: str | Callable[[Any, tuple], str | tuple[str, tuple]] = dataclasses.field(repr=False)
    sharding: Callable[[Any, tuple, PyTree], OpSharding] | None = dataclasses.field(default=None, repr=False)
    content: Any = dataclasses.field(init=False)

    def __post_init__(self):
        content: Any = [f for f in (self.local, self.rule, self.sharding) if callable(f)]
        parts = [
            (getattr(f, "func", f), getattr(f, "args", ()), getattr(f, "keywords", {})) for f in content
        ]  # partials
        if all(inspect.isfunction(f) and f.__module__.split(".")[0] == __name__.split(".")[0] for f, *_ in parts):
            content = [(f"{f.__module__}.{f.__qualname__}", *bound) for f, *bound in parts]
        object.__setattr__(self, "content", content)

    def __call__(self, view: MeshView, static: Hashable, *operands):
        """Returns the results of the op on `operands`, computed by the engine of `view`."""
        with jax.named_scope(self.name):
            if view.engine == "custom_partitioning":
                return _bind(self, view, static, self.parse_rule(static, operands))(*operands)
            traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands))
            if view.engine == "local":
                if traced and view.mesh is None:
                    operands = refuse_many_devices(self.name, operands)
                return self.compute_shards(static, self.find_sharding(static, operands), *operands, reduce=False)
            if not traced:
                return self.compiled(view, static, *operands)
            sharding, operands = self.lay_out(view, static, *operands)
            mapped = jax.shard_map(
                functools.partial(self.compute_shards, static, sharding),
                mesh=view.mesh, in_specs=sharding.operands, out_specs=tuple(sharding.results),
                axis_names=set(view.mesh.axis_names).difference(view.mesh.manual_axes),
                # Inside a `shard_map` over other axes, types that vary over these must stay what they are.
                check_vma=any(map(varying, jax.tree.leaves(operands))),
            )  # fmt: skip
            return mapped(*operands)

    @functools.cached_property
    def compiled(self) -> Callable:
        """The op as one program, for operands that are not traced."""
        return jax.jit(self.__call__, static_argnums=(0, 1))

    def lay_out(self, view: MeshView, static: Hashable, *operands) -> tuple[OpSharding, tuple]:
        """Returns the layout of the op, and the operands in it, with types that vary over the same axes.

        Ops with a `custom_vjp` lay their operands out first, so that gradients have the types of operands. JAX then
        sums a gradient over the axes over which the type of its array did not vary.

        Raises:
          ValueError: the mesh axes of a dim do not divide its size.
        """
        leaves, tree = jax.tree.flatten(operands)
        found = tree.unflatten(jax.typeof(x).sharding.spec if view.explicit else None for x in leaves)
        sharding = self.find_sharding(static, operands, found)
        specs = tree.flatten_up_to(sharding.operands)
        if view.engine != "local":  # local operands are shards
            for i, (leaf, to) in enumerate(zip(leaves, specs, strict=True)):
                check_divides(f"{self.name}: operand {i}", leaf.shape, to, view.axes)
        if view.explicit:
            leaves = [jax.sharding.reshard(x, NamedSharding(view.mesh, s)) for x, s in zip(leaves, specs, strict=True)]
        return sharding, tree.unflatten(vary_like(x, leaves) for x in leaves)

    def parse_rule(self, static: Any, operands: tuple) -> Rule:
        """Returns the parsed rule of the op for these operands."""
        made = self.rule(static, operands) if callable(self.rule) else self.rule
        text, sizes = (made, ()) if isinstance(made, str) else made
        given, results = (side.split(",") for side in text.split("->"))
        leaves, stars = [], {}  # the dims of "*c" are c0, c1, ...
        for entry, operand in zip(given, operands, strict=True):
            arrays, parts = jax.tree.leaves(operand), [DIM.findall(part) for part in entry.strip(" {}").split("|")]
            for dims, array in zip(parts * (len(arrays) if len(parts) == 1 else 1), arrays, strict=bool(arrays)):
                for star in (dim for dim in dims if dim[0] == "*"):
                    stars.setdefault(star, [f"{star[1:]}{i}" for i in range(array.ndim - len(dims) + 1)])
                leaves.append(dims)
        entries = []
        for found in (*leaves, *map(DIM.findall, results)):
            dims = tuple(itertools.chain(*(stars.get(dim, (dim,)) for dim in found)))
            entries.append(Dims((), dims[1:]) if dims[:1] == ("@",) else Dims(dims))
        return Rule(tuple(entries[: len(leaves)]), tuple(entries[len(leaves) :]), sizes)

    def find_sharding(self, static: Any, operands: tuple, found: PyTree = None, *, chosen: bool = False) -> OpSharding:
        """Returns the layout of the op; `found` has the spec of each operand leaf, None where it is unknown.

        Where XLA has `chosen` the specs that were found, they are no mistake of the caller: an op that cannot take them
        has the declared layout, and the log says so.
        """
        if self.sharding is not None:
            unknown = jax.tree.map(lambda x: None, operands)
            try:
                return self.sharding(static, operands, unknown if found is None else found)
            except ValueError as error:
                if not chosen:
                    raise
                whole = isinstance(error, WholeWeight)  # one warning for all weights and ops of a layer
                moved = f"{error}; the declared layout is used instead, which may move it unquantized"
                log_once(WholeWeight.WARNING if whole else moved)
                return self.sharding(static, operands, unknown)
        rule, tokens = self.parse_rule(static, operands), static.axes.tokens
        leaves, results = (
            [Spec(*(tokens if dim in TOKENS else () for dim in dims.shared + (dims.own or ()))) for dims in side]
            for side in (rule.leaves, rule.results)
        )
        split = any(map(any, leaves))  # by the axes of tokens, and a result that they do not split is then summed
        reduce = [tokens if split and not any(to) else () for to in results]
        return OpSharding(jax.tree.structure(operands).unflatten(leaves), results, reduce)

    def compute_shards(self, static, sharding: OpSharding, *operands, reduce: bool = True):
        """Returns the results of one device; with `reduce`, summed over the axes of `sharding.reduce`."""
        layout = () if self.sharding is None else (sharding.layout,)
        results = self.local(static, *layout, *operands)
        results = results if isinstance(results, tuple) else (results,)
        over = sharding.reduce if reduce else [()] * len(results)
        return tuple(lax.psum(r, axes) if axes else r for r, axes in zip(results, over, strict=True))


def differentiable(
    name: str, forward: Callable, backward: Callable, once: bool = True, plain: Callable | None = None
) -> Callable:
    """Makes run(view, static, *operands), which returns the results of `forward` and has the gradients of `backward`.

    A forward-mode derivative raises Unsupported, and a result of integers has no derivative.

    Args:
      name: the public function that messages name.
      forward: forward(view, static, *operands) -> (results, saved). Both call `Op`s, so each direction has its rule.
      backward: backward(view, static, saved, cotangents) -> a gradient for each operand.
      once: whether second derivatives raise Unsupported; otherwise JAX derives them.
      plain: plain(view, static, *operands) -> results, which runs where nothing is differentiated; None runs `forward`.
    """
    plain = plain or (lambda *operands: forward(*operands)[0])
    run = jax.custom_vjp(lambda view, static, mark, *operands: plain(view, static, *operands), nondiff_argnums=(0, 1))

    def guard(tree):  # the operands refuse, because a derivative of a result would first differentiate the op
        return refuse_derivative(name, tree) if once else tree

    def guarded_forward(view, static, mark, *operands):
        guarded = guard(operands)
        results, saved = forward(view, static, *guarded)
        # A residual that is an operand stays this operand, because JAX would save a guarded one beside it.
        own = dict(zip(map(id, jax.tree.leaves(guarded)), jax.tree.leaves(operands), strict=True))
        return results, jax.tree.map(lambda v: own.get(id(v), v), saved)

    def guarded_backward(view, static, *of_backward):
        return None, *backward(view, static, *guard(of_backward))

    def stop_integers(x):  # JAX would derive what is computed from them, as a maximum over devices, which has no rule
        return x if jnp.issubdtype(x.dtype, jnp.inexact) else lax.stop_gradient(x)

    def marked(view, static, *operands):
        return jax.tree.map(stop_integers, run(view, static, refuse_forward_mode(name, operands), *operands))

    run.defvjp(guarded_forward, guarded_backward)
    return marked


def with_gradient(name: str, op: Op, grad: Op, save: Callable, pull: Callable, once: bool = True) -> Callable:
    """Makes run(view, static, *operands) of an op and the op of its gradient.

    save(operands, results) returns the residuals, and pull(run, residuals, cotangents) a gradient for each operand,
    where run(*operands) runs `grad`. For `name` and `once` see `differentiable`.
    """

    def forward(view, static, *operands):
        results = op(view, static, *operands)
        return results, save(operands, results)

    def backward(view, static, *of_backward):
        return pull(functools.partial(grad, view, static), *of_backward)

    run = differentiable(name, forward, backward, once, plain=op.__call__)
    return lambda view, static, *operands: run(view, static, *op.lay_out(view, static, *operands)[1])


@functools.lru_cache(maxsize=4096)
def _bind(op: Op | _Batch, view: MeshView, static: Hashable, rule: Rule) -> Callable:
    """Returns the function of global operands that makes a call by `custom_partitioning`; one for equal arguments."""
    # `custom_partitioning` needs a function of global arrays for its types, and has no derivatives: the call by
    # `shard_map` gives both.
    mapped = functools.partial(op, view._replace(engine="shard_map"), static)
    partitioned = custom_partitioning(mapped)
    partitioned.def_partition(
        functools.partial(_partition, op, view, static),
        sharding_rule=functools.partial(_make_shardy_rule, (op, view, static, rule)),
    )
    shared = [dim for dims in rule.leaves for dim in dims.shared]
    known = {name for dim in shared for name in (dim, *dim.strip("()").split())}

    @custom_vmap
    def function(*operands):
        specs = op.find_sharding(static, operands).results
        results = list(partitioned(*refuse_derivative(op.name, operands)))
        for i, (dims, spec) in enumerate(zip(rule.results, specs, strict=True)):
            # Shardy would replicate a dim that no operand names, so such a dim is constrained.
            if dims.own is not None or not known.issuperset(dims.shared):
                entries = itertools.zip_longest(dims.shared, spec)
                to = Spec(*(FREE if dim in known else entry for dim, entry in entries))
                results[i] = jax.tree.map(functools.partial(constrain, to=to), results[i])
        return tuple(results)

    @function.def_vmap
    def batch(size, batched, *operands):
        of_batch = _Batch(op, view.axes.all, tuple(jax.tree.leaves(batched)))
        results = _bind(of_batch, view, static, of_batch.parse_rule(static, operands))(*operands)
        return results, jax.tree.map(lambda _: True, results)

    derivable = jax.custom_jvp(function)
    derivable.defjvp(functools.partial(jax.jvp, mapped))
    return derivable


def _partition(op: Op | _Batch, view: MeshView, static: Hashable, mesh, operands, results):
    """Returns the local function and its layout, as the partition callback of `custom_partitioning`."""
    # JAX passes an empty mesh, and shardings without specs, where no argument of the program has a sharding.
    mesh, tree = view.mesh if mesh.empty else mesh, jax.tree.structure(operands)
    found = jax.tree.map(lambda x: getattr(x.sharding, "spec", None), operands)
    sharding = op.find_sharding(static, operands, found, chosen=True)
    for pair in zip(tree.flatten_up_to(found), tree.flatten_up_to(sharding.operands), strict=True):
        for here, there in zip(*(map(as_names, spec or ()) for spec in pair), strict=False):
            if here != there and set(here) == set(there) == set(view.axes.tokens):
                log_once(
                    f"moax moves tokens from their order over mesh axes {here} into that over {there}; "
                    "moax.Axes(tokens=...) can say the order"
                )
    specs = jax.tree.broadcast(tuple(sharding.results), results), sharding.operands
    made, given = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return mesh, functools.partial(op.compute_shards, static, sharding), made, given


def _make_shardy_rule(call: tuple[Op | _Batch, MeshView, Hashable, Rule], mesh, operand_types, result_types):
    """Returns the Shardy rule of a call, which it also names, as the rule callback of `custom_partitioning`."""
    name_call(call[0].name, (call, mesh), operand_types, result_types)
    rule, fresh, sides = call[-1], (f"z{i}" for i in itertools.count()), []
    for entries, types in ((rule.leaves, operand_types), (rule.results, result_types)):
        # A tree of results has any number of leaves, also none, and comes after all single results.
        entries, texts = (*entries, *entries[-1:] * (len(types) - len(entries))), []
        for dims, array in zip(entries, types, strict=False):
            own = 0 if dims.own is None else len(array.shape) - len(dims.shared)
            texts.append(" ".join([*dims.shared, *itertools.islice(fresh, own)]))
        sides.append(", ".join(texts))
    return " -> ".join(sides), dict(rule.sizes)


@dataclasses.dataclass(frozen=True)
class _Batch:
    """An op under `jax.vmap`: leaves of the operands that are `batched`, and all results, have one more leading dim.

    The mesh axes without a role that split this dim keep splitting it: 4 stages over mesh axis "stage" of 4 devices are
    one stage a device.
    """

    op: Op | _Batch
    roles: Names
    batched: tuple[bool, ...]

    @property
    def name(self) -> str:
        return self.op.name

    def __call__(self, view: MeshView, static: Hashable, *operands):
        """Returns the results of the op on all elements of the batch."""
        leaves, tree = jax.tree.flatten(operands)
        run = functools.partial(self.op, view, static)
        return jax.vmap(lambda *one: run(*tree.unflatten(one)), [0 if b else None for b in self.batched])(*leaves)

    def parse_rule(self, static, operands) -> Rule:
        """Returns the rule of the op with a letter of the batch in front."""
        leaves, results, sizes = self.op.parse_rule(static, self._one(operands))
        letter = f"v{len(results[0].shared)}"  # each level of `jax.vmap` adds a dim to a result
        split = ((*leaves, *results), (*self.batched, *[True] * len(results)))
        made = [dims._replace(shared=(letter, *dims.shared)) if b else dims for dims, b in zip(*split, strict=True)]
        return Rule(tuple(made[: len(leaves)]), tuple(made[len(leaves) :]), sizes)

    def find_sharding(self, static, operands, found: PyTree = None, *, chosen: bool = False) -> OpSharding:
        """Returns the layout of the batch, and as its `layout` that of one element."""
        leaves, tree = jax.tree.flatten(operands)
        specs: list[Spec | None] = [None] * len(leaves) if found is None else tree.flatten_up_to(found)
        over: Names = ()
        for i, (leaf, of, batched) in enumerate(zip(leaves, specs, self.batched, strict=True)):
            if of is not None and batched:
                over = over or tuple(name for name in pad(of, leaf.ndim)[0] if name not in self.roles)
                specs[i] = Spec(*tuple(of)[1:])
        one = self.op.find_sharding(static, self._one(operands), tree.unflatten(specs), chosen=chosen)
        wanted = zip(tree.flatten_up_to(one.operands), self.batched, strict=True)
        taken = tree.unflatten([Spec(over, *of) if batched else of for of, batched in wanted])
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
