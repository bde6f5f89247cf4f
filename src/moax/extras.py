"""This module lists what each extra of `pip install 'moax[EXTRA]'` brings, and names the extra of a missing module."""

from __future__ import annotations

import importlib.metadata

# {extra: {module that is imported: distribution that pyproject.toml names}}
EXTRAS: dict[str, dict[str, str]] = {
    "flax": {"flax": "flax"},
    "cuda12": {"jax_cuda12_plugin": "jax-cuda12-plugin"},
    "cuda13": {"jax_cuda13_plugin": "jax-cuda13-plugin"},
}


def version(distribution: str) -> str | None:
    """Returns the installed version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def hint(error: ModuleNotFoundError) -> str | None:
    """Returns "flax is missing: pip install 'moax[flax]'"; None where no extra brings the module."""
    module = (error.name or "").split(".")[0]
    for extra, modules in EXTRAS.items():
        if module in modules:
            return f"{error.name} is missing: pip install 'moax[{extra}]'"
    return None


def missing(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns the error to raise in place of `error`: its message says which extra brings the module."""
    message = hint(error)
    return error if message is None else ModuleNotFoundError(message, name=error.name)
