"""The kernels: a file each, arrays and a TileConfig in, arrays out, by Pallas Mosaic GPU."""
