"""This script compares one process of N devices with N processes of one device each: the same mesh, the same values.

    PYTHONPATH=src python scripts/check_processes.py [--tiny]

Blocks are compared by values, gradients and stats. Each block has processes of its own, and all processes run side by
side: Python's lock is held for most of a compilation. The script exits with 1 where a value differs by more than LIMIT,
or an integer differs at all. Where a process fails or does not end within `--seconds`, the output of all processes says
how far each came. The script needs N GPUs. Without GPUs it emulates N devices, on which `--tiny` takes 20 seconds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import processes
from jax.sharding import AxisType

import moax
from moax.params import operand_shapes

LIMIT = 2.0**-7  # a rounding of bfloat16, of the largest value of a shard
# Autotuning by the clock may take another algorithm, and so another order of sums, in each process.
SAME_PRODUCTS = {"xla_gpu_autotune_level": 0}
ROUTER = moax.RouterConfig(aux_loss=1e-2, z_loss=1e-3)
BLOCK = moax.MoEConfig(320, 192, 16, 4, use_bias=True, shared_d_ff=128, router=ROUTER)
START = time.monotonic()
SMALL = moax.MoEConfig(64, 32, 4, 2, router=ROUTER)
# (the axis with all devices, exchange, recipe, buffer_factor, whether all tokens go to one rank, type of the axes)
CASES = (
    ("ep", "all_to_all", "fp8_block", 0.5, True, "Auto"),
    ("ep", "all_gather", None, 0.5, True, "Explicit"),
    ("fsdp", "auto", "fp8_block", 1.25, False, "Auto"),
    ("fsdp", "auto", None, 1.25, False, "Explicit"),
    ("ep", "all_to_all", "mxfp8", 0.5, True, "Auto"),
    ("ep", "all_gather", "fp8_block", 1.25, False, "Auto"),
)


class Program(NamedTuple):
    """A block that was lowered, and its operands."""

    case: tuple
    mesh: jax.sharding.Mesh
    lowered: jax.stages.Lowered
    operands: tuple[Any, ...]


def lower(case: tuple, config: moax.MoEConfig, tokens: int) -> Program:
    """Returns the program of a block's y, stats and gradients."""
    axis, exchange, recipe, buffer_factor, skewed, kind = case
    mesh = moax.make_mesh(
        {"fsdp": 1, "ep": 1} | {axis: jax.device_count()},
        axis_type=AxisType[kind],
    )
    favoured = skewed & (np.arange(config.num_experts) < config.num_experts // 2)
    seeds = iter(range(100))

    def both(x, params, dy):
        def block(x, params):
            options = dict(exchange=exchange, recipe=recipe, buffer_factor=buffer_factor)
            y, stats = moax.moe(x, params, config, **options)
            return (y, stats.aux_loss + stats.z_loss), stats

        (y, loss), pull, stats = jax.vjp(block, x, params, has_aux=True)
        dx, d = pull((dy, jnp.ones_like(loss)))
        return {"y": y, "stats": stats, "dx": dx, "d": d}

    def draw(path, shape):
        """Draws values of which the shape alone decides. The first row of the router is added to all logits."""
        name = jax.tree_util.keystr(path)
        values = np.random.default_rng(next(seeds)).standard_normal(shape.shape, "f4")
        if "." in name:
            values *= config.d_model**-0.5
        if name == "[0]":
            values[:, 0] = 1
        if name.endswith(".router"):
            values[0] = 20 * favoured
        return jax.make_array_from_callback(
            shape.shape,
            shape.sharding,
            lambda index: values.astype(shape.dtype)[index],
        )

    with jax.set_mesh(mesh):
        rows = tokens * jax.device_count()
        params, x = operand_shapes(config, rows, moax.Axes(), mesh, jnp.bfloat16, jnp.bfloat16)
        operands = jax.tree_util.tree_map_with_path(draw, (x, params, x))
        return Program(case, mesh, jax.jit(both).lower(*operands), operands)


def compute(program: Program, compiled: jax.stages.Compiled) -> dict[str, np.ndarray]:
    """Returns the shards of this process of a program's results, by name and place in the mesh."""
    case, mesh, _, operands = program
    with jax.set_mesh(mesh):
        out = compiled(*operands)
    places = {device: i for i, device in enumerate(mesh.devices.flat)}
    values = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(out):
        for shard in leaf.addressable_shards:
            data = shard.data
            if leaf.dtype == jnp.bfloat16:
                data = data.astype(jnp.float32)
            name = f"{case}|{jax.tree_util.keystr(path)}|{places[shard.device]}"
            values[name] = np.asarray(data)
    return values


def work(args: argparse.Namespace) -> None:
    """Computes a block in one process, or as one of several, and writes the values."""
    several = args.num_processes
    process = args.process_id or 0
    # On a machine with GPUs this sets the host's devices.
    jax.config.update("jax_num_cpu_devices", 1 if several else args.devices)
    if several:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        mine = [process] if args.gpus else None
        joining = dict(local_device_ids=mine, cluster_detection_method="deactivate")
        jax.distributed.initialize(args.coordinator, several, process, **joining)
    # The numbers of tokens are prime.
    config = SMALL if args.tiny else BLOCK
    tokens = 61 if args.tiny else 487
    case = CASES[args.case]
    program = lower(case, config, tokens)
    say("lowered")
    compiled = program.lowered.compile(SAME_PRODUCTS if jax.default_backend() == "gpu" else None)
    say("compiled")
    values = compute(program, compiled)
    say("computed")
    np.savez(Path(args.out) / f"values.{process}.npz", **values)


def say(what: str) -> None:
    """Prints what was done with the block, and the seconds since the script was imported."""
    print(f"{time.monotonic() - START:.0f} s: {what}", flush=True)


def differ(got: np.ndarray | None, want: np.ndarray | None) -> bool:
    """Returns whether a shard is missing, or has another shape, another integer, or a value that is too far off."""
    if got is None or want is None or got.shape != want.shape:
        return True
    if want.dtype.kind in "iu":
        limit = 0.0
    else:
        limit = LIMIT * np.max(np.abs(want), initial=0)
    return not (np.abs(got.astype(np.float64) - want) <= limit).all()  # a NaN differs


class Run(NamedTuple):
    """The processes that compute a block, and the folder of their values and outputs."""

    case: int
    folder: Path
    running: list[subprocess.Popen]


def start(folder: Path, case: int, command: list[str], count: int) -> Run:
    """Starts the processes of a block."""
    own = Path(folder, f"{case}.{count}")
    command = [*command, "--case", str(case), "--out", str(own)]
    return Run(case, own, processes.start(own, command, processes=count, devices=None))


def finish(runs: list[Run], end: float) -> None:
    """Waits for all processes; exits with the output of each where one failed or did not end in time."""
    outputs = []
    failed = False
    for run in runs:
        ended = processes.finish(run.folder, run.running, end - time.monotonic())
        for i, (code, said) in enumerate(ended):
            failed = failed or code != 0
            outputs.append(f"{CASES[run.case]}, process {i} of {len(ended)}, code {code}:\n{shorten(said)}")
    if failed:
        sys.exit("\n".join(outputs))


def shorten(said: str) -> str:
    """Returns the start and the end of a long output: the progress, and the reason of the end."""
    if len(said) <= 2000:
        return said
    return f"{said[:1000]}\n...\n{said[-1000:]}"


def read(runs: list[Run]) -> dict[str, np.ndarray]:
    """Returns the values that the processes wrote."""
    values: dict[str, np.ndarray] = {}
    for run in runs:
        for file in run.folder.glob("*.npz"):
            values |= dict(np.load(file).items())
    return values


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tiny", action="store_true", help="small blocks, for emulated devices")
    parser.add_argument("--devices", type=int, help="N (default: the GPUs of this machine, or 2)")
    parser.add_argument("--seconds", type=float, default=500, help="kill processes after it (default: %(default)s)")
    # These options are those of a worker.
    of_worker = dict(out=str, case=int, gpus=int, coordinator=str, num_processes=int, process_id=int)
    for name, kind in of_worker.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        work(args)
        return 0
    gpus = 0
    if shutil.which("nvidia-smi") and os.environ.get("JAX_PLATFORMS") != "cpu":
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        gpus = listed.stdout.count("GPU ")
    devices = args.devices or gpus or 2
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NCCL_NVLS_ENABLE": "0"}
    if not gpus:
        os.environ["JAX_PLATFORMS"] = "cpu"
    command = [__file__, "--devices", str(devices), "--gpus", str(gpus)] + ["--tiny"] * args.tiny
    cases = range(2 if args.tiny else len(CASES))
    end = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="check_processes_") as name:
        alone = [start(Path(name), case, command, 1) for case in cases]
        together = [start(Path(name), case, command, devices) for case in cases]
        try:
            finish(alone + together, end)
        finally:
            for process in itertools.chain(*(run.running for run in alone + together)):
                process.kill()
        one = read(alone)
        several = read(together)
    keys = one.keys() | several.keys()
    bad = sorted(key for key in keys if differ(several.get(key), one.get(key)))
    verdict = f"{len(bad)} of {len(one)} shards differ" if bad else "one process and several agree"
    print(*bad, verdict, sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
