#!/usr/bin/env python3
"""This script writes what transformers computes of one MoE layer of each family, in float32 on a CPU.

Run it by any Python that has torch and transformers: scripts/hf_reference.py FOLDER [--check] [FAMILY ...]. Without a
FAMILY it takes all. Each family gets a folder FOLDER/NAME/ with three files. config.json and model.safetensors have the
names of `save_pretrained`, and only the tensors of the MoE layer. expected.safetensors has x, dy, y = layer(x), dx, and
grads.NAME for each parameter as transformers holds it in memory (0 for a selection bias). Where the router has an input
of its own, it also has router_input and d_router_input. FOLDER/mxfp4.safetensors has random mxfp4 weights and their
decoded values. FOLDER/families.json has the families of this transformers that have sparse experts, and the config and
the tensors of each tiny model. --check loads the layers that tests/support/hf_parity.py --write wrote into FOLDER, and
compares them bit for bit.
"""

import json
import re
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from hf_models import BLOCK, FAMILIES, TINY, Tiny, families_of_transformers, layer_of, model_of, recorded_margins
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OTHERS = re.compile(r"experts\.[1-9]")  # the tensors of all experts but the first
BATCH = 2
SEQ = 16
HIDDEN = 24
MARGIN = 1e-3


def randomize(family: str, named: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    """Draws every parameter and buffer. Matrices have a variance of about 1 / fan-in, GPT-OSS's reach its clamp."""
    for name, p in named.items():
        std = 0.1 if name.endswith("bias") else p.shape[-1] ** -0.5
        if "gate_up_proj" in name and family == "gpt_oss":
            std *= 6
        values = torch.randn(p.shape, generator=generator) * std
        p.data.copy_(1.0 + 0.2 * values if name.endswith("per_expert_scale") else values)


def write(family: str, folder: Path) -> dict[str, Any]:
    """Writes the files of one family, and returns its config and the shapes of its tensors on disk and in memory."""
    model = model_of(family)
    layer = layer_of(model)
    generator = torch.Generator().manual_seed(0)
    randomize(family, layer.named, generator)
    shape = (BATCH, SEQ, HIDDEN)
    margin = 0.0
    while margin < MARGIN:
        x, router_x, dy = (torch.randn(shape, generator=generator) for _ in range(3))
        with recorded_margins() as margins, torch.no_grad():
            layer.run(x.clone(), router_x if layer.own_input else x.clone())
        margin = min(margins)
    x.requires_grad_()
    router_x.requires_grad_()
    y = layer.run(x * 1.0, router_x if layer.own_input else x * 1.0)
    y.backward(dy)

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        weights = load_file(f"{saved}/model.safetensors")
        shutil.copy(f"{saved}/config.json", folder)
    number = next(part for part in next(iter(layer.named)).split(".") if part.isdigit())
    ours = {k: v.contiguous() for k, v in weights.items() if re.search(BLOCK.format(number), k)}
    save_file(ours, folder / "model.safetensors", metadata={"format": "pt"})
    arrays = {}
    for name, p in layer.named.items():
        arrays[f"grads.{name}"] = torch.zeros_like(p) if p.grad is None else p.grad
    arrays |= {"x": x.detach(), "dy": dy, "y": y.detach(), "dx": x.grad}
    if layer.own_input:
        arrays |= {"router_input": router_x.detach(), "d_router_input": router_x.grad}
    save_file({k: v.contiguous() for k, v in arrays.items()}, folder / "expected.safetensors")
    on_disk = shapes_of(ours)
    in_memory = shapes_of(layer.named)
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {"config": values, "layer": int(number), "disk": on_disk, "memory": in_memory}


def shapes_of(tensors: dict[str, torch.Tensor]) -> dict[str, list[int]]:
    """Returns the shape of each tensor, those of all experts but the first left out."""
    return {name: list(tensor.shape) for name, tensor in tensors.items() if not OTHERS.search(name)}


def write_mxfp4(path: Path) -> None:
    """Writes packed random experts of GPT-OSS, and their bfloat16 values."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 32, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 135, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales)
    save_file({"blocks": blocks, "scales": scales, "values": values.contiguous()}, path)


def same(family: str, folder: Path) -> bool:
    """Returns whether transformers loads the same layer from the files of moax as from its own files."""
    kind = type(model_of(family))

    def load(folder_of_layer: Path) -> dict[str, torch.Tensor]:
        return layer_of(kind.from_pretrained(folder_of_layer)).named

    want = load(folder)
    for name in TINY.get(family, Tiny()).loads:
        got = load(folder / name)
        if got.keys() != want.keys() or not all(torch.equal(got[k], want[k]) for k in want):
            return False
    return True


def main(folder: Path, check: bool, families: list[str]) -> int:
    transformers.logging.disable_progress_bar()
    # It would warn of the missing tensors outside the MoE layer.
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(2)
    if not check:
        folder.mkdir(parents=True, exist_ok=True)
        write_mxfp4(folder / "mxfp4.safetensors")
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        print(f"{versions}: {len(families)} families", flush=True)
    good = True
    tiny = {}
    for family in families:
        if check:
            good &= (equal := same(family, folder / family))
            print(
                f"{family:22} transformers loads what moax wrote, bit for bit: {equal}",
                flush=True,
            )
        else:
            tiny[family] = write(family, folder / family)
    if not check:
        lines = [f" {json.dumps(family)}: {json.dumps(values)}" for family, values in tiny.items()]
        known = json.dumps(
            {
                "transformers": transformers.__version__,
                "families": families_of_transformers(),
            }
        )
        text = known[:-1] + ',\n"tiny": {\n' + ",\n".join(lines) + "\n}}\n"
        (folder / "families.json").write_text(text, encoding="utf-8")
    return int(not good)


if __name__ == "__main__":
    check = "--check" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
    if not arguments or not set(arguments[1:]) <= set(FAMILIES):
        sys.exit("usage: scripts/hf_reference.py FOLDER [--check] [FAMILY ...]")
    sys.exit(main(Path(arguments[0]), check, arguments[1:] or FAMILIES))
