"""The fixed cases: loads and sizes that hung or broke libraries of this kind.

A name ends in the recipe. `empty_rank` sends all tokens to the experts of one rank of ep, so that the range of every
other rank is empty. `one_expert` has every token choose expert 0. `wgrad_128` has some 128 rows in each of 8 groups.
`one_token` has 1 token a rank.
"""

from __future__ import annotations

import moax
from benchmarks.fuzz.cases import Case, Layout
from moax.exchange import TRANSPORTS

RECIPES = {"bf16": None, "fp8": "fp8_block"}
SEED = 1_000_000  # a named case has this seed for its values, which no random case has


def names(mesh: bool) -> list[str]:
    """Returns the names of the fixed cases, with those on a mesh if `mesh` says so."""
    names = []
    for recipe in RECIPES:
        names += [f"one_expert/{recipe}", f"wgrad_128/{recipe}"]
        if mesh:
            for exchange in TRANSPORTS:
                for kind in ("empty_rank", "one_expert", "one_token"):
                    names.append(f"{kind}/{exchange}/{recipe}")
    return names


def make_case(name: str, devices: int, tiny: bool) -> Case:
    """Returns the fixed case of a name, on a mesh of `devices` devices if the name has an exchange."""
    kind, *exchange, recipe = name.split("/")
    layout = None
    if exchange:
        ranks = min(4, 1 << (devices.bit_length() - 1))
        layout = Layout(sizes=(("ep", ranks),), explicit=False, exchange=exchange[0])
    load = {"empty_rank": "rank", "one_expert": "every"}.get(kind, "equal")
    config, tokens = _sizes(kind, devices, tiny)
    if kind == "one_token" and layout is not None:
        tokens = layout.sizes[0][1]
    return Case(
        seed=SEED,
        config=config,
        tokens=tokens,
        recipe=RECIPES[recipe],
        buffer_factor=1.25,
        routing="experts" if load != "equal" else None,
        masked=False,
        quantized=False,
        remat=False,
        way="plain",
        layout=layout,
        load=load,
        name=name,
    )


def _sizes(kind: str, devices: int, tiny: bool) -> tuple[moax.MoEConfig, int]:
    """Returns the block and the tokens of a kind of case."""
    if kind == "wgrad_128":
        config = moax.MoEConfig(d_model=96, d_ff=128, num_experts=8, top_k=2)
        if not tiny:
            config = moax.MoEConfig(d_model=768, d_ff=2048, num_experts=8, top_k=2)
        return config, 512
    config = moax.MoEConfig(d_model=64, d_ff=64, num_experts=16, top_k=2)
    if tiny:
        return config, 64
    return moax.MoEConfig(d_model=512, d_ff=768, num_experts=16, top_k=2), 2048
