"""The benchmarks of moax: `python -m benchmarks WHAT ...` in a clone of the repository.

kernels/: grouped matmuls. block/: the MoE block and a step of the language model, each in a process of its own. wires/:
the sum of gradients, bytes of compiled programs. peers/: implementations by others that are measured beside ours.
results/: what was measured. tune.py measures the tiles of the grouped matmuls on this GPU: `python -m benchmarks.tune`.
cases.py, problem.py and timing.py: shapes, operands and clocks.
profiles.py reads a profile of GPUs: `python -m benchmarks.profiles`.

A measurement is a row (`report.Row`): time, rate, the fraction of the limit measured in the same run, the ratio to each
peer, and the error against float64. What cannot run here is a row too, with the reason.
"""
