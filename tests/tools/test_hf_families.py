"""The table of families: each one's config, names and layers, as transformers has them.

tests/data/hf/families.json is what scripts/hf_reference.py wrote: the MoE families of transformers, and the config and
the shapes of the tensors of a tiny model of each one. `make hf-parity` computes every family's layer beside it.

Covers: every family x (config both ways, names on disk and in memory, which layers, load and save); parity of the
families that need an option of their own; which families are missing, and that the documentation says so.
"""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from moax import Unsupported, hf
from moax.hf.config import parse_key
from moax.hf.families import FAMILIES, TYPES_OF, layout_of
from moax.hf.tensor_layouts import BlockLayout, block_test, resolve, tensors_of
from support import mark_rest
from support.hf_parity import LIMIT, parity

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "hf"
KNOWN = json.loads((DATA / "families.json").read_text(encoding="utf-8"))
TINY = KNOWN["tiny"]
# One family for each option of the block that only some families have, and for each way in which tensors may lie. The
# first five are whole checkpoints with a config.json of their own, for test_hf.py.
RECORDED = (
    "mixtral",
    "qwen3_moe",
    "olmoe",
    "deepseek_v3",
    "gpt_oss",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v4",
    "llama4",
    "gemma4",
    "nemotron_h",
    "dbrx",
    "granitemoeshared",
)


def test_every_family_of_transformers_is_known():
    """Breaks if a family is neither loaded nor listed with the reason, or one is listed that is not there."""
    assert set(TINY) == set(FAMILIES) <= set(KNOWN["families"])
    missing = {name: types for name, types in KNOWN["families"].items() if name not in FAMILIES}
    for name, types in missing.items():
        assert set(types) & set(hf.IMPOSSIBLE), f"{name}: none of {types} is in moax.hf.IMPOSSIBLE"
    assert set(hf.IMPOSSIBLE) <= {t for types in missing.values() for t in types}
    assert not set(hf.IMPOSSIBLE) & set(hf.MODEL_TYPES)


def test_the_documentation_lists_them():
    """Breaks if the page of moax.hf leaves out a model type that is loaded."""
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "reference" / "hf.md").read_text(encoding="utf-8"))
    assert not [t for t in hf.MODEL_TYPES if f"`{t}`" not in page]


@pytest.mark.parametrize("model_type", hf.IMPOSSIBLE)
def test_impossible_ones_say_why(model_type):
    """Breaks if such a model fails as if its name were unknown, or is loaded."""
    with pytest.raises(Unsupported, match=re.escape(hf.IMPOSSIBLE[model_type])):
        hf.config_from_hf(dict(model_type=model_type))


@pytest.mark.parametrize("family", TINY)
def test_config(family):
    """Breaks if a config is read as another layer after it was written, or another layer is taken for an MoE layer."""
    values = TINY[family]["config"]
    model_type = TYPES_OF[family][0]
    config = hf.config_from_hf(values)
    assert values["model_type"] == model_type and hf.moe_layers(values)[-1] == TINY[family]["layer"]
    written = hf.config_to_hf(config, model_type)
    assert hf.config_from_hf(written) == config == hf.config_from_hf(values | written)
    both = {key: (values[key], written[key]) for key in written.keys() & values if not isinstance(values[key], dict)}
    # Another width times another number may be the same width.
    width = {parse_key(key)[0][0] for key in FAMILIES[family].shared}
    assert not {key: pair for key, pair in both.items() if pair[0] != pair[1] and key not in width}
    assert hf.config_from_hf({"model_type": model_type, "text_config": values}) == config


def shapes_of(family: str, layout: BlockLayout, prefix: str) -> dict[str, list[int]]:
    """The shapes of a family's tensors in a layout, those of the first expert for all."""
    config = hf.config_from_hf(TINY[family]["config"])
    tensors = {resolve(prefix, t.name): list(t.shape) for t in tensors_of(layout, config)}
    return {name: shape for name, shape in tensors.items() if not re.search(r"experts\.[1-9]", name)}


@pytest.mark.parametrize("family", TINY)
def test_names(family):
    """Breaks if a tensor of the block has another name or shape than transformers gives it, in memory or on disk.

    The text model of a multimodal family is saved as it is in memory, and the whole model as it is published; that of
    Qwen3.5 is saved with one tensor an expert, and the whole model is published with stacked experts.
    """
    tiny = TINY[family]
    layouts = {}
    for where, stacked in (("memory", True), ("disk", False)):
        layout = layout_of(TYPES_OF[family][0], stacked)
        if where == "disk" and FAMILIES[family].read:
            layout = FAMILIES[family].read
        stem = next(m[1] for m in (re.match(r"(.*?(?:layers|blocks)\.)\d+\.", n) for n in tiny[where]) if m)
        prefix = f"{stem}{tiny['layer']}.{layout.block}"
        inside = block_test(prefix, layout)
        got = {name: shape for name, shape in tiny[where].items() if inside(name)}
        layouts[where] = got == shapes_of(family, layout, prefix)
    assert layouts["memory"]
    assert layouts["disk"] or tiny["disk"] == tiny["memory"]


@pytest.mark.parametrize("family", TINY)
def test_round_trip(family):
    """Breaks if a tensor of a family comes back with one other bit from MoEParams."""
    config = hf.config_from_hf(TINY[family]["config"])
    model_type = TYPES_OF[family][0]
    generator = np.random.default_rng(0)
    tensors = tensors_of(layout_of(model_type), config)
    prefix = "m.layers.3.block."
    state = {resolve(prefix, t.name): generator.standard_normal(t.shape).astype(np.float32) for t in tensors}
    params = hf.params_from_hf(state, config, prefix=prefix, model_type=model_type)
    written = hf.params_to_hf(params, config, model_type, prefix=prefix)
    assert written.keys() == state.keys()
    assert all(np.array_equal(written[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("family", "mesh"),
    mark_rest(
        [
            ("gemma4", "2x4"),
            ("llama4", None),
            ("gpt_oss", "2x4"),
            ("deepseek_v3", None),
            ("mixtral", None),
            *itertools.product(RECORDED, (None, "2x4")),
        ],
        5,
    ),
)
def test_parity(family, mesh):
    """Breaks if y or any gradient is not transformers' own: a transpose, interleaving, a bias, weights at the input,
    the gate of the shared expert, the router's input and the scales of experts, groups, a limit, one projection."""
    own = DATA / family / "config.json"
    values = json.loads(own.read_text(encoding="utf-8")) if own.exists() else TINY[family]["config"]
    errors = parity(DATA / family, values, mesh)
    assert {"y", "dx", "d_router", "d_wi", "d_wo"} <= errors.keys()
    assert ("d_router_input" in errors) == ("d_expert_scale" in errors) == (family == "gemma4")
    assert max(errors.values()) < LIMIT, errors


@pytest.mark.parametrize("model_type", ["qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"])
def test_published_with_stacked_experts(model_type):
    """Breaks if Qwen3.5 is written otherwise than as it is published, or its tensors of each expert are not read."""
    config = hf.config_from_hf(TINY["qwen3_5_moe"]["config"])
    generator = np.random.default_rng(0)
    one = FAMILIES["qwen3_5_moe"].read
    assert one
    state = {t.name: generator.standard_normal(t.shape).astype(np.float32) for t in tensors_of(one, config)}
    params = hf.params_from_hf(state, config, model_type=model_type)
    written = hf.params_to_hf(params, config, model_type)
    expected = (config.num_experts, 2 * config.d_ff, config.d_model)
    assert written["experts.gate_up_proj"].shape == expected
    assert not [name for name in written if "experts.0." in name]
    np.testing.assert_array_equal(
        written["experts.down_proj"][3],
        state["experts.3.down_proj.weight"],
    )


def test_the_same_names_in_two_families():
    """Breaks if a layout is guessed: gate and up lie apart in one of two families with the same names and shapes."""
    config = hf.config_from_hf(TINY["gpt_oss"]["config"])
    tensors = list(tensors_of(layout_of("gpt_oss"), config))
    state = {t.name: np.random.default_rng(1).standard_normal(t.shape).astype(np.float32) for t in tensors}
    plain = hf.params_from_hf(state, config, model_type="gpt_oss")
    apart = hf.params_from_hf(state, config, model_type="openai_privacy_filter")
    np.testing.assert_array_equal(plain.wi[:, :, 0], state["experts.gate_up_proj"][:, :, 0::2])
    np.testing.assert_array_equal(
        apart.wi[:, :, 0],
        state["experts.gate_up_proj"][:, :, : config.d_ff],
    )


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("mixtral", dict(model_type="llama"), "model_type='llama'; moax.hf supports 'mixtral'"),
        ("mixtral", dict(model_type="phimoe"), "model_type='phimoe': SparseMixer masks"),
        ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise=0.1"),
        ("mixtral", dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (
            "deepseek_v3",
            dict(scoring_func="softmax"),
            "scoring_func='softmax'; moax supports 'sigmoid'",
        ),
        ("deepseek_v3", dict(topk_method="greedy"), "topk_method='greedy'"),
        ("deepseek_v3", dict(num_experts_per_tok=1), "norm_topk_prob with num_experts_per_tok=1"),
        ("gpt_oss", dict(swiglu_alpha=1.0), "swiglu_alpha=1.0; moax supports 1.702"),
        (
            "cohere2_moe",
            dict(shared_expert_combination_strategy="average"),
            "strategy='average'; moax supports 'sum'",
        ),
        (
            "deepseek_v2",
            dict(topk_method="noaux_tc"),
            "topk_method='noaux_tc'; moax supports 'greedy'",
        ),
        ("deepseek_v2", dict(norm_topk_prob=True), "norm_topk_prob=True"),
        ("laguna", dict(moe_router_logit_softcapping=30.0), "moe_router_logit_softcapping=30.0"),
        ("step3p7", dict(swiglu_limits=[None, 7.0]), r"swiglu_limits=\[None, 7.0\]"),
        ("nemotron_h", dict(mlp_bias=True), "mlp_bias=True"),
        (
            "dbrx",
            dict(ffn_config=dict(moe_normalize_expert_weights=2.0)),
            "moe_normalize_expert_weights=2.0",
        ),
        ("hunyuan_v1_moe", dict(moe_topk=[1, 2]), r"moe_topk=\[1, 2\] differs from layer to layer"),
        ("gemma4", dict(enable_moe_block=False), "enable_moe_block=False"),
    ],
)
def test_options_that_moax_does_not_have(family, change, says):
    """Breaks if an option that changes the layer is dropped in silence."""
    with pytest.raises(Unsupported, match=says):
        hf.config_from_hf(TINY[family]["config"] | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(hidden_size=None), "mixtral.*has no hidden_size"),
        (dict(num_experts_per_tok=9), "top_k=9"),
    ],
)
def test_sizes_that_make_no_config(change, says):
    """Breaks if a config.json without a size fails without its name."""
    with pytest.raises(ValueError, match=says):
        hf.config_from_hf(TINY["mixtral"]["config"] | change)


def test_greedy_ignores_groups():
    """Breaks if DeepSeek-V2's `greedy` is limited to groups, or its groups are lost."""
    values = TINY["deepseek_v2"]["config"]
    assert hf.config_from_hf(values).router.num_groups == 4
    assert hf.config_from_hf(values | dict(topk_method="greedy")).router.num_groups == 1


@pytest.mark.parametrize(
    ("family", "values", "layers"),
    [
        ("mixtral", dict(num_hidden_layers=3), (0, 1, 2)),
        ("deepseek_v3", dict(num_hidden_layers=6), (3, 4, 5)),
        (
            "qwen3_moe",
            dict(num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3]),
            (1, 5, 7),
        ),
        (
            "jamba",
            dict(num_hidden_layers=6, expert_layer_period=2, expert_layer_offset=1),
            (1, 3, 5),
        ),
        (
            "ernie4_5_moe",
            dict(num_hidden_layers=6, moe_layer_start_index=2, moe_layer_end_index=4),
            (2, 3, 4),
        ),
        ("llama4", dict(num_hidden_layers=4, interleave_moe_layer_step=2), (1, 3)),
        ("llama4", dict(num_hidden_layers=4, moe_layers=[0, 2]), (0, 2)),
        ("deepseek_v3", dict(num_hidden_layers=3, first_k_dense_replace=None), (0, 1, 2)),
        (
            "deepseek_v3",
            dict(num_hidden_layers=4, first_k_dense_replace=1, moe_layer_freq=0),
            (1, 2, 3),
        ),
        ("deepseek_v3", dict(num_hidden_layers=2, moe_layer_freq=[0, 1, 1, 1]), (1,)),
        ("nemotron_h", dict(hybrid_override_pattern="ME*E"), (1, 3)),
        ("step3p7", dict(num_hidden_layers=6, moe_layers_enum="4,5"), (4, 5)),
        ("axk1", dict(num_hidden_layers=6, moe_layer_freq=2), (2, 4)),
        ("minimax_m3_vl", dict(num_hidden_layers=4, moe_layer_freq=[0, 1, 1, 1]), (1, 2, 3)),
        ("flint", dict(num_hidden_layers=4), (2, 3)),
        ("deepseek_v4", dict(num_hidden_layers=5), (3, 4)),
        (
            "glm5_next",
            dict(num_hidden_layers=5, mlp_layer_types=["dense", "sparse"] * 2 + ["dense"]),
            (1, 3),
        ),
    ],
)
def test_layers(family, values, layers):
    """Breaks if a dense layer is taken for an MoE layer, in the way in which each family says it."""
    assert hf.moe_layers({"model_type": TYPES_OF[family][0]} | values) == layers
