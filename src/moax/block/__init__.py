"""The block: `moe.py` has the way of the data, `contract.py` how it lies on a mesh."""
