"""SonicMoE's layer on one GPU, a peer of `moax.moe` in bf16: python3 -m benchmarks.peers.sonic REQUEST

REQUEST is the request of `block_worker` without a mesh. The program compiles the kernels by a layer of few tokens,
prints READY, and waits for a line on stdin. Then it holds y and the gradients of few tokens against float64, which
takes memory that no other process may need at that time, and measures. The first call with a number of tokens times
SonicMoE's kernels by every tile, and takes the fastest. The program prints what `block_worker` prints.

`us` is the wall clock of back-to-back calls, which the host may bound. `kernel_us` is the sum of the kernels of a call
(CUPTI), as in the rows of moax. `event_us` is the time between two events around calls that the host has enqueued
before the first one runs.

Forward alone is SonicMoE's inference, which does not store h. `saved_bytes` are the arrays that forward keeps for
backward: x, h, the logits and the places of rows, without the weights.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.block.block_worker import saved_needed
from benchmarks.block.worker import READY, config_of, refuse
from benchmarks.peers import torch_block, torch_layer
from benchmarks.peers.torch_layer import torch
from benchmarks.report import why
from benchmarks.timing import Repeats
from moax import MoEConfig
from moax.checks import Unsupported

CHECKED = 256  # tokens in the check against float64
# This is the largest distance of y and of each gradient, norm over norm. SonicMoE rounds logits, h and a to bf16.
LIMIT = 2e-2
# These are the calls between two events, and the cycles for which the GPU waits for the host before them.
QUEUED = 4
SLEEP = 300_000_000
# Rounding cannot change the choice of experts of tokens with this margin: logits to 4 are off by 2^-7.
MARGIN = 2.0**-4


class Params(NamedTuple):
    """SonicMoE's weights: router [E, H], w1 [E, 2 F, H] with rows of gate and up in turn, w2 [E, H, F]."""

    router: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor


def main(argv: list[str]) -> int:
    """Measures the request `argv[0]`, and prints the answers. Returns 0."""
    request = json.loads(argv[0])
    config = config_of(request)
    try:
        check(config)
    except Unsupported as error:
        return refuse(request["tokens"], error)
    serve(config, request["tokens"], Repeats(**request["repeats"]), torch.device("cuda"))
    return 0


def check(config: MoEConfig) -> None:
    """Raises Unsupported where SonicMoE computes another layer than `moax.moe`, or cannot run."""
    differences = torch_layer.differs(config, {"fsdp": 1, "ep": 1})
    if differences:
        raise Unsupported(f"SonicMoE's layer cannot do this: {', '.join(differences)}")
    for module, name in (("torch", "PyTorch"), ("sonicmoe", "SonicMoE")):
        if importlib.util.find_spec(module) is None:
            raise Unsupported(f"{name} is not installed")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise Unsupported("SonicMoE is measured on a Hopper GPU")


def serve(config: MoEConfig, sizes: list[int], repeats: Repeats, device: torch.device) -> None:
    """Compiles and checks the layer, waits for a line, and prints an answer for each number of tokens."""
    import quack  # pyrefly: ignore[missing-import]
    import sonicmoe  # pyrefly: ignore[missing-import]

    params = draw(config, device)
    layer = functools.partial(forward, sonicmoe.moe_TC_softmax_topk_layer, config.top_k)
    x, dy = inputs(config, CHECKED, device)
    torch.autograd.grad(layer(x, params, inference=False), (x, *params), dy)
    if device.type == "cuda":
        # Others are measured before this process, and may need the memory.
        torch.cuda.empty_cache()
    print(READY, flush=True)
    sys.stdin.readline()
    errors = distances(layer, config, params)
    wrong = ", ".join(f"{name} off by {error:.1e}" for name, error in errors.items() if not error <= LIMIT)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for tokens in sizes:
        answer: dict[str, Any] = {"tokens": tokens, "impl": f"sonic-moe {sonicmoe.__version__}"}
        try:
            if wrong:
                raise ArithmeticError(f"SonicMoE's layer is not the block: {wrong}")
            answer |= measure(layer, config, params, tokens, repeats)
            for direction in ("fwd", "fwd+bwd"):
                answer[direction] |= {"path": f"quack {quack.__version__}", "distances": errors}
        except Exception as error:  # The other numbers of tokens may fit.
            answer["note"] = why(error)
        print(json.dumps(answer), flush=True)


def draw(config: MoEConfig, device: torch.device) -> Params:
    """Returns weights of variance 1 / fan-in in bf16."""
    h = config.d_model
    f = config.d_ff
    experts = config.num_experts

    def normal(seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return values.mul_(shape[-1] ** -0.5).requires_grad_()

    return Params(normal(0, experts, h), normal(1, experts, 2 * f, h), normal(2, experts, h, f))


def inputs(
    config: MoEConfig,
    tokens: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns x and dy, both [T, H] in bf16."""
    generator = torch.Generator(device).manual_seed(3)
    shape = (2, tokens, config.d_model)
    x, dy = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    return x.clone().requires_grad_(), dy.clone()


def forward(
    layer: Callable,
    top_k: int,
    x: torch.Tensor,
    params: Params,
    inference: bool,
) -> torch.Tensor:
    """Returns y [T, H] of SonicMoE's layer: router, softmax of the K best logits, SwiGLU experts, weighted sum."""
    stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0
    w1, w2 = (w.permute(1, 2, 0) for w in (params.w1, params.w2))
    return layer(x, params.router, w1, None, w2, None, top_k, stream, "swiglu", inference)[0]


def distances(layer: Callable, config: MoEConfig, params: Params) -> dict[str, float]:
    """Returns the distances of y and of each gradient from float64, for few tokens."""
    x, dy = inputs(config, 8 * CHECKED, params.router.device)
    wi = torch.cat([params.w1[:, 0::2], params.w1[:, 1::2]], 1).mT
    exact = [v.detach().double() for v in (params.router.mT, wi, params.w2.mT)]
    best = (x.detach().double() @ exact[0]).topk(min(config.top_k + 1, config.num_experts)).values
    clear = (best[:, config.top_k - 1] - best[:, -1] > MARGIN) | (config.top_k == config.num_experts)
    x = x.detach()[clear][:CHECKED].requires_grad_()
    dy = dy[clear][:CHECKED]
    wanted = torch_layer.exact_layer(config, x.double(), dy.double(), *exact)
    y = layer(x, params, inference=False)
    d_x, d_router, d_w1, d_w2 = torch.autograd.grad(y, (x, *params), dy)
    d_wi = torch.cat([d_w1[:, 0::2], d_w1[:, 1::2]], 1).mT
    got = {"y": y, "dx": d_x, "router": d_router.mT, "wi": d_wi, "wo": d_w2.mT}
    with torch.no_grad():
        got["y of inference"] = layer(x, params, inference=True)
        wanted["y of inference"] = wanted["y"]
    return {name: torch_layer.distance(value.detach(), wanted[name]) for name, value in got.items()}


def measure(
    layer: Callable,
    config: MoEConfig,
    params: Params,
    tokens: int,
    repeats: Repeats,
) -> dict[str, Any]:
    """Returns {memory, fwd, fwd+bwd} of one number of tokens."""
    x, dy = inputs(config, tokens, params.router.device)

    def fwd():
        with torch.no_grad():
            return layer(x, params, inference=True)

    def both():
        y = layer(x, params, inference=False)
        return y, torch.autograd.grad(y, (x, *params), dy)

    both()  # This call and the next choose tiles.
    fwd()
    memory = {
        "params_bytes": sum(v.nbytes for v in params),
        "saved_bytes": saved_bytes(lambda: layer(x, params, inference=False), params),
        "saved_needed_bytes": saved_needed(config, None, tokens),
        "peak_bytes": torch_block.peak_bytes(both) if x.is_cuda else None,
    }
    timed: dict[str, Any] = {}
    for name, f in (("fwd", fwd), ("fwd+bwd", both)):
        timed[name] = {"us": torch_block.wall(f, repeats)}
        timed[name] |= {"kernel_us": kernel_time(f), "event_us": event_time(f)} if x.is_cuda else {}
    return {"memory": memory, **timed}


def kernel_time(f: Callable) -> float:
    """Returns the microseconds of the kernels and copies of a call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(QUEUED):
            f()
        torch.cuda.synchronize()
    ran = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in ran) / QUEUED


def event_time(f: Callable) -> float:
    """Returns the microseconds of a call between two events, without the host."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP)
    start.record()
    for _ in range(QUEUED):
        f()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / QUEUED


def saved_bytes(f: Callable, params: Params) -> int:
    """Returns the bytes that a forward pass keeps for backward, without the parameters."""
    saved: list[torch.Tensor] = []

    def keep(value: torch.Tensor) -> torch.Tensor:
        saved.append(value)  # No storage that is listed is freed, and then used again.
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        f()
    storages = {storage.data_ptr(): storage.nbytes() for storage in (value.untyped_storage() for value in saved)}
    held = {v.untyped_storage().data_ptr() for v in params}
    return sum(nbytes for place, nbytes in storages.items() if place not in held)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
