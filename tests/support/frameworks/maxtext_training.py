"""MaxText's own training command, without and with examples/maxtext_adapter.py; it reads MaxText's checkpoint.

Each command trains two steps on synthetic data. MaxText trains steps 0 and 1 and writes a checkpoint; then MaxText and
MaxText with moax each train steps 2 and 3 from copies of it. MaxText with moax also trains steps 0 and 1, in two
microbatches by examples/maxtext_kept_adapter.py too.
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
ADAPTER = Path(__file__).parents[3] / "examples" / "maxtext_adapter.py"
KEPT = ADAPTER.with_name("maxtext_kept_adapter.py")
STOCK = ["-m", "maxtext.trainers.pre_train.train"]
SETTINGS = """model_name=mixtral-8x7b base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=4 head_dim=16
base_mlp_dim=128 base_moe_mlp_dim=128 base_num_decoder_layers=1 vocab_size=256 max_target_length=32 num_experts=8
max_prefill_predict_length=16 per_device_batch_size=1 dtype=float32 weight_dtype=float32 matmul_precision=highest
attention=dot_product dataset_type=synthetic sparse_matmul=False override_model_config=True log_config=False
skip_jax_distributed_system=True load_balance_loss_weight=0.0 learning_rate=0.01 hardware=cpu
async_checkpointing=False enable_goodput_recording=False monitor_goodput=False
ici_fsdp_parallelism=2 ici_expert_parallelism=2 ici_tensor_parallelism=2""".split()


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


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="maxtext-"))
    try:
        begun = train(STOCK, folder, "stock", 2)
        shutil.copytree(folder / "stock", folder / "resumed")
        want = train(STOCK, folder, "stock", 4)
        mesh = "fsdp2 tensor2 expert2"
        ours = train([str(ADAPTER), "none"], folder, "moax", 2)
        row(
            NAME,
            f"training command, losses {' '.join(f'{v[0]:.4f}' for v in ours.values())}",
            mesh,
            None,
            2e-5,
            **off(ours, begun),
        )
        resumed = train([str(ADAPTER), "none"], folder, "resumed", 4)
        row(
            NAME,
            "training command, from MaxText's checkpoint",
            mesh,
            None,
            2e-5,
            **off(resumed, want),
        )
        quantized = train([str(ADAPTER), "fp8_block"], folder, "fp8", 2)
        row(NAME, "training command", mesh, "fp8_block", FP8, **off(quantized, begun))
        two = ("gradient_accumulation_steps=2", "scan_layers=False")
        each = train([str(ADAPTER), "fp8_block"], folder, ADAPTER.stem, 2, *two)
        once = train([str(KEPT), "fp8_block"], folder, KEPT.stem, 2, *two)
        row(
            NAME,
            "weights quantized once for two microbatches",
            mesh,
            "fp8_block",
            2e-5,
            **off(once, each),
        )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
