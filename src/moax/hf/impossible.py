"""The model types of transformers 5.23 with sparse experts that moax.hf does not load, and the reason of each one."""

from __future__ import annotations

_TWO_KINDS = "the type of a token, text or vision, chooses between two sets of experts of different widths"
_SHARED_IN_SUM = "the shared experts take part in the normalization of the routing weights"
_SOFT_BOUND = "the activation bounds gate and up by tanh, while its sigmoid sees the unbounded gate"
_NORM = "each expert normalizes its output before the weighted sum, in a narrower space than that of the layer"
_BY_CAPACITY = (
    "the router drops tokens by their place in the sequence, each expert has biases and plain ReLU, and dropout lies "
    "between its products"
)
IMPOSSIBLE = {
    "doge": "a token reads single vectors of a product-key memory of thousands of experts, not matrices of an expert",
    "ernie4_5_vl_moe": _TWO_KINDS,
    "ernie4_5_vl_moe_text": _TWO_KINDS,
    "hy_v4": "the routed experts clamp gate and up, and the shared expert does not; moax has one activation for both",
    "inkling_mm_model": _SHARED_IN_SUM,
    "inkling_text": _SHARED_IN_SUM,
    "inkling2": _SOFT_BOUND,
    "inkling2_text": _SOFT_BOUND,
    "jetmoe": "a bias that all experts share is added after the weighted sum, and attention has experts too",
    "longcat_flash": "some experts are the identity, and the router has more experts than there are matrices",
    "muse_spark": _NORM,
    "muse_spark_text": _NORM,
    "nllb-moe": _BY_CAPACITY,
    "phimoe": "SparseMixer masks the logits of each choice by a threshold, and samples experts in training",
    "switch_transformers": _BY_CAPACITY,
    "vitpose_backbone": "the data set of an image, not a router, chooses the expert",
    "zaya": "the router is an MLP that also reads the router of the layer before, and one choice skips the experts",
}
