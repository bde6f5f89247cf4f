"""Which collectives a jitted function compiles to: kind, dtype, shape, bytes, mesh axes, the op they come from.

    print(table(collectives(jitted, *args)))                               # what crosses the wire
    assert_no_wide_weight_gather(jitted, *args, weights=(params.wi, params.wo))   # in a user's own test

Kernels that write into a peer's memory themselves are no collectives of XLA's, and are not seen here.
"""

from moax.inspect.block import Report as Report
from moax.inspect.block import inspect_block as inspect_block
from moax.inspect.block import report as report
from moax.inspect.program import Collective as Collective
from moax.inspect.program import assert_no_wide_weight_gather as assert_no_wide_weight_gather
from moax.inspect.program import assert_reduce_scattered as assert_reduce_scattered
from moax.inspect.program import collectives as collectives
from moax.inspect.program import table as table
from moax.inspect.program import total_bytes as total_bytes
from moax.inspect.program import weight_gathers as weight_gathers
