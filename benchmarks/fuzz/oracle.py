"""The programs of a case, and the comparison of their results with `moax.reference` in float32."""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import moax
from benchmarks.fuzz.cases import Case
from moax import reference

# The errors that a recipe may cost: that of y, and that of a gradient.
BOUNDS = {
    None: (0.02, 0.05),
    "fp8_block": (0.15, 0.6),
    "mxfp8": (0.15, 0.6),
}
# The kernels may round other sums than XLA does.
WORSE = 1.5
ROUNDING = 0.01
# The derivative of these jumps, so that a rounding changes whole columns of an expert that has few rows.
KINKED = (
    *"reglu relu relu6 leaky_relu hard_tanh hard_silu".split(),
    *"hard_swish celu selu swiglu_oai".split(),
)
JUMP = 0.3
ROUNDED = 2.0**-4  # the relative rounding of e4m3
# A recipe may cost an ill-conditioned gradient this many times such a rounding of the weights.
CONDITION = 3.0
DRAWS = 8  # of such roundings, of which the largest error counts
ROUTER = "router"
BY_EXPERT = ("wi", "wo", "bi", "bo")
Programs = namedtuple("Programs", "ours xla reference")  # of a case; the first call compiles each


def gradients(f: Callable, params, x, weights, dy) -> dict[str, Any]:
    """Returns y and the gradients of f(params, x, weights) -> (y, aux), by name, and aux under "experts"."""
    y, pull, experts = jax.vjp(f, params, x, weights, has_aux=True)
    d_params, dx, d_weights = pull(dy.astype(y.dtype))
    names = ("router", *BY_EXPERT)
    results = dict(y=y, dx=dx, weights=d_weights, experts=experts)
    results |= {name: getattr(d_params, name) for name in names}
    return {name: value for name, value in results.items() if value is not None}


def by_moax(case: Case, kernels: str, exchange: str = "auto") -> Callable[[dict], dict]:
    """Returns the function of the inputs that runs the block by an implementation, over all layers."""
    settings = dict(recipe=case.recipe, buffer_factor=case.buffer_factor, exchange=exchange)
    options = moax.Options(kernels=kernels, **settings)

    def one(inputs: dict) -> dict:
        def block(params, x, weights):
            ids = inputs["ids"]
            quantized = None
            if case.quantized:
                frozen = jax.lax.stop_gradient(params)
                quantized = moax.quantize_params(frozen, case.config, options)
            routing = ids if weights is None else (ids, weights)
            settings = dict(
                mask=inputs["mask"],
                routing=routing,
                quantized=quantized,
                return_routing=True,
            )
            y, stats = moax.moe(x, params, case.config, options, **settings)
            return y, cast(moax.Routing, stats.routing).experts

        if case.remat:
            block = jax.checkpoint(block)
        x = inputs["x"]
        if inputs["mask"] is not None:
            x = jnp.where(inputs["mask"][..., None], x, jnp.nan)
        return gradients(block, inputs["params"], x, inputs["weights"], inputs["dy"])

    def run(inputs: dict) -> dict:
        if case.way == "plain":
            return jax.tree.map(lambda v: v[None], one(jax.tree.map(lambda v: v[0], inputs)))
        if case.way == "vmap":
            return jax.vmap(one)(inputs)
        return jax.lax.scan(lambda _, inputs: (None, one(inputs)), None, inputs)[1]

    return program(run)


def by_reference(case: Case) -> Callable[[dict, Any], dict]:
    """Returns the function of one layer's inputs, and of the experts that took part, that runs `moax.reference`."""

    def run(inputs: dict, experts) -> dict:
        if inputs["mask"] is None:
            real = jnp.ones(case.tokens, bool)
        else:
            real = inputs["mask"]
        real_assignments = (experts < case.config.num_experts) & real[:, None]

        def block(params, x, weights):
            args = dict(experts=experts, weights=weights, kept=real_assignments)
            return reference.moe(x, params, case.config, **args)[0] * real[:, None], experts

        operands = (inputs["params"], inputs["x"])
        params, x = jax.tree.map(lambda v: v.astype(jnp.float32), operands)
        return gradients(block, params, x, inputs["weights"], inputs["dy"])

    return program(run)


def round_weights(case: Case, inputs: dict, run: Callable, experts, draw: int) -> dict[str, Any]:
    """Returns the reference's results with wi and wo off by a random relative ROUNDED: a measure of the condition."""
    rng = np.random.default_rng([case.seed, 2, draw])
    params = inputs["params"]
    noisy = {}
    for name in ("wi", "wo"):
        weight = getattr(params, name)
        noise = 1 + ROUNDED * rng.standard_normal(weight.shape)
        noisy[name] = (weight * noise).astype(jnp.bfloat16)
    params = dataclasses.replace(params, **noisy)
    layers = []
    for i in range(len(inputs["x"])):
        own = jax.tree.map(lambda v, i=i: v[i], inputs | dict(params=params))
        layers.append(jax.device_get(run(own, experts[i])))
    return jax.tree.map(lambda *values: np.stack(values), *layers)


def program(run: Callable) -> Callable:
    """Returns `run` as a program that XLA compiles without timing kernels of its own: it runs once or twice."""
    once = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return jax.jit(run, compiler_options=once if jax.default_backend() == "gpu" else None)


def error(name: str, got, want) -> float:
    """Returns |got - want| / |want| in float64, for a gradient of experts the largest one of an expert."""
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    dims = tuple(range(1, want.ndim)) if name in BY_EXPERT else None
    off = np.sqrt(((got - want) ** 2).sum(dims))
    norm = np.sqrt((want**2).sum(dims))
    # An expert whose gradient is a rounding error of the others has no relative error of its own.
    floor = max(1e-3 * float(np.max(norm, initial=0.0)), 1e-30)
    return float(np.max(off / np.maximum(norm, floor), initial=0.0))


def make_programs(case: Case, kernels: str) -> Programs:
    """Returns the programs of a case, for all of its draws."""
    ours = by_moax(case, kernels)
    return Programs(ours, ours if kernels == "xla" else by_moax(case, "xla"), by_reference(case))


def check(case: Case, programs: Programs, inputs: dict) -> tuple[bool, dict]:
    """Returns whether a case is right, and {name: (error of the kernels, error of XLA)}."""
    ours = jax.device_get(programs.ours(inputs))
    run = programs.reference
    if programs.xla is programs.ours:
        xla = ours
    else:
        xla = jax.device_get(programs.xla(inputs))

    def errors_of(got: dict) -> dict[str, float]:
        """Returns the largest error of a layer, by name; a NaN stays one."""
        layers = []
        for i in range(len(inputs["x"])):
            own, mine = (jax.tree.map(lambda v, i=i: v[i], tree) for tree in (inputs, got))
            want = jax.device_get(run(own, mine["experts"]))
            layers.append(
                {name: error(name, mine[name], want[name]) for name in want if name != "experts"},
            )
        return {name: float(np.max([layer[name] for layer in layers])) for name in layers[0]}

    of_ours = errors_of(ours)
    of_xla = errors_of(xla)
    errors = {name: (of_ours[name], of_xla[name]) for name in of_ours}
    of_y, of_gradients = BOUNDS[case.recipe]
    jump = JUMP if case.config.activation in KINKED else 0.0
    bounds = {name: (of_y, 0.0) if name == "y" else (of_gradients, jump) for name in errors}
    worse = []
    wide = []
    for name, (our_error, xla_error) in errors.items():
        if not our_error <= WORSE * xla_error + ROUNDING + bounds[name][1]:
            worse.append(name)
        if not xla_error <= sum(bounds[name]):
            wide.append(name)
    # One token's gradient of the router may be a difference of equals: one number, which one rounding may hit by luck.
    if (worse or wide) and set(worse) <= {ROUTER} and case.recipe is not None:
        draws = [errors_of(round_weights(case, inputs, run, ours["experts"], draw)) for draw in range(DRAWS)]
        limits = {name: CONDITION * max(draw[name] for draw in draws) for name in errors}
        worse = [name for name in worse if not errors[name][0] <= limits[name]]
        wide = [name for name in wide if not errors[name][1] <= limits[name]]
    return not worse and not wide, errors
