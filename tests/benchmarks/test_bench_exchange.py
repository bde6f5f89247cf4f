"""The benchmark `exchange`: routings, rounds in one program, our rows by emulation, and the peers."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import command
from benchmarks.timing import Repeats
from benchmarks.wires import exchange
from support.exchange import EmulatedOneSided, registered

pytestmark = [pytest.mark.more, pytest.mark.loose]

ONCE = Repeats(1, 1)
UNIFORM = exchange.TINY[0]
BENCH = ["exchange", "--cases", "tiny", "--only", "uniform", "--quick", "--json"]


@pytest.mark.parametrize("case", (*exchange.TINY, *exchange.PERF), ids=lambda case: case.name)
def test_routings(case):
    """A token that names an expert twice, or a routing that is not what its name says, would count other bytes."""
    case = dataclasses.replace(case, tokens=64)
    experts = case.choose(4)
    assert experts.shape == (256, case.top_k)
    assert all(len(set(row)) == case.top_k for row in experts)
    ranks = (experts // (case.experts // 4)).reshape(4, 64, -1).tolist()
    sent = {(a, b): sum(b in token for token in ranks[a]) for a in range(4) for b in range(4) if a != b}
    largest = max(sum(n for pair, n in sent.items() if pair[end] == device) for end in (0, 1) for device in range(4))
    assert case.busiest(4) == largest and (largest == 3 * 64) == (case.routing == "one")
    assert UNIFORM.row_bytes("none") == 256 and UNIFORM.row_bytes("fp8") == 128 + 4


def test_rounds_are_rounds():
    """Breaks if a round is left out."""
    x = jnp.zeros((4, 3), jnp.int32)
    np.testing.assert_array_equal(
        exchange.rounds(lambda x: x + 1, exchange.mesh_of(2), count=4)(x),
        [4, 4],
    )


def in_loop(text: str, what: str) -> tuple[int, int]:
    """(in the body of the loop of a compiled program, in all of it) how many lines match."""
    (name,) = re.findall(r" while\(.*body=%?([\w.\-]+)", text)
    body = re.search(rf"^%?{re.escape(name)} .*?^}}", text, re.M | re.S)
    return len(re.findall(what, body[0])), len(re.findall(what, text))


@pytest.mark.parametrize("wire, direction", exchange.KINDS)
def test_rounds_hold_the_exchange(wire, direction):
    """Breaks if XLA moves what every round computes out of the loop, or narrows or drops what nobody reads."""
    mesh = exchange.mesh_of(2)
    with jax.set_mesh(mesh):
        x = jnp.ones((64, 128), jnp.bfloat16)
        experts = UNIFORM.choose(2)
        args = (x, experts, jnp.ones(experts.shape, jnp.float32))
        local, operands = exchange._ours(UNIFORM, wire, direction, "all_gather", args, mesh)
        text = exchange.rounds(local, mesh).lower(*operands).compile().as_text()
    if direction == "combine":
        assert in_loop(text, r"\[32,128\]\S* reduce-scatter\(") == (1, 1)
    else:
        assert in_loop(text, r" all-gather\(") == (3 + (wire != "none"),) * 2
        assert in_loop(text, r"\[64,128\]\S* all-gather\(") == (1, 1)


def test_nccl_is_an_all_to_all():
    """Breaks if it moves more rows than the exchange beside it, or others than each device's to each."""
    mesh = exchange.mesh_of(None)
    (x,) = exchange._even(2, 16, mesh)
    assert x.shape == (8 * 8 * 2, 16) and not x.sharding.is_fully_replicated
    got = exchange.single(exchange.all_to_all, mesh)(x)
    np.testing.assert_array_equal(
        got,
        np.asarray(x).reshape(8, 8, 32).swapaxes(0, 1).reshape(x.shape),
    )
    text = exchange.rounds(exchange.all_to_all, mesh).lower(x).compile().as_text()
    assert in_loop(text, r" all-to-all\(") == (1, 1) and "all-gather" not in text


def test_our_rows(capsys):
    """Breaks if one_sided does not run, or the row does not say how many multiprocessors it takes."""
    with registered("one_sided", EmulatedOneSided()):
        assert command.main([*BENCH, "--peers", "none", "--devices", "2"]) == 0
    written = json.loads(capsys.readouterr().out)["rows"]
    assert len(written) == 3
    for row in written:
        assert row["us"] > 0 and row["extra"]["call_us"] > 0, row["note"]
        assert row["tile"] == f"sms={row['extra']['sms']}" and row["extra"]["devices"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "9"], "--devices 9: an exchange needs 2 devices or more; JAX has 8"),
        (["--devices", "1"], "--devices 1: an exchange needs 2"),
    ],
)
def test_arguments_that_cannot_work(options, message, capsys):
    assert command.main([*BENCH, "--peers", "none", *options]) == 2
    assert message in capsys.readouterr().err


def test_rows():
    """Breaks if a peer has no time, or if a part that a CPU refuses has no reason."""
    results = list(exchange.rows([UNIFORM], 2, True, ONCE))
    assert len(results) == 9 and {row.extra["devices"] for row in results} == {2}
    for row in results:
        refused = row.note.startswith("Unsupported")
        assert refused if row.impl == "moax" else row.us and row.tb_s and row.extra["call_us"]
