"""`python -m benchmarks.fuzz`: random blocks by the kernels, beside XLA and beside float32.

    python -m benchmarks.fuzz                                      201 cases by the Hopper kernels, on a Hopper GPU
    python -m benchmarks.fuzz --seeds 17 --draw 1                  one of them again
    python -m benchmarks.fuzz --seeds 0:8 --kernels xla --tiny     the program itself, on any machine

A seed names a block: shapes, recipe, options. Compilation takes nearly all of the time, so each block is compiled once
and runs on several draws of its run-time arguments. A case is one draw of one block: the values, the loads of the
experts (equal, skewed, nearly all on one expert, half of the experts empty), the padding and the choices of nobody.
So 201 cases by `--draws 3` are 201 inputs of 67 programs, and not 201 programs.

Each case runs forward and backward three times: by the kernels, by XLA with the same recipe, and by `moax.reference`
in float32 with the same experts. The error of the kernels may not be much larger than that of XLA, and that of XLA may
not exceed a bound by recipe. A line has the errors of both. The exit code is 1 if a case is wrong, if a process died,
or if no case ended. Several processes share a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import moax
from benchmarks.report import header
from moax import reference
from moax.activations import GATED, UNGATED
from moax.params import param_shapes

RECIPES = (None, "fp8_block", "mxfp8", "fp8_tensor")
WIDE = (640, 768, 1024, 1408, 1536, 2048, 2880, 4096)
BUFFER_FACTORS = (0.1, 0.5, 1.0, 1.25, 2.0, None)
ELEMENTS = 1 << 27  # of the largest array that the reference holds, and of a weight
LEADING = 2  # the steps of a scan, and the size of a batch of vmap
# The errors that a recipe may cost: that of y, and that of a gradient.
BOUNDS = {
    None: (0.02, 0.05),
    "fp8_block": (0.15, 0.6),
    "mxfp8": (0.15, 0.6),
    "fp8_tensor": (0.3, 0.8),
}
# The kernels may round other sums than XLA does.
WORSE = 1.5
ROUNDING = 0.01
# The derivative of these jumps, so that a rounding changes whole columns of an expert that has few rows.
KINKED = (
    *"reglu relu relu6 leaky_relu hard_tanh hard_silu".split(),
    *"hard_swish celu selu swiglu_oai".split(),
)
JUMP = 0.3
ROUNDED = 2.0**-4  # the relative rounding of e4m3
# A recipe may cost an ill-conditioned gradient this many times such a rounding of the weights.
CONDITION = 3.0
LOADS = ("equal", "skewed", "one", "half")
STRONG = 8.0  # the logits by which a router prefers or avoids an expert
BY_EXPERT = ("wi", "wo", "bi", "bo")
Programs = namedtuple("Programs", "ours xla reference")  # of a case; the first call compiles each


@dataclasses.dataclass(frozen=True)
class Case:
    """One random block, and what is static in its program.

    Attributes:
      seed: the seed of the block, and with a draw that of the values.
      config: the block.
      tokens: T.
      recipe, buffer_factor: options of `moax.moe`.
      given: None, "experts", or "weights" for experts with weights: what the caller gives in place of a routing.
      masked: whether there is a mask; tokens of padding are full of NaN.
      quantized: whether `moax.quantize_params` quantizes the weights.
      remat: whether `jax.checkpoint` is around the block.
      way: "plain", "scan" over layers, or "vmap" over layers.
    """

    seed: int
    config: moax.MoEConfig
    tokens: int
    recipe: str | None
    buffer_factor: float | None
    given: str | None
    masked: bool
    quantized: bool
    remat: bool
    way: str

    def __str__(self) -> str:
        c = self.config
        sizes = f"T{self.tokens} H{c.d_model} F{c.d_ff} E{c.num_experts} K{c.top_k}"
        words: list[str] = [f"{self.recipe or 'bf16'} {sizes}", str(c.activation)]
        words += [f"weights_at={c.weights_at}", f"{c.router.score}/{c.router.order}", self.way]
        words += [f"buffer={self.buffer_factor}"] * (self.buffer_factor != 1.25)
        words += [f"given={self.given}"] * (self.given is not None)
        flags = dict(bias=c.use_bias, mask=self.masked, quantized=self.quantized, remat=self.remat)
        return " ".join([*words, *(name for name, on in flags.items() if on)])


def draw(seed: int, tiny: bool = False) -> Case:
    """Returns the case of a seed. A tiny one has sizes that a CPU computes in a moment."""
    rng = np.random.default_rng(seed)

    def log_uniform(largest: int) -> int:
        return int(np.exp(rng.uniform(0, np.log(largest + 1))))

    def width() -> int:
        narrow = 32 * int(rng.integers(1, 17))
        wide = int(rng.choice(WIDE))
        if tiny:
            return 32 * int(rng.integers(1, 5))
        return narrow if rng.random() < 0.75 else wide

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    d_model = width()
    d_ff = width()
    tokens = log_uniform(4096)
    experts = log_uniform(256)
    experts = max(1, min(experts, ELEMENTS // (3 * d_model * d_ff)))
    tokens = max(1, min(tokens, ELEMENTS // (experts * (d_model + 3 * d_ff))))
    if tiny:
        tokens = 1 + tokens % 96
        experts = 1 + experts % 16
    top_k = int(rng.integers(1, min(8, experts) + 1))
    activation = str(rng.choice(list(GATED if chance(0.6) else UNGATED)))
    weights_at: Any = str(rng.choice(["output", "hidden", "input"], p=[0.5, 0.25, 0.25]))
    score: Any = str(rng.choice(["softmax", "sigmoid", "sqrt_softplus"]))
    order: Any = "topk_then_score" if top_k > 1 and chance(0.3) else "score_then_topk"
    router = moax.RouterConfig(score=score, order=order)
    use_bias = chance(0.3) and weights_at != "input"
    config = moax.MoEConfig(
        d_model,
        d_ff,
        experts,
        top_k,
        activation=activation,
        weights_at=weights_at,
        use_bias=use_bias,
        router=router,
    )
    recipe = RECIPES[rng.integers(len(RECIPES))]
    return Case(
        seed=seed,
        config=config,
        tokens=tokens,
        recipe=recipe,
        buffer_factor=BUFFER_FACTORS[rng.integers(len(BUFFER_FACTORS))] if chance(0.5) else 1.25,
        given=str(rng.choice(["experts", "weights"])) if chance(0.4) else None,
        masked=chance(0.4),
        quantized=recipe is not None and chance(0.4),
        remat=chance(0.3),
        way=str(rng.choice(["plain", "scan", "vmap"], p=[0.6, 0.2, 0.2])),
    )


def make_inputs(case: Case, index: int) -> tuple[str, dict[str, Any]]:
    """Returns the words and the arrays of one draw, arrays with a leading dim of layers, or None."""
    c = case.config
    rng = np.random.default_rng([case.seed, 1, index])
    layers = 1 if case.way == "plain" else LEADING

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal((layers, *shape), np.float32)).astype(jnp.bfloat16)

    load = str(rng.choice(LOADS))
    order = rng.permutation(c.num_experts)
    logits = {
        "equal": np.zeros(c.num_experts),
        "skewed": -np.log1p(order) * rng.choice([1.0, 4.0]),
        "one": np.where(order == 0, STRONG, 0.0),
        "half": np.where(order < max(c.top_k, c.num_experts // 2), 0.0, -STRONG),
    }[load]

    # Arrays of NumPy: each operation of JAX outside of `jax.jit` would be a program to compile.
    scales = dict(router=c.d_model**-0.5, wi=c.d_model**-0.5, wo=c.d_ff**-0.5)
    weight_values = {}
    for name, shape in vars(param_shapes(c)).items():
        if shape is not None:
            weight_values[name] = normal(*shape, scale=scales.get(name, 1.0))
    x, dy = (normal(case.tokens, c.d_model) for _ in range(2))
    words = [f"load={load}"]
    ids = None
    weights = None
    mask = None
    if case.given:
        noise = rng.gumbel(size=(layers, case.tokens, c.num_experts)) + 2 * logits
        ids = np.argsort(-noise, axis=-1)[..., : c.top_k].astype(np.int32)
        if case.given == "weights":
            share = float(rng.choice([0.0, 0.1, 0.9]))
            ids = np.where(rng.random(ids.shape) < share, c.num_experts, ids).astype(np.int32)
            weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
            words.append(f"nobody={share}")
    else:
        # The first column of x is 1, so that the router adds these logits for each token.
        x[..., 0] = 1.0
        weight_values["router"][:, 0] = np.maximum(logits, -STRONG)
    if case.masked:
        mask = rng.random((layers, case.tokens)) < rng.choice([0.67, 1.0])
        if rng.random() < 0.5:
            mask[:] = np.arange(case.tokens) < int(rng.integers(case.tokens + 1))
        words.append(f"valid={mask.sum()}/{mask.size}")
    params = moax.MoEParams(**weight_values)
    return " ".join(words), dict(params=params, x=x, dy=dy, ids=ids, weights=weights, mask=mask)


def gradients(f: Callable, params, x, weights, dy) -> dict[str, Any]:
    """Returns y and the gradients of f(params, x, weights) -> (y, aux), by name, and aux under "experts"."""
    y, pull, experts = jax.vjp(f, params, x, weights, has_aux=True)
    d_params, dx, d_weights = pull(dy.astype(y.dtype))
    names = ("router", *BY_EXPERT)
    results = dict(y=y, dx=dx, weights=d_weights, experts=experts)
    results |= {name: getattr(d_params, name) for name in names}
    return {name: value for name, value in results.items() if value is not None}


def by_moax(case: Case, kernels: str) -> Callable[[dict], dict]:
    """Returns the function of the inputs that runs the block by an implementation, over all layers."""
    settings = dict(recipe=case.recipe, buffer_factor=case.buffer_factor)
    options = moax.Options(kernels=kernels, **settings)

    def one(inputs: dict) -> dict:
        def block(params, x, weights):
            ids = inputs["ids"]
            quantized = None
            if case.quantized:
                frozen = jax.lax.stop_gradient(params)
                quantized = moax.quantize_params(frozen, case.config, options)
            routing = ids if weights is None else (ids, weights)
            settings = dict(
                mask=inputs["mask"],
                routing=routing,
                quantized=quantized,
                return_routing=True,
            )
            y, stats = moax.moe(x, params, case.config, options, **settings)
            return y, cast(moax.Routing, stats.routing).experts

        if case.remat:
            block = jax.checkpoint(block)
        x = inputs["x"]
        if inputs["mask"] is not None:
            x = jnp.where(inputs["mask"][:, None], x, jnp.nan)
        return gradients(block, inputs["params"], x, inputs["weights"], inputs["dy"])

    def run(inputs: dict) -> dict:
        if case.way == "plain":
            return jax.tree.map(lambda v: v[None], one(jax.tree.map(lambda v: v[0], inputs)))
        if case.way == "vmap":
            return jax.vmap(one)(inputs)
        return jax.lax.scan(lambda _, inputs: (None, one(inputs)), None, inputs)[1]

    return program(run)


def by_reference(case: Case) -> Callable[[dict, Any], dict]:
    """Returns the function of one layer's inputs, and of the experts that took part, that runs `moax.reference`."""

    def run(inputs: dict, experts) -> dict:
        if inputs["mask"] is None:
            real = jnp.ones(case.tokens, bool)
        else:
            real = inputs["mask"]
        real_assignments = (experts < case.config.num_experts) & real[:, None]

        def block(params, x, weights):
            args = dict(experts=experts, weights=weights, kept=real_assignments)
            return reference.moe(x, params, case.config, **args)[0] * real[:, None], experts

        operands = (inputs["params"], inputs["x"])
        params, x = jax.tree.map(lambda v: v.astype(jnp.float32), operands)
        return gradients(block, params, x, inputs["weights"], inputs["dy"])

    return program(run)


def round_weights(case: Case, inputs: dict, run: Callable, experts) -> dict[str, Any]:
    """Returns the reference's results with wi and wo off by a random relative ROUNDED: a measure of the condition."""
    rng = np.random.default_rng([case.seed, 2])
    params = inputs["params"]
    noisy = {}
    for name in ("wi", "wo"):
        weight = getattr(params, name)
        noise = 1 + ROUNDED * rng.standard_normal(weight.shape)
        noisy[name] = (weight * noise).astype(jnp.bfloat16)
    params = dataclasses.replace(params, **noisy)
    layers = []
    for i in range(len(inputs["x"])):
        own = jax.tree.map(lambda v, i=i: v[i], inputs | dict(params=params))
        layers.append(jax.device_get(run(own, experts[i])))
    return jax.tree.map(lambda *values: np.stack(values), *layers)


def program(run: Callable) -> Callable:
    """Returns `run` as a program that XLA compiles without timing kernels of its own: it runs once or twice."""
    once = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return jax.jit(run, compiler_options=once if jax.default_backend() == "gpu" else None)


def error(name: str, got, want) -> float:
    """Returns |got - want| / |want| in float64, for a gradient of experts the largest one of an expert."""
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    dims = tuple(range(1, want.ndim)) if name in BY_EXPERT else None
    off = np.sqrt(((got - want) ** 2).sum(dims))
    norm = np.sqrt((want**2).sum(dims))
    # An expert whose gradient is a rounding error of the others has no relative error of its own.
    floor = max(1e-3 * float(np.max(norm, initial=0.0)), 1e-30)
    return float(np.max(off / np.maximum(norm, floor), initial=0.0))


def make_programs(case: Case, kernels: str) -> Programs:
    """Returns the programs of a case, for all of its draws."""
    ours = by_moax(case, kernels)
    return Programs(ours, ours if kernels == "xla" else by_moax(case, "xla"), by_reference(case))


def check(case: Case, programs: Programs, inputs: dict) -> tuple[bool, dict]:
    """Returns whether a case is right, and {name: (error of the kernels, error of XLA)}."""
    ours = jax.device_get(programs.ours(inputs))
    run = programs.reference
    if programs.xla is programs.ours:
        xla = ours
    else:
        xla = jax.device_get(programs.xla(inputs))

    def errors_of(got: dict) -> dict[str, float]:
        """Returns the largest error of a layer, by name; a NaN stays one."""
        layers = []
        for i in range(len(inputs["x"])):
            own, mine = (jax.tree.map(lambda v, i=i: v[i], tree) for tree in (inputs, got))
            want = jax.device_get(run(own, mine["experts"]))
            layers.append(
                {name: error(name, mine[name], want[name]) for name in want if name != "experts"},
            )
        return {name: float(np.max([layer[name] for layer in layers])) for name in layers[0]}

    of_ours = errors_of(ours)
    of_xla = errors_of(xla)
    errors = {name: (of_ours[name], of_xla[name]) for name in of_ours}
    of_y, of_gradients = BOUNDS[case.recipe]
    jump = JUMP if case.config.activation in KINKED else 0.0
    bounds = {name: (of_y, 0.0) if name == "y" else (of_gradients, jump) for name in errors}
    worse = []
    wide = []
    for name, (our_error, xla_error) in errors.items():
        if not our_error <= WORSE * xla_error + ROUNDING + bounds[name][1]:
            worse.append(name)
        if not xla_error <= sum(bounds[name]):
            wide.append(name)
    # One token's gradient of the router may be a difference of equals.
    if wide and not worse and case.recipe is not None:
        rounded = errors_of(round_weights(case, inputs, run, ours["experts"]))
        wide = [name for name in wide if not errors[name][1] <= CONDITION * rounded[name]]
    return not worse and not wide, errors


def run_seed(seed: int, indices: list[int], kernels: str, tiny: bool) -> list[dict[str, Any]]:
    """Runs draws of the case of a seed, and returns their rows: an error that one raises is a wrong result too."""
    case = draw(seed, tiny)
    rows = []
    programs = make_programs(case, kernels)
    for index in indices:
        start = time.monotonic()
        words = ""
        try:
            words, inputs = make_inputs(case, index)
            right, errors = check(case, programs, inputs)
            row = dict(right=right, errors=errors)
        except Exception as why:
            row = dict(right=False, raised=f"{type(why).__name__}: {why}"[:500])
        seconds = round(time.monotonic() - start, 1)
        rows.append(dict(seed=seed, draw=index, case=f"{case} {words}", seconds=seconds) | row)
    jax.clear_caches()
    return rows


def take_gpu(turns: Any, gpus: int) -> None:
    """Lets a process see one of several GPUs: the next one in turn."""
    with turns.get_lock():
        if gpus > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(turns.value % gpus)
        turns.value += 1


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line: each error as that of the kernels / that of XLA."""
    by_name = sorted(row.get("errors", {}).items())
    errors = [f"{name} {ours:.0e}/{xla:.0e}" for name, (ours, xla) in by_name]
    state = "right" if row["right"] else "WRONG"
    name = f"{row['seed']:>5}.{row['draw']} {row['seconds']:5.1f} s"
    return f"{state} {name}  {row['case']}  {' '.join(errors) or row['raised']}"


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 1 if a case is wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add(
        "--seeds",
        default="0:67",
        metavar="FROM:TO",
        help="the seeds, FROM included, or one (default: %(default)s)",
    )
    add("--draws", type=int, default=3, metavar="N", help="cases of a seed (default: %(default)s)")
    add("--draw", type=int, metavar="I", help="only draw I of each seed, counted from 0")
    add("--kernels", default="hopper", help="the implementation (default: %(default)s)")
    add(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="processes at a time (default: one a core)",
    )
    add(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that the processes share (default: %(default)s)",
    )
    add("--seconds", type=float, metavar="S", help="end after so many seconds, whatever still runs")
    add("--tiny", action="store_true", help="sizes for a CPU")
    add("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    add("--sha", help="the tested commit (default: git tells it)")
    args = parser.parse_args(argv)
    first_seed, *last = map(int, args.seeds.split(":"))
    seeds = range(first_seed, last[0] if last else first_seed + 1)
    indices = list(range(args.draws)) if args.draw is None else [args.draw]
    # The processes share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    command = ["python", "-m", "benchmarks.fuzz", *(sys.argv[1:] if argv is None else argv)]
    head = header(command, args.sha, {}) if args.out else {}

    start = time.monotonic()
    rows = []
    died = False
    spawn = multiprocessing.get_context("spawn")
    turns = spawn.Value("i", 0)
    pool = concurrent.futures.ProcessPoolExecutor(args.jobs, spawn, take_gpu, (turns, args.gpus))
    waiting = [pool.submit(run_seed, seed, indices, args.kernels, args.tiny) for seed in seeds]
    try:
        for done in concurrent.futures.as_completed(waiting, args.seconds):
            for row in done.result():
                rows.append(row)
                print(line(row), flush=True)
            if args.out:  # a run that is cut leaves what ended
                args.out.write_text(json.dumps(head | dict(rows=rows), indent=1) + "\n")
    except TimeoutError:
        print(f"The time of {args.seconds:.0f} s is over.")
    except concurrent.futures.BrokenExecutor as why:
        died = True
        print(f"A process died: {why}")
    processes = multiprocessing.active_children()
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()
    wrong = sorted(f"{row['seed']}.{row['draw']}" for row in rows if not row["right"])
    missing = sorted(set(seeds) - {row["seed"] for row in rows})
    total = len(seeds) * len(indices)
    seconds = time.monotonic() - start
    right = len(rows) - len(wrong)
    print(f"{len(rows)} cases of {total} ended in {seconds:.0f} s: {right} right, {len(wrong)} wrong")
    not_run = " ".join(map(str, missing)) or "none"
    print(f"wrong: {' '.join(wrong) or 'none'}; seeds that did not run: {not_run}")
    return int(bool(wrong) or died or not rows)


if __name__ == "__main__":
    sys.exit(main())
