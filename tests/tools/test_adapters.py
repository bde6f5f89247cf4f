"""moax.adapters without the frameworks: versions, the command, and what an adapter reads from a layer.

Covers: moax.adapters; a layer here has the attributes of the framework's, which `make framework-parity` runs itself.
"""

import importlib
import importlib.metadata
import re
import subprocess
import sys
import types
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax.adapters import levanter, maxtext, tunix, versions
from support import ROOT

MODULES = {"maxtext": maxtext, "google-tunix": tunix, "marin-levanter": levanter}
E, K, H, F = 8, 2, 16, 32
BLOCKS = {"mixtral": "", "qwen3_moe": "", "deepseek": "sigmoid", "gpt_oss": ""}


def config(block: str = "mixtral", **settings) -> SimpleNamespace:
    """The config of MaxText that an adapter reads, with MaxText's defaults."""
    names = {"deepseek": "deepseek3-tiny"}
    defaults = dict(
        decoder_block=SimpleNamespace(value=block),
        model_name=names.get(block, block),
        routed_score_func=BLOCKS.get(block, ""),
        routed_bias=False,
        routed_bias_update_rate=0.0,
        routed_scaling_factor=1.0,
        n_routing_groups=-1,
        topk_routing_group=-1,
        norm_topk_prob=False,
        load_balance_loss_weight=0.0,
        mlp_activations=["silu", "linear"],
        mlp_activations_limit=-1.0,
        mlp_bias=False,
        prefuse_moe_weights=False,
        shard_exp_on_fsdp=False,
        te_moe_block=False,
        use_random_routing=False,
        capacity_factor=-1.0,
        sparse_matmul=True,
        scan_layers=False,
        gradient_accumulation_steps=1,
        dtype=jnp.float32,
        weight_dtype=jnp.float32,
    )
    return SimpleNamespace(**defaults | settings)


def layer(settings: SimpleNamespace, **attributes) -> SimpleNamespace:
    """A layer with the attributes of MaxText's `RoutedMoE`."""
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def normal(*shape: int):
        return jax.random.normal(next(keys), shape) / shape[-2 if len(shape) > 1 else -1] ** 0.5

    bias = normal(E) if settings.routed_bias else None
    defaults = dict(
        config=settings,
        moe_expert_input_dim=H,
        intermediate_dim=F,
        num_experts=E,
        num_experts_per_tok=K,
        is_hash_routing=False,
        wi_0_sparsity_module=None,
        wo_scale=None,
        gate=SimpleNamespace(kernel=normal(H, E), bias=bias),
        wi_0=normal(E, H, F),
        wi_1=normal(E, H, F),
        wo=normal(E, F, H),
        should_update_load_balance=lambda: settings.routed_bias and settings.routed_bias_update_rate > 0,
    )
    return SimpleNamespace(**defaults | attributes)


def test_tested_versions_are_those_of_requirements():
    """Breaks if an adapter refuses the version that `make framework-parity` installs, or takes one that it does not."""
    pins = {}
    for path in (ROOT / "requirements").glob("*.txt"):
        for name, version in re.findall(r"^([\w-]+)==(\S+)$", path.read_text(), re.M):
            pins.setdefault(name, set()).add(version)
    for distribution, tested in versions.TESTED.items():
        assert pins[distribution] == {tested[-1]}, distribution


@pytest.mark.parametrize("distribution", MODULES)
def test_another_version_is_refused_by_name(distribution, monkeypatch):
    """Breaks if an adapter replaces methods of a version whose arguments nobody has looked at."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.1")
    tested = versions.TESTED[distribution][-1]
    said = rf"{distribution} 99\.1 is installed; moax's adapter is tested with {re.escape(tested)}: pip install"
    with pytest.raises(moax.Unsupported, match=said):
        MODULES[distribution].install()


@pytest.mark.parametrize("distribution", MODULES)
def test_a_missing_framework_says_what_to_install(distribution, monkeypatch):
    """Breaks if a user without the framework reads of a module in it."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    pin = f"'{distribution}=={versions.TESTED[distribution][-1]}'"
    with pytest.raises(ModuleNotFoundError, match=rf"{distribution} is missing: pip install {re.escape(pin)}"):
        MODULES[distribution].install()


def test_adapters_import_no_framework():
    """Breaks if `import moax` imports an adapter, or if an adapter imports its framework before `install`."""
    names = "[f'moax.adapters.{name}' for name in ('maxtext', 'tunix', 'levanter')]"
    code = (
        "import importlib, sys, moax\n"
        "from moax import moe\n"
        "assert 'moax.adapters' not in sys.modules\n"
        f"for name in {names}: importlib.import_module(name)\n"
        "print({'maxtext', 'tunix', 'levanter', 'haliax', 'flax', 'absl'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize(
    "word, arm",
    [
        ("none", (None, None, "auto")),
        ("fp8_block", ("fp8_block", None, "auto")),
        ("fp8_block+kept", ("fp8_block", "kept", "auto")),
        ("none+gathered", (None, "gathered", "auto")),
        ("none+whole", (None, None, None)),
        ("fp8_block+kept+whole", ("fp8_block", "kept", None)),
    ],
)
def test_the_first_word_is_an_arm(word, arm):
    assert maxtext.read_arm(word) == arm


def test_the_benchmark_spells_an_arm_like_the_command():
    """Breaks if a row of the benchmark has a name that the command does not take."""
    text = (ROOT / "docs" / "how-to" / "maxtext-gpu.md").read_text()
    arms = set(re.findall(r"`(\w+\+(?:kept|gathered|whole))`", text)) | set(
        re.findall(r"-m moax\.adapters\.maxtext (\S+)", text)
    )
    words = {f"{recipe}+{suffix}" for recipe in ("none", "fp8_block") for suffix in ("kept", "gathered")}
    assert words | {"fp8_block", "none", "none+whole"} <= arms
    for arm in arms:
        maxtext.read_arm(arm)


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "usage: python -m moax.adapters.maxtext RECIPE base.yml"),
        (["--help"], "or one of them with \\+kept.*, or with\n\\+gathered"),
        (["fp9", "base.yml"], "moax: the recipe 'fp9' must be one of none, fp8_block, "),
        (["base.yml"], "moax: the recipe 'base.yml' must be one of none, "),
    ],
)
def test_the_command_says_what_it_takes(words, said):
    with pytest.raises(SystemExit, match=said):
        maxtext.main(words)


def test_the_command_without_maxtext_is_one_line():
    """Breaks if the command shows a traceback where MaxText is missing."""
    if importlib.util.find_spec("maxtext") is not None:
        pytest.skip("MaxText is installed")
    command = [sys.executable, "-m", "moax.adapters.maxtext", "fp8_block", "base.yml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "moax: maxtext is missing: pip install 'maxtext==0.2.5'"
    assert "Traceback" not in done.stderr


def has_quantized(layer) -> bool:
    return hasattr(layer, "quantized_weights")


@pytest.fixture
def framework(monkeypatch):
    """MaxText's two modules that `install` changes, as far as it reads them."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.TESTED[name][-1])
    names = ("maxtext", "maxtext.layers", "maxtext.layers.moe", "maxtext.trainers", "maxtext.trainers.pre_train")
    for name in (*names, "maxtext.trainers.pre_train.train"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    moe = sys.modules["maxtext.layers.moe"]
    train = types.ModuleType("train")
    monkeypatch.setattr(sys.modules["maxtext.trainers.pre_train"], "train", train, raising=False)
    moe.RoutedMoE = type("RoutedMoE", (), {"__call__": lambda layer, x: x})
    train.loss_fn = lambda model, config, *rest: [has_quantized(layer) for layer in model]
    train.gradient_accumulation_loss_and_grad = lambda loss, config, model, *rest: loss(model, config, *rest)
    return SimpleNamespace(layer=moe.RoutedMoE, train=train)


def test_the_command_installs_its_whole_word(framework, monkeypatch):
    """Breaks if the command reads a part of its first word and then trains without it."""
    pytest.importorskip("flax")
    app = pytest.importorskip("absl.app")
    options = []
    words = []
    monkeypatch.setattr(maxtext, "run_layer", lambda *args: options.append(args[-1]))
    monkeypatch.setattr(app, "run", lambda command, argv: words.extend(argv[1:]))
    framework.train.main = None
    maxtext.main(["fp8_block+kept+whole", "base.yml"])
    assert words == ["base.yml"]
    layer = framework.layer()
    layer.config = None
    layer(jnp.ones((1, 1, 4)))
    assert options[0].recipe == "fp8_block" and options[0].buffer_factor is None
    assert hasattr(framework.train.gradient_accumulation_loss_and_grad, "__wrapped__")


def test_install_replaces_what_it_replaced_before(framework):
    """Breaks if a second `install` quantizes twice a step, or if `kept` outlives an `install` without it."""
    own = (framework.train.loss_fn, framework.train.gradient_accumulation_loss_and_grad)
    theirs = framework.layer.__call__
    for _ in range(2):
        maxtext.install(kept="gathered")
        assert framework.train.loss_fn.__wrapped__ is own[0]
        assert framework.train.gradient_accumulation_loss_and_grad.__wrapped__ is own[1]
    with pytest.raises(ValueError, match="kept=True must be None, or one of 'kept', 'gathered'"):
        maxtext.install(kept=True)
    maxtext.install()
    assert own == (framework.train.loss_fn, framework.train.gradient_accumulation_loss_and_grad)
    assert framework.layer.__call__ is not theirs
    with pytest.raises(TypeError, match="recipes"):
        maxtext.install(recipes="fp8_block")


@pytest.mark.parametrize("preparation", ["kept", "gathered"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_layers_have_quantized_weights_for_a_step(framework, monkeypatch, preparation, microbatches):
    """Breaks if the weights of a step of one microbatch are not quantized once, or stay in MaxText's state."""
    nnx = pytest.importorskip("flax.nnx")
    monkeypatch.setattr(nnx, "iter_graph", lambda model: ((None, node) for node in model))
    calls = []
    monkeypatch.setattr(maxtext, "quantize_layer", lambda layer, options, preparation: calls.append(preparation))
    maxtext.install(kept=preparation)
    settings = config(gradient_accumulation_steps=microbatches)
    model = [framework.layer(), framework.layer()]
    if microbatches == 1:
        quantized = framework.train.loss_fn(model, settings)
    else:
        quantized = framework.train.gradient_accumulation_loss_and_grad(framework.train.loss_fn, settings, model)
    assert quantized == [True, True] and calls == [preparation] * 2
    assert not any(has_quantized(layer) for layer in model)
    with pytest.raises(ValueError, match=rf"\+{preparation} needs scan_layers=False"):
        framework.train.loss_fn(model, config(scan_layers=True))


def test_no_layer_is_left_quantized(framework, monkeypatch):
    """Breaks if layers keep the tracers of a step that fails at a later layer."""
    nnx = pytest.importorskip("flax.nnx")
    monkeypatch.setattr(nnx, "iter_graph", lambda model: ((None, node) for node in model))
    model = [framework.layer() for _ in range(3)]

    def quantize(layer, options, preparation):
        if layer is model[1]:
            raise ValueError("params.wi has shape ()")

    monkeypatch.setattr(maxtext, "quantize_layer", quantize)
    maxtext.install(kept="kept")
    with pytest.raises(ValueError, match="params.wi"):
        framework.train.loss_fn(model, config(gradient_accumulation_steps=1))
    assert not any(has_quantized(layer) for layer in model)


@pytest.mark.parametrize("preparation", ["kept", "gathered"])
def test_kept_says_whether_weights_are_gathered(preparation):
    """Breaks if `+gathered` leaves the gather to each microbatch, or `+kept` takes it away."""
    quantized = maxtext.quantize_layer(layer(config()), moax.Options(axes=maxtext.AXES), preparation)
    assert quantized.gathered == (preparation == "gathered")


def test_run_layer_is_the_layer_of_maxtext():
    """Breaks if weights are not those of MaxText's formula: the softmax over the K chosen logits."""
    for norm_topk_prob in (True, False):
        routed = layer(config("qwen3_moe", norm_topk_prob=norm_topk_prob))
        x = jax.random.normal(jax.random.key(9), (2, 3, H))
        y, loss, update = maxtext.run_layer(routed, x, None, None, moax.Options(axes=maxtext.AXES))
        logits = np.asarray(x @ routed.gate.kernel, np.float64)
        chosen = np.argsort(-logits, axis=-1)[..., :K]
        weights = np.exp(np.take_along_axis(logits, chosen, -1))
        weights /= weights.sum(-1, keepdims=True)
        if norm_topk_prob:
            weights /= weights.sum(-1, keepdims=True)
        want = np.zeros(y.shape)
        for place in np.ndindex(2, 3):
            for expert, weight in zip(chosen[place], weights[place], strict=True):
                hidden = jax.nn.silu(x[place] @ routed.wi_0[expert]) * (x[place] @ routed.wi_1[expert])
                want[place] += weight * np.asarray(hidden @ routed.wo[expert])
        np.testing.assert_allclose(y, want, rtol=2e-4, atol=2e-5)
        assert loss == 0 and update is None


def test_the_axes_split_what_maxtext_splits():
    """Breaks if kept weights are resharded from E to H in each step, or if the axes of a caller are replaced."""
    options = moax.Options(axes=maxtext.AXES)
    by_experts = maxtext.options_of(config(shard_exp_on_fsdp=True), options)
    assert by_experts.axes.fsdp_dim == "experts"
    assert by_experts.axes.names == maxtext.AXES.names
    assert maxtext.options_of(config(), options) == options
    own = moax.Options(axes=moax.Axes(fsdp_dim="model"))
    assert maxtext.options_of(config(shard_exp_on_fsdp=True), own) == own


def test_one_weight_of_gate_and_up_is_both():
    """Breaks if `prefuse_moe_weights`, whose columns are those of gate, then of up, is read in another order."""
    two = layer(config())
    one = layer(config(prefuse_moe_weights=True), wi=jnp.concatenate([two.wi_0, two.wi_1], axis=2))
    np.testing.assert_array_equal(maxtext.gate_and_up(one), maxtext.gate_and_up(two))


@pytest.mark.parametrize("steps", (1, 2))
def test_the_update_of_the_bias(steps):
    """Breaks if the bias moves once for each microbatch: MaxText sums counts, integers, and takes one sign."""
    settings = config("deepseek", routed_bias_update_rate=0.1, gradient_accumulation_steps=steps)
    counts = jnp.array([6, 2, 4, 4], jnp.int32)
    update = maxtext.bias_update(settings, counts)
    if steps == 1:
        np.testing.assert_allclose(update, [-0.1, 0.1, 0.0, 0.0])
    else:
        assert update.dtype == jnp.int32 and (update == counts).all()


def test_forced_experts_outside_of_the_range_are_no_choice():
    forced = jnp.array([[[0, -1], [E - 1, E + 3]]])
    np.testing.assert_array_equal(maxtext.forced_routing(layer(config()), forced), [[[0, E], [E - 1, E]]])
    with pytest.raises(moax.Unsupported, match="forced_routed_experts in DeepSeek's block"):
        maxtext.forced_routing(layer(config("deepseek")), forced)


def test_routers():
    """Breaks if a decoder block of MaxText gets the router of another."""
    groups = dict(n_routing_groups=4, topk_routing_group=2)
    settings = config("deepseek", routed_bias=True, routed_scaling_factor=2.5, norm_topk_prob=True, **groups)
    router = maxtext.config_of(layer(settings, num_experts_per_tok=4)).router
    grouped = dict(bias=True, scale=2.5, num_groups=4, top_groups=2)
    assert router == moax.RouterConfig(score="sigmoid", **grouped)
    settings = config("deepseek", model_name="deepseek2-16b", routed_score_func="softmax", **groups)
    assert maxtext.config_of(layer(settings)).router == moax.RouterConfig(normalize=False)
    oss = maxtext.config_of(layer(config("gpt_oss", routed_bias=True, mlp_activations_limit=5.0)))
    assert oss.router == moax.RouterConfig(order="topk_then_score", logits_bias=True)
    assert (oss.activation, oss.activation_limit) == ("swiglu_oai", 5.0)


@pytest.mark.parametrize(
    "settings, attributes, said",
    [
        (dict(block="llama4"), {}, "decoder_block='llama4'"),
        (dict(block="gemma4"), {}, "decoder_block='gemma4'"),
        (dict(block="deepseek4", routed_score_func="sqrtsoftplus"), {}, "'sqrtsoftplus'"),
        (dict(block="deepseek", routed_score_func="sqrtsoftplus"), {}, "'sqrtsoftplus'"),
        (dict(block="deepseek", model_name="deepseek-custom", routed_bias=True), {}, "model_name='deepseek-custom'"),
        (dict(te_moe_block=True), {}, "te_moe_block=True"),
        (dict(use_random_routing=True), {}, "use_random_routing=True"),
        (dict(capacity_factor=1.25, sparse_matmul=False), {}, "capacity_factor=1.25 with sparse_matmul=False"),
        (dict(mlp_activations=["relu"]), {}, r"mlp_activations=\['relu'\]"),
        ({}, dict(is_hash_routing=True), "hash routing"),
        ({}, dict(wi_0_sparsity_module=object()), "a sparsity rule"),
        ({}, dict(wo_scale=object()), "weight_dtype="),
    ],
)
def test_what_moax_does_not_have_is_refused_by_name(settings, attributes, said):
    """Breaks if a setting of MaxText is ignored, and a user trains another model."""
    with pytest.raises(moax.Unsupported, match=said):
        maxtext.config_of(layer(config(**settings), **attributes))


def test_levanter_reads_the_settings_of_its_layers():
    qwen3 = SimpleNamespace(norm_topk_prob=False, num_experts_per_tok=K, router_aux_loss_coef=0.01)
    assert levanter.qwen3_router(qwen3) == moax.RouterConfig(normalize=False, aux_loss=0.02)
    mixtral = SimpleNamespace(num_experts_per_tok=K, lbl_coef=None, rzl_coef=0.001)
    assert levanter.mixtral_router(mixtral) == moax.RouterConfig(z_loss=0.001)
    for name, value in (("dense_router_gradient", True), ("activation_function", "gelu")):
        settings = SimpleNamespace(**{"dense_router_gradient": False, "activation_function": "silu"} | {name: value})
        with pytest.raises(moax.Unsupported, match=f"{name}="):
            levanter.check_layer(SimpleNamespace(config=settings))
