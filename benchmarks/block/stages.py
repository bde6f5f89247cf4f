"""Which part of the block a GPU kernel belongs to: by the scope of the instruction that launched it, and its name."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

STAGES = (
    "route", "plan", "permute", "quantize", "gemm fwd", "activation", "gemm dgrad", "gemm wgrad", "unpermute", "other",
)  # fmt: skip
MOSAIC = "_mosaic_gpu_kernel"
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%([\w.\-]+) = .*?op_name="([^"]*)"', re.MULTILINE)
# The first that matches a kernel's name and scope decides.
PATTERNS = tuple(
    (stage, re.compile(pattern))
    for stage, pattern in (
        ("gemm wgrad", r"wgrad"),
        ("activation", r"activat"),
        ("quantize", r"quantize"),
        ("unpermute", r"unpermute|gather_sum|combine"),
        ("permute", r"permute|gather_rows|dispatch|_plan|plan_"),
        ("plan", r"argsort|searchsorted"),
        ("gemm", r"grouped_matmul|mpmd_map|dot_general|gemm|nvjet|cutlass|xmma"),
        ("route", r"route|router|top_k|sort|softmax|sigmoid|cub::|radix"),
        ("plan", r"/experts(_grad)?/"),  # what is left there: where rows go, and which blocks there are
    )
)
PRODUCTS = re.compile(r"experts_in|experts_out|grouped")
BACKWARD = re.compile(r"experts_grad|transpose\(|_transposed|dgrad")


def stage_of(kernel: str, scope: str) -> str:
    """The stage of a kernel by its name and the `op_name` of its instruction, empty where that is not known."""
    text = f"{kernel} {scope}".lower()
    for stage, pattern in PATTERNS:
        if not pattern.search(text):
            continue
        if stage != "gemm":
            return stage
        if not PRODUCTS.search(text):
            return "route"  # the router's own product
        return "gemm dgrad" if BACKWARD.search(text) else "gemm fwd"
    return "other"


def scopes(hlo: str, kernels: Iterable[str]) -> list[str]:
    """The `op_name` of each launched kernel, in order, by the scheduled HLO text of the program.

    XLA names a kernel after its instruction. Mosaic kernels carry the name of their body: of several with one name
    the launches and the instructions are in the same order.
    """
    own: dict[str, str] = {}
    mosaic: dict[str, list[str]] = defaultdict(list)
    for name, scope in INSTRUCTION.findall(hlo):
        own[re.sub(r"[.\-]", "_", name)] = scope
        if scope.endswith("/mpmd_map"):
            mosaic[scope.split("/")[-2]].append(scope)
    seen: dict[str, int] = defaultdict(int)
    found = []
    for kernel in kernels:
        body = kernel.removesuffix(MOSAIC)
        if kernel.endswith(MOSAIC) and mosaic[body]:
            found.append(mosaic[body][seen[body] % len(mosaic[body])])
            seen[body] += 1
        else:
            found.append(own.get(kernel, ""))
    return found


def split(hlo: str, kernels: Iterable[tuple[str, float]]) -> tuple[dict[str, float], list[dict]]:
    """({stage: us}, the kernels by time: name, scope, stage, us, launches) of the kernels of one call."""
    kernels = list(kernels)
    total = dict.fromkeys(STAGES, 0.0)
    by_kernel: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (name, us), scope in zip(kernels, scopes(hlo, [name for name, _ in kernels]), strict=True):
        total[stage_of(name, scope)] += us
        by_kernel[name, scope].append(us)
    listed = [
        {"kernel": name, "scope": scope, "stage": stage_of(name, scope), "us": sum(times), "launches": len(times)}
        for (name, scope), times in by_kernel.items()
    ]
    return total, sorted(listed, key=lambda entry: -entry["us"])
