"""The table of models against the published config.json of each, and the shapes that benchmarks make of it."""

import pytest

from benchmarks.cases import products, slice_of
from moax import hf
from moax.models import MODELS, find_model

QWEN3 = dict(
    model_type="qwen3_moe",
    norm_topk_prob=True,
    hidden_act="silu",
    decoder_sparse_step=1,
    mlp_only_layers=[],
)
DEEPSEEK = dict(
    model_type="deepseek_v3",
    hidden_size=7168,
    moe_intermediate_size=2048,
    n_shared_experts=1,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    scoring_func="sigmoid",
    topk_method="noaux_tc",
    moe_layer_freq=1,
    hidden_act="silu",
    num_hidden_layers=61,
)
# What each model's config.json says of its MoE layers.
PUBLISHED = {
    "qwen3-30b": QWEN3 | dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
                              num_hidden_layers=48),
    "qwen3-235b": QWEN3 | dict(hidden_size=4096, moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8,
                               num_hidden_layers=94),
    "olmoe": dict(model_type="olmoe", hidden_size=2048, intermediate_size=1024, num_experts=64, num_experts_per_tok=8,
                  norm_topk_prob=False, hidden_act="silu", num_hidden_layers=16),
    "mixtral-8x7b": dict(model_type="mixtral", hidden_size=4096, intermediate_size=14336, num_local_experts=8,
                         num_experts_per_tok=2, hidden_act="silu", num_hidden_layers=32),
    "deepseek-v3": DEEPSEEK | dict(n_routed_experts=256, n_group=8, topk_group=4, routed_scaling_factor=2.5,
                                   first_k_dense_replace=3),
    "kimi-k2": DEEPSEEK | dict(n_routed_experts=384, n_group=1, topk_group=1, routed_scaling_factor=2.827,
                               first_k_dense_replace=1),
    "gpt-oss-120b": dict(model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_local_experts=128,
                         num_experts_per_tok=4, swiglu_limit=7.0, hidden_act="silu", num_hidden_layers=36),
    "qwen3-next": dict(model_type="qwen3_next", hidden_size=2048, moe_intermediate_size=512, num_experts=512,
                       num_experts_per_tok=10, shared_expert_intermediate_size=512, hidden_act="silu",
                       num_hidden_layers=48),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_published_one(name):
    """Breaks if a size, the router or the number of layers is not that of the model's config.json, in both ways."""
    published = PUBLISHED[name]
    model = MODELS[name]
    assert hf.config_from_hf(published) == model.config
    written = hf.config_to_hf(model.config, published["model_type"])
    assert hf.config_from_hf(written) == model.config
    assert published | {key: written[key] for key in written.keys() & published} == published
    expected = published["num_hidden_layers"] - published.get("first_k_dense_replace", 0)
    assert model.layers == expected


def test_a_rank():
    """Breaks if a rank is given other rows than its tokens' choices, or experts that it does not hold."""
    _, wi, wo = products("a", "deepseek-v3", 16, tokens=4096)
    assert (wi.rows, wi.groups, wi.contracted, wi.columns) == (4096 * 8, 16, 7168, 2 * 2048)
    assert (wo.rows, wo.groups, wo.contracted, wo.columns) == (4096 * 8, 16, 2048, 7168)
    with pytest.raises(ValueError, match="ranks=3 must divide the 256 experts of deepseek-v3"):
        products("a", "deepseek-v3", 3, tokens=4096)


def test_a_slice_is_a_block_of_one_device():
    """Breaks if a slice keeps the shared expert, or groups of experts that no rank holds whole."""
    config = slice_of("deepseek-v3", 8)
    assert (config.num_experts, config.top_k, config.shared_d_ff) == (32, 8, 0)
    assert (config.router.num_groups, config.router.scale, config.router.bias) == (1, 2.5, True)
    assert slice_of("mixtral-8x7b", 1) == MODELS["mixtral-8x7b"].config


def test_an_unknown_model_is_named():
    """Breaks if a misspelt name is not answered with the names that there are."""
    with pytest.raises(
        ValueError,
        match="model='llama' must be one of 'qwen3-30b', .*'gpt-oss-120b', or a MoEConfig",
    ):
        find_model("llama")
