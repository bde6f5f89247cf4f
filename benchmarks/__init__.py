"""The benchmarks of moax: `python -m benchmarks WHAT ...` in a clone of the repository.

kernels/: products, quantization, permutation. block/: the MoE block and a step of the language model, each in a process
of its own. wires/: the exchange of tokens, the gather of weights, bytes of compiled programs. peers/: implementations
by others that are measured beside ours. results/: what was measured.

A measurement is a row (`report.Row`): time, rate, the fraction of the limit measured in the same run, the ratio to each
peer, and the error against float64. What cannot run here is a row too, with the reason.
"""
