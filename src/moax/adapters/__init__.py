"""moax's block in the place of the MoE layers of MaxText, tunix and Levanter, with a module for each of them.

A module imports its framework when `install` is called, and refuses a version that moax is not tested with.
"""
