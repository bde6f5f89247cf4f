"""What tests of benchmarks share: a worker in the process of the test, and a ragged all-to-all that a CPU runs."""

from __future__ import annotations

import contextlib
import importlib
import io
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks.block.worker import READY


class InThisProcess:
    """A worker in the process of the test: a process of its own would start JAX and compile again."""

    def __init__(self, module, request):
        self.main, self.request = importlib.import_module(module).main, request

    def wait(self):
        pass

    close = wait

    def measure(self):
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
            patch.setattr(jax.config, "update", lambda *_: None)  # This process has its devices already.
            patch.setattr("sys.stdin", io.StringIO("go\n"))
            assert self.main([json.dumps(self.request)]) == 0
        ready, *answers = said.getvalue().splitlines()
        assert ready == READY
        return [json.loads(answer) for answer in answers]


def by_gather(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Computes `lax.ragged_all_to_all` by gathering all rows, since XLA has no such collective on a CPU."""
    me, row = lax.axis_index(axis_name), jnp.arange(output.shape[0])
    rows, begin, size, there = (
        lax.all_gather(v, axis_name) for v in (operand, input_offsets, send_sizes, output_offsets)
    )
    for source in range(rows.shape[0]):
        slot = row - there[source, me]
        mine = (slot >= 0) & (slot < size[source, me])
        taken = rows[source][jnp.clip(begin[source, me] + slot, 0, operand.shape[0] - 1)]
        output = jnp.where(mine[:, None], taken, output)
    return output
