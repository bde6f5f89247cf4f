"""`python -m benchmarks.trainer` without MaxText: meshes, ways, loads, and the wire of a profile."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.profiles import Kernel
from benchmarks.report import OURS, Row
from benchmarks.trainer import __main__ as trainer
from benchmarks.trainer import loads, variant, ways
from benchmarks.trainer.ways import Mesh
from moax.adapters import maxtext


@pytest.mark.parametrize(
    ("text", "mesh"),
    [("fsdp=4", Mesh(4, 1)), ("fsdp=2,expert=2", Mesh(2, 2)), ("expert=4", Mesh(1, 4))],
)
def test_a_mesh_is_read(text, mesh):
    """Breaks if a row names another mesh than the one that it was measured on."""
    assert ways.read_mesh(text) == mesh
    assert mesh.name == text
    assert mesh.size == 4


@pytest.mark.parametrize("text", ["", "4", "fsdp", "fsdp=0", "fsdp=-1", "tensor=2", "fsdp=2,fsdp=2"])
def test_a_mesh_that_is_none_is_refused(text):
    """Breaks if MaxText would run on a mesh that nobody asked for."""
    with pytest.raises(ValueError, match="--mesh"):
        ways.read_mesh(text)


def test_no_axis_of_a_mesh_is_left_to_maxtext():
    """Breaks if MaxText gives fsdp, its automatic axis, the GPUs that the expert axis needs."""
    assert "ici_fsdp_parallelism=1 ici_expert_parallelism=4" in Mesh(1, 4).settings


@pytest.mark.parametrize("mesh", [Mesh(4, 1), Mesh(2, 2), Mesh(1, 4)])
def test_the_first_ways_of_a_mesh_are_those_that_a_reader_compares(mesh):
    """Breaks if a run that is cut lacks MaxText's best way, or moax's."""
    first = [(way.name, way.label) for way in ways.list_ways(mesh, 4) if way.rank == 0]
    assert {name for name, _ in first if name != OURS} <= {
        "maxtext-tokamax",
        "maxtext-tokamax-experts",
        "maxtext-tokamax-ring",
        "maxtext-tokamax-all_to_all",
    }
    assert first[0][0].startswith("maxtext-tokamax")
    ours = ["none+kept", "fp8_block+kept"]
    if mesh.fsdp > 1:
        ours += ["none+gathered", "fp8_block+gathered"]
    assert [label for name, label in first if name == OURS] == ours


@pytest.mark.parametrize("mesh", [Mesh(4, 1), Mesh(2, 2), Mesh(1, 4)])
def test_the_names_of_ways_differ(mesh):
    """Breaks if two variants share a folder, or a row cannot be told from another."""
    names = [(way.name, way.label) for way in ways.list_ways(mesh, 4)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mesh", [None, Mesh(4, 1), Mesh(2, 2), Mesh(1, 4)])
def test_a_label_is_the_word_of_the_command(mesh, microbatches):
    """Breaks if a row of moax is not what a user gets by its name, or a row without loops is missing."""
    ours = [way for way in ways.list_ways(mesh, microbatches) if way.name == OURS]
    for way in ours:
        assert maxtext.read_arm(way.label) == (way.recipe, way.kept, way.buffer_factor)
    whole = {way.label for way in ours if way.buffer_factor is None}
    expected = {"none+whole", "none+kept+whole", "fp8_block+kept+whole"} if mesh == Mesh(1, 4) else set()
    assert whole == {label for label in expected if microbatches > 1 or "+kept" not in label}


def test_whole_experts_are_split_where_maxtext_can():
    """Breaks if moax's rows copy weights around their gathers, or if MaxText is not measured in the same layout."""
    for mesh in (Mesh(4, 1), Mesh(2, 2), Mesh(1, 4)):
        by_experts = {way.name for way in ways.list_ways(mesh, 4) if "shard_exp_on_fsdp=True" in way.settings}
        if mesh == Mesh(4, 1):
            assert {OURS, "maxtext-tokamax-experts", "maxtext-tokamax-experts-overlap"} <= by_experts
        else:
            assert not by_experts


def test_moax_overlaps_where_weights_cross():
    """Breaks if moax's rows of fsdp lack the options, or MaxText's have them without a word."""
    for mesh in (Mesh(4, 1), Mesh(2, 2), Mesh(1, 4)):
        for way in ways.list_ways(mesh, 4):
            if way.name == OURS:
                assert way.overlap == (mesh.fsdp > 1)
            else:
                assert way.overlap == way.name.endswith("-overlap")


@pytest.mark.parametrize("mesh", [None, Mesh(4, 1), Mesh(1, 4)])
def test_one_microbatch_has_the_ways_of_moax_first(mesh):
    """Breaks if a way of moax is missing with one microbatch, or comes behind MaxText's slow ones."""
    ours = [way for way in ways.list_ways(mesh, 1) if way.name == OURS]
    labels = {way.label for way in ways.list_ways(mesh, 4) if way.name == OURS}
    assert {way.label for way in ours} == {label for label in labels if "+kept" not in label}
    assert {way.rank for way in ours} == {0}


def test_a_case_tells_what_differs():
    """Breaks if rows of different meshes, loads or microbatches are compared as one case."""
    assert ways.name_case("tiny", None, 4, "synthetic") == "tiny"
    assert ways.name_case("tiny", Mesh(2, 2), 1, "text") == "tiny fsdp=2,expert=2 x1 text"


def test_a_mesh_holds_more_layers():
    """Breaks if a mesh trains the layers of one GPU, or one GPU those of a mesh."""
    model = ways.CASES["qwen3-30b"]
    assert ways.choose_layers(model, Mesh(4, 1), large=False) == 8
    assert ways.choose_layers(model, Mesh(1, 1), large=True) == 6
    assert ways.choose_layers(model, None, large=False) == 4


def test_options_are_flags():
    """Breaks if XLA refuses the flags: it reads true, and not True."""
    assert ways.xla_flags({"a": True, "b": 8}.items()) == "--a=true --b=8"


def test_choices_are_balanced():
    """Breaks if an expert has more tokens than another, or a token has an expert twice."""
    choices = loads.list_choices(128, 8, 2)
    assert choices.shape == (128, 2)
    assert np.bincount(choices.ravel()).tolist() == [32] * 8
    assert all(len(set(row)) == 2 for row in choices.tolist())


def test_choices_of_a_top_k_that_does_not_divide():
    """Breaks if such a model has no choices; its experts differ by a few tokens."""
    choices = loads.list_choices(100, 7, 3)
    assert choices.shape == (100, 3)
    assert all(len(set(row)) == 3 for row in choices.tolist())


def test_moax_takes_the_choices_of_its_call():
    """Breaks if moax's layer routes other tokens than MaxText's under a balanced load."""

    class Layer:
        num_experts = 8
        num_experts_per_tok = 2

        def __call__(self, x, input_ids=None, gate_inputs=None, out_sharding=None, forced_routed_experts=None):
            return forced_routed_experts

        def get_topk(self, logits, pre_bias, rngs=None, input_ids=None, forced_routed_experts=None):
            return forced_routed_experts

    class Stock(Layer):
        pass

    class Ours(Layer):
        pass

    loads.route_balanced(Stock, ours=False)
    loads.route_balanced(Ours, ours=True)
    x = np.zeros((3, 16, 4))
    assert Stock()(x) is None
    want = np.broadcast_to(loads.list_choices(16, 8, 2), (3, 16, 2))
    np.testing.assert_array_equal(Stock().get_topk(x, None), want)
    np.testing.assert_array_equal(Ours()(x), want)


def test_text_differs_by_step():
    """Breaks if each step trains on the same text, or inputs and targets are of other text."""

    class Synthetic:
        def __init__(self, config, mesh):
            self.config = config
            self.mesh = mesh
            self.data = (np.zeros((2, 9), np.int32), "positions", "segmentation")

        def data_generator(self, config, batch):
            return batch

    pipeline = SimpleNamespace(SyntheticDataIterator=Synthetic)
    loads.feed_text(pipeline)
    iterator = pipeline.SyntheticDataIterator(SimpleNamespace(max_target_length=8), contextlib.nullcontext())
    first, positions, _ = next(iterator)
    second, *_ = next(iterator)
    assert first.shape == (2, 9)
    assert positions == "positions"
    assert not np.array_equal(first, second)


def test_the_wire_of_a_profile():
    """Breaks if the time that compute hides counts as exposed, or a step's time is that of two."""
    kernels = [
        Kernel("GPU:0", "gemm", "dot.1", 0, 4e6),
        Kernel("GPU:0", "ncclDevKernel_AllGather_RING_LL", "all-gather.1", 2e6, 8e6),
        Kernel("GPU:1", "gemm", "dot.1", 0, 90e6),
    ]
    assert variant.split_wire(kernels) == {"wire_ms": 3.0, "exposed_ms": 2.0, "compute_ms": 2.0}


def test_no_variant_starts_after_the_clock():
    """Breaks if a run goes on after `--seconds`."""
    assert variant.Clock(0).is_over()
    assert not variant.Clock(60).is_over()
    assert not variant.Clock(None).is_over()


def test_the_words_of_only_are_an_order():
    """Breaks if a call measures first what its command names last, a variant twice, or one that begins alike."""
    names = ("a none", "a none+kept", "b none", "b fp8", "c none")
    variants = [SimpleNamespace(name=name, way=SimpleNamespace(rank=-i)) for i, name in enumerate(names)]
    assert [one.name for one in trainer.order_variants(variants, ["fp8", "b "])] == ["b fp8", "b none"]
    assert [one.name for one in trainer.order_variants(variants, ["a none"])] == ["a none"]
    assert [one.name for one in trainer.order_variants(variants, None)] == list(reversed(names))


def test_variants_compile_together_where_the_jobs_suffice():
    """Breaks if a rank waits for the runs of another one with jobs to spare, or if all compile with too few jobs."""
    variants = [SimpleNamespace(way=SimpleNamespace(rank=rank)) for rank in (0, 0, 1)]
    assert [len(wave) for wave in trainer.split_waves(variants, 3)] == [3]
    assert [len(wave) for wave in trainer.split_waves(variants, 2)] == [2, 1]


def test_losses_are_compared_with_the_first_row_that_ran():
    """Breaks if no row is compared where the first one failed."""
    rows = [Row("trainer", "tiny", "step", name, "none", path="") for name in ("a", "b", "c")]
    for row, loss in zip(rows[1:], (2.0, 2.2), strict=True):
        row.us = 1.0
        row.extra = {"losses": [loss]}
    trainer.compare_losses(rows)
    assert rows[2].extra["loss_off_b"] == pytest.approx(0.1)
    assert "loss_off_b" not in rows[1].extra


def test_a_variant_sees_the_devices_of_its_mesh(monkeypatch, tmp_path):
    """Breaks if a mesh of two GPUs runs over all GPUs of a machine, or takes those of another."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,1")
    one = variant.Variant("c", ways.CAPACITY, Mesh(2, 1), "synthetic", 1, 1, [], tmp_path)
    assert one.devices() == {"CUDA_VISIBLE_DEVICES": "5,3"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert one.devices() == {"CUDA_VISIBLE_DEVICES": "0,1"}


class Resident(variant.Variant):
    """A variant whose process runs `program`, a script that stands for MaxText's."""

    program = ""

    def start(self, compile_only=False, resident=False):
        assert resident and not compile_only
        argv = [sys.executable, "-c", self.program, str(self.compiled)]
        return subprocess.Popen(argv, stdin=subprocess.PIPE, text=True)


def make_resident(folder, program):
    one = Resident("c", ways.CAPACITY, None, "synthetic", 1, 1, [], folder)
    one.program = program
    return one


def test_a_resident_variant_waits_between_its_compilation_and_its_steps(tmp_path):
    """Breaks if the steps of a resident variant run before its turn, or never."""
    program = (
        "import pathlib, sys; sys.stdin.readline(); compiled = pathlib.Path(sys.argv[1]); compiled.touch(); "
        "sys.stdin.readline(); compiled.with_name('trained').touch()"
    )
    one = make_resident(tmp_path, program)
    process = one.settle(variant.Clock(60))
    assert one.compiled.exists() and process.poll() is None
    assert not (tmp_path / "trained").exists()
    one.finish(process, 60)
    assert (tmp_path / "trained").exists() and not one.why


@pytest.mark.parametrize(
    "program, seconds, why",
    [
        ("raise SystemExit(3)", 60, "no output"),
        ("import time; time.sleep(60)", 0.5, "did not compile within"),
        ("", 0, "not started"),
    ],
)
def test_a_resident_variant_that_does_not_compile_says_why(tmp_path, program, seconds, why):
    """Breaks if the rows of the other variants wait for one that failed, or its row says nothing."""
    one = make_resident(tmp_path, program)
    assert one.settle(variant.Clock(seconds)) is None
    assert why in one.why


def test_a_package_that_maxtext_does_without_is_no_reason(tmp_path):
    """Breaks if a row gives an import that failed as the reason why the process ended later."""
    one = make_resident(tmp_path, "raise SystemExit(3)")
    log = "[DECOUPLED NO-OP] dependency missing; using stub. (ModuleNotFoundError)\nF1127 Check failed: one\nleft\n"
    (tmp_path / "run.log").write_text(log)
    one.finish(one.start(resident=True), 60)
    assert one.why == "F1127 Check failed: one"
