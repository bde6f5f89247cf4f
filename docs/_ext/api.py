"""This extension makes reStructuredText of moax's docstrings, before napoleon reads their sections, and signatures.

A docstring of moax is plain text: paragraphs, indented blocks of formulas, `names`, and Google's sections. Signatures
are taken from the source, since an evaluated jaxtyping annotation reads differently. A page that documents several
names lists them at its top, with links.
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


def on_signature(app, what, name, obj, options, signature, returns):
    """Returns (arguments, result) as the source has them; None keeps autodoc's signature."""
    if what not in ("function", "method", "class"):
        return None
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(obj)))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if isinstance(node, ast.ClassDef):
        constructors = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if not constructors:
            return f"({', '.join(ast.unparse(item) for item in node.body if isinstance(item, ast.AnnAssign))})", None
        node = constructors[0]
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


def on_page(app, doctree: nodes.document) -> None:
    """Puts the list of what a page documents, by section, before its first entry or section."""
    listed: dict[str, list[nodes.reference]] = {}
    for entry in doctree.findall(addnodes.desc):
        signature = entry.next_node(addnodes.desc_signature)
        if signature is None or isinstance(entry.parent, addnodes.desc_content) or not signature["ids"]:
            continue  # a method is listed by its class
        section = entry
        while not isinstance(section, nodes.section):
            section = section.parent
        while isinstance(section.parent, nodes.section) and isinstance(section.parent.parent, nodes.section):
            section = section.parent
        title = "" if isinstance(section.parent, nodes.document) else section[0].astext()
        name = signature["ids"][0]
        link = nodes.reference("", "", nodes.literal(text=name), internal=True, refid=name)
        listed.setdefault(title, []).append(link)
    if sum(map(len, listed.values())) > 2:
        page = next(doctree.findall(nodes.section))
        first = next(i for i, node in enumerate(page) if isinstance(node, nodes.section | addnodes.index))
        page.insert(first, contents(listed))


def contents(listed: dict[str, list[nodes.reference]]) -> nodes.bullet_list:
    """Returns a list with an item for each section, its title and links, and for each link before the sections."""
    rows = [("", [link]) for link in listed.get("", [])] + [(f"{title}: ", listed[title]) for title in listed if title]
    sections = nodes.bullet_list(classes=["on-this-page"])
    for title, links in rows:
        text = nodes.paragraph("", title)
        for i, link in enumerate(links):
            text += [nodes.Text(", " * bool(i)), link]
        sections += nodes.list_item("", text)
    return sections


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
