"""`moax.scan` (experimental) gathers weights one layer ahead, and scatters gradients one layer behind.

    forward, turn i       gather the weights of layer i + 1    run layer i
    backward, turn i      gather the weights of layer i - 1    run layer i backward    scatter the gradients of i + 1

The steps of one turn need nothing of each other, so that XLA runs the collectives beside the products. One gathered
layer, and in backward the terms of one layer's gradients, take memory beyond that of `jax.lax.scan`. A barrier ties the
number of a turn to the carry that enters it: of turns that are unrolled, none gathers before the one before has ended.

The steps are stages of one layer's forward and backward, cut out of its jaxpr at the names of `moax.ops.weights`:

    forward    ahead(weights) -> gathered     main(carry, weights, gathered) -> carry, outputs, residuals
    backward   ahead(weights) -> gathered     main(residuals, weights, gathered, cotangents) -> cotangents, terms
               behind(terms, weights) -> gradients of the weights

`ahead` is what the gathered weights need, which are weights alone. `behind` is what needs a term of a gradient, which
are gradients of weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from jaxtyping import Array, PyTree

from moax.checks import check_value
from moax.mesh.op import differentiable
from moax.ops.weights import GATHERED, PARTIAL_GRAD

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint", "custom_jvp_call")


def scan(
    layer: Callable[[Any, Any], tuple[Any, Any]],
    carry: PyTree[Array],
    stack: PyTree[Array],
    *,
    policy: Callable[..., bool] | None = None,
    unroll: int = 1,
) -> tuple[PyTree[Array], PyTree[Array]]:
    """Runs `jax.lax.scan(jax.checkpoint(layer, policy=policy), carry, stack)`, and moves weights beside the work.

    This function is experimental: it rewrites jaxprs by `jax.extend.core`. On two H200s (fsdp 2) it is 6 to 7 % faster
    than `jax.lax.scan` with `unroll=2`; with `unroll=1` it is 20 % slower in bf16. It needs more memory.

    The weights of `moax.moe` and of `moax.ops.dense` in the layer take part where they depend on `stack` and on values
    that the layer closes over, and not on the carry. They cross as they do elsewhere: as bytes where the recipe
    quantizes them. On a mesh without fsdp and dp, and with JAX's flag `jax_remat3`, the two scans are one.

    Args:
      layer: layer(carry, weights) -> (carry, outputs), a function of the weights of one layer, which are `stack`
        without its leading dims. The new carry has the tree, the shapes and the dtypes of the old one.
      carry: the input of the first layer; any tree of arrays.
      stack: a tree of arrays [L, ...] of L layers, such as a stacked `MoEParams`. The leading dim is not sharded.
      policy: what forward saves for backward, a policy of `jax.checkpoint`; None saves the inputs of each layer, and
        `jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES)` what a block needs.
      unroll: the layers in one turn of the compiled loop. With 2, XLA needs no copy from the buffer that the next layer
        was gathered into to the one that the layer is computed from, and compiles twice the program.

    Returns:
      The carry after the last layer, and the outputs of all layers, stacked: [L, ...]. Both are differentiable once in
      carry, stack, and the arrays that the layer closes over.

    Raises:
      ValueError: the leaves of `stack` have no common leading dim, `unroll` is no positive int, or the layer changes
        the tree, a shape or a dtype of the carry.
      Unsupported: a second derivative was asked for.
    """
    sizes = {v.shape[:1] for v in jax.tree.leaves(stack)}
    if len(sizes) != 1 or sizes == {()} or sizes == {(0,)}:
        found = f"their leading dims are {sorted(sizes)}"
        raise ValueError(f"stack: its leaves must be arrays [L, ...] of one L >= 1; {found}")
    check_value("unroll", unroll, int)
    carry = jax.tree.map(jnp.asarray, carry)
    weights = jax.tree.map(lambda v: v[0], stack)
    pure, closed = jax.closure_convert(layer, carry, weights)
    traced, tree = _trace(lambda closed, *given: pure(*given, *closed), policy, closed, carry, weights)
    _check_carry(traced.outputs, tree, carry)
    run = _make_loops(traced, next(iter(sizes))[0], unroll)
    if run is None:
        return lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), carry, stack, unroll=unroll)
    fixed = [*closed, *traced.constants.values()]
    return jax.tree.unflatten(tree, run(None, None, fixed, jax.tree.leaves(carry), jax.tree.leaves(stack)))


def _check_carry(outputs: Sequence[Any], tree, carry: PyTree[Array]) -> None:
    """Raises ValueError where a layer changes the tree, a shape or a dtype of its carry."""
    leaves, was = jax.tree.flatten(carry)
    parts = tree.children()
    if len(parts) != 2 or parts[0] != was:
        raise ValueError(f"layer must return (carry, outputs), with a carry of the tree {was}; it returns {tree}")
    for before, after in zip(leaves, outputs, strict=False):
        if (before.shape, before.dtype) != (after.aval.shape, after.aval.dtype):
            raise ValueError(
                f"layer turns an array {before.dtype}{list(before.shape)} of the carry into "
                f"{after.aval.dtype}{list(after.aval.shape)}; a carry keeps its shapes and its dtypes"
            )


class _Stage(NamedTuple):
    """A part of a program, from the values of `inputs` to those of its outputs."""

    run: Callable[..., list[Any]]
    inputs: list[core.Var]

    def __call__(self, values: dict[core.Var, Any]) -> list[Any]:
        return self.run(*(values[v] for v in self.inputs))


class _Traced(NamedTuple):
    """The jaxpr of a layer's forward and backward, without calls, and the roles of its variables."""

    names: core.DebugInfo
    eqns: list[core.JaxprEqn]
    constants: dict[core.Var, Any]
    arguments: list[list[core.Var]]  # what the layer closes over, its carry, its weights
    free: set[core.Var]  # what depends on weights, constants and closed values alone
    outputs: list[Any]
    residuals: list[Any]  # inputs of forward are among them
    cotangents: list[core.Var]  # of the floating-point outputs
    gradients: list[Any]  # of the floating-point arguments, in their order

    def stage(self, inputs: Iterable[core.Var], outputs: Sequence[Any], effects: bool = False) -> _Stage:
        """Returns the operations from `inputs` to `outputs`, and with `effects` those of forward that have effects."""
        given, kept, read = set(inputs), [], set(_variables(outputs))
        backward = set(self.cotangents)
        count = next((i for i, eqn in enumerate(self.eqns) if not backward.isdisjoint(eqn.outvars)), len(self.eqns))
        for i, eqn in reversed(list(enumerate(self.eqns))):
            if not (read - given).isdisjoint(eqn.outvars) or (effects and eqn.effects and i < count):
                kept.append(eqn)
                read.update(_variables(eqn.invars))
        used = [v for v in dict.fromkeys(inputs) if v in read]
        happen = frozenset().union(*(eqn.effects for eqn in kept))
        jaxpr = core.Jaxpr([], used, list(outputs), kept[::-1], happen, self.names)
        return _Stage(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, [])), used)

    def after(self, roots: Iterable[core.Var]) -> set[core.Var]:
        """Returns the variables that depend on `roots`, with these."""
        found = set(roots)
        for eqn in self.eqns:
            if not found.isdisjoint(_variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def marked(self, name: str) -> list[core.Var]:
        """Returns the variables that have a name."""
        return [e.outvars[0] for e in self.eqns if e.primitive.name == "name" and e.params["name"] == name]


def _make_loops(traced: _Traced, count: int, unroll: int) -> Callable | None:
    """Returns run(None, None, fixed, carry, stack); None where a layer gathers nothing ahead and scatters nothing."""
    closed, carry_in, weights = traced.arguments
    fixed_in = [*closed, *traced.constants]
    given = [*fixed_in, *weights]
    smooth = [v for v in (*closed, *carry_in, *weights) if _is_smooth(v.aval)]
    gradients = dict(zip(smooth, traced.gradients, strict=True))
    marked = [v for v in traced.marked(GATHERED) if v in traced.free]

    elsewhere = _variables(gradients[v] for v in smooth if v not in weights)
    terms = [v for v in traced.marked(PARTIAL_GRAD) if traced.after([v]).isdisjoint(elsewhere)]
    tainted = traced.after(terms)
    late = [v for v in weights if v in gradients and tainted.issuperset(_variables([gradients[v]]))] if terms else []
    if not marked and not late:
        return None
    border = [v for eqn in traced.eqns for v in _variables(eqn.invars) if v not in tainted and v not in traced.free]
    behind = traced.stage([*terms, *border, *given], [gradients[v] for v in late])
    kept_of = [v for v in behind.inputs if v not in given]  # terms, and what else `behind` reads of `backward`

    at_once = [v for v in smooth if v not in late]  # `backward` makes the gradients of these
    now = [[v for v in part if v in at_once] for part in (carry_in, fixed_in, weights)]
    residuals = [v for v in _variables(traced.residuals) if v not in traced.free]
    inputs = [*residuals, *given, *marked, *traced.cotangents]
    backward = traced.stage(inputs, [*(gradients[v] for v in at_once), *kept_of])
    saved_of = [v for v in backward.inputs if v in residuals]  # forward stacks them for backward
    forward = traced.stage([*given, *carry_in, *marked], [*traced.outputs, *saved_of], effects=True)
    gathered_of, gathered_back = ([v for v in stage.inputs if v in marked] for stage in (forward, backward))
    ahead, ahead_back = traced.stage(given, gathered_of), traced.stage(given, gathered_back)

    def layer(fixed, stack, i):
        """Returns the values of what layer i has: its weights, and what is fixed. No layer i means the nearest one."""
        i = jnp.clip(i, 0, count - 1)
        rows = [lax.dynamic_index_in_dim(v, i, keepdims=False) for v in stack]
        return _pairs(fixed_in, fixed) | _pairs(weights, rows)

    def run_forward(_, static, fixed, carry, stack):
        def turn(state, i):
            carry, gathered = state
            i, carry = lax.optimization_barrier((i, carry))
            following = ahead(layer(fixed, stack, i + 1))
            values = layer(fixed, stack, i) | _pairs(carry_in, carry) | _pairs(gathered_of, gathered)
            carry, outputs, saved = _cut(forward(values), len(carry_in), len(traced.outputs) - len(carry_in))
            return (carry, following), (outputs, saved)

        state = carry, ahead(layer(fixed, stack, 0))
        (carry, _), (outputs, saved) = lax.scan(turn, state, jnp.arange(count), unroll=unroll)
        return [*carry, *outputs], (fixed, stack, saved)

    def run_backward(_, static, saved, cotangents):
        fixed, stack, saved = saved
        d_carry, d_outputs = (
            [d for d in part if d.dtype != jax.dtypes.float0] for part in _cut(cotangents, len(carry_in))
        )
        types = {v: jax.typeof(of) for v, of in zip(weights, stack, strict=True)}

        def scatter(d_late, kept, i):
            found = behind(layer(fixed, stack, i) | _pairs(kept_of, kept))
            at = jnp.clip(i, 0, count - 1)
            return [lax.dynamic_update_index_in_dim(d, g, at, 0) for d, g in zip(d_late, found, strict=True)]

        def turn(state, inputs):
            (d_carry, d_fixed, d_late, gathered, kept), (i, saved, d_outputs) = state, inputs
            i, d_carry = lax.optimization_barrier((i, d_carry))
            following = ahead_back(layer(fixed, stack, i - 1))
            values = layer(fixed, stack, i) | _pairs(saved_of, saved) | _pairs(gathered_back, gathered)
            made = backward(values | _pairs(traced.cotangents, [*d_carry, *d_outputs]))
            d_closed, d_carry, d_now, terms = _cut(made, len(now[1]), len(now[0]), len(now[2]))
            d_fixed = [a + b for a, b in zip(d_fixed, d_closed, strict=True)]
            return (d_carry, d_fixed, scatter(d_late, kept, i + 1), following, terms), d_now

        zeros = ([_zeros_of(v.aval) for v in now[1]], [_zeros_of(types[v]) for v in late])
        nothing = [_zeros_of(v.aval) for v in kept_of]
        state = d_carry, *zeros, ahead_back(layer(fixed, stack, count - 1)), nothing
        inputs = jnp.arange(count), saved, d_outputs
        (d_carry, d_fixed, d_late, _, kept), d_now = lax.scan(turn, state, inputs, reverse=True, unroll=unroll)
        found = _pairs([*now[0], *now[1], *now[2]], [*d_carry, *d_fixed, *d_now]) | _pairs(
            late, scatter(d_late, kept, 0)
        )
        return tuple([found.get(v) for v in part] for part in (fixed_in, carry_in, weights))

    return differentiable("scan", run_forward, run_backward)


def _trace(layer: Callable[..., tuple[Any, Any]], policy: Callable | None, *arguments: Any) -> tuple[_Traced, Any]:
    """Returns the forward and the backward of layer(closed, carry, weights), and the tree of its result."""
    leaves, tree = jax.tree.flatten(arguments)
    trees = []

    def compute(*leaves):
        result, to = jax.tree.flatten(layer(*tree.unflatten(leaves)))
        trees.append(to)
        return result

    def both(*leaves):
        results, pull = jax.vjp(jax.checkpoint(compute, policy=policy), *leaves)
        smooth = [_is_smooth(v) for v in results]
        given = [checkpoint_name(v, "moax_cotangent") for v, has in zip(results, smooth, strict=True) if has]
        rest = iter(given)
        cotangents = [
            next(rest) if has else np.zeros(v.shape, jax.dtypes.float0) for v, has in zip(results, smooth, strict=True)
        ]
        gradients = [d for d, v in zip(pull(cotangents), leaves, strict=True) if _is_smooth(v)]
        return results, jax.tree.leaves(pull), given, gradients

    closed, shapes = jax.make_jaxpr(both, return_shape=True)(*leaves)
    eqns, constants, inputs, outputs = _inline(closed)
    rows = [jax.tree.leaves(part) for part in tree.unflatten(inputs)]
    free = {*rows[0], *rows[-1], *constants}
    eqns, read = _untie(eqns, free)
    roles = jax.tree.unflatten(jax.tree.structure(shapes), map(read, outputs))
    return _Traced(closed.jaxpr.debug_info.with_unknown_names(), eqns, constants, rows, free, *roles), trees[0]


def _untie(eqns: list[core.JaxprEqn], free: set[core.Var]) -> tuple[list[core.JaxprEqn], Callable[[Any], Any]]:
    """Takes what depends on `free` variables alone out of optimization barriers with others, and adds it to `free`."""
    env: dict[core.Var, Any] = {}
    kept = []

    def read(v):
        return env.get(v, v) if isinstance(v, core.Var) else v

    for eqn in eqns:
        eqn = eqn.replace(invars=[read(v) for v in eqn.invars])
        alone = [not isinstance(v, core.Var) or v in free for v in eqn.invars]
        if eqn.primitive.name == "optimization_barrier":
            pairs = list(zip(eqn.outvars, eqn.invars, alone, strict=True))
            env.update((new, v) for new, v, apart in pairs if apart)
            tied = [(new, v) for new, v, apart in pairs if not apart]
            eqn = eqn.replace(outvars=[new for new, _ in tied], invars=[v for _, v in tied])
        elif all(alone) and not eqn.effects:
            free.update(eqn.outvars)
        if eqn.outvars or eqn.effects:
            kept.append(eqn)
    return kept, read


def _inline(closed: core.ClosedJaxpr) -> tuple[list[core.JaxprEqn], dict[core.Var, Any], list[core.Var], list[Any]]:
    """Returns the operations of a jaxpr with calls replaced by their bodies, its constants, inputs and outputs."""
    eqns: list[core.JaxprEqn] = []
    constants: dict[core.Var, Any] = {}

    def copy(closed, values: Sequence[Any], stack) -> list[Any]:
        jaxpr = getattr(closed, "jaxpr", closed)
        env = dict(zip(jaxpr.invars, values, strict=True))
        for v, value in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True):
            env[v] = core.Var(v.aval)
            constants[env[v]] = value

        def read(v):
            return env[v] if isinstance(v, core.Var) else v

        for eqn in jaxpr.eqns:
            given, info = [read(v) for v in eqn.invars], eqn.source_info
            info = info if stack is None else info.replace(name_stack=stack + info.name_stack)
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if eqn.primitive.name in CALLS else None
            if inner is not None and not _places(eqn):
                made = copy(inner, given, info.name_stack)
            else:
                made = [core.Var(v.aval) for v in eqn.outvars]
                eqns.append(eqn.replace(invars=given, outvars=made, source_info=info))
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(v) for v in jaxpr.outvars]

    inputs = [core.Var(v.aval) for v in closed.jaxpr.invars]
    return eqns, constants, inputs, copy(closed, inputs, None)


def _places(eqn: core.JaxprEqn) -> bool:
    """Returns whether a call names a sharding of an operand or a result."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    return any(isinstance(s, jax.sharding.Sharding) for s in shardings)


def _variables(values: Iterable[Any]) -> list[core.Var]:
    """Returns the variables among the operands or the outputs of a program; the others are literals."""
    return [v for v in values if isinstance(v, core.Var)]


def _is_smooth(x: Any) -> bool:
    """Returns whether an array, or the type of one, is of floating point, and so has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _pairs(keys: Sequence[core.Var], values: Sequence[Any]) -> dict[core.Var, Any]:
    return dict(zip(keys, values, strict=True))


def _cut(values: Sequence[Any], *counts: int) -> list[Sequence[Any]]:
    """Returns so many values in each of the first lists, and the others in the last."""
    ends = np.cumsum([0, *counts]).tolist()
    return [values[start:end] for start, end in zip(ends, [*ends[1:], None], strict=True)]


def _zeros_of(of: Any) -> Array:
    """Returns zeros of an array's type, with its Explicit sharding and its varying Manual axes."""
    explicit = of.sharding.mesh.explicit_axes
    zeros = jnp.zeros(of.shape, of.dtype, out_sharding=of.sharding if explicit else None)
    names = tuple(of.manual_axis_type.varying)
    return lax.pcast(zeros, names, to="varying") if names else zeros
