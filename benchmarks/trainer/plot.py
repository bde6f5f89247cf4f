"""Draws the losses of a file of rows: `python -m benchmarks.trainer.plot ROWS.json PICTURE.png`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lm.plots import BLUE, GREEN, ORANGE, PURPLE, make_figure, style

WAYS = {  # the lines of the picture, and how each is drawn
    "maxtext-tokamax none": dict(color=ORANGE, linewidth=4, alpha=0.5),
    "maxtext-tokamax-overlap none": dict(color=ORANGE, linewidth=4, alpha=0.5),
    "maxtext-tokamax-experts-overlap none": dict(color=ORANGE, linewidth=1.6),
    "maxtext-tokamax-all_to_all none": dict(color=ORANGE, linewidth=4, alpha=0.5),
    "maxtext-tokamax-ring none": dict(color=ORANGE, linewidth=1.6, linestyle=":"),
    "moax none+kept": dict(color=BLUE, linewidth=1.6, linestyle=":"),
    "maxtext-capacity1.25 none": dict(color=ORANGE, linewidth=1.6, linestyle="-."),
    "moax none": dict(color=BLUE, linewidth=1.6),
    "moax fp8_block": dict(color=GREEN, linewidth=1.6, linestyle="--"),
    "moax fp8_block+kept": dict(color=PURPLE, linewidth=1.6, linestyle=":"),
    "moax none+gathered": dict(color=BLUE, linewidth=1.6, linestyle="-."),
    "moax fp8_block+gathered": dict(color=PURPLE, linewidth=1.6, linestyle="-."),
}


def plot(source: str | Path, picture: str | Path) -> None:
    """Writes a picture with one panel for each case: the loss by step of every way in WAYS."""
    rows = [row for row in json.loads(Path(source).read_text())["rows"] if row.get("extra", {}).get("losses")]
    cases = list(dict.fromkeys(row["case"] for row in rows))
    if not cases:
        return
    figure = make_figure(5.2 * len(cases), 3.8)
    for panel, case in zip(figure.subplots(1, len(cases), squeeze=False)[0], cases, strict=True):
        for row in (row for row in rows if row["case"] == case):
            name = f"{row['impl']} {row['recipe']}"
            if name in WAYS:
                panel.plot(row["extra"]["losses"], label=name.removesuffix(" none"), **WAYS[name])
        layers = next(row["extra"]["layers"] for row in rows if row["case"] == case)
        style(
            panel,
            f"training loss in nats, {case}, {layers} layer{'s' if layers > 1 else ''}",
            "step",
        )
        panel.legend(frameon=False, fontsize=8)
    figure.savefig(picture)


if __name__ == "__main__":
    plot(*sys.argv[1:])
