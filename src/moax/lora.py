"""Low-rank adapters of frozen experts (LoRA; Hu et al., 2021), a pair of matrices for each of wi and wo.

    h[n] = x[n] wi[e] + scale (x[n] wi_a[e]) wi_b[e]        a = act(h)
    o[n] = a[n] wo[e] + scale (a[n] wo_a[e]) wo_b[e]        e is the expert of row n

`moax.moe(..., adapters=adapters)` computes it. `wi` and `wo` have no gradient then, and the block computes none; with
`quantized=moax.quantize_params(...)` it reads their bytes alone, and `params.wi` and `params.wo` may be None.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from moax.checks import check_arrays, check_key, check_value
from moax.config import MoEConfig
from moax.mesh.axes import AnyMesh, Axes
from moax.mesh.specs import Spec, check_divides, make_sharded, mesh_in_force, reshard_like
from moax.params import DIMS as DIMS_OF_PARAMS
from moax.params import MoEParams
from moax.types import pytree

# The letters of the dims of each adapter, as in `moax.params`; r is the rank, and the H of latent experts is L.
DIMS = dict(wi_a="EHr", wi_b="ErGF", wo_a="EFr", wo_b="ErH")
# each weight and its pair
WEIGHTS = (("wi", "wi_a", "wi_b"), ("wo", "wo_a", "wo_b"))


@pytree("scale")
class Adapters[Leaf]:
    """The adapters of a block, of rank r. The pair of wi or that of wo may be None.

    Attributes:
      wi_a: [E, H, r]. wi_b: [E, r, G, F]. Latent experts have L in the place of H.
      wo_a: [E, F, r]. wo_b: [E, r, H].
      scale: the factor of both adapters, a number; alpha / r in the words of the paper.
    """

    wi_a: Leaf | None
    wi_b: Leaf | None
    wo_a: Leaf | None
    wo_b: Leaf | None
    scale: float = 1.0


def init(
    key: PRNGKeyArray | Array,
    config: MoEConfig,
    rank: int,
    *,
    scale: float = 1.0,
    dtype: jax.typing.DTypeLike = jnp.float32,
    axes: Axes = Axes(),
) -> Adapters[Array]:
    """Makes adapters that change nothing yet: wi_a and wo_a ~ normal of variance 1 / fan-in, wi_b and wo_b 0.

    Args:
      key: a PRNG key.
      config: the sizes of the block.
      rank: r, at least 1.
      scale: the factor of both adapters, a finite number.
      dtype: the dtype of the adapters.
      axes: the role of each mesh axis. With a mesh in force the adapters lie as `adapter_specs` says.

    Raises:
      ValueError: an argument is of the wrong kind, or the mesh axes of a dim do not divide its size.
    """
    check_value("config", config, MoEConfig)
    check_key("key", key)
    check_value("rank", rank, int)
    check_value("dtype", dtype, jnp.floating)
    check_value("scale", scale, float, least=-math.inf)
    check_value("axes", axes, Axes)
    shapes = adapter_shapes(config, rank)

    def draw(key, shape):
        return (jax.random.normal(key, shape) / math.sqrt(shape[1])).astype(dtype)

    def make(key):
        wi_key, wo_key = jax.random.split(key)
        return Adapters(
            wi_a=draw(wi_key, shapes.wi_a),
            wi_b=jnp.zeros(shapes.wi_b, dtype),
            wo_a=draw(wo_key, shapes.wo_a),
            wo_b=jnp.zeros(shapes.wo_b, dtype),
            scale=float(scale),
        )

    specs = None
    if mesh_in_force() is not None:
        specs = dataclasses.replace(adapter_specs(config, axes), scale=float(scale))
    return make_sharded(make, specs)(key)


def dim_sizes(config: MoEConfig) -> dict[str, int]:
    """Returns the size of each letter of `DIMS` but the rank."""
    return dict(E=config.num_experts, H=config.d_rows, F=config.d_ff, G=config.gates)


def adapter_shapes(config: MoEConfig, rank: int) -> Adapters[tuple[int, ...]]:
    """Returns the shape of each adapter of this rank."""
    sizes = dim_sizes(config) | dict(r=rank)
    shapes: dict[str, Any] = {name: tuple(sizes[letter] for letter in dims) for name, dims in DIMS.items()}
    return Adapters(**shapes)


def adapter_specs(config: MoEConfig, axes: Axes = Axes(), mesh: AnyMesh | None = None) -> Adapters[Spec]:
    """Returns the PartitionSpec of each adapter: experts over ep, F over tp; fsdp and dp replicate them.

    For arguments and errors see `moax.param_specs`.
    """
    check_value("config", config, MoEConfig)
    check_value("axes", axes, Axes)
    resolved = axes.resolve(mesh or mesh_in_force())
    split = {"E": resolved.ep, "F": resolved.tp}
    shapes = adapter_shapes(config, 1)
    specs: dict[str, Any] = {}
    for name, dims in DIMS.items():
        specs[name] = Spec(*(split.get(letter) for letter in dims))
        check_divides(f"adapters.{name}", getattr(shapes, name), specs[name], resolved)
    return Adapters(**specs)


def merge(params: MoEParams[Array], adapters: Adapters[Array]) -> MoEParams[Array]:
    """Returns parameters of plain experts: wi + scale wi_a wi_b and wo + scale wo_a wo_b, rounded to their dtypes.

    Raises:
      ValueError: the adapters are not those of a block of such parameters.
    """
    check_value("params", params, MoEParams)
    _check_pairs(adapters)
    for w, a, b in WEIGHTS:
        if getattr(adapters, a) is not None:
            rule = f"params.{w} [{', '.join(DIMS_OF_PARAMS[w])}], {_rule(a, b)}"
            check_arrays(rule, getattr(params, w), getattr(adapters, a), getattr(adapters, b))

    def add(w, a, b, rule):
        if a is None:
            return w
        operands, dims_of_w = rule.split("->")
        dims_of_a, dims_of_b = operands.split(",")
        # fsdp splits w, and no adapter.
        a = reshard_like(a.astype(jnp.float32), dims_of_a, w, dims_of_w)
        b = reshard_like(b.astype(jnp.float32), dims_of_b, w, dims_of_w)
        change = jnp.einsum(rule, a, b, precision="highest")
        return (w.astype(jnp.float32) + adapters.scale * change).astype(w.dtype)

    wi = add(params.wi, adapters.wi_a, adapters.wi_b, "ehr,ergf->ehgf")
    wo = add(params.wo, adapters.wo_a, adapters.wo_b, "efr,erh->efh")
    return dataclasses.replace(params, wi=wi, wo=wo)


def scaled(adapters: Adapters[Array]) -> tuple[Array | None, ...]:
    """Returns wi_a scale, wi_b, wo_a scale and wo_b."""
    wi_a = None if adapters.wi_a is None else adapters.wi_a * adapters.scale
    wo_a = None if adapters.wo_a is None else adapters.wo_a * adapters.scale
    return wi_a, adapters.wi_b, wo_a, adapters.wo_b


def check_adapters(adapters: Adapters[Array], config: MoEConfig, *, local: bool = False) -> None:
    """Raises ValueError unless `adapters` fit a block of this config; `local` ones may be shards in a `shard_map`."""
    _check_pairs(adapters)
    check_value("adapters.scale", adapters.scale, float, least=-math.inf)
    for _, a, b in WEIGHTS:
        check_arrays(_rule(a, b), getattr(adapters, a), getattr(adapters, b), local=local, **dim_sizes(config))


def _check_pairs(adapters: Adapters[Array]) -> None:
    """Raises ValueError for half a pair, and for what are no adapters."""
    check_value("adapters", adapters, Adapters, "moax.lora.init")
    for _, a, b in WEIGHTS:
        if (getattr(adapters, a) is None) != (getattr(adapters, b) is None):
            raise ValueError(f"adapters.{a} and adapters.{b} must both be given, or both be None")


def _rule(*names: str) -> str:
    """Returns the rule of adapters for `check_arrays`: "adapters.wi_a? [E, H, r]"."""
    return ", ".join(f"adapters.{name}? [{', '.join(DIMS[name])}]" for name in names)
