"""Plants faults in moax one by one, and shows that the tests of `make test` see each.

    scripts/mutants.py                   every fault, each against the tests that are to kill it
    scripts/mutants.py NAME [NAME ...]   these faults
    scripts/mutants.py --table FILE      writes what was found as a table

A fault is a text that occurs once in one file of src/moax, and what is put in its place. The tests run on a copy of the
sources with the fault. Those that failed run on the sources themselves at the end: a test that fails without a fault
kills nothing. The exit code is 1 if a fault survives, if a text does not occur exactly once, or if such a test fails.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = 600  # a run of tests that takes longer has hung, which counts as seen


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault: `old` in the file src/moax/`path` becomes `new`; `tests` are the tests that are to see it."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


MOE = "tests/block/test_moe.py"
PRODUCTS = "tests/ops/test_grouped_matmul.py"
DENSE = "tests/ops/test_dense.py"
PERMUTE = "tests/ops/test_permute.py"
QUANTIZE = "tests/ops/test_quantize.py"
ROUTE = "tests/ops/test_route.py"
EXCHANGE = "tests/ops/test_exchange.py"
GATHERED = "tests/block/test_gathered.py"
BEHAVIOUR = "tests/block/test_moe_behaviour.py"

ROUNDS = "tests/block/test_rounds.py::test_every_routing_is_exact[2x4-custom_partitioning-all_to_all]"
# fmt: off
FAULTS = (
    Fault("backward does not wait for the rounds of forward on a CPU", "block/rounds.py",
          'if not collectives_may_race():', "if True:",
          ("tests/block/test_rounds.py::test_backward_waits_for_the_rounds_of_forward",)),
    Fault("a round of the loop takes the rows of the round before it again", "block/rounds.py",
          "next_start = start + max_rows", "next_start = start + max_rows // 2", (ROUNDS,)),
    Fault("the gradients of a later round replace those before it", "block/rounds.py",
          "dx_sum + dx.astype(dx_sum.dtype),", "dx.astype(dx_sum.dtype),", (ROUNDS,)),
    Fault("the gradients of weights of a later round replace those before it", "block/rounds.py",
          "halfway, w, dy, dw)", "halfway, w, dy, Weights(None, None))", (ROUNDS,)),
    Fault("sorted rows of the first round that do not fit are lost", "block/rounds.py",
          "(scatter_idx < num_rows)", "(scatter_idx <= num_rows)", (ROUNDS,)),
    Fault("a later round computes again what the first one computed", "block/rounds.py",
          "jnp.where(is_computed > 0,", "jnp.where(is_computed > 1,", (ROUNDS,)),
    Fault("a psum over tp is dropped from the block's output", "block/experts.py",
          "(tp, tokens, (), ())", "((), tokens, (), ())",
          (f"{MOE}::test_covering[tp2x2x2-explicit-all_gather-experts-None-plain-1.25]",)),
    Fault("an op leaves its results partial sums over the axes that split its operands alone", "mesh/op.py",
          "tokens if tokens_are_split and not any(spec) else ()", "()", (f"{ROUTE}::test_on_mesh",)),
    Fault("an op sums a result also over the axes that split the result", "mesh/op.py",
          "tokens if tokens_are_split and not any(spec) else ()", "tokens if tokens_are_split else ()",
          (f"{ROUTE}::test_on_mesh",)),
    Fault("the gradient of a weight is not summed over the replicas of dp", "ops/weights.py",
          "tuple(name for name in weight.axes.replica_axes if name not in gathered)",
          "tuple(name for name in weight.axes.fsdp if name not in gathered)",
          (f"{PRODUCTS}::test_on_mesh[explicit-dp2x2x2-model-None]",)),
    Fault("fsdp and ep change places in the specs of experts", "params.py",
          "experts = ep + resolved.fsdp", "experts = resolved.fsdp + ep",
          ("tests/mesh/test_sharding.py::test_param_specs",)),
    Fault("each element takes the scale of the block before its own", "kernels/scales.py",
          "jnp.repeat(scale, b, axis=dim)",
          "jnp.repeat(jnp.roll(scale, 1, axis=dim), b, axis=dim)",
          (f"{QUANTIZE}::test_matches_numpy",)),
    Fault("shards that share a block of a weight do not agree on its maximum", "kernels/xla/operands.py",
          "reduce_max(blocks[:, :num_row_blocks], sum(gather[1:], ()))", "blocks[:, :num_row_blocks]",
          ("tests/mesh/test_partition.py::test_a_block_that_shards_share_has_one_scale",)),
    Fault("a value that is not finite spoils the scale of its block", "kernels/scales.py",
          "x = jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)", "x = jnp.abs(x)",
          (f"{QUANTIZE}::test_not_finite_stays_where_it_is",)),
    Fault("scales that are powers of two are rounded down", "kernels/scales.py", "(bits + 0x7FFFFF) & ~0x7FFFFF",
          "bits & ~0x7FFFFF", (f"{QUANTIZE}::test_matches_numpy",)),
    Fault("backward keeps the weight that forward gathered: nothing is between both gathers", "ops/weights.py",
          'waits = after or static.use == "dgrad"', "waits = after",
          (f"{PRODUCTS}::test_collectives[shard_map-experts-fp8_block]",)),
    Fault("the block's backward keeps the weights that forward gathered", "ops/weights.py",
          'waits = after or static.use == "dgrad"', "waits = False",
          ("tests/block/test_compiled.py::test_weights_cross_as_bytes",)),
    Fault("the wire of wo does not wait for the routing, and stands before that of wi", "ops/weights.py",
          'waits = after or static.use == "dgrad"', 'waits = static.use == "dgrad"',
          ("tests/block/test_compiled.py::test_the_weight_that_is_read_first_crosses_first",)),
    Fault("a scan copies each layer's weights out of their stack where no wire needs it", "ops/weights.py",
          "if waits and (is_made or is_gathered):", "if waits:",
          ("tests/block/test_compiled.py::test_no_weight_that_stays_is_behind_a_barrier",)),
    Fault("a sorted row lies one row after the place that the plan says", "kernels/xla/__init__.py",
          'gather_idx.at[scatter_idx].set(received, mode="drop")',
          'gather_idx.at[scatter_idx + 1].set(received, mode="drop")',
          (f"{PERMUTE}::test_plan",)),
    Fault("a drop by the rank's capacity is not counted", "block/chain.py", "received.dropped + saved.plan.dropped",
          "received.dropped", (f"{BEHAVIOUR}::test_drops_equal_a_numpy_count",)),
    Fault("a drop by the slots of a pair of ranks is not counted", "block/chain.py",
          "received.dropped + saved.plan.dropped", "saved.plan.dropped",
          (f"{BEHAVIOUR}::test_drops_equal_a_numpy_count",)),
    Fault("the capacity is that of a rank in the place of a pair of ranks", "exchange/transport.py",
          "math.ceil(capacity_factor * tokens * top_k / ranks)", "math.ceil(capacity_factor * tokens * top_k)",
          (f"{EXCHANGE}::test_drops_are_counted",)),
    Fault("padding reaches the gradient of a weight", "kernels/xla/__init__.py",
          "rows, d_rows = (zero_rows(v, (row >= start) & (row < end)) for v in operands)", "rows, d_rows = operands",
          (f"{PRODUCTS}::test_group_sizes[nothing divides-1-(24,)]",)),
    Fault("wgrad is transposed, and reshaped to the weight's shape", "ops/matmul.py",
          "dw = kernels.wgrad(wgrad_x, wgrad_dy, groups, dtype, weight.grad_dtype)",
          "dw = kernels.wgrad(wgrad_dy, wgrad_x, groups, dtype, weight.grad_dtype)",
          (f"{PRODUCTS}::test_group_sizes[nothing divides-1-(24,)]",)),
    Fault("gradients of weights leave in float32 in the place of the activations' dtype", "block/experts.py",
          "(None if d is None else d.astype(p.wi.grad_dtype) for d in (d_wi, d_wo))",
          "(None if d is None else d.astype(jax.numpy.float32) for d in (d_wi, d_wo))",
          ("tests/block/test_compiled.py::test_weight_gradients_are_reduce_scattered",)),
    Fault("the bias of the second product is added by every rank of tp", "block/small_terms.py",
          "return None if w.bo is None else mask_to_first_rank(w.bo, p.axes.tp)", "return w.bo",
          (f"{MOE}::test_covering[tp2x2x2-custom_partitioning-all_gather-model-fp8_block-full-1.25]",)),
    Fault("the counts of the balance loss are those of one shard", "ops/router.py", "t e, e, @t -> t k, t k, @, @",
          "t e, e, @t -> t k, t k, @, @t", (f"{ROUTE}::test_on_mesh",)),
    Fault("padding is routed and counted", "ops/router.py",
          "experts = jnp.where(choice.mask[:, None], experts, num_experts)",
          "experts = jnp.where(choice.mask[:, None], experts, experts)",
          ("tests/block/test_mask.py::test_padding_is_not_there",)),
    Fault("an expert that a token names twice has the weight of its first place alone", "block/routing.py",
          "total = jnp.where(same, weights[:, None, :], 0.0).sum(-1)", "total = weights",
          ("tests/block/test_routing.py::test_twins_and_no_expert",)),
    Fault("group-limited routing chooses among all experts", "ops/router.py",
          "scores = jnp.where(eligible[:, :, None], grouped, -jnp.inf).reshape(scores.shape)",
          "scores = jnp.where(eligible[:, :, None], grouped, grouped).reshape(scores.shape)",
          (f"{ROUTE}::test_matches_reference",)),
    Fault("padding between experts repeats the last row", "kernels/xla/operands.py",
          'return jnp.take(x, gather_idx, axis=0, mode="fill", fill_value=0)',
          'return jnp.take(x, gather_idx, axis=0, mode="clip")',
          (f"{PERMUTE}::test_round_trip", f"{PERMUTE}::test_each_shard_sorts_its_own")),
    Fault("the last block of an expert counts one row too many", "kernels/hopper/formats.py",
          "jnp.clip(group_sizes[None] - after * BLOCK, 0, BLOCK)",
          "jnp.clip(group_sizes[None] - after * BLOCK + 1, 0, BLOCK)",
          ("tests/kernels/test_kernels_quantize.py::test_rows_and_columns",)),
    Fault("the FP8 product multiplies every block by the first block's scale of the weight",
          "kernels/hopper/pallas/matmul.py", "return totals, sw_next", "return totals, sw_now",
          ("tests/kernels/test_kernels_matmul.py::test_grouped_matmul_fp8",)),
    Fault("a store past the last column of a narrow product lands in the product", "kernels/hopper/pallas/pipeline.py",
          "for each in types), boxes=2)", "for each in types))",
          ("tests/kernels/test_kernels_narrow.py",)),
    Fault("a fallback from the kernels is not said in the log", "kernels/__init__.py",
          'if refused and find_device().platform == "gpu":', "if False:",
          ("tests/kernels/test_mosaic.py::test_a_fallback_is_said_once",)),
    Fault("the gradient of a gathered weight is laid out as the gathered weight is", "ops/weights.py",
          "layout = find_layout(weight, operand_specs[1], w.ndim)",
          "layout = (find_quantized_layout if weight.gathered else find_layout)(weight)",
          (f"{GATHERED}::test_each_weight_is_gathered_once_a_step",)),
    Fault("the weight that is gathered once for fprop is that of dgrad", "ops/weights.py",
          "zip(USES, quantized, strict=False)", "zip(USES, quantized[::-1], strict=False)",
          (f"{GATHERED}::test_each_weight_is_gathered_once_a_step",)),
    Fault("a block takes weights whose scales belong to the parts of another tp", "block/plan.py",
          "if quantized.tp != tp and plan.recipe.w is not None:", "if False:",
          ("tests/block/test_kept.py::test_of_another_tp",)),
)
# fmt: on


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a fault: the first test that failed with it, or None, and how long the tests took."""

    fault: Fault
    killer: str | None
    seconds: float


def plant(fault: Fault, folder: Path) -> None:
    """Copies the sources into `folder`, with the fault."""
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "src" / "moax" / fault.path
    text = path.read_text()
    if not fault.old or text.count(fault.old) != 1:
        count = text.count(fault.old)
        raise ValueError(f"{fault.name}: {fault.path} has its text {count} times; it must have it once")
    path.write_text(text.replace(fault.old, fault.new))


def run_tests(source: Path, tests: tuple[str, ...], *options: str) -> tuple[int, str]:
    """Returns the exit code and the output of pytest on these tests, up to the first failure, with the sources of a
    folder."""
    command = [sys.executable, "-m", "pytest", "-x", "-q"]
    command += ["-p", "no:cacheprovider", "--no-header", *options, *tests]
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, "FAILED (did not end)"
    return done.returncode, done.stdout + done.stderr


def try_fault(fault: Fault) -> Outcome:
    """Runs the tests on a copy of the sources with the fault."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        plant(fault, Path(folder))
        code, output = run_tests(Path(folder) / "src", fault.tests)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, re.M)
    if code not in (0, 1, 2):
        raise ValueError(f"{fault.name}: pytest ended with {code}:\n{output[-2000:]}")
    if code == 0:
        killer = None
    else:
        killer = failed.group(1) if failed else "collection"
    return Outcome(fault, killer, time.monotonic() - start)


def table(outcomes: list[Outcome]) -> str:
    """Returns the outcomes as a table of Markdown."""
    rows = []
    for outcome in outcomes:
        killer = f"`{outcome.killer}`" if outcome.killer else "**none**"
        rows.append(f"| {outcome.fault.name} | `{outcome.fault.path}` | {killer} |")
    return "\n".join(["| fault | in | killed by |", "|---|---|---|", *rows]) + "\n"


def main() -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="parts of the names of faults (default: all)",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=2,
        help="faults at a time (default: %(default)s)",
    )
    parser.add_argument("--table", type=Path, help="write the table to this file")
    args = parser.parse_args()
    chosen = FAULTS
    if args.names:
        chosen = [fault for fault in FAULTS if any(name in fault.name for name in args.names)]

    outcomes = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        for outcome in pool.map(try_fault, chosen):
            print(
                f"{outcome.killer or 'SURVIVED':70} {outcome.seconds:5.0f} s  {outcome.fault.name}",
                flush=True,
            )
            outcomes.append(outcome)
    if args.table:
        args.table.write_text(table(outcomes))
    killers = tuple(dict.fromkeys(o.killer for o in outcomes if o.killer and "::" in o.killer))
    code = 0
    output = "no test failed"
    if killers:
        code, output = run_tests(ROOT / "src", killers, "-n", str(args.jobs))
    if code != 0:
        print(f"without a fault they fail too:\n{output[-3000:]}")
        return 1
    print(f"without a fault: {output.strip().splitlines()[-1]}")
    alive = [outcome for outcome in outcomes if outcome.killer is None]
    print(f"{len(outcomes) - len(alive)} passed, {len(alive)} failed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
