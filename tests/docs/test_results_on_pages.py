"""The numbers of the pages on MaxText, on arms and of the first steps are those of the result files that they cite."""

import re
from typing import Any

from support.results import ROOT, read, read_rows

PAGE = (ROOT / "docs" / "how-to" / "maxtext-gpu.md").read_text()


def format_cells(row: dict[str, Any]) -> str:
    """Returns the cells of a row of the page: step, compute, collectives, exposed, tokens/s and peak."""
    extra = row["extra"]
    times = (row["us"] / 1e3, extra["compute_ms"], extra["wire_ms"], extra["exposed_ms"])
    cells = [f"{time:.0f}" for time in times]
    cells += [f"{extra['tokens_per_s']:,.0f}", f"{extra['peak_bytes'] / 1e9:.1f}"]
    return " | ".join(cells)


def read_steps(*names: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Returns the rows of steps of Qwen3-30B that were timed, by the rest of the case and by the way."""
    rows = {}
    for name in names:
        for row in (row for row in read_rows(name) if row["us"]):
            way = row["recipe"] if row["impl"] == "moax" else row["impl"]
            rows[row["case"].removeprefix("qwen3-30b "), way] = row
    return rows


def check_table(rows: dict[tuple[str, str], dict[str, Any]], labels: dict[tuple[str, str], str]) -> None:
    """Checks that the page has a line for each row, which begins with its label, and that no row lacks one."""
    assert rows.keys() == labels.keys()
    for key, row in rows.items():
        assert f"| {labels[key]} | {format_cells(row)} |" in PAGE


def test_the_step_on_four_gpus_is_committed():
    """Breaks if the page on MaxText shows another number of its step on four GPUs than the files hold."""
    labels = {
        ("x4_trainer.json", "maxtext-tokamax-experts-overlap", "none"): "MaxText, tokamax, bf16, `-experts-overlap`",
        ("x4_trainer.json", "moax", "none+gathered"): "moax, `none+gathered`",
        ("x4_trainer.json", "moax", "fp8_block+gathered"): "moax, `fp8_block+gathered`",
        ("x4_trainer_installed.json", "maxtext-tokamax", "none"): "MaxText, tokamax, bf16",
        ("x4_trainer_installed.json", "moax", "none+kept"): "moax, `none+kept`, split along H",
    }
    ms = {}
    for name in ("x4_trainer.json", "x4_trainer_installed.json"):
        for row in (row for row in read_rows(name) if row["us"]):
            extra = row["extra"]
            key = (name, row["impl"], row["recipe"])
            ms[key] = row["us"] / 1e3
            assert f"| {labels[key]} | {format_cells(row)} |" in PAGE
            if "loss_off_moax" in extra:
                assert extra["loss_off_moax"] < 0.0015 and "differ by 0.15 % at most" in PAGE
    theirs, bf16, fp8, installed, cast_once = (ms[key] for key in labels)
    assert f"{theirs / bf16:.2f} times moax's in bf16 and {theirs / fp8:.2f} times in FP8" in PAGE
    assert f"earlier call {installed / cast_once:.2f} times" in PAGE
    check_causes(ms)


def test_the_steps_with_sharded_experts_are_committed():
    """Breaks if the page on MaxText shows another number of its step on a mesh with `expert` than the files hold."""
    page = " ".join(PAGE.split())
    labels = {
        ("fsdp=2,expert=2 balanced", "maxtext-tokamax-ring-overlap"): "(2, 2): MaxText, tokamax, bf16, `-ring-overlap`",
        ("fsdp=2,expert=2 balanced", "none+gathered"): "(2, 2): moax, `none+gathered`",
        ("fsdp=2,expert=2 balanced", "fp8_block+gathered"): "(2, 2): moax, `fp8_block+gathered`",
        ("expert=4 balanced", "maxtext-tokamax-ring"): "(1, 4): MaxText, tokamax, bf16, `-ring`",
        ("expert=4 balanced", "none+kept"): "(1, 4): moax, `none+kept`",
        ("expert=4 balanced", "fp8_block+kept"): "(1, 4): moax, `fp8_block+kept`",
        ("fsdp=2,expert=2 balanced", "maxtext-tokamax-ring"): "(2, 2): MaxText, tokamax, bf16, `-ring`",
        ("fsdp=2,expert=2 balanced", "maxtext-capacity1.25"): "(2, 2): MaxText, `maxtext-capacity1.25`",
        ("fsdp=2,expert=2 balanced", "maxtext-tokamax-all_to_all-overlap"): "(2, 2): MaxText, tokamax, bf16, "
        "`-all_to_all-overlap`",
        ("fsdp=2,expert=2 text", "none+gathered"): "(2, 2), text: moax, `none+gathered`",
    }
    rows = read_steps("x4_trainer_expert.json", "x4_trainer_ways.json")
    check_table(rows, labels)
    theirs, bf16, fp8, theirs4, bf16_4, fp8_4, installed, *_ = (rows[key]["us"] for key in labels)
    assert f"step takes {theirs / bf16:.2f} times moax's in bf16 and {theirs / fp8:.2f} times in FP8" in page
    assert f"installed with {installed / bf16:.2f} times in bf16" in page
    assert f"On (1, 4) it takes {theirs4 / bf16_4:.2f} and {theirs4 / fp8_4:.2f} times." in page
    assert {f"{bf16 / fp8:.2f}", f"{bf16_4 / fp8_4:.2f}"} == {"1.04"} and "FP8 is 1.04 times as fast as bf16 on" in page
    losses = {key: row["extra"]["losses"] for key, row in rows.items() if "balanced" in key[0]}
    ours = losses["fsdp=2,expert=2 balanced", "none+gathered"]
    distances = {key: max(abs(a - b) / b for a, b in zip(values, ours, strict=True)) for key, values in losses.items()}
    assert max(distances.values()) < 0.0012 and "differ by 0.12 % at most" in page
    assert distances["fsdp=2,expert=2 balanced", "maxtext-capacity1.25"] < 1e-5
    exchange = rows["fsdp=2,expert=2 balanced", "maxtext-tokamax-all_to_all-overlap"]["extra"]["exposed_ms"] / 1e3
    assert f"its exchange is exposed for {exchange:.1f} s" in page
    text = rows["fsdp=2,expert=2 text", "none+gathered"]["extra"]
    scatter = next(kernel["us"] / 1e3 for kernel in text["largest"] if "scatter" in kernel["kernel"])
    assert f"Of the {text['compute_ms']:.0f} ms of compute with text, {scatter:.0f} are the gradient" in page


def test_the_step_with_one_microbatch_is_committed():
    """Breaks if the page on MaxText shows another number of its step with one microbatch than the file holds."""
    page = " ".join(PAGE.split())
    case = "fsdp=2,expert=2 x1 balanced"
    labels = {
        (case, "maxtext-tokamax-ring-overlap"): "MaxText, tokamax, bf16, `-ring-overlap`",
        (case, "none"): "moax, `none`",
        (case, "fp8_block"): "moax, `fp8_block`",
    }
    rows = read_steps("x4_trainer_single.json")
    check_table(rows, labels)
    theirs, bf16, fp8 = (rows[key]["us"] for key in labels)
    factors = f"step takes {theirs / bf16:.2f} times moax's in bf16 and {theirs / fp8:.2f} times in FP8; FP8 is"
    assert f"{factors} {bf16 / fp8:.2f} times as fast as bf16." in page
    their_losses, bf16_losses, fp8_losses = (rows[key]["extra"]["losses"] for key in labels)
    distance = max(abs(a - b) / b for a, b in zip(fp8_losses, bf16_losses, strict=True))
    assert f"FP8 and bf16 differ by {distance:.2%} at most".replace("%", " %") in page
    ratios = [a / b - 1 for a, b in zip(their_losses, bf16_losses, strict=True)]
    sentence = f"MaxText's loss is {ratios[9]:.2%} above moax's at the tenth step, and {ratios[3]:.2%} at the fourth"
    assert sentence.replace("%", " %") in page


def test_one_microbatch_on_the_other_meshes_is_committed():
    """Breaks if the pages on MaxText and on memory show another number of one microbatch on fsdp 4 or expert 4, or
    another price of the loop of rounds, than was measured."""
    page = " ".join(PAGE.split())
    labels = {
        ("fsdp=4 x1 balanced", "none"): "(4, 1) moax, `none`",
        ("fsdp=4 x1 balanced", "fp8_block"): "(4, 1) moax, `fp8_block`",
        ("expert=4 x1 balanced", "maxtext-tokamax-ring"): "(1, 4) MaxText, tokamax, bf16, `-ring`",
        ("expert=4 x1 balanced", "none"): "(1, 4) moax, `none`",
        ("expert=4 x1 balanced", "none+whole"): "(1, 4) moax, `none+whole`",
    }
    rows = read_steps("x4_trainer_single_axes.json")
    check_table(rows, labels)
    bf16, fp8, ring, limited, whole = (rows[key] for key in labels)
    factor = bf16["us"] / fp8["us"]
    assert f"which sends half of these bytes, is {factor:.2f} times as fast as bf16" in page
    assert f"**Loops cost {1 - whole['us'] / limited['us']:.0%} on (1, 4).**".replace("%", " %") in page
    assert f"{idle_ms(limited):.1f} ms of `none` are neither compute nor wire, and {idle_ms(whole):.1f} ms of" in page
    factors = [f"{ring['us'] / row['us']:.2f}" for row in (limited, whole)]
    memory = (whole["extra"]["peak_bytes"] - limited["extra"]["peak_bytes"]) / 1e9
    sentence = "MaxText's step takes {} times that of `none`, and {} times that of `none+whole`, whose buffers take"
    assert f"{sentence.format(*factors)} {memory:.1f} GB more." in page
    on_memory = " ".join((ROOT / "docs/how-to/remat.md").read_text().split())
    times = [f"{row['us'] / 1e3:.1f} ms" for row in (limited, whole)]
    assert f"takes {times[0]} with 1.25 and {times[1]} with `None`, which takes {memory:.1f} GB more" in on_memory


def idle_ms(row: dict[str, Any]) -> float:
    """Returns the ms of a step that are neither compute nor exposed collectives."""
    return row["us"] / 1e3 - row["extra"]["compute_ms"] - row["extra"]["exposed_ms"]


def test_the_step_without_loops_is_committed():
    """Breaks if the page on MaxText shows another step on (2, 2) without loops than was measured."""
    rows = read_steps("x4_trainer_loops.json")
    case = "fsdp=2,expert=2 balanced"
    ours, theirs = (rows[case, way]["us"] / 1e3 for way in ("none+gathered", "maxtext-tokamax-ring-overlap"))
    sentence = (
        f"{ours:.0f} ms for `none+gathered` and {theirs:.0f} for MaxText, which takes {theirs / ours:.2f} times as long"
    )
    assert sentence in " ".join(PAGE.split())


def test_what_one_gather_gains_is_committed():
    """Breaks if the pages on MaxText and on microbatches show another gain of `+gathered` than was measured."""
    page = " ".join(PAGE.split())
    labels = {
        ("fsdp=2 x1 balanced", "maxtext-tokamax-experts-overlap"): "(2, 1) MaxText, tokamax, bf16, `-experts-overlap`",
        ("fsdp=2 x1 balanced", "none"): "(2, 1) moax, `none`",
        ("fsdp=2 x1 balanced", "none+gathered"): "(2, 1) moax, `none+gathered`",
        ("expert=2 x1 balanced", "none"): "(1, 2) moax, `none`",
    }
    rows = read_steps("h200x2_trainer_gathered.json")
    check_table(rows, labels)
    theirs, plain, gathered, _ = (rows[key] for key in labels)
    later = {
        ("fsdp=2 x1 balanced", "fp8_block"): "(2, 1) moax, `fp8_block`",
        ("expert=2 x1 balanced", "maxtext-tokamax-ring"): "(1, 2) MaxText, tokamax, bf16, `-ring`",
        ("expert=2 x1 balanced", "none"): "(1, 2) moax, `none`",
        ("expert=2 x1 balanced", "none+kept"): "(1, 2) moax, `none+kept`",
    }
    later_rows = read_steps("h200x2_trainer_single.json")
    check_table(later_rows, later)
    ring, ours = (later_rows["expert=2 x1 balanced", way]["us"] for way in ("maxtext-tokamax-ring", "none"))
    assert f"On (1, 2) MaxText's step takes {ring / ours:.2f} times that of `none`." in page
    factors = [f"{theirs['us'] / row['us']:.2f}" for row in (plain, gathered)]
    memory = (gathered["extra"]["peak_bytes"] - plain["extra"]["peak_bytes"]) / 1e9
    sentence = "MaxText's step takes {} times that of `none`, and {} times that of `none+gathered`, whose weights take"
    assert f"{sentence.format(*factors)} {memory:.1f} GB more for 4 layers." in page
    their_losses, plain_losses, losses = (row["extra"]["losses"] for row in (theirs, plain, gathered))
    distance = max(abs(a - b) / b for a, b in zip(losses, plain_losses, strict=True))
    above = their_losses[9] / losses[9] - 1
    sentence = f"differ by {distance:.3%} at most on (2, 1), and MaxText's is {above:.2%} above them at the tenth step"
    assert sentence.replace("%", " %") in page
    of_four = {
        ("fsdp=4 x1 balanced", "maxtext-tokamax-experts-overlap"): "(4, 1) MaxText, tokamax, bf16, `-experts-overlap`",
        ("fsdp=4 x1 balanced", "none"): "(4, 1) moax, `none`",
        ("fsdp=4 x1 balanced", "none+gathered"): "(4, 1) moax, `none+gathered`",
    }
    rows_of_four = read_steps("x4_trainer_gathered.json")
    check_table(rows_of_four, of_four)
    theirs_on_four, *ours_on_four = (rows_of_four[key]["us"] for key in of_four)
    factors = [f"{theirs_on_four / time:.2f}" for time in ours_on_four]
    plain_peak, gathered_peak = (rows_of_four[key]["extra"]["peak_bytes"] / 1e9 for key in list(of_four)[1:])
    memory_clause = f"which takes {gathered_peak - plain_peak:.1f} GB more."
    sentence = "MaxText's step takes {} times that of `none` there, and {} times that of `none+gathered`,"
    assert f"{sentence.format(*factors)} {memory_clause}" in page
    on_microbatches = (ROOT / "docs/how-to/microbatches.md").read_text()
    times = [round(row["us"] / 1e3) for row in (gathered, plain)]
    assert f"on fsdp 2 takes {times[0]} ms with it and {times[1]} without." in on_microbatches


def test_layers_in_a_scan_are_committed():
    """Breaks if the pages show another time of layers in a scan than was measured."""
    page = (ROOT / "docs/how-to/stack-layers.md").read_text()
    ms = {
        (row["tokens"], row["impl"], row["recipe"]): f"{row['ms_a_layer']:.2f}" for row in read_rows("h200_scan.json")
    }
    for tokens in (4096, 8192, 16384):
        cells = [ms[tokens, *way] for way in (("moax", "none"), ("moax", "fp8_block"), ("fsdp2", "none"))]
        assert f"| {tokens} | {' | '.join(cells)} |" in page
    rows = [row for row in read_rows("h200x2_scan.json") if row["options"]]
    for mesh in ("ep", "dp", "fsdp"):
        cells = [f"{row['ms_a_layer']:.2f}" for row in rows if row[mesh] == 2]
        assert f"| {mesh} 2 | {' | '.join(cells)} |" in page


def test_an_uneven_load_is_committed():
    """Breaks if the page on memory shows another time of an uneven load than was measured."""
    page = " ".join((ROOT / "docs/how-to/remat.md").read_text().split())
    rows = {
        (row["extra"]["imbalance"], row["extra"]["buffer_factor"]): row for row in read_rows("h200x2_imbalance.json")
    }
    limited, whole = ([f"{rows[load, factor]['us'] / 1e3:.2f}" for load in (1.0, 1.5, 2.0)] for factor in (1.25, None))
    assert f"takes {limited[0]} ms on two H200s at the balanced load, {limited[1]} ms when" in page
    assert (
        f"and {limited[2]} ms at twice the load. With `None` it takes {whole[0]}, {whole[1]} and {whole[2]} ms" in page
    )
    saved = [round(rows[1.0, factor]["extra"]["saved_bytes"] / 1e6) for factor in (None, 1.25)]
    assert f"keeps {saved[0]} MB for backward in place of {saved[1]}" in page


def test_the_language_model_on_four_gpus_is_committed():
    """Breaks if the page shows another step of `lm/` on four GPUs, or on one of them, than was measured."""
    steps = {}
    for name, label in (("x4_train_one_gpu.json", "one GPU"), ("x4_train.json", "(fsdp 2, ep 2)")):
        cells = [label]
        for row in read_rows(name):
            steps[name, row["recipe"]] = row["us"]
            extra = row["extra"]
            cells += [
                f"{row['us'] / 1e3:.1f}",
                f"{extra['tokens_per_s']:,.0f}",
                f"{extra['peak_bytes'] / 1e9:.1f}",
            ]
        assert f"| {' | '.join(cells)} |" in PAGE
    one_bf16, one_fp8, bf16, fp8 = steps.values()
    page = " ".join(PAGE.split())
    assert f"takes {bf16 / one_bf16:.3f} times as long in bf16, and {fp8 / one_fp8:.3f} times in FP8" in page
    assert f"FP8 is {bf16 / fp8:.2f} times as fast as bf16 there" in page
    bf16, fp8 = (f"{row['us'] / 1e3:.1f}" for row in read_rows("h200_train.json"))
    assert f"the step takes {bf16} ms in bf16 and {fp8} in `fp8_block` (" in " ".join(PAGE.split())


def check_causes(ms: dict[tuple[str, str, str], float]) -> None:
    """The page's reasons for the times of a step, and its computation for 48 layers, follow from the same files."""
    page = " ".join(PAGE.split())
    rows = {(row["impl"], row["recipe"]): row["extra"] for row in read_rows("x4_trainer.json") if row["us"]}
    bf16, fp8 = (rows["moax", f"{recipe}+gathered"] for recipe in ("none", "fp8_block"))
    products, quantization = (
        [extra["stages_us"][f"MoE layer: {part}"] / 1e3 for extra in (bf16, fp8)]
        for part in ("grouped products", "quantization")
    )
    assert f"take {products[1]:.0f} ms in place of {products[0]:.0f}, and the quantization of rows and weights " in page
    assert f"rows and weights {quantization[1]:.0f}. " in page
    assert f"The other {fp8['compute_ms'] - products[1] - quantization[1]:.0f} ms of compute" in page
    sums = next(kernel["us"] / 1e3 for kernel in bf16["largest"] if "ReduceScatter" in kernel["kernel"])
    assert f"the sums of gradients, {sums:.0f} ms" in page
    installed = next(row for row in read_rows("x4_trainer_installed.json") if row["impl"] == "moax")
    copies = [
        kernel["us"] / 1e3
        for kernel in installed["extra"]["largest"]
        if "transpose" in kernel["kernel"] and re.search("gather_weight|experts_grad", kernel["scope"])
    ]
    assert f"these copies take {sum(copies):.0f} ms" in page

    # T tokens, width H, V words; four layers of projections run forward twice.
    tokens, width, words, projections = 32768, 2048, 151936, 2048 * 128 * (2 * 32 + 2 * 4)
    head_work = 6 * tokens * width * words
    layer_work = 4 * 6 * tokens * projections * 4 / 3
    matmuls = bf16["stages_us"]["products outside of moax's block"] / 1e3
    head = matmuls * head_work / (head_work + layer_work)
    assert f"take {head:.0f} of the {int(matmuls)} ms" in page
    steps = [ms["x4_trainer.json", *way] for way in (
        ("moax", "none+gathered"), ("moax", "fp8_block+gathered"), ("maxtext-tokamax-experts-overlap", "none")
    )]  # fmt: skip
    seconds = [(head + (step - head) / 4 * 48) / 1e3 for step in steps]
    assert "takes {:.2f} s in bf16, {:.2f} in FP8 and {:.2f} with tokamax".format(*seconds) in page
    rates = [f"{round(tokens / time, -2):,.0f}" for time in seconds]
    assert f"{rates[0]}, {rates[1]} and {rates[2]} tokens/s a GPU" in page


def test_the_page_of_the_step_is_committed():
    """Breaks if docs/how-to/maxtext-gpu.md omits a step, or shows a time, a rate or a peak of memory that none had."""
    for name in ("h100_trainer.json", "h100_trainer_ways.json", "h100_trainer_mixtral.json", "h200_trainer.json"):
        for row in (row for row in read_rows(name) if row["us"]):
            shown = f"{row['us'] / 1e3:.1f} | {row['tflops']:.0f} | {row['extra']['peak_bytes'] / 1e9:.1f} GB |"
            assert shown in PAGE, (name, row["case"])
    profiled = [row["extra"]["stages_us"] for row in read_rows("h100_trainer_parts.json")]
    for part in profiled[0]:
        if "quantization" not in part:  # of no row here
            assert f"| {' | '.join(f'{us[part] / 1e3:.1f}' for us in profiled)} |" in PAGE, part
    own = {(int(re.search(r" x(\d) ", row["case"])[1]), row["recipe"]): row
           for row in read_rows("h100_train_qwen3.json")}  # fmt: skip
    for count in (1, 2, 4, 8):
        bf16, fp8 = own[count, "none"], own[count, "fp8_block"]
        rates = [row["extra"]["tokens_per_s"] for row in (bf16, fp8)]
        computed = fp8["extra"]["fsdp8_computed"]["tokens_per_s"]
        shown = [f"{count}", *(f"{row['us'] / 1e3:.1f}" for row in (bf16, fp8)), *(f"{rate:,.0f}" for rate in rates)]
        assert f"| {' | '.join([*shown, f'{bf16["us"] / fp8["us"]:.2f}', f'{computed:,.0f}'])} |" in PAGE
    of_parts = [own[4, recipe]["extra"]["stages_us"] for recipe in ("none", "fp8_block")]
    table = PAGE[PAGE.index("The parts of a step of 4 microbatches") :]
    shown = re.findall(r"^\| [^|]+ \| (\d+\.\d) \| (\d+\.\d) \|$", table, re.M)
    parts = [tuple(f"{us[part] / 1e3:.1f}" for us in of_parts) for part in of_parts[0]]
    assert sorted(shown) == sorted(pair for pair in parts if pair != ("0.0", "0.0"))


def test_the_arms_are_committed():
    """Breaks if the page on recipes shows another distance of an arm, or hides what an arm dropped."""
    page = (ROOT / "docs" / "how-to" / "compare-recipes.md").read_text()
    labels = {
        "fp8_block": "--recipe fp8_block",
        "none on fsdp=2,ep=2": "--mesh fsdp=2,ep=2",
        "none with capacity 1.25 on fsdp=2,ep=2": "--mesh fsdp=2,ep=2 --capacity-factor 1.25",
    }
    shown = []
    for name in ("x4_arms.json", "x4_arms_mesh.json"):
        body = read(name)
        dropped = {run["arm"]: run["dropped"] for run in body["held_out"]}
        for arm in body["furthest"]:
            last = next(gap for gap in reversed(body["gaps"]) if gap["arm"] == arm["arm"])
            assert last["step"] == body["config"]["steps"] and abs(last["mean"]) < body["bar"]
            cells = [f"`{labels[arm['arm']]}`", f"{last['mean']:+.4f}", f"{abs(arm['held_out']['gap']):.4f}"]
            shown.append(f"| {' | '.join(cells)} | {dropped[arm['arm']]:g} |")
    assert len(shown) == len(labels) and all(line in page for line in shown)


def test_three_seeds_are_committed():
    """Breaks if the tutorial shows another gap of FP8, or another distance between seeds, than was measured."""
    body = read("h200_arms.json")
    last = body["gaps"][-1]
    assert last["step"] == body["config"]["steps"] and len(last["gaps"]) == body["seeds"] == 3
    page = " ".join((ROOT / "docs" / "tutorial" / "steps.md").read_text().split())
    assert f"FP8 is {last['mean']:.4f} nats a byte above bf16 in the mean of the seeds" in page
    assert f"the seeds of bf16 differ by {last['between_seeds']:.3f}" in page


def test_kernels_with_prequantized_weights_are_committed():
    """Breaks if the page on microbatches shows another time of the kernels of a block than was measured."""
    rows = {row["recipe"]: row["extra"]["kernel_us"] / 1e3 for row in read_rows("h200_block_qwen3.json")
            if (row["case"], row["direction"]) == ("qwen3-30b T8192", "fwd+bwd")}  # fmt: skip
    page = " ".join((ROOT / "docs/how-to/microbatches.md").read_text().split())
    sentence = f"take {rows['fp8_block']:.2f} ms in `fp8_block`, and {rows['fp8_block+kept']:.2f} ms with prequantized"
    assert sentence in page
