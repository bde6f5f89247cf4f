"""The command `moax`: `info` on this machine, `train` a language model, `compare` runs, `inspect` or `estimate` a
block, `bench` and `tune` the kernels.

Exit codes: 0 done, 1 it cannot run here, 2 wrong arguments, 130 stopped by Ctrl-C, 141 nobody reads what it prints.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shlex
import sys
from pathlib import Path

import jax
from jax.errors import JaxRuntimeError

from moax import info
from moax.bench import command as bench
from moax.bench import tune
from moax.errors import Unsupported
from moax.estimate import command as estimate
from moax.train import options, processes
from moax.train.mesh import make_mesh
from moax.train.presets import PRESETS, ModelConfig, TrainConfig

EXTRA = ("matplotlib", "optax", "orbax", "rich")
EXAMPLES = """\
examples:
  moax info
      what this machine is, and which kernels and exchanges run on it
  moax train --preset tiny --mesh fsdp=2,ep=4 --recipe fp8_block --cpu-devices 8
      train for two minutes on eight emulated devices; needs no GPU
  moax train --preset small --mesh fsdp=2,ep=4 --recipe fp8_block --text my_project/
      train on your own files on eight GPUs
  moax train --resume --name tiny
      continue a run; another --mesh will do
  moax inspect --mesh fsdp=2,ep=4 --recipe fp8_block
      which collectives an MoE block runs, and how many bytes each moves
  moax estimate --model deepseek-v3 --gpus 256 --recipe fp8_block --sweep
      memory, bytes on the wires and time of every mesh of 256 GPUs, fastest first; runs nothing
  moax bench gemm --peers none --out gemm.json
      grouped products on this GPU, beside its limits

`moax COMMAND --help` has each command's options. What a command found goes to stdout (with --json, nothing else does),
errors to stderr, in one line; --traceback shows where they arose.
exit codes: 0 done, 1 it cannot run here, 2 wrong arguments, 130 stopped by Ctrl-C, 141 nobody reads what it prints
"""


def main(argv: list[str] | None = None) -> int:
    """Runs `moax ARGV`; returns the exit code."""
    args = parser().parse_args(argv)
    args.argv = sys.argv[1:] if argv is None else argv
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `moax info | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still flushes when it ends
        return processes.leave(141)
    except KeyboardInterrupt:
        print(f"moax {args.command}: stopped", file=sys.stderr)
        return processes.leave(130)
    except (ValueError, Unsupported, OSError, JaxRuntimeError, ModuleNotFoundError) as error:
        if args.traceback:
            raise
        message, code = _explain(error)
        print(f"moax {args.command}: error: {message}{processes.hint(error)}", file=sys.stderr)
        return processes.leave(code)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="moax",
        usage="moax COMMAND [options]",
        description="Mixture-of-Experts layers for JAX that quantize before they gather.\n"
        "The commands try them out on this machine, with or without a GPU; the library is `import moax`.",
        epilog=EXAMPLES,
        formatter_class=raw,
    )
    top.add_argument(
        "--version", action="version", version=f"moax {info.version('moax') or 'of an uninstalled source tree'}"
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    about = commands.add_parser(
        "info",
        help="show this machine's devices, and what of moax runs on them, or why not",
        usage="moax info [options]",
        description="Shows devices, versions, a mesh to begin with, which kernels and exchanges run here, and extras.",
    )
    train = commands.add_parser(
        "train",
        help="train a byte-level language model with an MoE in every layer",
        usage="moax train [--preset NAME] [options]",
        description=options.DESCRIPTION,
        formatter_class=raw,
    )
    inspect = commands.add_parser(
        "inspect",
        help="show which collectives an MoE block compiles to",
        usage="moax inspect [options]",
        description="Compiles one MoE block and lists its collectives: kind, dtype, bytes, mesh axes, origin.",
    )
    estimating = commands.add_parser(
        "estimate",
        help="estimate memory, bytes on the wires and time of a model's blocks on any mesh",
        usage="moax estimate [--model NAME] (--mesh AXES | --gpus N [--sweep]) [options]",
        description=estimate.DESCRIPTION,
        formatter_class=raw,
    )
    measure = commands.add_parser(
        "bench",
        help="measure products, quantization, permutation or a block beside their limits and peers",
        usage="moax bench WHAT [options]",
        description=bench.DESCRIPTION,
        formatter_class=raw,
    )
    tuning = commands.add_parser(
        "tune",
        help="measure the tiles of products on this GPU and keep the fastest",
        usage="moax tune [options]",
        description=tune.DESCRIPTION,
        formatter_class=raw,
    )
    compare = commands.add_parser(
        "compare",
        help="draw the losses of several training runs on one plot",
        usage="moax compare RUN RUN [...] [--out FILE]",
        description="Draws the losses of runs of `moax train` on one plot, and prints how far apart they end.",
    )
    compare.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs")
    compare.add_argument("--out", default="compare.png", metavar="FILE", help="the plot (default: %(default)s)")
    compare.add_argument("--json", action="store_true", help="print JSON, for programs")
    about.add_argument("--cpu-devices", type=int, metavar="N", help="emulate N devices on this machine's CPU")
    about.add_argument("--json", action="store_true", help="print JSON, for programs")
    options.add_options(train)
    _inspect_options(inspect)
    estimating.add_argument("--mesh", type=options.mesh_of, metavar="AXES", help="as fsdp=32,ep=8, of dp, fsdp, ep, tp")
    estimate.add_options(estimating)
    beside = (
        "block: on a mesh, as fsdp=2,ep=2, beside layers of JAX and PyTorch; where there is no GPU devices are emulated"
    )
    measure.add_argument("--mesh", type=options.mesh_of, metavar="AXES", help=beside)
    bench.add_options(measure)
    tune.add_options(tuning)
    wired = (
        (about, run_info),
        (train, run_train),
        (inspect, run_inspect),
        (estimating, run_estimate),
        (measure, run_bench),
        (tuning, run_tune),
        (compare, run_compare),
    )
    for command, run in wired:
        command.add_argument("--traceback", action="store_true", help="on an error, show where it arose")
        command.set_defaults(run=run)
    return top


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    options.add_execution(parser, mesh="fsdp=2,ep=4")
    add("--d-model", type=int, default=1024, metavar="H", help="model width (default: %(default)s)")
    add("--d-ff", type=int, default=2048, metavar="F", help="width of an expert (default: %(default)s)")
    add("--experts", type=int, default=8, metavar="E", help="experts (default: %(default)s)")
    add("--top-k", type=int, default=2, metavar="K", help="experts of a token (default: %(default)s)")
    add("--tokens", type=int, default=4096, metavar="T", help="tokens of the whole mesh (default: %(default)s)")
    add("--forward-only", action="store_true", help="leave the backward pass out")
    add("--json", action="store_true", help="print JSON, for programs")


def run_info(args: argparse.Namespace) -> int:
    """`moax info`."""
    start(args.cpu_devices)
    found = info.describe()
    print(json.dumps(found, indent=2) if args.json else info.render(found))
    return 0


def run_train(args: argparse.Namespace) -> int:
    """`moax train`."""
    processes.join(args)
    start(args.cpu_devices)
    from moax.train import loop, report, summary

    config = processes.together(lambda: train_config(args))
    result = loop.train(config, resume=args.resume, report=report.for_stream(json=args.json))
    found = summary.finish(result)
    if not processes.is_first():
        return 130 if result.interrupted else 0
    for line in [json.dumps(found, indent=2)] if args.json else summary.lines(result, found):
        print(line)
    if result.interrupted:
        command = ["moax", "train", "--resume", "--name", result.config.name]
        command += ["--out", args.out] if args.out != "runs" else []
        command += ["--cpu-devices", str(args.cpu_devices)] if args.cpu_devices else []
        command += processes.flags(args)
        hint = f"saved after step {result.steps}; continue with:\n  {shlex.join(command)}"
        print(hint, file=sys.stderr if args.json else sys.stdout)
        return 130
    return 0


def train_config(args: argparse.Namespace) -> TrainConfig:
    """The settings that were given, over the preset's; with --resume, over the run's own."""
    from moax.train.run import newest, read_config

    given = {name: value for name, value in vars(args).items() if value is not None}
    if args.resume:
        if args.preset:
            raise ValueError(f"--preset {args.preset} with --resume: the run has its sizes already; leave --preset out")
        base = read_config(args.out, args.name or newest(args.out))
    else:
        preset = args.preset or "tiny"
        base = dataclasses.replace(PRESETS[preset], name=preset)
    if "recipe" in given:
        given["recipe"] = None if given["recipe"] == "none" else given["recipe"]
    if "capacity_factor" in given and math.isinf(given["capacity_factor"]):
        given["capacity_factor"] = None
    model = {f.name: given[f.name] for f in dataclasses.fields(ModelConfig) if f.name in given}
    run = {f.name: given[f.name] for f in dataclasses.fields(TrainConfig) if f.name in given}
    return dataclasses.replace(base, model=dataclasses.replace(base.model, **model), **run)


def run_inspect(args: argparse.Namespace) -> int:
    """`moax inspect`. Devices are emulated, as many as the mesh has, unless JAX already runs on that many."""
    from moax import MoEConfig, inspect

    sizes = args.mesh or (("fsdp", 2), ("ep", 4))
    emulate(args.cpu_devices or math.prod(size for _, size in sizes))
    config = MoEConfig(d_model=args.d_model, d_ff=args.d_ff, num_experts=args.experts, top_k=args.top_k)
    report = inspect.report(
        config,
        tokens=args.tokens,
        recipe=None if args.recipe == "none" else args.recipe,
        exchange=args.exchange or "auto",
        engine=args.engine or "auto",
        mesh=make_mesh(sizes),
        dtype=args.dtype or "bfloat16",
        backward=not args.forward_only,
    )
    if args.json:
        found = [dataclasses.asdict(collective) for collective in report.found]
        weights = {"gathered": report.gathered, "gathered_unquantized": report.plain_gathered}
        print(json.dumps({"collectives": found, "weights": weights}, indent=2))
    else:
        print(report)
    return 0


def run_estimate(args: argparse.Namespace) -> int:
    """`moax estimate`."""
    return estimate.run(args, args.mesh)


def run_compare(args: argparse.Namespace) -> int:
    """`moax compare`."""
    from moax.train.plot import compare
    from moax.train.run import Run

    found = compare([Run(Path(path)) for path in args.runs], Path(args.out))
    if args.json:
        runs = [{"name": name, "held_out_loss": loss, "tokens_per_s": rate} for name, loss, rate in found]
        print(json.dumps({"runs": runs, "plot": args.out}, indent=2))
        return 0
    for name, loss, rate in found:
        print(f"{name:24} held-out loss {loss:.4f} ({loss - found[0][1]:+.4f})   {rate:,.0f} tokens/s")
    print(f"curves in {args.out}")
    return 0


def run_bench(args: argparse.Namespace) -> int:
    """`moax bench`. Peers and blocks have processes of their own, so JAX may not take all of the GPU's memory."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return bench.run(args, args.argv)


def run_tune(args: argparse.Namespace) -> int:
    """`moax tune`."""
    start()
    return tune.run(args)


def start(cpu_devices: int | None = None) -> None:
    """Starts JAX, on that many emulated devices if a number is given.

    Raises:
      Unsupported: JAX has no device to run on. ValueError: see `emulate`.
    """
    if cpu_devices is not None:
        emulate(cpu_devices)
    try:
        jax.device_count()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one of the platforms it was told to use is here
        why = str(error).strip() or f"none of its platforms ({jax.config.jax_platforms}) is here"
        raise Unsupported(f"JAX cannot start: {why}") from error


def emulate(count: int) -> None:
    """Makes JAX run on `count` emulated CPU devices; must come before anything runs.

    Raises:
      ValueError: JAX already runs on another number of devices.
    """
    if count < 1:
        raise ValueError(f"--cpu-devices {count} must be at least 1")
    # Many devices on few cores: a rendezvous may take longer than the 40 seconds after which XLA gives up.
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=600".strip()
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # Backends are up: what they have is checked below.
    if (here := jax.local_device_count()) != count:
        raise ValueError(f"--cpu-devices {count}: JAX already runs in this process, on {here} devices")


def _explain(error: Exception) -> tuple[str, int]:
    """(what to tell, exit code) of an error that is not a bug of ours."""
    if isinstance(error, ModuleNotFoundError):
        if (error.name or "").split(".")[0] not in EXTRA:
            raise error
        return f"{error.name} is missing: pip install 'moax[train]'", 1
    code = 2 if isinstance(error, ValueError) else 1
    return str(error).strip() or type(error).__name__, code
