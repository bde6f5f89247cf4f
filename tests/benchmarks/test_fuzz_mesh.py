"""`python -m benchmarks.fuzz --mesh --named`: its meshes are those of their seeds, and it sees a wrong result.

Covers: the draw of meshes; a block on a mesh beside one device, right and planted wrong; two runs that differ; the
fixed cases and the comparison by chunks of tokens, at reduced size.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.fuzz import large, named, run
from benchmarks.fuzz.cases import Layout, make_inputs
from benchmarks.fuzz.meshes import DifferentBits, compare_bits, draw_on_mesh, make_mesh_programs
from benchmarks.fuzz.oracle import by_moax, check

pytestmark = [pytest.mark.more, pytest.mark.loose]

DEVICES = 4
SEEDS = range(200)


def test_meshes_are_of_every_kind():
    """Breaks if a role, a type of axis or an exchange is never drawn, or a mesh does not divide a size."""
    cases = [draw_on_mesh(seed, DEVICES, tiny=True) for seed in SEEDS]
    assert cases == [draw_on_mesh(seed, DEVICES, tiny=True) for seed in SEEDS]
    layouts = [case.layout for case in cases if case.layout is not None]
    assert len(layouts) == len(cases)
    axes = {axis for layout in layouts for axis in layout.sizes}
    assert axes == {(role, size) for role in ("dp", "fsdp", "ep", "tp", "cp") for size in (2, 4)}
    assert {layout.explicit for layout in layouts} == {False, True}
    assert {layout.exchange for layout in layouts} == {"auto", "all_gather", "all_to_all"}
    assert {case.way for case in cases} == {"plain", "scan"}
    assert {case.remat for case in cases} == {False, True}
    for case, layout in zip(cases, layouts, strict=True):
        sizes = dict(layout.sizes)
        assert math.prod(sizes.values()) in (2, 4)
        over_tokens = math.prod(size for role, size in sizes.items() if role != "tp")
        assert case.tokens % over_tokens == 0
        assert case.config.num_experts % sizes.get("ep", 1) == 0


def test_a_wrong_gradient_of_a_mesh_is_seen():
    """Breaks if a rank without tokens makes a right result wrong, or a wrong gradient of one expert passes."""
    case = named.make_case("empty_rank/all_to_all/bf16", DEVICES, tiny=True)
    _, inputs = make_inputs(case, 0)
    programs = make_mesh_programs(case, "xla", inputs)
    right, errors = check(case, programs, inputs)
    assert right, errors
    results = programs.ours(inputs)
    assert results["experts"].max() < case.config.num_experts // DEVICES
    assert not results["wi"][0, case.config.num_experts // DEVICES :].any()

    def with_one_wrong_expert(inputs):
        wi = results["wi"].copy()
        wi[:, 0] *= 2
        return results | dict(wi=wi)

    wrong, errors = check(case, programs._replace(ours=with_one_wrong_expert), inputs)
    assert not wrong and errors["wi"][0] > 0.9 > errors["wi"][1]


def test_different_bits_are_seen():
    """Breaks if a zero of another sign passes for the same bits, or a NaN of the same bits does not."""
    values = dict(y=np.array([0.0, np.nan], np.float32), dx=np.zeros(2, np.float32))
    compare_bits(values, dict(values))
    with pytest.raises(DifferentBits, match="in dx"):
        compare_bits(values, values | dict(dx=-values["dx"]))


def test_named_cases():
    """Breaks if a fixed case is not what its name says, or the large ones have few elements."""
    names = named.names(mesh=True)
    assert len(set(names)) == len(names) == 16
    for name in names:
        case = named.make_case(name, DEVICES, tiny=False)
        assert case.label == name and (case.layout is not None) == (name.count("/") == 2)
        if name.startswith("one_token"):
            assert case.tokens == DEVICES
    _, inputs = make_inputs(named.make_case("one_expert/bf16", DEVICES, tiny=True), 0)
    assert (inputs["ids"] == 0).any(-1).all()
    for name in large.CASES:
        case, chunk = large.make_case(name, tiny=False)
        assert case.tokens * case.config.top_k * case.config.d_model > 2**31
        assert case.tokens % chunk == 0


def test_a_wrong_last_token_is_seen():
    """Breaks if the comparison by chunks takes wrong last tokens, or a wrong sum over tokens, for right."""
    case, chunk = large.make_case("large/gathered/bf16", tiny=True)
    inputs = large.make_inputs(case)
    ours = by_moax(case, "xla")(inputs)
    right = large.compare_chunks(case, inputs, ours, chunk)
    assert max(right.values()) < 0.02
    wrong = dict(ours, y=ours["y"].at[:, -1].set(0), wi=ours["wi"].at[:, 3].mul(2))
    errors = large.compare_chunks(case, inputs, wrong, chunk)
    assert errors["y of the last"] == errors["y"] > 0.1 and errors["wi"] > 0.9
    assert errors["dx"] == right["dx"]


def test_a_case_of_a_mesh_has_a_row(monkeypatch):
    """Breaks if an error in the program of a mesh ends the run, or leaves its case without a row."""

    def fail(*_):
        raise RuntimeError("no program")

    monkeypatch.setattr(run, "make_mesh_programs", fail)
    (row,) = run.run_case("one_token/all_gather/bf16", [0], "xla", True, True)
    assert not row["right"] and row["raised"] == "RuntimeError: no program"
    assert "WRONG one_token/all_gather/bf16.0" in run.line(row)


def test_tokens_of_a_mesh_stay_in_order():
    """Breaks if a layout leaves its tokens in another order than the inputs have, with cp along S."""
    sizes = (("cp", 2), ("fsdp", 2))
    layout = Layout(sizes=sizes, explicit=True, exchange="auto", batch=2)
    case = named.make_case("one_expert/bf16", DEVICES, tiny=True)
    case = dataclasses.replace(case, layout=layout, load="skewed", masked=True)
    _, inputs = make_inputs(case, 0)
    programs = make_mesh_programs(case, "xla", inputs)
    right, errors = check(case, programs, inputs)
    assert right, errors
