"""This module assigns GPU kernels to stages of the block, and to parts of a training step, by names and scopes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable

from benchmarks.profiles import Kernel, length, union

TOP = 8  # as many kernels are listed of a step
STAGES = (
    "route",
    "plan",
    "permute",
    "quantize",
    "gemm fwd",
    "activation",
    "gemm dgrad",
    "gemm wgrad",
    "unpermute",
    "other",
)
MOSAIC = "_mosaic_gpu_kernel"
INSTRUCTION = re.compile(r'^\s*(?:ROOT )?%([\w.\-]+) = .*?op_name="([^"]*)"', re.MULTILINE)
# The first pattern that matches the name or the scope of a kernel decides.
PATTERNS = tuple(
    (stage, re.compile(pattern))
    for stage, pattern in (
        ("gemm wgrad", r"wgrad"),
        ("gemm", r"matmul_activate"),
        ("activation", r"activat"),
        ("quantize", r"quantize"),
        ("unpermute", r"unpermute|gather_sum|combine"),
        ("permute", r"permute|gather_rows|dispatch|_plan|plan_"),
        ("plan", r"argsort|searchsorted|build_permutation|count_groups"),
        ("gemm", r"grouped_matmul|mpmd_map|dot_general|gemm|nvjet|cutlass|xmma"),
        ("route", r"route|router|top_k|sort|softmax|sigmoid|cub::|radix"),
        # The other kernels of this scope compute the places of rows and the blocks.
        ("plan", r"/experts(_grad)?/"),
    )
)
# The parts of a step of the language model: the stages that a part sums up; the others are named by scopes of `lm`.
PARTS = {
    "attention": (),
    "experts' products": ("gemm fwd", "gemm dgrad", "gemm wgrad"),
    "casts of weights": (),
    "quantization of weights": (),
    "quantization of rows": ("quantize",),
    "activation": ("activation",),
    "permutation and rows": ("permute", "unpermute", "plan"),
    "router": ("route",),
    "optimizer": (),
    "accumulation": (),
    "slices of the scan": (),
    "copies": (),
    "rest": (),
}  # fmt: skip
BY_SCOPE = {
    "optimizer": r"/optimizer/",
    "accumulation": r"/accumulate/",
    "quantization of weights": r"quantize_weight",
    "attention": r"/attention/|^cudnn_",  # a profile knows no scope of cuDNN's kernels
    "copies": r"^Memcpy",
    "casts of weights": r"/gather_weight/",
    "slices of the scan": r"/dynamic_(update_)?slice$",
}
PRODUCTS = re.compile(r"expert_up|expert_down|grouped")
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
            return "route"  # This is the matmul of the router.
        return "gemm dgrad" if BACKWARD.search(text) else "gemm fwd"
    return "other"


def part_of(kernel: str, scope: str) -> str:
    """Returns the part of a training step of a kernel by its name and the `op_name` of its instruction."""
    for part, pattern in BY_SCOPE.items():
        if re.search(pattern, f"{kernel} {scope}"):
            return part
    stage = stage_of(kernel, scope) if re.search(r"\bmoe\b", scope) else ""
    return next((part for part, stages in PARTS.items() if stage in stages), "rest")


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
    names = []
    for kernel in kernels:
        body = kernel.removesuffix(MOSAIC)
        if kernel.endswith(MOSAIC) and mosaic[body]:
            names.append(mosaic[body][seen[body] % len(mosaic[body])])
            seen[body] += 1
        else:
            names.append(own.get(kernel, ""))
    return names


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


def split_step(
    hlo: str,
    kernels: list[Kernel],
    steps: int,
    parts: Iterable[str] = PARTS,
    part_of: Callable[[str, str], str] = part_of,
) -> dict:
    """Returns {stages_us, busy_us, guessed_us, largest} of a step, of `steps` steps in a profile.

    The steps of each device count as steps.

    `part_of` names one of `parts` for the name and the scope of a kernel. A profile names the instruction of a kernel,
    but not inside of a command buffer. There the order of launches tells the scope of a Mosaic kernel, which is wrong
    in a loop: `guessed_us` is the time of these kernels. `busy_us` is the time in which a kernel runs; `largest` lists
    the kernels that take the most time.
    """
    own = {re.sub(r"[.\-]", "_", name): scope for name, scope in INSTRUCTION.findall(hlo)}
    guessed = scopes(hlo, [kernel.name for kernel in kernels])
    total = dict.fromkeys(parts, 0.0)
    by_kernel = defaultdict(float)
    unsure = 0.0
    for kernel, guess in zip(kernels, guessed, strict=True):
        known = own.get(re.sub(r"[.\-]", "_", kernel.op), "")
        scope = known or guess
        part = part_of(kernel.name, scope)
        us = (kernel.end - kernel.start) / 1e3 / steps
        total[part] += us
        unsure += us if kernel.name.endswith(MOSAIC) and not known else 0.0
        by_kernel[part, kernel.name, scope] += us
    listed = sorted(by_kernel.items(), key=lambda entry: -entry[1])[:TOP]
    busy = sum(
        length(union((k.start, k.end) for k in kernels if k.device == device)) for device in {k.device for k in kernels}
    )
    largest = [
        {"part": part, "kernel": name, "scope": scope[-120:], "us": round(us, 3)} for (part, name, scope), us in listed
    ]
    return {
        "stages_us": {part: round(us, 3) for part, us in total.items()},
        "busy_us": round(busy / 1e3 / steps, 3),
        "guessed_us": round(unsure, 3),
        "largest": largest,
    }
