"""The layer of PyTorch on a mesh, a process a GPU: python3 -m benchmarks.peers.torch_block REQUEST

REQUEST is that of `mesh_worker`, its recipe `none` or `fp8_rowwise`. Starts the ranks, which load PyTorch; prints
READY; once a line comes in they take a GPU each, hold the layer against float64, and measure it with what does not
communicate as it is and compiled. Prints what `mesh_worker` prints, of the faster. Where there is no GPU, ranks are
emulated, through gloo. All die with this process, and within SECONDS of that line.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from benchmarks.block.worker import READY, refuse
from benchmarks.peers import native
from benchmarks.report import why
from moax import MoEConfig, RouterConfig
from moax.errors import Unsupported

SECONDS = 450
# NVLink multicast can put GPUs out of service that others share.
ENVIRONMENT = ("NCCL_NVLS_ENABLE=0", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1")


def main(argv: list[str]) -> int:
    """Starts the ranks of a request; with the arguments REQUEST RANK this process is one of them."""
    request = json.loads(argv[0])
    if len(argv) == 2:
        return rank(request, int(argv[1]))
    try:
        check(config_of(request), request["mesh"])
        if importlib.util.find_spec("torch") is None:
            raise Unsupported("PyTorch is not installed")
    except Unsupported as error:
        return refuse(request["tokens"], error)
    ranks = [start(argv[0], index) for index in range(math.prod(request["mesh"].values()))]
    try:
        return drive(ranks)
    finally:
        end(ranks)
        for process in ranks:
            with contextlib.suppress(BrokenPipeError), process:  # closes its pipes
                pass


def config_of(request: dict[str, Any]) -> MoEConfig:
    """Returns the config of a request."""
    fields = dict(request["config"])
    return MoEConfig(**fields | {"router": RouterConfig(**fields["router"])})


def check(config: MoEConfig, sizes: dict[str, int]) -> None:
    """Raises Unsupported where `torch_layer` would compute something else than `moax.moe`."""
    router = config.router
    if (
        router.score == "sigmoid" and router.order == "score_then_topk"
    ):  # The layer computes this router too, scaled and biased.
        config = dataclasses.replace(config, router=dataclasses.replace(router, score="softmax", scale=1.0, bias=False))
    found = native.differs(config, sizes)
    if found:
        raise Unsupported(f"the layer of PyTorch cannot do this: {', '.join(found)}")


def start(request: str, index: int) -> subprocess.Popen:
    """Starts a rank, which waits for a line on stdin."""
    command = ["env", *ENVIRONMENT, sys.executable, "-m", "benchmarks.peers.torch_block", request, str(index)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def drive(ranks: list[subprocess.Popen]) -> int:
    """Relays a line to all ranks, and the output of rank 0 back; ends all if one fails, or after SECONDS."""
    for process in ranks:
        if not process.stdout or process.stdout.readline().strip() != READY:
            return 1
    print(READY, flush=True)
    if not sys.stdin.readline():
        return 0
    threading.Thread(target=watch, args=(ranks, time.monotonic() + SECONDS), daemon=True).start()
    port = free_port()
    for process in ranks:
        with contextlib.suppress(BrokenPipeError):  # The rank may have failed.
            print(port, file=process.stdin, flush=True)
    for line in ranks[0].stdout or ():
        print(line, end="", flush=True)
    return int(any([process.wait() for process in ranks]))


def watch(ranks: list[subprocess.Popen], until: float) -> None:
    """Ends all ranks when one has failed, since the others would wait for it."""
    while any(process.poll() is None for process in ranks):
        late = time.monotonic() > until
        if late:
            print(f"no end in {SECONDS} s", file=sys.stderr, flush=True)
        if late or any(process.poll() for process in ranks):
            return end(ranks)
        time.sleep(0.1)


def end(ranks: list[subprocess.Popen]) -> None:
    """Ends the ranks that still run."""
    for process in ranks:
        process.kill()


def free_port() -> int:
    """Returns a free port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def rank(request: dict[str, Any], index: int) -> int:
    """Runs one rank: it prints READY, reads a line with a port, and prints the answers."""
    die_with_parent()
    try:
        from benchmarks.peers import torch_worker

        print(READY, flush=True)
        port = sys.stdin.readline()
        if port:
            torch_worker.serve(request, config_of(request), index, int(port), SECONDS)
    except Exception as error:
        print(f"rank {index}: {why(error)}", file=sys.stderr, flush=True)
        os._exit(1)  # An orderly exit would wait for the ranks that are in a collective.
    return 0


def die_with_parent() -> None:
    """Ends this process when its parent ends, on systems that can do that."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
