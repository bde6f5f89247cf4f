"""Hash routing: the id of a token chooses its experts, by a table, as in the first layers of DeepSeek-V4.

    table = moax.hash_table(key, vocab_size, config.num_experts, config.top_k)       [V, K], made once
    y, stats = moax.moe(x, params, config, routing=moax.hash_experts(ids, table))

The weights are those of the router's scores; DeepSeek-V4 has `RouterConfig("sqrt_softplus", scale=...)`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Integer, PRNGKeyArray

from moax.checks import check_count, check_int, check_key
from moax.mesh.place import gather_entries


def hash_table(key: PRNGKeyArray | Array, vocab_size: int, num_experts: int, top_k: int) -> Int[Array, "V K"]:
    """Returns K different experts for each of V token ids, drawn uniformly.

    Args:
      key: a PRNG key.
      vocab_size: V.
      num_experts: E.
      top_k: K.

    Returns:
      [V, K] i32, in [0, E). It is a constant of the model: no gradient and no optimizer changes it.

    Raises:
      ValueError: key is no key, a size is no int of at least 1, or K is above E.
    """
    check_key("key", key)
    for name, value in (("vocab_size", vocab_size), ("num_experts", num_experts), ("top_k", top_k)):
        check_count(name, value)
    if top_k > num_experts:
        raise ValueError(f"top_k={top_k} must be at most num_experts={num_experts}")
    return lax.top_k(jax.random.uniform(key, (vocab_size, num_experts)), top_k)[1].astype(jnp.int32)


def hash_experts(ids: Integer[Array, "*batch"], table: Integer[Array, "V K"]) -> Int[Array, "*batch K"]:
    """Returns table[ids], for the argument `routing` of `moax.moe`.

    Args:
      ids: [...], integers in [0, V), the ids of the tokens.
      table: [V, K], integers, the experts of each id; see `hash_table`. A checkpoint may have a table of its own.

    Returns:
      [..., K] i32, sharded as ids are. An id outside of the table has -1, with which a token takes its best experts.

    Raises:
      ValueError: ids or table is no array of integers, or the table has not two dims.
    """
    check_int("ids", ids, "[...]")
    check_int("table", table, "[V, K]")
    if table.ndim != 2:
        raise ValueError(f"table has shape {table.shape}; it must be [V, K]")
    return gather_entries(jnp.asarray(table, jnp.int32), jnp.asarray(ids, jnp.int32), -1)
