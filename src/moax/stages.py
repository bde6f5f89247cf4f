"""The stages of one layer's forward and backward, cut out of its jaxpr at the names of `moax.ops.weights`.

    forward    ahead(weights) -> gathered     main(carry, weights, gathered) -> carry, outputs, residuals
    backward   ahead(weights) -> gathered     main(residuals, weights, gathered, cotangents) -> cotangents, terms
               behind(terms, weights) -> gradients of the weights

`ahead` is what the gathered weights need, which are weights alone. `behind` is what needs a term of a gradient, which
are gradients of weights alone. Neither needs `main` of the same turn of a loop, nor does `main` need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from moax.jaxprs import called

CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "remat", "checkpoint", "custom_jvp_call")
Values = Mapping[core.Var, Any]


class Stage(NamedTuple):
    """A part of a program: run(*values of `inputs`) -> the values of the outputs."""

    run: Callable[..., list[Any]]
    inputs: list[core.Var]

    def __call__(self, values: Values) -> list[Any]:
        """Returns the values of the outputs, from those of all inputs at least; a constant is no jax.Array."""
        return self.run(*(values[v] for v in self.inputs))


class Traced(NamedTuple):
    """The jaxpr of a layer's forward and backward, without calls, and the roles of its variables."""

    names: core.DebugInfo
    eqns: list[core.JaxprEqn]
    constants: dict[core.Var, Any]
    arguments: list[list[core.Var]]  # a list for each argument of `trace`
    outputs: list[Any]
    residuals: list[Any]  # inputs of forward are among them
    cotangents: list[core.Var]  # of the floating-point outputs
    gradients: list[Any]  # of the floating-point inputs, in their order

    def stage(self, inputs: Iterable[core.Var], outputs: Sequence[Any], effects: bool = False) -> Stage:
        """Returns the operations from `inputs` to `outputs`, and with `effects` those of forward that have effects."""
        given, kept, read = set(inputs), [], set(variables(outputs))
        backward = set(self.cotangents)
        count = next((i for i, eqn in enumerate(self.eqns) if not backward.isdisjoint(eqn.outvars)), len(self.eqns))
        for i, eqn in reversed(list(enumerate(self.eqns))):
            if not (read - given).isdisjoint(eqn.outvars) or (effects and eqn.effects and i < count):
                kept.append(eqn)
                read.update(variables(eqn.invars))
        used = [v for v in dict.fromkeys(inputs) if v in read]
        happen = frozenset().union(*(eqn.effects for eqn in kept))
        jaxpr = core.Jaxpr([], used, list(outputs), kept[::-1], happen, self.names)
        return Stage(core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, [])), used)

    def after(self, roots: Iterable[core.Var]) -> set[core.Var]:
        """Returns the variables that depend on `roots`, with these."""
        found = set(roots)
        for eqn in self.eqns:
            if not found.isdisjoint(variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def of_weights(self, weights: set[core.Var]) -> set[core.Var]:
        """Returns the variables that depend on `weights` alone, with these."""
        found = set(weights)
        for eqn in self.eqns:
            if not eqn.effects and found.issuperset(variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    def without_ties(self, weights: set[core.Var]) -> Traced:
        """Returns the program in which no optimization barrier ties what depends on `weights` alone to other values."""
        free, env, eqns = set(weights), {}, []

        def read(v):
            return env.get(v, v) if isinstance(v, core.Var) else v

        for eqn in self.eqns:
            eqn = eqn.replace(invars=[read(v) for v in eqn.invars])
            apart = [free.issuperset(variables([v])) for v in eqn.invars]
            if eqn.primitive.name == "optimization_barrier":
                env.update((new, v) for new, v, alone in zip(eqn.outvars, eqn.invars, apart, strict=True) if alone)
                eqn = eqn.replace(invars=_part(apart, eqn.invars)[1], outvars=_part(apart, eqn.outvars)[1])
            elif all(apart) and not eqn.effects:
                free.update(eqn.outvars)
            if eqn.outvars or eqn.effects:
                eqns.append(eqn)
        renamed = [[read(v) for v in part] for part in self[4:]]
        return Traced(self.names, eqns, self.constants, self.arguments, *renamed)

    def marked(self, name: str) -> list[core.Var]:
        """Returns the variables that have a name."""
        return [e.outvars[0] for e in self.eqns if e.primitive.name == "name" and e.params["name"] == name]


def trace(layer: Callable[..., tuple[Any, Any]], policy: Callable | None, *arguments: Any) -> tuple[Traced, Any]:
    """Returns the forward and the backward of layer(weights, ..., weights), and the tree of its result."""
    leaves, tree = jax.tree.flatten(arguments)
    flags, found = [is_smooth(v) for v in leaves], []

    def both(*leaves):
        def compute(smooth, fixed):
            result, to = jax.tree.flatten(layer(*tree.unflatten(_merge(flags, smooth, fixed))))
            found.append((to, [is_smooth(v) for v in result]))
            return _part(found[-1][1], result)

        smooth, fixed = _part(flags, leaves)
        again = jax.checkpoint(compute, policy=policy)
        results, pull, others = jax.vjp(lambda smooth: again(smooth, fixed), smooth, has_aux=True)
        cotangents = [checkpoint_name(v, "moax_cotangent") for v in results]
        return results, others, jax.tree.leaves(pull), cotangents, pull(cotangents)[0]

    closed, shapes = jax.make_jaxpr(both, return_shape=True)(*leaves)
    eqns, constants, inputs, outputs = _inline(closed)
    results, others, residuals, cotangents, gradients = _cut(outputs, map(len, shapes))
    rows = _cut(inputs, (len(jax.tree.leaves(a)) for a in arguments))
    (result_tree, result_flags), *_ = found
    names, results = closed.jaxpr.debug_info.with_unknown_names(), _merge(result_flags, results, others)
    traced = Traced(names, eqns, constants, rows, results, residuals, cotangents, gradients)
    return traced.without_ties({*rows[0], *rows[-1], *constants}), result_tree


def variables(values: Iterable[Any]) -> list[core.Var]:
    """Returns the variables among the operands or the outputs of a program; the others are literals."""
    return [v for v in values if isinstance(v, core.Var)]


def is_smooth(x: Any) -> bool:
    """Returns whether an array, or the type of one, is of floating point, and so has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _part(flags: Sequence[bool], values: Sequence) -> tuple[list, list]:
    """Returns the values whose flag is set, and the others."""
    pairs = list(zip(flags, values, strict=True))
    return [v for flag, v in pairs if flag], [v for flag, v in pairs if not flag]


def _merge(flags: Sequence[bool], one: Iterable, other: Iterable) -> list:
    """Returns the values that `_part` parted."""
    set_ones, others = iter(one), iter(other)
    return [next(set_ones if flag else others) for flag in flags]


def _cut(values: Sequence, counts: Iterable[int]) -> list[list]:
    """Returns the values in lists of these lengths."""
    rest = iter(values)
    return [[next(rest) for _ in range(count)] for count in counts]


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
            inner = called(eqn) if eqn.primitive.name in CALLS else None
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
