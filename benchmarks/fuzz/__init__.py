"""Random blocks by the kernels, beside XLA and beside float32; `python -m benchmarks.fuzz --help` has the options.

cases    a block by its seed, and its inputs
oracle   the programs of a block, and the comparison with `moax.reference`
meshes   a mesh by its seed, and a block on it beside one device
named    the fixed cases, of what hung or broke others
large    the fixed cases of more than 2^31 elements
run      the command line and its processes
"""
