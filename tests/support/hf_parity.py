"""Holds MoE layers against what transformers computed: `hf_parity.py FOLDER [--write] [FAMILY ...]` prints a table.

FOLDER is what scripts/hf_reference.py made. The error of a tensor is max |got - want| / max |want|, and of its worst
expert where it has experts; one above 2e-6 makes the exit status 1. With --write each layer is written again, in both
layouts, for `scripts/hf_reference.py FOLDER --check` to load.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax

import conftest  # noqa: F401  sets up 8 emulated devices
import moax
from moax import hf
from moax.hf.families import FAMILIES, TYPES_OF
from moax.params import DIMS
from support import make_mesh, put, rel_error, spec

MESHES, LIMIT = (None, "2x4"), 2e-6


@functools.partial(jax.jit, static_argnames="config")
def graded(x, router_x, dy, params, config):
    """Returns y and every gradient; the gradient of the router's input is None where the router reads x."""
    y, pull = jax.vjp(
        lambda *operands: moax.moe(operands[0], operands[2], config, router_input=operands[1])[0], x, router_x, params
    )
    dx, d_router_x, d_params = pull(dy)
    return {"y": y, "dx": dx, "d_router_input": d_router_x} | {f"d_{f}": getattr(d_params, f) for f in DIMS}


def parity(folder: Path, values: dict[str, Any], mesh: str | None) -> dict[str, float]:
    """Returns the relative errors of y and of every gradient, on one device (None) or on the mesh of this name.

    `values` are those of config.json.
    """
    config = hf.config_from_hf(values)
    on = mesh and make_mesh(mesh)
    of_layer = dict(layer=hf.moe_layers(values)[-1], model_type=values["model_type"])
    params = hf.params_from_hf(folder / "model.safetensors", config, mesh=on, **of_layer)
    expected = hf.Checkpoint(folder / "expected.safetensors")
    grads = {name.removeprefix("grads."): expected[name] for name in expected if name.startswith("grads.")}
    d_params = hf.params_from_hf(grads, config, **of_layer)
    want = {f"d_{field}": getattr(d_params, field) for field in DIMS}
    want |= {n: expected[n] for n in ("y", "dx", "d_router_input") if n in expected}
    tokens = [expected[n] if n in expected else None for n in ("x", "router_input", "dy")]
    if on is None:
        got = graded(*tokens, params, config)
    else:
        with jax.set_mesh(on):
            tokens = [None if v is None else put(on, (spec(mesh, "fsdp", "ep"),), (v,))[0] for v in tokens]
            got = graded(*tokens, params, config)
    per = {f"d_{field}": dims.index("E") for field, dims in DIMS.items() if "E" in dims and len(dims) > 1}
    names = sorted((n for n in want if want[n] is not None), key=len)
    return {n: rel_error(got[n], want[n], per=per.get(n)) for n in names}


def write(folder: Path, values: dict[str, Any]) -> None:
    """Writes the layer of FOLDER/NAME as FOLDER/NAME/written and FOLDER/NAME/stacked, by way of the mesh."""
    config = hf.config_from_hf(values)
    layer = hf.moe_layers(values)[-1]
    checkpoint = hf.Checkpoint(folder / "model.safetensors")
    params = hf.params_from_hf(checkpoint, config, layer=layer, mesh=make_mesh("2x4"))
    for name, stacked in (("written", False), ("stacked", True)):
        options = dict(hf_config=values, stacked=stacked, shard_bytes=20_000)
        hf.save_hf(
            folder / name,
            {layer: params},
            config,
            values["model_type"],
            others=checkpoint,
            **options,
        )


def main(folder: Path, rewrite: bool, families: list[str]) -> int:
    """Prints the table; 1 where an error is above the limit."""
    worst = 0.0
    for family in families:
        values = json.loads((folder / family / "config.json").read_text())
        assert values["model_type"] == TYPES_OF[family][0], (values["model_type"], TYPES_OF[family])
        shown = []
        for mesh in MESHES:
            errors = parity(folder / family, values, mesh)
            worst = max(worst, *errors.values())
            name = max(errors, key=lambda n: errors[n])
            shown.append(
                f"{mesh or 'one device'}: {len(errors)} arrays, y {errors['y']:.1e}, worst {name} {errors[name]:.1e}"
            )
        print(
            f"{family:22} transformers {values['transformers_version']}  {'  '.join(shown)}",
            flush=True,
        )
        if rewrite:
            write(folder / family, values)
    print(f"{len(families)} families, worst relative error {worst:.1e}, limit {LIMIT:.0e}")
    return int(not worst <= LIMIT)


if __name__ == "__main__":
    rewrite = "--write" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--write"]
    sys.exit(main(Path(arguments[0]), rewrite, arguments[1:] or list(FAMILIES)))
