"""An MoE block composed of `moax.ops`, on a mesh: it equals `moax.moe` in value and in every gradient.

Each op has its own partition rule, so the composition needs no `shard_map`. Replace a step to try one of your own.
Run: `python examples/compose_ops.py`; 8 CPU devices are emulated where there is no GPU.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

import moax
from moax import ops


def block(x: jax.Array, params: moax.MoEParams, config: moax.MoEConfig):
    """Returns y [T, H] of x [T, H], and the balance loss: what `moax.moe` computes, step by step."""
    routing = moax.route(ops.router_logits(x, params.router), config.router, config.top_k)
    # Each token goes once to every rank that owns one of its experts.
    received = ops.dispatch(x, routing.experts, routing.weights, config.num_experts)
    local_experts = config.num_experts // jax.sharding.get_abstract_mesh().shape["ep"]
    rows, plan = ops.permute(received.rows, received.experts, local_experts)
    # The weights are gathered over fsdp. With recipe="fp8_block" here, and align=128 in permute, they travel as bytes.
    h = ops.grouped_matmul(rows, params.wi, plan.group_sizes)
    a = ops.activate(h, config.activation)
    out = ops.grouped_matmul(a, params.wo, plan.group_sizes)
    # A rank sums what its own experts say of a row; combine sums over the ranks, where the token came from.
    partial = ops.unpermute(out, plan, received.weights)
    return ops.combine(partial, received), routing.aux_loss


def error(got, want) -> float:
    """Returns the largest difference, relative to the largest entry of `want`."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(got - want).max() / np.abs(want).max())


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    count = jax.device_count()
    ep = math.gcd(4, count)
    router = moax.RouterConfig(aux_loss=0.01)
    config = moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2, router=router)
    with jax.set_mesh(jax.make_mesh((count // ep, ep), ("fsdp", "ep"), (jax.sharding.AxisType.Auto,) * 2)):
        params = moax.init(jax.random.key(0), config)
        x = jax.random.normal(jax.random.key(1), (32 * count, 64))

        def composed(params, x):
            y, aux_loss = block(x, params, config)
            return jnp.sum(jnp.square(y)) + aux_loss, y

        def whole(params, x):
            y, stats = moax.moe(x, params, config)
            return jnp.sum(jnp.square(y)) + stats.aux_loss, y

        (_, y), grads = jax.jit(jax.value_and_grad(composed, argnums=(0, 1), has_aux=True))(params, x)
        (_, want), wanted = jax.jit(jax.value_and_grad(whole, argnums=(0, 1), has_aux=True))(params, x)
    errors = jax.tree.map(error, grads, wanted)
    print(
        f"composed ops on {count} devices: y differs from moax.moe by {error(y, want):.0e}, and the gradients of "
        f"{len(jax.tree.leaves(errors))} arrays by at most {max(jax.tree.leaves(errors)):.0e}"
    )


if __name__ == "__main__":
    main()
