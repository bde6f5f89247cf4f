"""Quantizes MaxText's expert weights once a step, before the microbatches of `gradient_accumulation_steps`.

`install(recipe="fp8_block")` puts moax's block in place as maxtext_adapter.py does, and replaces MaxText's gradient
accumulation in this process. `recipe=None` casts the weights to bfloat16 once a step. `scan_layers=False` is needed: a
scan over layers copies the quantized weights. The file is also MaxText's training command:
`python examples/maxtext_kept_adapter.py fp8_block base.yml gradient_accumulation_steps=4 scan_layers=False ...`
"""

import sys

import maxtext_adapter
from absl import app
from flax import nnx
from maxtext.layers.moe import RoutedMoE
from maxtext.trainers.pre_train import train

import moax


def install(**options) -> None:
    """Replaces the call of MaxText's layer and its gradient accumulation; `options` are those of `moax.moe`."""
    accumulate = train.gradient_accumulation_loss_and_grad
    how = {"axes": maxtext_adapter.AXES} | options

    def accumulate_kept(loss, config, model, *rest):
        layers = [node for _, node in nnx.iter_graph(model) if isinstance(node, RoutedMoE)]
        for layer in layers:
            params = moax.MoEParams(layer.gate.kernel[...], maxtext_adapter.pair(layer), layer.wo[...])
            sizes = layer.moe_expert_input_dim, layer.intermediate_dim, layer.num_experts, layer.num_experts_per_tok
            layer.kept_weights = nnx.Cache(
                moax.quantize_params(params, moax.MoEConfig(*sizes), dtype=config.dtype, **how)
            )
        result = accumulate(loss, config, model, *rest)
        for layer in layers:
            del layer.kept_weights  # the state of a step has no quantized weights
        return result

    maxtext_adapter.install(**options)
    RoutedMoE.kept = property(lambda layer: layer.kept_weights.get_value())  # the call of maxtext_adapter reads it
    train.gradient_accumulation_loss_and_grad = accumulate_kept


if __name__ == "__main__":
    install(recipe=None if sys.argv[1] == "none" else sys.argv[1])
    app.run(train.main, [sys.argv[0], *sys.argv[2:]])
