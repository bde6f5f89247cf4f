"""The block: `moe.py` has the chain on one device, `experts.py` runs it on a mesh, and `layer.py` has `moax.moe`."""
