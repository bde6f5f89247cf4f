"""Annotations say what values are. conftest.py makes every function of moax check its own annotations in every test;
here is what this check cannot see by itself.

Covers: the check, that no public annotation escapes it, and the fields of what the public ops return.
"""

import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import pytest

import moax
from moax import MoEConfig, RouterConfig, ops, reference
from support import make_params

# The environment of a GPU need not have beartype.
is_bearable = pytest.importorskip("beartype.door").is_bearable

PUBLIC = (
    "moax.ops",
    "moax.reference",
    "moax.nnx",
    "moax.linen",
    "moax.hf",
    "moax.inspect",
    "moax.estimate",
)
WRONG = {
    "a shape": "def f(x: Float[Array, 'T H']) -> Float[Array, 'H T']: return x",
    "a rank": "def f(x: Float[Array, 'T H K']) -> Float[Array, '...']: return x",
    "a dtype": "def f(x: Int[Array, 'T H']) -> Float[Array, 'T H']: return x",
    "a type": "def f(x: Float[Array, 'T H']) -> str: return x",
}
X = jnp.ones((6, 4))
CONFIG = MoEConfig(num_experts=4, top_k=2, d_model=4, d_ff=8)


def public_functions() -> Iterator[tuple[str, Callable]]:
    """(name, function) of every public function, and of every public method of a public class."""
    functions = [("moax", name, getattr(moax, name)) for name in dir(moax)]
    for module in PUBLIC:
        functions += [(module, *item) for item in vars(importlib.import_module(module)).items()]
    for module, name, value in functions:
        if name.startswith("_") or not getattr(value, "__module__", "").startswith(module):
            continue
        name = f"{module}.{name}"
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            for method, function in vars(value).items():
                function = function.fget if isinstance(function, property) else getattr(function, "__func__", function)
                if (
                    inspect.isfunction(function)
                    and function.__module__ == value.__module__
                    and not method.startswith("_")
                ):
                    yield f"{name}.{method}", function


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_annotation_fails(what, tmp_path, monkeypatch):
    """Breaks if a function could contradict its annotations and no test fail."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"planted_{what.replace(' ', '_')}"
    header = "from __future__ import annotations\nfrom jaxtyping import Array, Float, Int\n"
    right = "\ndef g(x: Float[Array, 'T H']) -> Float[Array, 'T H']: return x\n"
    (tmp_path / f"{name}.py").write_text(header + WRONG[what] + right)
    with jaxtyping.install_import_hook(name, "annotations.checked"):
        planted = importlib.import_module(name)
    assert planted.g(X) is X and jax.jit(planted.g)(X).shape == X.shape
    with pytest.raises(jaxtyping.TypeCheckError):
        planted.f(X)
    with pytest.raises(jaxtyping.TypeCheckError):
        jax.jit(planted.f)(X)


def test_moax_is_checked():
    """Breaks if conftest.py checks nothing: a module of moax was imported before the hook was there."""
    with pytest.raises(jaxtyping.TypeCheckError):
        reference.score(jnp.ones((6, 4), jnp.int32), RouterConfig())
    files = [m for name, m in sys.modules.items() if name.startswith("moax.") and hasattr(m, "__loader__")]
    unchecked = [m.__name__ for m in files if "jaxtyping" not in type(m.__loader__).__module__]
    assert files and not unchecked, f"imported before the hook was installed: {unchecked}"


def test_every_public_annotation_is_checked():
    """Breaks if a public function has an argument or a result without an annotation, or with one that jaxtyping cannot
    read and therefore does not check."""
    bad = []
    for name, function in public_functions():
        function = inspect.unwrap(function)
        signature = inspect.signature(function)
        named = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
        bad += [f"{name}: {p.name} has no annotation" for p in named if p.annotation is inspect.Parameter.empty]
        if signature.return_annotation in (inspect.Signature.empty, "Any"):
            bad.append(f"{name}: nothing says what it returns")
        try:
            typing.get_type_hints(function, include_extras=True)
        except Exception as error:
            bad.append(f"{name}: {error!r}")
    assert len(list(public_functions())) > 30 and not bad, "\n".join(bad)


def results() -> dict[str, Any]:
    """What the public functions that return a pytree return, on one device."""
    params = make_params(CONFIG)
    routing = ops.route(X, RouterConfig(), 2)
    return {
        "route": routing,
        "reference.route": reference.route(X, RouterConfig(), 2),
        "all_gather": ops.dispatch(X, routing.experts, routing.weights, 4),
        "all_to_all": ops.dispatch(X, routing.experts, routing.weights, 4, exchange="all_to_all"),
        "permute": ops.permute(X, routing.experts, 4)[1],
        "moe": moax.moe(X, params, CONFIG)[1],
        "reference.moe": reference.moe(X, params, CONFIG)[1],
    }


def test_fields_of_results():
    """Breaks if a field of what an op returns has another shape or dtype than the class says."""
    bad = []
    for name, value in results().items():
        hints = typing.get_type_hints(type(value), include_extras=True)
        with jaxtyping.jaxtyped("context"):  # in which a letter has one size
            for field, hint in hints.items():
                if not is_bearable(getattr(value, field), hint):
                    bad.append(f"{name}: {field}={getattr(value, field)} is no {hint}")
    assert not bad, "\n".join(bad)
