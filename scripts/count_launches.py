"""This script counts the launches of a layer of qwen3-30b on an H200, without a GPU: `make check-launches`.

It compiles forward and backward, counts the operations of the optimized program that start a kernel or a copy, and
fails where they are more than the limit of the case. A card may run a few more: a sort by cub is several kernels.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from h200 import make_operands, mesh_of_h200s

import moax
from moax.models import MODELS

LIMITS = {"bf16": 24, "fp8_block": 31, "fp8_block+kept": 27}
TOKENS = 8192
# These operations name memory, or are part of another one.
FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "partition-id"}
OPERATION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")


def compile_layer(case: str, tokens: int):
    """Returns the compiled forward and backward of one layer on one H200, without biases.

    The case is "bf16" or a recipe's name; after "+kept", the weights come quantized.
    """
    config = MODELS["qwen3-30b"].config
    options: dict[str, Any] = dict(recipe=None if case == "bf16" else case.removesuffix("+kept"), kernels="hopper")
    quantize = functools.partial(moax.quantize_params, config=config, **options)

    def both(x, params, kept, dy):
        y, pull = jax.vjp(lambda x, p: moax.moe(x, p, config, quantized=kept, **options)[0], x, params)
        return y, pull(dy)

    with jax.set_mesh(mesh_of_h200s((1,), ("ep",))):  # it says for which device the kernels are
        params, x = make_operands(config, tokens)
        kept = jax.eval_shape(quantize, params) if case.endswith("+kept") else None
        return jax.jit(both).lower(x, params, kept, x).compile()


def launches(text: str) -> list[tuple[str, str, str, str]]:
    """Returns (name, shape, kind, scope) of each operation of an optimized program's entry that starts a kernel."""
    body = text[text.index("\nENTRY ") :].split("\n}")[0]
    found = []
    for line in body.splitlines():
        if (match := OPERATION.match(line)) and match[3] not in FREE and not match[3].endswith("-done"):
            scope = re.search(r'op_name="([^"]*)"', line)
            found.append((match[1], match[2], match[3], scope[1] if scope else ""))
    return found


def main() -> int:
    """Counts the launches of each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print each operation that starts a kernel")
    args = parser.parse_args()
    failed = False
    for case, limit in LIMITS.items():
        text = compile_layer(case, TOKENS).as_text()
        found = launches(text)
        if args.list:
            for name, shape, kind, scope in found:
                print(f"  {kind:12} {name:45} {shape[:60]:60} {scope[-70:]}")
        print(f"{case}: {len(found)} launches; the limit is {limit}")
        failed |= len(found) > limit
    return failed


if __name__ == "__main__":
    sys.exit(main())
