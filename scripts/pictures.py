"""Draws the pictures of benchmarks/results from the files there: `python scripts/pictures.py`.

The pictures are SVG, and equal files give equal bytes. `<desc>` holds every value that a picture shows, unrounded, with
the commit and the date of its file.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

# Colours that differ without red and green too; numbers and names stand beside the bars.
INK = "#1f2933"
SOFT = "#5b6670"
GREY = "#a3abb3"
LINE = "#d5dbe1"
BLUE = "#0072b2"
ORANGE = "#e07b00"

WIDTH = 560
MARGIN = 14
FONT = 14
TOP = 88  # of the first row of a grid
PITCH = 16  # from bar to bar of a cell
COLUMN = 160
LABELS = 64  # the width of what stands before the rows of a grid
LONGEST = 106  # the longest bar of a grid

RECIPES = {"none": "bf16", "fp8_block": "FP8"}
PEER_RECIPES = {"none": "none", "fp8_block": "fp8_rowwise"}
EXCHANGES = {"all_gather": BLUE, "all_to_all": ORANGE}
TOKENS = {8192: "8192", 16384: "16,384"}

Times = dict[tuple[int, str, str, str], float]  # ms by ranks, model, recipe and exchange or implementation


class Bar(NamedTuple):
    """A bar, and what stands beside it."""

    name: str  # what is measured, in full
    value: float
    color: str
    number: str
    mark: float | None = None  # the value of one GPU
    is_best: bool = False


class Picture:
    """The elements of an SVG picture, in the order in which they are painted, and its description."""

    def __init__(self, title: str, height: float) -> None:
        self.title = title
        self.height = height
        self.elements: list[str] = []
        self.facts: list[str] = []

    def write(
        self,
        x: float,
        y: float,
        words: str,
        *,
        bold: bool = False,
        color: str = INK,
        size: float = FONT,
    ) -> None:
        """Writes words whose baseline is y."""
        weight = ""
        if bold:
            weight = ' font-weight="700"'
        place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{color}"'
        self.elements.append(f"<text {place}{weight}>{escape(words)}</text>")

    def fill(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Paints a rectangle."""
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self.elements.append(f'<rect {place} fill="{color}"/>')

    def draw_bar(self, bar: Bar, x: float, y: float, scale: float, height: float) -> None:
        """Draws a bar from x on, its number at its end, and the mark of one GPU."""
        length = bar.value * scale
        self.fill(x, y, length, height, bar.color)
        end = length
        fact = f"{bar.name}: {bar.value}"
        if bar.mark is not None:
            self.fill(x + bar.mark * scale - 1.5, y - 1.5, 3, height + 3, INK)
            end = max(end, bar.mark * scale + 2)
            fact += f" (one GPU: {bar.mark})"
        self.write(x + end + 5, y + height / 2 + 5, bar.number, bold=bar.is_best)
        self.facts.append(fact)

    def draw_legend(self, y: float, entries: Sequence[tuple[str, str, float]]) -> None:
        """Draws entries (words, colour, width) side by side; an entry without a colour has the mark of one GPU."""
        x = float(MARGIN)
        for words, color, width in entries:
            if color:
                self.fill(x, y - 11, 12, 12, color)
            else:
                self.fill(x + 5, y - 12, 3, 14, INK)
            self.write(x + 17, y, words)
            x += width

    def draw_cell(self, bars: Sequence[Bar], x: float, y: float, scale: float) -> None:
        """Draws bars below each other."""
        for bar in bars:
            self.draw_bar(bar, x, y, scale, PITCH - 3)
            y += PITCH

    def write_origins(self, words: str) -> None:
        """Writes the commits and the dates below the picture."""
        self.write(MARGIN, self.height - 12, words, color=SOFT, size=12)

    def render(self) -> str:
        """Returns the file."""
        box = f'width="{WIDTH}" height="{self.height:g}" viewBox="0 0 {WIDTH} {self.height:g}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" font-family="system-ui, sans-serif">',
            f"<title>{escape(self.title)}</title>",
            f"<desc>{escape('\n'.join(self.facts))}</desc>",
            f'<rect width="{WIDTH}" height="{self.height:g}" rx="8" fill="#ffffff"/>',
            *self.elements,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


class File(NamedTuple):
    """The rows of a result file, with its commit and date."""

    rows: list[dict]
    origin: str


def read(results: Path, name: str, picture: Picture) -> File:
    """Returns the contents of a file, and names the file in the description of the picture."""
    body = json.loads((results / name).read_text())
    head = body.get("header", body)
    origin = f"{head['git_sha'][:7]}, {head['date'][:10]}"
    picture.facts.append(f"{name}, {origin}:")
    return File(body["rows"], origin)


def draw_step(results: Path) -> str:
    """Returns the picture of README.md: bytes of weights on the wire, and ms of a layer over FSDP."""
    picture = Picture("The bytes of weights that a device receives, and the time of a layer over FSDP", 334)
    split = 208
    wire = draw_wire(picture, results, split - 44)
    picture.fill(split - 14, 16, 1, 284, LINE)
    layers = draw_layers(picture, results, split)
    picture.write_origins(f"left: {wire.origin}; right: {layers.origin}")
    return picture.render()


def draw_wire(picture: Picture, results: Path, width: float) -> File:
    """Draws the left panel of the step: the bytes that a device receives in bf16 and in FP8."""
    wire = read(results, "wire.json", picture)
    received = {row["recipe"]: row["gathered"] for row in wire.rows if row["model"] == "mixtral-8x7b"}
    plain = received[None]
    quantized = received["fp8_block"]
    picture.write(MARGIN, 30, "The wire", bold=True, size=16)
    picture.write(MARGIN, 50, "bytes of weights that a")
    picture.write(MARGIN, 68, "device receives in a step")
    picture.write(MARGIN, 86, "of a Mixtral-8x7B block")
    y = 118
    for label, count, color, number in (
        ("moax, bf16", plain, BLUE, f"{plain:,}"),
        ("moax, FP8", quantized, ORANGE, f"{quantized:,} ({100 * quantized / plain:.0f} %)"),
    ):
        picture.write(MARGIN, y, label, bold=True)
        picture.fill(MARGIN, y + 8, count / plain * width, 34, color)
        picture.write(MARGIN, y + 60, number)
        picture.facts.append(f"{label}, bytes: {count}")
        y += 104
    return wire


def draw_layers(picture: Picture, results: Path, x: float) -> File:
    """Draws the right panel of the step: ms of a layer on four GPUs, each with the mark of one."""
    layers = read(results, "x4_overlap_channels.json", picture)
    picture.write(x, 30, "The step", bold=True, size=16)
    picture.write(x, 50, "ms of a layer of Qwen3-30B,")
    picture.write(x, 68, "forward and backward, four H200s, fsdp 4")
    picture.fill(x + 1, 74, 3, 15, INK)
    picture.write(x + 10, 86, "one GPU's time; in brackets: multiple of it")
    rows = {
        (row["impl"], row["recipe"], row["tokens"], row["fsdp"]): row
        for row in layers.rows
        if row["ep"] == 1 and row["options"] == (row["fsdp"] > 1 and row["impl"] == "moax")
    }
    scale = 148 / max(rows["fsdp2", "none", tokens, 4]["ms_a_layer"] for tokens in TOKENS)
    y = 118
    for tokens, count in TOKENS.items():
        picture.write(x, y, f"{count} tokens a GPU", bold=True)
        y += 8
        for impl, recipe, label, color in (
            ("fsdp2", "none", "FSDP2, bf16", GREY),
            ("moax", "none", "moax, bf16", BLUE),
            ("moax", "fp8_block", "moax, FP8", ORANGE),
        ):
            row = rows[impl, recipe, tokens, 4]
            one_gpu = rows[impl, recipe, tokens, 1]["ms_a_layer"]
            number = f"{row['ms_a_layer']:.1f} ({row['times_fsdp_1']:.2f} x)"
            name = f"{label}, {count} tokens a GPU, ms"
            picture.write(x, y + 14, label)
            bar = Bar(name, row["ms_a_layer"], color, number, one_gpu)
            picture.draw_bar(bar, x + 94, y, scale, 18)
            y += 24
        y += 24
    return layers


def draw_exchanges(results: Path) -> str:
    """Returns the picture of docs/how-to/choose.md: ms of the block by exchange."""
    picture = Picture("Milliseconds of a block, forward and backward, by exchange", 316)
    two = []
    for name in ("qwen3", "mixtral", "dsv3"):
        two.append(read(results, f"h200x2_exchanges_{name}.json", picture))
    four = []
    for name in ("qwen3", "mixtral"):
        four.append(read(results, f"x4_block_{name}.json", picture))
    alone = read(results, "x4_block_one_gpu.json", picture)
    times = {}
    for ranks, files in ((1, [alone]), (2, two), (4, four)):
        for file in files:
            times |= block_times(file, ranks)

    picture.write(MARGIN, 28, "A block, forward and backward: ms (bold: fastest)", bold=True, size=16)
    ways = EXCHANGES | {"PyTorch": GREY, "one GPU": ""}
    picture.draw_legend(52, [(way, color, 108) for way, color in ways.items()])
    rows = []
    y = TOP
    for ranks, size in ((2, 2), (4, 3)):
        for recipe, precision in RECIPES.items():
            picture.write(MARGIN, y + 20, f"ep {ranks}", bold=True)
            picture.write(MARGIN, y + 38, precision)
            rows.append((ranks, recipe, y))
            y += size * PITCH + 8
    x = MARGIN + LABELS
    for model, title in (
        ("qwen3-30b", "Qwen3-30B"),
        ("mixtral-8x7b", "Mixtral-8x7B"),
        ("dsv3-slice", "DeepSeek-V3 slice"),
    ):
        picture.write(x, TOP - 9, title, bold=True)
        scale = LONGEST / max(time for key, time in times.items() if model in key)
        for ranks, recipe, y in rows:
            bars = list_exchanges(times, ranks, model, recipe)
            if not bars:
                picture.write(x, y + 2 * PITCH, "not measured", color=SOFT)
            picture.draw_cell(bars, x, y, scale)
        x += COLUMN
    origins = []
    for where, files in (("ep 2", two), ("ep 4", four), ("one GPU", [alone])):
        commits = " and ".join(dict.fromkeys(file.origin for file in files))
        origins.append(f"{where}: {commits}")
    picture.write(MARGIN, 288, "8192 tokens a GPU; each model has a scale of its own", color=SOFT, size=12)
    picture.write_origins("; ".join(origins))
    return picture.render()


def block_times(file: File, ranks: int) -> Times:
    """Returns ms by ranks, model, recipe and exchange, or implementation where the row has no exchange."""
    times = {}
    for row in file.rows:
        if row["direction"] == "fwd+bwd" and row["extra"].get("chunks", 1) == 1:
            model = row["case"].split()[0]
            way = row["extra"].get("exchange") or row["impl"]
            times[ranks, model, row["recipe"], way] = row["us"] / 1e3
    return times


def list_exchanges(times: Times, ranks: int, model: str, recipe: str) -> list[Bar]:
    """Returns the bars of a cell: the exchanges, then PyTorch; none where nothing was measured."""
    cell = {way: times.get((ranks, model, recipe, way)) for way in EXCHANGES}
    cell["PyTorch"] = times.get((ranks, model, PEER_RECIPES[recipe], "torch"))
    measured = {way: time for way, time in cell.items() if time is not None}
    one_gpu = None
    if ranks == 4:
        one_gpu = times.get((1, model, recipe, "moax"))
    bars = []
    for way, time in measured.items():
        name = f"{model}, ep {ranks}, {RECIPES[recipe]}, {way}, ms"
        mark = None
        if way in EXCHANGES:
            mark = one_gpu
        color = EXCHANGES.get(way, GREY)
        bars.append(Bar(name, time, color, f"{time:.2f}", mark, time == min(measured.values())))
    return bars


def draw_matmuls(results: Path) -> str:
    """Returns the picture of benchmarks/README.md: TFLOP/s of grouped matmuls beside the fastest peer."""
    picture = Picture("TFLOP/s of grouped matmuls: moax beside its fastest peer", 346)
    matmuls = read(results, "h200_gemm.json", picture)
    rows = [row for row in matmuls.rows if row["us"]]
    scale = LONGEST / max(row["tflops"] for row in rows)
    picture.write(MARGIN, 28, "Grouped matmuls on one H200: TFLOP/s (bold: faster)", bold=True, size=16)
    entries = [
        ("moax, bf16", BLUE, 112),
        ("moax, FP8", ORANGE, 106),
        ("fastest peer of like precision", GREY, 0),
    ]
    picture.draw_legend(52, entries)
    tops = {"fwd": TOP, "dgrad": TOP + 78, "wgrad": TOP + 156}
    for direction, y in tops.items():
        picture.write(MARGIN, y + 2 * PITCH + 5, direction, bold=True)
    x = MARGIN + LABELS
    pairs = (("none", BLUE, 0), ("fp8_block", ORANGE, 2 * PITCH + 2))
    for case, title in (
        ("mixtral", "Mixtral-8x7B"),
        ("qwen3", "Qwen3-30B"),
        ("dsv3", "DeepSeek-V3"),
    ):
        picture.write(x, TOP - 9, title, bold=True)
        for (direction, y), (recipe, color, below) in itertools.product(tops.items(), pairs):
            recipes = (recipe, PEER_RECIPES[recipe])
            rates = {
                row["impl"]: row["tflops"]
                for row in rows
                if (row["case"], row["direction"]) == (case, direction) and row["recipe"] in recipes
            }
            name = f"{title}, {direction}, {RECIPES[recipe]}, TFLOP/s"
            picture.draw_cell(pair_with_peer(name, rates, color), x, y + below, scale)
        x += COLUMN
    picture.write_origins(matmuls.origin)
    return picture.render()


def pair_with_peer(name: str, rates: dict[str, float], color: str) -> list[Bar]:
    """Returns the bars of moax and of its fastest peer."""
    own = rates["moax"]
    peer = max(rates.keys() - {"moax"}, key=lambda impl: rates[impl])
    rate = rates[peer]
    return [
        Bar(f"{name}, moax", own, color, f"{own:.0f}", is_best=own > rate),
        Bar(f"{name}, {peer}", rate, GREY, f"{rate:.0f}", is_best=rate > own),
    ]


PICTURES: dict[str, Callable[[Path], str]] = {
    "wire_and_step.svg": draw_step,
    "exchanges.svg": draw_exchanges,
    "matmuls.svg": draw_matmuls,
}


def main() -> None:
    """Writes every picture."""
    for name, draw in PICTURES.items():
        (RESULTS / name).write_text(draw(RESULTS), encoding="utf-8")


if __name__ == "__main__":
    main()
