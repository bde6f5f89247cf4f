"""README.md and benchmarks/README.md: their numbers are those of committed results, and each says how old it is.

Covers: the length and the links of the README; the numbers and their files; commit and date beside a number that is
older than the last change of the code that it measures. Its programs are run by test_docs.py.
"""

import itertools
import re
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moax.mesh.collectives import GRAD_REDUCE
from support.results import (
    RESULTS,
    Origin,
    age_of,
    cited_files,
    complete_history,
    is_current,
    origin,
    read,
    read_rows,
)

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

PROSE = " ".join(README.split())  # sentences without their line ends
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()
MAX_AGE = 100  # commits that changed what is measured, from a result of the README to today
PEERS = {"torch", "torch_grouped_mm", "torch_scaled_grouped_mm", "pallas_mgpu", "ragged_dot", "public", "native"}
AUTO_AT_EP_4 = {
    "qwen3-30b": "all_gather",
    "mixtral-8x7b": "all_to_all",
}  # tests/tools/test_estimate.py holds auto to it
# The newest run on four GPUs that measured moax and its peer in one call, by model.
BLOCKS = {"qwen3-30b": "x4_block_qwen3.json", "mixtral-8x7b": "x4_block_mixtral.json"}


def block_times() -> dict[tuple[str, str, str], float]:
    """ms of forward and backward on four H200s, by model, implementation and recipe, with the exchange of `auto`."""
    times = {}
    for model, name in BLOCKS.items():
        for row in read_rows(name):
            exchange = row["extra"].get("exchange")  # a peer has none
            of_model = row["case"].startswith(model) and row["direction"] == "fwd+bwd"
            if of_model and exchange in (None, AUTO_AT_EP_4[model]):
                times[model, row["impl"], row["recipe"]] = row["us"] / 1e3
    return times


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a page: a list item is one, and so is a table together with the paragraph before it."""
    before = ""
    for part in re.split(r"\n\s*\n", text):
        if part.startswith("|"):
            before += "\n" + part
            continue
        yield from filter(None, [before])
        *items, before = re.split(r"\n(?=- )", part)
        yield from items
    yield before


def undated(text: str, origin: Callable[[str], Origin], current: Callable[[str], bool]) -> list[str]:
    """Returns the result files of `text` that are old, or unknown, and whose commit and date do not stand beside them.

    Args:
      text: the page.
      origin: file name -> its commit and date.
      current: commit -> whether it measured the code of today.
    """
    complaints = []
    for part in paragraphs(text):
        for name in cited_files(part):
            sha, date = origin(name)
            if not current(sha) and not (sha in part and date in part):
                complaints.append(f"{name} is of {sha}, {date}: write both beside it, or measure again")
    return complaints


def test_readme_is_short():
    """Breaks if the README grows beyond what a newcomer reads; what is more belongs into docs/."""
    assert len(README.splitlines()) <= 150


def test_the_page_of_a_package_index_has_no_dead_link(monkeypatch):
    """Breaks if a link into the repository stays in the page of a package index, or its path does not exist."""
    interface = types.SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling", types.ModuleType("hatchling"))
    monkeypatch.setitem(sys.modules, "hatchling.metadata", types.ModuleType("hatchling.metadata"))
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin", types.ModuleType("hatchling.metadata.plugin"))
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    page = runpy.run_path(str(ROOT / "scripts" / "index_readme.py"))["index_readme"](README)
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", page)
    paths = re.findall(r"\]\(((?!https?://)[^)#]+)", README)
    assert len(paths) > 10 and all((ROOT / path).exists() and f"`{path}`" in page for path in paths)


@pytest.mark.parametrize("page", [README, BENCHMARKS], ids=["README.md", "benchmarks/README.md"])
def test_old_numbers_say_their_commit_and_date(page):
    """Breaks if a number is older than the last change of what it measures, or its commit is of no history, while its
    commit and date do not stand beside it."""
    if not complete_history():
        pytest.skip("this tree has no git history, or a part of it, which cannot say what is older")
    assert not undated(page, origin, is_current)


def test_numbers_of_the_readme_are_young():
    """Breaks if the README shows a number that is older than 100 commits of what it measures."""
    if not complete_history():
        pytest.skip("a shallow clone, or none, cannot count the commits since a result")
    ages = {name: age_of(origin(name).sha) for name in cited_files(README)}
    print(*(f"{name}: {age} commits" for name, age in ages.items()), sep="\n")
    assert not [name for name, age in ages.items() if age is None or age > MAX_AGE]


def test_an_old_number_without_its_date_is_found():
    """Breaks if the check of old numbers misses a date or a wrong commit, or asks for the date of a new number."""
    files = {"old.json": Origin("aaaaaaa", "2026-01-02"), "new.json": Origin("bbbbbbb", "2026-03-04")}

    def names(text: str) -> list[str]:
        return [line.split()[0] for line in undated(text, files.__getitem__, lambda sha: sha == "bbbbbbb")]

    assert names("It takes 4 ms (`old.json`).") == ["old.json"]
    assert names("It takes 4 ms (`benchmarks/results/old.json`, aaaaaaa, 2026-01-02).") == []
    assert names("It takes 4 ms (`old.json`, 2026-01-02).") == names("4 ms (`old.json`, aaaaaaa).") == ["old.json"]
    assert names("It takes 4 ms (`old.json`, ccccccc, 2026-01-02).") == ["old.json"]
    assert names("It takes 4 ms (`new.json`).") == []
    assert names("- 4 ms (`old.json`)\n- 5 ms (`old.json`, aaaaaaa, 2026-01-02)") == ["old.json"]
    assert names("Times (`old.json`, aaaaaaa, 2026-01-02):\n\n| a |\n|---|\n| 4 |") == []
    assert names("Of aaaaaaa, 2026-01-02.\n\nTimes:\n\n| a |\n|---|\n| 4, `old.json` |") == ["old.json"]


def test_a_commit_of_no_history_is_old():
    """Breaks if a result whose commit cannot be found passes as one of today, or the newest commit does not."""
    assert not is_current("0" * 40)
    assert is_current("HEAD") or not complete_history()


def test_every_result_is_printed():
    """Breaks if a result file is kept that no page shows, or has lists of samples."""
    pages = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    assert not [path.name for path in RESULTS.iterdir() if path.name not in text]
    assert max(len(path.read_text()) for path in RESULTS.glob("*.json")) < 30_000


def test_bytes_are_committed():
    """Breaks if the first number is not the bytes that wire.json holds, or is no longer half of bf16."""
    gathered = {(r["model"], r["recipe"]): r["gathered"] for r in read_rows("wire.json")}
    shown = re.search(r"receives ([\d,]+) bytes of weights in a training step instead of ([\d,]+) in bf16", PROSE)
    assert shown, "the README no longer says how many bytes a device receives"
    quantized, plain = (int(value.replace(",", "")) for value in shown.groups())
    assert (quantized, plain) == (gathered["mixtral-8x7b", "fp8_block"], gathered["mixtral-8x7b", None])
    assert f"{quantized / plain:.2f}" == "0.50"


def test_speedup_is_committed():
    """Breaks if the second number is not the quotients of measured times of like precision, with the worst of them."""
    times = block_times()

    def ratios(ours: str, theirs: str) -> list[str]:
        return sorted(
            f"{times[model, 'torch', theirs] / times[model, 'moax', ours]:.2f}"
            for model in ("qwen3-30b", "mixtral-8x7b")
        )

    (low8, high8), (low16, high16) = ratios("fp8_block", "fp8_rowwise"), ratios("none", "none")
    assert f"**{low8} to {high8} times PyTorch's speed in FP8, {low16} to {high16} in bf16.**" in PROSE


def test_loss_is_committed():
    """Breaks if a gap of the loss is not the last one that was measured, or an arm does not keep the bar."""
    arms, meshes = read("x4_arms.json"), read("x4_arms_mesh.json")
    for body, arm, sentence in (
        (arms, "fp8_block", "FP8 ends {} steps later {:.4f} nats a byte above bf16"),
        (meshes, "none on fsdp=2,ep=2", "bf16 that goes on from fsdp 4 on fsdp 2 x ep 2 ends {1:.4f} nats below"),
    ):
        last = next(gap for gap in reversed(body["gaps"]) if gap["arm"] == arm)
        begin = next(run["steps"][0] for run in body["held_out"] if run["arm"] == arm)
        assert last["step"] == body["config"]["steps"] and abs(last["mean"]) < body["bar"]
        assert (last["mean"] > 0) == ("above" in sentence)
        assert sentence.format(f"{last['step'] - begin:,}", abs(last["mean"])) in PROSE


def steps_of_maxtext() -> tuple[list[tuple[str, ...]], list[tuple[float, float]]]:
    """The rows of MaxText's step on each mesh of four GPUs, and by how much moax is faster in bf16 and in FP8."""
    meshes = (
        ("fsdp 4", "x4_trainer.json", "fsdp=4 ", "gathered", "maxtext-tokamax-experts-overlap"),
        ("fsdp 2 x ep 2", "x4_trainer_expert.json", "fsdp=2,expert=2 ", "gathered", "maxtext-tokamax-ring-overlap"),
        ("ep 4", "x4_trainer_expert.json", " expert=4 ", "kept", "maxtext-tokamax-ring"),
    )
    rows, ratios = [], []
    for label, name, mesh, suffix, way in meshes:
        step = {
            (row["impl"], row["recipe"]): row["us"] / 1e3
            for row in read_rows(name)
            if row["us"] and mesh in row["case"]
        }
        theirs = step[way, "none"]
        bf16 = step["moax", f"none+{suffix}"]
        fp8 = step["moax", f"fp8_block+{suffix}"]
        rows.append((f"step of Qwen3-30B, {label}", "32,768", f"{fp8:.1f}", "", f"{bf16:.1f}", "", f"{theirs:.1f}"))
        ratios.append((theirs / bf16, theirs / fp8))
    return rows, ratios


def test_performance_is_committed():
    """Breaks if the table shows a time that was not measured, or hides that of a faster peer."""
    steps: dict[tuple[str, str, str], float] = {}
    for name in ("h100_trainer_mixtral.json", "h100_trainer_ways.json", "h100_trainer.json"):  # a later one counts
        steps |= {(row["case"], row["impl"], row["recipe"]): row["us"] / 1e3 for row in read_rows(name) if row["us"]}
    for case in {case for case, *_ in steps}:
        of_case = {impl: ms for (timed_case, impl, _), ms in steps.items() if timed_case == case and impl != "moax"}
        fastest = min(ms for impl, ms in of_case.items() if "capacity" not in impl)  # a capacity drops tokens
        assert of_case["maxtext-tokamax"] <= 1.01 * fastest, "the README shows the fastest way that drops nothing"
    assert steps["mixtral-8x7b", "maxtext-capacity1.25", "none"] < steps["mixtral-8x7b", "moax", "none"]
    assert "1.25, which drops tokens, is faster than moax in bf16" in PROSE
    blocks = block_times()
    layer = {
        (row["impl"], row["recipe"]): row["ms_a_layer"]
        for row in read_rows("x4_overlap_channels.json")
        if (row["tokens"], row["fsdp"], row["options"]) == (16384, 4, row["impl"] == "moax")
    }
    step_rows, ratios = steps_of_maxtext()
    in_bf16, in_fp8 = (f"{min(ratio):.2f} to {max(ratio):.2f} times" for ratio in zip(*ratios, strict=True))
    assert f"**{in_bf16} the speed of MaxText" in PROSE
    assert f"in FP8 moax is at {in_fp8}" in PROSE
    rows = [
        *(
            (
                f"block of {name}, ep 4",
                "8,192",
                *(
                    f"{blocks[case, *way]:.2f}"
                    for way in (("moax", "fp8_block"), ("torch", "fp8_rowwise"), ("moax", "none"), ("torch", "none"))
                ),
                "",
            )
            for name, case in (("Qwen3-30B", "qwen3-30b"), ("Mixtral-8x7B", "mixtral-8x7b"))
        ),
        ("layer of Qwen3-30B, fsdp 4", "16,384", f"{layer['moax', 'fp8_block']:.1f}", "",
         f"{layer['moax', 'none']:.1f}", f"{layer['fsdp2', 'none']:.1f}", ""),
        *step_rows,
    ]  # fmt: skip
    table = README[README.index("| ms | tokens a GPU |") :].split("\n\n")[0].splitlines()[2:]
    assert [tuple(cell.strip() for cell in line[1:-1].split("|")) for line in table] == rows


def test_layers_and_a_language_model_are_committed():
    """Breaks if the README compares four GPUs and one otherwise than they were measured."""
    layers = {
        (row["fsdp"], row["impl"], row["recipe"]): f"{row['ms_a_layer']:.1f}"
        for row in read_rows("x4_overlap_channels.json")
        if row["tokens"] == 16384
    }
    four, one = (
        [layers[fsdp, *way] for way in (("moax", "fp8_block"), ("moax", "none"), ("fsdp2", "none"))] for fsdp in (4, 1)
    )
    assert f"takes {four[0]} ms in FP8 on fsdp 4 of H200s and {four[1]} in bf16, PyTorch's FSDP2 {four[2]}" in PROSE
    assert f"On one of them it takes {one[0]}, {one[1]} and {one[2]} (" in PROSE
    on_mesh, alone = (
        next(row["extra"]["tokens_per_s"] for row in read_rows(name) if row["recipe"] == "fp8_block")
        for name in ("x4_train.json", "h200_train.json")
    )
    assert f"trains {on_mesh:,.0f} tokens/s a GPU in FP8 on fsdp 2 x ep 2" in PROSE
    assert f"and {alone:,.0f} on one (" in PROSE


def benchmark_table() -> list[str]:
    """The rows of the table of benchmarks/README.md: bf16 of moax and of its fastest peer, then FP8 of both."""
    lines = []

    def add(what: str, name: str, best, *columns: list[float]) -> None:
        cells = [f"{best(values):.{0 if best(values) > 100 else 2}f}" if values else "" for values in columns]
        lines.append(f"| {what} | {' | '.join(cells)} | `{name}`, {', '.join(origin(name))} |")

    def pick(name: str, field: str, scale: float, **want) -> tuple[list[float], ...]:
        """Values of bf16 and FP8, each of moax and of its peers."""
        rows = [row for row in read_rows(name) if row["us"] and not row["recipe"].endswith("+kept")]
        rows = [row for row in rows if all(row[key] == value for key, value in want.items())]
        return tuple(
            [row[field] / scale for row in rows if (row["recipe"] != "none") == quantized and row["impl"] in impls]
            for quantized in (False, True)
            for impls in ({"moax"}, PEERS)
        )

    for case in ("mixtral", "qwen3", "dsv3"):
        for direction in ("fwd", "dgrad", "wgrad"):
            values = pick("h200_gemm.json", "tflops", 1, case=case, direction=direction)
            add(f"matmul {case} {direction}, TFLOP/s", "h200_gemm.json", max, *values)
    for case in ("mixtral", "qwen3", "dsv3"):
        rates = {r["algorithm"]: r["tflops"] for r in read_rows("h200_xla_products.json")
                 if (r["case"], r["direction"]) == (case, "fwd")}  # fmt: skip
        add(f'matmul {case} fwd, `kernels="xla"`, TFLOP/s', "h200_xla_products.json", max,
            [rates["switch"]], [rates["ragged_dot"]], [], [])  # fmt: skip
    qwen = "h200_block_qwen3.json"
    for name in (qwen, "h200_block.json", "h200_block_gpt_oss.json"):
        for case in dict.fromkeys(row["case"] for row in read_rows(name)):
            bf16, _, fp8, _ = pick(name, "us", 1e3, case=case, direction="fwd+bwd")
            add(f"block {case}, one GPU, ms", name, min, bf16, [], fp8, [])
    both = [row for row in read_rows(qwen) if row["direction"] == "fwd+bwd" and row["case"] == "qwen3-30b T8192"]
    prequantized = [row["us"] / 1e3 for row in both if row["recipe"] == "fp8_block+kept"]
    add("block qwen3-30b T8192, prequantized weights, one GPU, ms", qwen, min, [], [], prequantized, [])
    for model in ("qwen3-30b", "mixtral-8x7b"):
        name = "h200x2_block.json"
        ours, theirs = (pick(name, "us", 1e3, case=f"{model} T8192 fsdp=1,ep=2{way}", direction="fwd+bwd")
                        for way in (" auto", ""))  # fmt: skip
        values = (ours[0], theirs[1], ours[2], theirs[3])
        add(f"block {model} T8192, ep 2, `all_gather`, ms", name, min, *values)
    for model, name in BLOCKS.items():
        for exchange in ("all_gather", "all_to_all"):
            rows = [row for row in read_rows(name) if row["case"].startswith(model)]
            rows = [row for row in rows if row["direction"] == "fwd+bwd" and not row["recipe"].endswith("+kept")]
            columns = [
                [r["us"] / 1e3 for r in rows if (r["recipe"] != "none") == quantized
                 and r["extra"].get("exchange") == (exchange if ours else None)]
                for quantized in (False, True) for ours in (True, False)
            ]  # fmt: skip
            add(f"block {model} T8192, ep 4, `{exchange}`, ms", name, min, *columns)
    for row in read_rows("h200x2_imbalance.json"):
        if row["extra"]["buffer_factor"] == 1.25 and row["extra"]["imbalance"] in (1.0, 1.5, 2.0):
            what = f"block qwen3-30b T8192, ep 2, {row['extra']['imbalance']:g} x the balanced load, ms"
            add(what, "h200x2_imbalance.json", min, [], [], [row["us"] / 1e3], [])
    steps = (
        ("x4_trainer.json", "MaxText", "four GPUs"),
        ("x4_trainer_expert.json", "MaxText", "four GPUs"),
        ("x4_trainer_ways.json", "MaxText", "four GPUs"),
        ("x4_trainer_single.json", "MaxText", "four GPUs"),
        ("x4_trainer_single_axes.json", "MaxText", "four GPUs"),
        ("x4_trainer_loops.json", "MaxText", "four GPUs"),
        ("x4_trainer_gathered.json", "MaxText", "four GPUs"),
        ("h200x2_trainer_gathered.json", "MaxText", "two GPUs"),
        ("h200x2_trainer_single.json", "MaxText", "two GPUs"),
        ("h100_trainer.json", "MaxText", "one GPU"),
        ("h100_trainer_ways.json", "MaxText, all its ways", "one GPU"),
        ("x4_train.json", "`lm/`", "four GPUs"),
        ("x4_train_one_gpu.json", "`lm/`", "one GPU"),
        ("h200_train.json", "`lm/`", "one GPU"),
        ("h100_train_qwen3.json", "`lm/`", "one GPU"),
    )
    for name, what, where in steps:
        for case in dict.fromkeys(row["case"] for row in read_rows(name)):
            rows = [row for row in read_rows(name) if row["case"] == case and row["us"]]
            if not rows:
                continue  # the call ended before
            columns = [
                [r["us"] / 1e3 for r in rows if (not r["recipe"].startswith("none"), r["impl"] == "moax") == column]
                for column in ((False, True), (False, False), (True, True), (True, False))
            ]
            add(f"step of {what}, {case}, {where}, ms", name, min, *columns)
    for row in read_rows("h200x2_scatter.json"):
        if row["case"] == "qwen3-30b" and row["recipe"] in GRAD_REDUCE:
            what = f'sum of gradients of qwen3-30b, fsdp 2, `"{row["recipe"]}"`, ms'
            add(what, "h200x2_scatter.json", min, [row["us"] / 1e3], [], [], [])
    return lines


def test_benchmarks_are_committed():
    """Breaks if benchmarks/README.md shows a number that was not measured, or leaves out a row of ours."""
    shown = [line for line in BENCHMARKS.splitlines() if re.search(r"\.json`, [0-9a-f]{7}, [\d-]{10} \|$", line)]
    assert shown == benchmark_table()
    assert len(BENCHMARKS.splitlines()) <= 150


def test_rows_behind_a_peer_are_counted():
    """Breaks if a peer comes ahead in a row, or falls behind in one, and benchmarks/README.md counts other rows."""
    behind = []
    for line in benchmark_table():
        what, *cells, _ = (cell.strip() for cell in line.strip("|").split("|"))
        pairs = (cells[:2], cells[2:4])
        # Times are better where they are less.
        sign = 1 if what.endswith("TFLOP/s") else -1
        behind += [what for own, peer in pairs if own and peer and sign * float(own) < sign * float(peer)]
    assert len(behind) == 3, behind
    assert "moax is behind its peer in three rows: " in BENCHMARKS


EXCHANGES = ("all_gather", "all_to_all")
LABELS = {"none": "bf16", "fp8_block": "`fp8_block`", "fp8_block+kept": "`fp8_block`, prequantized weights"}


def read_exchanges(name: str, direction: str = "fwd+bwd") -> dict[tuple[str, str, str], dict]:
    """Rows of one chunk, by model, recipe and exchange, or implementation of a peer."""
    return {
        (row["case"].split()[0], row["recipe"], row["extra"].get("exchange") or row["impl"]): row
        for row in read_rows(name)
        if row["direction"] == direction and row["extra"].get("chunks", 1) == 1
    }


def test_times_of_exchanges_on_two_gpus_are_committed():
    """Breaks if docs/how-to/choose.md shows a time of an exchange at ep 2 that its files do not hold."""
    page = (ROOT / "docs" / "how-to" / "choose.md").read_text()
    rows = {}
    for name in ("qwen3", "mixtral", "dsv3"):
        rows |= read_exchanges(f"h200x2_exchanges_{name}.json")
    for model, recipe in {key[:2]: None for key in rows}:
        cells = [f"{rows[model, recipe, exchange]['us'] / 1e3:.2f}" for exchange in EXCHANGES]
        assert f"| {model}, {LABELS[recipe]} | {' | '.join(cells)} |" in page
    rows = read_exchanges("h200x2_exchanges_overlap.json")
    for exchange in EXCHANGES:
        bf16, fp8 = (f"{rows['qwen3-30b', recipe, exchange]['us'] / 1e3:.2f}" for recipe in ("none", "fp8_block"))
        assert re.search(rf"{bf16}( ms in bf16)? and {fp8}( in `fp8_block`)?\s+by `{exchange}`", page)


def test_times_of_exchanges_on_four_gpus_are_committed():
    """Breaks if docs/how-to/choose.md shows a time of an exchange at ep 4, or a choice of `auto`, that its files do not
    hold."""
    page = (ROOT / "docs" / "how-to" / "choose.md").read_text()
    prose = " ".join(page.split())
    alone = read_exchanges("x4_block_one_gpu.json")
    options = read_exchanges("x4_block_overlap.json")
    chosen = []  # how much longer the exchange of auto takes than the fastest one
    for name in ("qwen3", "mixtral", "dsv3"):
        rows = read_exchanges(f"h200x2_exchanges_{name}.json")
        for model, recipe in {key[:2]: None for key in rows}:
            times = {exchange: rows[model, recipe, exchange]["us"] for exchange in EXCHANGES}
            chosen.append(times["all_gather"] / min(times.values()) - 1)  # which auto takes at ep 2
    waits = []  # ms that nothing hides, in bf16
    for model, name in BLOCKS.items():
        installed = read_exchanges(name)
        for recipe, label in LABELS.items():
            cells = [f"{alone[model, recipe, 'moax']['us'] / 1e3:.2f}"]
            for rows in (installed, options):
                times = {exchange: rows[model, recipe, exchange]["us"] / 1e3 for exchange in EXCHANGES}
                cells += [f"{time:.2f}" for time in times.values()]
                chosen.append(times[AUTO_AT_EP_4[model]] / min(times.values()) - 1)
            peer = installed.get((model, {"fp8_block": "fp8_rowwise"}.get(recipe, recipe), "torch"))
            cells.append("-" if peer is None else f"{peer['us'] / 1e3:.2f}")
            assert f"| {model}, {label} | {' | '.join(cells)} |" in page
        ours = model, "none", AUTO_AT_EP_4[model]
        waits += [f"{rows[ours]['extra']['exposed_us'] / 1e3:.1f}" for rows in (installed, options)]
    forward = read_exchanges(BLOCKS["qwen3-30b"], "fwd")["qwen3-30b", "none", "all_gather"]
    both = read_exchanges(BLOCKS["qwen3-30b"])
    gather, slots = (both["qwen3-30b", "none", exchange]["extra"]["stages_us"] for exchange in EXCHANGES)
    plan = sum(slots[stage] - gather.get(stage, 0) for stage in ("plan", "permute")) / 1e3
    for sentence in (
        f"at ep 2, and {plan:.1f} at ep 4.",
        f"In {forward['extra']['exposed_us'] / 1e3:.1f} ms of its forward, and "
        f"in {waits[0]} of its forward and backward in bf16, the GPU communicates or waits, and no work hides it. "
        f"With the options {waits[1]} of the latter are left.",
        f"waits for {waits[2]} ms of its 30 by `all_to_all` in bf16, and for {waits[3]} with them.",
    ):
        assert sentence in prose
    assert f"is the faster one, or at most {max(chosen):.1%} slower".replace("%", " %") in prose


def test_times_of_layers_in_a_scan_are_committed():
    """Breaks if a table of docs/how-to/overlap.md shows a time that its file does not hold, or that does not follow
    from such times."""
    page = (ROOT / "docs" / "how-to" / "overlap.md").read_text()
    ways = (("moax", "none", "bf16"), ("moax", "fp8_block", "`fp8_block`"), ("fsdp2", "none", "FSDP2"))

    def read_layers(name: str) -> dict[tuple, dict]:
        names = ("impl", "recipe", "tokens", "fsdp", "ep", "options")
        return {tuple(row[name] for name in names): row for row in read_rows(name)}

    def cells_of(rows: dict[tuple, dict], way: tuple[str, str], tokens: int, fsdp: int) -> list[str]:
        """One GPU, fsdp, their ratio, and the exposed time beside that of all collectives."""
        row = rows[*way, tokens, fsdp, 1, way[0] == "moax"]
        exposed = f"{row['exposed_ms']:.1f} ({row['wire_ms']:.1f})" if way[0] == "moax" else "-"
        times = (rows[*way, tokens, 1, 1, False]["ms_a_layer"], row["ms_a_layer"], row["times_fsdp_1"])
        return [*(f"{time:.2f}" for time in times), exposed]

    four = read_layers("x4_overlap.json")
    for tokens, (impl, recipe, label) in itertools.product((4096, 8192, 16384, 32768), ways):
        cells = cells_of(four, (impl, recipe), tokens, 4)
        both = ["-"] * 3
        if impl == "moax":
            row = four[impl, recipe, tokens, 2, 2, True]
            times = (four[impl, recipe, tokens, 1, 2, False]["ms_a_layer"], row["ms_a_layer"], row["times_fsdp_1"])
            both = [f"{time:.2f}" for time in times]
        assert f"| {tokens}, {label} | {' | '.join([*cells, *both])} |" in page
    newest = read_layers("x4_overlap_channels.json")
    for tokens, (impl, recipe, label) in itertools.product((8192, 16384), ways[:2]):
        alone = newest[impl, recipe, tokens, 1, 1, False]["ms_a_layer"]
        row = newest[impl, recipe, tokens, 4, 1, True]
        computed = [row["ms_a_layer"] + row["exposed_ms"] * (4 * (n - 1) / (3 * n) - 1) for n in (8, 16)]
        shown = [f"{time:.2f} ({time / alone:.2f})" for time in computed]
        assert f"| {tokens}, {label} | {' | '.join(shown)} |" in page
    factors = [
        [newest["moax", recipe, tokens, 4, 1, True]["times_fsdp_1"] for tokens in (8192, 16384)]
        for recipe in ("fp8_block", "none")
    ]
    prose = " ".join(page.split())
    sentence = "takes {:.2f} times one GPU's time with 8192 tokens a GPU, and {:.2f} times with 16,384.**"
    assert sentence.format(*factors[0]) in prose
    assert "bytes of weights, it takes {:.2f} and {:.2f} times.".format(*factors[1]) in prose
    wire = newest["moax", "none", 8192, 4, 1, True]["wire_ms"]
    work = newest["moax", "none", 8192, 1, 1, False]["ms_a_layer"]
    assert f"with 8192 tokens {wire:.1f} ms of wire stand against {work:.1f} of one GPU's work." in prose
    once = [f"{row['ms_a_layer']:.2f}" for row in read_rows("x4_overlap_gathered.json")]
    assert f"bf16 then takes {once[0]} ms with 8192 tokens, and {once[1]} with 16,384" in prose
    for name, fsdp, sizes in (
        ("x4_overlap_channels.json", 4, (8192, 16384)),
        ("h200x2_overlap.json", 2, (4096, 8192, 16384, 32768)),
    ):
        rows = read_layers(name)
        for tokens, (impl, recipe, label) in itertools.product(sizes, ways):
            assert f"| {tokens}, {label} | {' | '.join(cells_of(rows, (impl, recipe), tokens, fsdp))} |" in page
    rows = read_layers("h200x2_overlap_channels.json")
    for impl, recipe, label in ways[:2]:
        assert f"| 8192, {label} | {' | '.join(cells_of(rows, (impl, recipe), 8192, 2))} |" in page
    for recipe in ("none", "fp8_block"):
        assert f"{four['moax', recipe, 8192, 4, 1, False]['ms_a_layer']:.2f}" in page
