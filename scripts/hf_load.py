#!/usr/bin/env python3
"""This script measures how much host memory loading a checkpoint takes beyond the arrays.

It makes a checkpoint, and loads it onto 8 emulated devices: scripts/hf_load.py [--gib 2] [--limit MIB]. It runs on
Linux with glibc alone. Emulated devices keep their arrays in the memory of this process, so the result is the rise of
the peak of resident memory (VmHWM), less the bytes of the arrays. glibc returns freed memory at once (mallopt).
"""

import argparse
import ctypes
import json
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import moax
from moax.hf.families import layout_of
from moax.hf.files import Output, write_files
from moax.hf.tensor_layouts import tensors_of

MIB = 2**20
GIB = 2**30
M_MMAP_THRESHOLD = -3  # a parameter of glibc's mallopt
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "moe_intermediate_size": 1024,
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "hidden_act": "silu",
}  # fmt: skip


def resident(peak: bool = False) -> int:
    """Returns the bytes of this process that are resident, or the most that have been."""
    field = "VmHWM:" if peak else "VmRSS:"
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == field)


def write_checkpoint(folder: Path, size: int) -> tuple[moax.MoEConfig, int]:
    """Writes random bfloat16 weights of at least `size` bytes, one tensor for each expert."""
    config = moax.hf.config_from_hf(CONFIG)
    generator = np.random.default_rng(0)
    dtype = np.dtype(jax.numpy.bfloat16)

    def output(shape: tuple[int, ...]) -> Output:
        return Output(
            dtype,
            shape,
            lambda: iter([generator.standard_normal(shape, np.float32).astype(dtype)]),
        )

    tensors = tensors_of(layout_of(CONFIG["model_type"]), config)
    layer = {tensor.name: output(tensor.shape) for tensor in tensors}
    layers = -(-size // sum(tensor.size for tensor in layer.values()))
    stacked = {}
    for i in range(layers):
        stacked |= {f"model.layers.{i}.mlp.{name}": tensor for name, tensor in layer.items()}
    write_files(folder, stacked, shard_bytes=512 * MIB)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    return config, layers


def main(gib: float, limit: float | None, devices: int = 8) -> int:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MIB)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = jax.make_mesh((2, devices // 2), ("fsdp", "ep"))
    with tempfile.TemporaryDirectory() as name:
        config, layers = write_checkpoint(Path(name), int(gib * GIB))
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
        before = resident()
        start = time.perf_counter()
        checkpoint = moax.hf.Checkpoint(name)
        params = []
        for i in range(layers):
            params.append(moax.hf.params_from_hf(checkpoint, config, layer=i, mesh=mesh))
        seconds = time.perf_counter() - start
        peak = resident(peak=True)
        on_disk = sum(file.stat().st_size for file in Path(name).glob("*.safetensors"))
        last = checkpoint[f"model.layers.{layers - 1}.mlp.experts.63.up_proj.weight"]
        same = np.array_equal(np.asarray(params[-1].wi)[63, :, 1].T, last)
    arrays = 0
    for leaf in jax.tree.leaves(params):
        arrays += sum(shard.data.nbytes for shard in leaf.addressable_shards)
    expert = 2 * config.d_model * config.d_ff
    print(
        f"checkpoint {on_disk / GIB:.2f} GiB, {layers} layers of {config.num_experts} experts, {expert / MIB:.1f} MiB "
        f"a matrix; loaded in {seconds:.1f} s ({on_disk / GIB / seconds:.2f} GiB/s); equal: {same}\n"
        f"arrays on {devices} devices {arrays / GIB:.2f} GiB; {before / MIB:.0f} MiB resident before the load\n"
        f"peak above the start and the arrays: {(peak - before - arrays) / MIB:.1f} MiB"
    )
    return int(not same or (limit is not None and peak - before - arrays > limit * MIB))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gib",
        type=float,
        default=2,
        help="size of the checkpoint (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="MIB",
        help="exit with 1 if a peak is above this limit",
    )
    raise SystemExit(main(**vars(parser.parse_args())))
