"""Whether calls have the same bits, as the block's benchmark tells."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.block import bits

pytestmark = pytest.mark.more


def test_names_what_differs():
    """Breaks if a result that varies by one bit from call to call is taken for the same, or -0 for 0, or NaN for other
    bits than its own."""
    calls, one = itertools.count(), np.float32(1)
    run = lambda x: {  # noqa: E731
        "same": (x, jnp.array([jnp.nan])),
        "zero": jnp.zeros(3) * (-1.0) ** next(calls),
        "bit": jnp.asarray([one, np.nextafter(one, 2) if next(calls) > 5 else one]),
    }
    found = bits.compare_runs(run, (jnp.ones((2, 2), jnp.bfloat16),))
    assert found == {"runs": bits.RUNS, "differing": ["['bit']"]}
    flips = itertools.count()
    assert bits.compare_runs(lambda: [jnp.zeros(3) * (-1.0) ** next(flips)], ())["differing"] == ["[0]"]
