"""The peer in PyTorch of the block on a mesh: against reference.py where PyTorch is, and its processes anywhere."""

import dataclasses
import functools
import importlib.util
import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich")

import moax
from benchmarks.block import block, mesh_block, worker
from benchmarks.block.worker import READY, Worker
from benchmarks.peers import torch_block, torch_pieces
from benchmarks.processes import ROOT, environment
from moax import reference
from moax.errors import Unsupported
from moax.models import MODELS
from moax.tune.timing import Repeats
from support import rel_norm

TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
CONFIG = moax.MoEConfig(32, 48, 8, 2)
SIGMOID = moax.RouterConfig(score="sigmoid", bias=True, scale=2.5)
NAMES = ("y", "dx", "router", "wi", "wo")
CASES = {  # router, dtype, recipe, limit: sums in another order, 8 bits, 4 bits
    "softmax": (moax.RouterConfig(), "float32", "none", 5e-6),
    "sigmoid": (SIGMOID, "float32", "none", 5e-6),
    "one": (moax.RouterConfig(), "float32", "none", 5e-6),
    "bf16": (moax.RouterConfig(), "bfloat16", "none", 2e-2),
    "fp8": (SIGMOID, "bfloat16", "fp8_rowwise", 0.12),
}


def request(mesh: dict, config=CONFIG, recipe: str = "none", tokens=(32,)) -> dict:
    of = block.Block("a", config)
    return block.request(of, recipe, list(tokens), Repeats(1, 1), "auto") | {"mesh": mesh, "impl": "torch"}


@functools.cache
def problem(name: str):
    """(x, dy, params); `one`: every token goes to the same experts, so that ranks get no row."""
    config = dataclasses.replace(CONFIG, router=CASES[name][0])
    x, dy = (jax.random.normal(jax.random.key(i), (64, CONFIG.d_model)) for i in (1, 2))
    params = moax.init(jax.random.key(0), config)
    if params.router_bias is not None:
        params = dataclasses.replace(params, router_bias=0.3 * jax.random.normal(jax.random.key(3), (8,)))
    if name == "one":
        x = jnp.abs(x)
        params = dataclasses.replace(params, router=jnp.zeros((32, 8)).at[:, 5].set(0.05).at[:, 6].set(0.02))
    if CASES[name][1] == "bfloat16":  # the same experts chosen
        x, dy, params = jax.tree.map(lambda v: v.astype(jnp.bfloat16).astype(jnp.float32), (x, dy, params))
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
        how = {"config": dataclasses.asdict(config), "dtype": dtype, "recipe": recipe}
        bias = np.zeros(8, np.float32) if params.router_bias is None else params.router_bias
        arrays = {"x": x, "dy": dy, "router": params.router, "bias": bias, "wi": params.wi, "wo": params.wo}
        saved |= {f"{name} {key}": np.asarray(value) for key, value in arrays.items()}
        saved[f"{name} how"] = json.dumps(how)
    np.savez(folder / "cases.npz", **saved)


@TORCH
@pytest.mark.parametrize(("fsdp", "ep"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_layer_is_the_reference(fsdp, ep, tmp_path):
    """Breaks if what moax is timed beside computes something else, has other gradients, or gives the fp8 kernel other
    operands than it takes; or if the worker would time a layer whose gradients are wrong."""
    save_cases(tmp_path)
    program, port = (sys.executable, "-m", "support.torch_ranks", tmp_path), torch_block.free_port()
    ranks, env = range(fsdp * ep), environment(PYTHONPATH=str(ROOT / "tests"))
    commands = [[*program, *map(str, (rank, fsdp, ep, port))] for rank in ranks]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) for command in commands]
    for process in started:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said[-3000:]
    found = [np.load(tmp_path / f"{rank}.npz") for rank in ranks]
    in_order = [found[f * ep + e] for e in range(ep) for f in range(fsdp)]
    for name, (*_, limit) in CASES.items():
        for key in NAMES:
            parts = [of[f"{name} {key}"] for of in (in_order if key in ("wi", "wo") else found)]
            got = parts[0] if key == "router" else np.concatenate(parts)
            want = np.asarray(expected(name)[key])
            error = rel_norm(got.reshape(want.shape), want, per=0 if key in ("wi", "wo") else None)
            assert error <= limit, f"{name} {key}: {error:.2e} > {limit:.0e}"
        if f"{name} wrong" in found[0]:
            assert not str(found[0][f"{name} wrong"])
            assert "wi off by 1.0e+00" in str(found[0][f"{name} broken"])
    check_choices([json.loads(str(found[0][of])) for of in ("right", "wrong", "late")])


def check_choices(answers: list[dict]) -> None:
    """The faster is kept, of those that are right and that every rank could compile."""
    right, *rest = answers
    best = right["fwd"]["path"]
    other = {"eager": "compiled", "compiled": "eager"}[best]
    assert right["note"].startswith(f"what does not communicate is {best}; {other} ") and right["note"].endswith(" ms")
    for answer, why in zip(rest, ("compiled is not the layer: wi off by 1.0e+00", "not compiled: "), strict=True):
        assert answer["fwd+bwd"]["path"] == "eager" and answer["note"].startswith(
            "what does not communicate is eager; "
        )
        assert why in answer["note"]


@TORCH
@pytest.mark.loose
def test_block_of_torch():
    """Breaks if the processes of the peer do not measure it, or say what mesh_block does not read."""
    how = mesh_block.How((("fsdp", 2), ("ep", 2)), recipes=(), peers=("torch",))
    fwd, both = mesh_block.rows(list(block.TINY), how, Repeats(1, 3), {})
    assert (fwd.impl, fwd.direction, fwd.path, both.direction) == ("torch", "fwd", "eager", "fwd+bwd"), both.note
    assert both.us > fwd.us > 0 and both.note == "what does not communicate is eager"
    assert both.extra["params_bytes"] == 2 * (64 * 4 + 3 * 64 * 32)  # bf16: the router, one of four experts


@TORCH
def test_products_fit_their_kernels():
    """Breaks if a product has operands whose dtype, layout or scales the kernels refuse."""
    torch = pytest.importorskip("torch")
    groups, width, hidden = 16, 64, 48
    with torch.device("meta"):
        x, a = (torch.empty(256, columns, dtype=torch.bfloat16) for columns in (width, hidden))
        wi = torch.empty(groups, width, 2 * hidden, dtype=torch.bfloat16)
        ends = torch.empty(groups, dtype=torch.int32)
    for products in (torch_pieces.bf16(), torch_pieces.fp8_rowwise(torch_pieces.plain())):
        h = products.forward(x, wi, ends)
        assert h.shape == (256, 2 * hidden) and products.dgrad(h, wi, ends).shape == x.shape
        assert products.wgrad(x, h, ends).shape == wi.shape
        assert products.wgrad(a, x, ends).shape == (groups, hidden, width)


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
        assert answer["memory"]["peak_bytes"] > 0 and "not" not in answer["note"].replace("does not communicate", "")
    finally:
        worker.close()


@TORCH
def test_compiled_pieces():
    """Breaks if a piece cannot be compiled whole, or if one that fails or takes too long ends the run."""
    torch = pytest.importorskip("torch")

    def backend(graph, _):
        return graph.forward

    def late(graph, _):
        time.sleep(5)

    def fails(graph, _):
        raise RuntimeError("no compiler")

    h, d, source = torch.randn(32, 16), torch.randn(32, 8), torch.arange(48).flip(0)
    wanted = torch_pieces.activate_backward(h, d), torch_pieces.take(h, source, True), torch_pieces.by_columns(h)
    for compile_by, why in ((backend, ""), (late, "TimeoutError"), (fails, "no compiler")):
        torch._dynamo.reset()
        compiler = torch_pieces.Compiler(30.0 if compile_by != late else 0.5, backend=compile_by)
        fast, start = compiler.pieces(), time.monotonic()
        got = fast.activate_backward(h, d), fast.take(h, source, True), fast.by_columns(h)
        torch.testing.assert_close(got, wanted)
        assert why in compiler.failed and bool(why) == bool(compiler.failed)
        assert compile_by != late or time.monotonic() - start < 4


@pytest.mark.parametrize(
    ("changes", "sizes", "why"),
    [
        (dict(activation="swiglu_oai"), dict(fsdp=2, ep=2), "activation='swiglu_oai'"),
        (dict(use_bias=True), dict(fsdp=2, ep=2), "use_bias"),
        (dict(router=moax.RouterConfig(logits_bias=True)), dict(fsdp=2, ep=2), "a bias or groups"),
        (dict(router=dataclasses.replace(SIGMOID, num_groups=2)), dict(fsdp=2, ep=2), "groups"),
        (dict(router=dataclasses.replace(SIGMOID, normalize=False)), dict(fsdp=2, ep=2), "a router other than"),
        (dict(num_experts=6), dict(fsdp=2, ep=2), "6 experts on 4 devices"),
        ({}, dict(dp=2, fsdp=1, ep=2), "a mesh of"),
    ],
)
def test_refuses_what_it_does_not_compute(changes, sizes, why):
    """Breaks if a row of the benchmark compares two different layers."""
    with pytest.raises(Unsupported, match=f"the layer of PyTorch cannot do this.*{why}"):
        torch_block.check(dataclasses.replace(CONFIG, **changes), sizes)
    for router in (CONFIG.router, SIGMOID, MODELS["mixtral-8x7b"].config.router):
        torch_block.check(dataclasses.replace(CONFIG, router=router), dict(fsdp=2, ep=2))


def test_what_is_not_available_says_so(monkeypatch, capsys):
    """Breaks if a config that the peer does not compute, or a machine without PyTorch, is no answer but an error."""
    monkeypatch.setattr(torch_block, "start", None)
    for find, config, why in (
        (lambda _: True, dataclasses.replace(CONFIG, use_bias=True), "use_bias=True"),
        (lambda _: None, CONFIG, "Unsupported: PyTorch is not installed"),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", find)
        monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
        assert torch_block.main([json.dumps(request({"fsdp": 1, "ep": 2}, config, tokens=(32, 64)))]) == 0
        ready, *answers = capsys.readouterr().out.splitlines()
        assert ready == READY and [json.loads(answer)["tokens"] for answer in answers] == [32, 64]
        assert all(why in json.loads(answer)["note"] for answer in answers)


def fake(code: str):
    return lambda request, index: subprocess.Popen(
        [sys.executable, "-c", f"rank = {index}\n{code}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


WAITS = f"import time\nprint({READY!r}, flush=True)\nport = int(input())\n"


@pytest.mark.parametrize(
    ("code", "returned", "said"),
    [
        (WAITS + "if rank == 0: print(f'{{\"tokens\": {port > 0:d}}}')", 0, [READY, '{"tokens": 1}']),
        (WAITS + "if rank == 1: exit(1)\nprint('{}', flush=True)\ntime.sleep(60)", 1, [READY, "{}"]),
        (WAITS + "time.sleep(60)", 1, [READY]),
        ("exit(1)", 1, []),
    ],
    ids=["ends", "one rank fails", "hangs", "does not start"],
)
def test_ranks(monkeypatch, capsys, code, returned, said):
    """Breaks if an answer is lost, or if ranks that wait for one that failed, or for nothing, live on."""
    started = []
    monkeypatch.setattr(torch_block, "start", lambda *args: started.append(fake(code)(*args)) or started[-1])
    monkeypatch.setattr(torch_block, "SECONDS", 2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
    assert torch_block.main([json.dumps(request({"fsdp": 1, "ep": 2}))]) == returned
    found = capsys.readouterr()
    assert found.out.splitlines() == said and ("no end in 2 s" in found.err) == (said == [READY])
    for process in started:
        process.wait(timeout=5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_ranks_die_with_their_parent():
    """Breaks if a benchmark that is killed leaves processes on the GPUs."""
    child = "from benchmarks.peers import torch_block; torch_block.die_with_parent(); print('on', flush=True); input()"
    parent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)"
    ran = [sys.executable, "-c", f"{parent}; time.sleep(60)"]
    with subprocess.Popen(ran, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None and process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGKILL)
        start = time.monotonic()
        assert process.stdout.read() == "" and time.monotonic() - start < 10  # closed once the child is gone


def test_rows_of_torch(monkeypatch):
    """Breaks if PyTorch is not measured before ours, with the processes that are its own, or if our bf16 is compared
    with its fp8."""
    asked = []

    class Said:
        def __init__(self, module, request):
            self.request = request
            asked.append((module, request["impl"], request["recipe"]))

        def wait(self):
            pass

        close = wait

        def measure(self):
            us = {"none": 4.0, "fp8_rowwise": 3.0, "fp8_block": 2.0}[self.request["recipe"]]
            measured = {"us": us, "path": "compiled"}
            return [{"tokens": 64, "note": "a note", "memory": {}, "fwd": measured, "fwd+bwd": measured}]

    monkeypatch.setattr(mesh_block, "Worker", Said)
    how = mesh_block.How((("ep", 2),), peers=("torch",))
    rows = [row for row in mesh_block.rows(list(block.TINY), how, Repeats(1, 1), {}) if row.direction == "fwd"]
    ours = "benchmarks.block.mesh_worker"
    assert asked == [
        (torch_block.__name__, "torch", "none"),
        (torch_block.__name__, "torch", "fp8_rowwise"),
        (ours, "moax", "none"),
        (ours, "moax", "fp8_block"),
    ]
    assert [row.peers for row in rows] == [{}, {}, {"torch": 1.0}, {"torch": 2.0, "torch fp8_rowwise": 1.5}]
    assert rows[1].recipe == "fp8_rowwise" and rows[1].path == "compiled" and rows[1].note == "a note"
    asked.clear()
    list(mesh_block.rows(list(block.TINY), dataclasses.replace(how, recipes=("none",)), Repeats(1, 1), {}))
    assert [recipe for *_, recipe in asked] == ["none", "none"]


def test_worker_that_hangs(monkeypatch, tmp_path):
    """Breaks if a process that was given up keeps its GPUs until all others are measured."""
    (tmp_path / "hangs.py").write_text(f"import time\nprint({READY!r}, flush=True)\ntime.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(worker, "SECONDS", 1)
    hangs = Worker("hangs", {"tokens": [64]})
    hangs.limit.cancel()
    hangs.wait()
    (answer,) = hangs.measure()
    assert answer["tokens"] == 64 and "TimeoutExpired" in answer["note"]
    assert hangs.process.wait(timeout=5) == -signal.SIGKILL
    hangs.close()
