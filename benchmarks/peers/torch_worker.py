"""One rank of `torch_block`: it checks the layer against float64, and measures it with and without compilation."""

from __future__ import annotations

import datetime
import json
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks.peers import torch_exact, torch_pieces
from benchmarks.peers.torch_layer import Layer, Mesh, Params, dist, torch
from moax import MoEConfig
from moax.errors import Unsupported
from moax.tune.timing import Repeats

CHECKED = 256  # tokens of a rank in the check against float64
LIMIT = {"none": 2e-2, "fp8_rowwise": 0.15}  # largest distance of y and of each gradient, norm over norm
SHARED = "wgrad's scales are of columns, shared by all groups"


def serve(request: dict[str, Any], config: MoEConfig, rank: int, port: int, seconds: float) -> None:
    """Measures a request; rank 0 prints the answers."""
    gpu, mesh = torch.cuda.is_available(), request["mesh"]
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    elif request["recipe"] != "none":
        raise Unsupported("torch._scaled_grouped_mm is for GPUs")
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=math.prod(mesh.values()),
        timeout=datetime.timedelta(seconds=seconds),
    )
    groups = Mesh.make(mesh["fsdp"], mesh["ep"])
    params = draw(config, rank, device)
    compiler = torch_pieces.Compiler()
    pieces = {"eager": torch_pieces.plain()} | ({"compiled": compiler.pieces()} if gpu else {})
    layers = {name: layer(config, groups, request["recipe"], of) for name, of in pieces.items()}
    for tokens in request["tokens"]:
        answer = {"tokens": tokens, **fastest(layers, params, request, tokens, compiler)}
        if rank == 0:
            print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


def draw(config: MoEConfig, rank: int, device) -> Params:
    """Returns a rank's shard of weights of variance 1 / fan-in, and the router, in bf16."""
    h, f, experts = config.d_model, config.d_ff, config.num_experts

    def normal(seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return values.mul_(shape[-2] ** -0.5)

    shard = experts // dist.get_world_size()
    bias = torch.zeros(experts, device=device, dtype=torch.bfloat16) if config.router.bias else None
    return Params(normal(0, h, experts), normal(2 * rank + 1, shard, h, 2 * f), normal(2 * rank + 2, shard, f, h), bias)


def layer(config: MoEConfig, groups: Mesh, recipe: str, pieces) -> Layer:
    """Returns the layer of a recipe."""
    products = torch_pieces.bf16() if recipe == "none" else torch_pieces.fp8_rowwise(pieces)
    return Layer(config, groups, products, pieces)


def inputs(config: MoEConfig, tokens: int, device) -> list[torch.Tensor]:
    """Returns x and dy of this rank."""
    generator = torch.Generator(device).manual_seed(1000 + dist.get_rank())
    shape = tokens, config.d_model
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)]


def wrong(of: Layer, params: Params, recipe: str) -> str:
    """Names the results that are too far from float64 on any rank; "" if there are none."""
    x, dy = inputs(of.config, CHECKED, params.router.device)
    y, saved = of.forward(x, params)
    d_x, d = of.backward(dy, saved, params)
    got = {"y": y, "dx": d_x, "router": d.router, "wi": d.wi, "wo": d.wo}
    wanted = expected(of, params, x, dy)
    errors = {name: agreed(torch_exact.distance(value, wanted[name])) for name, value in got.items()}
    del wanted
    if x.is_cuda:
        torch.cuda.empty_cache()
    return ", ".join(f"{name} off by {error:.1e}" for name, error in errors.items() if not error <= LIMIT[recipe])


def expected(of: Layer, params: Params, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """Computes y and the gradients of this rank in float64, from the tokens and experts of all ranks."""
    config, world, rank = of.config, dist.get_world_size(), dist.get_rank()
    ep = dist.get_world_size(of.mesh.ep)

    def whole(shard: torch.Tensor) -> torch.Tensor:
        out = shard.new_empty(world * len(shard), *shard.shape[1:])
        dist.all_gather_into_tensor(out, shard)
        return out.double()

    places = place(world // ep, ep)
    at = places.index(rank)
    x_all, wi, wo = (whole(v) for v in (x, params.wi, params.wo))
    wi, wo = (w.unflatten(0, (world, -1))[places].flatten(0, 1) for w in (wi, wo))
    found = torch_exact.layer(config, x_all, whole(dy), params.router.double(), wi, wo, params.bias)
    tokens, shard = (slice(i * n, (i + 1) * n) for i, n in ((rank, len(x)), (at, len(params.wi))))
    own = {"y": tokens, "dx": tokens, "wi": shard, "wo": shard}
    return {name: of[own.get(name, ...)] for name, of in found.items()}


def place(fsdp: int, ep: int) -> list[int]:
    """Returns the ranks in the order of their experts."""
    return [f * ep + e for e in range(ep) for f in range(fsdp)]


def fastest(
    layers: dict[str, Layer], params: Params, request: dict[str, Any], tokens: int, compiler: torch_pieces.Compiler
) -> dict[str, Any]:
    """Returns {memory, fwd, fwd+bwd, note} of the fastest correct layer; a note alone if none is correct."""
    found, said = {}, []
    for name, of in layers.items():
        run(of, params, tokens)  # This call compiles for the timed number of rows.
        if name == "compiled" and agreed(float(bool(compiler.failed))):
            said.append(f"not compiled: {compiler.failed or 'another rank gave up'}")
        elif bad := wrong(of, params, request["recipe"]):
            said.append(f"{name} is not the layer: {bad}")
        else:
            found[name] = measure(of, params, tokens, Repeats(**request["repeats"]))
    if not found:
        return {"note": "; ".join(said)}
    best = min(found, key=lambda name: found[name]["fwd+bwd"]["us"])
    for direction in ("fwd", "fwd+bwd"):
        found[best][direction]["path"] = best
    others = [f"{name} {answer['fwd+bwd']['us'] / 1e3:.2f} ms" for name, answer in found.items() if name != best]
    of_recipe = [] if request["recipe"] == "none" else [SHARED]
    return found[best] | {"note": "; ".join([f"what does not communicate is {best}", *others, *said, *of_recipe])}


def run(of: Layer, params: Params, tokens: int) -> None:
    """Runs forward and backward once."""
    x, dy = inputs(of.config, tokens, params.router.device)
    of.backward(dy, of.forward(x, params)[1], params)


def measure(of: Layer, params: Params, tokens: int, repeats: Repeats) -> dict[str, Any]:
    """Returns {memory, fwd, fwd+bwd} of one layer."""
    x, dy = inputs(of.config, tokens, params.router.device)

    def both():
        y, saved = of.forward(x, params)
        return y, of.backward(dy, saved, params)

    peak = peak_bytes(both) if x.is_cuda else None
    held = sum(v.numel() * v.element_size() for v in params if v is not None)
    return {
        "memory": {"params_bytes": held, "peak_bytes": peak},
        "fwd": {"us": wall(lambda: of.forward(x, params)[0], repeats)},
        "fwd+bwd": {"us": wall(both, repeats)},
    }


def peak_bytes(f: Callable) -> int:
    """Returns the most bytes that tensors take on a GPU of any rank during a call."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    f()
    return int(agreed(float(torch.cuda.max_memory_allocated())))


def wall(f: Callable, repeats: Repeats) -> float:
    """Returns the microseconds of a call on the slowest rank: the median over batches of back-to-back calls."""
    for _ in range(repeats.warmups):
        f()
    batches = 5 if repeats.measured >= 10 else 3
    return 1e6 * statistics.median(batch(f, math.ceil(repeats.measured / batches)) for _ in range(batches))


def batch(f: Callable, calls: int) -> float:
    """Returns the seconds of a call."""
    agreed(0.0)  # All ranks begin together.
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        f()
    synchronize()
    return agreed((time.perf_counter() - start) / calls)


def synchronize() -> None:
    """Waits until the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def agreed(value: float) -> float:
    """Returns the largest value of all ranks; the value itself in a process without ranks."""
    if not dist.is_initialized():
        return value
    at = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.tensor(value, device=at, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
