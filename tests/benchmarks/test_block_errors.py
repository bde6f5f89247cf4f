"""The errors of a block against float32, as `python -m benchmarks block --errors` measures them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import moax
from benchmarks import command
from benchmarks.block import block, block_worker, errors

pytestmark = [pytest.mark.more, pytest.mark.loose]

CONFIG = moax.MoEConfig(d_model=128, d_ff=128, num_experts=4, top_k=2)


@pytest.fixture(scope="module")
def measured():
    """Returns a function: the errors of the block by the name of a recipe, or of `block` in the place of `moax.moe`."""
    draw = partial(moax.init, jax.random.key(0), CONFIG, dtype=jnp.bfloat16)
    x, dy = block_worker.inputs(CONFIG, None, errors.TOKENS)

    def of(name: str, layer_of=None) -> dict:
        kept, recipe = name == block.KEPT, block_worker.options_of({"recipe": name})["recipe"]

        def layer(x, params, quantized):
            return moax.moe(x, params, CONFIG, recipe=recipe, quantized=quantized)

        keep = partial(moax.quantize_params, config=CONFIG, recipe=recipe) if kept else lambda params: None
        shapes = jax.eval_shape(draw)
        compare = errors.build(layer_of or layer, CONFIG, shapes, jax.eval_shape(keep, shapes))
        return compare(x, dy, draw(), keep(draw()))

    return of


def test_errors_of_recipes(measured):
    """Breaks if the errors of bf16 are more than rounding, if those of FP8 are not larger, or if an expert is lost."""
    plain, fp8, kept = (measured(name) for name in ("none", "fp8_block", block.KEPT))
    for name in errors.NAMES:
        assert 0 < plain[name]["error"] < 8e-3 < fp8[name]["error"] < 0.1, name
        assert 8e-3 < kept[name]["error"] < 0.1
        assert ("worst" in fp8[name]) == (name in ("router", "wi", "wo"))
        assert fp8[name].get("worst", 1.0) >= fp8[name]["error"]


def test_errors_see_one_wrong_expert(measured):
    """Breaks if an error of one expert hides behind those of all experts."""

    def block(x, params, quantized):
        wrong = params.wo.at[2].multiply(1.5)
        wo = params.wo + jax.lax.stop_gradient(wrong - params.wo)
        return moax.moe(x, dataclasses.replace(params, wo=wo), CONFIG)

    found = measured("none", block)
    assert found["wi"]["worst"] == pytest.approx(0.5, rel=0.05) and found["wi"]["error"] < 0.4
    assert found["wo"]["worst"] < 0.01 < 0.1 < found["y"]["error"]


def test_a_comparison_that_fails_says_why(measured):
    """Breaks if the times of a block are lost because its errors could not be measured."""

    def block(x, params, quantized):
        raise ValueError("too large\nfor this")

    assert measured("none", block) == {"note": "ValueError: too large"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["block", "--errors", "--mesh", "ep=2"], "--errors with --mesh: it is for one device"),
        (["block", "--recipe", "fp8_block+kept", "--mesh", "ep=2"], "--recipe fp8_block\\+kept with --mesh"),
        (["gemm", "--errors"], "--errors with gemm: it is for block alone"),
    ],
)
def test_options_for_one_device(argv, message):
    with pytest.raises(ValueError, match=message):
        command.select(command.parser().parse_args([*argv, "--cases", "tiny"]))
