"""Bytes that weights cost on the wire: the all-gathers over fsdp of one update, as the compiled program has them."""

from __future__ import annotations

import dataclasses

import jax

import moax
from moax import inspect
from moax.train.mesh import make_mesh
from moax.train.presets import TrainConfig
from moax.train.step import jit_update


def weight_gather_bytes(program) -> int:
    """Bytes of weights and scales that a device sends in one update; `program` is lowered or compiled."""
    return inspect.total_bytes(inspect.weight_gathers(inspect.collectives(program), moax.Axes()))


def describe(config: TrainConfig, update: jax.stages.Compiled) -> str | None:
    """One line: bytes of `update`, the run's own, beside those without a recipe; None where nothing is gathered."""
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        step, args = jit_update(dataclasses.replace(config, recipe=None), mesh)
        plain = weight_gather_bytes(step.lower(*args))
    if not plain:
        return None
    line = f"{plain / 1e6:.2f} MB a step and device in {config.dtype}"
    if config.recipe:
        own = weight_gather_bytes(update)
        line = f"{own / 1e6:.2f} MB a step and device with {config.recipe}, {line} without ({own / plain:.2f} of it)"
    return line
