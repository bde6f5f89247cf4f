"""Blocks of expert-sorted rows, and FP8 operands: the nouns of the kernels."""

from moax.groups import BLOCK as BLOCK
from moax.groups import Blocks as Blocks
from moax.groups import align_up as align_up
from moax.groups import make_blocks as make_blocks
from moax.types import Operand as Operand
