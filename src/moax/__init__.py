"""Mixture-of-Experts layers for JAX that quantize before they gather."""

import importlib
from types import ModuleType

from moax import estimate as estimate
from moax import hf as hf
from moax import inspect as inspect
from moax import ops as ops
from moax.block.experts import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from moax.block.layer import moe as moe
from moax.config import MoEConfig as MoEConfig
from moax.config import RouterConfig as RouterConfig
from moax.errors import Unsupported as Unsupported
from moax.initialize import init as init
from moax.mesh.axes import Axes as Axes
from moax.mesh.devices import make_mesh as make_mesh
from moax.ops.balance import update_router_bias as update_router_bias
from moax.ops.routing import route as route
from moax.options import Options as Options
from moax.params import MoEParams as MoEParams
from moax.recipe import Format as Format
from moax.recipe import Recipe as Recipe
from moax.sharding import param_specs as param_specs
from moax.types import MoEStats as MoEStats
from moax.types import QArray as QArray
from moax.types import Routing as Routing

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """`moax.nnx` and `moax.linen` import flax when they are first asked for."""
    if name in ("nnx", "linen"):
        return importlib.import_module(f"moax.{name}")
    raise AttributeError(f"module 'moax' has no attribute {name!r}")
