"""`Partitioned`: a function of one device's shards becomes an op on every kind of mesh.

| mesh axes are            | engine                                                                            |
|--------------------------|-----------------------------------------------------------------------------------|
| absent, or all of size 1 | call the local function                                                           |
| Auto                     | `custom_partitioning` with a Shardy rule; `shard_map` where asked for by name      |
| Explicit                 | `shard_map` (`custom_partitioning` fails there: jax issue 34811)                   |
| Manual, all of them      | call the local function; sums over axes that do not shard a result are the caller's |
| Manual, others           | `shard_map` over the axes that are not                                            |
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from moax.backend import log_once
from moax.errors import Unsupported
from moax.mesh.axes import Axes, Names, Roles
from moax.mesh.collectives import reduce_max, vary_like, varying
from moax.mesh.place import constrain
from moax.mesh.specs import Spec, check_divides, is_explicit, mesh_of
from moax.options import ENGINES, Engine


class MeshView(NamedTuple):
    """How ops run on the mesh in force.

    engine: `local` calls the local function. manual: the caller is inside a `shard_map`, where an op leaves sums over
    axes that do not shard its result to its caller, as `jnp.dot` does. axes: what an inner `shard_map` takes over.
    """

    roles: Roles
    engine: Literal["local", "custom_partitioning", "shard_map"]
    manual: bool = False
    explicit: bool = False
    mesh: Any = None
    axes: frozenset = frozenset()

    @property
    def nested(self) -> bool:
        """Whether ops run inside a `shard_map` over part of the mesh, the caller's or one in another."""
        if self.mesh is None or AxisType.Manual not in self.mesh.axis_types:
            return False
        return not self.manual or any(kind != AxisType.Manual for kind in self.mesh.axis_types)

    def psum(self, x, names: Names):
        """The sum over `names` that an op left to its caller: inside a `shard_map`; elsewhere it is done."""
        names = names + self._single(x)
        return lax.psum(x, names) if self.manual and names else x

    def typed_as_equal(self, x, names: Names):
        """Inside a `shard_map`: a value that is equal over `names`, typed so."""
        return reduce_max(x, names + self._single(x)) if self.manual else x

    def _single(self, x) -> Names:
        """Axes of one device that x is typed as varying over, which is as good as none."""
        return tuple(n for n in sorted(varying(x)) if self.mesh.shape[n] == 1) if self.manual else ()

    def vary(self, tree):
        """Inside a `shard_map`: operands typed as varying alike, so that their gradients are summed where they meet."""
        return jax.tree.map(lambda x: vary_like(x, tree), tree) if self.manual else tree


def find_mesh_view(axes: Axes, engine: Engine, *operands) -> MeshView:
    """The view of the mesh in force for an op on `operands`.

    Raises ValueError for an unknown engine and for a mesh whose axes in `axes` are Manual only in part; Unsupported
    for an engine that the mesh cannot run.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} must be one of {', '.join(map(repr, ENGINES))}")
    mesh = mesh_of(*jax.tree.leaves(operands))
    if mesh is None:
        return MeshView(Roles(), "local")
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    roles = axes.on(dict(mesh.shape))
    manual = frozenset(n for n, kind in kinds.items() if kind == AxisType.Manual)
    explicit = is_explicit(mesh)
    inside = [n for n in roles.all if n in manual]
    if manual and len(inside) == len(roles.all) and (inside or not explicit):
        return MeshView(roles, "local", manual=True, mesh=mesh)
    if inside:
        outside = [n for n in roles.all if n not in manual]
        raise ValueError(
            f"mesh axes {inside} are Manual (inside a shard_map) but {outside} are not; take all of them, or none, "
            "into the shard_map's axis_names"
        )
    if not roles.all and not explicit:
        return MeshView(roles, "local")
    if engine == "custom_partitioning" and (explicit or manual):
        what = f"axes {sorted(manual)} are Manual" if manual else "axes are Explicit"
        raise Unsupported(f"engine='custom_partitioning' cannot run on this mesh: {what}; use 'auto' or 'shard_map'")
    partitioned = not explicit and not manual and engine != "shard_map"
    name = "custom_partitioning" if partitioned else "shard_map"
    return MeshView(roles, name, explicit=explicit, mesh=mesh, axes=frozenset(kinds) - manual)


class Contract(NamedTuple):
    """What an op asks of the mesh.

    operands: a spec for each leaf of the operands. results: a spec for each result (of all its leaves). reduce: for
    each result, the axes over which the local results are to be summed. layout: what the local function must know of
    the specs that were found.
    """

    operands: Any
    results: Sequence[Spec]
    reduce: Sequence[Names]
    layout: Hashable = None


def _dims(rule: str) -> list[str]:
    """The dims of one operand in a Shardy rule: "t (kb ki)" has two."""
    return re.findall(r"\([^)]*\)|\S+", rule)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Call:
    static: Hashable
    view: MeshView
    rule: tuple[tuple, ...]


class Partitioned:
    """An op on global arrays, of a function on one device's shards.

    local(static, layout, *operands) -> tuple of results; collectives by axis name.
    contract(static, operands, found) -> Contract; `found` holds the operands' specs, None where unknown. It raises
      ValueError for a found spec that it cannot take.
    name: for profiles, compiled programs and errors.
    factors(static, operands) -> the Shardy rule: a string of dim names for each operand leaf, and for each result; a
      result past the last string has dims of its own. A third entry has (name, size) of names that stand only inside
      parentheses.
    """

    def __init__(self, local: Callable, contract: Callable, factors: Callable, name: str = "op"):
        self.local, self.contract, self.factors, self.__name__ = local, contract, factors, name
        self._compiled = jax.jit(self._run, static_argnums=(0, 1))
        partitioned = custom_partitioning(self._global, static_argnums=(0,))
        partitioned.def_partition(self._partition, sharding_rule=self._rule)
        self._partitioned = custom_vmap(
            lambda call, *operands: self._place(call, operands, partitioned(call, *operands))
        )
        self._partitioned.def_vmap(self._vmap)

    def __call__(self, view: MeshView, static: Hashable, *operands):
        with jax.named_scope(self.__name__):
            if view.engine == "custom_partitioning":
                return self._partitioned(_Call(static, view, self.factors(static, operands)), *operands)
            traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands))
            run = self._run if traced or view.engine == "local" else self._compiled
            return run(view, static, *operands)

    def lay_operands(self, view: MeshView, static: Hashable, *operands):
        """The operands as the op takes them: inside a `shard_map` typed as varying alike, on Explicit axes laid out.

        For outside of a `custom_vjp` around the op: its gradients then have the types of its operands.
        """
        if not view.explicit:
            return view.vary(operands)
        found = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, operands)
        return self._settle(view, self.contract(static, operands, found), operands)

    def _settle(self, view, contract, operands):
        leaves, tree = jax.tree.flatten(operands)
        specs = tree.flatten_up_to(contract.operands)
        for i, (leaf, to) in enumerate(zip(leaves, specs, strict=True)):
            check_divides(f"{self.__name__}: operand {i}", leaf.shape, to, view.roles)
        if view.explicit:
            leaves = [jax.sharding.reshard(x, NamedSharding(view.mesh, s)) for x, s in zip(leaves, specs, strict=True)]
        return tree.unflatten(leaves)

    def _run(self, view, static, *operands):
        found = jax.tree.map(lambda x: jax.typeof(x).sharding.spec if view.explicit else None, operands)
        contract = self.contract(static, operands, found)
        if view.engine == "local":
            return self.local(static, contract.layout, *operands)
        leaves, tree = jax.tree.flatten(self._settle(view, contract, operands))
        specs = tree.flatten_up_to(contract.operands)

        def body(*shards):
            return self._body(static, contract, *tree.unflatten(shards))

        mapped = jax.shard_map(
            body, mesh=view.mesh, in_specs=tuple(specs), out_specs=tuple(contract.results), axis_names=view.axes,
            check_vma=False,
        )  # fmt: skip
        return mapped(*leaves)

    def _body(self, static, contract, *operands):
        results = self.local(static, contract.layout, *operands)
        return tuple(lax.psum(r, axes) if axes else r for r, axes in zip(results, contract.reduce, strict=True))

    def _global(self, call, *operands):
        return self(call.view._replace(engine="shard_map"), call.static, *operands)

    def _partition(self, call, mesh, operands, results):
        # Empty where no argument of the program has a place, and the shardings then are without specs.
        mesh = call.view.mesh if mesh.empty else mesh
        found = jax.tree.map(lambda x: getattr(x.sharding, "spec", None), operands)
        try:
            contract = self.contract(call.static, operands, found)
        except ValueError as error:  # a spec that propagation may have chosen, not the caller
            log_once(f"{self.__name__}: {error}; laid out as declared instead, which may move it unquantized")
            contract = self.contract(call.static, operands, jax.tree.map(lambda x: None, operands))

        def to_sharding(spec):
            return NamedSharding(mesh, spec)

        result_shardings = tuple(
            jax.tree.map(lambda _, s=s: to_sharding(s), r) for r, s in zip(results, contract.results, strict=True)
        )
        return (
            mesh,
            lambda *shards: self._body(call.static, contract, *shards),
            result_shardings,
            jax.tree.map(to_sharding, contract.operands),
        )

    def _place(self, call, operands, results):
        """Says where the dims are that the rule cannot derive from an operand; Shardy would replicate them."""
        known = {name for rule in call.rule[0] for dim in _dims(rule) for name in (dim, *dim.strip("()").split())}
        specs = self.contract(call.static, operands, jax.tree.map(lambda x: None, operands)).results
        names = [_dims(rule) for rule in call.rule[1]] + [None] * (len(specs) - len(call.rule[1]))
        placed = []
        for result, of, dims in zip(results, specs, names, strict=True):
            if dims is None or not known.issuperset(dims):
                entries = [*of, *[None] * (len(dims or of) - len(of))]
                keep = [Spec.UNCONSTRAINED if d in known else e for d, e in zip(dims or entries, entries, strict=True)]
                result = jax.tree.map(lambda x, keep=keep: constrain(x, Spec(*keep)), result)
            placed.append(result)
        return tuple(placed)

    def _rule(self, call, mesh, operand_types, result_types):
        del mesh
        operands, results = (list(side) for side in call.rule[:2])
        sizes = dict(*call.rule[2:])
        fresh = iter(range(10**6))
        ranks = [len(t.shape) for t in result_types]
        results += [" ".join(f"z{next(fresh)}" for _ in range(n)) for n in ranks[len(results) :]]
        operands = [
            o or " ".join(f"z{next(fresh)}" for _ in t.shape) for o, t in zip(operands, operand_types, strict=True)
        ]
        return f"{', '.join(operands)} -> {', '.join(results)}", sizes

    def _vmap(self, size, batched, call, *operands):
        in_batched = jax.tree.leaves(batched[1:])
        leaves, tree = jax.tree.flatten(operands)

        def one(rows):
            rows = iter(rows)
            return self._partitioned(
                call, *tree.unflatten(next(rows) if b else x for x, b in zip(leaves, in_batched, strict=True))
            )

        out = lax.map(one, [x for x, b in zip(leaves, in_batched, strict=True) if b])
        return out, jax.tree.map(lambda _: True, out)


def differentiable(forward: Callable, backward: Callable) -> Callable:
    """op(view, static, *operands) = the results of `forward`, whose gradients are those of `backward`.

    forward(view, static, *operands) -> (results, saved); backward(view, static, saved, cotangents) -> a gradient for
    each operand. Both call `Partitioned` ops, so that each direction has its own partition rule.
    """
    op = jax.custom_vjp(lambda *operands: forward(*operands)[0], nondiff_argnums=(0, 1))
    op.defvjp(forward, backward)
    return op
