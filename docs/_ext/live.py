"""Directives whose content is computed when the pages are built, so that no page quotes what is no longer so.

{cli-help} benchmarks       `python -m benchmarks --help`; lm-train: `python -m lm train --help`; moax-estimate
{wire-table}                benchmarks/results/wire.json
{hf-impossible}             moax.hf.IMPOSSIBLE
{layers}                    who may import whom: RANKS of tests/test_architecture.py
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).parent.parent.parent
WIRE = ROOT / "benchmarks" / "results" / "wire.json"
SRC = ROOT / "src" / "moax"
ARCHITECTURE = ROOT / "tests" / "test_architecture.py"


def setup(app) -> dict[str, Any]:
    directives = {"cli-help": Help, "wire-table": WireTable, "hf-impossible": Impossible, "layers": Layers}
    for name, directive in directives.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def literal(text: str, language: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language=language)


class Live(Directive):
    """A directive whose page is read again at each build, since Sphinx cannot see what it depends on."""

    def run(self) -> list[nodes.Node]:
        self.state.document.settings.env.note_reread()
        return [self.node()]

    def node(self) -> nodes.Node:
        raise NotImplementedError


class Help(Live):
    required_arguments = 1

    def node(self):
        from benchmarks.command import parser
        from lm import command
        from moax.__main__ import estimate_parser

        os.environ["COLUMNS"], os.environ["NO_COLOR"] = "100", "1"  # argparse asks for both
        parsers = {"benchmarks": parser, "lm-train": command.parser, "moax-estimate": estimate_parser}
        return literal(parsers[self.arguments[0]]().format_help().rstrip(), "text")


class WireTable(Live):
    def node(self):
        rows = json.loads(WIRE.read_text())["rows"]
        by_model: dict[str, dict[str | None, int]] = {}
        for row in rows:
            by_model.setdefault(row["model"], {})[row["recipe"]] = row["gathered"]
        recipes = list(dict.fromkeys(row["recipe"] for row in rows))
        head = ["block", *("unquantized" if r is None else r for r in recipes)]
        body = [
            [model, *(f"{counts[r]:,}" + (f" ({counts[r] / counts[None]:.3f})" if r else "") for r in recipes)]
            for model, counts in by_model.items()
        ]
        return table(head, body)


class Impossible(Live):
    def node(self):
        from moax.hf import IMPOSSIBLE

        return table(["model_type", "why not"], [[model_type, why] for model_type, why in IMPOSSIBLE.items()])


def table(head: list[str], body: list[list[str]]) -> nodes.table:
    def row(cells):
        return nodes.row("", *(nodes.entry("", nodes.paragraph(text=cell)) for cell in cells))

    group = nodes.tgroup("", *(nodes.colspec(colwidth=1) for _ in head), cols=len(head))
    group += nodes.thead("", row(head))
    group += nodes.tbody("", *map(row, body))
    return nodes.table("", group)


class Layers(Live):
    def node(self):
        tree = ast.parse(ARCHITECTURE.read_text())
        (written,) = (
            node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RANKS"
        )
        rank_of = eval(compile(ast.Expression(written), str(ARCHITECTURE), "eval"))  # a dict of names and numbers
        there = [n for n in rank_of if n == "moax" or (SRC / n).exists() or (SRC / f"{n}.py").exists()]
        ranks = sorted({rank_of[n] for n in there}, reverse=True)
        layers = [" ".join(n for n in there if rank_of[n] == rank) for rank in ranks]
        width = max(map(len, layers))
        rule = "+" + "-" * (width + 2) + "+"
        text = [line for layer in layers for line in (rule, f"| {layer:{width}} |")] + [rule]
        return literal("\n".join(text), "text")
