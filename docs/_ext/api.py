"""This extension turns moax's docstrings and signatures into reStructuredText for autodoc.

A docstring of moax is plain text: paragraphs, indented blocks of formulas, `names`, and sections of entries:

    Args:
      x, y: the text of an entry; its second line
        is indented further.

The extension escapes every character that has a meaning in reStructuredText. It takes signatures from the source, since
an evaluated jaxtyping annotation reads differently.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

SECTIONS = ("Args", "Attributes", "Returns", "Raises")
TITLES = {"Args": "Arguments"}


def setup(app) -> dict[str, Any]:
    """Connects the extension to Sphinx."""
    app.connect("autodoc-process-signature", on_signature)
    app.connect("autodoc-process-docstring", on_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def on_signature(app, what, name, obj, options, signature, returns):
    """Returns (arguments, result) as the source has them; None keeps autodoc's signature."""
    del app, name, options, signature, returns
    node = source_of(obj) if what in ("function", "method", "class") else None
    if node is None:
        return None
    if isinstance(node, ast.ClassDef):
        return f"({', '.join(class_arguments(node))})", None
    return f"({ast.unparse(without_self(node.args))})", node.returns and ast.unparse(node.returns)


def on_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """Rewrites the lines of a docstring in place."""
    del app, options
    types = types_of(source_of(obj)) if what in ("function", "method", "class") else {}
    lines[:] = to_rst(lines, types, resolve=functools.partial(resolve, within=name))


def source_of(obj) -> ast.FunctionDef | ast.ClassDef | None:
    """Returns the definition of a function or class; None where Python finds no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(obj))))
    except (OSError, TypeError, SyntaxError):
        return None
    node = tree.body[0]
    return node if isinstance(node, ast.FunctionDef | ast.ClassDef) else None


def without_self(arguments: ast.arguments) -> ast.arguments:
    """Returns the arguments without a first `self` or `cls`."""
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    return arguments


def class_arguments(node: ast.ClassDef) -> Iterator[str]:
    """Yields the arguments of `__init__`, or the fields of a dataclass."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            yield ast.unparse(without_self(item.args))
            return
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            yield ast.unparse(item)


def types_of(node: ast.FunctionDef | ast.ClassDef | None) -> dict[str, str]:
    """Returns the type of each argument and field, as the source has it."""
    types = {}
    for item in [] if node is None else ast.walk(node):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            types[item.target.id] = ast.unparse(item.annotation)
        elif isinstance(item, ast.arg) and item.annotation is not None:
            types[item.arg] = ast.unparse(item.annotation)
    return types


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


def resolve(name: str, within: str = "") -> str | None:
    """Returns the full name of the documented object `name`; None for other names, and for `within` itself."""
    full = public().get(name)
    return None if full is None or full == within else full


def to_rst(lines: list[str], types: dict[str, str], resolve: Callable[[str], str | None]) -> list[str]:
    """Returns the lines of a docstring of moax as reStructuredText."""
    out: list[str] = []
    for indented, block in blocks(lines):
        head = block[0].rstrip(":")
        if block[0].endswith(":") and head in SECTIONS:
            out += [f".. rubric:: {TITLES.get(head, head)}", ""]
            out += section(block[1:], types, resolve)
        elif indented:
            out += ["::", "", *(f"    {line}" for line in block), ""]
        else:
            out += [paragraph(" ".join(block), resolve), ""]
    return out


def blocks(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Splits a docstring into (whether indented, lines) for each paragraph, indented block and whole section."""
    block: list[str] = []
    in_section = indented = False
    for line in [*lines, "end"]:
        starts = line[:1] not in ("", " ")
        if block and (starts if in_section else not line.strip() or starts == indented):
            yield indented, textwrap.dedent("\n".join(block)).strip("\n").split("\n")
            block = []
        if block or line.strip():
            if not block:
                indented = not starts
                in_section = line.rstrip(":") in SECTIONS and line.endswith(":")
            block.append(line)


def section(lines: list[str], types: dict[str, str], resolve) -> list[str]:
    """Returns a section as a definition list of entries `names: text`; an entry without names is a paragraph."""
    out: list[str] = []
    for entry in (part for whole in entries(lines) for part in apart(whole, types)):
        names, colon, text = entry.partition(": ")
        if not colon or not re.fullmatch(r"\**\w+(, \**\w+)*", names):
            out += [paragraph(entry, resolve), ""]
            continue
        kinds = list(dict.fromkeys(types[n.lstrip("*")] for n in names.split(", ") if n.lstrip("*") in types))
        shown = ", ".join(f"**{escape(n)}**" for n in names.split(", "))
        shown += f" : ``{kinds[0]}``" if len(kinds) == 1 else ""
        out += [shown, f"    {paragraph(text, resolve)}", ""]
    return out


def entries(lines: list[str]) -> Iterator[str]:
    """Yields the entries of a section: a line at the least indent starts an entry, and deeper lines continue it."""
    entry: list[str] = []
    for line in [*textwrap.dedent("\n".join(lines)).split("\n"), ""]:
        if entry and not line.startswith(" "):
            yield " ".join(entry)
            entry = []
        if line.strip():
            entry.append(line.strip())


def apart(entry: str, types: dict[str, str]) -> list[str]:
    """Splits a line that describes several names: `x: [T, H]; w: [H, F]. More` is two entries."""

    def own(name):
        return name in types or name in ("ValueError", "Unsupported")

    cuts = [m for m in re.finditer(r"[;.] (\w+): ", entry) if own(m[1])]
    ends = [m.start() + 1 for m in cuts] + [len(entry)]
    return [entry[a:b].strip().rstrip(";") for a, b in zip([0, *ends], ends, strict=False)]


def paragraph(text: str, resolve) -> str:
    """Returns a paragraph in which `names` are code, and documented names are links."""
    parts = re.split(r"`([^`]+)`", re.sub(r"  +", "  ", text))
    for i, part in enumerate(parts):
        target = resolve(part) if i % 2 else None
        parts[i] = escape(part) if i % 2 == 0 else f":py:obj:`{part} <{target}>`" if target else f"``{part}``"
    # Inline markup needs white space or punctuation on both sides; an escaped space does not show.
    joined = "\\ ".join(p for p in parts if p)
    return re.sub(r"^(\(?\w*)([-+.)])(?= |$)", r"\1\\\2", joined)  # "E.", "a) b" and "- c" must start no list.


def escape(text: str) -> str:
    """Escapes the characters that have a meaning in reStructuredText."""
    return re.sub(r"([\\*`|_])", r"\\\1", text)
