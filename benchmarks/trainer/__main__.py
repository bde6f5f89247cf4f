"""`python -m benchmarks.trainer`: MaxText's training step on one GPU, by each of its MoE layers and by moax's block.

Each variant is MaxText's own training command in a process of its own, on its synthetic data: the same batch in every
step, so that the loss falls. A row has the mean time of a step, tokens/s, TFLOP/s by MaxText's count, the peak of
memory, the loss of every step, and with `--profile` the kernels of the step that take the most time. `make
trainer-h200` runs it; docs/how-to/maxtext-gpu.md says how.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.block import stages
from benchmarks.block.worker import ROOT, environment
from benchmarks.profiles import read_profile
from benchmarks.report import OURS, Row

# No mean counts the first steps. The steps of a profile come after the counted ones.
SKIPPED = 5
PROFILED = 2
HLO = "step.hlo"  # the optimized program of a step, whose scopes tell the parts of a profile
# The parts of a step by the scope or the name of a kernel. MaxText has no scopes of its own. The first pattern decides.
PARTS = {
    "attention": r"cudnn|flash",
    "optimizer": r"^jit\(train_step\)/(?!while)",
    "accumulation of gradients": r"^jit\(train_step\)/while/body/(eval_jaxpr/)?add$",
    "MoE layer: grouped products": r"grouped_matmul|matmul_activate|wgrad|ragged|gmm|jit\(_moe\).*dot_general",
    "MoE layer: quantization": r"quantize",
    "MoE layer: the rest of moax's block": r"jit\(_moe\)",
    "products outside of moax's block": r"dot_general|nvjet|cutlass|gemm",
    "casts, stacks and copies": r"convert_element_type|concatenate|stack|^Mem|copy",
    "rest": "",
}
FORMULA = (
    "FLOP of a step of T tokens = 6 T (L (H D (2 Q + 2 KV) + H E + 3 H F K) + H V) + 6 L T S Q D: L layers, width H, "
    "Q and KV heads of D, E experts of width F, K a token, V words, S tokens a sequence. "
    "It counts no expert that a token did not choose, and nothing that runs a second time."
)
COMMON = """override_model_config=True dataset_type=synthetic packing=False per_device_batch_size=2
gradient_accumulation_steps=4 max_target_length=4096 scan_layers=False megablox=False learning_rate=3e-4 run_name=step
enable_checkpointing=False enable_tensorboard=False enable_goodput_recording=False monitor_goodput=False
skip_jax_distributed_system=True log_config=False"""
TINY = """model_name=qwen3-30b-a3b base_emb_dim=256 base_num_query_heads=4 base_num_kv_heads=2 head_dim=64 num_experts=8
num_experts_per_tok=2 base_mlp_dim=128 base_moe_mlp_dim=128 vocab_size=512 max_target_length=128 hardware=cpu"""
CASES = {  # MaxText's settings, and the layers that fit an H100 and an H200 with AdamW in float32
    "qwen3-30b": ("model_name=qwen3-30b-a3b hardware=gpu", 4, 6),
    "mixtral-8x7b": ("model_name=mixtral-8x7b hardware=gpu", 1, 2),
    "tiny": (TINY, 2, 2),
}


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to compute the MoE layer: MaxText's settings for its own layer, or moax's recipe."""

    name: str
    settings: str = ""
    recipe: str | None = None
    kept: bool = False
    note: str = ""

    @property
    def label(self) -> str:
        return (self.recipe or "none") + ("+kept" if self.kept else "")


# The rows of the last ways come after those of all cases, so that a run that is cut still has the first rows.
SLOW = 3
WAYS = (
    Way("maxtext-tokamax", "sparse_matmul=True use_tokamax_gmm=True"),
    Way(OURS),
    Way(OURS, kept=True, note="weights cast to bfloat16 once a step"),
    Way(OURS, recipe="fp8_block", kept=True),
    Way(OURS, recipe="fp8_block"),
    Way(
        "maxtext-capacity1.25",
        "sparse_matmul=False capacity_factor=1.25",
        note="drops what finds no room",
    ),
    Way(
        "maxtext-tokamax-float32-router",
        "sparse_matmul=True use_tokamax_gmm=True float32_gate_logits=True",
        note="the router in float32, as moax's",
    ),
    Way(
        "maxtext-dense",
        "sparse_matmul=False capacity_factor=-1.0",
        note="every expert computes every token",
    ),
    Way("maxtext-ragged_dot", "sparse_matmul=True use_tokamax_gmm=False"),
)


@dataclasses.dataclass
class Variant:
    """One row: a case by one way, and the files of its process."""

    case: str
    way: Way
    layers: int
    steps: int
    argv: list[str]
    folder: Path
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.case} {self.way.name} {self.way.label}"

    def start(self, compile_only: bool) -> subprocess.Popen:
        """Starts the process, which imports and then waits for a line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ours = dict(recipe=self.way.recipe) if self.way.name == OURS else None
        result = str(self.folder / "result.json")
        job = dict(
            argv=self.argv,
            moax=ours,
            kept=self.way.kept,
            compile=compile_only,
            result=result,
        )
        if any("profiler=" in one for one in self.argv):
            job["hlo"] = str(self.folder / HLO)
        else:
            job["hlo"] = None
        path = os.pathsep.join(
            filter(
                None,
                (str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")),
            )
        )
        env = environment(
            PYTHONPATH=path,
            DECOUPLE_GCLOUD="TRUE",
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        # Compilations share the GPU, and a run has it alone.
        env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false" if compile_only else "true"}
        env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
        with open(self.folder / ("compile.log" if compile_only else "run.log"), "w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.trainer.worker", json.dumps(job)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True, env=env,
            )  # fmt: skip

    def finish(self, process: subprocess.Popen, seconds: float) -> None:
        """Lets the process go on, and waits; `why` says what went wrong."""
        try:
            process.communicate("\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.why = f"it did not end within {seconds:.0f} s"
            return
        if process.returncode:
            logs = (self.folder / "run.log", self.folder / "compile.log")
            text = "".join(log.read_text() for log in logs if log.exists()).splitlines()
            errors = [line.strip() for line in text if "Error" in line or "RESOURCE_EXHAUSTED" in line]
            self.why = (errors or text or ["no output"])[-1][:300]

    def compile(self) -> None:
        self.finish(self.start(compile_only=True), 420)

    def row(self) -> Row:
        """Returns the row of a run; without times, where the run failed."""
        row = Row(
            "trainer",
            self.case,
            "step",
            self.way.name,
            self.way.label,
            path="maxtext 0.2.5",
            note=self.why,
        )
        row.extra = dict(
            layers=self.layers,
            settings=" ".join(one for one in self.argv if "/" not in one),
        )
        metrics = self.folder / "metrics.txt"
        result = self.folder / "result.json"
        row.extra |= json.loads(result.read_text()) if result.exists() else {}
        memory = row.extra.pop("memory", None)
        if self.why or not metrics.exists():
            row.note = self.why or "it wrote no metrics"
            return row
        steps = [json.loads(line) for line in metrics.read_text().splitlines()][: self.steps]
        seconds = [step["perf/step_time_seconds"] for step in steps]
        counted = seconds[min(SKIPPED, len(seconds) // 2) :]
        mean = sum(counted) / len(counted)
        tokens, tflop = (steps[-1][f"perf/per_device_{unit}_per_sec"] * seconds[-1] for unit in ("tokens", "tflops"))
        row.us = mean * 1e6
        row.tflops = tflop / mean
        row.note = self.way.note
        row.method = f"mean of the last {len(counted)} of {len(seconds)} steps, by MaxText's perf/step_time_seconds"
        row.extra |= dict(
            tokens_per_s=tokens / mean, tokens=round(tokens), tflop=tflop,
            peak_bytes=memory["peak_bytes_in_use"] if memory else None,
            step_seconds=seconds, losses=[step["learning/loss"] for step in steps],
            grad_norms=[step["learning/grad_norm"] for step in steps],
        )  # fmt: skip
        if any(self.folder.rglob("*.xplane.pb")):
            try:
                row.extra |= split_step(self.folder)
            # Where nothing ran on a GPU, the losses are useful without a profile.
            except (OSError, ValueError) as error:
                row.extra["profile_note"] = str(error)
        return row


def part_of(kernel: str, scope: str) -> str:
    """Returns the part of a step of a kernel."""
    return next(part for part, pattern in PARTS.items() if re.search(pattern, scope) or re.search(pattern, kernel))


def split_step(folder: Path) -> dict[str, Any]:
    """Returns the parts of a step, and the kernels that take the most of it, from the profile in `folder`."""
    return stages.split_step(
        (folder / HLO).read_text(),
        read_profile(folder),
        PROFILED,
        PARTS,
        part_of,
    )


def variants(args: argparse.Namespace, folder: Path, large: bool) -> list[Variant]:
    """Returns what to measure, the most important first."""
    if (maxtext := find_spec("maxtext")) is None or maxtext.origin is None:
        raise SystemExit("maxtext is not installed; `make trainer-h200` installs it")
    base = str(Path(maxtext.origin).parent / "configs" / "base.yml")
    chosen = []
    for case in args.cases:
        settings, small, big = CASES[case]
        layers = args.layers or (big if large else small)
        for way in WAYS:
            here = folder / f"{case}-{way.name}-{way.label}"
            profile = f"profiler=xplane skip_first_n_steps_for_profiler={args.steps + 1} profiler_steps={PROFILED} "
            own = f"base_num_decoder_layers={layers} attention={args.attention} {profile if args.profile else ''}"
            own += f"steps={args.steps + (2 + PROFILED) * args.profile} "
            own += f"metrics_file={here / 'metrics.txt'} jax_cache_dir={args.cache} base_output_directory={here}"
            argv = [base, *COMMON.split(), *settings.split(), *way.settings.split(), *own.split()]
            chosen.append(Variant(case, way, layers, args.steps, argv, here))
    chosen.sort(key=lambda one: one.way in WAYS[-SLOW:])
    return [one for one in chosen if not args.only or any(word in one.name for word in args.only)]


def compare_losses(rows: list[Row]) -> None:
    """Writes into each row how far its losses are from those of the first row of its case."""
    for row in rows:
        baseline = next(other for other in rows if other.case == row.case)
        if row is not baseline and row.us and baseline.us:
            pairs = zip(row.extra["losses"], baseline.extra["losses"], strict=False)
            row.extra[f"loss_off_{baseline.impl}"] = max(abs(a - b) / b for a, b in pairs)


def main() -> int:
    """Measures, prints a table, and writes the rows and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=["qwen3-30b", "mixtral-8x7b"])
    add(
        "--only",
        action="append",
        metavar="WORD",
        help="variants whose 'case way recipe' has the word; repeatable",
    )
    add(
        "--layers",
        type=int,
        help="layers of the model (default: as many as fit an H100, or an H200)",
    )
    add("--steps", type=int, default=15)
    add(
        "--profile",
        action="store_true",
        help="profile two steps after the counted ones, and list their kernels",
    )
    add(
        "--attention",
        default="cudnn_flash_jax",
        help="MaxText's setting, of all variants (default: %(default)s)",
    )
    add(
        "--jobs",
        type=int,
        default=min(8, (os.cpu_count() or 2) // 2),
        help="compilations at one time",
    )
    add(
        "--cache",
        default=str(ROOT / ".jax_cache" / "trainer"),
        help="the folder of the compilation cache",
    )
    add(
        "--logs",
        default=tempfile.gettempdir(),
        help="the folder of the logs (default: %(default)s)",
    )
    add("--out", default="runs/results/h200_trainer.json")
    add("--sha", help="the measured commit (default: git tells it)")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    head = report.header(["python", "-m", "benchmarks.trainer", *sys.argv[1:]], args.sha, {})
    head["flop"] = FORMULA
    rows: list[Row] = []
    Path(args.logs).mkdir(parents=True, exist_ok=True)
    asked = variants(
        args,
        Path(tempfile.mkdtemp(prefix="trainer-", dir=args.logs)),
        "H200" in head["device"],
    )

    def measure(variant: Variant, process: subprocess.Popen) -> None:
        variant.finish(process, 300)
        rows.append(variant.row())
        compare_losses(rows)
        report.save(args.out, head, rows)
        say(f"{variant.name}: {rows[-1].us / 1e3:.1f} ms a step" if rows[-1].us else f"{variant.name}: {rows[-1].note}")

    # The first one compiles alone: XLA then times the products that all variants share on an idle GPU.
    measure(asked[0], asked[0].start(compile_only=False))
    say(f"compiling the other {len(asked) - 1} variants, {args.jobs} at a time")
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(Variant.compile, asked[1:]))
    ready = [one for one in asked[1:] if not one.why]
    for failed in (one for one in asked[1:] if one.why):
        rows.append(failed.row())
        say(f"{failed.name}: {failed.why}")
    started = [one.start(compile_only=False) for one in ready[:1]]
    for one, following in itertools.zip_longest(ready, ready[1:]):
        process = started.pop()
        if following is not None:  # it imports beside the steps of `one`
            started.append(following.start(compile_only=False))
        measure(one, process)
    report.save(args.out, head, rows)
    report.show(head, rows)
    from benchmarks.trainer.plot import plot  # here, so that a row needs no matplotlib

    plot(args.out, Path(args.out).with_suffix(".png"))
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
