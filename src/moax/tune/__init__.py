"""`moax tune` measures the tiles of grouped matmuls. This package has its shapes, its operands and its clock."""
