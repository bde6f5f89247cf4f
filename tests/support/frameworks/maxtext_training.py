"""MaxText's own training command, without and with moax.adapters.maxtext, and the checkpoints of both.

Each command trains on synthetic data. `checkpoints` trains four steps at once. Then one process trains two steps and
writes a checkpoint, and another trains two more from a copy of it, each with MaxText's layer or with moax's block. The
models are Mixtral, and DeepSeek-V3 with `norm_topk_prob` and the loss-free bias: `te_moe_block` refuses both settings.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rows import FP8, row

NAME = "MaxText 0.2.5"
STOCK = ["-m", "maxtext.trainers.pre_train.train"]
MOAX = ["-m", "moax.adapters.maxtext"]
MESH = "fsdp2 tensor2 expert2"
SETTINGS = """base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=4 head_dim=16
base_mlp_dim=128 base_moe_mlp_dim=128 vocab_size=256 max_target_length=32 num_experts=8
max_prefill_predict_length=16 per_device_batch_size=1 dtype=float32 weight_dtype=float32 matmul_precision=highest
attention=dot_product dataset_type=synthetic sparse_matmul=False override_model_config=True log_config=False
skip_jax_distributed_system=True load_balance_loss_weight=0.0 learning_rate=0.01 hardware=cpu
learning_rate_schedule_steps=4 async_checkpointing=False enable_goodput_recording=False monitor_goodput=False
ici_fsdp_parallelism=2 ici_expert_parallelism=2 ici_tensor_parallelism=2""".split()
MIXTRAL = ("model_name=mixtral-8x7b", "base_num_decoder_layers=1")
DEEPSEEK = (
    "model_name=deepseek3-tiny",
    "base_num_decoder_layers=2",
    "first_num_dense_layers=1",
    "num_experts_per_tok=4",
    "n_routing_groups=4",
    "topk_routing_group=2",
    "norm_topk_prob=True",
    "routed_bias_update_rate=0.05",
)
NO_SCAN = "scan_layers=False"
MICROBATCHES = ("gradient_accumulation_steps=2", NO_SCAN)


def train(
    program: list[str],
    folder: Path,
    run: str,
    steps: int,
    *settings: str,
) -> dict[int, list[float]]:
    """Runs a training command up to `steps`, and returns the loss and the norm of the gradients of each step."""
    import maxtext  # here, since it starts JAX

    base = Path(maxtext.__file__).parent / "configs" / "base.yml"
    metrics = folder / f"{run}-{steps}-{len(list(folder.iterdir()))}.txt"
    paths = [
        f"base_output_directory={folder}",
        f"run_name={run}",
        f"metrics_file={metrics}",
        f"steps={steps}",
    ]
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, *program, str(base), *SETTINGS, *settings, *paths]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    written = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {int(line["step"]): [float(line[f"learning/{name}"]) for name in ("loss", "grad_norm")] for line in written}


def off(got: dict[int, list[float]], want: dict[int, list[float]]) -> dict[str, float]:
    """Returns the largest relative difference of the losses and of the norms; both must be of the same steps."""
    if not want or got.keys() != want.keys():
        raise SystemExit(f"steps {sorted(got)} were trained, and not {sorted(want)}")
    differences = [[abs(g - w) / abs(w) for g, w in zip(got[step], want[step], strict=True)] for step in want]
    return {
        name: max(column) for name, column in zip(("loss", "gradients"), zip(*differences, strict=True), strict=True)
    }


def report(what: str, recipe: str | None, limit: float, got: dict, want: dict) -> None:
    """Prints a row with the differences of two runs of the same steps."""
    row(NAME, what, MESH, recipe, limit, **off(got, want))


def checkpoints(folder: Path, what: str, settings: tuple[str, ...]) -> None:
    """Prints a row for each pair of layers: the first trains steps 0 and 1, and the second steps 2 and 3."""
    layers = {"MaxText": STOCK, "moax": [*MOAX, "none"]}
    unbroken = train(STOCK, folder, "unbroken", 4, *settings)
    first = {step: unbroken[step] for step in (0, 1)}
    last = {step: unbroken[step] for step in (2, 3)}
    for writer, program in layers.items():
        begun = train(program, folder, writer, 2, *settings)
        if writer == "moax":
            losses = " ".join(f"{loss:.4f}" for loss, _ in begun.values())
            report(f"{what}: {writer}, losses {losses}", None, 2e-5, begun, first)
        for reader, resume in layers.items():
            if (writer, reader) == ("MaxText", "MaxText"):
                continue
            run = f"{writer}-{reader}"
            shutil.copytree(folder / writer, folder / run)
            resumed = train(resume, folder, run, 4, *settings)
            report(f"{what}: {reader} from {writer}'s checkpoint", None, 2e-5, resumed, last)


def microbatches(folder: Path, what: str, settings: tuple[str, ...]) -> None:
    """Prints rows of two microbatches a step and of one, by moax beside MaxText."""
    want = train(STOCK, folder, "sums", 3, *settings, *MICROBATCHES)
    for arm in ("none", "none+kept", "none+gathered"):
        sums = train([*MOAX, arm], folder, arm, 3, *settings, *MICROBATCHES)
        report(f"{what}: two microbatches, {arm}", None, 2e-5, sums, want)
    want = train(STOCK, folder, "unrolled", 3, *settings, NO_SCAN)
    for arm in ("none+kept", "none+gathered"):
        once = train([*MOAX, arm], folder, f"once {arm}", 3, *settings, NO_SCAN)
        report(f"{what}: one microbatch, {arm}", None, 2e-5, once, want)


def recipes(folder: Path) -> None:
    """Prints a row of fp8_block beside float32, and one of weights that are quantized once for two microbatches."""
    float32 = train(STOCK, folder, "float32", 2, *MIXTRAL)
    quantized = train([*MOAX, "fp8_block"], folder, "fp8", 2, *MIXTRAL)
    report("Mixtral: training command", "fp8_block", FP8, quantized, float32)
    each = train([*MOAX, "fp8_block"], folder, "each", 2, *MIXTRAL, *MICROBATCHES)
    once = train([*MOAX, "fp8_block+kept"], folder, "once", 2, *MIXTRAL, *MICROBATCHES)
    report("weights quantized once for two microbatches", "fp8_block", 2e-5, once, each)
    unrolled = train([*MOAX, "fp8_block"], folder, "unrolled", 2, *MIXTRAL, NO_SCAN)
    gathered = train([*MOAX, "fp8_block+gathered"], folder, "gathered", 2, *MIXTRAL, NO_SCAN)
    report("weights gathered once for one microbatch", "fp8_block", 2e-5, gathered, unrolled)


def main() -> None:
    """Prints all rows. Each model trains in a folder of its own, which is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="maxtext-") as name:
        mixtral = Path(name) / "mixtral"
        mixtral.mkdir()
        checkpoints(mixtral, "Mixtral", MIXTRAL)
        recipes(mixtral)
        deepseek = Path(name) / "deepseek"
        deepseek.mkdir()
        checkpoints(deepseek, "DeepSeek-V3", DEEPSEEK)
        microbatches(deepseek, "DeepSeek-V3", DEEPSEEK)


if __name__ == "__main__":
    main()
