"""This package measures kernels on one device: grouped products, quantization and permutation."""
