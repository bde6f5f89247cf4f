"""Peers are layers and products of others, which run beside moax's; those of PyTorch in processes of their own."""
