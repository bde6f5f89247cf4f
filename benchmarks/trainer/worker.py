"""MaxText's training command in a process of its own, with its MoE layer or with moax's: `worker JOB`, a JSON object.

`argv` are the arguments of MaxText's command. `moax` are the options of moax's block, null for MaxText's layer, and
`kept` tells what is done with the weights once a step, as `moax.adapters.maxtext.install` takes it. `load` is one of
`ways.LOADS`. `hlo` is a file for the optimized program of the step, or null. The process imports, then waits for a line
on stdin: the imports of one variant so run beside the steps of another. With `compile` it compiles the step for shapes
alone, which leaves it in the compilation cache, and ends.
Otherwise it trains, and writes `result`, a JSON file. Its `seconds` tell when the step was lowered and compiled, and
when the process had trained, since the line on stdin. Where `compiled` is not null, the process makes a file of this
name after the compilation, and waits for a second line before the steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.layers.moe import RoutedMoE
from maxtext.trainers.pre_train import train
from maxtext.utils import max_utils, maxtext_utils

from benchmarks.trainer import loads, ways


def await_line() -> None:
    """Waits for a line on stdin; ends the process where the other end is closed, since nobody wants its steps then."""
    if not sys.stdin.readline():
        raise SystemExit("stdin was closed before the steps")


def main() -> None:
    job = json.loads(sys.argv[1])
    results = {}
    if job["moax"] is not None:
        from moax.adapters import maxtext

        maxtext.install(kept=job["kept"], **job["moax"])
    if job["load"] == ways.BALANCED:
        loads.route_balanced(RoutedMoE, ours=job["moax"] is not None)
    if job["load"] == ways.TEXT:
        loads.feed_text(input_pipeline_interface)

    def note_memory(stats, prefix=""):
        if job["hlo"] and programs:
            Path(job["hlo"]).write_text(programs[-1].as_text())
        names = ("argument", "output", "alias", "temp")
        if stats:
            results["compiled_bytes"] = {name: getattr(stats, f"{name}_size_in_bytes") for name in names}
        else:
            results["compiled_bytes"] = None
        if job["compile"]:
            raise SystemExit(0)
        if job["compiled"]:
            Path(job["compiled"]).touch()
            await_line()

    def note_time(what):
        results.setdefault("seconds", {})[what] = round(time.monotonic() - start, 1)

    def compile_step(lowered, *args, **options):
        note_time("lowered")
        programs[:] = [compile_lowered(lowered, *args, **options)]
        note_time("compiled")
        return programs[0]

    def make_shapes(data_iterator, config, mesh, checkpoint_manager, init_state):
        state, _, shardings = maxtext_utils.get_abstract_state(config, mesh, init_state, True)
        return state, None, shardings, data_iterator, None

    programs = []
    compile_lowered = jax.stages.Lowered.compile
    jax.stages.Lowered.compile = compile_step
    max_utils.print_compiled_memory_stats = note_memory
    if job["compile"]:
        maxtext_utils.setup_training_state = make_shapes
        train.get_first_step = lambda model, state: 0
    await_line()
    start = time.monotonic()
    try:
        train.main(["", *job["argv"]])
    finally:
        note_time("trained")
        results["memory"] = jax.local_devices()[0].memory_stats()
        Path(job["result"]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
