"""The local functions of one device: the table of their implementations, and the machine that chooses one of them.

No other file asks which machine jit compiles for.

| name        | runs on                                                                                      |
|-------------|----------------------------------------------------------------------------------------------|
| `hopper`    | NVIDIA GPUs of compute capability 9.0, bfloat16, Pallas Mosaic GPU                            |
| `xla`       | every backend and every dtype                                                                |

`select_kernels` chooses once, by the platform, the dtype, the widths and the caller's `kernels`. After that no code
asks which implementation runs: `implementation(name)` is a module with the functions that `xla.py` documents. An
implementation keeps its operand formats private: its `matmul` and `wgrad` take what its own `quantize_for_matmul` and
`gather_shard` return. A further implementation is one module or package and one entry of `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moax.checks import Unsupported, log_once
from moax.kernels.operands import Groups
from moax.recipe import Recipe

DEFAULT = "xla"  # this implementation runs everywhere
HOPPER = ("H100", "H200", "H800", "H20", "GH200")  # in the name of a device
H200_SMS = 132  # multiprocessors
COPY_BYTES = 16  # a bulk copy moves a multiple of so many bytes
HOPPER_WIDTH = 32  # the copy engine swizzles boxes of at least so many FP8 elements

Operand = Any  # rows or weights in the form that one implementation's products take
Role = Literal["x", "dy"]  # the field of a recipe that has the format of rows


class Packing(NamedTuple):
    """How rows move from groups at multiples of any `align` to the layout `groups` of products.

    Attributes:
      groups: the layout.
      pack: rows [M, ...] -> the rows [P, ...] in the layout, with 0 in the padding that a product reads.
      unpack: rows [P, N] of a product -> the rows [M, N], with 0 in padding.
    """

    groups: Groups
    pack: Callable[[Float[Array, "M ..."]], Float[Array, "P ..."]]
    unpack: Callable[[Float[Array, "P N"]], Float[Array, "M N"]]


class Implementation(NamedTuple):
    """An entry of the table.

    Attributes:
      module: the name of its module, imported where a call runs, so that `import moax` is fast and needs no Pallas.
      note: a line for a user who reads a list of implementations.
      why_not: (dtype, widths) -> why it cannot run here with this dtype, None for any, and these widths; else None.
      puts_rows: whether its `put_rows` writes into the memory of peers.
    """

    module: str
    note: str
    why_not: Callable[[Any, dict[str, int]], str | None] = lambda dtype, widths: None
    puts_rows: bool = False


def find_device() -> Any:
    """Returns the device that the mesh in force describes, else the first one of this process."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.local_devices()[0]


def sums_in_pieces() -> bool:
    """Returns whether an all-to-all and a sum take the place of a reduce-scatter, for `mesh.collectives`.

    Processes on CPUs talk through gloo, whose reduce-scatter returns wrong values at times (jax issue 40830).
    """
    return find_device().platform == "cpu" and jax.distributed.is_initialized()


def why_not_hopper(dtype: DTypeLike | None = None, widths: dict[str, int] | None = None) -> str | None:
    """Returns why the kernels for Hopper cannot run where jit compiles for, with this dtype and these widths, or None.

    A dtype of None, and no widths, ask about the machine alone.
    """
    device = find_device()  # a mesh of described devices knows no capability
    capability = getattr(device, "compute_capability", None)
    if not (capability == "9.0" if capability else any(name in device.device_kind for name in HOPPER)):
        return f"the kernels of moax are for NVIDIA GPUs of compute capability 9.0, this is {device.device_kind!r}"
    if dtype is not None and dtype != jnp.bfloat16:
        return f"the kernels compute in bfloat16, not {jnp.dtype(dtype).name}"
    for name, size in (widths or {}).items():
        if size % HOPPER_WIDTH or not size:
            return f"{name} of {size} elements a device is no multiple of {HOPPER_WIDTH}, which the copy engine needs"
    return None


# `auto` takes the first that can run.
IMPLEMENTATIONS = {
    "hopper": Implementation(
        "moax.kernels.hopper", "for bfloat16 and widths that are multiples of 32", why_not_hopper, True
    ),
    "xla": Implementation("moax.kernels.xla", "runs on every device, slower than hopper on a Hopper GPU"),
}
INSTALLED = {name for name, entry in IMPLEMENTATIONS.items() if importlib.util.find_spec(entry.module)}


def implementation(name: str) -> Any:
    """Returns the module of an implementation, by a name that `select_kernels` returned."""
    return importlib.import_module(IMPLEMENTATIONS[name].module)


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
    if kernels not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"kernels={kernels!r} must be one of {', '.join(map(repr, ('auto', *IMPLEMENTATIONS)))}")
    refused = {}
    for name in IMPLEMENTATIONS if kernels == "auto" else (kernels,):
        module, _, why_not, _ = IMPLEMENTATIONS[name]
        why = why_not(dtype, widths) if name in INSTALLED else f"this installation has no {module}"
        if why is None:
            if refused and find_device().platform == "gpu":
                reasons = "; ".join(refused.values())
                log_once(f"kernels='auto': {reasons}; the implementation {name!r} runs, which is slower")
            return name
        refused[name] = why
    raise Unsupported(f"kernels={kernels!r}: {refused[kernels]}; use 'auto' or {DEFAULT!r}")


def find_peer_kernels() -> str | None:
    """Returns the name of the first implementation whose `put_rows` writes into the memory of peers, or None."""
    return next((name for name, entry in IMPLEMENTATIONS.items() if entry.puts_rows and name in INSTALLED), None)


def supports_fp8(name: str, recipe: Recipe) -> bool:
    """Returns whether the implementation of this name is installed and multiplies in FP8 by this recipe."""
    return name in INSTALLED and implementation(name).supports_fp8(recipe)


def count_sms() -> int:
    """Returns the multiprocessors of the GPU that jit compiles for; those of an H200 where there is no GPU."""
    device = find_device()
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or H200_SMS


def why_not_peers(row_bytes: int | None = None) -> str | None:
    """Returns why kernels cannot write into the memory of the other devices of the mesh in force; None where they can.

    Where `row_bytes`, the bytes of a row that travels, is None, the question is about this machine alone.
    """
    if why := why_not_hopper():
        return why
    if jax.process_count() > 1:
        return f"it works within one process, this is one of {jax.process_count()}"
    if row_bytes is None:
        return None
    if row_bytes % COPY_BYTES or not row_bytes:
        return f"rows of {row_bytes} bytes are no multiple of {COPY_BYTES}, which the copy engine needs"
    mesh = _placed_mesh()
    if mesh is None:
        return None  # inside a shard_map, whose mesh JAX checks by the same rule when it lowers the kernel
    if mesh.empty:
        return "no jax.set_mesh(mesh) is in force, and types of arrays do not say which devices a mesh has"
    ids = [device.id for device in mesh.devices.flat]
    if ids != list(range(len(ids))):
        return f"the mesh must be of the first {len(ids)} devices of the machine in order, not of {ids}"
    if jax.default_backend() == "gpu" and not _reach(tuple(device.local_hardware_id for device in mesh.devices.flat)):
        return "the GPUs of the mesh cannot reach one another's memory"
    return None


def _placed_mesh():
    """Returns the mesh of `jax.set_mesh` with its devices, even while a function is traced; None in a `shard_map`."""
    with jax.core.eval_context():
        try:
            return jax.sharding.get_mesh()
        except ValueError:
            return None


@functools.cache
def _reach(ordinals: tuple[int, ...]) -> bool:
    """Returns whether each of these GPUs can read and write the memory of all others, by the answer of the driver."""
    driver, can = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    handles = {n: ctypes.c_int() for n in ordinals}
    if any(driver.cuDeviceGet(ctypes.byref(handle), n) for n, handle in handles.items()):
        return False
    return all(
        driver.cuDeviceCanAccessPeer(ctypes.byref(can), a, b) == 0 and can.value == 1
        for a, b in itertools.permutations(handles.values(), 2)
    )


def called(eqn: core.JaxprEqn) -> Any:
    """Returns the closed jaxpr of a call, such as that of jit or of a custom derivative; None for an operation."""
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def operations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the operations of a user's activation; in the place of a call, those of its body."""
    for eqn in jaxpr.eqns:
        inner = called(eqn)
        if inner is None:
            yield eqn
        else:
            yield from operations(getattr(inner, "jaxpr", inner))
