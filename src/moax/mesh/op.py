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
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
from moax.mesh.lowering import name_by_content, refuse_derivative, refuse_export, refuse_many_devices
from moax.mesh.place import constrain
from moax.mesh.specs import Spec, check_divides, pad, spec
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
    layout: Hashable = None


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
        self.__name__, self.local, self._rule, self._split, self._sharding = name, local, rule, split or {}, sharding
        self._compiled = jax.jit(self._run, static_argnums=(0, 1))

    def __call__(self, view: MeshView, static: Hashable, *operands):
        """Returns the results of the op on `operands`, computed by the engine of `view`."""
        with jax.named_scope(self.__name__):
            if view.engine == "custom_partitioning":
                return _bind(_Call(self, view, static, self.rule(static, operands)))(*operands)
            traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands))
            if traced and view.unplaced:
                operands = refuse_many_devices(self.__name__, operands)
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
        """Returns the rule of the op for these operands."""
        made = self._rule(static, operands) if callable(self._rule) else self._rule
        rule, sizes = (made, ()) if isinstance(made, str) else made
        return parse(rule, sizes, operands=operands)

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
            return spec(*(split.get(dim, ()) for dim in entry if dim not in "@="))

        over = dict.fromkeys(name for entry in rule.leaves for name in axes_of(entry))
        reduce = [() if dims == ("=",) else tuple(n for n in over if n not in axes_of(dims)) for dims in rule.results]
        specs = jax.tree.unflatten(jax.tree.structure(operands), map(spec_of, rule.leaves))
        return OpSharding(specs, [spec_of(entry) for entry in rule.results], reduce)

    def _reshard(self, view, sharding, operands):
        """Returns the operands in the layout of the op; raises ValueError where a size does not divide."""
        leaves, tree = jax.tree.flatten(operands)
        specs = tree.flatten_up_to(sharding.operands)
        for i, (leaf, to) in enumerate(zip(leaves, specs, strict=True)):
            check_divides(f"{self.__name__}: operand {i}", leaf.shape, to, view.axes)
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


def parse(rule: str, sizes: tuple[tuple[str, int], ...] = (), *, operands: tuple) -> Rule:
    """Returns the Rule of a text such as "m k, e *c -> m *c" for these operands."""
    given, made = (side.split(",") for side in rule.split("->"))
    leaves, counts = [], {}

    def expand(text: str) -> tuple[str, ...]:  # the dims of "*c" are c0, c1, ...
        dims = ([f"{d[1:]}{i}" for i in range(counts.get(d, 0))] if d[0] == "*" else [d] for d in DIM.findall(text))
        return tuple(itertools.chain(*dims))

    for text, operand in zip(given, operands, strict=True):
        arrays = jax.tree.leaves(operand)
        parts = text.strip(" {}").split("|")
        for part, array in zip(parts * (len(arrays) if len(parts) == 1 else 1), arrays, strict=bool(arrays)):
            entry = DIM.findall(part)
            counts |= {dim: array.ndim - len(entry) + 1 for dim in entry if dim[0] == "*" and dim not in counts}
            leaves.append(expand(part))
    return Rule(tuple(leaves), tuple(map(expand, made)), sizes)


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
        return call.place(operands, partitioned(*refuse_derivative(call.op.__name__, operands)))

    function.def_vmap(call.batch)
    derivable = jax.custom_jvp(function)
    # `custom_partitioning` has no derivatives, so those of the call run by `shard_map`, as they do on Explicit axes.
    derivable.defjvp(functools.partial(jax.jvp, call.compute))
    return derivable


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of an op by `custom_partitioning`, as a hashable value.

    `jax.vmap` makes one call of a batch of calls: its batched operands and results have one more leading dim. The mesh
    axes that split this dim keep splitting it: 4 stages over mesh axis "stage" of 4 devices are one stage a device.
    `rule` is the rule for one element of the batch. `levels` says for each `jax.vmap` around the call, the outermost
    first, whether each leaf of the operands is batched.
    """

    op: Op
    view: MeshView
    static: Hashable
    rule: Rule
    levels: tuple[tuple[bool, ...], ...] = ()

    def compute(self, *operands):
        """Returns the results by `shard_map`: `custom_partitioning` needs a function of global arrays for its types."""
        one = functools.partial(self.op, self.view._replace(engine="shard_map"), self.static)
        return self._run_batch(one, operands, lambda run, level: jax.vmap(run, ([0 if b else None for b in level],)))

    def _run_batch(self, run_one: Callable, operands, map_over: Callable):
        """Returns the results of `run_one` for all elements of the batch, by map_over(run, level) of each level."""
        leaves, tree = jax.tree.flatten(operands)

        def run(leaves):
            return run_one(*tree.unflatten(leaves))

        for level in reversed(self.levels):
            run = map_over(run, level)
        return run(leaves)

    def partition(self, mesh, operands, results):
        """Serves as the partition callback of `custom_partitioning`."""
        # JAX passes an empty mesh, and shardings without specs, where no argument of the program has a sharding.
        mesh = self.view.mesh if mesh.empty else mesh
        leaves, tree = jax.tree.flatten(operands)
        found = [getattr(x.sharding, "spec", None) for x in leaves]
        over, one = self._batch_axes(leaves, found), self._one(operands)
        specs = [None if s is None else Spec(*tuple(s)[self._depth(i) :]) for i, s in enumerate(found)]
        try:
            layout = self.op.sharding(self.static, one, tree.unflatten(specs))
        except ValueError as error:  # sharding propagation may have chosen this spec, so the caller made no mistake
            log_once(f"{self.op.__name__}: {error}; the declared layout is used instead, which may move it unquantized")
            layout = self.op.sharding(self.static, one, tree.unflatten([None] * len(leaves)))
        wanted = tree.flatten_up_to(layout.operands)
        self._log_moves(specs, wanted)

        def sharding(of: Spec, levels: Iterable[bool]) -> NamedSharding:
            return NamedSharding(mesh, Spec(*spec(*itertools.compress(over, levels)), *of))

        made = [sharding(of, [True] * len(over)) for of in layout.results]
        made = (jax.tree.map(lambda _, to=to: to, r) for r, to in zip(results, made, strict=True))
        taken = [sharding(of, [level[i] for level in self.levels]) for i, of in enumerate(wanted)]
        one_shard = functools.partial(self.op.compute_shards, self.static, layout)
        return mesh, lambda *shards: self._run_batch(one_shard, shards, _map), tuple(made), tree.unflatten(taken)

    def _log_moves(self, found: Sequence[Spec | None], wanted: Sequence[Spec]) -> None:
        """Logs where operands are split over the token axes in another order than the one that the op needs."""
        tokens = set(self.view.axes.tokens)
        for here, there in zip(found, wanted, strict=True):
            names, rows = (as_names(next(iter(of or ()), None)) for of in (here, there))
            if names != rows and set(names) == set(rows) == tokens:
                log_once(
                    f"moax moves tokens from their order over mesh axes {names} into that over {rows}; "
                    "moax.Axes(tokens=...) can say the order"
                )

    def place(self, operands, results):
        """Returns the results; Shardy would replicate a dim that no operand names, so such a dim is constrained."""
        shared = [dim for dims in self.rule.leaves for dim in dims if dims[0] != "@"]
        known = {name for dim in shared for name in (dim, *dim.strip("()").split())}
        one = self._one(operands)
        specs = self.op.sharding(self.static, one, jax.tree.map(lambda x: None, one)).results

        def place_one(result, of: Spec, dims):
            if dims[0] not in "@=":
                if known.issuperset(dims):
                    return result
                of = Spec(*(Spec.UNCONSTRAINED if d in known else e for d, e in itertools.zip_longest(dims, of)))
            to = Spec(*[Spec.UNCONSTRAINED] * len(self.levels), *of)
            return jax.tree.map(lambda x: constrain(x, to), result)

        return tuple(map(place_one, results, specs, self.rule.results))

    def make_rule(self, mesh, operand_types, result_types):
        """Returns the Shardy rule of the call, as the rule callback of `custom_partitioning`."""
        refuse_export(self.op.__name__)
        name_by_content(self, mesh, operand_types, result_types)
        fresh = (f"z{i}" for i in range(10**6))
        batch = [f"v{i}" for i in range(len(self.levels))]

        def entry(dims, type_, levels) -> str:
            rank = len(type_.shape) - len(levels)
            return " ".join([*levels, *(dims if dims and dims[0] not in "@=" else (next(fresh) for _ in range(rank)))])

        operands = [
            entry(dims, type_, [v for v, level in zip(batch, self.levels, strict=True) if level[i]])
            for i, (dims, type_) in enumerate(zip(self.rule.leaves, operand_types, strict=True))
        ]
        # A tree of results has any number of leaves, and comes after all single results.
        single = [dims for dims in self.rule.results if dims[0] not in "@="]
        trees = ["@"] * (len(result_types) - len(single))
        results = [entry(dims, type_, batch) for dims, type_ in zip([*single, *trees], result_types, strict=True)]
        return f"{', '.join(operands)} -> {', '.join(results)}", dict(self.rule.sizes)

    def batch(self, size, batched, *operands):
        """Serves as the rule of `jax.vmap`: the call has one level more."""
        outer = dataclasses.replace(self, levels=(tuple(jax.tree.leaves(batched)), *self.levels))
        results = _bind(outer)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    def _depth(self, i: int, outer: int | None = None) -> int:
        """Returns how many dims of batches leaf i of the operands has by the levels before `outer`, or by all."""
        return sum(level[i] for level in self.levels[:outer])

    def _one(self, operands):
        """Returns the types of the operands of one element of the batch."""
        leaves, tree = jax.tree.flatten(operands)
        return tree.unflatten(jax.ShapeDtypeStruct(x.shape[self._depth(i) :], x.dtype) for i, x in enumerate(leaves))

    def _batch_axes(self, leaves, found) -> list[Names]:
        """Returns for each level the mesh axes without a role that split the batch of the first split operand."""

        def axes_of(outer: int, i: int) -> Names:
            entry = pad(found[i], leaves[i].ndim)[self._depth(i, outer)]
            return tuple(name for name in entry if name not in self.view.axes.all)

        known = [i for i, of in enumerate(found) if of is not None]
        each = ((axes_of(outer, i) for i in known if level[i]) for outer, level in enumerate(self.levels))
        return [next(filter(None, axes), ()) for axes in each]


def _map(run: Callable, level: Sequence[bool]) -> Callable:
    """Returns `run` over the leading dim of the leaves that `level` names; other leaves are the same."""

    def mapped(leaves):
        def one(rows):
            rows = iter(rows)
            return run([next(rows) if batched else x for x, batched in zip(leaves, level, strict=True)])

        rows = list(itertools.compress(leaves, level))
        if rows[0].shape[0] == 1:  # as on a mesh that gives each device one element
            return jax.tree.map(lambda y: y[None], one([x[0] for x in rows]))
        return lax.map(one, rows)

    return mapped
