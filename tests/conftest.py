"""Every test runs on 8 emulated CPU devices or, with MOAX_TEST_GPU=1, on the machine's GPUs.

JAX reads all of this when its backend starts, so it is set before anything imports jax. Most of a test's time is the
compilation of its program, which `processes.FLAGS` make fast; values stay within the suites' limits.
"""

import gc
import os
import shutil
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path

import processes

ON_GPU = os.environ.get("MOAX_TEST_GPU") == "1"
# The threads of OpenBLAS spin, and would take the cores from the other worker.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# No test reads where in Python an operation is from.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
if not ON_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        processes.FLAGS,
    )
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

import hypothesis
import jax
import jaxtyping
import pytest
from jax.experimental.compilation_cache import compilation_cache

# Traces make many objects and few cycles, so the collector has little to find in most of its passes.
gc.freeze()
gc.set_threshold(200_000, 20, 20)

# Every function of moax and lm checks its annotations; see annotations.py. A GPU's environment need not have beartype,
# and `make test-more` leaves the checks to `make test`.
if not ON_GPU and os.environ.get("MOAX_TEST_ANNOTATIONS") != "0":
    jaxtyping.install_import_hook(["moax", "lm"], "annotations.checked")

from support import summary

CACHE = Path(__file__).parent.parent / ".jax_cache"
CACHE_BYTES = 2**30

if not ON_GPU:
    jax.config.update("jax_platforms", "cpu")  # for a plugin that imported jax before this file
# Test workers share the directory. A key holds op names too, so that a cached program has those of the code under test.
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
# Most programs of a CPU are of one operation, and are read faster than they compile. A bound of JAX's own would make it
# look at every file at every write, so `pytest_sessionstart` bounds the directory.
jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES if ON_GPU else -1)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3 if ON_GPU else 0.0)

# No deadline: the first example compiles. Derandomized: a red run is red again.
hypothesis.settings.register_profile("moax", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("moax")


def pytest_sessionstart(session):
    """Empties a large cache: each change of the sources leaves programs that no later session asks for."""
    worker = hasattr(session.config, "workerinput")
    if not worker and sum(path.stat().st_size for path in CACHE.glob("*-cache")) > CACHE_BYTES:
        shutil.rmtree(CACHE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """No silent promotion of dtypes or ranks, in fixtures and test, but for tests marked `loose`."""
    with ExitStack() as strict:
        if item.get_closest_marker("loose") is None:
            strict.enter_context(jax.numpy_dtype_promotion("strict"))
            strict.enter_context(jax.numpy_rank_promotion("raise"))
        return (yield)


def pytest_collection_modifyitems(items):
    """Each test carries what the table at the end counts, from a worker to the process that prints."""
    for item in items:
        if covered := summary.covered_by(item):
            item.user_properties.append((summary.PROPERTY, covered))


def pytest_terminal_summary(terminalreporter):
    """What was covered, by suite: the parameters of the tests that ran, nothing that is written down."""
    stats = terminalreporter.stats
    ran = [r for outcome in ("passed", "failed") for r in stats.get(outcome, []) if r.when == "call"]
    if len(ran) >= 100:
        terminalreporter.section("what was covered")
        terminalreporter.write("\n".join(summary.table(ran)) + "\n")


@pytest.fixture
def getkey(request):
    """`getkey()` is a new PRNG key at each call; the sequence is the test's own and the same in every run."""
    seed = zlib.crc32(request.node.nodeid.encode())
    count = iter(range(sys.maxsize))
    return lambda: jax.random.fold_in(jax.random.key(seed), next(count))


@pytest.fixture
def unchecked():
    """Annotations are not checked: a test calls plain Python so often that the checks would take most of its time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def fresh_compile():
    """Compile anew, for a test of what a partition rule logs: XLA asks for no rule of a program from the cache."""

    def use_cache(value):
        jax.config.update("jax_enable_compilation_cache", value)
        compilation_cache.reset_cache()

    enabled = jax.config.jax_enable_compilation_cache
    use_cache(False)
    jax.clear_caches()
    yield
    use_cache(enabled)
