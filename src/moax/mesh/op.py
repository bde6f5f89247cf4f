"""`Op` makes a function of one device's shards an op on global arrays, on every kind of mesh.

    permute = Op("permute", permute_forward, "r h, r k -> n h, @n")

The rule is the layout of operands and results, the sums over devices, and the Shardy rule:

- A letter is a dim. t, r and n are split over the axes of tokens; other dims are whole. Operands and results with a
  letter in common are split alike: "t h, h e -> t e".
- A result is summed over the axes that split an operand, and no dim of this result: with "t h, t e -> h e" each device
  has a term of the result, and the terms are summed over the axes of t.
- "@n" is a tree of arrays, or None. The leading dim of each array is split as n is. The array shares no dim with other
  arrays. "@" is a tree of whole arrays.
- "{n | r k}" is a tree with these entries. "*c" is any number of dims.

A weight may have several layouts. Ops on weights compute theirs by a function `sharding` in place of the rule.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
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

DIM = re.compile(r"@|\*?\w+")
TOKENS = ("t", "r", "n")  # the letters that the axes of tokens split in every rule


class OpSharding(NamedTuple):
    """The layout of an op."""

    operands: PyTree[Spec | None]  # a spec for each leaf
    results: Sequence[Spec]  # a spec for each result, which holds for all of its leaves
    reduce: Sequence[Names]  # for each result, the axes over which the local results are summed
    layout: Any = None  # the second argument of the local function; see `Op`


class Dims(NamedTuple):
    """The dims that an array may share with other arrays, and the leading dims of a tree's own, None for no tree."""

    shared: tuple[str, ...]
    own: tuple[str, ...] | None = None


class Rule(NamedTuple):
    """A parsed rule: the dims of each leaf of the operands and of each result."""

    leaves: tuple[Dims, ...]
    results: tuple[Dims, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op on global arrays: op(view, static, *operands) -> a tuple of results.

    Attributes:
      name: the name of the op in profiles, compiled programs and errors.
      local: local(static, *operands) -> a result, or a tuple of them. It computes on shards and calls collectives by
        axis name. `static` is hashable and has the attribute `axes`, the mesh axes by role.
      rule: the rule; or a function of (static, operands) that returns it.
      sharding: sharding(static, operands, operand_specs) -> OpSharding, in place of the layout that the rule gives.
        `operand_specs` has the spec of each operand leaf, None where it is unknown. The local function is then
        local(static, layout, *operands). `sharding` raises ValueError for a spec that the op cannot take.
      content: the functions of the op, from whose text `name_call` makes a key. Functions of moax are names, because
        the key covers the sources of moax. Other functions have an address in their text, which makes no stable key.
    """

    name: str
    local: Callable = dataclasses.field(repr=False)
    rule: str | Callable[[Any, tuple], str] = dataclasses.field(repr=False)
    sharding: Callable[[Any, tuple, PyTree], OpSharding] | None = dataclasses.field(default=None, repr=False)
    content: Any = dataclasses.field(init=False)

    def __post_init__(self):
        functions = [f for f in (self.local, self.rule, self.sharding) if callable(f)]
        object.__setattr__(self, "content", list(map(_describe_function, functions)))

    def __call__(self, view: MeshView, static: Hashable, *operands):
        """Returns the results of the op on `operands`, computed by the engine of `view`."""
        with jax.named_scope(self.name):
            if view.engine == "custom_partitioning":
                return _bind(self, view, static, self.parse_rule(static, operands))(*operands)
            traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands))
            if view.engine == "local":
                if traced and view.mesh is None:
                    operands = refuse_many_devices(self.name, operands)
                sharding = self.find_sharding(static, operands)
                return self.compute_shards(static, sharding, *operands, reduce=False)
            map_shards = self.map_shards if traced else self.compiled
            return map_shards(view, static, *operands)

    @functools.cached_property
    def compiled(self) -> Callable:
        """`map_shards` as one program, for operands that are not traced."""
        return jax.jit(jax.named_scope(self.name)(self.map_shards), static_argnums=(0, 1))

    def map_shards(self, view: MeshView, static: Hashable, *operands):
        """Returns the results of the op on `operands`, computed by a `shard_map`."""
        sharding, operands = self.lay_out(view, static, *operands)
        mapped = jax.shard_map(
            functools.partial(self.compute_shards, static, sharding),
            mesh=view.mesh,
            in_specs=sharding.operands,
            out_specs=tuple(sharding.results),
            axis_names=set(view.mesh.axis_names).difference(view.mesh.manual_axes),
            # Inside a `shard_map` over other axes, the types of operands must keep varying over these axes.
            check_vma=any(map(varying, jax.tree.leaves(operands))),
        )
        return mapped(*operands)

    def lay_out(self, view: MeshView, static: Hashable, *operands) -> tuple[OpSharding, tuple]:
        """Returns the layout of the op, and the operands in it, with types that vary over the same axes.

        Ops with a `custom_vjp` lay their operands out first, so that gradients have the types of operands. JAX then
        sums a gradient over the axes over which the type of its array did not vary.

        Raises:
          ValueError: the mesh axes of a dim do not divide its size.
        """
        leaves, tree = jax.tree.flatten(operands)
        known_specs = [jax.typeof(x).sharding.spec if view.explicit else None for x in leaves]
        sharding = self.find_sharding(static, operands, tree.unflatten(known_specs))
        specs = tree.flatten_up_to(sharding.operands)
        if view.engine != "local":  # local operands are shards
            for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
                check_divides(f"{self.name}: operand {i}", leaf.shape, spec, view.axes)
        if view.explicit:
            shardings = [NamedSharding(view.mesh, spec) for spec in specs]
            leaves = list(map(jax.sharding.reshard, leaves, shardings))
        return sharding, tree.unflatten(vary_like(x, leaves) for x in leaves)

    def parse_rule(self, static: Any, operands: tuple) -> Rule:
        """Returns the parsed rule of the op for these operands."""
        rule = self.rule
        if callable(rule):
            rule = rule(static, operands)
        operand_side, result_side = rule.split("->")
        letters_of_leaves: list[list[str]] = []
        stars: dict[str, list[str]] = {}  # the dims of "*c" are c0, c1, ...
        for entry, operand in zip(operand_side.split(","), operands, strict=True):
            arrays = jax.tree.leaves(operand)
            parts = [DIM.findall(part) for part in entry.strip(" {}").split("|")]
            if len(parts) == 1:
                parts = parts * len(arrays)
            for letters, array in zip(parts, arrays, strict=bool(arrays)):
                for letter in letters:
                    if letter[0] == "*":
                        count = array.ndim - len(letters) + 1
                        stars.setdefault(letter, [f"{letter[1:]}{i}" for i in range(count)])
                letters_of_leaves.append(letters)
        leaves = tuple(_make_dims(letters, stars) for letters in letters_of_leaves)
        results = tuple(_make_dims(DIM.findall(entry), stars) for entry in result_side.split(","))
        return Rule(leaves, results)

    def find_sharding(
        self, static: Any, operands: tuple, operand_specs: PyTree = None, *, chosen: bool = False
    ) -> OpSharding:
        """Returns the layout of the op; `operand_specs` has the spec of each operand leaf, None where it is unknown.

        Where XLA has `chosen` these specs, they are no mistake of the caller: an op that cannot take them has the
        declared layout, and the log says so.
        """
        if self.sharding is not None:
            unknown = jax.tree.map(lambda x: None, operands)
            if operand_specs is None:
                operand_specs = unknown
            try:
                return self.sharding(static, operands, operand_specs)
            except ValueError as error:
                if not chosen:
                    raise
                if isinstance(error, WholeWeight):
                    log_once(WholeWeight.WARNING)  # one warning for all weights and ops of a layer
                else:
                    log_once(f"{error}; the declared layout is used instead, which may move it unquantized")
                return self.sharding(static, operands, unknown)
        rule = self.parse_rule(static, operands)
        tokens = static.axes.tokens
        leaf_specs = [_split_tokens(dims, tokens) for dims in rule.leaves]
        result_specs = [_split_tokens(dims, tokens) for dims in rule.results]
        tokens_are_split = any(map(any, leaf_specs))
        reduce = [tokens if tokens_are_split and not any(spec) else () for spec in result_specs]
        return OpSharding(jax.tree.structure(operands).unflatten(leaf_specs), result_specs, reduce)

    def compute_shards(self, static, sharding: OpSharding, *operands, reduce=True) -> tuple[Any, ...]:
        """Returns the results of one device; with `reduce`, summed over the axes of `sharding.reduce`."""
        results: Any
        if self.sharding is None:
            results = self.local(static, *operands)
        else:
            results = self.local(static, sharding.layout, *operands)
        if not isinstance(results, tuple):
            results = (results,)
        if not reduce:
            return results
        pairs = zip(results, sharding.reduce, strict=True)
        return tuple(lax.psum(result, axes) if axes else result for result, axes in pairs)


def _describe_function(function: Any) -> Any:
    """Returns the name of a function of moax, with the arguments that a partial has bound; another function itself."""
    base = getattr(function, "func", function)
    if not inspect.isfunction(base) or base.__module__.split(".")[0] != __name__.split(".")[0]:
        return function
    name = f"{base.__module__}.{base.__qualname__}"
    return name, getattr(function, "args", ()), getattr(function, "keywords", {})


def _make_dims(letters: Sequence[str], stars: dict[str, list[str]]) -> Dims:
    """Returns the dims of an entry of a rule; `stars` has the dims of each "*c"."""
    dims: list[str] = []
    for letter in letters:
        dims += stars.get(letter, [letter])
    if dims[:1] == ["@"]:
        return Dims((), tuple(dims[1:]))
    return Dims(tuple(dims))


def _split_tokens(dims: Dims, tokens: Names) -> Spec:
    """Returns the spec of an array: the axes `tokens` split its dims of tokens, and no other dim is split."""
    letters = dims.shared + (dims.own or ())
    return Spec(*(tokens if letter in TOKENS else () for letter in letters))


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
    if plain is None:

        def plain(*operands):
            return forward(*operands)[0]

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def run(view, static, mark, *operands):
        return plain(view, static, *operands)

    def guard(tree):
        # The operands refuse, because a derivative of a result would first differentiate the op.
        if not once:
            return tree
        return refuse_derivative(name, tree)

    def guarded_forward(view, static, mark, *operands):
        guarded = guard(operands)
        results, saved = forward(view, static, *guarded)
        # A residual that is an operand stays this operand, because JAX would save a guarded one beside it.
        guarded_ids = map(id, jax.tree.leaves(guarded))
        operand_of = dict(zip(guarded_ids, jax.tree.leaves(operands), strict=True))
        return results, jax.tree.map(lambda v: operand_of.get(id(v), v), saved)

    def guarded_backward(view, static, saved, cotangents):
        saved, cotangents = guard((saved, cotangents))
        return None, *backward(view, static, saved, cotangents)

    def stop_integers(x):
        # JAX would derive values that are computed from integers, such as a maximum over devices, which has no rule.
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return lax.stop_gradient(x)

    def marked(view, static, *operands):
        mark = refuse_forward_mode(name, operands)
        return jax.tree.map(stop_integers, run(view, static, mark, *operands))

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

    def backward(view, static, saved, cotangents):
        return pull(functools.partial(grad, view, static), saved, cotangents)

    def run(view, static, *operands):
        _, operands = op.lay_out(view, static, *operands)
        return run_laid_out(view, static, *operands)

    run_laid_out = differentiable(name, forward, backward, once, plain=op.__call__)
    return run


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
                constrained = Spec(*(FREE if dim in known else entry for dim, entry in entries))
                results[i] = jax.tree.map(functools.partial(constrain, to=constrained), results[i])
        return tuple(results)

    @function.def_vmap
    def run_batch(size, batched, *operands):
        batch_op = _Batch(op, view.axes.all, tuple(jax.tree.leaves(batched)))
        batch_rule = batch_op.parse_rule(static, operands)
        results = _bind(batch_op, view, static, batch_rule)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    derivable = jax.custom_jvp(function)
    derivable.defjvp(functools.partial(jax.jvp, mapped))
    return derivable


def _partition(op: Op | _Batch, view: MeshView, static: Hashable, mesh, operands, results):
    """Returns the local function and its layout, as the partition callback of `custom_partitioning`."""
    # JAX passes an empty mesh, and shardings without specs, where no argument of the program has a sharding.
    if mesh.empty:
        mesh = view.mesh
    operand_specs = jax.tree.map(lambda x: getattr(x.sharding, "spec", None), operands)
    sharding = op.find_sharding(static, operands, operand_specs, chosen=True)
    tree = jax.tree.structure(operands)
    specs_before = tree.flatten_up_to(operand_specs)
    specs_after = tree.flatten_up_to(sharding.operands)
    for before, after in zip(specs_before, specs_after, strict=True):
        for old_entry, new_entry in zip(before or (), after or (), strict=False):
            _log_moved_tokens(as_names(old_entry), as_names(new_entry), view.axes.tokens)

    def make_shardings(specs: PyTree[Spec]) -> PyTree[NamedSharding]:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    result_specs = jax.tree.broadcast(tuple(sharding.results), results)
    local = functools.partial(op.compute_shards, static, sharding)
    return mesh, local, make_shardings(result_specs), make_shardings(sharding.operands)


def _log_moved_tokens(old_names: Names, new_names: Names, tokens: Names) -> None:
    """Logs that an op needs tokens in another order over the mesh than they have."""
    if old_names != new_names and set(old_names) == set(new_names) == set(tokens):
        log_once(
            f"moax moves tokens from their order over mesh axes {old_names} into that over "
            f"{new_names}; moax.Axes(tokens=...) can say the order"
        )


def _make_shardy_rule(call: tuple[Op | _Batch, MeshView, Hashable, Rule], mesh, operand_types, result_types):
    """Returns the Shardy rule of a call, which it also names, as the rule callback of `custom_partitioning`."""
    op, _, _, rule = call
    name_call(op.name, (call, mesh), operand_types, result_types)
    fresh_dims = (f"z{i}" for i in itertools.count())
    operand_side = _write_shardy_side(rule.leaves, operand_types, fresh_dims)
    result_side = _write_shardy_side(rule.results, result_types, fresh_dims)
    return f"{operand_side} -> {result_side}"


def _write_shardy_side(entries: tuple[Dims, ...], types: Sequence, fresh: Iterator[str]) -> str:
    """Returns the operands or the results of a Shardy rule; a dim that no other array shares has a fresh name."""
    # A tree of results has any number of leaves, also none, and comes after all single results.
    entries = (*entries, *entries[-1:] * (len(types) - len(entries)))
    texts = []
    for dims, array in zip(entries, types, strict=False):
        names = list(dims.shared)
        if dims.own is not None:
            names += itertools.islice(fresh, len(array.shape) - len(dims.shared))
        texts.append(" ".join(names))
    return ", ".join(texts)


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

        def run_element(*element):
            return self.op(view, static, *tree.unflatten(element))

        in_axes = [0 if batched else None for batched in self.batched]
        return jax.vmap(run_element, in_axes)(*leaves)

    def parse_rule(self, static, operands) -> Rule:
        """Returns the rule of the op with a letter of the batch in front."""
        leaves, results = self.op.parse_rule(static, self._element_types(operands))
        letter = f"v{len(results[0].shared)}"  # each level of `jax.vmap` adds a dim to a result

        def add_letter(dims: Dims) -> Dims:
            return dims._replace(shared=(letter, *dims.shared))

        pairs = zip(leaves, self.batched, strict=True)
        batch_leaves = tuple(add_letter(dims) if batched else dims for dims, batched in pairs)
        return Rule(batch_leaves, tuple(map(add_letter, results)))

    def find_sharding(self, static, operands, operand_specs=None, *, chosen: bool = False) -> OpSharding:
        """Returns the layout of the batch, and as its `layout` that of one element."""
        leaves, tree = jax.tree.flatten(operands)
        specs: list[Spec | None] = [None] * len(leaves)
        if operand_specs is not None:
            specs = tree.flatten_up_to(operand_specs)
        batch_axes: Names = ()
        for i, (leaf, spec, batched) in enumerate(zip(leaves, specs, self.batched, strict=True)):
            if spec is None or not batched:
                continue
            if not batch_axes:
                names = pad(spec, leaf.ndim)[0]
                batch_axes = tuple(name for name in names if name not in self.roles)
            specs[i] = Spec(*tuple(spec)[1:])
        types = self._element_types(operands)
        element = self.op.find_sharding(static, types, tree.unflatten(specs), chosen=chosen)
        pairs = zip(tree.flatten_up_to(element.operands), self.batched, strict=True)
        batch_specs = [Spec(batch_axes, *spec) if batched else spec for spec, batched in pairs]
        result_specs = [Spec(batch_axes, *spec) for spec in element.results]
        return OpSharding(tree.unflatten(batch_specs), result_specs, element.reduce, element)

    def compute_shards(self, static, sharding: OpSharding, *operands):
        """Returns the results of one device for its elements of the batch, one after the other."""
        leaves, tree = jax.tree.flatten(operands)

        def compute_element(batched_leaves):
            rest = iter(batched_leaves)
            pairs = zip(leaves, self.batched, strict=True)
            element = [next(rest) if batched else leaf for leaf, batched in pairs]
            return self.op.compute_shards(static, sharding.layout, *tree.unflatten(element))

        batched_leaves = list(itertools.compress(leaves, self.batched))
        if batched_leaves[0].shape[0] == 1:  # as on a mesh that gives each device one element
            return jax.tree.map(lambda y: y[None], compute_element([x[0] for x in batched_leaves]))
        return lax.map(compute_element, batched_leaves)

    def _element_types(self, operands):
        """Returns the types of the operands of one element."""
        leaves, tree = jax.tree.flatten(operands)
        pairs = zip(leaves, self.batched, strict=True)
        return tree.unflatten(jax.ShapeDtypeStruct(x.shape[batched:], x.dtype) for x, batched in pairs)
