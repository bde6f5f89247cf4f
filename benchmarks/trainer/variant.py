"""A variant of `python -m benchmarks.trainer`: the processes that compile and train it, and the row that it leaves."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, cast

import moax
from benchmarks import profiles
from benchmarks.block import stages
from benchmarks.block.worker import environment
from benchmarks.report import OURS, Row
from benchmarks.trainer import ways
from benchmarks.trainer.ways import Mesh, Way

# No mean counts the first steps. The steps of a profile come after the counted ones.
SKIPPED = 5
PROFILED = 2
COMPILATION = 420  # the seconds that a compilation may take
RUN = 300  # the seconds that the steps of a variant may take
HLO = "step.hlo"  # the optimized program of a step, whose scopes tell the parts of a profile
# A line that says why a process failed. MaxText logs the packages that it does without, with the error of each import.
ERROR = re.compile(r"^(?!.*DECOUPLED NO-OP).*(Error|RESOURCE_EXHAUSTED|Check failed)")
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

    @property
    def compiled(self) -> Path:
        """The file that the process of a resident variant makes when it has compiled."""
        return self.folder / "compiled"

    def start(self, compile_only: bool = False, resident: bool = False) -> subprocess.Popen:
        """Starts the process, which imports and then waits for a line; a resident one waits again when it compiled."""
        self.folder.mkdir(parents=True, exist_ok=True)
        ours = None
        if self.way.name == OURS:
            ours = dict(recipe=self.way.recipe, buffer_factor=self.way.buffer_factor)
        result = str(self.folder / "result.json")
        job = dict(
            argv=self.argv,
            moax=ours,
            kept=self.way.kept,
            load=self.load,
            compile=compile_only,
            result=result,
            compiled=str(self.compiled) if resident else None,
        )
        if any("profiler=" in one for one in self.argv):
            job["hlo"] = str(self.folder / HLO)
        else:
            job["hlo"] = None
        env = environment(
            DECOUPLE_GCLOUD="TRUE",
            JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        )
        # Compilations share the GPU, as resident processes do. Another run has it alone.
        shares = compile_only or resident
        env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false" if shares else "true"}
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
            errors = [line.strip() for line in text if ERROR.search(line)]
            self.why = (errors or text or ["no output"])[-1][:300]

    def compile(self, clock: Clock) -> None:
        """Compiles the step in a process that ends by the end of the clock."""
        if clock.is_over():
            self.why = clock.reason
            return
        self.finish(self.start(compile_only=True), min(COMPILATION, clock.left()))

    def settle(self, clock: Clock) -> subprocess.Popen | None:
        """Starts a resident process, and returns it when it has compiled and waits; None where `why` says why not."""
        if clock.is_over():
            self.why = clock.reason
            return None
        process = self.start(resident=True)
        stdin = cast(IO[str], process.stdin)
        stdin.write("\n")
        stdin.flush()
        seconds = min(COMPILATION, clock.left())
        end = time.monotonic() + seconds
        while not self.compiled.exists():
            if process.poll() is not None:
                self.finish(process, RUN)
                return None
            if time.monotonic() > end:
                process.kill()
                process.communicate()  # which closes its stdin
                self.why = f"it did not compile within {seconds:.0f} s"
                return None
            time.sleep(0.1)
        return process

    def row(self) -> Row:
        """Returns the row of a run without its profile; without times, where the run failed."""
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
        return row

    def read_profile(self) -> dict[str, Any]:
        """Returns what the profile of a run tells; nothing where there is no profile."""
        if self.why or not any(self.folder.rglob("*.xplane.pb")):
            return {}
        try:
            kernels = profiles.read_profile(self.folder)
            parts = split_step(self.folder, kernels)
            if self.mesh is not None and self.mesh.size > 1:
                parts |= split_wire(kernels)
            return parts
        # Where nothing ran on a GPU, the losses are useful without a profile.
        except (OSError, ValueError) as error:
            return {"profile_note": str(error)}


def warm(variant: Variant) -> Variant:
    """Returns the variant with one layer, for a compilation that has the GPUs alone."""
    own = f"base_num_decoder_layers={variant.layers}"
    argv = ["base_num_decoder_layers=1" if one == own else one for one in variant.argv]
    return dataclasses.replace(variant, argv=argv, folder=variant.folder.with_name("warm"))


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
