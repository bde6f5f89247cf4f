"""What the tokens of a run are, and which experts they choose.

`balanced` gives each token experts of a table, in MaxText's layer and in moax's alike: every sequence sends the same
number of tokens to each expert. MaxText's own `use_random_routing` draws each choice alone, so that a token may choose
an expert twice and no two layers draw the same, which moax could not repeat. `text` feeds the bytes of the sources of
Python's standard library, which `lm/` trains on, as tokens: each step reads other sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lm import data


def list_choices(tokens: int, experts: int, top_k: int) -> np.ndarray:
    """Returns the experts [tokens, top_k] of a sequence.

    Consecutive choices are permutations of all experts, so that each expert gets the same number of them, and no token
    has an expert twice.
    """
    random = np.random.default_rng(0)
    together = experts // top_k  # the tokens that share a permutation
    rounds = -(-tokens // together)
    drawn = [random.permutation(experts)[: together * top_k] for _ in range(rounds)]
    return np.concatenate(drawn).reshape(-1, top_k)[:tokens].astype(np.int32)


def route_balanced(layer_class: Any, ours: bool) -> None:
    """Makes MaxText's layer take the experts of `list_choices`; `ours` tells that its call is moax's."""
    import jax
    import jax.numpy as jnp

    def choose(layer, shape):
        batch, tokens = shape
        table = list_choices(tokens, layer.num_experts, layer.num_experts_per_tok)
        # Without the barrier XLA sorts the table when it compiles, and no step would sort.
        choices = jax.lax.optimization_barrier(jnp.asarray(table))
        return jnp.broadcast_to(choices, (batch, *table.shape))

    call = layer_class.__call__
    get_topk = layer_class.get_topk

    def call_balanced(layer, x, input_ids=None, gate_inputs=None, out_sharding=None, forced_routed_experts=None):
        return call(layer, x, input_ids, gate_inputs, out_sharding, choose(layer, x.shape[:2]))

    def get_balanced(layer, gate_logits, pre_bias_logits, rngs=None, input_ids=None, forced_routed_experts=None):
        choices = choose(layer, gate_logits.shape[:2])
        return get_topk(layer, gate_logits, pre_bias_logits, rngs, input_ids, choices)

    if ours:
        layer_class.__call__ = call_balanced
    else:
        # MaxText's call would reserve room for tokens without an expert, which its own router never needs.
        layer_class.get_topk = get_balanced


def feed_text(pipeline: Any) -> None:
    """Makes MaxText's input pipeline yield text where it would yield synthetic tokens."""

    class TextIterator(pipeline.SyntheticDataIterator):
        """MaxText's iterator, with another batch in every step."""

        def __init__(self, config, mesh):
            super().__init__(config, mesh)
            self.corpus = data.load(None, config.max_target_length)
            self.step = 0

        def __next__(self):
            """Returns the next batch."""
            tokens, positions, segmentation = self.data
            batch, length = tokens.shape
            windows = self.corpus.batch(0, self.step, batch, length - 1)
            self.step += 1
            with self.mesh:
                return self.data_generator(self.config, (windows.astype(np.int32), positions, segmentation))

    pipeline.SyntheticDataIterator = TextIterator
