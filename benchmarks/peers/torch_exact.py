"""The layer of `moax.moe` and its gradients in PyTorch, in float64, expert by expert: what a peer must give."""

from __future__ import annotations

from benchmarks.peers.torch_layer import torch
from moax import MoEConfig


def layer(
    config: MoEConfig,
    x: torch.Tensor,
    dy: torch.Tensor,
    router: torch.Tensor,
    wi: torch.Tensor,
    wo: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Computes y and the gradients of x, router, wi and wo, as {y, dx, router, wi, wo}.

    Args:
      config: the block; its router is a softmax, or a sigmoid that is normalized.
      x, dy: [T, H] in float64.
      router: [H, E] in float64.
      wi: [E, H, 2 F] in float64, with the columns of the gate before those of up.
      wo: [E, F, H] in float64.
      bias: [E], of a sigmoid router's selection.
    """
    leaves = [v.detach().requires_grad_() for v in (x, router, wi, wo)]
    x, router, wi, wo = leaves
    logits = x @ router
    if config.router.score == "softmax":
        best, chosen = logits.topk(config.top_k)
        weights = best.softmax(-1)
    else:
        scores = logits.sigmoid()
        chosen = (scores if bias is None else scores + bias.double()).topk(config.top_k).indices
        weights = scores.gather(1, chosen)
        weights = config.router.scale * weights / weights.sum(-1, keepdim=True)
    y = torch.zeros_like(x)
    for e, (wi_e, wo_e) in enumerate(zip(wi.unbind(), wo.unbind(), strict=True)):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ wi_e).chunk(2, -1)
        y = y.index_add(0, token, weights[token, slot, None] * ((torch.nn.functional.silu(gate) * up) @ wo_e))
    return dict(zip(("y", "dx", "router", "wi", "wo"), (y.detach(), *torch.autograd.grad(y, leaves, dy)), strict=True))


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the norm of the difference over the norm of `want`, in float64."""
    norm = want.norm().clamp(min=1e-30)  # The norm is 0 for experts that no token chose.
    return float((got.double() - want).norm() / norm)
