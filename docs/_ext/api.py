"""Our docstrings and signatures, for autodoc.

A docstring here is plain text: paragraphs, indented blocks of formulas, `names`, and sections of entries:

    Args:
      x, y: what they are; a second line
        is indented further.

It becomes reStructuredText, with every character that means something there escaped. Signatures are those of the
source, since an evaluated jaxtyping annotation no longer reads as it was written.
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
    app.connect("autodoc-process-signature", on_signature)
    app.connect("autodoc-process-docstring", on_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def on_signature(app, what, name, obj, options, signature, returns):
    """(arguments, result) as the source has them; None leaves autodoc's."""
    del app, name, options, signature, returns
    found = source_of(obj) if what in ("function", "method", "class") else None
    if found is None:
        return None
    if isinstance(found, ast.ClassDef):
        return f"({', '.join(class_arguments(found))})", None
    return f"({ast.unparse(without_self(found.args))})", found.returns and ast.unparse(found.returns)


def on_docstring(app, what, name, obj, options, lines: list[str]) -> None:
    """Rewrites `lines` in place."""
    del app, options
    types = types_of(source_of(obj)) if what in ("function", "method", "class") else {}
    lines[:] = to_rst(lines, types, resolve=functools.partial(resolve, within=name))


def source_of(obj) -> ast.FunctionDef | ast.ClassDef | None:
    """The definition of a function or class; None where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(obj))))
    except (OSError, TypeError, SyntaxError):
        return None
    node = tree.body[0]
    return node if isinstance(node, ast.FunctionDef | ast.ClassDef) else None


def without_self(arguments: ast.arguments) -> ast.arguments:
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    return arguments


def class_arguments(node: ast.ClassDef) -> Iterator[str]:
    """Those of `__init__`, or the fields of a dataclass."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            yield ast.unparse(without_self(item.args))
            return
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            yield ast.unparse(item)


def types_of(node: ast.FunctionDef | ast.ClassDef | None) -> dict[str, str]:
    """The type of each argument and field, as written."""
    found = {}
    for item in [] if node is None else ast.walk(node):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found[item.target.id] = ast.unparse(item.annotation)
        elif isinstance(item, ast.arg) and item.annotation is not None:
            found[item.arg] = ast.unparse(item.annotation)
    return found


@functools.cache
def public() -> dict[str, str]:
    """Full names by how docstrings call them: `MoEParams` and `moax.MoEParams` are moax.MoEParams."""
    import moax
    from moax import estimate, inspect, ops

    names = {}
    for module in (estimate, inspect, ops, moax):  # the last one wins: `moe` is moax.moe
        for name in dir(module):
            value = getattr(module, name)
            if not name.startswith("_") and callable(value) and getattr(value, "__module__", "").startswith("moax"):
                names[name] = names[f"{module.__name__}.{name}"] = f"{module.__name__}.{name}"
    return names


def resolve(name: str, within: str = "") -> str | None:
    """The documented object that `name` is, other than the one whose docstring this is."""
    full = public().get(name)
    return None if full is None or full == within else full


def to_rst(lines: list[str], types: dict[str, str], resolve: Callable[[str], str | None]) -> list[str]:
    """A docstring of ours as reStructuredText."""
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
    """(whether indented, lines): paragraphs, indented blocks, and sections whole."""
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
    """A definition list of entries `names: text`; text alone where there are no names."""
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
    """Lines at the least indent start one; deeper ones continue it."""
    entry: list[str] = []
    for line in [*textwrap.dedent("\n".join(lines)).split("\n"), ""]:
        if entry and not line.startswith(" "):
            yield " ".join(entry)
            entry = []
        if line.strip():
            entry.append(line.strip())


def apart(entry: str, types: dict[str, str]) -> list[str]:
    """`x: [T, H]; w: [H, F]. More` is two entries: a line may describe several names."""
    own = lambda name: name in types or name in ("ValueError", "Unsupported")  # noqa: E731
    cuts = [m for m in re.finditer(r"[;.] (\w+): ", entry) if own(m[1])]
    ends = [m.start() + 1 for m in cuts] + [len(entry)]
    return [entry[a:b].strip().rstrip(";") for a, b in zip([0, *ends], ends, strict=False)]


def paragraph(text: str, resolve) -> str:
    """One paragraph; `names` as code, those that are documented as links."""
    parts = re.split(r"`([^`]+)`", re.sub(r"  +", "  ", text))
    for i, part in enumerate(parts):
        target = resolve(part) if i % 2 else None
        parts[i] = escape(part) if i % 2 == 0 else f":py:obj:`{part} <{target}>`" if target else f"``{part}``"
    # Inline markup needs white space or punctuation on both sides; an escaped space is one that is not shown.
    joined = "\\ ".join(p for p in parts if p)
    return re.sub(r"^(\(?\w*)([-+.)])(?= |$)", r"\1\\\2", joined)  # no list: "E." and "a) b" and "- c"


def escape(text: str) -> str:
    return re.sub(r"([\\*`|_])", r"\\\1", text)
