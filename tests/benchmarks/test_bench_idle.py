"""benchmarks.block.idle: what it reads from a profile of calls."""

from benchmarks.block import idle
from moax.inspect import Kernel


def test_split():
    """Breaks if kernels of two streams that run at one time count twice, or an idle time behind a longer kernel counts
    where the longer one still runs."""
    kernels = [Kernel("GPU:0", "k", "", 1e3 * a, 1e3 * b) for a, b in ((9, 12), (0, 6), (1, 3), (4, 5), (14, 20))]
    assert idle.split(kernels, 5) == {"launches": 1.0, "busy_us": 3.0, "idle_us": 1.0}
