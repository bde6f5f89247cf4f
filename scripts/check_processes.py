"""This script compares one process of N devices with N processes of one device each: the same mesh, the same values.

    PYTHONPATH=src python scripts/check_processes.py [--tiny]

Blocks are compared by values, gradients and stats. The script exits with 1 where a value differs by more than LIMIT, or
an integer differs at all. It needs N GPUs; without GPUs, N devices are emulated, on which `--tiny` takes a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from processes import FLAGS, ROOT, free_port

import moax
from moax.params import param_shapes
from moax.sharding import param_specs, token_spec

LIMIT = 2.0**-7  # a rounding of bfloat16, of the largest value of a tensor
SECONDS = 500
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


def lower(case: tuple, config: moax.MoEConfig, tokens: int, devices: int) -> jax.stages.Lowered:
    """Returns the lowered program (x, params, dy) -> {y, stats, dx, d} of a block."""
    axis, exchange, recipe, buffer_factor, _, kind = case
    mesh = moax.make_mesh({"fsdp": 1, "ep": 1} | {axis: devices}, axis_type=AxisType[kind])

    def both(x, params, dy):
        def block(x, params):
            options = dict(exchange=exchange, recipe=recipe, buffer_factor=buffer_factor)
            y, stats = moax.moe(x, params, config, **options)
            return (y, stats.aux_loss + stats.z_loss), stats

        (y, loss), pull, stats = jax.vjp(block, x, params, has_aux=True)
        dx, d = pull((dy, jnp.ones_like(loss)))
        return {"y": y, "stats": stats, "dx": dx, "d": d}

    def shape(of, spec):
        return jax.ShapeDtypeStruct(of, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    with jax.set_mesh(mesh):
        x = shape((tokens * devices, config.d_model), token_spec(moax.Axes()))
        shapes, specs = vars(param_shapes(config)), vars(param_specs(config))
        params = moax.MoEParams(**{n: shape(of, specs[n]) for n, of in shapes.items() if of is not None})
        return jax.jit(both).lower(x, params, x)


def draw(compiled: jax.stages.Compiled, config: moax.MoEConfig, skewed: bool) -> tuple:
    """Returns (x, params, dy) with the shardings of a program; the values depend on shapes and `skewed` alone.

    The first element of each token is 1. The first row of the router is thus added to the logits of all tokens.
    """
    favoured = np.arange(config.num_experts) < config.num_experts // 2
    seeds = iter(range(100))

    def make(path, of, place):
        name = jax.tree_util.keystr(path)
        values = np.random.default_rng(next(seeds)).standard_normal(of.shape, np.float32)
        values *= config.d_model**-0.5 if "." in name else 1
        if name == "[0]":
            values[:, 0] = 1
        if name.endswith(".router"):
            values[0] = 20 * (favoured & skewed)
        values = values.astype(jnp.bfloat16)
        return jax.make_array_from_callback(of.shape, place, lambda index: values[index])

    return jax.tree_util.tree_map_with_path(make, compiled.in_avals[0], compiled.input_shardings[0])


def work(request: dict[str, Any]) -> int:
    """Runs the blocks in one process, or as one of several, and writes the values. Returns 0."""
    several, process, devices, folder = (request[name] for name in ("several", "process", "devices", "folder"))
    jax.config.update("jax_num_cpu_devices", 1 if several else devices)  # the host's, where GPUs are
    if several:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(request["address"], devices, process, cluster_detection_method="deactivate")
    tiny, gpu = request["tiny"], jax.default_backend() == "gpu"
    config, tokens = (SMALL, 61) if tiny else (BLOCK, 487)  # prime numbers of tokens
    values: dict[str, np.ndarray] = {}
    for case in CASES[: 2 if tiny else None]:
        compiled = lower(case, config, tokens, devices).compile(SAME_PRODUCTS if gpu else None)
        out = compiled(*draw(compiled, config, case[4]))
        for path, leaf in jax.tree_util.tree_leaves_with_path(out):
            places = {device: i for i, device in enumerate(leaf.sharding.mesh.devices.flat)}
            for shard in leaf.addressable_shards:
                key = f"{case}|{jax.tree_util.keystr(path)}|{places[shard.device]}"
                values[key] = np.asarray(shard.data if leaf.dtype != jnp.bfloat16 else shard.data.astype(jnp.float32))
    np.savez(Path(folder) / f"values.{process}.npz", **values)
    return 0


def run(request: dict[str, Any], gpus: int) -> dict[str, np.ndarray]:
    """Runs the worker in one process or in several, and returns the values of all shards."""
    devices, folder = request["devices"], Path(request["folder"])
    folder.mkdir()
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    shared = {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NCCL_NVLS_ENABLE": "0"}
    shared |= {} if gpus else {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    request |= {"address": f"localhost:{free_port()}"}
    started = []
    for i in range(devices if request["several"] else 1):
        own = {"CUDA_VISIBLE_DEVICES": str(i)} if gpus and request["several"] else {}
        command = [sys.executable, __file__, "--work", json.dumps(request | {"process": i})]
        with (folder / f"said.{i}").open("w") as said:
            started.append(subprocess.Popen(command, stdout=said, stderr=said, env=os.environ | shared | own))
    try:
        for i, process in enumerate(started):
            if process.wait(SECONDS):
                raise RuntimeError(f"process {i} of {len(started)}:\n{(folder / f'said.{i}').read_text()[-3000:]}")
    finally:
        for process in started:
            process.kill()
    values: dict[str, np.ndarray] = {}
    for i in range(len(started)):
        with np.load(folder / f"values.{i}.npz") as file:
            values |= dict(file)
    return values


def error_of(got: np.ndarray | None, want: np.ndarray | None) -> float:
    """Returns max |got - want| / max |want|; infinity for a missing shard, and where a value is not finite."""
    if got is None or want is None or got.shape != want.shape or not (np.isfinite(got) & np.isfinite(want)).all():
        return float("inf")
    off, scale = (float(np.max(np.abs(v), initial=0)) for v in (got.astype(np.float64) - want, want))
    return 0.0 if off == 0 else off / scale if scale else float("inf")


def compare(one: dict[str, np.ndarray], several: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Returns a row for each block: the largest relative error of a tensor, and whether it is small enough."""
    rows = []
    for name in dict.fromkeys(key.split("|")[0] for key in one):
        keys = {key for key in one.keys() | several.keys() if key.startswith(f"{name}|")}
        errors = {key: error_of(several.get(key), one.get(key)) for key in keys}
        limits = {key: 0.0 if key in one and one[key].dtype.kind in "iu" else LIMIT for key in keys}
        worst = max(errors, key=lambda key: errors[key])
        ok = all(errors[key] <= limits[key] for key in keys)
        rows.append({"name": name, "error": errors[worst], "worst": worst.split("|")[1], "ok": ok})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small blocks, for emulated devices")
    parser.add_argument("--devices", type=int, help="N (default: the GPUs of this machine, or 2)")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(json.loads(args.work))
    gpus = 0
    if shutil.which("nvidia-smi") and os.environ.get("JAX_PLATFORMS") != "cpu":
        gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")
    devices = args.devices or gpus or 2
    with tempfile.TemporaryDirectory(prefix="check_processes_") as folder:
        request = {"devices": devices, "tiny": args.tiny}
        one, several = (
            run(request | {"several": several, "folder": f"{folder}/{several}"}, gpus) for several in (False, True)
        )
    rows = compare(one, several)
    print(*rows, sep="\n")
    bad = sum(not row["ok"] for row in rows)
    print(f"{bad} of {len(rows)} blocks differ" if bad else "one process and several agree")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
