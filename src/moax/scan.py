"""`moax.scan` (experimental) gathers weights one layer ahead, and scatters gradients one layer behind.

    forward, turn i       gather the weights of layer i + 1    run layer i
    backward, turn i      gather the weights of layer i - 1    run layer i backward    scatter the gradients of i + 1

The steps of one turn need nothing of each other, so that XLA runs the collectives beside the products. One gathered
layer, and in backward the terms of one layer's gradients, take memory beyond that of `jax.lax.scan`. A barrier ties the
number of a turn to the carry that enters it: of turns that are unrolled, none gathers before the one before has ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jaxtyping import Array, PyTree

from moax.checks import is_int
from moax.mesh.op import differentiable
from moax.mesh.specs import zeros_of
from moax.ops.weights import GATHERED, PARTIAL_GRAD
from moax.stages import Stage, Traced, is_smooth, trace, variables


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
    count = _count(stack, unroll)
    carry = jax.tree.map(jnp.asarray, carry)
    weights = jax.tree.map(lambda v: v[0], stack)
    pure, closed = jax.closure_convert(layer, carry, weights)
    traced, tree = trace(lambda closed, *given: pure(*given, *closed), policy, closed, carry, weights)
    _check_carry(traced, tree, carry)
    plan = _plan(traced, count, unroll)
    if plan is None:
        return lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), carry, stack, unroll=unroll)
    fixed = [*closed, *traced.constants.values()]
    return jax.tree.unflatten(tree, _run(plan, None, fixed, jax.tree.leaves(carry), jax.tree.leaves(stack)))


def _count(stack: PyTree[Array], unroll: int) -> int:
    """Returns the number of layers, or raises ValueError."""
    sizes = {v.shape[:1] for v in jax.tree.leaves(stack)}
    if len(sizes) != 1 or sizes == {()} or sizes == {(0,)}:
        raise ValueError(
            f"stack: its leaves must be arrays [L, ...] of one L >= 1; their leading dims are {sorted(sizes)}"
        )
    if not is_int(unroll) or unroll < 1:
        raise ValueError(f"unroll={unroll!r} must be an int of at least 1")
    return next(iter(sizes))[0]


def _check_carry(traced: Traced, tree, carry: PyTree[Array]) -> None:
    """Raises ValueError where a layer changes the tree, a shape or a dtype of its carry."""
    leaves, was = jax.tree.flatten(carry)
    parts = tree.children()
    if len(parts) != 2 or parts[0] != was:
        raise ValueError(f"layer must return (carry, outputs), with a carry of the tree {was}; it returns {tree}")
    for before, after in zip(leaves, traced.outputs, strict=False):
        if (before.shape, before.dtype) != (after.aval.shape, after.aval.dtype):
            raise ValueError(
                f"layer turns an array {before.dtype}{list(before.shape)} of the carry into "
                f"{after.aval.dtype}{list(after.aval.shape)}; a carry keeps its shapes and its dtypes"
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """The stages of a layer (see `moax.stages`), and the variables whose values go from one to another."""

    count: int
    unroll: int
    fixed: list[core.Var]  # what a layer closes over, and constants
    carry: list[core.Var]
    weights: list[core.Var]
    outputs: int  # how many outputs forward has after its carry
    saved: list[core.Var]  # forward stacks them for backward
    cotangents: list[core.Var]  # of the floating-point ones among carry and outputs
    forward_ahead: Stage
    forward: Stage
    backward_ahead: Stage
    backward: Stage
    behind: Stage
    gathered: list[core.Var]
    gathered_back: list[core.Var]
    kept: list[core.Var]  # terms, and what else `behind` reads of `backward`
    late: list[core.Var]  # the weights whose gradients `behind` makes; `backward` makes the others
    smooth: list[core.Var]  # the arguments that have a gradient

    def at_once(self, part: Sequence[core.Var]) -> list[core.Var]:
        """Returns those of some arguments whose gradients `backward` makes."""
        return [v for v in part if v in self.smooth and v not in self.late]


def _plan(traced: Traced, count: int, unroll: int) -> _Plan | None:
    """Returns the plan of a layer; None where it has nothing to gather ahead and nothing to scatter behind."""
    closed, carry, weights = traced.arguments
    fixed = [*closed, *traced.constants]
    given = [*fixed, *weights]
    free = traced.of_weights(set(given))
    smooth = [v for v in (*closed, *carry, *weights) if is_smooth(v.aval)]
    gradients = dict(zip(smooth, traced.gradients, strict=True))
    marked = [v for v in traced.marked(GATHERED) if v in free]

    elsewhere = variables(gradients[v] for v in smooth if v not in weights)
    terms = [v for v in traced.marked(PARTIAL_GRAD) if traced.after([v]).isdisjoint(elsewhere)]
    tainted = traced.after(terms)
    late = [v for v in weights if v in gradients and tainted.issuperset(variables([gradients[v]]))] if terms else []
    border = [v for eqn in traced.eqns for v in variables(eqn.invars) if v not in tainted and v not in free]
    behind = traced.stage([*terms, *border, *given], [gradients[v] for v in late])
    if not marked and not late:
        return None
    kept = [v for v in behind.inputs if v not in given]

    at_once = [gradients[v] for v in smooth if v not in late]
    residuals = [v for v in variables(traced.residuals) if v not in free]
    backward = traced.stage([*residuals, *given, *marked, *traced.cotangents], [*at_once, *kept])
    saved = [v for v in backward.inputs if v in residuals]
    forward = traced.stage([*given, *carry, *marked], [*traced.outputs, *saved], effects=True)
    gathered, gathered_back = ([v for v in stage.inputs if v in marked] for stage in (forward, backward))
    ahead, back_ahead = traced.stage(given, gathered), traced.stage(given, gathered_back)
    return _Plan(
        count, unroll, fixed, carry, weights, len(traced.outputs) - len(carry), saved, traced.cotangents,
        ahead, forward, back_ahead, backward, behind, gathered, gathered_back, kept, late, smooth,
    )  # fmt: skip


def _pairs(keys: Sequence[core.Var], values: Sequence[Any]) -> dict[core.Var, Any]:
    return dict(zip(keys, values, strict=True))


def _layer(plan: _Plan, fixed: Sequence[Any], stack: Sequence[Array], i: Any) -> dict[core.Var, Any]:
    """Returns the values of what layer i has: its weights, and what is fixed. No layer i means the nearest one."""
    i = jnp.clip(i, 0, plan.count - 1)
    rows = [lax.dynamic_index_in_dim(v, i, keepdims=False) for v in stack]
    return _pairs(plan.fixed, fixed) | _pairs(plan.weights, rows)


def _forward(plan: _Plan, _, fixed, carry, stack) -> tuple[list[Any], tuple]:
    """Returns the last carry with the stacked outputs, and what backward needs."""

    def turn(state, i):
        carry, gathered = state
        i, carry = lax.optimization_barrier((i, carry))
        following = plan.forward_ahead(_layer(plan, fixed, stack, i + 1))
        values = _layer(plan, fixed, stack, i) | _pairs(plan.carry, carry) | _pairs(plan.gathered, gathered)
        made = plan.forward(values)
        cut = len(carry)
        return (made[:cut], following), (made[cut : cut + plan.outputs], made[cut + plan.outputs :])

    state = carry, plan.forward_ahead(_layer(plan, fixed, stack, 0))
    (carry, _), (outputs, saved) = lax.scan(turn, state, jnp.arange(plan.count), unroll=plan.unroll)
    return [*carry, *outputs], (fixed, stack, saved)


def _backward(plan: _Plan, _, residuals, cotangents) -> tuple[list, list, list]:
    """Returns the gradients of fixed, carry and stack; None for an array that has none."""
    fixed, stack, saved = residuals
    carry, closed, at_once = (plan.at_once(part) for part in (plan.carry, plan.fixed, plan.weights))
    cut = len(plan.carry)
    d_carry, d_outputs = (
        [d for d in part if d.dtype != jax.dtypes.float0] for part in (cotangents[:cut], cotangents[cut:])
    )
    rows = _pairs(plan.weights, stack)

    def scatter(d_late, kept, i):
        terms = plan.behind(_layer(plan, fixed, stack, i) | _pairs(plan.kept, kept))
        at = jnp.clip(i, 0, plan.count - 1)
        return [lax.dynamic_update_index_in_dim(d, g, at, 0) for d, g in zip(d_late, terms, strict=True)]

    def turn(state, inputs):
        (d_carry, d_closed, d_late, gathered, kept), (i, saved, d_outputs) = state, inputs
        i, d_carry = lax.optimization_barrier((i, d_carry))
        following = plan.backward_ahead(_layer(plan, fixed, stack, i - 1))
        values = _layer(plan, fixed, stack, i) | _pairs(plan.saved, saved) | _pairs(plan.gathered_back, gathered)
        made = plan.backward(values | _pairs(plan.cotangents, [*d_carry, *d_outputs]))
        d_fixed, made = made[: len(closed)], made[len(closed) :]
        d_carry, made = made[: len(carry)], made[len(carry) :]
        d_closed = [a + b for a, b in zip(d_closed, d_fixed, strict=True)]
        state = d_carry, d_closed, scatter(d_late, kept, i + 1), following, made[len(at_once) :]
        return state, made[: len(at_once)]

    zeros = ([zeros_of(v.aval) for v in closed], [zeros_of(jax.typeof(rows[v])) for v in plan.late])
    nothing = [zeros_of(v.aval) for v in plan.kept]
    state = d_carry, *zeros, plan.backward_ahead(_layer(plan, fixed, stack, plan.count - 1)), nothing
    inputs = jnp.arange(plan.count), saved, d_outputs
    state, d_stack = lax.scan(turn, state, inputs, reverse=True, unroll=plan.unroll)
    d_carry, d_closed, d_late, _, kept = state
    d_late = scatter(d_late, kept, 0)
    found = _pairs(carry, d_carry) | _pairs(closed, d_closed) | _pairs(at_once, d_stack) | _pairs(plan.late, d_late)
    d_fixed, d_carry, d_stack = ([found.get(v) for v in part] for part in (plan.fixed, plan.carry, plan.weights))
    return d_fixed, d_carry, d_stack


_run = differentiable(_forward, _backward, once="scan")
