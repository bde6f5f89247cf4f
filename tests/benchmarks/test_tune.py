"""`python -m benchmarks.tune`: the cases and their operands, the time of a call, and the user's table of tiles."""

import dataclasses
import json
import logging
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cases, tune
from benchmarks.problem import Problem, dequantize, quantize_rows, quantize_weight
from benchmarks.timing import Repeats, call_time, kernel_time
from moax.kernels.hopper.formats import BLOCK
from moax.kernels.hopper.pallas import tiles
from moax.kernels.hopper.pallas.stages import TileConfig
from support.gpus import pretend

pytestmark = [pytest.mark.more, pytest.mark.loose]

TINY = cases.SETS["tiny"][0]
EVERY = [case for name in cases.SETS for case in cases.SETS[name]]
H200, SHAPE = "NVIDIA H200", ("matmul", 4096, 1024, 4096)


@pytest.fixture(scope="module")
def problem():
    return Problem(TINY)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder without a table; no table outlives the test."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    tiles.read_table.cache_clear()
    yield tmp_path
    tiles.read_table.cache_clear()


def keep(home, text: str) -> Path:
    """Writes the user's table."""
    path = home / ".cache" / "moax" / "tiles.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize("case", EVERY, ids=lambda case: f"{case.name} G{case.groups}")
def test_group_sizes(case):
    """Sizes that do not sum to M would count work that is not done; another seed would not compare between runs."""
    assert case.sizes.sum() == case.rows
    assert case.sizes.min() >= 0
    assert len(case.sizes) == case.groups
    np.testing.assert_array_equal(case.sizes, dataclasses.replace(case).sizes)
    if case.distribution == "uniform":
        assert case.sizes.max() - case.sizes.min() <= 1
    if case.distribution == "zipf" and case.groups > 8:
        assert case.sizes.max() > 3 * case.sizes.mean()


class Late:
    """An output that knows whether it was awaited."""

    awaited = instances = 0

    def __init__(self):
        Late.instances += 1

    def block_until_ready(self):
        Late.awaited += 1


@pytest.mark.parametrize("time", [kernel_time, call_time])
def test_timing_awaits_every_output(time):
    """A call whose output is not awaited is timed as its launch."""
    Late.awaited = Late.instances = 0
    timing = time(lambda: {"a": Late(), "b": [Late()]}, (), Repeats(2, 10))
    assert timing.us > 0 and timing.method == "wall"
    assert Late.awaited == Late.instances >= 2 * 12


def test_quantized_operands(problem):
    """The operands that are timed stand for the bf16 ones, in the layout that the kernels take."""
    x = problem.x[:, :96]
    w = problem.w[:, :96]
    for operand, want in (
        (quantize_rows(x), x),
        (quantize_rows(x.T), x.T),
        (quantize_weight(w), w),
        (quantize_weight(w.swapaxes(1, 2)), w.swapaxes(1, 2)),
    ):
        assert operand.data.shape == want.shape and operand.data.dtype == jnp.float8_e4m3fn
        difference = dequantize(operand) - want.astype(jnp.float32)
        assert float(jnp.linalg.norm(difference) / jnp.linalg.norm(want.astype(jnp.float32))) < 0.04
    assert quantize_rows(x.T).scale.shape == (problem.num_rows // BLOCK, BLOCK)
    assert quantize_weight(w.swapaxes(1, 2)).scale.shape == (TINY.groups, 2, 1)


def test_tune_keeps_the_fastest_tiles(home, monkeypatch, capsys):
    """Breaks if the command runs where there is no Hopper GPU, keeps a tile that gains nothing, forgets those of other
    devices, writes into the installed package, or if kernels do not take what it found."""
    assert tune.main([]) == 1
    assert "needs an NVIDIA Hopper GPU" in capsys.readouterr().err
    before = tiles.TABLE.read_bytes()
    key = tiles.tile_key(*SHAPE)
    path = keep(home, json.dumps({H200: {"slow": [64, 2]}, "cpu": {"of": [64, 2]}}))

    def measured(problem, op, direction):
        return (key, [128, 5, 8, 2, 1], 2.0, 1.5) if direction == "fwd" else ("slow", [64, 1], 2.0, 1.0)

    pretend(monkeypatch)
    monkeypatch.setattr(tune, "tune", measured)
    monkeypatch.setattr(tune, "Problem", lambda case: case)
    assert tune.main(["--only", "mixtral", "--ops", "matmul,wgrad"]) == 0
    said = "mixtral matmul fwd: tile [128, 5, 8, 2, 1] takes 2 us; the heuristic's tile takes 1.500 times as long"
    assert said in capsys.readouterr().out
    assert json.loads(path.read_text()) == {H200: {key: [128, 5, 8, 2, 1]}, "cpu": {"of": [64, 2]}}
    assert tiles.TABLE.read_bytes() == before
    assert tiles.pick_tile(*SHAPE, H200) == TileConfig(128, 5)


def test_user_table_goes_before_the_packaged_one(home):
    """Breaks if tiles that a user measured are not taken, or if they hide those of other shapes and devices."""
    packaged = tiles.load(tiles.TABLE)
    assert tiles.read_table() == packaged and not (home / ".cache").exists()
    key = next(iter(packaged[H200]))
    mine = {tiles.tile_key(*SHAPE): [128, 5], key: [64, 3, 8, 2, 1]}
    keep(home, json.dumps({H200: mine, "another": {"matmul K1 N1 R1": [64, 2]}}))
    tiles.read_table.cache_clear()
    assert tiles.pick_tile(*SHAPE, H200) == TileConfig(128, 5)
    assert tiles.pick_tile(*SHAPE, "NVIDIA H100") == tiles.pick_tile(*SHAPE)
    table = tiles.read_table()
    assert table[H200] == packaged[H200] | mine and set(table) == {*packaged, "another"}


@pytest.mark.parametrize(
    "text",
    (
        "{",
        "[]",
        '{"NVIDIA H200": 3}',
        '{"NVIDIA H200": {"a": [1]}}',
        '{"NVIDIA H200": {"a": [1, "b"]}}',
        '{"NVIDIA H200": {"matmul K1 N1 R1": [7, 3]}}',
        '{"NVIDIA H200": {"matmul K1 N1 R1": [128, 4, 8, 3]}}',
        '{"NVIDIA H200": {"wgrad K1 N1 R1": [256, 999]}}',
        '{"NVIDIA H200": {"wgrad K1 N1 R1": [128, 4, 0]}}',
        "\x00",
    ),
)
def test_corrupt_user_table_is_a_logged_line(home, caplog, text):
    """Breaks if a broken file in the user's cache folder stops a program, or is passed over without a word."""
    path = keep(home, text)
    with caplog.at_level(logging.WARNING, "moax"):
        assert tiles.pick_tile(*SHAPE, H200) == tiles.pick_tile(*SHAPE)
        assert tiles.read_table() == tiles.load(tiles.TABLE)
    (said,) = caplog.messages
    assert said.startswith(f"the user's tiles are left out: {path}: ")


@pytest.mark.parametrize("op", tiles.HEURISTIC)
def test_every_tile_of_the_command_is_read_back(tmp_path, op):
    """Breaks if `load` refuses a tile that the command may write, and with it the whole table of the user."""
    choices = {*tiles.HEURISTIC[op]}.union(*(tune.candidates(op, columns) for columns in (96, 768, 2048, 14336)))
    entries = {f"{op} K{n} N1 R1": tiles.to_numbers(tile) for n, tile in enumerate(choices)}
    (tmp_path / "tiles.json").write_text(tune.render({H200: entries}))
    assert tiles.load(tmp_path / "tiles.json") == {H200: entries}


def test_tune_refuses_a_table_that_it_cannot_read(home, monkeypatch, capsys):
    """Breaks if the command writes over a file that is no table, or shows a traceback."""
    path = keep(home, "{")
    pretend(monkeypatch)
    assert tune.main(["--only", "mixtral"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m benchmarks.tune: error: {path}: the file is no JSON: ")
    assert path.read_text() == "{"
