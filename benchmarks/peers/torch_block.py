"""The layer of PyTorch on a mesh, a process a GPU: python3 -m benchmarks.peers.torch_block REQUEST

REQUEST is that of `block_worker`, its recipe `none` or `fp8_rowwise`. The process becomes torchrun, which starts the
ranks and ends all when one fails. Rank 0 prints READY, waits for a line on stdin, and joins the others; the ranks then
take a GPU each, hold the layer against float64, and measure it, what does not communicate compiled. Rank 0 prints what
`block_worker` prints. Where there is no GPU, ranks are emulated, through gloo, and nothing is compiled.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.util
import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.block.worker import READY, config_of, refuse
from benchmarks.peers import torch_layer
from benchmarks.peers.torch_layer import Layer, Mesh, Params, dist, torch
from benchmarks.report import why
from benchmarks.timing import Repeats
from moax import MoEConfig
from moax.checks import Unsupported

SECONDS = 450  # limit of a collective, and of the wait for the line
# NVLink multicast can put GPUs out of service that others share.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
CHECKED = 256  # tokens of a rank in the check against float64
# This is the largest distance of y and of each gradient, norm over norm.
LIMIT = {"none": 2e-2, "fp8_rowwise": 0.15}
SHARED = "wgrad's scales are of columns, shared by all groups"


def main(argv: list[str]) -> int:
    """Measures the request `argv[0]`: becomes torchrun, or is one of its ranks."""
    request = json.loads(argv[0])
    config = config_of(request)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record  # pyrefly: ignore[missing-import]

        record(serve)(request, config)
        return 0
    try:
        check(config, request["mesh"])
        if importlib.util.find_spec("torch") is None:
            raise Unsupported("PyTorch is not installed")
    except Unsupported as error:
        return refuse(request["tokens"], error)
    command = torchrun(math.prod(request["mesh"].values()), "benchmarks.peers.torch_block", *argv)
    os.execve(command[0], command, os.environ | ENVIRONMENT)


def torchrun(ranks: int, module: str, *argv: str) -> list[str]:
    """Returns the command that runs a module as so many ranks, whose environment says which each is."""
    launch = ("--standalone", "--nproc-per-node", str(ranks), "--module", module)
    return [sys.executable, "-m", "torch.distributed.run", *launch, *argv]


def check(config: MoEConfig, sizes: dict[str, int]) -> None:
    """Raises Unsupported where `torch_layer` would compute something else than `moax.moe`."""
    differences = torch_layer.differs(config, sizes)
    if differences:
        raise Unsupported(f"the layer of PyTorch cannot do this: {', '.join(differences)}")


def die_with_parent() -> None:
    """Ends this process when its parent ends, on systems that can do that."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def serve(request: dict[str, Any], config: MoEConfig) -> None:
    """Measures a request as one rank; rank 0 prints the answers."""
    die_with_parent()
    gpu = torch.cuda.is_available()
    mesh = request["mesh"]
    rank = int(os.environ["RANK"])
    if not gpu and request["recipe"] != "none":
        raise Unsupported("torch._scaled_grouped_mm is for GPUs")
    if rank == 0:
        print(READY, flush=True)
        sys.stdin.readline()
    dist.init_process_group("nccl" if gpu else "gloo", timeout=datetime.timedelta(seconds=SECONDS))
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    groups = Mesh.make(mesh["fsdp"], mesh["ep"])
    params = draw(config, rank, device)
    pieces = torch_layer.compiled() if gpu else torch_layer.plain()
    if request["recipe"] == "none":
        products = torch_layer.bf16()
    else:
        products = torch_layer.fp8_rowwise(pieces)
    layer = Layer(config, groups, products, pieces)
    for tokens in request["tokens"]:
        answer = {"tokens": tokens, **checked(layer, params, request, tokens)}
        if rank == 0:
            print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


def draw(config: MoEConfig, rank: int, device) -> Params:
    """Returns a rank's shard of weights of variance 1 / fan-in, and the router, in bf16."""
    h = config.d_model
    f = config.d_ff
    experts = config.num_experts

    def normal(seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        return values.mul_(shape[-2] ** -0.5)

    shard = experts // dist.get_world_size()
    return Params(
        normal(0, h, experts),
        normal(2 * rank + 1, shard, h, 2 * f),
        normal(2 * rank + 2, shard, f, h),
    )


def inputs(config: MoEConfig, tokens: int, device) -> list[torch.Tensor]:
    """Returns x and dy of this rank."""
    generator = torch.Generator(device).manual_seed(1000 + dist.get_rank())
    shape = tokens, config.d_model
    return [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)]


def wrong(layer: Layer, params: Params, recipe: str) -> str:
    """Names the results that are too far from float64 on any rank; "" if there are none."""
    x, dy = inputs(layer.config, CHECKED, params.router.device)
    y, saved = layer.forward(x, params)
    d_x, d = layer.backward(dy, saved, params)
    got = {"y": y, "dx": d_x, "router": d.router, "wi": d.wi, "wo": d.wo}
    wanted = expected(layer, params, x, dy)
    errors = {name: agreed(torch_layer.distance(value, wanted[name])) for name, value in got.items()}
    del wanted
    if x.is_cuda:
        torch.cuda.empty_cache()
    return ", ".join(f"{name} off by {error:.1e}" for name, error in errors.items() if not error <= LIMIT[recipe])


def expected(
    layer: Layer,
    params: Params,
    x: torch.Tensor,
    dy: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Computes y and the gradients of this rank in float64, from the tokens and experts of all ranks."""
    config = layer.config
    world = dist.get_world_size()
    rank = dist.get_rank()
    ep = dist.get_world_size(layer.mesh.ep)

    def whole(shard: torch.Tensor) -> torch.Tensor:
        out = shard.new_empty(world * len(shard), *shard.shape[1:])
        dist.all_gather_into_tensor(out, shard)
        return out.double()

    places = place(world // ep, ep)
    index = places.index(rank)
    x_all, wi, wo = (whole(v) for v in (x, params.wi, params.wo))
    wi, wo = (w.unflatten(0, (world, -1))[places].flatten(0, 1) for w in (wi, wo))
    results = torch_layer.exact_layer(config, x_all, whole(dy), params.router.double(), wi, wo)
    tokens = slice(rank * len(x), (rank + 1) * len(x))
    shard = slice(index * len(params.wi), (index + 1) * len(params.wi))
    own = {"y": tokens, "dx": tokens, "wi": shard, "wo": shard}
    return {name: layer[own.get(name, ...)] for name, layer in results.items()}


def place(fsdp: int, ep: int) -> list[int]:
    """Returns the ranks in the order of their experts."""
    return [f * ep + e for e in range(ep) for f in range(fsdp)]


def checked(layer: Layer, params: Params, request: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Returns {memory, fwd, fwd+bwd, note} of a layer; a note alone where it does not run, or is wrong."""
    failed = ""
    try:
        run(layer, params, tokens)  # This call compiles for the timed number of rows.
    # A piece fails to compile on all ranks alike, and none waits in a collective.
    except Exception as error:
        failed = why(getattr(error, "inner_exception", error))
    if agreed(float(bool(failed))):
        return {"note": f"it does not run: {failed or 'on another rank'}"}
    if bad := wrong(layer, params, request["recipe"]):
        return {"note": f"it is not the layer: {bad}"}
    results = measure(layer, params, tokens, Repeats(**request["repeats"]))
    return results | {"note": "" if request["recipe"] == "none" else SHARED}


def run(layer: Layer, params: Params, tokens: int) -> None:
    """Runs forward and backward once."""
    x, dy = inputs(layer.config, tokens, params.router.device)
    layer.backward(dy, layer.forward(x, params)[1], params)


def measure(layer: Layer, params: Params, tokens: int, repeats: Repeats) -> dict[str, Any]:
    """Returns {memory, fwd, fwd+bwd} of one layer."""
    x, dy = inputs(layer.config, tokens, params.router.device)

    def both():
        y, saved = layer.forward(x, params)
        return y, layer.backward(dy, saved, params)

    peak = peak_bytes(both) if x.is_cuda else None
    held = sum(v.numel() * v.element_size() for v in params)
    path = "compiled" if x.is_cuda else "eager"
    return {
        "memory": {"params_bytes": held, "peak_bytes": peak},
        "fwd": {"us": wall(lambda: layer.forward(x, params)[0], repeats), "path": path},
        "fwd+bwd": {"us": wall(both, repeats), "path": path},
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    largest = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
