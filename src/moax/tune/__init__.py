"""The tiles of grouped matmuls: what `moax tune` measures, and how it takes the time of a call."""
