"""The table of implementations of the local functions of one device, and the choice of one of them.

| name        | runs on                                                                                      |
|-------------|----------------------------------------------------------------------------------------------|
| `hopper`    | NVIDIA GPUs of compute capability 9.0, bfloat16, Pallas Mosaic GPU                            |
| `xla`       | every backend and every dtype                                                                |

`select_kernels` chooses once, by the platform, the dtype, the widths and the caller's `kernels`. After that no code
asks which implementation runs: `implementation(name)` is a module with the functions of `protocol.Kernels`. An
implementation keeps its operand formats private: its `matmul` and `wgrad` take what its own `quantize_for_matmul` and
`make_weight_operand` return. A further implementation is one module or package and one entry of `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from jax.typing import DTypeLike

from moax.checks import Unsupported, log_once
from moax.kernels.device import find_device, why_not_hopper
from moax.recipe import Recipe

if TYPE_CHECKING:
    from moax.kernels.protocol import Kernels

DEFAULT = "xla"  # this implementation runs everywhere

Operand = Any  # rows or weights in the form that one implementation's matmuls take
Role = Literal["x", "dy"]  # the field of a recipe that has the format of rows


class Implementation(NamedTuple):
    """An entry of the table.

    Attributes:
      module: the name of its module, imported where a call runs, so that `import moax` is fast and needs no Pallas.
      note: a line for a user who reads a list of implementations.
      why_not: (dtype, widths) -> why it cannot run here with this dtype, None for any, and these widths; else None.
    """

    module: str
    note: str
    why_not: Callable[[Any, dict[str, int]], str | None] = lambda dtype, widths: None


# `auto` takes the first that can run.
IMPLEMENTATIONS = {
    "hopper": Implementation(
        module="moax.kernels.hopper",
        note="for bfloat16 and widths that are multiples of 32",
        why_not=why_not_hopper,
    ),
    "xla": Implementation(
        module="moax.kernels.xla",
        note="runs on every device, slower than hopper on a Hopper GPU",
    ),
}
INSTALLED = {name for name, entry in IMPLEMENTATIONS.items() if importlib.util.find_spec(entry.module)}


def implementation(name: str) -> Kernels:
    """Returns the module of an implementation, by a name that `select_kernels` returned."""
    return cast("Kernels", importlib.import_module(IMPLEMENTATIONS[name].module))


def select_kernels(kernels: str = "auto", dtype: DTypeLike | None = None, **widths: int) -> str:
    """Returns the name of the implementation that runs.

    Args:
      kernels: a name of `IMPLEMENTATIONS`, or `auto`, which is the first implementation that can run. On a GPU the log
        says once why an earlier one cannot.
      dtype: the dtype of the computation; None asks about the machine alone.
      **widths: the sizes of contiguous dims on one device, in elements, by the name that errors give them.

    Raises:
      ValueError: there is no implementation of this name.
      Unsupported: the implementation that was chosen by name cannot run.
    """
    names = ("auto", *IMPLEMENTATIONS)
    if kernels not in names:
        raise ValueError(f"kernels={kernels!r} must be one of {', '.join(map(repr, names))}")
    candidates = IMPLEMENTATIONS if kernels == "auto" else (kernels,)
    refused = {}
    for name in candidates:
        entry = IMPLEMENTATIONS[name]
        if name in INSTALLED:
            why = entry.why_not(dtype, widths)
        else:
            why = f"this installation has no {entry.module}"
        if why is None:
            if refused and find_device().platform == "gpu":
                reasons = "; ".join(refused.values())
                log_once(f"kernels='auto': {reasons}; the implementation {name!r} runs, which is slower")
            return name
        refused[name] = why
    raise Unsupported(f"kernels={kernels!r}: {refused[kernels]}; use 'auto' or {DEFAULT!r}")


def supports_fp8(name: str, recipe: Recipe) -> bool:
    """Returns whether the implementation of this name is installed and multiplies in FP8 by this recipe."""
    return name in INSTALLED and implementation(name).supports_fp8(recipe)
