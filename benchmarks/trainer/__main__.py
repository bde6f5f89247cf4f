"""`python -m benchmarks.trainer`: MaxText's training step, by each of its MoE layers and by moax's block.

Each variant is MaxText's own training command in a process of its own, on one GPU or on a mesh of the GPUs of one host.
Its synthetic data are the same batch in every step, so that the loss falls. A row has the mean time of a step, tokens/s
and TFLOP/s of one GPU by MaxText's count, the peak of memory of one GPU, and the loss of every step. `--profile` adds
the kernels of the step that take the most time, and on a mesh the time of collectives. `make trainer-h200` and `make
trainer-gpus` run it; docs/how-to/maxtext-gpu.md says how.

The variants compile side by side and then run one after another: first the most important ones of all cases. Where
`--jobs` is smaller than their number, the most important ones also run before the others compile. With `--resident` a
variant stays on the GPUs from its compilation to its turn, and is not traced and loaded a second time.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from benchmarks import report
from benchmarks.block.worker import ROOT
from benchmarks.report import Row
from benchmarks.trainer import ways
from benchmarks.trainer.variant import PROFILED, RUN, Clock, Variant, warm
from benchmarks.trainer.ways import CASES, Mesh

FORMULA = (
    "FLOP of a step of T tokens = 6 T (L (H D (2 Q + 2 KV) + H E + 3 H F K) + H V) + 6 L T S Q D: L layers, width H, "
    "Q and KV heads of D, E experts of width F, K a token, V words, S tokens a sequence. "
    "It counts no expert that a token did not choose, and nothing that runs a second time."
)


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
    """Returns the variants that words name, those of the first word first; without words all, by rank.

    A word that is the name of a variant names it alone; any other word names each variant whose name has it.
    """
    if not words:
        return sorted(variants, key=lambda one: one.way.rank)
    by_name = {one.name: one for one in variants}
    chosen: dict[str, Variant] = {}
    for word in words:
        if word in by_name:
            chosen[word] = by_name[word]
        else:
            chosen |= {name: one for name, one in by_name.items() if word in name}
    return list(chosen.values())


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
        help="variants whose 'case way recipe' is or has the word; repeatable, and the first word's run first",
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
        "--resident",
        action="store_true",
        help="compile and train a variant in one process; the states of all variants must fit the GPUs together",
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
    measured: list[tuple[Variant, Row]] = []

    def write(variant: Variant) -> None:
        rows.append(variant.row())
        measured.append((variant, rows[-1]))
        compare_losses(rows)
        report.save(args.out, head, rows)
        text = rows[-1].note
        if rows[-1].us:
            text = f"{rows[-1].us / 1e3:.1f} ms a step"
        say(f"{variant.name}: {text}, {clock.passed():.0f} s after the start")

    # One layer compiles alone: XLA then times the matmuls that all variants share on an idle GPU.
    for variant in variants[:1]:
        warm(variant).compile(clock)
    for wave in split_waves(variants, args.jobs):
        measure(wave, clock, args.jobs, args.resident, write)
    if args.profile:
        add_profiles(measured)
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


def measure(variants: list[Variant], clock: Clock, jobs: int, resident: bool, write: Callable[[Variant], None]) -> None:
    """Compiles the variants side by side, and runs one after another; `write` takes each that has ended."""
    say(f"compiling {len(variants)} variants, {jobs} at a time, {clock.passed():.0f} s after the start")
    turns: Iterable[tuple[Variant, subprocess.Popen]]
    with ThreadPoolExecutor(jobs) as pool:
        if resident:
            settled = pool.map(lambda variant: variant.settle(clock), variants)
            turns = [(one, process) for one, process in zip(variants, settled, strict=True) if process is not None]
        else:
            list(pool.map(lambda variant: variant.compile(clock), variants))
            turns = take_turns([one for one in variants if not one.why])
    say(f"compiled {clock.passed():.0f} s after the start")
    for failed in (one for one in variants if one.why):
        write(failed)
    for one, process in turns:
        if clock.is_over():
            process.kill()
            process.communicate()  # which closes its stdin
            one.why = clock.reason
        else:
            one.finish(process, RUN)
        write(one)


def take_turns(variants: list[Variant]) -> Iterator[tuple[Variant, subprocess.Popen]]:
    """Yields each variant with its process, which imported beside the steps of the variant before."""
    started = [one.start() for one in variants[:1]]
    for number, one in enumerate(variants):
        process = started.pop()
        started += [following.start() for following in variants[number + 1 : number + 2]]
        yield one, process


def add_profiles(measured: list[tuple[Variant, Row]]) -> None:
    """Adds to each row what its profile tells. Profiles are read side by side, after all rows."""
    workers = max(1, min(len(measured), (os.cpu_count() or 2) // 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        profiles = pool.map(Variant.read_profile, [variant for variant, _ in measured])
        for (_, row), profile in zip(measured, profiles, strict=True):
            row.extra |= profile


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
