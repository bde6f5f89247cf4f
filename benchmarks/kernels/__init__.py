"""Kernels on one device: grouped products, quantization, permutation."""
