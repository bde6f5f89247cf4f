"""This module lists what each extra of `pip install 'moax[EXTRA]'` brings, and names the extra of a missing module."""

from __future__ import annotations

import importlib.metadata

# {extra: the distribution that it brings, whose module has the same name with underscores}
EXTRAS = {"flax": "flax", "cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin"}


def version(distribution: str) -> str | None:
    """Returns the installed version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def hint(error: ModuleNotFoundError) -> str | None:
    """Returns "flax is missing: pip install 'moax[flax]'"; None where no extra brings the module."""
    module = (error.name or "").split(".")[0]
    extra = next((extra for extra, of in EXTRAS.items() if of.replace("-", "_") == module), None)
    return f"{error.name} is missing: pip install 'moax[{extra}]'" if extra else None


def missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns the error to raise in place of `error`: its message says which extra brings the module."""
    message = hint(error)
    return error if message is None else ModuleNotFoundError(message, name=error.name)
