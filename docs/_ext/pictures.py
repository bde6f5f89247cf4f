"""The pictures of docs/concepts. `python docs/_ext/pictures.py` writes docs/_static/*.svg, or into a folder that it is
given.

Who holds what in mesh.svg is asked of `moax.param_specs`, so the picture is that of the code.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "src"))

import jax  # noqa: E402
from jax.sharding import AxisType  # noqa: E402

import moax  # noqa: E402
from moax.mesh.specs import named  # noqa: E402
from moax.sharding import token_spec  # noqa: E402

INK, GREY, PALE, BLUE, AMBER, LIGHT = "#1f2933", "#7b8794", "#f0f3f6", "#2f6fb0", "#d98a1a", "#bcd5ec"


class Picture:
    """Shapes on a white ground, in the order in which they are drawn."""

    def __init__(self, width: int, height: int, title: str):
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}">\n<title>{escape(title)}</title>'
        )
        self.parts = [f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>']

    def box(self, x, y, w, h, fill=PALE, stroke=GREY, dash=False):
        dashed = ' stroke-dasharray="4 3"' if dash else ""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="4" fill="{fill}" stroke="{stroke}"{dashed}/>'
        )

    def text(self, x, y, text, at="start", fill=INK, size=14, bold=False):
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{at}" fill="{fill}" font-size="{size}"{weight}>{escape(text)}</text>'
        )

    def label(self, x, y, w, h, text, fill=PALE, ink=INK):
        """A box with its text in the middle."""
        self.box(x, y, w, h, fill)
        self.text(x + w / 2, y + h / 2 + 5, text, "middle", ink)

    def arrow(self, x1, y1, x2, y2, color=INK, width=1.6):
        long = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        ux, uy = (x2 - x1) / long, (y2 - y1) / long
        ax, ay = x2 - 9 * ux, y2 - 9 * uy
        tip = f"{x2:g},{y2:g} {ax - 4 * uy:.1f},{ay + 4 * ux:.1f} {ax + 4 * uy:.1f},{ay - 4 * ux:.1f}"
        self.parts.append(
            f'<line x1="{x1:g}" y1="{y1:g}" x2="{ax:.1f}" y2="{ay:.1f}" stroke="{color}" stroke-width="{width}"/>'
        )
        self.parts.append(f'<polygon points="{tip}" fill="{color}"/>')

    def __str__(self) -> str:
        return "\n".join([self.head, *self.parts, "</svg>"]) + "\n"


def token() -> Picture:
    """One token with two experts, one on each of two ranks of ep."""
    p = Picture(760, 560, "The way of a token through a block on two ranks of ep")
    columns, w = (190, 520), 210
    for rank, x in enumerate(columns):
        p.box(x - 15, 40, w + 30, 505, "#fbfcfd", "#d5dbe1")
        p.text(x + w / 2, 30, f"rank {rank}: experts {4 * rank} to {4 * rank + 3}", "middle", bold=True)
    steps = [
        ("route", 70), ("dispatch", 160), ("permute", 220), ("quantize, matmul wi", 280), ("activate", 340),
        ("quantize, matmul wo", 400), ("unpermute, combine", 490),
    ]  # fmt: skip
    for name, y in steps:
        p.text(14, y + 24, name, bold=True, size=13)
    own, other = columns
    p.label(own, 70, w, 36, "token t: experts 1 and 6", LIGHT)
    p.label(other, 70, w, 36, "(tokens of its own)", "#ffffff", GREY)
    rows = [("row of t", "row of t"), ("row of t, for expert 1", "row of t, for expert 6")]
    rows += [("h = row wi[1]", "h = row wi[6]"), ("a = act(h)", "a = act(h)"), ("o(1) = a wo[1]", "o(6) = a wo[6]")]
    for (left, right), (_, y) in zip(rows, steps[1:6], strict=True):
        p.label(own, y, w, 36, left)
        p.label(other, y, w, 36, right)
    for x in columns:
        for a, b in zip((160, 220, 280, 340), (220, 280, 340, 400), strict=True):
            p.arrow(x + w / 2, a + 36, x + w / 2, b)
    p.arrow(own + w / 2, 106, own + w / 2, 160)
    p.arrow(own + w / 2, 106, other + w / 2, 160, AMBER, 2.2)
    p.text(450, 118, "over ep", fill=AMBER, size=13)
    p.label(own, 490, w, 40, "y[t] = w1 o(1) + w6 o(6)", LIGHT)
    p.arrow(own + w / 2, 436, own + w / 2, 490)
    p.arrow(other + w / 2, 436, own + w / 2 + 40, 490, AMBER, 2.2)
    p.text(496, 488, "over ep, summed", fill=AMBER, size=13)
    return p


def mesh() -> Picture:
    """What each of four devices holds at rest, and what it has while a product runs."""
    sizes = {"fsdp": 2, "ep": 2}
    grid = jax.make_mesh((2, 2), tuple(sizes), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    config = moax.MoEConfig(d_model=256, d_ff=512, num_experts=8, top_k=2)
    specs, tokens = moax.param_specs(config, mesh=grid), token_spec(moax.Axes(), mesh=grid)
    held = named(grid, specs.wi).devices_indices_map((8, 256, 2, 512))
    of_wo = named(grid, specs.wo).devices_indices_map((8, 512, 256))
    if any(held[d][0] != of_wo[d][0] for d in held):
        raise ValueError("wi and wo lie differently; draw both")
    quarter = named(grid, tokens).devices_indices_map((4, 256))

    p = Picture(760, 470, "Where each tensor lives on a mesh of fsdp=2, ep=2")
    for col in range(2):
        p.text(255 + 340 * col, 28, f"ep = {col}", "middle", bold=True)
    for row in range(2):
        p.text(10, 150 + 215 * row, f"fsdp = {row}", bold=True)
        for col in range(2):
            device = grid.devices[row, col]
            own = range(8)[held[device][0]]
            used = sorted({e for r in range(2) for e in range(8)[held[grid.devices[r, col]][0]]})
            (of_tokens,) = range(4)[quarter[device][0]]
            x, y = 95 + 340 * col, 45 + 215 * row
            p.box(x, y, 320, 195, "#fbfcfd")
            p.text(x + 12, y + 22, f"device {2 * row + col}", bold=True)
            p.text(x + 12, y + 46, f"x, y, gradients of x: quarter {of_tokens} of the tokens", size=13)
            p.text(x + 12, y + 66, "router: whole, on every device", size=13)
            p.text(x + 12, y + 92, "wi, wo, their gradients, the optimizer: experts", size=13)
            p.text(x + 12, y + 146, "in a product: gathered over fsdp, as bytes", size=13)
            for expert in range(8):
                at = x + 12 + 37 * expert
                mine = expert in own
                p.box(at, y + 100, 32, 24, BLUE if mine else "#ffffff", GREY if mine else "#d5dbe1")
                p.text(at + 16, y + 117, str(expert), "middle", "#ffffff" if mine else "#aeb8c2", 13)
                has = expert in used
                p.box(at, y + 156, 32, 24, LIGHT if has else "#ffffff", GREY if has else "#d5dbe1")
                p.text(at + 16, y + 173, str(expert), "middle", INK if has else "#aeb8c2", 13)
    return p


def gather() -> Picture:
    """What crosses the wire when weights are quantized after, and before, the gather."""
    p = Picture(760, 350, "Gather then quantize, and quantize then gather")
    ways = [
        ("gather, then quantize", 30, ["shard, bf16"], 26, "2 bytes an element", ["whole, bf16", "quantize the whole"]),
        ("quantize, then gather (moax)", 195, ["shard, bf16", "quantize the shard"], 13,
         "1 byte an element, and scales", ["whole, fp8"]),
    ]  # fmt: skip
    for title, y, before, thick, said, after in ways:
        p.text(20, y + 8, title, bold=True)
        for side, top, boxes in ((20, y + 25, before), (480, y + 25 + 50 * (len(before) - 1), after)):
            fills = ["#ffffff" if "quantize" in name else LIGHT if "bf16" in name else BLUE for name in boxes]
            for i, (name, fill) in enumerate(zip(boxes, fills, strict=True)):
                p.label(side, top + 50 * i, 150, 34, name, fill, "#ffffff" if fill == BLUE else INK)
                if i:
                    p.arrow(side + 75, top + 50 * i - 16, side + 75, top + 50 * i)
        last = y + 25 + 50 * (len(before) - 1) + 17
        p.parts.append(f'<rect x="185" y="{last - thick / 2:g}" width="270" height="{thick}" fill="{AMBER}"/>')
        p.parts.append(f'<polygon points="455,{last - 22} 477,{last} 455,{last + 22}" fill="{AMBER}"/>')
        p.text(320, last - 24, said, "middle", AMBER, 13)
        p.text(320, last + 36, "all-gather over fsdp", "middle", GREY, 13)
        end = last + 50 * (len(after) - 1)
        p.arrow(630, end, 672, end)
        p.label(672, end - 17, 74, 34, "product", "#ffffff")
    return p


def main(folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    for draw in (token, mesh, gather):
        (folder / f"{draw.__name__}.svg").write_text(str(draw()))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parent / "_static")
