"""This package lists the collectives of a compiled function: kind, dtype, shape, bytes, mesh axes, and their op.

    print(table(collectives(jitted, *args)))                                      # for people
    assert_no_wide_weight_gather(jitted, *args, weights=(params.wi, params.wo))   # for a user's own test

The list does not have kernels that write into the memory of a peer, nor pairs of send and receive, since these are no
collectives of XLA.
"""

from moax.inspect.block import inspect_block as inspect_block
from moax.inspect.checks import assert_no_wide_weight_gather as assert_no_wide_weight_gather
from moax.inspect.checks import assert_reduce_scattered as assert_reduce_scattered
from moax.inspect.flow import Value as Value
from moax.inspect.listing import Collective as Collective
from moax.inspect.listing import collectives as collectives
from moax.inspect.listing import table as table
from moax.inspect.listing import total_bytes as total_bytes
from moax.inspect.listing import weight_gathers as weight_gathers
from moax.inspect.listing import weight_scatters as weight_scatters
