"""This program measures a step of the language model: python3 -m benchmarks.block.train_worker REQUEST

REQUEST is JSON: {"config": fields of `TrainConfig`, "tokens": [T of a device], "random": take random bytes for the
text, "repeats"}. Without a GPU devices are emulated. The program compiles, prints READY, waits for a line on stdin, and
trains. It prints a line of JSON: {"tokens", "us", "path", "extra"}, or a note with the reason of a failure. On GPUs it
profiles steps after the measured ones, and adds the time of their kernels by part.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import moax
from benchmarks import profiles
from benchmarks.block import stages
from benchmarks.block.block_worker import path_of, peak_bytes
from benchmarks.block.worker import READY
from benchmarks.report import why
from benchmarks.timing import Repeats
from lm.config import TrainConfig
from lm.data import load
from lm.step import jit_init, jit_update
from moax.kernels.device import find_device
from moax.mesh.specs import named
from moax.params import token_spec

TEXTS = 8  # The steps take these batches in turn.
PROFILED = 2  # steps of the profile
# The kernels of a command buffer have its name in a profile, and not that of their instruction.
NO_COMMAND_BUFFERS = {"xla_gpu_graph_min_graph_size": 1 << 30}


def main(argv: list[str]) -> int:
    """Measures the request `argv[0]`, and prints the answer. Returns 0."""
    request = json.loads(argv[0])
    config = TrainConfig.from_json(request["config"])
    devices = math.prod(size for _, size in config.mesh)
    # On a machine with GPUs this sets the host's devices.
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = moax.make_mesh(dict(config.mesh), devices=jax.devices()[:devices])
    answer: dict[str, Any] = {"tokens": request["tokens"][0]}
    with jax.set_mesh(mesh):
        step = init = plain = None
        try:
            update, like = jit_update(config, mesh)
            lowered = update.lower(*like)
            step = lowered.compile()
            init = jit_init(config, mesh).lower().compile()
            if find_device().platform == "gpu":
                plain = lowered.compile(NO_COMMAND_BUFFERS)
        except Exception as error:
            answer["note"] = why(error)
        print(READY, flush=True)
        sys.stdin.readline()
        try:
            if step is not None and init is not None:
                answer |= measure(
                    step,
                    init,
                    plain,
                    config,
                    mesh,
                    Repeats(**request["repeats"]),
                    random=request["random"],
                )
        except Exception as error:
            answer["note"] = why(error)
    print(json.dumps(answer), flush=True)
    return 0


def measure(
    step: jax.stages.Compiled,
    init: jax.stages.Compiled,
    plain: jax.stages.Compiled | None,
    config: TrainConfig,
    mesh,
    repeats: Repeats,
    *,
    random: bool,
) -> dict[str, Any]:
    """Measures the wall clock of a step, the median over batches of steps, and the losses of the steps.

    A profile of `plain`, the step without command buffers, tells the parts of a step; None takes no profile.
    """
    place = named(mesh, token_spec(moax.Axes(), ndim=2))
    draw = batches_of(config, random)
    texts = [jax.device_put(draw(index), place) for index in range(TEXTS)]
    state = init()
    steps = max(2, repeats.measured // 3)
    times = []
    losses = []
    for batch in range(4):
        start = time.perf_counter()
        for index in range(repeats.warmups if batch == 0 else steps):
            state, metrics = step(state, texts[index % TEXTS])
            losses.append(metrics["loss"])
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / steps)
    extra: dict[str, Any] = {
        "losses": [float(loss) for loss in losses],
        "peak_bytes": peak_bytes(mesh),
        "tokens_per_expert": [int(count) for count in metrics["tokens_per_expert"].sum(0)],
    }
    if plain is not None:
        try:
            state, metrics = plain(state, texts[0])
            jax.block_until_ready(state)
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    for index in range(PROFILED):
                        state, metrics = plain(state, texts[index])
                    jax.block_until_ready(state)
                extra |= stages.split_step(
                    plain.as_text() or "",
                    profiles.read_profile(folder),
                    PROFILED * mesh.size,
                )
        # The times of the steps are useful without those of their parts.
        except Exception as error:
            extra["profile_note"] = why(error)
    return {
        "us": 1e6 * statistics.median(times[1:]),
        "path": path_of(step.as_text() or ""),
        "extra": extra,
    }


def batches_of(config: TrainConfig, random: bool) -> Callable[[int], np.ndarray]:
    """Returns the function that draws batch `index` [B, S + 1] u8, of random bytes or of the text of `config`."""
    if not random:
        corpus = load(config.text, config.seq)
        return lambda index: corpus.batch(config.seed, index, config.batch, config.seq)
    shape = (config.batch, config.seq + 1)
    return lambda index: np.random.default_rng([config.seed, index]).integers(0, 256, shape, np.uint8)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
