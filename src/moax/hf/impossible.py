"""The model types of transformers 5.23 with sparse experts that moax.hf does not load, and the reasons."""

# fmt: off
REASONS = {
    "doge":
        "a token reads single vectors of a product-key memory of thousands of experts, not "
        "matrices of an expert",
    "ernie4_5_vl_moe ernie4_5_vl_moe_text":
        "the type of a token, text or vision, chooses between two sets of experts of different "
        "widths",
    "hy_v4":
        "the routed experts clamp gate and up, and the shared expert does not; moax has one "
        "activation for both",
    "inkling_mm_model inkling_text":
        "the shared experts take part in the normalization of the routing weights",
    "inkling2 inkling2_text":
        "the activation bounds gate and up by tanh, while its sigmoid sees the unbounded gate",
    "jetmoe":
        "a bias that all experts share is added after the weighted sum, and attention has experts "
        "too",
    "longcat_flash":
        "some experts are the identity, and the router has more experts than there are matrices",
    "muse_spark muse_spark_text":
        "each expert normalizes its output before the weighted sum, in a narrower space than that "
        "of the layer",
    "nllb-moe switch_transformers":
        "the router drops tokens by their place in the sequence, each expert has biases and plain "
        "ReLU, and dropout lies between its matmuls",
    "phimoe":
        "SparseMixer masks the logits of each choice by a threshold, and samples experts in "
        "training",
    "vitpose_backbone":
        "the data set of an image, not a router, chooses the expert",
    "zaya":
        "the router is an MLP that also reads the router of the layer before, and one choice skips "
        "the experts",
}
# fmt: on
# The reason of each model type.
IMPOSSIBLE = {model_type: reason for model_types, reason in REASONS.items() for model_type in model_types.split()}
