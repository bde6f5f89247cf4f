"""The kernels of Pallas Mosaic GPU. They take arrays and a TileConfig and return arrays."""
