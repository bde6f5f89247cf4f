"""The versions of the frameworks that moax is tested with, and the check of the one that is installed."""

from __future__ import annotations

import importlib.metadata

from moax.checks import Unsupported

# {distribution: the versions that `make framework-parity` has compared}; requirements/ pins the last of each.
TESTED = {
    "maxtext": ("0.2.5",),
    "google-tunix": ("0.1.7",),
    "marin-levanter": ("0.2.227.dev40316220070",),
}


def check_version(distribution: str) -> None:
    """Raises unless the installed version of a framework is one of `TESTED`.

    An adapter replaces methods of a framework, whose arguments and parameters may change in any version.

    Args:
      distribution: the framework's name for pip, a key of `TESTED`.

    Raises:
      ModuleNotFoundError: the framework is not installed.
      Unsupported: another version is installed. The message names it, and those that moax is tested with.
    """
    tested = TESTED[distribution]
    command = f"pip install '{distribution}=={tested[-1]}'"
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise ModuleNotFoundError(f"{distribution} is missing: {command}", name=distribution) from None
    if version not in tested:
        raise Unsupported(
            f"{distribution} {version} is installed; moax's adapter is tested with {', '.join(tested)}: {command}"
        )
