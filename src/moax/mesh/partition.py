"""`Partitioned` makes a function of one device's shards an op on every kind of mesh. The mesh decides the engine:

| mesh axes are            | engine                                                                            |
|--------------------------|-----------------------------------------------------------------------------------|
| absent, or all of size 1 | call the local function                                                           |
| Auto                     | `custom_partitioning` (auto_call.py); `shard_map` where asked for by name          |
| Explicit                 | `shard_map` (`custom_partitioning` fails there: jax issue 34811)                   |
| Manual, all of them      | call the local function; the caller sums over axes that do not shard a result     |
| Manual, others alone     | `shard_map` over the axes that are not Manual                                     |
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jaxtyping import Array, PyTree

from moax.checks import check_kind
from moax.errors import Unsupported
from moax.mesh.auto_call import AutoCall, bind
from moax.mesh.axes import Axes, Names, Roles
from moax.mesh.collectives import reduce_max, vary_like, varying
from moax.mesh.guards import refuse_derivative, refuse_many_devices
from moax.mesh.specs import Spec, check_divides, find_roles, is_explicit, mesh_of

Engine = Literal["auto", "custom_partitioning", "shard_map"]
ENGINES = ("auto", "custom_partitioning", "shard_map")


class MeshView(NamedTuple):
    """How ops run on the mesh in force.

    Attributes:
      roles: the mesh axes of more than one device, by role.
      engine: the way from global arrays to shards; `local` calls the local function on the operands as they are.
      manual: whether the caller is inside a `shard_map` over all axes of `roles`. Its operands are then shards, and the
        caller sums over axes that do not shard a result, as it does for `jnp.dot`.
      explicit: whether an axis of the mesh is Explicit.
      mesh: the mesh in force; None without one, and where no axis has a role and more than one device.
      axes: the mesh axes that the `shard_map` of an op makes Manual.
      unplaced: whether nothing names a mesh, neither a mesh in force nor the type of an operand.
    """

    roles: Roles
    engine: Literal["local", "custom_partitioning", "shard_map"]
    manual: bool = False
    explicit: bool = False
    mesh: Any = None
    axes: frozenset[str] = frozenset()
    unplaced: bool = False

    @property
    def nested(self) -> bool:
        """Whether ops run inside a `shard_map` that leaves out a part of the mesh, or open one inside another."""
        if self.mesh is None or AxisType.Manual not in self.mesh.axis_types:
            return False
        return not self.manual or any(kind != AxisType.Manual for kind in self.mesh.axis_types)

    def on(self, axes: Axes) -> MeshView:
        """Returns the view whose roles are those of `axes`, which names the same axes."""
        return self._replace(roles=axes.on(dict(self.roles.sizes)))

    def psum(self, x: Array, names: Names) -> Array:
        """Sums x over `names` inside a `shard_map`, where an op leaves this sum to its caller; elsewhere returns x."""
        names = names + self._size_one_axes(x)
        return lax.psum(x, names) if self.manual and names else x

    def typed_as_equal(self, x: Array, names: Names) -> Array:
        """Returns x, which is equal on all devices along `names`, with a type that says so inside a `shard_map`."""
        if not self.manual:
            return x
        names = names + self._size_one_axes(x)
        return reduce_max(x, tuple(n for n in names if n in varying(x)) or names)  # JAX refuses a mixture

    def _size_one_axes(self, x) -> Names:
        """Returns the axes of size 1 over which the type of x varies. Only the type varies: there is one device."""
        return tuple(n for n in sorted(varying(x)) if self.mesh.shape[n] == 1) if self.manual else ()

    def vary[Tree](self, tree: Tree) -> Tree:
        """Returns the arrays of a tree, whose types vary over the same axes inside a `shard_map`.

        The transpose of this change of type sums a gradient over the axes that the type of its array did not have.
        """
        return jax.tree.map(lambda x: vary_like(x, tree), tree)


def find_mesh_view(axes: Axes, engine: Engine, *operands: PyTree[Array]) -> MeshView:
    """Returns the view of the mesh in force for an op on `operands`.

    Args:
      axes: the role of each mesh axis.
      engine: see `moax.Options`.
      *operands: trees of arrays. Their types name the mesh where none is in force.

    Raises:
      ValueError: the engine is unknown, a mesh axis of more than one device has no role, some axes are Auto and others
        Explicit, or some axes that `axes` names are Manual and others are not.
      Unsupported: this mesh cannot run the engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} must be one of {', '.join(map(repr, ENGINES))}")
    check_kind("axes", axes, Axes)
    mesh = mesh_of(*jax.tree.leaves(operands))
    if mesh is None:
        return MeshView(Roles(), "local", unplaced=True)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    roles = find_roles(axes, mesh)
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
    """How the operands and results of an op lie on the mesh.

    Attributes:
      operands: a spec for each leaf of the operands.
      results: a spec for each result, which holds for all leaves of the result.
      reduce: for each result, the axes over which the local results are summed.
      layout: the facts about the operands' specs that the local function needs, such as the axes to gather over.
    """

    operands: PyTree[Spec | None]
    results: Sequence[Spec]
    reduce: Sequence[Names]
    layout: Hashable = None


class Partitioned:
    """An op on global arrays, made of a function on one device's shards.

    A grouped matmul has the rule (("m k", "g", "e h c"), ("m c",)): "m" of x and of y is one dim, so that the mesh axes
    that split x's rows split y's rows.

    Args:
      local: local(static, layout, *operands) -> a tuple of results. It computes on shards and calls collectives by axis
        name.
      contract: contract(static, operands, found_specs) -> Contract. `found_specs` has the spec of each operand leaf,
        None where it is unknown. It raises ValueError for a spec that the op cannot take.
      factors: factors(static, operands) -> the Shardy rule: (strings of dim names, one for each operand leaf; strings
        of dim names, one for each result). Results without a string share no dim with the operands. A third entry
        lists (name, size) of the names that stand inside parentheses alone.
      name: the name of the op in profiles, compiled programs and errors.
    """

    def __init__(self, local: Callable, contract: Callable, factors: Callable, name: str = "op"):
        self.local, self.contract, self.factors, self.__name__ = local, contract, factors, name
        self._compiled = jax.jit(self._run, static_argnums=(0, 1))

    def __call__(self, view: MeshView, static: Hashable, *operands):
        """Returns the results of the op on `operands`, computed by the engine of `view`. `static` is hashable."""
        with jax.named_scope(self.__name__):
            if view.engine == "custom_partitioning":
                return bind(AutoCall(self, view, static, self.factors(static, operands)))(*operands)
            traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(operands))
            if traced and view.unplaced:
                operands = refuse_many_devices(self.__name__, operands)
            run = self._run if traced or view.engine == "local" else self._compiled
            return run(view, static, *operands)

    def lay_operands(self, view: MeshView, static: Hashable, *operands):
        """Returns the operands with the layout and the types that the op needs.

        On Explicit axes the operands are resharded by the contract. Inside a `shard_map` their types vary over the same
        axes. An op with a `custom_vjp` calls it on its operands first: the gradients of the `custom_vjp` then have the
        types of its operands.
        """
        if not view.explicit:
            return view.vary(operands)
        found_specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, operands)
        return self._reshard(view, self.contract(static, operands, found_specs), operands)

    def _reshard(self, view, contract, operands):
        """Returns the operands, resharded by the contract on Explicit axes.

        Raises ValueError where a size does not divide.
        """
        leaves, tree = jax.tree.flatten(operands)
        specs = tree.flatten_up_to(contract.operands)
        for i, (leaf, to) in enumerate(zip(leaves, specs, strict=True)):
            check_divides(f"{self.__name__}: operand {i}", leaf.shape, to, view.roles)
        if view.explicit:
            leaves = [jax.sharding.reshard(x, NamedSharding(view.mesh, s)) for x, s in zip(leaves, specs, strict=True)]
        return tree.unflatten(leaves)

    def _run(self, view, static, *operands):
        """Runs the op by the local function or by `shard_map`."""
        found_specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec if view.explicit else None, operands)
        contract = self.contract(static, operands, found_specs)
        if view.engine == "local":
            return self.local(static, contract.layout, *operands)
        leaves, tree = jax.tree.flatten(self._reshard(view, contract, operands))
        specs = tree.flatten_up_to(contract.operands)

        def body(*shards):
            return self.compute_shards(static, contract, *tree.unflatten(shards))

        mapped = jax.shard_map(
            body, mesh=view.mesh, in_specs=tuple(specs), out_specs=tuple(contract.results), axis_names=view.axes,
            check_vma=any(map(varying, leaves)),
        )  # fmt: skip
        return mapped(*leaves)

    def compute_shards(self, static, contract, *operands):
        """Returns the results of one device, summed over the axes of `contract.reduce`."""
        results = self.local(static, contract.layout, *operands)
        return tuple(lax.psum(r, axes) if axes else r for r, axes in zip(results, contract.reduce, strict=True))


def differentiable(
    forward: Callable, backward: Callable, once: str | None = None, plain: Callable | None = None
) -> Callable:
    """Makes op(view, static, *operands), which returns the results of `forward` and has the gradients of `backward`.

    Both functions call `Partitioned` ops, so that each direction has its own partition rule.

    Args:
      forward: forward(view, static, *operands) -> (results, saved).
      backward: backward(view, static, saved, cotangents) -> a gradient for each operand.
      once: the name of an op that has first derivatives alone; a second derivative then raises Unsupported. None lets
        JAX differentiate both functions again, which must be plain JAX on one device and `Partitioned` ops on a mesh.
      plain: plain(view, static, *operands) -> results, which runs where nothing is differentiated; None runs `forward`.
    """
    op = jax.custom_vjp(plain or (lambda *operands: forward(*operands)[0]), nondiff_argnums=(0, 1))
    if once is None:
        op.defvjp(forward, backward)
        return op

    # The operands are what refuses: a derivative of a result would first differentiate the op.
    def forward_once(view, static, *operands):
        return forward(view, static, *refuse_derivative(once, operands))

    def backward_once(view, static, saved, cotangents):
        return backward(view, static, *refuse_derivative(once, (saved, cotangents)))

    op.defvjp(forward_once, backward_once)
    return op
