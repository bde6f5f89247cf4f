"""A spelling says which tensors an MoE layer has in a checkpoint, and where each one lies in MoEParams.

Dims are letters: E experts, H model width, F expert width, S shared width, G gate and up projection. The dims of a
tensor on disk are groups of letters, for g = 0 (gate) and g = 1 (up):

    ("E", "GF", "H")    disk[e, g F + f, h] = wi[e, h, g, f]     the whole gate comes before the whole up projection
    ("E", "H", "FG")    disk[e, h, 2 f + g] = wi[e, h, g, f]     gate and up columns alternate
    ("EF", "H")         disk[e F + f, h] = wo[e, f, h]           the experts lie below each other
    ("", "E")           disk[0, e] = router_bias[e]              a dim of size 1
"""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A tensor of a block, or one tensor for each expert.

    Attributes:
      name: the tensor's name in the block; {e} stands for the index of an expert. "../" at its start leaves the block:
        in the block `model.layers.3.moe.`, "../shared.weight" is `model.layers.3.shared.weight`.
      field: the field of MoEParams that holds it.
      disk: its dims on disk.
      projection: 0 for a gate projection or the only projection, 1 for an up projection, None for other tensors.
    """

    name: str
    field: str
    disk: tuple[str, ...]
    projection: int | None = None


class Spelling(NamedTuple):
    """The names of a block and its tensors.

    Attributes:
      block: the block's name in its layer; "" where the tensors lie in the layer itself.
      rows: the tensors that MoEParams hold.
      stem: what comes before the number of a layer.
      outside: names in the block of tensors that belong to the layer around the block, such as a norm.
    """

    block: str
    rows: tuple[Row, ...]
    outside: tuple[str, ...] = ()
    stem: str = "model.layers."


def projections(prefix: str, gate: str, up: str, down: str, fields=("wi", "wo"), width: str = "F") -> tuple[Row, ...]:
    """Returns the rows of three matrices, of which the gate and the up projection are [width, H] on disk."""
    wi, wo = fields
    return (
        Row(f"{prefix}.{gate}.weight", wi, (width, "H"), 0),
        Row(f"{prefix}.{up}.weight", wi, (width, "H"), 1),
        Row(f"{prefix}.{down}.weight", wo, ("H", width)),
    )


def shared(prefix: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[Row, ...]:
    """Returns the rows of a shared expert of three matrices."""
    return projections(prefix, gate, up, down, ("shared_wi", "shared_wo"), "S")


def fused_shared(gate_up: str, down: str) -> tuple[Row, ...]:
    """Returns the rows of a shared expert whose gate and up projection are one matrix."""
    return Row(gate_up, "shared_wi", ("GS", "H")), Row(down, "shared_wo", ("H", "S"))


def stacked(gate_up: str, down: str) -> tuple[Row, ...]:
    """Returns the rows of stacked experts, as transformers 5 holds most families in memory."""
    return Row(gate_up, "wi", ("E", "GF", "H")), Row(down, "wo", ("E", "H", "F"))


def transposed(gate_up: str, down: str) -> tuple[Row, ...]:
    """Returns the rows of stacked experts whose first dim after E is the one that a product contracts."""
    return Row(gate_up, "wi", ("E", "H", "GF")), Row(down, "wo", ("E", "F", "H"))


def bias_row(name: str) -> Row:
    """Returns the row of the selection bias."""
    return Row(name, "router_bias", ("E",))


def router_row(name: str) -> Row:
    """Returns the row of the router."""
    return Row(name, "router", ("E", "H"))


IN_STACK = ("experts.gate_up_proj", "experts.down_proj")
PROJ = projections("experts.{e}", "gate_proj", "up_proj", "down_proj")
W123 = projections("experts.{e}", "w1", "w3", "w2")
STACKED, TRANSPOSED = stacked(*IN_STACK), transposed(*IN_STACK)
GATE, ROUTER = router_row("gate.weight"), router_row("router.weight")
CORRECTION = bias_row("gate.e_score_correction_bias")
BLOCK_CORRECTION = bias_row("e_score_correction_bias")
ALL_SHARED, ONE_SHARED = shared("shared_experts"), shared("shared_expert")
SHARED_GATE = Row("shared_expert_gate.weight", "shared_gate", ("", "H"))
