"""This package measures the grouped matmuls on one device."""
