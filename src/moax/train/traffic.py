"""This module counts the bytes of weights on the wire: the all-gathers over fsdp in the program of an update."""

from __future__ import annotations

import dataclasses

import jax

import moax
from moax import inspect
from moax.arguments import mesh_over_devices
from moax.train.presets import TrainConfig
from moax.train.step import jit_update


def weight_gather_bytes(program) -> int:
    """Returns the bytes of weights and scales that a device sends in one update, with one pass over the buffers.

    `program` is lowered or compiled.
    """
    found = [c for c in inspect.collectives(program) if not c.open_loop]
    return inspect.total_bytes(inspect.weight_gathers(found, moax.Axes()))


def measure(config: TrainConfig, update: jax.stages.Compiled) -> tuple[int, int] | None:
    """Measures what the recipe of a run saves on the wire.

    Args:
      config: the settings of the run.
      update: the compiled update of the run.

    Returns:
      (bytes of `update`, bytes of the same update without a recipe), both of one device; None where the mesh gathers
      no weights.
    """
    if config.recipe is None and config.dtype == "float32":  # Every backend moves float32 as it is.
        plain = weight_gather_bytes(update)
        return (plain, plain) if plain else None
    mesh = mesh_over_devices(config.mesh)
    with jax.set_mesh(mesh):
        step, args = jit_update(dataclasses.replace(config, recipe=None), mesh)
        plain = weight_gather_bytes(step.lower(*args))
    return (weight_gather_bytes(update) if config.recipe else plain, plain) if plain else None


def describe(config: TrainConfig, bytes: int, unquantized_bytes: int) -> str:
    """Returns what `measure` found as one line of text."""
    plain = f"{unquantized_bytes / 1e6:.2f} MB in {config.dtype}"
    if not config.recipe:
        return f"a device sends {plain} in a step"
    ratio = f"{bytes / unquantized_bytes:.2f} of the {plain} without a recipe"
    return f"a device sends {bytes / 1e6:.2f} MB in a step with {config.recipe}, {ratio}"
