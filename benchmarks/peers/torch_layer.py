"""The MoE layer in PyTorch on a mesh of fsdp and ep, a process a GPU: a peer of `moax.moe`, forward and backward.

    router -> sort by expert -> all_to_all_single over ep -> sort by expert -> product, SwiGLU, product
           -> all_to_all_single back -> weighted sum

The host waits once a call, for how many rows come and go. Weights are all-gathered over fsdp, in backward anew, and
their gradients reduce-scattered, each in flight beside what computes. Rank: fsdp index * ep + ep index; experts lie
over (ep, fsdp), as `moax.param_specs` has them. Backward is written out, so that what it keeps and overlaps is too.
"""

from __future__ import annotations

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
    """router [H, E], wi [shard, H, 2 F], wo [shard, F, H]; bias [E], of a sigmoid router's selection."""

    router: torch.Tensor
    wi: torch.Tensor
    wo: torch.Tensor
    bias: torch.Tensor | None = None


class Products(NamedTuple):
    """Of rows sorted by expert, whose groups begin at multiples of `pad` rows and end at `ends`.

    forward(rows [N, K], w [G, K, M], ends) -> [N, M]; dgrad(d [N, M], w, ends) -> [N, K];
    wgrad(rows, d, ends) -> [G, K, M].
    """

    forward: Callable
    dgrad: Callable
    wgrad: Callable
    pad: int = 1


class Routed(NamedTuple):
    """chosen, weights [T, K]; best [T, K], the logits or scores chosen; counts [E]; order [T K], which assignment each
    sorted one is; inverse [T, K], where each assignment went."""

    chosen: torch.Tensor
    weights: torch.Tensor
    best: torch.Tensor
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
    if config.router.score == "softmax":
        best, chosen = logits.topk(config.top_k)
        weights = best.softmax(-1)  # This equals the softmax over all experts, normalized over the chosen ones.
    else:
        scores = logits.sigmoid()
        chosen = (scores if params.bias is None else scores + params.bias.float()).topk(config.top_k).indices
        best = scores.gather(1, chosen)
        weights = config.router.scale * best / best.sum(-1, keepdim=True)
    expert, order = chosen.flatten().sort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=x.device)
    edges = torch.searchsorted(expert, torch.arange(config.num_experts + 1, device=x.device))
    return Routed(chosen, weights, best, edges.diff(), order, inverse.view_as(chosen))


def route_backward(x: torch.Tensor, params: Params, config: MoEConfig, routed: Routed, d: torch.Tensor):
    """Returns (dx, drouter) from the gradient of the weights, in float32."""
    if config.router.score == "softmax":
        d = routed.weights * (d - (routed.weights * d).sum(-1, keepdim=True))
    else:
        share, d = routed.weights / config.router.scale, config.router.scale * d
        d = (d - (share * d).sum(-1, keepdim=True)) / routed.best.sum(-1, keepdim=True)
        d = d * routed.best * (1 - routed.best)
    logits = d.new_zeros(len(x), config.num_experts).scatter_(1, routed.chosen, d)
    return logits @ params.router.float().t(), x.float().t() @ logits


def plan(counts: torch.Tensor, ep, pad: int) -> Callable[[], Way]:
    """What crosses, of how many rows of here each expert gets; the host waits where the result is asked for."""
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


def cross(rows: torch.Tensor, to: list[int], of: list[int], group) -> Callable[[], torch.Tensor]:
    """Sends rows sorted by target rank, and receives rows sorted by source rank, until the result is read."""
    if len(to) == 1:
        return lambda: rows
    out = rows.new_empty(sum(of), rows.shape[1])
    return _flight(out, dist.all_to_all_single(out, rows, of, to, group=group, async_op=True))


def _flight(out: torch.Tensor, work) -> Callable[[], torch.Tensor]:
    def landed() -> torch.Tensor:
        work.wait()
        return out

    return landed


class Layer:
    """forward(x [T, H], params) -> (y, what backward needs); backward(dy, that, params) -> (dx, gradients).

    pieces: what does not communicate, `torch_pieces.PIECES` as they are, or compiled.
    """

    def __init__(self, config: MoEConfig, mesh: Mesh, products: Products, pieces: SimpleNamespace):
        self.config, self.mesh, self.products, self.pieces = config, mesh, products, pieces

    def forward(self, x: torch.Tensor, params: Params) -> tuple[torch.Tensor, list]:
        """Computes y[t] = sum_k weight[t, k] expert[t, k](x[t])."""
        pieces, products = self.pieces, self.products
        wi, wo = (gather(w, self.mesh.fsdp) for w in (params.wi, params.wo))
        routed = route(x, params, self.config)
        asked = plan(routed.counts, self.mesh.ep, products.pad)
        rows = pieces.spread(x, routed.order, self.config.top_k)  # This work overlaps with the wait of the host.
        way = asked()
        rows = self._sorted(cross(rows, way.send, way.receive, self.mesh.ep)(), way)
        h = products.forward(rows, wi(), way.ends)
        o = products.forward(pieces.activate(h), wo(), way.ends)
        back = cross(self._unsorted(o, way), way.receive, way.send, self.mesh.ep)()
        return pieces.combine(back, routed.inverse, routed.weights), [x, routed, way, rows, h, back]

    def backward(self, dy: torch.Tensor, saved: list, params: Params) -> tuple[torch.Tensor, Params]:
        """The gradients of x and of the parameters' shards; the router's is the sum over all ranks. Empties `saved`,
        so that each is freed once it is used."""
        x, routed, way, rows, h, back = saved
        saved.clear()
        pieces, products, top_k = self.pieces, self.products, self.config.top_k
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
        """By expert, as they are already where all come from one rank and nothing is padded."""
        alone = len(way.send) == 1 and self.products.pad == 1
        return rows if alone else self.pieces.take(rows, way.source, self.products.pad > 1)

    def _unsorted(self, rows: torch.Tensor, way: Way) -> torch.Tensor:
        alone = len(way.send) == 1 and self.products.pad == 1
        return rows if alone else self.pieces.take(rows, way.dest, False)
