"""What moax computes, written once more in NumPy and float64: no function here compiles a program.

formats    a round trip through FP8: x -> data, scale -> x
ops        each op and its gradient: route, activation, grouped matmul, permute, dense
block      the whole block and every gradient, each product of operands rounded as a recipe says

tests/block/test_reference.py holds these formulas against autodiff of `moax.reference`.
"""
