"""Mixture-of-Experts layers for JAX that quantize before they gather.

`import moax` imports no other module. The first use of a public name imports the module of the name, and JAX.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moax import estimate as estimate
    from moax import hf as hf
    from moax import inspect as inspect
    from moax import lora as lora
    from moax import ops as ops
    from moax.block.experts import CHECKPOINT_NAMES as CHECKPOINT_NAMES
    from moax.block.moe import moe as moe
    from moax.block.moe import quantize_params as quantize_params
    from moax.checks import Unsupported as Unsupported
    from moax.config import MoEConfig as MoEConfig
    from moax.config import MoEStats as MoEStats
    from moax.config import Options as Options
    from moax.config import RouterConfig as RouterConfig
    from moax.mesh.axes import Axes as Axes
    from moax.mesh.axes import make_mesh as make_mesh
    from moax.mesh.collectives import OVERLAP_OPTIONS as OVERLAP_OPTIONS
    from moax.ops.balance import load_metrics as load_metrics
    from moax.ops.balance import update_router_bias as update_router_bias
    from moax.ops.router import route as route
    from moax.params import LogicalAxes as LogicalAxes
    from moax.params import MoEParams as MoEParams
    from moax.params import init as init
    from moax.params import param_specs as param_specs
    from moax.params import trainable_mask as trainable_mask
    from moax.recipe import Format as Format
    from moax.recipe import Recipe as Recipe
    from moax.types import QuantizedParams as QuantizedParams
    from moax.types import Routing as Routing

__version__ = "0.1.0"

_NAMES = {
    "moax.block.experts": ("CHECKPOINT_NAMES",),
    "moax.block.moe": ("moe", "quantize_params"),
    "moax.checks": ("Unsupported",),
    "moax.config": ("MoEConfig", "MoEStats", "Options", "RouterConfig"),
    "moax.mesh.axes": ("Axes", "make_mesh"),
    "moax.mesh.collectives": ("OVERLAP_OPTIONS",),
    "moax.ops.balance": ("load_metrics", "update_router_bias"),
    "moax.ops.router": ("route",),
    "moax.params": ("LogicalAxes", "MoEParams", "init", "param_specs", "trainable_mask"),
    "moax.recipe": ("Format", "Recipe"),
    "moax.types": ("QuantizedParams", "Routing"),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = ("estimate", "hf", "inspect", "linen", "lora", "nnx", "ops")


def __getattr__(name: str) -> Any:
    """Returns the object of a public name, or a module of moax; its first use imports the module."""
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"moax.{name}") is not None:
        return importlib.import_module(f"moax.{name}")
    raise AttributeError(f"module 'moax' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names."""
    return sorted({*_HOMES, *_MODULES, "__version__"})
