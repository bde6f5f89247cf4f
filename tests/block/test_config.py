"""Configs: each value that cannot work is refused when it is given, by name, with what would do.

Covers: every field of MoEConfig and RouterConfig, with values on both sides of each limit.
"""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

import moax
from moax import MoEConfig, RouterConfig
from moax.activations import GATED, UNGATED

SIZES = dict(d_model=32, d_ff=64, num_experts=8, top_k=2)
NOT_COUNTS = (0, -1, 2.0, "8", None, True)
NOT_FLAGS = (1, 0, None, "yes")
NOT_NUMBERS = (-0.5, float("nan"), float("inf"), "1", True)


def message(build, **fields) -> str:
    with pytest.raises(ValueError) as error:
        build(**fields)
    return str(error.value)


def refused(build, name, value, remedy, **others):
    """The message names the class, the field with its value, and the remedy."""
    said = message(build, **{**others, name: value})
    assert said.startswith(f"{build.__name__}: {name}={value!r} must be ") and remedy in said, said


@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_counts(name, value):
    """Breaks if a size that no array can have fails later, inside a kernel or a reshape."""
    refused(
        MoEConfig,
        name,
        value,
        "an int of at least 1",
        **{k: v for k, v in SIZES.items() if k != name},
    )


@pytest.mark.parametrize(
    "name, value, remedy",
    [
        (
            "activation",
            "swishy",
            "'swiglu', 'geglu', 'swiglu_oai', 'reglu', 'glu', 'silu', 'gelu', 'relu2'",
        ),
        ("activation", None, "one of"),
        ("weights_at", "hidden", "'output', 'input'"),
        *[(name, value, "True or False") for name in ("use_bias", "shared_gate") for value in NOT_FLAGS],
        *[("activation_limit", value, "a finite number > 0") for value in (0, 0.0, *NOT_NUMBERS)],
        *[("shared_d_ff", value, "an int of at least 0") for value in (-1, 1.5, "0", None, True)],
        *[("d_latent", value, "an int of at least 1") for value in NOT_COUNTS if value is not None],
        *[("capacity_factor", value, "a finite number > 0") for value in (0, 0.0, *NOT_NUMBERS)],
    ],
)
def test_options_of_the_block(name, value, remedy):
    """Breaks if a misspelt option is taken for another, or fails without saying what may be said."""
    refused(MoEConfig, name, value, remedy, **SIZES)


@pytest.mark.parametrize(
    "name, value, remedy",
    [
        ("score", "relu", "'softmax', 'sigmoid', 'sqrt_softplus'"),
        ("order", "topk", "'score_then_topk', 'topk_then_score'"),
        ("group_score", "top3", "'top2', 'max', 'sum_topk'"),
        *[
            (n, value, "True or False")
            for n in ("normalize", "bias", "logits_bias", "expert_scale")
            for value in NOT_FLAGS
        ],
        *[(name, value, "an int of at least 1") for name in ("num_groups", "top_groups") for value in NOT_COUNTS],
        *[("scale", value, "a finite number > 0") for value in (0.0, None, *NOT_NUMBERS)],
        *[(name, v, "a finite number >= 0") for name in ("aux_loss", "z_loss") for v in (None, *NOT_NUMBERS)],
    ],
)
def test_options_of_the_router(name, value, remedy):
    """The same of the router's options."""
    refused(RouterConfig, name, value, remedy)


@pytest.mark.parametrize(
    "fields, said",
    [
        (dict(weights_at="input", use_bias=True), "weights_at='input' needs use_bias=False"),
        (dict(shared_gate=True), "shared_gate=True needs a shared expert; set shared_d_ff"),
        (
            dict(activation="relu2", activation_limit=7.0),
            "activation_limit=7.0 needs an activation with a gate",
        ),
    ],
)
def test_options_that_need_each_other(fields, said):
    """Breaks if an option that the block would ignore is taken."""
    assert said in message(MoEConfig, **SIZES, **fields)


@pytest.mark.parametrize(
    "top_k, router, said",
    [
        (9, {}, "top_k=9 must be at most num_experts=8"),
        (2, dict(num_groups=3), "num_groups=3 must divide num_experts=8"),
        (
            3,
            dict(num_groups=4, top_groups=1),
            "top_k=3 must be at most the 2 experts of top_groups=1 groups",
        ),
        (
            3,
            dict(num_groups=4, top_groups=2, group_score="sum_topk"),
            "needs top_k=3 divisible by top_groups=2",
        ),
        (
            1,
            dict(order="topk_then_score"),
            "top_k=1 with order='topk_then_score' and score='softmax'",
        ),
    ],
)
def test_routers_that_cannot_choose(top_k, router, said):
    """Breaks if a router is built that has fewer eligible experts than it must choose, groups that do not fit, or
    weights that are 1 for all logits."""
    assert said in message(MoEConfig, **{**SIZES, "top_k": top_k}, router=RouterConfig(**router))


def test_top_1_that_can_learn():
    """Breaks if a top-1 router is refused whose weight depends on the logits, or that has one expert to choose."""
    MoEConfig(**{**SIZES, "top_k": 1})
    MoEConfig(
        **{**SIZES, "top_k": 1},
        router=RouterConfig(score="sigmoid", order="topk_then_score"),
    )
    MoEConfig(
        **{**SIZES, "top_k": 1, "num_experts": 1},
        router=RouterConfig(order="topk_then_score"),
    )


def test_more_groups_chosen_than_there_are():
    """Breaks if top_groups above num_groups is found by `lax.top_k` alone."""
    assert message(RouterConfig, num_groups=2, top_groups=3).endswith("top_groups=3 must be at most num_groups=2")


@pytest.mark.parametrize(
    "num_experts, top_k, name",
    [(0, 1, "num_experts=0"), (4, 0, "top_k=0"), (4, True, "top_k")],
)
def test_a_router_used_alone_is_checked_too(num_experts, top_k, name):
    """Breaks if `moax.route`, which has no MoEConfig, takes sizes that MoEConfig would refuse."""
    with pytest.raises(ValueError, match=f"route: {name}.* must be an int of at least 1"):
        RouterConfig().check_experts(num_experts, top_k)


def test_only_sum_topk_asks_for_divisible_groups():
    """Breaks if the condition of one group score falls on the others, or on a router without groups."""
    for score in ("top2", "max"):
        MoEConfig(
            **{**SIZES, "top_k": 3},
            router=RouterConfig(num_groups=4, top_groups=2, group_score=score),
        )
    MoEConfig(**{**SIZES, "top_k": 3}, router=RouterConfig(group_score="sum_topk"))


@pytest.mark.parametrize("activation", GATED | UNGATED)
def test_gates(activation):
    """Breaks if `wi` gets a gate that the activation does not read, or lacks one."""
    assert MoEConfig(**SIZES, activation=activation).gates == (2 if "glu" in activation else 1)


def test_frozen_and_hashable():
    """Breaks if a config cannot be a static argument of jit: equal ones must hash alike, and none may change."""
    one, same = (MoEConfig(**SIZES, router=RouterConfig(scale=2.5)) for _ in range(2))
    assert one == same and hash(one) == hash(same) and one != MoEConfig(**SIZES)
    for config, name in ((one, "top_k"), (one.router, "scale")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, name, 1)


sizes = st.integers(min_value=1, max_value=64)


@given(
    num_experts=sizes,
    top_k=sizes,
    num_groups=sizes,
    top_groups=sizes,
    score=st.sampled_from(["max", "sum_topk"]),
)
def test_accepts_what_can_work_and_nothing_else(num_experts, top_k, num_groups, top_groups, score):
    """Breaks if a check is off by one: a config is built exactly when its router has K eligible experts to choose."""
    per_group = num_experts // num_groups
    works = (
        top_groups <= num_groups
        and num_groups * per_group == num_experts
        and top_k <= per_group * top_groups
        and (num_groups == 1 or score == "max" or top_k % top_groups == 0)
    )
    try:
        router = RouterConfig(num_groups=num_groups, top_groups=top_groups, group_score=score)
        moax.MoEConfig(16, 16, num_experts, top_k, router=router)
    except ValueError:
        assert not works
    else:
        assert works
