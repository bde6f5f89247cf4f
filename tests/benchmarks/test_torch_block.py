"""The peer in PyTorch of the block on a mesh: against reference.py where PyTorch is, and its processes anywhere."""

import dataclasses
import functools
import importlib.util
import io
import json
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from benchmarks import report
from benchmarks.block import block
from benchmarks.block.worker import READY, ROOT, Worker, environment
from benchmarks.peers import torch_block
from benchmarks.timing import Repeats
from moax import reference
from moax.checks import Unsupported
from moax.models import MODELS
from support import rel_norm

pytestmark = pytest.mark.more

TORCH = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="PyTorch is not installed",
)
CONFIG = moax.MoEConfig(32, 48, 8, 2)
NAMES = ("y", "dx", "router", "wi", "wo")
CASES = {  # router, dtype, recipe, limit: sums in another order, 8 bits, 4 bits
    "softmax": (moax.RouterConfig(), "float32", "none", 5e-6),
    "one": (moax.RouterConfig(), "float32", "none", 5e-6),
    "bf16": (moax.RouterConfig(), "bfloat16", "none", 2e-2),
    "fp8": (moax.RouterConfig(), "bfloat16", "fp8_rowwise", 0.12),
}


def request(mesh: dict, config=CONFIG, recipe: str = "none", tokens=(32,)) -> dict:
    settings = block.How(tuple(mesh.items()))
    return settings.request(block.Block("a", config), recipe, Repeats(1, 1), tokens)


@functools.cache
def problem(name: str):
    """(x, dy, params); `one`: every token goes to the same experts, so that ranks get no row."""
    config = dataclasses.replace(CONFIG, router=CASES[name][0])
    x, dy = (jax.random.normal(jax.random.key(i), (64, CONFIG.d_model)) for i in (1, 2))
    params = moax.init(jax.random.key(0), config)
    if name == "one":
        x = jnp.abs(x)
        params = dataclasses.replace(
            params,
            router=jnp.zeros((32, 8)).at[:, 5].set(0.05).at[:, 6].set(0.02),
        )
    if CASES[name][1] == "bfloat16":  # the same experts chosen
        x, dy, params = jax.tree.map(
            lambda v: v.astype(jnp.bfloat16).astype(jnp.float32),
            (x, dy, params),
        )
    return config, x, dy, params


@functools.cache
def expected(name: str) -> dict:
    config, x, dy, params = problem(name)
    y, pull = jax.vjp(lambda x, params: reference.moe(x, params, config)[0], x, params)
    d_x, d = pull(dy)
    return dict(zip(NAMES, (y, d_x, d.router, d.wi, d.wo), strict=True))


def save_cases(folder: Path) -> None:
    saved = {"names": json.dumps(list(CASES))}
    for name, (_, dtype, recipe, _) in CASES.items():
        config, x, dy, params = problem(name)
        settings = {"config": dataclasses.asdict(config), "dtype": dtype, "recipe": recipe}
        arrays = {"x": x, "dy": dy, "router": params.router, "wi": params.wi, "wo": params.wo}
        saved |= {f"{name} {key}": np.asarray(value) for key, value in arrays.items()}
        saved[f"{name} how"] = json.dumps(settings)
    np.savez(folder / "cases.npz", **saved)


@TORCH
@pytest.mark.parametrize(("fsdp", "ep"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_layer_is_the_reference(fsdp, ep, tmp_path):
    """Breaks if what moax is timed beside computes something else, has other gradients, or gives the fp8 kernel other
    operands than it takes; or if the worker would time a layer whose gradients are wrong."""
    save_cases(tmp_path)
    program = torch_block.torchrun(
        fsdp * ep,
        "support.torch_ranks",
        str(tmp_path),
        str(fsdp),
        str(ep),
    )
    env = environment(PYTHONPATH=str(ROOT / "tests"))
    done = subprocess.run(program, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [np.load(tmp_path / f"{rank}.npz") for rank in range(fsdp * ep)]
    in_order = [results[f * ep + e] for e in range(ep) for f in range(fsdp)]
    for name, (*_, limit) in CASES.items():
        for key in NAMES:
            parts = [arrays[f"{name} {key}"] for arrays in (in_order if key in ("wi", "wo") else results)]
            got = parts[0] if key == "router" else np.concatenate(parts)
            want = np.asarray(expected(name)[key])
            error = rel_norm(got.reshape(want.shape), want, per=0 if key in ("wi", "wo") else None)
            assert error <= limit, f"{name} {key}: {error:.2e} > {limit:.0e}"
        if f"{name} wrong" in results[0]:
            assert not str(results[0][f"{name} wrong"])
            assert "wi off by 1.0e+00" in str(results[0][f"{name} broken"])
    right, *rest = (json.loads(str(results[0][arrays])) for arrays in ("right", "not right", "fails"))
    assert right["fwd+bwd"]["us"] > right["fwd"]["us"] > 0 and not right["note"]
    for answer, why in zip(
        rest,
        ("it is not the layer: wi off by 1.0e+00", "it does not run: "),
        strict=True,
    ):
        assert answer["note"].startswith(why) and "fwd" not in answer


@TORCH
@pytest.mark.loose
def test_block_of_torch():
    """Breaks if the processes of the peer do not measure it, or say what block does not read."""
    settings = block.How((("fsdp", 2), ("ep", 2)), recipes=(), peers=("torch",))
    fwd, both = block.rows(list(block.TINY), [settings], Repeats(1, 3), {})
    expected = ("torch", "fwd", "eager", "fwd+bwd")
    assert (fwd.impl, fwd.direction, fwd.path, both.direction) == expected, both.note
    assert both.us > fwd.us > 0 and not both.note
    # The bf16 weights are the router and one of four experts.
    assert both.extra["params_bytes"] == 2 * (64 * 4 + 3 * 64 * 32)


@TORCH
@pytest.mark.gpu
@pytest.mark.loose
@pytest.mark.parametrize("recipe", ["none", "fp8_rowwise"])
def test_torch_on_gpus(recipe):
    """Breaks if the kernels, or NCCL, compute something else than what was checked without them: the worker refuses to
    time that."""
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    worker = Worker(torch_block.__name__, request({"fsdp": 1, "ep": 2}, recipe=recipe))
    try:
        worker.wait()
        (answer,) = worker.measure()
        assert answer["fwd+bwd"]["us"] > answer["fwd"]["us"] > 0, answer["note"]
        assert answer["memory"]["peak_bytes"] > 0 and answer["fwd"]["path"] == "compiled"
    finally:
        worker.close()


@pytest.mark.parametrize(
    ("changes", "sizes", "why"),
    [
        (dict(activation="swiglu_oai"), dict(fsdp=2, ep=2), "activation='swiglu_oai'"),
        (dict(use_bias=True), dict(fsdp=2, ep=2), "use_bias"),
        (dict(router=moax.RouterConfig(logits_bias=True)), dict(fsdp=2, ep=2), "a bias or groups"),
        (
            dict(router=moax.RouterConfig(score="sigmoid")),
            dict(fsdp=2, ep=2),
            "a router other than",
        ),
        (dict(top_k=1), dict(fsdp=2, ep=2), "a router other than"),
        (
            dict(router=moax.RouterConfig(num_groups=2, top_groups=1)),
            dict(fsdp=2, ep=2),
            "a bias or groups",
        ),
        (dict(num_experts=6), dict(fsdp=2, ep=2), "6 experts on 4 devices"),
        ({}, dict(dp=2, fsdp=1, ep=2), "a mesh of"),
    ],
)
def test_refuses_what_it_does_not_compute(changes, sizes, why):
    """Breaks if a row of the benchmark compares two different layers."""
    with pytest.raises(Unsupported, match=f"the layer of PyTorch cannot do this.*{why}"):
        torch_block.check(dataclasses.replace(CONFIG, **changes), sizes)
    for router in (CONFIG.router, MODELS["mixtral-8x7b"].config.router):
        torch_block.check(dataclasses.replace(CONFIG, router=router), dict(fsdp=2, ep=2))


def test_torch_that_is_not_installed_is_an_answer(monkeypatch, capsys):
    """Breaks if the run ends, or a row is missing, where PyTorch is not installed."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    assert torch_block.main([json.dumps(request({"fsdp": 1, "ep": 2}))]) == 0
    ready, answer = capsys.readouterr().out.splitlines()
    assert ready == READY and json.loads(answer)["note"] == "Unsupported: PyTorch is not installed"


@TORCH
def test_a_rank_that_fails_ends_all():
    """Breaks if ranks that wait for one that failed live on, or the answer does not say why."""
    worker = Worker(torch_block.__name__, request({"fsdp": 1, "ep": 2}, recipe="fp8_rowwise"))
    try:
        worker.wait()
        (answer,) = worker.measure()
        assert "torch._scaled_grouped_mm is for GPUs" in answer["note"]
    finally:
        worker.close()


class Said:
    """A worker of moax or of a peer that answers at once: us by recipe, and the kernels of what has them."""

    asked: list = []
    us = {"none": 4.0, "fp8_rowwise": 3.0, "fp8_block": 2.0}
    kernels = {"sonic": {"kernel_us": 2.0, "event_us": 2.5}, "block_worker": {"kernel_us": 1.0}}

    def __init__(self, module, request):
        self.module = module.rpartition(".")[2]
        self.recipe = request["recipe"]
        Said.asked.append((self.module, self.recipe))

    def wait(self):
        pass

    close = wait

    def measure(self):
        peer = self.module == "sonic"
        measured = {"us": 3.0 if peer else self.us[self.recipe], "path": "compiled"} | self.kernels.get(self.module, {})
        answer = {
            "tokens": 64,
            "note": "a note",
            "memory": {},
            "fwd": measured,
            "fwd+bwd": measured,
        }
        return [answer | ({"impl": "sonic-moe 0.1"} if peer else {})]


OURS = [("block_worker", "none"), ("block_worker", "fp8_block")]


@pytest.mark.parametrize(
    ("settings", "asked", "peers"),
    [
        (
            block.How((("ep", 2),), peers=("torch",)),
            [("torch_block", "none"), ("torch_block", "fp8_rowwise"), *OURS],
            [{}, {}, {"torch": 1.0}, {"torch": 2.0, "torch fp8_rowwise": 1.5}],
        ),
        (
            block.How((("ep", 2),), ("none",), peers=("torch",)),
            [("torch_block", "none"), OURS[0]],
            [{}, {"torch": 1.0}],
        ),
        (
            block.How(peers=("sonic",)),
            [("sonic", "none"), *OURS],
            [{}, {"sonic-moe 0.1": 0.75}, {"sonic-moe 0.1": 1.5}],
        ),
        (block.How(), OURS, [{}, {}]),
    ],
    ids=["torch", "torch in bf16", "sonic", "moax"],
)
def test_rows_of_peers(settings, asked, peers, monkeypatch, capsys):
    """Breaks if a peer is not measured before ours, by its own process, or if our bf16 is compared with its fp8."""
    monkeypatch.setattr(block, "Worker", Said)
    monkeypatch.setattr(Said, "asked", [])
    rows = [row for row in block.rows(list(block.TINY), [settings], Repeats(1, 1), {}) if row.direction == "fwd"]
    assert Said.asked == asked and [row.peers for row in rows] == peers
    names = {"sonic": "sonic-moe 0.1", "torch_block": "torch", "block_worker": "moax"}
    expected = [(names[who], recipe) for who, recipe in asked]
    assert [(row.impl, row.recipe) for row in rows] == expected
    assert rows[0].path == "compiled" and rows[0].note == "a note"
    report.show({"device": "", "limits": {}}, rows)
    said = capsys.readouterr().out
    assert ("event_us 2.5" in said and "kernel_peers (sonic-moe 0.1 2)" in said) == ("sonic" in settings.peers)
