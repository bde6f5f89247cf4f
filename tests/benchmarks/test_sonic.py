"""SonicMoE's layer beside the block: its process, where it is not to be had, and its rows; with PyTorch its check."""

import dataclasses
import importlib.util
import io
import json
import sys
import types

import pytest

import moax
from benchmarks.block import block
from benchmarks.block.worker import READY
from benchmarks.peers import sonic
from benchmarks.peers.torch_layer import torch
from benchmarks.timing import Repeats

pytestmark = pytest.mark.more

TORCH = pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
CONFIG = moax.MoEConfig(32, 16, 8, 2)
ONCE = Repeats(1, 1)


def gpu(available: bool, generation: int):
    return types.SimpleNamespace(
        is_available=lambda: available,
        get_device_capability=lambda: (generation, 0),
    )


@pytest.mark.parametrize(
    ("config", "installed", "cuda", "why"),
    [
        (
            dataclasses.replace(CONFIG, use_bias=True),
            ("torch", "sonicmoe"),
            gpu(True, 9),
            "SonicMoE's layer cannot",
        ),
        (CONFIG, (), gpu(True, 9), "PyTorch is not installed"),
        (CONFIG, ("torch",), gpu(True, 9), "SonicMoE is not installed"),
        (CONFIG, ("torch", "sonicmoe"), gpu(False, 9), "SonicMoE is measured on a Hopper GPU"),
        (CONFIG, ("torch", "sonicmoe"), gpu(True, 10), "SonicMoE is measured on a Hopper GPU"),
    ],
)
def test_where_it_cannot_run_a_row_says_so(config, installed, cuda, why, monkeypatch, capsys):
    """Breaks if another layer is timed as this block, or if a machine without the peer is no answer but an error."""
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: name if name in installed else None,
    )
    monkeypatch.setattr(sonic, "torch", types.SimpleNamespace(cuda=cuda, device=None))
    monkeypatch.setattr(sonic, "serve", None)
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    assert sonic.main([json.dumps(block.How().request(block.Block("a", config), "none", ONCE, (32, 64)))]) == 0
    ready, *answers = capsys.readouterr().out.splitlines()
    assert ready == READY and [json.loads(answer)["tokens"] for answer in answers] == [32, 64]
    assert all(json.loads(answer)["note"].startswith(f"Unsupported: {why}") for answer in answers)


def plain(x, router, w1, b1, w2, b2, top_k, stream, activation, inference, *, gate: int = 0):
    """SonicMoE's public function as its documentation has it: w1 [2 F, H, E] with gate and up in turn, w2 [H, F, E]."""
    assert b1 is None
    assert b2 is None
    assert activation == "swiglu"
    assert inference == (not torch.is_grad_enabled())
    assert w1.stride() == (w1.shape[1], 1, w1.shape[0] * w1.shape[1]) and w2.stride(1) == 1
    logits = torch.nn.functional.linear(x, router)
    best, chosen = logits.topk(top_k)
    h = torch.einsum("th,fhe->tef", x, w1)
    a = torch.nn.functional.silu(h[..., gate::2]) * h[..., 1 - gate :: 2]
    weights = torch.zeros_like(logits, dtype=torch.float32).scatter(
        1,
        chosen,
        best.float().softmax(-1),
    )
    y = torch.einsum("tef,hfe->teh", a, w2)
    return (weights[..., None] * y).sum(1).to(x.dtype), logits, None


def said_by(monkeypatch, capsys, layer, sizes=(32, 64)) -> list[dict]:
    """Returns the answers of the program, on a CPU, with `layer` as SonicMoE's."""
    module = types.SimpleNamespace(__version__="0.1", moe_TC_softmax_topk_layer=layer)
    monkeypatch.setitem(sys.modules, "sonicmoe", module)
    monkeypatch.setitem(sys.modules, "quack", types.SimpleNamespace(__version__="1"))
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    sonic.serve(CONFIG, list(sizes), ONCE, torch.device("cpu"))
    ready, *answers = capsys.readouterr().out.splitlines()
    assert ready == READY
    return [json.loads(answer) for answer in answers]


@TORCH
def test_the_layer_is_checked_and_measured(monkeypatch, capsys):
    """Breaks if the peer gets weights in another layout than its own, is timed without a check of every gradient, or
    counts weights among what forward keeps."""
    for tokens, answer in zip((32, 64), said_by(monkeypatch, capsys, plain), strict=True):
        assert answer["tokens"] == tokens
        assert answer["impl"] == "sonic-moe 0.1"
        assert "note" not in answer
        assert answer["fwd+bwd"]["us"] > 0 < answer["fwd"]["us"]
        assert answer["fwd"]["path"] == "quack 1"
        expected = {"y", "dx", "router", "wi", "wo", "y of inference"}
        assert set(answer["fwd"]["distances"]) == expected
        assert all(0 < error < sonic.LIMIT for error in answer["fwd"]["distances"].values())
        memory = answer["memory"]
        assert memory["params_bytes"] == 2 * 8 * (32 + 3 * 16 * 32) and memory["peak_bytes"] is None
        # `plain` keeps h of all experts, and what softmax and sums need; x alone has 64 bytes a token.
        assert 64 * tokens < memory["saved_bytes"]
        assert memory["saved_needed_bytes"]["rows"] == 2 * tokens * 2 * 32
    saved = [answer["memory"]["saved_bytes"] for answer in said_by(monkeypatch, capsys, plain)]
    assert saved[1] == 2 * saved[0]  # Weights would not double with the tokens.


@TORCH
@pytest.mark.parametrize("wrong", ["gate and up", "inference", "gradients"])
def test_a_wrong_layer_is_not_timed(wrong, monkeypatch, capsys):
    """Breaks if SonicMoE is timed while it computes something else than the block."""

    def layer(x, router, w1, *args):
        if wrong == "gradients":
            w1 = w1.detach() + (2 * w1 - (2 * w1).detach())
        y, *rest = plain(x, router, w1, *args, gate=int(wrong == "gate and up"))
        return (2 * y if wrong == "inference" and args[-1] else y, *rest)

    for answer in said_by(monkeypatch, capsys, layer):
        named = {
            "gate and up": "y off by",
            "inference": "y of inference off by 1.0",
            "gradients": "wi off by 1.0",
        }
        assert named[wrong] in answer["note"] and "fwd" not in answer
