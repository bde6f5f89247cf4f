"""Bytes that weights cost on the wire: the all-gathers over fsdp of one update, as the compiled program has them."""

from __future__ import annotations

import dataclasses

import jax

import moax
from moax import inspect
from moax.arguments import mesh_over_devices
from moax.train.presets import TrainConfig
from moax.train.step import jit_update


def weight_gather_bytes(program) -> int:
    """Bytes of weights and scales that a device sends in one update; `program` is lowered or compiled."""
    return inspect.total_bytes(inspect.weight_gathers(inspect.collectives(program), moax.Axes()))


def measure(config: TrainConfig, update: jax.stages.Compiled) -> tuple[int, int] | None:
    """Bytes of `update`, the run's own, and of the same without a recipe; None where nothing is gathered."""
    if config.recipe is None and config.dtype == "float32":  # which every backend moves as it is
        plain = weight_gather_bytes(update)
        return (plain, plain) if plain else None
    mesh = mesh_over_devices(config.mesh)
    with jax.set_mesh(mesh):
        step, args = jit_update(dataclasses.replace(config, recipe=None), mesh)
        plain = weight_gather_bytes(step.lower(*args))
    return (weight_gather_bytes(update) if config.recipe else plain, plain) if plain else None


def describe(config: TrainConfig, bytes: int, unquantized_bytes: int) -> str:
    """One line of what `measure` found."""
    line = f"{unquantized_bytes / 1e6:.2f} MB a step and device in {config.dtype}"
    if config.recipe:
        saved = f"without ({bytes / unquantized_bytes:.2f} of it)"
        line = f"{bytes / 1e6:.2f} MB a step and device with {config.recipe}, {line} {saved}"
    return line
