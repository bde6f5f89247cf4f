"""The layers of `overlap` in PyTorch with FSDP2, a process a GPU: python3 -m benchmarks.peers.fsdp2 CASE

CASE is that of `overlap_worker`. Each layer is one unit of `fully_shard`: PyTorch gathers its weights in bf16 ahead of
its forward and of its backward, and reduces its gradients in bf16. The matmuls of experts are `torch._grouped_mm`. On
one GPU the same layers run without `fully_shard`. Nothing is computed again in backward, and each layer is compiled
where there is a GPU. The process becomes torchrun. Rank 0 prints READY, waits for a line on stdin, and prints the row.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.block.overlap import CONFIGS, DENSE
from benchmarks.block.worker import READY, refuse
from benchmarks.peers import torch_block, torch_layer
from benchmarks.peers.torch_layer import dist, torch
from benchmarks.timing import Repeats
from moax import MoEConfig
from moax.checks import Unsupported

REPEATS = Repeats(3, 10)
TIMEOUT = datetime.timedelta(seconds=torch_block.SECONDS)
CHECKED = 256  # tokens of the check against float64
LIMIT = 2e-2  # largest distance of y and of each gradient, norm over norm


def main(argv: list[str]) -> int:
    """Measures the case `argv[0]`: becomes torchrun, or is one of its ranks."""
    case = json.loads(argv[0])
    if "TORCHELASTIC_RUN_ID" in os.environ:
        serve(case)
        return 0
    config = CONFIGS[case["model"]]
    try:
        differences = torch_layer.differs(config, {"fsdp": case["fsdp"], "ep": 1})
        if differences:
            raise Unsupported(f"the layers of PyTorch cannot do this: {', '.join(differences)}")
        if importlib.util.find_spec("torch") is None:
            raise Unsupported("PyTorch is not installed")
    except Unsupported as error:
        return refuse(case["tokens"], error)
    command = torch_block.torchrun(case["fsdp"], "benchmarks.peers.fsdp2", *argv)
    os.execve(command[0], command, os.environ | torch_block.ENVIRONMENT)


def serve(case: dict[str, Any]) -> None:
    """Measures a case as one rank; rank 0 prints the rows."""
    torch_block.die_with_parent()
    rank = int(os.environ["RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=TIMEOUT)
    config = CONFIGS[case["model"]]
    Layer = define_layer()
    torch.manual_seed(0)
    error = distance(Layer(config).to(device, torch.bfloat16))
    layers = make_layers(Layer, config, case["layers"], device)
    steps = {tokens: make_step(layers, config, tokens, device) for tokens in case["tokens"]}
    for step in steps.values():
        step()  # This call compiles.
    if on_gpu:
        torch.cuda.empty_cache()
    wait_for_line(rank)
    for tokens, step in steps.items():
        row = {"tokens": tokens, "error": float(f"{error:.2g}")} | measure(step, case["layers"], on_gpu)
        if not error <= LIMIT:
            row = {"tokens": tokens, "note": f"it is not the layer: off by {error:.1e}"}
        if rank == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def wait_for_line(rank: int) -> None:
    """Waits until rank 0 has read a line on stdin; gloo lets the ranks wait on their hosts, so that no GPU spins."""
    hosts = dist.new_group(backend="gloo", timeout=TIMEOUT)
    if rank == 0:
        print(READY, flush=True)
        sys.stdin.readline()
    dist.barrier(hosts)


def measure(step: Callable, num_layers: int, on_gpu: bool) -> dict[str, Any]:
    """Returns the time of a layer, and the most memory that a step takes."""
    row: dict[str, Any] = {"ms_a_layer": round(torch_block.wall(step, REPEATS) / num_layers * 1e-3, 3)}
    if on_gpu:
        row["peak_bytes"] = torch_block.peak_bytes(step)
        torch.cuda.empty_cache()
    return row


def make_layers(Layer: Any, config: MoEConfig, num_layers: int, device: Any) -> Any:
    """Returns the layers, compiled on a GPU and sharded where there are several ranks."""
    layers = torch.nn.Sequential(*[Layer(config).to(device, torch.bfloat16) for _ in range(num_layers)])
    if device.type == "cuda":
        inductor: Any = importlib.import_module("torch._inductor.config")
        inductor.compile_threads = 1  # Compilation stays in this process, so that no helper outlives it.
        for layer in layers:
            layer.compile(fullgraph=True, dynamic=False)
    if dist.get_world_size() > 1:
        shard(layers, device.type)
    return layers


def make_step(layers: Any, config: MoEConfig, tokens: int, device: Any) -> Callable:
    """Returns a function that runs forward and backward of the layers once, and drops the gradients."""

    def step() -> None:
        x = torch.randn(tokens, config.d_model, device=device, dtype=torch.bfloat16, requires_grad=True)
        layers(x).float().square().mean().backward()
        layers.zero_grad(set_to_none=True)

    return step


def shard(layers: Any, device_type: str) -> None:
    """Makes each layer a unit of FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh  # pyrefly: ignore[missing-import]
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # pyrefly: ignore[missing-import]

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(layers, mesh=mesh, mp_policy=policy)


def distance(layer: Any) -> float:
    """Returns how far y and the gradients of the MoE of a layer are from float64: the largest, norm over norm."""
    device = layer.wi.device
    x, dy = (torch.randn(CHECKED, layer.config.d_model, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    y = layer.experts(x)
    y.backward(dy)
    results = {"y": y, "dx": x.grad, "router": layer.router.grad, "wi": layer.wi.grad, "wo": layer.wo.grad}
    weights = (w.detach().double() for w in (layer.router, layer.wi, layer.wo))
    exact = torch_layer.exact_layer(layer.config, x.detach().double(), dy.double(), *weights)
    return max(torch_layer.distance(value.detach(), exact[name]) for name, value in results.items())


def define_layer() -> Any:
    """Returns the module of a layer; a class at the top of the file would need PyTorch to be imported."""

    class Permute(torch.autograd.Function):
        """rows[i] = x[order[i] // top_k]; its gradient sums the rows of a token, without atomic adds."""

        @staticmethod
        def forward(ctx, x, order, inverse):
            ctx.save_for_backward(inverse)
            return x[order // inverse.shape[1]]

        @staticmethod
        def backward(ctx, d):
            (inverse,) = ctx.saved_tensors
            return d[inverse].sum(1), None, None

    class Unpermute(torch.autograd.Function):
        """y[t, k] = rows[inverse[t, k]]; its gradient is a gather too."""

        @staticmethod
        def forward(ctx, rows, order, inverse):
            ctx.save_for_backward(order)
            return rows[inverse]

        @staticmethod
        def backward(ctx, d):
            (order,) = ctx.saved_tensors
            return d.flatten(0, 1)[order], None, None

    class Layer(torch.nn.Module):
        """Dense matmuls with relu, a norm before them and before the experts, and residuals."""

        def __init__(self, config: MoEConfig):
            super().__init__()
            self.config = config
            experts, width, hidden = config.num_experts, config.d_model, config.d_ff

            def weight(*shape: int) -> Any:
                return torch.nn.Parameter(torch.randn(shape) * shape[-2] ** -0.5)

            self.dense = torch.nn.ParameterList(weight(width, width) for _ in range(DENSE))
            self.router = weight(width, experts)
            self.wi = weight(experts, width, 2 * hidden)
            self.wo = weight(experts, hidden, width)

        def forward(self, x):
            h = norm(x)
            for w in self.dense:
                h = torch.relu(h @ w)
            x = x + h
            return x + self.experts(norm(x))

        def experts(self, x):
            config = self.config
            logits = x.float() @ self.router.float()
            best, chosen = logits.topk(config.top_k)
            weights = best.softmax(-1)  # This equals the softmax over all experts, normalized over the chosen ones.
            expert, order = chosen.flatten().sort(stable=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=x.device)
            inverse = inverse.view_as(chosen)
            ids = torch.arange(config.num_experts, device=x.device)
            ends = torch.searchsorted(expert, ids, right=True).to(torch.int32)
            rows = Permute.apply(x, order, inverse)
            h = torch._grouped_mm(rows, self.wi, offs=ends)
            y = torch._grouped_mm(torch_layer.activate(h), self.wo, offs=ends)
            y = Unpermute.apply(y, order, inverse)
            return (y * weights[..., None].to(y.dtype)).sum(1)

    def norm(x):
        mean = x.float().square().mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + 1e-6).to(x.dtype)

    return Layer


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
