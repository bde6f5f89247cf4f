"""This package lists the collectives of a compiled function: kind, dtype, shape, bytes, mesh axes, and their op.

It also tells from a profile how much of their time has computation beside it.

    print(table(collectives(jitted, *args)))                                      # for people
    assert_no_wide_weight_gather(jitted, *args, weights=(params.wi, params.wo))   # for a user's own test
    print(overlap_table(measure_overlap(jitted, *args)))                          # on GPUs: hidden and exposed time

The list does not have kernels that write into the memory of a peer, nor pairs of send and receive, since these are no
collectives of XLA. A profile has them.
"""

from moax.inspect.block import Report as Report
from moax.inspect.block import inspect_block as inspect_block
from moax.inspect.block import report as report
from moax.inspect.checks import assert_no_wide_weight_gather as assert_no_wide_weight_gather
from moax.inspect.checks import assert_reduce_scattered as assert_reduce_scattered
from moax.inspect.flow import Value as Value
from moax.inspect.overlap import Hidden as Hidden
from moax.inspect.overlap import Overlap as Overlap
from moax.inspect.overlap import measure_overlap as measure_overlap
from moax.inspect.overlap import overlap_table as overlap_table
from moax.inspect.overlap import overlaps as overlaps
from moax.inspect.profiles import Kernel as Kernel
from moax.inspect.profiles import read_profile as read_profile
from moax.inspect.program import Collective as Collective
from moax.inspect.program import collectives as collectives
from moax.inspect.program import table as table
from moax.inspect.program import total_bytes as total_bytes
from moax.inspect.program import weight_gathers as weight_gathers
from moax.inspect.program import weight_scatters as weight_scatters
