"""The byte-level language model of `moax train`: a decoder-only transformer with an MoE in every layer.

module              contents
presets             the settings of a run, and four presets of them
mesh                the check that a batch divides over a mesh
processes           several processes that act as one run
data                the text, as batches of bytes
model               the forward pass
optimizer, step     one jitted update
checkpoint          saving and restoring the training state
loop                a run from start to end
report, plot        the lines and the curves of a run
traffic, summary    the bytes of weight gathers, and the end of a run
arms, plot_arms     runs that differ in recipe or seed, compared
probe               the errors of gradients, and the values that quantization loses

All modules but presets, mesh and processes need the extra `moax[train]` (optax, orbax-checkpoint, matplotlib, rich).
"""
