"""Two processes of four emulated devices each, which talk through gloo: the same run as one process of eight.

All of it is in processes of its own, compiled at XLA's lowest level (see scripts/processes.py): only process 0
may write JAX's compilation cache and on CPU its key is another in each process, so that every process compiles anew.

Covers: an error in one process, agreement on settings, meshes over processes; a killed run in `make test-more`.
"""

import dataclasses
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import processes as tool
import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

import moax
from lm import command, processes, program
from lm.data import Corpus
from lm.report import crossing
from lm.run import Run
from moax.mesh.axes import order

STEPS = 24


@dataclasses.dataclass
class Runs:
    """Runs of `python -m lm train` in one folder, all on the same text."""

    folder: Path
    text: Path

    def start(self, *options: str, **counts):
        said = self.folder / f"said-{len(list(self.folder.glob('said-*')))}"
        return said, tool.start(said, tool.train("--out", str(self.folder), *options), **counts)

    def begin(self, name: str, *options: str, **counts):
        new = [
            *tool.MODEL,
            "--text",
            str(self.text),
            "--steps",
            str(STEPS),
            "--mesh",
            "fsdp=2,ep=4",
            "--name",
            name,
        ]
        return self.start(*new, *options, **counts)

    def resume(self, name: str, *options: str, **counts):
        return self.start("--resume", "--name", name, *options, **counts)

    def stop(self, name: str, after: int, said: Path, started: list, number: signal.Signals) -> int:
        """The step after which all processes stopped, and saved, since the last got that signal."""
        tool.await_step(self.folder / name, after, started)
        started[-1].send_signal(number)
        results = tool.finish(said, started)
        assert [code for code, _ in results] == [130] * len(results), "\n".join(words[-2000:] for _, words in results)
        step = int(re.search(r"saved after step (\d+)", results[0][1])[1])
        saved = [int(path.name) for path in (self.folder / name / "checkpoints").iterdir()]
        assert max(saved) == max(self.losses(name)) == step
        return step

    def losses(self, name: str) -> dict[int, float]:
        return tool.losses(self.folder / name)

    def held_out(self, name: str) -> dict[int, float]:
        return {row["step"]: row["held_out_loss"] for row in Run(self.folder / name).rows("held_out_loss")}


def ended_well(results: list[tuple[int, str]]) -> list[str]:
    assert [code for code, _ in results] == [0] * len(results), "\n".join(said[-2000:] for _, said in results)
    return [said for _, said in results]


def close(got: dict[int, float], want: dict[int, float], rtol: float) -> None:
    assert got.keys() == want.keys()
    np.testing.assert_allclose(
        [got[k] for k in sorted(got)],
        [want[k] for k in sorted(want)],
        rtol=rtol,
    )


@pytest.fixture
def runs(tmp_path) -> Runs:
    words = np.random.default_rng(0).choice(
        ["gather ", "quantize ", "dispatch ", "combine ", "route "],
        20_000,
    )
    (tmp_path / "text.txt").write_text("".join(words))
    return Runs(tmp_path, tmp_path / "text.txt")


@pytest.mark.more
def test_a_killed_run_goes_on_as_if_nothing_had_been(runs):
    """Two processes on fsdp=2, ep=4; one is killed -> two again, and one gets SIGTERM -> one device -> two processes on
    fsdp=4, ep=2. Each part says what breaks. Slow: nine processes that compile, and five seconds to give a dead one up.
    """
    run_whole(runs)
    kill_one(runs)
    resume_and_preempt(runs)
    move(runs)


def run_whole(runs):
    """Breaks if other processes than the first speak, or the report has another mesh."""
    said = ended_well(tool.finish(*runs.begin("whole")))
    assert "8 cpu devices in 2 processes, with fsdp across them" in said[0]
    assert f"step {STEPS:>6}/{STEPS}" in said[0]
    assert "weight gathers" in said[0]
    assert "curves" in said[0]
    assert "step" not in said[1] and "loss" not in said[1]
    assert sorted(runs.losses("whole")) == list(range(1, STEPS + 1))


def kill_one(runs):
    """Breaks if a process outlives another, or ends without a word."""
    said, started = runs.begin("killed")
    tool.await_step(runs.folder / "killed", 5, started)
    started[1].send_signal(signal.SIGKILL)
    (code, words), (gone, _) = tool.finish(said, started, timeout=60)
    assert gone == -signal.SIGKILL
    assert code not in (0, -signal.SIGKILL), "it hung, or ended as if all were well"
    assert re.search("another process may have ended|another task died", words), words[-2000:]
    assert max(runs.losses("killed")) < STEPS


def resume_and_preempt(runs):
    """Breaks if a checkpoint misses a shard or part of the state, a resumed run sees other data, or a preempted process
    goes alone, which leaves the others to hang. The losses are the same to the last bit."""
    done = max(runs.losses("killed"))
    said, started = runs.resume("killed")
    step = runs.stop("killed", done + 1, said, started, signal.SIGTERM)
    words = (said / "said.0").read_text()
    match = re.search(r"resumed at step (\d+)", words)
    assert match and 3 <= int(match[1]) <= done
    assert "--num-processes 2 --process-id I" in words
    whole = runs.losses("whole")
    assert runs.losses("killed") == {i: whole[i] for i in range(1, step + 1)}


def move(runs):
    """Breaks if a checkpoint belongs to the mesh or the processes that wrote it, a process feeds other rows than its
    own, or a metric is one process's alone."""
    done = max(runs.losses("killed"))
    alone = runs.resume("killed", "--mesh", "fsdp=1", processes=1, devices=1)
    assert done + 2 <= runs.stop("killed", done + 2, *alone, signal.SIGINT) < STEPS
    ended_well(tool.finish(*runs.resume("killed", "--mesh", "fsdp=4,ep=2")))
    close(runs.losses("killed"), runs.losses("whole"), rtol=1e-5)
    close(runs.held_out("killed"), runs.held_out("whole"), rtol=1e-5)
    rows = [Run(runs.folder / name).rows("loss") for name in ("killed", "whole")]
    for moved, whole in zip(*rows, strict=True):
        assert moved["dropped"] == whole["dropped"] == 0
        np.testing.assert_allclose(moved["grad_norm"], whole["grad_norm"], rtol=1e-4)
        # Two scores may tie.
        np.testing.assert_allclose(moved["busiest"], whole["busiest"], rtol=2e-2)


@pytest.mark.more
def test_an_error_of_one_process_is_an_error_of_all(runs):
    """Breaks if a process waits for one that never began, or does not say why. Slow: two processes."""
    said, started = runs.begin("wrong", own=([], ["--text", "nowhere"]))
    (own_code, words), (second, cause) = tool.finish(said, started, timeout=60)
    assert (own_code, second) == (2, 2)
    message = "--text nowhere: no such file or folder"
    assert cause.splitlines()[-1] == f"python -m lm train: error: {message}"
    assert words.splitlines()[-1] == f"python -m lm train: error: process 1 cannot go on: {message}"
    assert not (runs.folder / "wrong").exists(), "an error left a run behind"


def test_processes_that_were_started_differently(monkeypatch):
    """Breaks if they train on different settings, or hang, in place of an error that names the setting."""
    monkeypatch.setattr(
        processes,
        "gather",
        lambda text: [text, text.replace(text[-12:], '0000000000"}')],
    )
    with pytest.raises(
        ValueError,
        match="batch is not the same in processes 0 and 1; start all of them alike",
    ):
        processes.agree(seed=3, batch=8)


@pytest.mark.more
def test_slurm_is_found(tmp_path, monkeypatch):
    """Breaks if `--distributed` does not join the tasks of a Slurm job."""
    monkeypatch.setenv("JAX_COORDINATOR_PORT", str(tool.free_port()))
    for name, value in dict(JOB_ID=1, STEP_NODELIST="localhost", NTASKS=2, STEP_NUM_NODES=1).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    started = []
    for i in ("0", "1"):
        monkeypatch.setenv("SLURM_PROCID", i)
        monkeypatch.setenv("SLURM_LOCALID", i)
        argv = tool.train("--distributed", "--steps", "0")
        started += tool.start(tmp_path / i, argv, processes=1, devices=1)
    for i, process in enumerate(started):
        assert process.wait(120) == 2
        said = (tmp_path / str(i) / "said.0").read_text()
        assert "Gloo" in said and said.splitlines()[-1].endswith("steps=0 must be an int of at least 1"), said


@pytest.mark.more
def test_example_in_two_processes(tmp_path):
    """Breaks if the library alone (`moax.make_mesh`, `moax.init`, `moax.moe`, custom_partitioning, FP8) needs one
    process: tests/docs/test_examples.py has the same losses from one. Slow: two processes that compile."""
    said = ended_well(
        tool.finish(
            tmp_path,
            tool.start(tmp_path, ["examples/multi_host.py"], devices=None),
        )
    )
    assert re.search(
        r"on 8 devices: in 2 process\(es\), mesh {'fsdp': 2, 'ep': 4}, loss 1\.191\d* -> 0\.[78]",
        said[0],
    )
    assert "multi host" not in said[1]


@pytest.mark.more
def test_two_runs_of_two_processes(tmp_path):
    """Breaks if a collective of the block returns other values in another run: gloo's reduce-scatter did, in one of two
    steps, at the end of a shard of process 0 (jax issue 40830). Slow: two processes that compile, twice."""
    ends = []
    for run in ("first", "second"):
        started = tool.start(tmp_path / run, ["examples/multi_host.py"], devices=None)
        ends.append(ended_well(tool.finish(tmp_path / run, started))[0].splitlines()[-1])
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--coordinator", "a:1"], "--num-processes, --process-id missing"),
        (["--process-id", "0", "--num-processes", "2"], "--coordinator missing"),
        (["--distributed", "--process-id", "0"], "--distributed finds"),
        (
            ["--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id 2 must be",
        ),
        (
            ["--coordinator", "a", "--num-processes", "2", "--process-id", "0"],
            "--coordinator a must be HOST:PORT",
        ),
        (["--distributed", "--heartbeat-timeout", "0"], "--heartbeat-timeout 0 must be at least 1"),
    ],
)
def test_flags_that_do_not_fit(argv, message, capsys):
    """Breaks if a process starts alone, or waits five minutes for others, for want of a flag."""
    assert command.main(["train", *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m lm train: error: ")
    assert message in said
    assert len(said.splitlines()) == 1


def device(number: int, process: int, host: int | None = None):
    extra = {} if host is None else {"slice_index": host}
    return SimpleNamespace(id=number, process_index=process, **extra)


@pytest.mark.usefixtures("unchecked")
def test_order_of_devices():
    """Breaks if a group of ep leaves its host: where JAX lists devices by process, and processes are dealt to hosts in
    turn, neighbours in that list are on different hosts."""
    dealt = [device(i, process=i, host=i % 2) for i in range(8)]
    assert [d.slice_index for d in order(dealt)] == [0] * 4 + [1] * 4
    assert [d.id for d in order([device(2048, 1), device(0, 0), device(1, 0)])] == [0, 1, 2048]


def test_make_mesh():
    """Breaks if the axes are not in the order given, or a wrong product is taken for a mesh."""
    mesh = moax.make_mesh({"fsdp": 2, "ep": 4})
    assert dict(mesh.shape) == {"fsdp": 2, "ep": 4}
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,) * 2
    assert list(mesh.devices.flat) == jax.devices() and crossing(mesh) == ()
    explicit = moax.make_mesh({"ep": 8}, axis_type=jax.sharding.AxisType.Explicit)
    assert explicit.axis_types == (jax.sharding.AxisType.Explicit,)
    with pytest.raises(ValueError, match="fsdp=2, ep=3 make a mesh of 6 devices; there are 8"):
        moax.make_mesh({"fsdp": 2, "ep": 3})


@pytest.mark.usefixtures("unchecked")
def test_crossing():
    """Breaks if a report says that experts stay within a process where they do not."""
    two = np.array([device(i, i // 4) for i in range(8)])
    for shape, names, want in [
        ((2, 4), ("fsdp", "ep"), ("fsdp",)),
        ((4, 2), ("fsdp", "ep"), ("fsdp",)),
        ((8,), ("ep",), ("ep",)),
        ((1, 8), ("fsdp", "ep"), ("ep",)),
    ]:
        assert crossing(SimpleNamespace(devices=two.reshape(shape), axis_names=names)) == want


def test_one_process_needs_no_other():
    """Breaks if a plain run pays for, or waits on, what only several processes need."""
    assert processes.gather("a") == ["a"]
    assert processes.together(lambda: 3) == 3
    assert processes.is_first()
    processes.agree(a=1)
    assert program.explain(jax.errors.JaxRuntimeError("x")) == ("x", 1)
    with pytest.raises(KeyError):
        processes.together(lambda: {}["x"])


def test_a_row_that_was_cut_off_is_left_out(tmp_path):
    """Breaks if a run that was killed while it wrote a row cannot be resumed."""
    run = Run(tmp_path)
    run.log(step=1, loss=2.0)
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    assert run.rows() == [{"step": 1, "loss": 2.0}]
    run.forget_after(5)
    run.log(step=2, loss=1.0)
    assert [row["step"] for row in run.rows()] == [1, 2]


def test_rows_of_a_batch():
    """Breaks if what the processes feed together is not the batch that one would."""
    stream = np.random.default_rng(0).integers(0, 255, 999, np.uint8)
    corpus = Corpus(stream, stream, "noise", "")
    for batch in (
        lambda **share: corpus.batch(1, 2, 8, 16, **share),
        lambda **share: corpus.held_out_batch(1, 3, 8, 16, **share),
    ):
        parts = [batch(rows=slice(i, i + 4)) for i in (0, 4)]
        assert (np.concatenate(parts) == batch()).all()
