"""Activation: h [..., G, F] -> a [..., F], elementwise, in float32, returned in the dtype of h.

    swiglu      silu(gate) * up
    geglu       gelu(gate) * up                                        gelu: the tanh form, as in jax.nn.gelu
    swiglu_oai  min(gate, 7) sigmoid(1.702 min(gate, 7)) (clip(up, -7, 7) + 1)         GPT-OSS
    a limit L   min(gate, L) and clip(up, -L, L) come in place of gate and up; 7 above is the default L of swiglu_oai
    reglu, glu  relu(gate) * up, sigmoid(gate) * up
    (f, g)      f(gate) * g(up), for names or functions f and g        ("gelu", "linear") is geglu
    silu, gelu, relu2, quick_gelu, ...                                 of up alone; relu2 = max(up, 0)^2

`gate` is h[..., 0, :] and `up` is h[..., 1, :]; without a gate G is 1 and `up` is h[..., 0, :]. Further names without a
gate are functions of `jax.nn`: relu, relu6, swish, tanh, elu, selu, celu, leaky_relu, soft_sign, hard_tanh,
hard_silu, hard_swish, mish, identity (also called linear). quick_gelu is up sigmoid(1.702 up), and squared_relu is
relu2. Any function of (up) or of (gate, up) will do that is elementwise and 0 at 0; make the object once, because a
program is compiled anew for each.

The op is plain jnp, so that JAX differentiates it and shardings pass through it. The kernels compute the same function,
from its jaxpr.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moax.activations import (
    GATED,
    NOT_ZERO,
    SWIGLU_OAI_LIMIT,
    UNGATED,
    Activation,
    check_activation,
    gates_of,
    operations,
)
from moax.checks import check_arrays, check_value
from moax.mesh.specs import check_whole

NO_MESH = jax.sharding.AbstractMesh((), ())
SHAPE = (3, 5)  # of the arrays on which an activation is traced; no two of its sizes are equal
# Primitives that keep the shape of their operand and mix its elements.
MIXING = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "fft", "iota", "scan", "while"}


def activate(
    h: Float[Array, "*rows G F"], activation: Activation, limit: float | None = None
) -> Float[Array, "*rows F"]:
    """a = act(gate, up), or act(up).

    Args:
      h: [..., G, F], floating point. Its dim G holds gate and up, or up alone.
      activation: the function, as in `MoEConfig`.
      limit: the limit of gate and up; None for none, and for 7 with `swiglu_oai`.

    Returns:
      a: [..., F] in h.dtype, with the leading dims and the sharding of h. It is differentiable in h.

    Raises:
      ValueError: the activation is unknown, not elementwise or not 0 at 0, or reads a traced value, or h has fewer than
        two dims or another G than the activation takes, or axes split its dim G, or the limit is no finite number above
        0, or the activation has no gate for it.
    """
    check_activation("activation", activation)
    gates = gates_of(activation)
    if limit is not None:
        check_value("limit", limit, float, above=0)
        if gates != 2:
            raise ValueError(f"limit={limit!r} needs an activation with a gate; activation={activation!r} has none")
    act = activation_of(activation, limit)
    check_arrays("h [..., G, F]", h, G=gates)
    check_whole("h", h, h.ndim - 2)

    # Backward keeps h alone, and computes the float32 arrays of the function again: swiglu has 5 F a row.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def compute(h):
        halves = [h[..., g, :].astype(jnp.float32) for g in range(gates)]
        return act(*halves).astype(h.dtype)

    return compute(h)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=2)
def multiply_gate(rows: Float[Array, "T H"], gate: Float[Array, "T 1"], dtype: DTypeLike) -> Float[Array, "T H"]:
    """Returns each row times its gate f32, multiplied in float32; backward keeps no rows in float32."""
    return (rows.astype(jnp.float32) * gate).astype(dtype)


@functools.cache
def activation_of(activation: Activation, limit: float | None = None) -> Callable:
    """Returns the function act(gate, up), or act(up), of float32 arrays; ValueError where it cannot be an activation.

    An activation and a limit always give the same function object, because the cache of compiled kernels compares
    functions by identity.
    """
    act = _combine_parts(activation)
    if not isinstance(activation, str):
        _check_elementwise(activation, act)
        # Without the mesh, the value is known inside a `shard_map` too.
        with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(NO_MESH):
            zeros = [jnp.zeros((1, 1), jnp.float32)] * gates_of(activation)
            at_zero = float(act(*zeros)[0, 0])
        if at_zero != 0.0:
            raise ValueError(f"activation={activation!r} must be 0 at 0, where padding is; it is {at_zero}")
    if limit is None and activation == "swiglu_oai":
        limit = SWIGLU_OAI_LIMIT
    if limit is None:
        return act
    return lambda gate, up: act(jnp.minimum(gate, limit), jnp.clip(up, -limit, limit))


def _combine_parts(activation: Activation) -> Callable:
    """Returns the function of an activation without a limit."""
    if isinstance(activation, tuple):
        act_gate, act_up = map(_combine_parts, activation)
        return lambda gate, up: act_gate(gate) * act_up(up)
    if callable(activation):
        return activation
    return (GATED | UNGATED | NOT_ZERO)[activation]


def _check_elementwise(activation: Activation, act: Callable) -> None:
    """Raises ValueError unless each element of act(..) is a function of the same element of its arguments."""
    rule = "it must be an elementwise function of float32 arrays"
    value = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    try:
        closed = jax.make_jaxpr(act)(*[value] * gates_of(activation))
    except Exception as error:
        raise ValueError(f"activation={activation!r} fails on float32 arrays ({error}); {rule}") from error
    for const in closed.consts:
        if isinstance(const, jax.core.Tracer):
            raise ValueError(
                f"activation={activation!r} reads a traced value {const.aval.str_short()}, such as a parameter; "
                "it must read only its operands and constants"
            )
    results = jax.tree.leaves(jax.eval_shape(act, *[value] * gates_of(activation)))
    types = [(result.shape, result.dtype) for result in results]
    if types != [(SHAPE, jnp.float32)]:
        raise ValueError(f"activation={activation!r} makes arrays {types} of arrays {SHAPE}; {rule}")
    for eqn in operations(closed.jaxpr):
        operand_shapes = {getattr(v.aval, "shape", ()) for v in eqn.invars}
        result_shapes = {getattr(v.aval, "shape", ()) for v in eqn.outvars}
        has_other_shape = not result_shapes <= {(), SHAPE}
        reduces = SHAPE in operand_shapes and () in result_shapes
        if eqn.primitive.name in MIXING or has_other_shape or reduces:
            raise ValueError(f"activation={activation!r} calls {eqn.primitive.name}, which mixes elements; {rule}")
