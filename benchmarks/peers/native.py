"""The MoE layer that JAX alone makes: a peer of `moax.moe` on a mesh of fsdp and ep, in bf16, by `jax.shard_map`.

    router -> sort by expert -> ragged_all_to_all over ep -> sort by expert -> ragged_dot, silu, ragged_dot
           -> ragged_all_to_all back -> weighted sum

Weights are cast to the dtype of x, then all-gathered over fsdp; autodiff makes that gather a reduce-scatter of their
gradients. Nothing is dropped: buffers hold the worst routing. docs/tutorial/layer.md shows `starts`, `exchange` and
`layer` as they are here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from moax import MoEConfig, MoEParams
from moax.backend import platform
from moax.checks import Unsupported

NO_RAGGED = "tokens cross by lax.all_to_all of padded buckets: XLA has no ragged_all_to_all on this platform"


def starts(sizes: Int[Array, "*dims"], axis: int = -1) -> Int[Array, "*dims"]:
    """Where each part begins: the sum of the sizes before it."""
    return jnp.cumsum(sizes, axis) - sizes


def exchange(rows: Float[Array, "N H"], sizes: Int[Array, "S D"], room: int, ragged: bool) -> Float[Array, "R H"]:
    """Rows sorted by the rank of ep that they go to -> R = room rows sorted by the rank that they come from, then 0.

    sizes: rows that rank s sends to rank d, known on every rank.
    """
    if len(sizes) == 1:
        return rows
    me = lax.axis_index("ep")
    send, receive = sizes[me], sizes[:, me]
    if ragged:
        there = starts(sizes, axis=0)[me]  # where each peer puts what comes from here
        empty = jnp.zeros((room, rows.shape[1]), rows.dtype)
        return lax.ragged_all_to_all(rows, empty, starts(send), send, there, receive, axis_name="ep")
    # The same by a bucket for each peer, padded to the most that one can get.
    slots = jnp.arange(min(rows.shape[0], room))
    taken = jnp.minimum(starts(send)[:, None] + slots[None], rows.shape[0] - 1)
    buckets = jnp.where((slots[None] < send[:, None])[..., None], rows[taken], 0)
    buckets = lax.all_to_all(buckets, "ep", 0, 0)
    row = jnp.arange(room)
    source = jnp.minimum(jnp.searchsorted(jnp.cumsum(receive), row, side="right"), len(receive) - 1)
    slot = jnp.minimum(row - starts(receive)[source], len(slots) - 1)
    return jnp.where((row < receive.sum())[:, None], buckets[source, slot], 0)


def layer(
    x: Float[Array, "T H"],
    router: Float[Array, "H E"],
    wi: Float[Array, "shard H 2 F"],
    wo: Float[Array, "shard F H"],
    *,
    top_k: int,
    ragged: bool,
) -> Float[Array, "T H"]:
    """y[t] = sum_k weight[t, k] expert[t, k](x[t]), of the tokens of one device, with its shards of the experts."""
    tokens, width = x.shape
    experts = router.shape[1]
    wi, wo = (lax.all_gather(w.astype(x.dtype), "fsdp", tiled=True) for w in (wi, wo))
    here, ranks = wi.shape[0], experts // wi.shape[0]

    logits = jnp.dot(x.astype(jnp.float32), router.astype(jnp.float32), precision="highest")
    best, chosen = lax.top_k(logits, top_k)
    weights = jax.nn.softmax(best)  # the softmax over all experts, of those chosen, normalized

    order = jnp.argsort(chosen.reshape(-1))
    counts = lax.all_gather(jnp.bincount(chosen.reshape(-1), length=experts), "ep").reshape(ranks, ranks, here)
    sizes = counts.sum(-1)  # from rank, to rank
    room = ranks * tokens * min(top_k, here)
    rows = exchange(x[order // top_k], sizes, room, ragged)

    parts = counts[:, lax.axis_index("ep")]  # from rank, of expert
    part = jnp.searchsorted(jnp.cumsum(parts.reshape(-1)), jnp.arange(room), side="right")
    by_expert = jnp.argsort(jnp.where(part < parts.size, part % here, here))
    group_sizes = parts.sum(0)
    h = lax.ragged_dot(rows[by_expert], wi.reshape(here, width, -1), group_sizes)
    gate, up = jnp.split(h, 2, axis=-1)
    o = lax.ragged_dot(jax.nn.silu(gate) * up, wo, group_sizes)

    back = exchange(o[jnp.argsort(by_expert)], sizes.T, tokens * top_k, ragged)
    chosen_rows = back[jnp.argsort(order)].reshape(tokens, top_k, width)
    return jnp.einsum("tkh,tk->th", chosen_rows, weights.astype(x.dtype))


def block(config: MoEConfig, mesh: Mesh) -> tuple[Callable[[jax.Array, MoEParams[jax.Array]], jax.Array], str]:
    """Returns the layer as a function (x [T, H], params) -> y [T, H], and a note on a substitute on a CPU, or ""."""
    check(config, mesh)
    ragged = platform() != "cpu"
    local = functools.partial(layer, top_k=config.top_k, ragged=ragged)
    return on_mesh(local, mesh), "" if ragged or mesh.shape["ep"] == 1 else NO_RAGGED


def on_mesh(local: Callable, mesh: Mesh) -> Callable[[jax.Array, MoEParams[jax.Array]], jax.Array]:
    """Returns `local`, a layer of one device's shards, as a function (x, params) -> y of global arrays."""
    tokens, experts = PartitionSpec(("fsdp", "ep")), PartitionSpec(("ep", "fsdp"))
    # check_vma is off, since it would need a cast of each buffer that `local` makes.
    specs = dict(in_specs=(tokens, PartitionSpec(), experts, experts), out_specs=tokens, check_vma=False)
    mapped = jax.shard_map(local, mesh=mesh, **specs)
    return lambda x, params: mapped(x, params.router, params.wi, params.wo)


def check(config: MoEConfig, mesh: Mesh) -> None:
    """Raises Unsupported where `layer` would compute something else than `moax.moe`."""
    missing = differs(config, dict(mesh.shape))
    if missing:
        raise Unsupported(f"the layers of JAX alone cannot do this: {', '.join(missing)}")


def differs(config: MoEConfig, sizes: dict[str, int]) -> list[str]:
    """Returns the options of a config, and the sizes of a mesh, that `layer` does not support."""
    router = config.router
    same = router.order == "topk_then_score" or (router.normalize and config.top_k > 1)
    wrong = {
        f"activation={config.activation!r}, not 'swiglu'": config.activation != "swiglu",
        "use_bias=True": config.use_bias,
        f"shared_d_ff={config.shared_d_ff}": config.shared_d_ff > 0,
        f"capacity_factor={config.capacity_factor}": config.capacity_factor is not None,
        "a router other than the normalized softmax": router.score != "softmax" or not same or router.scale != 1.0,
        "a bias or groups in the router": router.bias or router.logits_bias or router.num_groups > 1,
        f"a mesh of {sizes}, not of fsdp and ep": set(sizes) != {"fsdp", "ep"},
    }
    missing = [what for what, is_wrong in wrong.items() if is_wrong]
    devices = math.prod(sizes.values())
    if not missing and config.num_experts % devices:
        missing = [f"{config.num_experts} experts on {devices} devices"]
    return missing
