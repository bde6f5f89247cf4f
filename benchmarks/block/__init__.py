"""This package measures the MoE block on one device and on a mesh, and a step of the language model.

Each measurement has a process of its own.
"""
