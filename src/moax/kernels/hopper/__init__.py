"""Pallas Mosaic GPU kernels for Hopper: arrays and a TileConfig in, arrays out. No sharding, no config.

Every kernel works on blocks of 128 expert-sorted rows (`moax.groups.Blocks`): groups start at multiples of 128, so
that no block holds rows of two groups. FP8 operands are K-major (`moax.types.Operand`).
"""
