"""What the parity runs of all frameworks share: the comparison of two results, and the row that a run prints.

A run of a framework prints one line of JSON for each row; `scripts/framework_parity.py` makes the table. A row is right
where each of its errors is at most the limit of the row. The modules of this folder run in the virtual environment of
their framework, with moax on PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import jax
from compare import rel_error, rel_norm

DEVICES = 8
# These are the limits of float32, and of fp8_block against unquantized float32.
EXACT = 5e-6
FP8 = 0.12
MARK = "ROW "
PAGES = Path(__file__).parents[3] / "docs" / "how-to"


def emulate(devices: int = DEVICES) -> None:
    """Makes CPU devices, before JAX starts, and has XLA compile fast."""
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    os.environ["JAX_PLATFORMS"] = "cpu"
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_default_matmul_precision", "highest")


def perturb(tree, seed: int = 7):
    """Adds noise to every floating-point leaf, since a bias or a scale that is the same everywhere hides a mistake."""
    leaves, treedef = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [0.1 * jax.random.normal(key, v.shape, v.dtype) for key, v in zip(keys, leaves, strict=True)]
    return treedef.unflatten([v + n for v, n in zip(leaves, noise, strict=True)])


def worst(got, want, measure=rel_error) -> float:
    """Returns the greatest error of all leaves."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max((measure(g, w) for g, w in pairs), default=0.0)


def row(
    framework: str,
    what: str,
    mesh: str,
    recipe: str | None,
    limit: float | None = None,
    **errors: float,
) -> None:
    """Prints a row. Without a limit, it is that of the recipe."""
    if limit is None:
        limit = EXACT if recipe is None else FP8
    # A NaN is at most no limit.
    right = bool(errors) and all(value <= limit for value in errors.values())
    results = dict(
        framework=framework,
        what=what,
        mesh=mesh,
        recipe=recipe or "-",
        limit=limit,
        right=right,
        errors=errors,
    )
    print(MARK + json.dumps(results), flush=True)


def names_of(page: str, heading: str) -> set[str]:
    """Returns the names in backticks, of three or more letters, in the columns of this heading on a page of how-to."""
    column, seen = None, set()
    for line in (PAGES / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if heading in cells:
            column = cells.index(heading)
        elif not cells:
            column = None
        elif column is not None and len(cells) > column:
            seen |= set(re.findall(r"`\"?([a-z0-9_]{3,})\"?(?:=[^`]*)?`", cells[column]))
    return seen


def names_row(framework: str, named: set[str], known: set[str]) -> None:
    """Prints a row: how many of the names of a page are not known."""
    unknown = sorted(named - known)
    assert len(named) > 10, f"the page has no table with a column of {framework}"
    what = f"{len(named)} names of the page, unknown: {', '.join(unknown) or 'none'}"
    row(framework, what, "-", None, limit=0, unknown=len(unknown))


def compare(framework, what, mesh, recipe, got, want) -> None:
    """Prints the row of two pairs (result, gradients).

    Quantized results are compared in the Euclidean norm, since a largest difference is that of one unlucky element.
    """
    measure = rel_error if recipe is None else rel_norm
    row(
        framework,
        what,
        mesh,
        recipe,
        logits=worst(got[0], want[0], measure),
        gradients=worst(got[1], want[1], measure),
    )


def shape_of(mesh) -> str:
    """Returns the axes of more than one device, as in `fsdp2 expert4`."""
    return " ".join(f"{name}{size}" for name, size in mesh.shape.items() if size > 1) or "one device"
