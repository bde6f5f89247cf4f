"""What of `torch_layer` does not communicate: its functions of one device, as they are or compiled, and its products.

`by_rows` and `by_columns` are row-wise e4m3, the only scales that `torch._scaled_grouped_mm` has on Hopper.
"""

from __future__ import annotations

import importlib
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benchmarks.peers.torch_layer import Products, torch
from benchmarks.report import why

COMPILE_SECONDS = 120  # limit of all compilations; the other pieces then run without compilation
TINY, LARGEST = 1e-12, 448.0  # the least scale, and the largest value of e4m3
ROWS = 16  # The rows of each group are a multiple of this: wgrad reads along rows, 16 bytes at a time.


def spread(x: torch.Tensor, order: torch.Tensor, top_k: int) -> torch.Tensor:
    """Returns rows [T K, H] with the token of each assignment."""
    return x[order // top_k]


def take(rows: torch.Tensor, source: torch.Tensor, padded: bool) -> torch.Tensor:
    """Returns rows[source]; with `padded`, a source past the last row gives 0."""
    if not padded:
        return rows[source]
    last = rows.shape[0] - 1
    return torch.where((source <= last)[:, None], rows[source.clamp(max=last)], 0)


def activate(h: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up."""
    gate, up = h.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def activate_backward(h: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (dh, silu(gate) * up)."""
    gate, up = (part.float() for part in h.chunk(2, -1))
    sigmoid, d = gate.sigmoid(), d.float()
    silu = gate * sigmoid
    d_gate = d * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([d_gate, d * silu], -1).to(h.dtype), (silu * up).to(h.dtype)


def combine(rows: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Computes y[t] = sum_k weights[t, k] rows[inverse[t, k]]."""
    return (rows[inverse] * weights[..., None].to(rows.dtype)).sum(1)


def combine_backward(
    dy: torch.Tensor, rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the gradient of each row, the gradient of its weight in float32)."""
    d = dy[order // top_k]
    return d * weights.flatten()[order][:, None].to(d.dtype), (d * rows).sum(-1, dtype=torch.float32)


def total(rows: torch.Tensor, inverse: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Computes sum_k rows[inverse[t, k]] + rest[t]."""
    return (rows[inverse].sum(1, dtype=torch.float32) + rest).to(rows.dtype)


def by_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes [.., R, C] by rows: e4m3 [.., R, C], and the scale of each row [.., R]."""
    scale = x.abs().amax(-1).float().clamp(min=TINY) / LARGEST
    return (x.float() / scale[..., None]).to(torch.float8_e4m3fn), scale


def by_columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes [.., R, C] by columns: e4m3 [.., C, R], and the scale of each column [.., C]."""
    scale = x.abs().amax(-2).float().clamp(min=TINY) / LARGEST
    data = (x.float() / scale[..., None, :]).to(torch.float8_e4m3fn)
    return data.transpose(-2, -1).contiguous(), scale


PIECES = (spread, take, activate, activate_backward, combine, combine_backward, total, by_rows, by_columns)


def plain() -> SimpleNamespace:
    """The pieces without compilation."""
    return SimpleNamespace(**{piece.__name__: piece for piece in PIECES})


class Compiler:
    """torch.compile of pieces, for so many seconds: after those, or an error, all run as they are; `failed` says why.

    No rank waits for another in a piece, so one that gives up, or takes longer, holds none of them in a collective.
    """

    def __init__(self, seconds: float = COMPILE_SECONDS, **options):
        self.left, self.failed, self.options = seconds, "", options

    def pieces(self) -> SimpleNamespace:
        """Compiles each piece at its first call."""
        signal.signal(signal.SIGALRM, self._late)
        inductor: Any = importlib.import_module("torch._inductor.config")
        inductor.compile_threads = 1  # Compilation stays in this process, so that no helper outlives it.
        torch._dynamo.config.automatic_dynamic_shapes = False  # Widths stay constants.
        return SimpleNamespace(**{piece.__name__: self._compiled(piece) for piece in PIECES})

    def _compiled(self, piece: Callable) -> Callable:
        fast = torch.compile(piece, fullgraph=True, **self.options)

        def call(*args):
            if self.failed:
                return piece(*args)
            for arg in args:
                if isinstance(arg, torch.Tensor):
                    torch._dynamo.maybe_mark_dynamic(arg, 0)  # The number of rows changes with the batch.
            start = time.monotonic()
            try:
                signal.setitimer(signal.ITIMER_REAL, max(self.left, 1e-3))
                try:
                    return fast(*args)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    self.left -= time.monotonic() - start
            except Exception as error:
                self.failed = f"{piece.__name__}: {why(getattr(error, 'inner_exception', error))}"
                return piece(*args)

        return call

    def _late(self, *_):
        raise TimeoutError("torch.compile took too long")


def bf16() -> Products:
    """The products by `torch._grouped_mm`."""
    product = torch._grouped_mm
    return Products(
        lambda rows, w, ends: product(rows, w, offs=ends),
        lambda d, w, ends: product(d, w.transpose(-2, -1), offs=ends),
        lambda rows, d, ends: product(rows.t(), d, offs=ends),
    )


def fp8_rowwise(pieces: SimpleNamespace, product: Callable | None = None) -> Products:
    """All three by `torch._scaled_grouped_mm`, or by `product` in its place, of operands quantized along what is
    contracted; those of wgrad by columns of all rows, a scale that the groups share."""
    product = product or torch._scaled_grouped_mm

    def multiply(a, b, ends):
        (a, scale_a), (b, scale_b) = a, b
        options = dict(offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)
        return product(a, b.transpose(-2, -1), scale_a, scale_b, **options)

    def wgrad(rows, d, ends):
        (a, scale_a), (b, scale_b) = pieces.by_columns(rows), pieces.by_columns(d)
        return multiply((a, scale_a.repeat(len(ends))), (b, scale_b.repeat(len(ends))), ends)

    return Products(
        lambda rows, w, ends: multiply(pieces.by_rows(rows), pieces.by_columns(w), ends),
        lambda d, w, ends: multiply(pieces.by_rows(d), pieces.by_rows(w), ends),
        wgrad,
        ROWS,
    )
