"""This script compares one process of N devices with N processes of one device each: the same mesh, the same values.

    PYTHONPATH=src python scripts/check_processes.py [--tiny]

Blocks are compared by values, gradients and stats. The script exits with 1 where a value differs by more than LIMIT, or
an integer differs at all. It needs N GPUs; without GPUs, N devices are emulated, on which `--tiny` takes a minute.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

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
SMALL = moax.MoEConfig(64, 32, 4, 2, router=ROUTER)
# (the axis with all devices, exchange, recipe, buffer_factor, whether all tokens go to one rank, type of the axes)
CASES = (
    ("ep", "all_to_all", "fp8_block", 0.5, True, "Auto"),
    ("ep", "all_gather", None, 0.5, True, "Explicit"),
    ("fsdp", "auto", "fp8_block", 1.25, False, "Auto"),
    ("fsdp", "auto", None, 1.25, False, "Explicit"),
    ("ep", "all_to_all", "mxfp8", 0.5, True, "Auto"),
    ("ep", "all_gather", "fp8_tensor", 1.25, False, "Auto"),
)


def compute(case: tuple, config: moax.MoEConfig, tokens: int) -> dict[str, np.ndarray]:
    """Returns the shards of this process of a block's y, stats and gradients, by name and place in the mesh."""
    axis, exchange, recipe, buffer_factor, skewed, kind = case
    mesh = moax.make_mesh({"fsdp": 1, "ep": 1} | {axis: jax.device_count()}, axis_type=AxisType[kind])
    favoured, seeds = skewed & (np.arange(config.num_experts) < config.num_experts // 2), iter(range(100))

    def both(x, params, dy):
        def block(x, params):
            options = dict(exchange=exchange, recipe=recipe, buffer_factor=buffer_factor)
            y, stats = moax.moe(x, params, config, **options)
            return (y, stats.aux_loss + stats.z_loss), stats

        (y, loss), pull, stats = jax.vjp(block, x, params, has_aux=True)
        dx, d = pull((dy, jnp.ones_like(loss)))
        return {"y": y, "stats": stats, "dx": dx, "d": d}

    def draw(path, of):
        """Draws values of which the shape alone decides. The first row of the router is added to all logits."""
        name, values = jax.tree_util.keystr(path), np.random.default_rng(next(seeds)).standard_normal(of.shape, "f4")
        values *= config.d_model**-0.5 if "." in name else 1
        if name == "[0]":
            values[:, 0] = 1
        if name.endswith(".router"):
            values[0] = 20 * favoured
        return jax.make_array_from_callback(of.shape, of.sharding, lambda index: values.astype(of.dtype)[index])

    with jax.set_mesh(mesh):
        rows = tokens * jax.device_count()
        params, x = operand_shapes(config, rows, moax.Axes(), mesh, jnp.bfloat16, jnp.bfloat16)
        operands = jax.tree_util.tree_map_with_path(draw, (x, params, x))
        on_gpu = jax.default_backend() == "gpu"
        out = jax.jit(both).lower(*operands).compile(SAME_PRODUCTS if on_gpu else None)(*operands)
    places = {device: i for i, device in enumerate(mesh.devices.flat)}
    return {
        f"{case}|{jax.tree_util.keystr(path)}|{places[shard.device]}": np.asarray(
            shard.data.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else shard.data)
        for path, leaf in jax.tree_util.tree_leaves_with_path(out)
        for shard in leaf.addressable_shards
    }  # fmt: skip


def work(args: argparse.Namespace) -> None:
    """Computes the blocks in one process, or as one of several, and writes the values."""
    several, process = args.num_processes, args.process_id or 0
    jax.config.update("jax_num_cpu_devices", 1 if several else args.devices)  # the host's, where GPUs are
    if several:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        mine = [process] if args.gpus else None
        how = dict(local_device_ids=mine, cluster_detection_method="deactivate")
        jax.distributed.initialize(args.coordinator, several, process, **how)
    config, tokens = (SMALL, 61) if args.tiny else (BLOCK, 487)  # prime numbers of tokens
    values: dict[str, np.ndarray] = {}
    for case in CASES[: 2 if args.tiny else None]:
        values |= compute(case, config, tokens)
    np.savez(Path(args.out) / f"values.{process}.npz", **values)


def differ(got: np.ndarray | None, want: np.ndarray | None) -> bool:
    """Returns whether a shard is missing, or has another shape, another integer, or a value that is too far off."""
    if got is None or want is None or got.shape != want.shape:
        return True
    limit = 0.0 if want.dtype.kind in "iu" else LIMIT * np.max(np.abs(want), initial=0)
    return not (np.abs(got.astype(np.float64) - want) <= limit).all()  # a NaN differs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small blocks, for emulated devices")
    parser.add_argument("--devices", type=int, help="N (default: the GPUs of this machine, or 2)")
    for name, kind in dict(out=str, gpus=int, coordinator=str, num_processes=int, process_id=int).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=argparse.SUPPRESS)  # of a worker
    args = parser.parse_args()
    if args.out:
        work(args)
        return 0
    gpus = 0
    if shutil.which("nvidia-smi") and os.environ.get("JAX_PLATFORMS") != "cpu":
        gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    devices, found = args.devices or gpus or 2, []
    os.environ |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NCCL_NVLS_ENABLE": "0"} | (
        {} if gpus else {"JAX_PLATFORMS": "cpu"}
    )
    with tempfile.TemporaryDirectory(prefix="check_processes_") as name:
        for count in (1, devices):
            folder = Path(name, str(count))
            command = [__file__, "--out", str(folder), "--devices", str(devices), "--gpus", str(gpus)]
            command += ["--tiny"] * args.tiny
            ended = processes.finish(folder, processes.start(folder, command, processes=count, devices=None), 500)
            for i, (code, said) in enumerate(ended):
                if code:
                    sys.exit(f"process {i} of {count}:\n{said[-3000:]}")
            found.append({key: value for file in folder.glob("*.npz") for key, value in np.load(file).items()})
    one, several = found
    bad = sorted(key for key in one.keys() | several.keys() if differ(several.get(key), one.get(key)))
    print(*bad, f"{len(bad)} of {len(one)} shards differ" if bad else "one process and several agree", sep="\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
