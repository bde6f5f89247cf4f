"""Where the MoE blocks of a checkpoint are, and in which layout.

A checkpoint may have a second stack of MoE layers beside that of the model: `mtp.layers.0.` predicts further tokens,
and `talker.model.layers.0.` speaks. The index of a layer means the model's own stack.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from moax.checks import Unsupported
from moax.config import MoEConfig
from moax.hf.files import MXFP4, State, Stored, locate
from moax.hf.scaled import locate_scaled
from moax.hf.tensor_layouts import LAYER, BlockLayout, Tensor, block_test, resolve, tensors_of

Pairs = list[tuple[Tensor, Stored]]
# The start of the names of a model's own layers, up to the number of a layer.
OWN = re.compile(r"(?:(?:backbone|language_model|model|text_model|thinker|transformer)\.)*(?:layers|blocks)\.")
SECOND = {"mtp", "talker"}  # parts of a name that no layer of the model's own stack has
# the ends of the names of weights of other formats
PACKED = {"weight_packed": "compressed-tensors", "qweight": "GPTQ or AWQ"}


def own_stems(stems: Iterable[str]) -> list[str]:
    """Returns those starts of names that may be the model's own: the known ones, or those that are not SECOND."""
    known = {stem for stem in stems if OWN.fullmatch(stem)}
    return sorted(known or {stem for stem in stems if SECOND.isdisjoint(stem.split("."))})


def stem_of(start: str, number: int) -> str:
    """Returns the part of a layer's names before its number: "model.layers." of "model.layers.3."."""
    return start.removesuffix(f"{number}.")


def moe_blocks(
    state: State,
    layouts: Sequence[BlockLayout],
) -> Iterator[tuple[int, str, BlockLayout]]:
    """Yields (layer, start of its names, layout) where a down projection is there."""
    layers = {(int(match[1]), match[0]) for match in map(LAYER.match, state) if match}
    for number, start in sorted(layers):
        for layout in layouts:
            if has_experts(state, start + layout.block, layout):
                yield number, start, layout


def find_blocks(
    state: State, layer: int | None, prefix: str, layouts: Sequence[BlockLayout]
) -> list[tuple[str, BlockLayout]]:
    """Returns the prefix of the block, in the layer or as given, with the layouts that it may have."""
    if layer is None:
        with_experts = [layout for layout in layouts if has_experts(state, prefix, layout)]
        return [(prefix, layout) for layout in with_experts or layouts]
    all_blocks = list(moe_blocks(state, layouts))
    stems = {stem_of(start, number) for number, start, _ in all_blocks}
    own = own_stems(stems)
    blocks = [block for block in all_blocks if stem_of(block[1], block[0]) in own]
    blocks_of_layer = [(start + layout.block, layout) for number, start, layout in blocks if number == layer]
    if not blocks_of_layer:
        known = "no layers.N has experts"
        if blocks:
            known = f"its MoE layers are {blocks[0][0]} to {blocks[-1][0]}"
        elif stems:
            known = f"its MoE layers are those of {_listed(stems)}; give prefix= of the block that you mean"
        raise ValueError(f"layer={layer} is not in the checkpoint: {known}")
    prefixes = sorted({prefix_of_block for prefix_of_block, _ in blocks_of_layer})
    if len(prefixes) > 1:
        raise ValueError(f"layer={layer} is {' and '.join(prefixes)}; give prefix= of the block that you mean")
    return blocks_of_layer


def has_experts(state: State, prefix: str, layout: BlockLayout) -> bool:
    """Whether the first down projection of a layout is there, plain or quantized in any format."""
    names = [prefix + row.name.format(e=0) for row in layout.rows if row.field == "wo"]
    return any(name in state or name + MXFP4[0] in state or _packed(state, name) for name in names)


def match_block(
    state: State,
    prefix: str,
    layout: BlockLayout,
    config: MoEConfig,
) -> tuple[list[Exception], Pairs]:
    """Returns the errors of `params_from_hf` in a layout, and each tensor with its place."""
    pairs: Pairs = []
    errors: list[Exception] = []
    for tensor in tensors_of(layout, config):
        name = resolve(prefix, tensor.name)
        try:
            stored = locate_scaled(state, name) or locate(state, name)
            if stored is None:
                _refuse_packed(state, name)
                raise ValueError(f"{name} of shape {tensor.shape} is not in the checkpoint, and this config needs it")
            stored.check(tensor.shape)
            pairs.append((tensor, stored))
        except (Unsupported, ValueError) as error:
            errors.append(error)
    if errors:  # a search for unused names takes long in a checkpoint of 90,000 names
        return errors, pairs
    is_in_block = block_test(prefix, layout)
    used = {entry.name for _, stored in pairs for entry in stored if entry}
    for name in sorted(name for name in state if is_in_block(name) and name not in used):
        errors.append(ValueError(f"{name} is in the checkpoint, but this config has no such parameter"))
    return errors, pairs


def stem_for(others: State, layouts: Sequence[BlockLayout]) -> str:
    """Returns the stem of the model's own layers in `others`, else the published one; Unsupported where it has two."""
    moe_stems = {stem_of(start, number) for number, start, _ in moe_blocks(others, layouts)}
    stems = moe_stems or {match[0][: match.start(1)] for match in map(LAYER.match, others) if match}
    own = own_stems(stems)
    if len(own) > 1 or (moe_stems and not own):
        listed = _listed(own or moe_stems)
        raise Unsupported(f"others: layers start with {listed}; give prefix= of the blocks that you mean")
    if not own:
        return layouts[0].stem
    return own[0]


def _packed(state: State, name: str) -> tuple[str, str] | None:
    """Returns the name under which another format has this weight, and the format."""
    for end, quantizer in PACKED.items():
        packed = f"{name.removesuffix('.weight')}.{end}"
        if packed in state:
            return packed, quantizer
    return None


def _refuse_packed(state: State, name: str) -> None:
    """Raises Unsupported where another format has this weight."""
    packed = _packed(state, name)
    if packed:
        raise Unsupported(
            f"{packed[0]} is packed as {packed[1]} packs it; moax.hf reads mxfp4 and fp8 with 128 "
            "x 128 scales: dequantize the checkpoint first"
        )


def _listed(stems: Iterable[str]) -> str:
    return " and with ".join(map(repr, sorted(stems)))
