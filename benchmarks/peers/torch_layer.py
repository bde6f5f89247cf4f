"""The MoE layer in PyTorch on a mesh of fsdp and ep, a process a GPU: a peer of `moax.moe`, forward and backward.

    router -> sort by expert -> all_to_all_single over ep -> sort by expert -> matmul, SwiGLU, matmul
           -> all_to_all_single back -> weighted sum

The host waits once a call, for how many rows come and go. Weights are all-gathered over fsdp, in backward anew, and
their gradients reduce-scattered, each in flight beside what computes. Rank: fsdp index * ep + ep index; experts lie
over (ep, fsdp), as `moax.param_specs` has them. Backward is written out, so that what it keeps and overlaps is too.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

from moax import MoEConfig

try:
    import torch  # pyrefly: ignore[missing-import]
    import torch.distributed as dist  # pyrefly: ignore[missing-import]
except ModuleNotFoundError:  # torch_block.py reports the missing module.
    torch: Any = None
    dist: Any = None


# These are the least scale, and the largest value of e4m3.
TINY = 1e-12
LARGEST = 448.0
# The rows of each group are a multiple of this: wgrad reads along rows, 16 bytes at a time.
ROWS = 16


class Mesh(NamedTuple):
    """The groups of ranks that this rank is in."""

    fsdp: Any
    ep: Any

    @classmethod
    def make(cls, fsdp: int, ep: int) -> Mesh:
        """Makes the groups; all ranks must call this."""
        across = [dist.new_group([f * ep + e for f in range(fsdp)]) for e in range(ep)]
        along = [dist.new_group([f * ep + e for e in range(ep)]) for f in range(fsdp)]
        f, e = divmod(dist.get_rank(), ep)
        return cls(across[e], along[f])


class Params(NamedTuple):
    """router [H, E], wi [shard, H, 2 F], wo [shard, F, H]."""

    router: torch.Tensor
    wi: torch.Tensor
    wo: torch.Tensor


class Products(NamedTuple):
    """Grouped matmuls of rows sorted by expert, whose groups begin at multiples of `pad` rows and end at `ends`.

    forward(rows [N, K], w [G, K, M], ends) -> [N, M]; dgrad(d [N, M], w, ends) -> [N, K];
    wgrad(rows, d, ends) -> [G, K, M].
    """

    forward: Callable
    dgrad: Callable
    wgrad: Callable
    pad: int = 1


class Routed(NamedTuple):
    """chosen, weights [T, K]; counts [E]; order [T K], which assignment each sorted one is; inverse [T, K], where each
    assignment went."""

    chosen: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor


class Way(NamedTuple):
    """send, receive: rows to and from each rank of ep. source: of each sorted row, which one received; past the last
    one for padding. dest: the inverse. ends: of the groups, padding included."""

    send: list[int]
    receive: list[int]
    source: torch.Tensor
    dest: torch.Tensor
    ends: torch.Tensor


def route(x: torch.Tensor, params: Params, config: MoEConfig) -> Routed:
    """Chooses the experts of each token in float32, and sorts the assignments by expert."""
    logits = x.float() @ params.router.float()
    best, chosen = logits.topk(config.top_k)
    # This equals the softmax over all experts, normalized over the chosen ones.
    weights = best.softmax(-1)
    expert, order = chosen.flatten().sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=x.device)
    edges = torch.searchsorted(expert, torch.arange(config.num_experts + 1, device=x.device))
    return Routed(chosen, weights, edges.diff(), order, inverse.view_as(chosen))


def route_backward(
    x: torch.Tensor,
    params: Params,
    config: MoEConfig,
    routed: Routed,
    d: torch.Tensor,
):
    """Returns (dx, drouter) from the gradient of the weights, in float32."""
    d = routed.weights * (d - (routed.weights * d).sum(-1, keepdim=True))
    logits = d.new_zeros(len(x), config.num_experts).scatter_(1, routed.chosen, d)
    return logits @ params.router.float().t(), x.float().t() @ logits


def plan(counts: torch.Tensor, ep, pad: int) -> Callable[[], Way]:
    """Returns what crosses, of how many rows of here each expert gets; the host waits where the result is asked for."""
    sent = received = counts.view(dist.get_world_size(ep), -1)
    if len(sent) > 1:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=ep)
    sizes = received.sum(0)
    room = (sizes + pad - 1) // pad * pad
    ends = room.cumsum(0)
    numbers = torch.cat([sent.sum(1), received.sum(1), ends[-1:]]).to("cpu", non_blocking=True)
    arrived = torch.cuda.Event() if counts.is_cuda else None
    if arrived:
        arrived.record()
    parts = received.flatten()
    shift = (ends - room + received.cumsum(0) - received).flatten() - (parts.cumsum(0) - parts)

    def way() -> Way:
        if arrived:
            arrived.synchronize()
        send, receive, total = numbers.split([len(sent), len(sent), 1])
        rows = int(receive.sum())
        index = torch.arange(rows, device=counts.device)
        dest = index + shift.repeat_interleave(parts, output_size=rows)
        source = torch.full((int(total),), rows, device=counts.device)
        source[dest] = index
        return Way(send.tolist(), receive.tolist(), source, dest, ends.to(torch.int32))

    return way


def gather(w: torch.Tensor, group) -> Callable[[], torch.Tensor]:
    """Gathers the shards of a group; the gather goes on until the result is read."""
    if dist.get_world_size(group) == 1:
        return lambda: w
    out = w.new_empty(dist.get_world_size(group) * len(w), *w.shape[1:])
    return _flight(out, dist.all_gather_into_tensor(out, w, group=group, async_op=True))


def scatter(d: torch.Tensor, group) -> Callable[[], torch.Tensor]:
    """Reduce-scatters over a group; the collective goes on until the result is read."""
    if dist.get_world_size(group) == 1:
        return lambda: d
    out = d.new_empty(len(d) // dist.get_world_size(group), *d.shape[1:])
    return _flight(out, dist.reduce_scatter_tensor(out, d, group=group, async_op=True))


def cross(
    rows: torch.Tensor,
    to: list[int],
    received: list[int],
    group,
) -> Callable[[], torch.Tensor]:
    """Sends rows sorted by target rank, and receives rows sorted by source rank, until the result is read."""
    if len(to) == 1:
        return lambda: rows
    out = rows.new_empty(sum(received), rows.shape[1])
    return _flight(out, dist.all_to_all_single(out, rows, received, to, group=group, async_op=True))


def _flight(out: torch.Tensor, work) -> Callable[[], torch.Tensor]:
    def landed() -> torch.Tensor:
        work.wait()
        return out

    return landed


class Layer:
    """forward(x [T, H], params) -> (y, what backward needs); backward(dy, that, params) -> (dx, gradients).

    pieces: the functions that do not communicate, `plain()` or `compiled()`.
    """

    def __init__(self, config: MoEConfig, mesh: Mesh, products: Products, pieces: SimpleNamespace):
        self.config = config
        self.mesh = mesh
        self.products = products
        self.pieces = pieces

    def forward(self, x: torch.Tensor, params: Params) -> tuple[torch.Tensor, list]:
        """Computes y[t] = sum_k weight[t, k] expert[t, k](x[t])."""
        pieces = self.pieces
        products = self.products
        wi, wo = (gather(w, self.mesh.fsdp) for w in (params.wi, params.wo))
        routed = route(x, params, self.config)
        asked = plan(routed.counts, self.mesh.ep, products.pad)
        # This work overlaps with the wait of the host.
        rows = pieces.spread(x, routed.order, self.config.top_k)
        way = asked()
        rows = self._sorted(cross(rows, way.send, way.receive, self.mesh.ep)(), way)
        h = products.forward(rows, wi(), way.ends)
        o = products.forward(pieces.activate(h), wo(), way.ends)
        back = cross(self._unsorted(o, way), way.receive, way.send, self.mesh.ep)()
        return pieces.combine(back, routed.inverse, routed.weights), [x, routed, way, rows, h, back]

    def backward(
        self,
        dy: torch.Tensor,
        saved: list,
        params: Params,
    ) -> tuple[torch.Tensor, Params]:
        """Returns the gradients of x and of the parameters' shards; the router's is the sum over all ranks. Empties
        `saved`, so that each is freed once it is used."""
        x, routed, way, rows, h, back = saved
        saved.clear()
        pieces = self.pieces
        products = self.products
        top_k = self.config.top_k
        wo, wi = (gather(w, self.mesh.fsdp) for w in (params.wo, params.wi))
        d, d_weights = pieces.combine_backward(dy, back, routed.order, routed.weights, top_k)
        del back
        d = self._sorted(cross(d, way.send, way.receive, self.mesh.ep)(), way)
        d_h, a = pieces.activate_backward(h, products.dgrad(d, wo(), way.ends))
        del h
        d_wo = scatter(products.wgrad(a, d, way.ends), self.mesh.fsdp)
        del a
        d = self._unsorted(products.dgrad(d_h, wi(), way.ends), way)
        d = cross(d, way.receive, way.send, self.mesh.ep)
        d_wi = scatter(products.wgrad(rows, d_h, way.ends), self.mesh.fsdp)
        d_x, d_router = route_backward(x, params, self.config, routed, d_weights[routed.inverse])
        dist.all_reduce(d_router)
        d_x = pieces.total(d(), routed.inverse, d_x)
        return d_x, Params(d_router.to(params.router.dtype), d_wi(), d_wo())

    def _sorted(self, rows: torch.Tensor, way: Way) -> torch.Tensor:
        """Sorts rows by expert. They are sorted already where all come from one rank and nothing is padded."""
        alone = len(way.send) == 1 and self.products.pad == 1
        if alone:
            return rows
        return self.pieces.take(rows, way.source, self.products.pad > 1)

    def _unsorted(self, rows: torch.Tensor, way: Way) -> torch.Tensor:
        alone = len(way.send) == 1 and self.products.pad == 1
        return rows if alone else self.pieces.take(rows, way.dest, False)


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
    sigmoid = gate.sigmoid()
    d = d.float()
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
    return d * weights.flatten()[order][:, None].to(d.dtype), (d * rows).sum(
        -1,
        dtype=torch.float32,
    )


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


PIECES = (
    spread,
    take,
    activate,
    activate_backward,
    combine,
    combine_backward,
    total,
    by_rows,
    by_columns,
)


def plain() -> SimpleNamespace:
    """Returns the pieces without compilation."""
    return SimpleNamespace(**{piece.__name__: piece for piece in PIECES})


def compiled(**options) -> SimpleNamespace:
    """Returns the pieces, each of which torch.compile compiles at its first call."""
    inductor: Any = importlib.import_module("torch._inductor.config")
    # Compilation stays in this process, so that no helper outlives it.
    inductor.compile_threads = 1
    torch._dynamo.config.automatic_dynamic_shapes = False  # Widths stay constants.

    def compile_piece(piece: Callable) -> Callable:
        fast = torch.compile(piece, fullgraph=True, **options)

        def call(*args):
            for arg in args:
                if isinstance(arg, torch.Tensor):
                    # The number of rows changes with the batch.
                    torch._dynamo.maybe_mark_dynamic(arg, 0)
            return fast(*args)

        return call

    return SimpleNamespace(**{piece.__name__: compile_piece(piece) for piece in PIECES})


def bf16() -> Products:
    """Returns the matmuls by `torch._grouped_mm`."""
    product = torch._grouped_mm
    return Products(
        lambda rows, w, ends: product(rows, w, offs=ends),
        lambda d, w, ends: product(d, w.transpose(-2, -1), offs=ends),
        lambda rows, d, ends: product(rows.t(), d, offs=ends),
    )


def fp8_rowwise(pieces: SimpleNamespace, product: Callable | None = None) -> Products:
    """Returns the matmuls by `torch._scaled_grouped_mm`, or by `product`, of operands quantized along the
    contracted dim.

    wgrad quantizes columns of all rows, so that the groups share a scale.
    """
    product = product or torch._scaled_grouped_mm

    def multiply(a, b, ends):
        a, scale_a = a
        b, scale_b = b
        options = dict(offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)
        return product(a, b.transpose(-2, -1), scale_a, scale_b, **options)

    def wgrad(rows, d, ends):
        a, scale_a = pieces.by_columns(rows)
        b, scale_b = pieces.by_columns(d)
        return multiply((a, scale_a.repeat(len(ends))), (b, scale_b.repeat(len(ends))), ends)

    return Products(
        lambda rows, w, ends: multiply(pieces.by_rows(rows), pieces.by_columns(w), ends),
        lambda d, w, ends: multiply(pieces.by_rows(d), pieces.by_rows(w), ends),
        wgrad,
        ROWS,
    )


def exact_layer(
    config: MoEConfig,
    x: torch.Tensor,
    dy: torch.Tensor,
    router: torch.Tensor,
    wi: torch.Tensor,
    wo: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Computes y and the gradients of x, router, wi and wo, as {y, dx, router, wi, wo}."""
    leaves = [v.detach().requires_grad_() for v in (x, router, wi, wo)]
    x, router, wi, wo = leaves
    logits = x @ router
    best, chosen = logits.topk(config.top_k)
    weights = best.softmax(-1)
    y = torch.zeros_like(x)
    for e, (wi_e, wo_e) in enumerate(zip(wi.unbind(), wo.unbind(), strict=True)):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ wi_e).chunk(2, -1)
        y = y.index_add(
            0,
            token,
            weights[token, slot, None] * ((torch.nn.functional.silu(gate) * up) @ wo_e),
        )
    return dict(
        zip(
            ("y", "dx", "router", "wi", "wo"),
            (y.detach(), *torch.autograd.grad(y, leaves, dy)),
            strict=True,
        )
    )


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the norm of the difference over the norm of `want`, in float64."""
    norm = want.norm().clamp(min=1e-30)  # The norm is 0 for experts that no token chose.
    # Weights fill the GPU.
    parts = [(part.double() - exact).norm() for part, exact in zip(got, want, strict=True)]
    return float(torch.stack(parts).norm() / norm)


def differs(config: MoEConfig, sizes: dict[str, int]) -> list[str]:
    """Returns the options of a config, and the sizes of a mesh, that PyTorch's layer and SonicMoE's do not have."""
    router = config.router
    same = router.order == "topk_then_score" or (router.normalize and config.top_k > 1)
    wrong = {
        f"activation={config.activation!r}, not 'swiglu'": config.activation != "swiglu",
        "use_bias=True": config.use_bias,
        f"shared_d_ff={config.shared_d_ff}": config.shared_d_ff > 0,
        f"capacity_factor={config.capacity_factor}": config.capacity_factor is not None,
        "a router other than the normalized softmax": router.score != "softmax" or not same or router.scale != 1.0,
        "a bias or groups in the router": router.bias or router.logits_bias or router.num_groups > 1,
        f"a mesh of {sizes}, not of fsdp and ep": set(sizes) != {"fsdp", "ep"},
    }
    missing = [what for what, is_wrong in wrong.items() if is_wrong]
    devices = math.prod(sizes.values())
    if not missing and config.num_experts % devices:
        missing = [f"{config.num_experts} experts on {devices} devices"]
    return missing
