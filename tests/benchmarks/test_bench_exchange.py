"""The benchmark `exchange`: routings, rounds in one program, our rows by emulation, and peers in other processes."""

import dataclasses
import json
import re
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("rich")


from benchmarks import command, tokens
from benchmarks.peers import ragged, ragged_peer, wires
from benchmarks.wires import exchange, rounds
from moax.ops.exchange import TRANSPORTS
from moax.tune.timing import Repeats
from support.benchmarks import by_gather
from support.exchange import EmulatedOneSided, registered

pytestmark = pytest.mark.loose

ONCE = Repeats(1, 1)
UNIFORM = tokens.TINY[0]
BENCH = ["exchange", "--cases", "tiny", "--only", "uniform", "--quick", "--json"]


@pytest.mark.parametrize("case", (*tokens.TINY, *tokens.PERF), ids=lambda case: case.name)
def test_routings(case):
    """A token that names an expert twice, or a routing that is not what its name says, would count other bytes."""
    case = dataclasses.replace(case, tokens=64)
    experts = case.choose(4)
    assert experts.shape == (256, case.top_k) and all(len(set(row)) == case.top_k for row in experts)
    pairs = case.between(4)
    if case.routing == "one":
        np.testing.assert_array_equal(pairs, np.array([[64, 0, 0, 0]] * 4))
        assert tokens.busiest(pairs) == 3 * 64
    else:
        assert pairs.sum() <= 256 * min(4, case.top_k) and (pairs > 0).all()
    assert UNIFORM.row_bytes("none") == 256 and UNIFORM.row_bytes("fp8") == 128 + 4


def test_rounds_are_rounds():
    """Breaks if a round is left out, or if its operands are not those that the round before hands on."""
    mesh = rounds.mesh_of(2)
    x = jnp.zeros((4, 3), jnp.int32)
    seen = rounds.rounds(lambda x: x + 1, mesh, lambda args, results: (results,), 4)(x)
    np.testing.assert_array_equal(seen, [1 + 2 + 3 + 4] * 2)
    np.testing.assert_array_equal(rounds.rounds(lambda x: x + 1, mesh, count=4)(x), [4, 4])


def in_loop(text: str, what: str) -> tuple[int, int]:
    """(in the body of the loop of a compiled program, in all of it) how many lines match."""
    (name,) = re.findall(r" while\(.*body=%?([\w.\-]+)", text)
    body = re.search(rf"^%?{re.escape(name)} .*?^}}", text, re.M | re.S)
    return len(re.findall(what, body[0])), len(re.findall(what, text))


@pytest.mark.parametrize("wire, direction", tokens.KINDS)
def test_rounds_hold_the_exchange(wire, direction, fresh_compile):
    """Breaks if XLA moves what every round computes out of the loop, or narrows or drops what nobody reads."""
    mesh = rounds.mesh_of(2)
    with jax.set_mesh(mesh):
        x, experts = jnp.ones((64, 128), jnp.bfloat16), UNIFORM.choose(2)
        args = (x, experts, jnp.ones(experts.shape, jnp.float32))
        local, operands = exchange._ours(UNIFORM, wire, direction, "all_gather", args, mesh)
        text = rounds.rounds(local, mesh).lower(*operands).compile().as_text()
    if direction == "combine":
        assert in_loop(text, r"\[32,128\]\S* reduce-scatter\(") == (1, 1)
    else:
        assert in_loop(text, r" all-gather\(") == (3 + (wire != "none"),) * 2
        assert in_loop(text, r"\[64,128\]\S* all-gather\(") == (1, 1)


def test_nccl_is_an_all_to_all():
    """Breaks if it moves more rows than the exchange beside it, or others than each device's to each."""
    mesh = rounds.mesh_of(None)
    (x,) = exchange._even(2, 16, mesh)
    assert x.shape == (8 * 8 * 2, 16) and not x.sharding.is_fully_replicated
    got = rounds.single(wires.all_to_all, mesh)(x)
    np.testing.assert_array_equal(got, np.asarray(x).reshape(8, 8, 32).swapaxes(0, 1).reshape(x.shape))
    text = rounds.rounds(wires.all_to_all, mesh).lower(x).compile().as_text()
    assert in_loop(text, r" all-to-all\(") == (1, 1) and "all-gather" not in text


def test_rows():
    """Beside what a CPU refuses, each peer's time and the bytes that cross; sums right; other processes quoted."""
    said = [
        {"case": UNIFORM.name, "wire": "none", "direction": "dispatch", "us": 2.0, "call_us": 5.0},
        {"note": "killed after 9 s"},
    ]
    how = exchange.How(devices=2, ragged={"ragged_all_to_all": said})
    made = list(exchange.rows([UNIFORM], how, ONCE))
    assert len(made) == 12 and {row.extra["devices"] for row in made} == {2}
    for row in made:
        if row.impl == "moax":
            assert row.us is None and row.note.startswith("Unsupported")
        elif row.impl == "ragged_all_to_all":
            first = (row.direction, row.recipe) == ("dispatch", "none")
            assert (row.us, row.note) == ((2.0, "") if first else (None, "killed after 9 s"))
            assert not first or (
                row.extra["call_us"] == 5.0 and row.tb_s == pytest.approx(row.extra["remote_bytes"] / 2e6)
            )
        else:
            assert row.us and row.tb_s and row.extra["call_us"], row
        assert row.error is None or row.error == 0.0
    assert sum(row.error is not None for row in made) == 1


def test_our_rows_by_number_of_multiprocessors(capsys):
    """Breaks if a row's number is not the one that its kernels get, or if what one_sided delivers in it is wrong."""
    seen = set()

    class Counted(EmulatedOneSided):
        def put_rows(self, arrays, source, places, way: int, out_rows: int, axes, sms: int | None):
            seen.add(sms)
            return super().put_rows(arrays, source, places, way, out_rows, axes, sms)

    with registered("one_sided", Counted()):
        assert command.main([*BENCH, "--peers", "none", "--sms", "2,4", "--devices", "2"]) == 0
    made = json.loads(capsys.readouterr().out)["rows"]
    assert seen == {2, 4} and len(made) == 6
    for row, sms in zip(made, [2, 4] * 3, strict=True):
        assert row["us"] > 0 and row["extra"]["call_us"] > 0, row["note"]
        assert (row["tile"], row["extra"]["sms"], row["extra"]["devices"]) == (f"sms={sms}", sms, 2)
        assert row["error"] == (0.0 if row["direction"] == "combine" else None)


@pytest.mark.usefixtures("unchecked")  # its kernel returns what it was called with
def test_number_of_multiprocessors_reaches_the_kernel(monkeypatch):
    """Breaks if a number that is asked for is dropped on the way, or if none is not the kernel's own."""
    from moax.kernels.hopper.pallas import exchange as kernel

    monkeypatch.setattr(kernel, "put_rows", lambda *args, sms: sms)
    transport = TRANSPORTS["one_sided"]
    assert [transport.put_rows([], None, None, 0, 1, (), sms) for sms in (None, 16)] == [kernel.SMS, 16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sms", "8,many"], "--sms 8,many must be numbers of multiprocessors with commas, as 16,32"),
        (["--sms", "0"], "--sms 0 must be"),
        (["--sms", "16,512"], "--sms 512: a device has 132 multiprocessors"),
        (["--devices", "9"], "--devices 9: an exchange needs 2 devices or more; JAX has 8"),
        (["--devices", "1"], "--devices 1: an exchange needs 2"),
    ],
)
def test_arguments_that_cannot_work(options, message, capsys):
    assert command.main([*BENCH, "--peers", "none", *options]) == 2
    assert message in capsys.readouterr().err


def test_options_of_the_exchange_alone(capsys):
    """Breaks if an option is taken and does nothing."""
    assert command.main(["gemm", "--cases", "tiny", "--sms", "8"]) == 2
    assert "--sms with gemm: it is for exchange alone" in capsys.readouterr().err


def request(**changes) -> dict:
    return {"cases": [dataclasses.asdict(UNIFORM)], "devices": 4, "repeats": {"warmups": 1, "measured": 1}} | changes


def answers(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_ragged_where_there_is_none(capsys):
    """Breaks if a CPU's answer is an error of XLA in another process, and not the reason."""
    assert ragged.main([json.dumps(request(in_place=True))]) == 1
    assert answers(capsys) == [{"note": "Unsupported: XLA has no ragged_all_to_all on this platform, cpu"}]


@pytest.fixture
def gathered(monkeypatch):
    """`ragged_all_to_all` runs here, by gathering; programs made so do not outlive the test."""
    jax.clear_caches()
    monkeypatch.setattr(ragged, "platform", lambda: "gpu")
    monkeypatch.setattr(wires.lax, "ragged_all_to_all", by_gather)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("in_place", (True, False))
def test_ragged_rows(gathered, in_place, capsys):
    """Breaks if it is told to send other rows than the exchange beside it, or if its check cannot fail."""
    assert ragged.main([json.dumps(request(in_place=in_place))]) == 0
    found = answers(capsys)
    assert [(line["wire"], line["direction"]) for line in found] == list(tokens.KINDS)
    assert all(line["us"] > 0 and line["call_us"] > 0 and line["case"] == UNIFORM.name for line in found), found

    mesh = rounds.mesh_of(4)
    args, sizes = ragged.operands(UNIFORM, "none", "combine", mesh)
    got = rounds.single(wires.ragged, mesh)(*args)
    ragged.check(got, args[0], sizes)
    with pytest.raises(ValueError, match="sampled rows are not where they should be"):
        ragged.check(got[::-1], args[0], sizes)


def test_ragged_lowers_for_gpus():
    """Breaks if what is timed on GPUs is not the collective that its row names."""
    mesh = rounds.mesh_of(2)
    with jax.set_mesh(mesh):
        args, _ = ragged.operands(UNIFORM, "fp8", "dispatch", mesh)
        loop = rounds.rounds(wires.ragged, mesh, ragged.into_results)
        text = loop.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all") == 1 and "stablehlo.while" in text


def test_ragged_in_its_own_process(monkeypatch):
    """Breaks if the process does not start, or does not understand what it is asked."""
    monkeypatch.setattr(ragged_peer, "WAYS", {"one": ragged_peer.WAYS["ragged_all_to_all"]})
    found = ragged_peer.answers([UNIFORM], 2, ONCE)
    assert found == {"one": [{"note": "Unsupported: XLA has no ragged_all_to_all on this platform, cpu"}]}


def test_process_that_hangs(tmp_path, monkeypatch):
    """Breaks if a collective that hangs takes the benchmark, or what was measured before it, with it."""
    line = {"case": "a", "wire": "none", "direction": "dispatch", "us": 1.0}
    (tmp_path / "stuck.py").write_text(f"import time\nprint('''{json.dumps(line)}''', flush=True)\ntime.sleep(99)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(ragged_peer, "WORKER", "stuck")
    monkeypatch.setattr(ragged_peer, "SECONDS", 3)
    monkeypatch.setattr(ragged_peer, "WAYS", {"one": ("", True)})
    said = ragged_peer.answers([], None, ONCE)["one"]
    assert said == [line, {"note": "killed after 3 s"}]
    assert ragged_peer.find(said, "a", "none", "dispatch") == line
    assert ragged_peer.find(said, "a", "none", "combine") == {"note": "killed after 3 s"}


def test_process_that_dies(monkeypatch):
    """Breaks if its flags are not XLA's, replace those that are set, or if it takes the GPUs' whole memory."""
    environments = []

    class Dead:
        returncode = -6

        def __init__(self, command, env, **options):
            environments.append(env)

        def communicate(self, timeout):
            return "", "a collective exploded"

    monkeypatch.setenv("XLA_FLAGS", "--mine")
    monkeypatch.setattr(subprocess, "Popen", Dead)
    said = ragged_peer.answers([UNIFORM], None, ONCE)
    assert set(said) == {"ragged_all_to_all", "ragged_all_to_all decomposed"}
    assert all(lines == [{"note": "exit code -6: a collective exploded"}] for lines in said.values())
    assert [env["XLA_FLAGS"] for env in environments] == ["--mine", f"--mine {ragged_peer.DECOMPOSE}"]
    assert {env["XLA_PYTHON_CLIENT_PREALLOCATE"] for env in environments} == {"false"}
