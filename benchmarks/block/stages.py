"""This module assigns GPU kernels to stages of the block, by their names and the scopes of their instructions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

STAGES = (
    "route", "plan", "permute", "quantize", "gemm fwd", "activation", "gemm dgrad", "gemm wgrad", "unpermute", "other",
)  # fmt: skip
MOSAIC = "_mosaic_gpu_kernel"
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%([\w.\-]+) = .*?op_name="([^"]*)"', re.MULTILINE)
# The first pattern that matches the name or the scope of a kernel decides.
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
        ("plan", r"/experts(_grad)?/"),  # The other kernels of this scope compute the places of rows and the blocks.
    )
)
PRODUCTS = re.compile(r"experts_in|experts_out|grouped")
BACKWARD = re.compile(r"experts_grad|transpose\(|_transposed|dgrad")


def stage_of(kernel: str, scope: str) -> str:
    """Returns the stage of a kernel by its name and the `op_name` of its instruction; "" is an unknown `op_name`."""
    text = f"{kernel} {scope}".lower()
    for stage, pattern in PATTERNS:
        if not pattern.search(text):
            continue
        if stage != "gemm":
            return stage
        if not PRODUCTS.search(text):
            return "route"  # This is the product of the router.
        return "gemm dgrad" if BACKWARD.search(text) else "gemm fwd"
    return "other"


def scopes(hlo: str, kernels: Iterable[str]) -> list[str]:
    """Returns the `op_name` of each launched kernel, in order, from the scheduled HLO text of the program.

    XLA names a kernel after its instruction. A Mosaic kernel has the name of its body; several launches with one name
    are in the order of their instructions.
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
    """Returns {stage: us} of the kernels of one call, and a list of the kernels by time.

    Each entry of the list has name, scope, stage, us and launches.
    """
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
