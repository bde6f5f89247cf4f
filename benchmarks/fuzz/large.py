"""The fixed cases of T K H above 2^31 elements: every index of a row times a width must have 64 bits.

65,536 tokens, each by 8 of 16 experts of width 7,168, are 524,288 rows of 3.8 G elements, 7.5 GB in bf16. The reference
can't hold them, so it runs on chunks of tokens: y and dx are compared chunk by chunk, with the last tokens in the last
chunk, and the gradients of the weights are sums over the chunks in float32. By `moax.estimate` forward and backward
take 33 GB in bf16 with d_ff 2048, whose rows are sorted before the matmul, 25 GB in FP8, and 13 GB in bf16 with d_ff
512, whose matmul gathers the rows. The results and the reference take about 15 GB beside them.
"""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moax
from benchmarks.fuzz.cases import Case
from benchmarks.fuzz.oracle import BOUNDS, by_moax, error, gradients, program
from moax import reference
from moax.params import param_shapes

CASES = {
    "large/gathered/bf16": (None, 512),
    "large/sorted/bf16": (None, 2048),
    "large/sorted/fp8": ("fp8_block", 2048),
}
CHUNK = 2048  # the tokens of a run of the reference
SEED = 1_000_001
GRADIENTS = ("router", "wi", "wo")


def make_case(name: str, tiny: bool) -> tuple[Case, int]:
    """Returns the case of a name, and the tokens of a chunk."""
    recipe, d_ff = CASES[name]
    config = moax.MoEConfig(d_model=7168, d_ff=d_ff, num_experts=16, top_k=8)
    tokens = 65536
    chunk = CHUNK
    if tiny:
        config = moax.MoEConfig(d_model=96, d_ff=d_ff // 16, num_experts=16, top_k=8)
        tokens = 128
        chunk = 32
    case = Case(
        seed=SEED,
        config=config,
        tokens=tokens,
        recipe=recipe,
        buffer_factor=1.25,
        routing=None,
        masked=False,
        quantized=False,
        remat=False,
        way="plain",
        name=name,
    )
    return case, chunk


def make_inputs(case: Case) -> dict[str, Any]:
    """Returns the arrays of a case, which the device draws: NumPy would take minutes."""
    scales = dict(router=case.config.d_model**-0.5, wi=case.config.d_model**-0.5, wo=case.config.d_ff**-0.5)

    def make(key):
        params = {}
        for index, (name, shape) in enumerate(vars(param_shapes(case.config)).items()):
            if shape is not None:
                noise = jax.random.normal(jax.random.fold_in(key, index), (1, *shape), jnp.bfloat16)
                params[name] = (noise * scales[name]).astype(jnp.bfloat16)
        shape = (1, case.tokens, case.config.d_model)
        x, dy = (jax.random.normal(jax.random.fold_in(key, 100 + i), shape, jnp.bfloat16) for i in range(2))
        return dict(params=moax.MoEParams(**params), x=x, dy=dy)

    arrays = jax.jit(make)(jax.random.key(case.seed))
    return arrays | dict(ids=None, weights=None, mask=None)


def check_large(name: str, kernels: str, tiny: bool) -> dict[str, Any]:
    """Runs a case and returns its row, with the largest error of a chunk for y and dx, and those of the last one."""
    start = time.monotonic()
    case, chunk = make_case(name, tiny)
    inputs = make_inputs(case)
    ours = by_moax(case, kernels)(inputs)
    errors = compare_chunks(case, inputs, ours, chunk)
    of_y, of_gradients = BOUNDS[case.recipe]
    wrong = []
    for result, value in errors.items():
        bound = of_y if result.startswith("y") else of_gradients
        if not value <= bound:
            wrong.append(result)
    seconds = round(time.monotonic() - start, 1)
    pairs = {result: (value, value) for result, value in errors.items()}
    return dict(seed=name, draw=0, case=str(case), seconds=seconds, right=not wrong, errors=pairs)


def compare_chunks(case: Case, inputs: dict, ours: dict, chunk: int) -> dict[str, float]:
    """Returns the errors of the results of all tokens, beside the reference on each chunk of tokens."""

    def run_chunk(inputs, ours, sums, first):
        params = jax.tree.map(lambda v: v[0], inputs["params"])
        arrays = [inputs["x"], inputs["dy"], ours["experts"], ours["y"], ours["dx"]]
        chunks = [jax.lax.dynamic_slice_in_dim(value[0], first, chunk) for value in arrays]
        x, dy, experts, y, dx = chunks

        def block(params, x, _):
            return reference.moe(x, params, case.config, experts=experts)[0], experts

        params, x = jax.tree.map(lambda v: v.astype(jnp.float32), (params, x))
        want = gradients(block, params, x, None, dy)
        off = [_relative(value, want[result]) for result, value in (("y", y), ("dx", dx))]
        return jnp.stack(off), [total + want[result] for total, result in zip(sums, GRADIENTS, strict=True)]

    run_chunk = program(run_chunk)
    sums: Any = []
    for result in GRADIENTS:
        shape = getattr(inputs["params"], result).shape[1:]
        sums.append(jnp.zeros(shape, jnp.float32))
    rows = []
    for first in range(0, case.tokens, chunk):
        off, sums = run_chunk(inputs, ours, sums, first)
        rows.append(np.asarray(off))
    errors = {}
    for result, column in (("y", 0), ("dx", 1)):
        errors[result] = float(np.max([row[column] for row in rows]))
        errors[f"{result} of the last"] = float(rows[-1][column])
    for result, total in zip(GRADIENTS, sums, strict=True):
        errors[result] = error(result, ours[result][0], total)
    return errors


def _relative(value, want):
    """Returns |value - want| / |want| in float32."""
    off = value.astype(jnp.float32) - want
    return jnp.sqrt((off**2).sum() / (want**2).sum())
