"""A rank, by torchrun, of tests/benchmarks/test_torch_block.py: python3 -m support.torch_ranks FOLDER FSDP EP

Runs each case of FOLDER/cases.npz on the ranks' shards, and saves what came out as FOLDER/RANK.npz.
"""

import datetime
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.block.worker import config_of
from benchmarks.peers import torch_block, torch_layer
from benchmarks.peers.torch_layer import Layer, Mesh, Params, dist, torch


def scaled_grouped_mm(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
    """Computes what `torch._scaled_grouped_mm` computes on Hopper, of the operands that it takes there and no
    others."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn
    assert use_fast_accum
    assert offs.dtype == torch.int32
    assert a.is_contiguous() and b.transpose(-2, -1).is_contiguous() and a.shape[-1] == b.shape[-2]
    assert not any(size % 16 for size in (*a.shape[-1:], *b.shape[-2:]))
    scales = (
        (a.shape[0], b.shape[:1] + b.shape[2:]) if b.ndim == 3 else (len(offs) * a.shape[0], len(offs) * b.shape[1])
    )
    for scale, size in zip((scale_a, scale_b), scales, strict=True):
        assert (
            scale.dtype == torch.float32
            and scale.is_contiguous()
            and scale.shape == torch.Size([size] if isinstance(size, int) else size)
        )
    if b.ndim == 3:
        left = a.float() * scale_a[:, None]
        right = b.float() * scale_b[:, None]
        return torch._grouped_mm(left, right, offs=offs).to(out_dtype)
    assert not (offs % 16).any()
    out = torch._grouped_mm(a.float(), b.float().contiguous(), offs=offs)
    return (out * scale_a.view(len(offs), -1, 1) * scale_b.view(len(offs), 1, -1)).to(out_dtype)


def twice(product):
    """Computes a product that is wrong."""
    return lambda *args: 2 * product(*args)


def answers(layer: Layer, broken: Layer, params: Params) -> dict[str, np.ndarray]:
    """Returns what the worker says of a layer whose pieces are compiled, of one that is wrong, and of one that does not
    compile."""
    results = {}
    for kind in ("right", "not right", "fails"):
        pieces = torch_layer.compiled(backend=fail if kind == "fails" else "eager")
        products = broken.products if kind == "not right" else layer.products
        torch._dynamo.reset()
        asked = {"recipe": "none", "repeats": {"warmups": 1, "measured": 3}}
        compiled = Layer(layer.config, layer.mesh, products, pieces)
        results[kind] = np.array(json.dumps(torch_block.checked(compiled, params, asked, 16)))
    return results


def fail(graph, _):
    """A backend of torch.compile that has no compiler."""
    raise RuntimeError("no compiler")


def main(folder: Path, fsdp: int, ep: int) -> None:
    """Runs all cases, and says whether the worker sees a layer that is wrong."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    rank = dist.get_rank()
    mesh = Mesh.make(fsdp, ep)
    cases = np.load(folder / "cases.npz")
    results = {}
    pieces = torch_layer.plain()
    for name in json.loads(str(cases["names"])):
        arrays = {key: cases[f"{name} {key}"] for key in ("x", "dy", "router", "wi", "wo")}
        settings = json.loads(str(cases[f"{name} how"]))
        config = config_of(settings)
        dtype = getattr(torch, settings["dtype"])
        shard = torch_block.place(fsdp, ep).index(rank)
        own = {
            key: np.split(arrays[key], fsdp * ep)[place]
            for key, place in (("x", rank), ("dy", rank), ("wi", shard), ("wo", shard))
        }
        v = {key: torch.tensor(value).to(dtype) for key, value in (arrays | own).items()}
        params = Params(v["router"], v["wi"].flatten(2), v["wo"])
        products = (
            torch_layer.bf16() if settings["recipe"] == "none" else torch_layer.fp8_rowwise(pieces, scaled_grouped_mm)
        )
        layer = Layer(config, mesh, products, pieces)
        y, saved = layer.forward(v["x"], params)
        d_x, d = layer.backward(v["dy"], saved, params)
        for key, value in {"y": y, "dx": d_x, "router": d.router, "wi": d.wi, "wo": d.wo}.items():
            assert value.dtype == dtype
            results[f"{name} {key}"] = value.float().numpy()
        if dtype == torch.bfloat16:
            broken = Layer(config, mesh, products._replace(wgrad=twice(products.wgrad)), pieces)
            for key, tested_layer in {"wrong": layer, "broken": broken}.items():
                results[f"{name} {key}"] = np.array(
                    torch_block.wrong(
                        tested_layer,
                        params,
                        settings["recipe"],
                    )
                )
            if name == "bf16":
                results |= answers(layer, broken, params)
    np.savez(folder / f"{rank}.npz", **results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
