"""The byte-level language model of `moax train`: a decoder-only transformer with an MoE in every layer.

presets: what to train. mesh: on which devices. processes: several of them as one. data: bytes. model: the forward pass.
optimizer, step: one jitted update. checkpoint: save and restore. loop: a run. report, plot: what a run shows. All but
presets, mesh and processes need the extra `moax[train]` (optax, orbax-checkpoint, matplotlib, rich).
"""
