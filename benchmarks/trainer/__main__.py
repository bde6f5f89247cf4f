"""`python -m benchmarks.trainer`: MaxText's training step, by each of its MoE layers and by moax's block.

Each variant is MaxText's own training command in a process of its own, on one GPU or on a mesh of the GPUs of one host.
Its synthetic data are the same batch in every step, so that the loss falls. A row has the mean time of a step, tokens/s
and TFLOP/s of one GPU by MaxText's count, the peak of memory of one GPU, and the loss of every step. `--profile` adds
the kernels of the step that take the most time, and on a mesh the time of collectives. `make trainer-h200` and `make
trainer-gpus` run it; docs/how-to/maxtext-gpu.md says how.

The variants compile side by side and then run one after another: first the most important ones of all cases. Where
`--jobs` is smaller than their number, the most important ones also run before the others compile.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import moax
from benchmarks import profiles, report
from benchmarks.block import stages
from benchmarks.block.worker import ROOT, environment
from benchmarks.report import OURS, Row
from benchmarks.trainer import ways
from benchmarks.trainer.ways import CASES, Mesh, Way

# No mean counts the first steps. The steps of a profile come after the counted ones.
SKIPPED = 5
PROFILED = 2
COMPILATION = 420  # the seconds that a compilation may take
RUN = 300  # the seconds that the steps of a variant may take
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


class Clock:
    """The seconds of `--seconds`, after which no variant starts; None for no end."""

    def __init__(self, seconds: float | None):
        self.reason = f"not started: the {seconds} s of --seconds were over"
        self.start = time.monotonic()
        self.end = math.inf
        if seconds is not None:
            self.end = self.start + seconds

    def left(self) -> float:
        """Returns the seconds that are left."""
        return self.end - time.monotonic()

    def passed(self) -> float:
        """Returns the seconds since the clock was made."""
        return time.monotonic() - self.start

    def is_over(self) -> bool:
        """Returns whether no second is left."""
        return self.left() <= 0


@dataclasses.dataclass
class Variant:
    """One row: a case by one way, and the files of its process."""

    case: str
    way: Way
    mesh: Mesh | None
    load: str
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
            load=self.load,
            compile=compile_only,
            result=result,
        )
        if any("profiler=" in one for one in self.argv):
            job["hlo"] = str(self.folder / HLO)
        else:
            job["hlo"] = None
        env = environment(
            DECOUPLE_GCLOUD="TRUE",
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        # Compilations share the GPU, and a run has it alone.
        env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false" if compile_only else "true"}
        env |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
        env |= self.devices()
        if self.way.overlap:
            flags = ways.xla_flags(moax.OVERLAP_OPTIONS.items())
            env["XLA_FLAGS"] = " ".join(filter(None, (env.get("XLA_FLAGS", ""), flags)))
        with open(self.folder / ("compile.log" if compile_only else "run.log"), "w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.trainer.worker", json.dumps(job)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True, env=env,
            )  # fmt: skip

    def devices(self) -> dict[str, str]:
        """Returns what makes a process see as many devices as its mesh has, on a machine with more of them."""
        if self.mesh is None:
            return {}
        if "hardware=cpu" in self.argv:
            return {"JAX_NUM_CPU_DEVICES": str(self.mesh.size)}
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        if seen:
            gpus = seen.split(",")[: self.mesh.size]
        else:
            gpus = [str(number) for number in range(self.mesh.size)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}

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

    def compile(self, clock: Clock) -> None:
        """Compiles the step in a process that ends by the end of the clock."""
        if clock.is_over():
            self.why = clock.reason
            return
        self.finish(self.start(compile_only=True), min(COMPILATION, clock.left()))

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
                kernels = profiles.read_profile(self.folder)
                row.extra |= split_step(self.folder, kernels)
                if self.mesh is not None and self.mesh.size > 1:
                    row.extra |= split_wire(kernels)
            # Where nothing ran on a GPU, the losses are useful without a profile.
            except (OSError, ValueError) as error:
                row.extra["profile_note"] = str(error)
        return row


def part_of(kernel: str, scope: str) -> str:
    """Returns the part of a step of a kernel."""
    return next(part for part, pattern in PARTS.items() if re.search(pattern, scope) or re.search(pattern, kernel))


def split_step(folder: Path, kernels: list[profiles.Kernel]) -> dict[str, Any]:
    """Returns the parts of a step of one GPU, and the kernels that take the most of it; `folder` has the program."""
    gpus = len({kernel.device for kernel in kernels})
    return stages.split_step(
        (folder / HLO).read_text(),
        kernels,
        PROFILED * gpus,
        PARTS,
        part_of,
    )


def split_wire(kernels: list[profiles.Kernel]) -> dict[str, Any]:
    """Returns ms of a step of the first GPU: its collectives, those with nothing computing beside them, its compute."""
    of_gpu = profiles.overlaps(kernels, PROFILED)[0]
    together = of_gpu.kinds[0]
    return {
        "wire_ms": round(together.ms, 3),
        "exposed_ms": round(together.exposed_ms, 3),
        "compute_ms": round(of_gpu.compute_ms, 3),
    }


def list_variants(args: argparse.Namespace, folder: Path, large: bool) -> list[Variant]:
    """Returns what to measure, the most important first."""
    if (maxtext := find_spec("maxtext")) is None or maxtext.origin is None:
        raise SystemExit("maxtext is not installed; `make trainer-h200` installs it")
    base = str(Path(maxtext.origin).parent / "configs" / "base.yml")
    variants = []
    depths = args.layers or [None]
    for case, mesh, microbatches, load, depth in itertools.product(
        args.cases, args.mesh or [None], args.microbatches, args.load, depths
    ):
        model = CASES[case]
        layers = depth or ways.choose_layers(model, mesh, large)
        name = ways.name_case(case, mesh, microbatches, load)
        if len(depths) > 1:
            name += f" L{layers}"
        for way in ways.list_ways(mesh, microbatches):
            # MaxText reads a setting up to `=`, and a list at commas.
            here = folder / re.sub(r"[^\w.+]+", "-", f"{name}-{way.name}-{way.label}")
            settings = [*ways.COMMON.split(), *model.settings.split(), *way.settings.split()]
            settings += list_settings(args, layers, microbatches, here)
            if mesh is not None:
                settings += mesh.settings.split()
            variants.append(Variant(name, way, mesh, load, layers, args.steps, [base, *settings], here))
    return order_variants(variants, args.only)


def order_variants(variants: list[Variant], words: list[str] | None) -> list[Variant]:
    """Returns the variants whose names have a word, those of the first word first; without words all, by rank."""
    if not words:
        return sorted(variants, key=lambda one: one.way.rank)
    named = (one for word in words for one in variants if word in one.name)
    return list({one.name: one for one in named}.values())


def list_settings(args: argparse.Namespace, layers: int, microbatches: int, folder: Path) -> list[str]:
    """Returns the settings of MaxText that the command line tells."""
    settings = [
        f"base_num_decoder_layers={layers}",
        f"gradient_accumulation_steps={microbatches}",
        f"attention={args.attention}",
        f"steps={args.steps + (2 + PROFILED) * args.profile}",
        f"metrics_file={folder / 'metrics.txt'}",
        f"jax_cache_dir={args.cache}",
        f"base_output_directory={folder}",
    ]
    if args.profile:
        settings += [
            "profiler=xplane",
            f"skip_first_n_steps_for_profiler={args.steps + 1}",
            f"profiler_steps={PROFILED}",
        ]
    return settings


def warm(variant: Variant) -> Variant:
    """Returns the variant with one layer, for a compilation that has the GPUs alone."""
    own = f"base_num_decoder_layers={variant.layers}"
    argv = ["base_num_decoder_layers=1" if one == own else one for one in variant.argv]
    return dataclasses.replace(variant, argv=argv, folder=variant.folder.with_name("warm"))


def compare_losses(rows: list[Row]) -> None:
    """Writes into each row how far its losses are from those of the first row of its case that has losses."""
    for row in rows:
        baseline = next((other for other in rows if other.case == row.case and other.us), row)
        if row is not baseline and row.us:
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
        help="variants whose 'case way recipe' has the word; repeatable, and the first word's run first",
    )
    add(
        "--mesh",
        action="append",
        type=as_mesh,
        metavar="SIZES",
        help="a mesh of GPUs of this host, such as fsdp=4 or fsdp=2,expert=2; repeatable (default: one GPU)",
    )
    add(
        "--microbatches",
        nargs="+",
        type=int,
        default=[ways.MICROBATCHES],
        metavar="N",
        help="microbatches of a step (default: 4)",
    )
    add(
        "--load",
        nargs="+",
        choices=ways.LOADS,
        default=[ways.SYNTHETIC],
        help="tokens: MaxText's synthetic ones, these with balanced experts, or text (default: synthetic)",
    )
    add(
        "--layers",
        nargs="+",
        type=int,
        metavar="N",
        help="layers of the model (default: as many as fit an H100, or an H200; more on a mesh)",
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
        default=max(1, min(16, (os.cpu_count() or 2) // 2)),
        help="compilations at one time (default: one for two cores, and at most 16)",
    )
    add(
        "--seconds",
        type=float,
        help="start no variant after this time, and stop compilations then",
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
    clock = Clock(args.seconds)
    Path(args.logs).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="trainer-", dir=args.logs))
    variants = list_variants(args, folder, "H200" in head["device"])
    rows: list[Row] = []

    def write(variant: Variant) -> None:
        rows.append(variant.row())
        compare_losses(rows)
        report.save(args.out, head, rows)
        text = rows[-1].note
        if rows[-1].us:
            text = f"{rows[-1].us / 1e3:.1f} ms a step"
        say(f"{variant.name}: {text}, {clock.passed():.0f} s after the start")

    # One layer compiles alone: XLA then times the products that all variants share on an idle GPU.
    for variant in variants[:1]:
        warm(variant).compile(clock)
    for wave in split_waves(variants, args.jobs):
        measure(wave, clock, args.jobs, write)
    report.save(args.out, head, rows)
    report.show(head, rows)
    if find_spec("matplotlib") is None:
        say("matplotlib is not installed: there is no picture")
        return 0
    from benchmarks.trainer.plot import plot  # here, so that a row needs no matplotlib

    plot(args.out, Path(args.out).with_suffix(".png"))
    return 0


def split_waves(variants: list[Variant], jobs: int) -> list[list[Variant]]:
    """Returns the variants that compile together: all of them, or those of each rank where there are more than jobs."""
    if len(variants) <= jobs:
        return [variants]
    return [list(wave) for _, wave in itertools.groupby(variants, key=lambda one: one.way.rank)]


def measure(variants: list[Variant], clock: Clock, jobs: int, write: Callable[[Variant], None]) -> None:
    """Compiles the variants side by side, and runs one after another; `write` takes each that has ended."""
    say(f"compiling {len(variants)} variants, {jobs} at a time, {clock.passed():.0f} s after the start")
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda variant: variant.compile(clock), variants))
    say(f"compiled {clock.passed():.0f} s after the start")
    for failed in (one for one in variants if one.why):
        write(failed)
    ready = [one for one in variants if not one.why]
    processes = [one.start(compile_only=False) for one in ready[:1]]
    for one, following in itertools.zip_longest(ready, ready[1:]):
        process = processes.pop()
        if following is not None:  # it imports beside the steps of `one`
            processes.append(following.start(compile_only=False))
        if clock.is_over():
            process.kill()
            process.wait()
            one.why = clock.reason
        else:
            one.finish(process, RUN)
        write(one)


def as_mesh(text: str) -> Mesh:
    """Returns the mesh of an argument; argparse prints the reason where it cannot."""
    try:
        return ways.read_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
