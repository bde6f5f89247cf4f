"""A byte-level language model with an MoE in every layer: the example of a training loop, run as `python -m lm train`.

module       contents
config       the settings of a run, and four presets
data         the text, as batches of bytes
model        parameters, their layout, and the forward pass
optimizer    AdamW and its schedule
step         one jitted update of the training state
checkpoint   saving and restoring that state
loop         a run from start to end
run          the files of a run
processes    several processes that act as one run
report       the lines that a run prints
plots        curves of one run, of several runs, and of an experiment
experiments  runs that differ in recipe or seed, and the errors of their gradients
command      the command line
"""
