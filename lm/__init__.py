"""A byte-level language model with an MoE in every layer: the example of a training loop, run as `python -m lm train`.

module       contents
config       the settings of a run, and four presets
data         the text, as batches of bytes
model        parameters, their layout, and the forward pass
step         one jitted update of the training state
run          the files of a run, and its checkpoints
machine      the machine and the commit that a run notes
loop         a run from start to end
processes    several processes that act as one run
report       the lines that a run prints
plots        curves of one run, and of several
arms         one run, and runs that go on from its checkpoint with other settings
compare      the losses of runs that differ in recipe, capacity factor, mesh, exchange or seed
probe        the errors of a run's gradients, expert by expert
command      the command line
program      how a command starts JAX, prints an error, and exits
"""
