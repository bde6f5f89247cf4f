"""What tests of benchmarks share: a worker in the process of the test."""

from __future__ import annotations

import contextlib
import importlib
import io
import json

import jax
import pytest

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
