"""Pallas Mosaic GPU kernels for Hopper: arrays and a TileConfig in, arrays out. No sharding, no config.

Every kernel works on blocks of 128 expert-sorted rows (`blocks`): groups start at multiples of 128, so no block holds
rows of two groups, and block b is rows [128 b, 128 b + 128). FP8 operands are K-major: see `Operand`.
"""
