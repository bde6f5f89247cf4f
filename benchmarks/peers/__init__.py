"""Peers are layers and matmuls of others, which run beside moax's; those of PyTorch in processes of their own."""
