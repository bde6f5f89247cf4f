#!/usr/bin/env python3
"""This script writes what transformers computes of one MoE layer of each family, in float32 on a CPU.

Run it by any Python that has torch and transformers: scripts/hf_reference.py FOLDER [--check]. Each family gets a
folder FOLDER/NAME/ with three files. config.json and model.safetensors have the names of `save_pretrained`, and only
the tensors of the MoE layer. expected.safetensors has x, dy, y = layer(x), dx, and grads.NAME for each parameter as
transformers holds it in memory. FOLDER/mxfp4.safetensors has random mxfp4 weights and their decoded values. --check
loads the layers that tests/support/hf_parity.py --write wrote into FOLDER, and compares them bit for bit.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

BATCH, SEQ, MARGIN = 2, 16, 1e-3
COMMON = dict(vocab_size=8, hidden_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
ATTENTION = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4)
FAMILIES = {
    "mixtral": ("Mixtral", dict(intermediate_size=16, num_local_experts=8, num_experts_per_tok=2)),
    "qwen3_moe": (
        "Qwen3Moe",
        dict(moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, head_dim=12),
    ),
    "olmoe": ("Olmoe", dict(intermediate_size=16, num_experts=8, num_experts_per_tok=4)),
    "deepseek_v3": (
        "DeepseekV3",
        dict(moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=3, n_group=4,
             topk_group=2, first_k_dense_replace=0, **ATTENTION),
    ),
    "gpt_oss": ("GptOss", dict(intermediate_size=16, num_local_experts=8, num_experts_per_tok=4, head_dim=12)),
}  # fmt: skip


def randomize(block: torch.nn.Module, generator: torch.Generator) -> None:
    """Draws every parameter and buffer. Matrices have a variance of about 1 / fan-in, GPT-OSS's reach its clamp."""
    for name, p in [*block.named_parameters(), *block.named_buffers()]:
        std = 0.1 if name.endswith("bias") else p.shape[-1] ** -0.5
        if "gate_up_proj" in name and block.__class__.__name__ == "GptOssMLP":
            std *= 6
        p.data.copy_(torch.randn(p.shape, generator=generator) * std)


def margin(block: torch.nn.Module, x: torch.Tensor) -> float:
    """Returns the smallest gap between the last chosen and the first rejected score, over all tokens.

    The gap is taken over experts, and over groups of experts where the router has them.
    """
    router = getattr(block, "gate", None) or block.router
    scores = router(x.reshape(-1, x.shape[-1]))[0].detach()
    kept = router.top_k
    gaps = []
    if hasattr(router, "e_score_correction_bias"):
        scores = scores.sigmoid() + router.e_score_correction_bias
        groups = scores.view(len(scores), router.num_group, -1)
        best = groups.topk(2, dim=-1)[0].sum(-1)
        ranked = best.sort(dim=-1, descending=True)[0]
        gaps.append(ranked[:, router.topk_group - 1] - ranked[:, router.topk_group])
        taken = best >= ranked[:, router.topk_group - 1 : router.topk_group]
        scores = groups.masked_fill(~taken[..., None], -1e9).reshape(scores.shape)
    ranked = scores.sort(dim=-1, descending=True)[0]
    gaps.append(ranked[:, kept - 1] - ranked[:, kept])
    return min(gap.min().item() for gap in gaps)


def write(family: str, folder: Path) -> None:
    """Writes the files of one family."""
    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**COMMON, **sizes, experts_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).float()
    block, generator = model.model.layers[0].mlp, torch.Generator().manual_seed(0)
    randomize(block, generator)
    shape = (BATCH, SEQ, COMMON["hidden_size"])
    x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
    while margin(block, x) < MARGIN:
        x = torch.randn(shape, generator=generator)
    x.requires_grad_()
    y = block(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(dy)

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        weights = load_file(f"{saved}/model.safetensors")
        shutil.copy(f"{saved}/config.json", folder)
    ours = {k: v.contiguous() for k, v in weights.items() if ".mlp." in k or ".block_sparse_moe." in k}
    save_file(ours, folder / "model.safetensors", metadata={"format": "pt"})
    found = {f"grads.model.layers.0.mlp.{k}": p.grad for k, p in block.named_parameters()}
    found |= {"x": x.detach(), "dy": dy, "y": y.detach(), "dx": x.grad}
    save_file({k: v.contiguous() for k, v in found.items()}, folder / "expected.safetensors")


def write_mxfp4(path: Path) -> None:
    """Writes packed random experts of GPT-OSS, and their bfloat16 values."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 32, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 135, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales)
    save_file({"blocks": blocks, "scales": scales, "values": values.contiguous()}, path)


def layer_of(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Returns the MoE layer of a checkpoint that holds nothing else, loaded by transformers."""
    model = getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM").from_pretrained(folder)
    return model.model.layers[0].mlp.state_dict()


def same(family: str, folder: Path) -> bool:
    """Whether transformers loads the same layer from the files of moax as from its own files."""
    want = layer_of(family, folder)
    found = [layer_of(family, folder / name) for name in ("written", "stacked")]
    return all(got.keys() == want.keys() and all(torch.equal(got[k], want[k]) for k in want) for got in found)


def main(folder: Path, check: bool) -> int:
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()  # It would warn of the missing tensors outside the MoE layer.
    torch.set_num_threads(2)
    good = True
    for family in FAMILIES:
        if check:
            good &= (equal := same(family, folder / family))
            print(f"{family:12} transformers loads what moax wrote, bit for bit: {equal}", flush=True)
        else:
            write(family, folder / family)
            print(f"{family}: transformers {transformers.__version__}, torch {torch.__version__}", flush=True)
    if not check:
        write_mxfp4(folder / "mxfp4.safetensors")
    return int(not good)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[2:] not in ([], ["--check"]):
        sys.exit("usage: scripts/hf_reference.py FOLDER [--check]")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] == ["--check"]))
