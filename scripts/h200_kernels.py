"""Every kernel for Hopper GPUs with operands of the shapes of models: for `h200.py sass`, and tests of the lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.tune import candidates
from moax.kernels.hopper.formats import BLOCK, KMajorFp8, make_blocks
from moax.kernels.hopper.pallas import activation, permute, plan, quantize, tiles
from moax.kernels.hopper.pallas.matmul import grouped_matmul, grouped_matmul_activate
from moax.kernels.hopper.pallas.stages import TileConfig
from moax.kernels.hopper.pallas.wgrad import grouped_wgrad
from moax.models import MODELS

ROWS = 4096
EXPERTS = 8
MIXTRAL, QWEN3, GPT_OSS, DEEPSEEK = (
    MODELS[name].config for name in ("mixtral-8x7b", "qwen3-30b", "gpt-oss-120b", "deepseek-v3")
)
# (contracted K, columns N) of these models, and of shapes that little divides; 32 columns make the gradient of a bias.
SHAPES = (
    (MIXTRAL.d_model, MIXTRAL.d_ff),
    (QWEN3.d_model, 2 * QWEN3.d_ff),
    (QWEN3.d_ff, QWEN3.d_model),
    (GPT_OSS.d_model, 2 * GPT_OSS.d_ff),
    (DEEPSEEK.d_model, DEEPSEEK.d_ff),
    (1408, 96),
    (96, 160),
    (32, 2 * GPT_OSS.d_ff),
)
WIDTHS = (96, QWEN3.d_ff, 1408, QWEN3.d_model, GPT_OSS.d_model, DEEPSEEK.d_model)
BF16 = jnp.bfloat16
F8 = jnp.float8_e4m3fn
F32 = jnp.float32
I32 = jnp.int32


up = lambda n: -(-n // BLOCK)  # noqa: E731


def shapes_of(op: str) -> set[tuple[int, int]]:
    keys = []
    for entries in tiles.read_table().values():
        keys += [key for key in entries if key.split()[0] == op]
    if op == "matmul_transposed":
        turned = {(n, k) for k, n in SHAPES}
    else:
        turned = set(SHAPES)
    return turned | {tuple(int(part[1:]) for part in key.split()[1:3]) for key in keys}


def products(op: str, k: int, n: int, bias: bool = False, total=None, gathers: str = ""):
    """Returns a product of this op as a function of its operands and a tile, and the operands' (shape, dtype)."""
    sizes = ((EXPERTS,), I32)
    transpose = op == "matmul_transposed"
    w = ((EXPERTS, n, k) if transpose else (EXPERTS, k, n), BF16)
    weight = [((EXPERTS, n, k), F8), ((EXPERTS, up(n), up(k)), F32)]
    x = ((ROWS, k), BF16)
    dy = ((ROWS, n), BF16)
    biases = [((EXPERTS, n), BF16)] if bias else []
    sources = [((ROWS,), I32)] if gathers else []
    totals = [] if total is None else [((EXPERTS, k, n), total)]

    def rows(width):
        return [((ROWS, width), F8), ((up(width), ROWS), F32)]

    def columns(width):
        return [((width, ROWS), F8), ((ROWS // BLOCK, up(width) * BLOCK), F32)]

    def blocks(sizes):
        return make_blocks(sizes, ROWS)

    def matmul(a, b, sizes, bias=None, *, tile):
        return grouped_matmul(a, b, blocks(sizes), tile, bias=bias, transpose=transpose)

    def gather_matmul(a, b, sizes, source, *, tile):
        return grouped_matmul(
            a[:512],
            b,
            blocks(sizes),
            tile,
            gather_idx=source,
            transpose=transpose,
        )

    def gather_wgrad(a, b, sizes, source, *, tile):
        if gathers == "x":
            a = a[:512]
        if gathers == "dy":
            b = b[:512]
        return grouped_wgrad(a, b, blocks(sizes), tile, gather_idx=source, gathers=gathers)

    def wgrad(a, b, sizes, total=None, *, tile):
        out = BF16 if total is None else total.dtype
        return grouped_wgrad(a, b, blocks(sizes), tile, out_dtype=out, total=total)

    def matmul_fp8(a, scale_a, b, scale_b, sizes, bias=None, *, tile):
        return grouped_matmul(
            KMajorFp8(a, scale_a),
            KMajorFp8(b, scale_b),
            blocks(sizes),
            tile,
            bias=bias,
        )

    def wgrad_fp8(a, scale_a, b, scale_b, sizes, total=None, *, tile):
        operands = (KMajorFp8(a, scale_a), KMajorFp8(b, scale_b))
        out = BF16 if total is None else total.dtype
        return grouped_wgrad(*operands, blocks(sizes), tile, out_dtype=out, total=total)

    match op:
        case "matmul" | "matmul_transposed":
            return gather_matmul if gathers else matmul, [x, w, sizes, *biases, *sources]
        case "wgrad":
            return gather_wgrad if gathers else wgrad, [x, dy, sizes, *totals, *sources]
        case "matmul_fp8":
            return matmul_fp8, [*rows(k), *weight, sizes, *biases]
        case _:
            return wgrad_fp8, [*columns(k), *columns(n), sizes, *totals]


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def relu2(up):
    return jnp.square(jax.nn.relu(up))


def multiply_activate(x, w, sizes, source=None, *, act, tile):
    if source is not None:
        x = x[:512]
    return grouped_matmul_activate(x, w, make_blocks(sizes, ROWS), tile, act, gather_idx=source)


def with_blocks(fn: Callable, *arguments, **options) -> Callable:
    """Returns `fn` with the group sizes in place of its argument after the operands, the `Blocks`."""
    return lambda *args: fn(*args[:-1], make_blocks(args[-1], ROWS), *arguments, **options)


def with_weights(fn: Callable) -> Callable:
    """Returns the gradient of SwiGLU as a function of its operands, the weights of rows, and the group sizes."""

    def run(*args):
        *operands, weights, sizes = args
        return fn(*operands, make_blocks(sizes, ROWS), swiglu, weights=weights)

    return run


def quantize_gathered(x, source, sizes, **wanted):
    return quantize.quantize_rows(x, make_blocks(sizes, ROWS), gather_idx=source, **wanted)


def place_assignments(experts, weights, *part, groups):
    counted = plan.count_groups(experts, groups)
    rows = 2 * experts.size
    return plan.build_permutation(experts, counted, groups, BLOCK, rows, weights, part or None)


def kernels(
    every_tile: bool = True,
) -> Iterator[tuple[str, Callable, list[tuple[tuple[int, ...], Any]]]]:
    """Yields (name, function, (shape, dtype) of each operand) of every kernel and shape.

    Without `every_tile` a product has the tiles of the table alone, and adds to a total for one shape.
    """
    sizes = ((EXPERTS,), I32)
    for op in tiles.HEURISTIC:
        for k, n in sorted(shapes_of(op)):
            fn, operands = products(op, k, n)
            taken = {tiles.pick_tile(op, k, n, rows, "NVIDIA H200") for rows in (512, 4096, 8192)}
            wanted_tiles = taken
            if every_tile:
                wanted_tiles = taken | set(candidates(op, n))
            for tile in wanted_tiles:
                yield f"{op} {k}x{n} {tile}", functools.partial(fn, tile=tile), operands
            if op.startswith("matmul"):
                fn, operands = products(op, k, n, bias=True)
                for tile in taken:
                    yield f"{op} {k}x{n} {tile} bias", functools.partial(fn, tile=tile), operands
            sixteen_bit = {"wgrad": ("x", "dy")}.get(op, () if op.endswith("fp8") else ("x",))
            if k % 64 or n % 64:
                sixteen_bit = ()
            for gathers in sixteen_bit:
                fn, operands = products(op, k, n, gathers=gathers)
                gather_tiles = taken
                if gathers == "dy":
                    gather_tiles = {tiles.turn_tile(tile, k) for tile in taken}
                for tile in gather_tiles:
                    product = functools.partial(fn, tile=tile)
                    yield f"{op} {k}x{n} {tile} gathers {gathers}", product, operands
            totals = ()
            if op.startswith("wgrad") and (every_tile or (k, n) == (QWEN3.d_model, 2 * QWEN3.d_ff)):
                totals = (BF16, F32)
            for total in totals:
                fn, operands = products(op, k, n, total=total)
                for tile in taken:
                    numbers = f"{tiles.to_numbers(tile)} total {total.__name__}"
                    yield f"{op} {k}x{n} {numbers}", functools.partial(fn, tile=tile), operands
    for k, hidden, tile in (
        (QWEN3.d_model, QWEN3.d_ff, 256),
        (DEEPSEEK.d_model, 1408, 256),
        (1536, 192, 128),
    ):
        for gates, act in ((2, swiglu), (1, relu2)):
            weight = ((EXPERTS, k, gates, hidden), BF16)
            for sources in ([], [((ROWS,), I32)]):
                config = TileConfig(tile, 4 if tile == 256 else 6)
                product = functools.partial(multiply_activate, act=act, tile=config)
                name = f"matmul_activate {k}x{gates}x{hidden} {tile} {'gathers' if sources else ''}"
                yield name, product, [((ROWS, k), BF16), weight, sizes, *sources]
    for config in (MIXTRAL, QWEN3, GPT_OSS, DEEPSEEK):
        choose = functools.partial(plan.top_k_rows, top_k=config.top_k)
        yield f"top_k_rows {config.num_experts}", choose, [((ROWS, config.num_experts), F32)]
        place = functools.partial(place_assignments, groups=config.num_experts)
        for part in ([], [((config.num_experts,), I32)] * 2):
            name = f"build_permutation {config.num_experts}{' of a part' if part else ''}"
            yield name, place, [*(((2 * ROWS, config.top_k), dtype) for dtype in (I32, F32)), *part]
    for width in WIDTHS:
        x = ((ROWS, width), BF16)
        yield f"quantize_rows {width}", with_blocks(quantize.quantize_rows), [x, sizes]
        for wanted in ({}, {"fprop_or_dgrad": False}, {"wgrad": False}):
            gathered = [((512, width), BF16), ((ROWS,), I32), sizes]
            quantize_them = functools.partial(quantize_gathered, **wanted)
            yield f"quantize_rows {width} gathered {wanted}", quantize_them, gathered
        for dtype in (BF16, F32):
            for transposed in (False, True):
                one = functools.partial(quantize.quantize_weight, transposed=transposed)
                name = dtype.__name__
                weight = [((EXPERTS, GPT_OSS.d_model, width), dtype)]
                yield f"quantize_weight {width} {name}{' transposed' * transposed}", one, weight
        yield f"gather_rows {width}", with_blocks(permute.gather_rows), [x, ((ROWS,), I32), sizes]
        yield f"gather_sum {width}", permute.gather_sum, [x, ((512, 8), I32), ((512, 8), F32)]
        h = ((ROWS, 2 * width), BF16)
        d_a = x
        weights = ((ROWS,), F32)
        activate = with_blocks(activation.activate_rows, swiglu, gated=True)
        yield f"activate_rows {width}", activate, [h, sizes]
        activate_grad = with_weights(activation.activate_grad_rows)
        yield f"activate_grad_rows {width}", activate_grad, [h, d_a, weights, sizes]
        if width % BLOCK == 0:
            yield (
                f"activate_quantize {width}",
                with_blocks(activation.activate_quantize, swiglu, gated=True),
                [h, sizes],
            )
            grad = with_weights(activation.activate_grad_quantize)
            yield f"activate_grad_quantize {width}", grad, [h, d_a, weights, sizes]
