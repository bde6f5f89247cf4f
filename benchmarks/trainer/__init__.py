"""A training step of MaxText on one GPU, with its own MoE layer and with moax's: `make trainer-h200`."""
