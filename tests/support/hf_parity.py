"""Holds MoE layers against what transformers computed: `hf_parity.py FOLDER [--write]` prints a table.

FOLDER is what scripts/hf_reference.py made. The error of a tensor is max |got - want| / max |want|, and of its worst
expert where it has experts; one above 2e-6 makes the exit status 1. With --write each layer is written again, in both
spellings, for `scripts/hf_reference.py FOLDER --check` to load.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np

import conftest  # noqa: F401  sets up 8 emulated devices
import moax
from moax import hf
from moax.hf.names import DIMS
from support import make_mesh, put, rel_error, spec

MESHES, LIMIT = (None, "2x4"), 2e-6


def parity(folder: Path, mesh: str | None) -> dict[str, float]:
    """The relative errors of y and of every gradient, on one device (None) or on the mesh of this name."""
    config, expected = hf.config_from_hf(folder), hf.Checkpoint(folder / "expected.safetensors")
    on = None if mesh is None else make_mesh(mesh)
    params = hf.params_from_hf(folder / "model.safetensors", config, layer=0, mesh=on)
    grads = {name.removeprefix("grads."): expected[name] for name in expected if name.startswith("grads.")}
    if config.router.bias:  # a buffer, which has no gradient
        grads["model.layers.0.mlp.gate.e_score_correction_bias"] = np.zeros(config.num_experts, np.float32)
    want = {f"d_{field}": getattr(hf.params_from_hf(grads, config, layer=0), field) for field in DIMS}
    want |= {"y": expected["y"], "dx": expected["dx"]}

    def graded(x, dy, params):
        y, pull = jax.vjp(lambda x, params: moax.moe(x, params, config)[0], x, params)
        dx, d_params = pull(dy)
        return {"y": y, "dx": dx} | {f"d_{field}": getattr(d_params, field) for field in DIMS}

    x, dy = expected["x"], expected["dy"]
    if on is None:
        got = jax.jit(graded)(x, dy, params)
    else:
        with jax.set_mesh(on):
            got = jax.jit(graded)(*put(on, spec(mesh, "fsdp", "ep"), (x, dy)), params)
    per = {f"d_{field}": dims.index("E") for field, dims in DIMS.items() if "E" in dims and len(dims) > 1}
    return {n: rel_error(got[n], want[n], per=per.get(n)) for n in sorted(want, key=len) if want[n] is not None}


def write(folder: Path, family: str) -> None:
    """The layer of FOLDER/NAME as FOLDER/NAME/written and FOLDER/NAME/stacked, by way of the mesh."""
    config, values = hf.config_from_hf(folder), json.loads((folder / "config.json").read_text())
    params = hf.params_from_hf(folder / "model.safetensors", config, layer=0, mesh=make_mesh("2x4"))
    for name, stacked in (("written", None), ("stacked", True)):
        hf.save_hf(folder / name, {0: params}, config, family, hf_config=values, stacked=stacked, shard_bytes=20_000)


def main(folder: Path, rewrite: bool) -> int:
    """Prints the table; 1 where an error is above the limit."""
    worst = 0.0
    for family in hf.MODEL_TYPES:
        version = json.loads((folder / family / "config.json").read_text())["transformers_version"]
        for mesh in MESHES:
            errors = parity(folder / family, mesh)
            worst = max(worst, *errors.values())
            shown = "  ".join(f"{name} {error:.1e}" for name, error in errors.items())
            print(f"{family:12} transformers {version}  {mesh or 'one device':10}  {shown}", flush=True)
        if rewrite:
            write(folder / family, family)
    print(f"worst relative error {worst:.1e}, limit {LIMIT:.0e}")
    return int(not worst <= LIMIT)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] == ["--write"]))
