"""A program that runs pages, each in a process of its own, and imports jax and moax once for all of them.

It reads requests from stdin, one a line: `{"path": ..., "blocks": [{"text": ..., "line": ...}], "cache": ...}`, forks a
process in which no backend of JAX has started, and writes one line to stdout: `{"printed": [...], "error": ...}`.
"""

import contextlib
import io
import json
import os
import signal
import sys
import tempfile
import traceback
import warnings

import jax

import moax  # noqa: F401

SECONDS = 300  # after which a page is killed


def run(path: str, blocks: list[dict], cache: str | None) -> dict:
    """Runs the blocks in one namespace, in an empty folder, where a warning is an error."""
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    namespace: dict = {"__name__": "__main__"}
    printed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for block in blocks:
                code = compile("\n" * (block["line"] - 1) + block["text"], path, "exec")
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    exec(code, namespace)
                printed.append(said.getvalue())
        except BaseException:
            return {"printed": printed, "error": traceback.format_exc()}
    return {"printed": printed, "error": None}


def serve() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what a page's libraries write is no answer
    for line in sys.stdin:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a fork with threads: those of NumPy's BLAS, which knows forks
            process = os.fork()
        if process == 0:
            signal.alarm(SECONDS)
            os.write(answers, json.dumps(run(**json.loads(line))).encode() + b"\n")
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code != 0:
            os.write(answers, json.dumps({"printed": [], "error": f"the process ended with {code}"}).encode() + b"\n")


if __name__ == "__main__":
    serve()
