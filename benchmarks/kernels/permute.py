"""`python -m benchmarks permute`: gathering the rows of tokens by expert, and the weighted sum of each token's rows.

    gather           rows[n] = x[source[n]]                             forward, and backward of the sum
    gather-sum       y[t] = sum_k weights[t, k] rows[position[t, k]]    forward
    gather-sum plain y[t] = sum_k rows[position[t, k]]                  backward of the gather

The bytes are real rows read plus rows written. The tokens exceed the L2 cache, so that the row of a token is read once
for each of its experts. Those of `qwen3 8192` fit in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import error
from benchmarks.kernels import ours
from benchmarks.kernels.measure import measure
from benchmarks.report import HOPPER, JNP, OURS, Row, compare
from benchmarks.tokens import Tokens
from moax.kernels.hopper.formats import BLOCK, Blocks, make_blocks
from moax.ops import permute
from moax.tune.timing import Repeats

SAMPLE = 64


PERF = (
    Tokens.of("mixtral", "mixtral-8x7b", tokens=32768),
    Tokens.of("qwen3", "qwen3-30b", tokens=32768),
    Tokens.of("mixtral 8192", "mixtral-8x7b", tokens=8192),
    Tokens.of("qwen3 8192", "qwen3-30b", tokens=8192),
    Tokens.of("dsv3", "deepseek-v3", tokens=16384),
    Tokens.of("gpt-oss", "gpt-oss-120b", tokens=32768),
)
TINY = (Tokens("tiny", 64, 96, 4, 2),)


def rows(cases: list[Tokens], peers: bool, repeats: Repeats, found: dict[str, Any]) -> Iterator[Row]:
    """Yields the row of moax, then that of plain jnp, for each case and direction; `found` are the limits."""
    for case in cases:
        for direction, own, plain, args, want, moved in _measurements(case):
            nbytes = 2 * moved * case.width

            def judge(out, want=want):
                some, exact = want
                return error.compare([error.double(out[some])], [exact])

            extra = dataclasses.asdict(case)
            builds = {OURS: (HOPPER, own)} | ({JNP: ("xla", lambda f=plain: jax.jit(f))} if peers else {})
            group = [
                measure(
                    Row("permute", case.name, direction, impl, path=path, extra=extra),
                    build,
                    args,
                    nbytes=nbytes,
                    judge=judge,
                    repeats=repeats,
                    found=found,
                )
                for impl, (path, build) in builds.items()
            ]
            compare(group)
            yield from group


def _sort(case: Tokens):
    """Returns tokens [T, H], and the Plan of their rows."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (case.tokens, case.width), jnp.bfloat16)
    scores = jax.random.uniform(keys[1], (case.tokens, case.experts))
    experts = jax.lax.top_k(scores, case.top_k)[1].astype(jnp.int32)
    return x, jax.jit(lambda x, e: permute(x, e, case.experts, align=BLOCK))(x, experts)[1]


def expert_sorted(case: Tokens) -> tuple[jax.Array, jax.Array, Blocks]:
    """Returns tokens x [T, H], source [N] with the token of each expert-sorted row, and the Blocks of these rows."""
    x, plan = _sort(case)
    return x, plan.source, make_blocks(plan.group_sizes, plan.source.shape[0])


def _measurements(case: Tokens) -> Iterator[tuple[str, Callable, Callable, tuple, tuple, int]]:
    """Yields (direction, moax's kernel, plain jnp, arguments, (sampled rows, their float64 values), rows moved)."""
    keys = jax.random.split(jax.random.key(1))
    x, plan = _sort(case)
    blocks = make_blocks(plan.group_sizes, plan.source.shape[0])
    assigned = case.tokens * case.top_k
    source, position = np.asarray(plan.source), np.asarray(plan.position)
    real = np.flatnonzero(source < case.tokens)
    some = real[np.linspace(0, len(real) - 1, min(len(real), SAMPLE)).astype(np.int64)]
    want = some, error.double(x[source[some]])

    def take(x, source, blocks):
        return jnp.take(x, source, axis=0, mode="fill", fill_value=0)

    yield "gather", ours.gather_rows, take, (x, plan.source, blocks), want, 2 * assigned

    sorted_rows = jax.random.normal(keys[0], (plan.source.shape[0], case.width), jnp.bfloat16)
    weights = jax.random.uniform(keys[1], (case.tokens, case.top_k), jnp.float32)

    def weighted(rows, position, weights):
        factors = jnp.ones(position.shape, jnp.float32) if weights is None else weights
        picked = jnp.take(rows, position, axis=0, mode="fill", fill_value=0)
        return jnp.einsum("tkh,tk->th", picked, factors, preferred_element_type=jnp.float32).astype(rows.dtype)

    some = np.linspace(0, case.tokens - 1, min(case.tokens, SAMPLE)).astype(np.int32)
    picked = error.double(sorted_rows[position[some].reshape(-1)]).reshape(len(some), case.top_k, case.width)
    for direction, by in (("gather-sum", weights), ("gather-sum plain", None)):
        factors = np.ones((len(some), case.top_k)) if by is None else error.double(by[some])
        want = some, np.einsum("tkh,tk->th", picked, factors)
        yield direction, ours.gather_sum, weighted, (sorted_rows, plan.position, by), want, assigned + case.tokens
