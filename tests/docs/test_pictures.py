"""The pictures that scripts/pictures.py draws: they are those of the committed results, and of the pages around them.

Covers: their bytes; the numbers in them beside those of the tables; what their alternative texts say.
"""

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pictures
import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
PAGES = {
    "wire_and_step.svg": ROOT / "README.md",
    "exchanges.svg": ROOT / "docs" / "how-to" / "choose.md",
    "matmuls.svg": ROOT / "benchmarks" / "README.md",
}


def read_words(name: str) -> list[str]:
    """The words of a committed picture, one entry a text."""
    tree = ElementTree.fromstring((pictures.RESULTS / name).read_text(encoding="utf-8"))
    return [element.text or "" for element in tree.iter(f"{SVG}text")]


def read_sources(name: str) -> list[str]:
    """The result files that a committed picture names in its description."""
    return re.findall(r"(\w+\.json), ", (pictures.RESULTS / name).read_text(encoding="utf-8"))


def read_alternative(name: str) -> str:
    """The alternative text of a picture on its page."""
    shown = re.search(rf"!\[([^\]]+)\]\([^)]*\b{name}\)", PAGES[name].read_text(encoding="utf-8"))
    assert shown, f"{PAGES[name]} does not show {name}"
    return " ".join(shown[1].split())


def read_cells(name: str, row: str) -> list[list[float]]:
    """The numbers of each row of a page whose first cell matches `row`."""
    lines = re.findall(rf"^\| {row} \|(.*)\|$", PAGES[name].read_text(encoding="utf-8"), re.M)
    return [[float(cell) for cell in re.findall(r" (\d+(?:\.\d+)?) (?=\||$)", line)] for line in lines]


def test_every_picture_has_a_page():
    """Breaks if a picture is drawn for no page, or an SVG picture of the results is drawn by no script."""
    assert set(PAGES) == set(pictures.PICTURES) == {path.name for path in pictures.RESULTS.glob("*.svg")}


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_drawn_from_the_results(name):
    """Breaks if a result file changed and the picture did not: run scripts/pictures.py."""
    text = (pictures.RESULTS / name).read_text(encoding="utf-8")
    assert text == pictures.PICTURES[name](pictures.RESULTS)
    assert len(text) < 60_000


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_follows_each_of_its_files(name, tmp_path):
    """Breaks if a picture shows constants, so that new measurements, or their date, would not change it."""
    sources = read_sources(name)
    assert sources
    for source in sources:
        folder = tmp_path / source
        shutil.copytree(pictures.RESULTS, folder, ignore=shutil.ignore_patterns("*.png", "*.svg"))
        text = (folder / source).read_text()
        for field in (r'"(?:us|tflops|gathered|ms_a_layer)": \d', r'"git_sha": "'):
            (folder / source).write_text(re.sub(f"({field})", r"\g<1>1", text))
            assert pictures.PICTURES[name](folder) != pictures.PICTURES[name](pictures.RESULTS), source


def test_the_step_shows_what_its_text_says():
    """Breaks if the alternative text of the picture of README.md has other numbers than the picture."""
    words = " ".join(read_words("wire_and_step.svg"))
    text = read_alternative("wire_and_step.svg")
    numbers = re.findall(r"\b\d[\d,]*(?:\.\d+)?\b", re.sub(r"\w+-\w+", "", text))
    assert len(numbers) == 13
    assert not set(numbers) - set(re.findall(r"\d[\d,]*(?:\.\d+)?", words))
    assert set(re.findall(r"\b\d\d?\.\d\b", words)) <= set(numbers)


def test_exchanges_are_those_of_the_tables():
    """Breaks if the picture of exchanges and the tables above it differ, or its alternative text is wrong."""
    fastest = [("qwen3-30b", 2), ("qwen3-30b", 4), ("mixtral-8x7b", 2)]  # where all_gather is, by the text
    times = []
    for model in ("qwen3-30b", "mixtral-8x7b", "dsv3-slice"):
        for cells in read_cells("exchanges.svg", rf"{model}, (?:bf16|`fp8_block`)"):
            ranks = 2
            drawn = cells
            if len(cells) > 2:
                ranks = 4
                drawn = [*cells[1:3], cells[-1]]  # the row begins with one GPU, and has XLA's options before PyTorch
                assert max(drawn) == drawn[2]  # PyTorch
            if (model, ranks) in fastest:
                assert min(drawn) == drawn[0]
            elif model == "mixtral-8x7b":
                assert max(drawn[:2]) < 1.02 * min(drawn[:2])
            times += drawn
    assert len(times) == 6 * 2 + 4 * 3
    words = read_words("exchanges.svg")
    assert sorted(float(word) for word in words if re.fullmatch(r"\d+\.\d\d", word)) == sorted(times)
    text = read_alternative("exchanges.svg")
    assert "all_gather is the fastest with Qwen3-30B and with Mixtral-8x7B at ep 2" in text
    assert "both transports take about as long with Mixtral-8x7B at ep 4" in text
    assert "PyTorch takes longest" in text


def test_matmuls_are_those_of_the_table():
    """Breaks if the picture of matmuls and the table below it differ, or its alternative text is wrong."""
    rows = read_cells("matmuls.svg", r"matmul \w+ (?:fwd|dgrad|wgrad), TFLOP/s")
    assert len(rows) == 9
    words = read_words("matmuls.svg")
    rates = [rate for row in rows for rate in row]
    assert sorted(float(word) for word in words if word.isdigit()) == sorted(rates)
    gains = [100 * (own / peer - 1) for own, peer, *_ in rows]
    text = read_alternative("matmuls.svg")
    assert f"in bf16 moax is ahead of its fastest peer in all nine, by {min(gains):.0f} to {max(gains):.0f} %" in text
    behind = [index for index, (*_, own, peer) in enumerate(rows) if own < peer]
    assert behind == [2, 8]  # wgrad of the first model and of the third
    assert "in FP8 in seven; there the peer is ahead in wgrad of Mixtral-8x7B and of DeepSeek-V3" in text
