"""`python -m benchmarks.fuzz`: random blocks by the kernels, beside XLA and beside float32.

    python -m benchmarks.fuzz --seeds 0:200                        the Hopper kernels, on a Hopper GPU
    python -m benchmarks.fuzz --seeds 0:8 --kernels xla --tiny     the program itself, on any machine

A seed names one case. Each case runs forward and backward three times: by the kernels, by XLA with the same recipe, and
by `moax.reference` in float32 with the same experts. The error of the kernels may not be much larger than that of XLA,
and that of XLA may not exceed a bound by recipe. A line has the errors of both, and the exit code is 1 if a case is
wrong. Several processes share a GPU, because compilation takes most of the time.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

import moax
from benchmarks.block.errors import ONCE
from benchmarks.report import header
from moax import reference
from moax.config import GATED, UNGATED
from moax.params import param_shapes

RECIPES = (None, "fp8_block", "mxfp8", "fp8_tensor")
WIDE = (640, 768, 1024, 1408, 1536, 2048, 2880, 4096)
BUFFER_FACTORS = (0.1, 0.5, 1.0, 1.25, 2.0, None)
ELEMENTS = 1 << 27  # of the largest array that the reference holds, and of a weight
LEADING = 2  # the steps of a scan, and the size of a batch of vmap
# The errors that a recipe may cost: that of y, and that of a gradient.
BOUNDS = {None: (0.02, 0.05), "fp8_block": (0.15, 0.6), "mxfp8": (0.15, 0.6), "fp8_tensor": (0.3, 0.8)}
WORSE, ROUNDING = 1.5, 0.01  # the kernels may round other sums than XLA does
# The derivative of these jumps, so that a rounding changes whole columns of an expert that has few rows.
KINKED = ("reglu", "relu", "relu6", "leaky_relu", "hard_tanh", "hard_silu", "hard_swish", "celu", "selu", "swiglu_oai")
JUMP = 0.3
ROUNDED = 2.0**-4  # the relative rounding of e4m3
CONDITION = 3.0  # how much more than such a rounding of the weights a recipe may cost an ill-conditioned gradient
BY_EXPERT = ("wi", "wo", "bi", "bo")


@dataclasses.dataclass(frozen=True)
class Case:
    """One random block.

    Attributes:
      seed: the seed of the case and of its values.
      config: the block.
      tokens: T.
      recipe, buffer_factor, chunks: options of `moax.moe`.
      given: None, "experts", or "weights" for experts with weights: what the caller gives in place of a routing.
      skew: how unequal the loads of given experts are; 0 is equal.
      masked: whether a third of the tokens is padding, full of NaN.
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
    skew: float
    masked: bool
    quantized: bool
    remat: bool
    way: str
    chunks: int

    def __str__(self) -> str:
        c = self.config
        words: list[str] = [
            f"{self.recipe or 'bf16'} T{self.tokens} H{c.d_model} F{c.d_ff} E{c.num_experts} K{c.top_k}"
        ]
        words += [str(c.activation), f"weights_at={c.weights_at}", f"{c.router.score}/{c.router.order}", self.way]
        words += [f"buffer={self.buffer_factor}"] * (self.buffer_factor != 1.25)
        words += [f"chunks={self.chunks}"] * (self.chunks > 1)
        words += [f"given={self.given}/{self.skew:.1f}"] * (self.given is not None)
        flags = dict(bias=c.use_bias, mask=self.masked, quantized=self.quantized, remat=self.remat)
        return " ".join([*words, *(name for name, on in flags.items() if on)])


def draw(seed: int, tiny: bool = False) -> Case:
    """Returns the case of a seed. A tiny one has sizes that a CPU computes in a moment."""
    rng = np.random.default_rng(seed)

    def log_uniform(most: int) -> int:
        return int(np.exp(rng.uniform(0, np.log(most + 1))))

    def width() -> int:
        narrow = 32 * int(rng.integers(1, 17))
        wide = int(rng.choice(WIDE))
        return 32 * int(rng.integers(1, 5)) if tiny else narrow if rng.random() < 0.75 else wide

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    d_model, d_ff = width(), width()
    tokens, experts = log_uniform(4096), log_uniform(256)
    experts = max(1, min(experts, ELEMENTS // (3 * d_model * d_ff)))
    tokens = max(1, min(tokens, ELEMENTS // (experts * (d_model + 3 * d_ff))))
    if tiny:
        tokens, experts = 1 + tokens % 96, 1 + experts % 16
    top_k = int(rng.integers(1, min(8, experts) + 1))
    activation = str(rng.choice(GATED if chance(0.6) else UNGATED))
    weights_at: Any = str(rng.choice(["output", "hidden", "input"], p=[0.5, 0.25, 0.25]))
    score: Any = str(rng.choice(["softmax", "sigmoid", "sqrt_softplus"]))
    router = moax.RouterConfig(
        score=score,
        order="topk_then_score" if top_k > 1 and chance(0.3) else "score_then_topk",
    )
    use_bias = chance(0.3) and weights_at != "input"
    config = moax.MoEConfig(
        d_model, d_ff, experts, top_k, activation=activation, weights_at=weights_at, use_bias=use_bias, router=router
    )
    recipe = RECIPES[rng.integers(len(RECIPES))]
    return Case(
        seed=seed,
        config=config,
        tokens=tokens,
        recipe=recipe,
        buffer_factor=BUFFER_FACTORS[rng.integers(len(BUFFER_FACTORS))] if chance(0.5) else 1.25,
        given=str(rng.choice(["experts", "weights"])) if chance(0.4) else None,
        skew=float(rng.choice([0.0, 1.0, 4.0])),
        masked=chance(0.25),
        quantized=recipe is not None and chance(0.4),
        remat=chance(0.3),
        way=str(rng.choice(["plain", "scan", "vmap"], p=[0.6, 0.2, 0.2])),
        chunks=2 if chance(0.2) else 1,
    )


def make_inputs(case: Case) -> dict[str, Any]:
    """Returns the arrays of a case, each with a leading dim of layers.

    They are params, x, dy, ids and weights (None where the router decides), and mask (None where all tokens are real).
    """
    c, rng, layers = case.config, np.random.default_rng([case.seed, 1]), 1 if case.way == "plain" else LEADING

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal((layers, *shape), np.float32)).astype(jnp.bfloat16)

    # Arrays of NumPy: each operation of JAX outside of `jax.jit` would be a program to compile.
    scales = dict(router=c.d_model**-0.5, wi=c.d_model**-0.5, wo=c.d_ff**-0.5)
    shapes = param_shapes(c)
    made = {n: normal(*shape, scale=scales.get(n, 1.0)) for n, shape in vars(shapes).items() if shape is not None}
    params = moax.MoEParams(**made)
    x, dy = (normal(case.tokens, c.d_model) for _ in range(2))
    ids = weights = mask = None
    if case.given:
        load = np.arange(1, c.num_experts + 1) ** -case.skew
        noise = rng.gumbel(size=(layers, case.tokens, c.num_experts)) + np.log(load)
        ids = np.argsort(-noise, axis=-1)[..., : c.top_k].astype(np.int32)
        if case.given == "weights":
            nobody = rng.random(ids.shape) < 0.1
            ids = np.where(nobody, c.num_experts, ids).astype(np.int32)
            weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
    if case.masked:
        mask = rng.random((layers, case.tokens)) < 0.67
    return dict(params=params, x=x, dy=dy, ids=ids, weights=weights, mask=mask)


def gradients(f: Callable, params, x, weights, dy) -> dict[str, Any]:
    """Returns y and the gradients of f(params, x, weights) -> (y, aux), by name, and aux under "experts"."""
    y, pull, experts = jax.vjp(f, params, x, weights, has_aux=True)
    d_params, dx, d_weights = pull(dy.astype(y.dtype))
    names = ("router", *BY_EXPERT)
    found = dict(y=y, dx=dx, weights=d_weights, experts=experts) | {n: getattr(d_params, n) for n in names}
    return {name: value for name, value in found.items() if value is not None}


def by_moax(case: Case, kernels: str) -> Callable[[dict], dict]:
    """Returns the function of the inputs that runs the block by an implementation, over all layers."""
    how = dict(recipe=case.recipe, buffer_factor=case.buffer_factor, chunks=case.chunks)
    options = moax.Options(kernels=kernels, **how)

    def one(inputs: dict) -> dict:
        def block(params, x, weights):
            ids, quantized = inputs["ids"], None
            if case.quantized:
                frozen = jax.lax.stop_gradient(params)
                quantized = moax.quantize_params(frozen, case.config, options)
            routing = ids if weights is None else (ids, weights)
            how = dict(mask=inputs["mask"], routing=routing, quantized=quantized, return_routing=True)
            y, stats = moax.moe(x, params, case.config, options, **how)
            return y, cast(moax.Routing, stats.routing).experts

        block = jax.checkpoint(block) if case.remat else block
        x = inputs["x"]
        x = x if inputs["mask"] is None else jnp.where(inputs["mask"][:, None], x, jnp.nan)
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
        real = jnp.ones(case.tokens, bool) if inputs["mask"] is None else inputs["mask"]
        kept = (experts < case.config.num_experts) & real[:, None]

        def block(params, x, weights):
            args = dict(experts=experts, weights=weights, kept=kept)
            return reference.moe(x, params, case.config, **args)[0] * real[:, None], experts

        wide = jax.tree.map(lambda v: v.astype(jnp.float32), (inputs["params"], inputs["x"]))
        return gradients(block, wide[0], wide[1], inputs["weights"], inputs["dy"])

    return program(run)


def round_weights(case: Case, inputs: dict, run: Callable, experts) -> dict[str, Any]:
    """Returns the reference's results with wi and wo off by a random relative ROUNDED: a measure of the condition."""
    rng, params = np.random.default_rng([case.seed, 2]), inputs["params"]
    noisy = {
        n: getattr(params, n) * (1 + ROUNDED * rng.standard_normal(getattr(params, n).shape)) for n in ("wi", "wo")
    }
    params = dataclasses.replace(params, **{n: v.astype(jnp.bfloat16) for n, v in noisy.items()})
    layers = []
    for i in range(len(inputs["x"])):
        own = jax.tree.map(lambda v, i=i: v[i], inputs | dict(params=params))
        layers.append(jax.device_get(run(own, experts[i])))
    return jax.tree.map(lambda *of: np.stack(of), *layers)


def program(run: Callable) -> Callable:
    """Returns `run` as a program that XLA compiles without timing kernels of its own: it runs once or twice."""
    return jax.jit(run, compiler_options=ONCE if jax.default_backend() == "gpu" else None)


def error(name: str, got, want) -> float:
    """Returns |got - want| / |want| in float64, for a gradient of experts the largest one of an expert."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    dims = tuple(range(1, want.ndim)) if name in BY_EXPERT else None
    off, norm = np.sqrt(((got - want) ** 2).sum(dims)), np.sqrt((want**2).sum(dims))
    # An expert whose gradient is a rounding error of the others has no relative error of its own.
    floor = max(1e-3 * float(np.max(norm, initial=0.0)), 1e-30)
    return float(np.max(off / np.maximum(norm, floor), initial=0.0))


def check(case: Case, kernels: str) -> tuple[bool, dict[str, tuple[float, float]]]:
    """Returns whether a case is right, and {name: (error of the kernels, error of XLA)}."""
    inputs, run = make_inputs(case), by_reference(case)
    ours = jax.device_get(by_moax(case, kernels)(inputs))
    xla = ours if kernels == "xla" else jax.device_get(by_moax(case, "xla")(inputs))

    def errors_of(got: dict) -> dict[str, float]:
        """Returns the largest error of a layer, by name; a NaN stays one."""
        layers = []
        for i in range(len(inputs["x"])):
            own, mine = (jax.tree.map(lambda v, i=i: v[i], tree) for tree in (inputs, got))
            want = jax.device_get(run(own, mine["experts"]))
            layers.append({name: error(name, mine[name], want[name]) for name in want if name != "experts"})
        return {name: float(np.max([layer[name] for layer in layers])) for name in layers[0]}

    of_ours, of_xla = errors_of(ours), errors_of(xla)
    found = {name: (of_ours[name], of_xla[name]) for name in of_ours}
    of_y, of_gradients = BOUNDS[case.recipe]
    jump = JUMP if case.config.activation in KINKED else 0.0
    bounds = {name: (of_y, 0.0) if name == "y" else (of_gradients, jump) for name in found}
    worse = [name for name, (ours, xla) in found.items() if not ours <= WORSE * xla + ROUNDING + bounds[name][1]]
    wide = [name for name, (_, xla) in found.items() if not xla <= sum(bounds[name])]
    if (
        wide and not worse and case.recipe is not None
    ):  # one token's gradient of the router may be a difference of equals
        rounded = errors_of(round_weights(case, inputs, run, ours["experts"]))
        wide = [name for name in wide if not found[name][1] <= CONDITION * rounded[name]]
    return not worse and not wide, found


def run_seed(seed: int, kernels: str, tiny: bool) -> dict[str, Any]:
    """Runs the case of a seed, and returns its row: an error that it raises is a wrong result too."""
    start, case = time.monotonic(), draw(seed, tiny)
    try:
        right, found = check(case, kernels)
        row = dict(right=right, errors=found)
    except Exception as why:
        row = dict(right=False, raised=f"{type(why).__name__}: {why}"[:500])
    jax.clear_caches()
    return dict(seed=seed, case=str(case), seconds=round(time.monotonic() - start, 1)) | row


def take_gpu(turns: Any, gpus: int) -> None:
    """Lets a process see one of several GPUs: the next one in turn."""
    with turns.get_lock():
        if gpus > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(turns.value % gpus)
        turns.value += 1


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line: each error as that of the kernels / that of XLA."""
    errors = [f"{name} {ours:.0e}/{xla:.0e}" for name, (ours, xla) in sorted(row.get("errors", {}).items())]
    state = "right" if row["right"] else "WRONG"
    return f"{state} {row['seed']:>5} {row['seconds']:5.1f} s  {row['case']}  {' '.join(errors) or row['raised']}"


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 1 if a case is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", default="0:200", metavar="FROM:TO", help="the seeds, FROM included (default: %(default)s)")
    add("--kernels", default="hopper", help="the implementation (default: %(default)s)")
    add("--jobs", type=int, default=os.cpu_count(), metavar="N", help="processes at a time (default: one a core)")
    add("--gpus", type=int, default=1, metavar="N", help="GPUs that the processes share (default: %(default)s)")
    add("--seconds", type=float, metavar="S", help="start no case after so many seconds")
    add("--tiny", action="store_true", help="sizes for a CPU")
    add("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    add("--sha", help="the tested commit (default: git tells it)")
    args = parser.parse_args(argv)
    first, last = map(int, args.seeds.split(":"))
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPU's memory
    command = ["python", "-m", "benchmarks.fuzz", *(sys.argv[1:] if argv is None else argv)]
    head = header(command, args.sha, {}) if args.out else {}

    def find_wrong() -> list[int]:
        return sorted(row["seed"] for row in rows if not row["right"])

    stop, rows = time.monotonic() + (args.seconds or float("inf")), []
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(args.jobs, spawn, take_gpu, (spawn.Value("i", 0), args.gpus)) as pool:
        waiting = {pool.submit(run_seed, seed, args.kernels, args.tiny) for seed in range(first, last)}
        for done in concurrent.futures.as_completed(waiting):
            if done.cancelled():
                continue
            rows.append(done.result())
            print(line(rows[-1]), flush=True)
            if args.out:  # a run that is cut leaves what ended
                sorted_rows = sorted(rows, key=lambda row: row["seed"])
                args.out.write_text(json.dumps(head | dict(wrong=find_wrong(), rows=sorted_rows), indent=1) + "\n")
            if time.monotonic() > stop:
                for future in waiting:
                    future.cancel()
    wrong = find_wrong()
    print(f"{len(rows)} cases, {len(wrong)} wrong{': seeds ' if wrong else ''}{' '.join(map(str, wrong))}")
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
