"""This extension makes reStructuredText of moax's docstrings, before napoleon reads their sections, and signatures.

A docstring of moax is plain text: paragraphs, indented blocks of formulas, `names`, and Google's sections. Signatures
are taken from the source, since an evaluated jaxtyping annotation reads differently. Each page of the reference gets a
list of its functions and classes, with links, before the first of them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from typing import Any

from docutils import nodes
from sphinx import addnodes

NAMED = re.compile(r"  \w+(, \w+)*: ")  # an entry of a section
SECTION = re.compile(r"(Args|Attributes|Returns|Raises):$")


def setup(app) -> dict[str, Any]:
    """Connects the extension to Sphinx, before napoleon."""
    app.connect("autodoc-process-signature", on_signature)
    app.connect("autodoc-process-docstring", on_docstring, priority=400)
    app.connect("doctree-read", on_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def on_page(app, document: nodes.document) -> None:
    """Inserts the list of what a page of the reference documents: a line for each section, or one for the page."""
    page = next(iter(document.findall(nodes.section)), None)
    if page is None or not app.env.current_document.docname.startswith("reference/"):
        return
    parts = [part for part in page.children if isinstance(part, nodes.section)]
    lines = [line for part in parts for line in list_entries(part)]
    own = [child for child in page.children if isinstance(child, addnodes.desc)]
    lines = list_entries(nodes.section("", nodes.title(), *(child.deepcopy() for child in own))) + lines
    entries = (nodes.section, addnodes.index, addnodes.desc)
    at = next((i for i, child in enumerate(page.children) if isinstance(child, entries)), 0)
    if len(lines) == 1:
        page.insert(at, lines[0])
    elif lines:
        page.insert(at, nodes.bullet_list("", *(nodes.list_item("", line) for line in lines)))


def list_entries(section: nodes.section) -> list[nodes.paragraph]:
    """Returns one line, `section: names`, or none where the section documents nothing. Methods are in no list."""
    line = nodes.paragraph(classes=["local"])
    for entry in section.findall(addnodes.desc):
        signature = next(iter(entry.findall(addnodes.desc_signature)))
        if not signature["ids"] or inside_entry(entry):
            continue
        line += nodes.Text(", " if line.children else "")
        name = nodes.literal("", signature["fullname"].rpartition(".")[2])
        line += nodes.reference("", "", name, refid=signature["ids"][0], internal=True)
    if not line.children:
        return []
    if title := section[0].astext():
        line.insert(0, [nodes.reference("", title, refid=section["ids"][0], internal=True), nodes.Text(": ")])
    return [line]


def inside_entry(node: nodes.Node) -> bool:
    """Returns whether the entry belongs to another one, as a method does to its class."""
    parent = node.parent
    while parent is not None and not isinstance(parent, addnodes.desc):
        parent = parent.parent
    return parent is not None


def on_signature(app, what, name, obj, options, signature, returns):
    """Returns (arguments, result) as the source has them; None keeps autodoc's signature."""
    if what not in ("function", "method", "class"):
        return None
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(obj)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if isinstance(node, ast.ClassDef):
        made = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if not made:
            return f"({', '.join(ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign))})", None
        node = made[0]
    if not isinstance(node, ast.FunctionDef):
        return None
    if node.args.args and node.args.args[0].arg in ("self", "cls"):
        del node.args.args[0]
    return f"({ast.unparse(node.args)})", node.returns and node.name != "__init__" and ast.unparse(node.returns)


def on_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """Rewrites the lines of a docstring in place."""
    out: list[str] = []
    in_section = returns = False
    for before, line in zip(["", *lines], lines, strict=False):
        if line[:1] not in ("", " "):
            in_section = bool(SECTION.match(line))
            returns = line == "Returns:"
        elif in_section and returns and NAMED.match(line):
            line = f"  - {line.strip()}"
        elif line.strip() and not before.strip() and not in_section and not is_formula(out):
            out += ["::", ""]
        out.append(line if not in_section and line[:1] == " " else f"\0{line}")
    text = re.sub(r"(?m)^\0.*(?:\n\0.*)*", lambda part: escape(part[0].replace("\0", "")), "\n".join(out))
    lines[:] = text.split("\n")


def is_formula(out: list[str]) -> bool:
    """Whether the last line that is not empty belongs to a formula."""
    return next((line[:1] == " " for line in reversed(out) if line.strip("\0")), False)


def escape(text: str) -> str:
    """Returns text in which `names` are code, documented names are links, and no other character has a meaning."""
    parts = re.split(r"`([^`]+)`", text)
    for i, part in enumerate(parts):
        if i % 2:
            target = public().get(part)
            space = "\\ " * (parts[i + 1][:1].isalnum() or parts[i + 1][:1] == "_")
            parts[i] = (f":py:obj:`{part} <{target}>`" if target else f"``{part}``") + space
        else:
            parts[i] = re.sub(r"([\\*|]|_(?!\w))", r"\\\1", part)
    return "".join(parts)


@functools.cache
def public() -> dict[str, str]:
    """Returns {name in a docstring: full name}: `MoEParams` and `moax.MoEParams` both give moax.MoEParams."""
    import moax
    from moax import estimate, inspect, ops

    names = {}
    for module in (estimate, inspect, ops, moax):  # The last module wins: `moe` is moax.moe.
        for name in dir(module):
            value = getattr(module, name)
            if not name.startswith("_") and callable(value) and getattr(value, "__module__", "").startswith("moax"):
                names[name] = names[f"{module.__name__}.{name}"] = f"{module.__name__}.{name}"
    return names
