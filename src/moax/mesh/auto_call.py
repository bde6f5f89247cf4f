"""`AutoCall` is one call of an op on Auto axes: `custom_partitioning` with a Shardy rule, which `jax.vmap` extends.

XLA asks the call for the layout of its shards once it knows the layout of the operands. A batch of calls, which
`jax.vmap` makes, is one call whose batched operands and results have a leading dim more. The mesh axes that split this
dim keep splitting it: 4 stages over mesh axis "stage" of 4 devices are one stage a device.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from moax.backend import log_once
from moax.mesh.axes import Names, as_names
from moax.mesh.cache_key import name_by_content
from moax.mesh.export import refuse_export
from moax.mesh.guards import refuse_derivative
from moax.mesh.place import constrain
from moax.mesh.specs import Spec, pad, spec

Level = tuple[bool, ...]  # of one vmap: for each leaf of the operands, whether it has the dim of the batch


@functools.lru_cache(maxsize=4096)
def bind(call: AutoCall) -> Callable:
    """Returns the function of global operands that makes the call. Equal calls have the same function."""
    partitioned = custom_partitioning(call.compute)
    partitioned.def_partition(call.partition, sharding_rule=call.make_rule)
    name = call.op.__name__

    @custom_vmap
    def function(*operands):
        return call.place(operands, partitioned(*refuse_derivative(name, operands)))

    function.def_vmap(call.batch)
    # `custom_partitioning` has no derivatives, so those of the call run by `shard_map`, as they do on Explicit axes.
    with_derivatives = jax.custom_jvp(function)
    with_derivatives.defjvp(functools.partial(jax.jvp, call.compute))
    return with_derivatives


def _dims(rule: str) -> list[str]:
    """Returns the dims of one operand in a Shardy rule: "t (kb ki)" has the dims "t" and "(kb ki)"."""
    return re.findall(r"\([^)]*\)|\S+", rule)


@dataclasses.dataclass(frozen=True)
class AutoCall:
    """One call of an op, as one hashable value.

    Attributes:
      op: the `Partitioned` op.
      view: how ops run on the mesh in force.
      static: the static arguments of the op.
      rule: the Shardy rule of the op, as its `factors` returns it.
      levels: for each `jax.vmap` around the call, the outermost first, the leaves that are batched.
    """

    op: Any
    view: Any
    static: Hashable
    rule: tuple[tuple, ...]
    levels: tuple[Level, ...] = ()

    def compute(self, *operands):
        """Returns the results by `shard_map`: `custom_partitioning` needs a function of global arrays for its types."""
        leaves, tree = jax.tree.flatten(operands)
        view = self.view._replace(engine="shard_map")

        def run(leaves):
            return self.op(view, self.static, *tree.unflatten(leaves))

        for level in reversed(self.levels):
            run = jax.vmap(run, in_axes=([0 if batched else None for batched in level],))
        return run(leaves)

    def partition(self, mesh, operands, results):
        """Serves as the partition callback of `custom_partitioning`.

        Returns the mesh, the local function, and the shardings of results and operands.
        """
        # JAX passes an empty mesh, and shardings without specs, where no argument of the program has a sharding.
        mesh = self.view.mesh if mesh.empty else mesh
        leaves, tree = jax.tree.flatten(operands)
        found = [getattr(x.sharding, "spec", None) for x in leaves]
        over = self._batch_axes(leaves, found)
        one, depths = self._one(operands), self._depths(len(leaves))
        specs = [None if s is None else Spec(*tuple(s)[n:]) for s, n in zip(found, depths, strict=True)]
        try:
            contract = self.op.contract(self.static, one, tree.unflatten(specs))
        except ValueError as error:  # sharding propagation may have chosen this spec, so the caller made no mistake
            log_once(f"{self.op.__name__}: {error}; the declared layout is used instead, which may move it unquantized")
            contract = self.op.contract(self.static, one, tree.unflatten([None] * len(leaves)))
        self._tell_of_moves(specs, tree.flatten_up_to(contract.operands))

        def sharding(of: Spec, levels: Sequence[bool]) -> NamedSharding:
            lead = spec(*[names for names, batched in zip(over, levels, strict=True) if batched])
            return NamedSharding(mesh, Spec(*lead, *of))

        every = [True] * len(self.levels)
        result_shardings = tuple(
            jax.tree.map(lambda _, s=s: sharding(s, every), r) for r, s in zip(results, contract.results, strict=True)
        )
        operand_shardings = [
            sharding(of, [level[i] for level in self.levels])
            for i, of in enumerate(tree.flatten_up_to(contract.operands))
        ]
        return (
            mesh,
            lambda *shards: self._compute_shards(contract, shards),
            result_shardings,
            tree.unflatten(operand_shardings),
        )

    def _tell_of_moves(self, found: Sequence[Spec | None], wanted: Sequence[Spec]) -> None:
        """Logs where operands lie over the token axes in another order than the one that the op needs."""
        tokens = set(self.view.roles.tokens)
        for here, there in zip(found, wanted, strict=True):
            names, rows = (as_names(next(iter(of or ()), None)) for of in (here, there))
            if names != rows and set(names) == set(rows) == tokens:
                log_once(
                    f"moax moves tokens from their order over mesh axes {names} into that over {rows}; "
                    "moax.Axes(tokens=...) can say how they lie"
                )

    def _compute_shards(self, contract, shards):
        """Returns the results of one device: one element of the batch after the other."""
        leaves, tree = jax.tree.flatten(shards)

        def run(leaves):
            return self.op.compute_shards(self.static, contract, *tree.unflatten(leaves))

        for level in reversed(self.levels):
            run = _map(run, level)
        return run(leaves)

    def place(self, operands, results):
        """Returns the results, with a sharding constraint on each dim that no operand names in the rule.

        Shardy would replicate such a dim.
        """
        known = {name for rule in self.rule[0] for dim in _dims(rule) for name in (dim, *dim.strip("()").split())}
        one = self._one(operands)
        specs = self.op.contract(self.static, one, jax.tree.map(lambda x: None, one)).results
        names = [_dims(rule) for rule in self.rule[1]] + [None] * (len(specs) - len(self.rule[1]))
        free = [Spec.UNCONSTRAINED] * len(self.levels)
        placed = []
        for result, result_spec, dims in zip(results, specs, names, strict=True):
            if dims is None or not known.issuperset(dims):
                entries = [*result_spec, *[None] * (len(dims or result_spec) - len(result_spec))]
                keep = [Spec.UNCONSTRAINED if d in known else e for d, e in zip(dims or entries, entries, strict=True)]
                result = jax.tree.map(lambda x, keep=keep: constrain(x, Spec(*free, *keep)), result)
            placed.append(result)
        return tuple(placed)

    def make_rule(self, mesh, operand_types, result_types):
        """Serves as the rule callback of `custom_partitioning`.

        Returns the Shardy rule as one string, and the sizes of its factors. The batch of a `jax.vmap` is a factor that
        its operands and all results share.
        """
        refuse_export(self.op.__name__)
        name_by_content(self, mesh, operand_types, result_types)
        sizes, depths = dict(*self.rule[2:]), self._depths(len(operand_types))
        fresh = (f"z{i}" for i in range(10**6))

        def own(count):
            return " ".join(next(fresh) for _ in range(count))

        operands = [
            dims or own(len(t.shape) - depth)
            for dims, t, depth in zip(self.rule[0], operand_types, depths, strict=True)
        ]
        batch = [f"v{i}" for i in range(len(self.levels))]
        operands = [
            " ".join([*[v for v, level in zip(batch, self.levels, strict=True) if level[i]], dims])
            for i, dims in enumerate(operands)
        ]
        results = list(self.rule[1])
        results += [own(len(t.shape) - len(batch)) for t in result_types[len(results) :]]
        results = [" ".join([*batch, dims]) for dims in results]
        return f"{', '.join(operands)} -> {', '.join(results)}", sizes

    def batch(self, size, batched, *operands):
        """Serves as the rule of `jax.vmap`: the call has one level more."""
        level = tuple(jax.tree.leaves(batched))
        outer = dataclasses.replace(self, levels=(level, *self.levels))
        results = bind(outer)(*operands)
        return results, jax.tree.map(lambda _: True, results)

    def _depths(self, count: int) -> list[int]:
        """Returns for each of `count` leaves of the operands how many dims of batches the leaf has."""
        return [sum(level[i] for level in self.levels) for i in range(count)]

    def _one(self, operands):
        """Returns the types of the operands of one element of the batch."""
        leaves, tree = jax.tree.flatten(operands)
        return tree.unflatten(
            [jax.ShapeDtypeStruct(x.shape[n:], x.dtype) for x, n in zip(leaves, self._depths(len(leaves)), strict=True)]
        )

    def _batch_axes(self, leaves, found) -> list[Names]:
        """Returns for each level the mesh axes that split its batch: those of the first operand that has some.

        An axis that has a role cannot split a batch, for the op uses the axis; nor can axes that do not divide it.
        """
        over: list[Names] = []
        for outer, level in enumerate(self.levels):
            names: Names = ()
            for i, (leaf, of) in enumerate(zip(leaves, found, strict=True)):
                if names or of is None or not level[i]:
                    continue
                dim = sum(before[i] for before in self.levels[:outer])
                names = tuple(n for n in pad(of, leaf.ndim)[dim] if n not in self.view.roles.all)
            over.append(names)
        return over


def _map(run: Callable, level: Level) -> Callable:
    """Returns `run` over the leaves' leading dim, for the leaves that `level` names; other leaves are the same."""

    def mapped(leaves):
        def one(rows):
            rows = iter(rows)
            return run([next(rows) if batched else x for x, batched in zip(leaves, level, strict=True)])

        rows = [x for x, batched in zip(leaves, level, strict=True) if batched]
        if rows[0].shape[0] == 1:  # as on a mesh that gives each device one element
            return jax.tree.map(lambda y: y[None], one([x[0] for x in rows]))
        return lax.map(one, rows)

    return mapped
