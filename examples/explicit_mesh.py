"""A mesh of Explicit axes: shardings are part of the types of arrays, and y and the gradients have those of x and w.

JAX knows all types while it traces a function, before anything runs. The program prints them then.
Run: `python examples/explicit_mesh.py`; 8 CPU devices are emulated where there is no GPU.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

import moax


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    count = jax.device_count()
    ep = math.gcd(4, count)
    mesh = jax.make_mesh((count // ep, ep), ("fsdp", "ep"), axis_types=(AxisType.Explicit,) * 2)
    config = moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2)
    with jax.set_mesh(mesh):
        params = moax.init(jax.random.key(0), config)
        x = jax.random.normal(
            jax.random.key(1), (count, 32, 64), jnp.bfloat16, out_sharding=PartitionSpec(("fsdp", "ep"))
        )

        def loss(params, x):
            y, stats = moax.moe(x, params, config, recipe="fp8_block")
            print(f"  x   {jax.typeof(x)}\n  wi  {jax.typeof(params.wi)}\n  y   {jax.typeof(y)}")
            if jax.typeof(y) != jax.typeof(x):
                raise SystemExit(f"y has type {jax.typeof(y)}, and x {jax.typeof(x)}")
            return jnp.mean(jnp.square(y), dtype=jnp.float32) + stats.aux_loss

        print("types, as `@` names the mesh axes of each dim:")
        value, grads = jax.jit(jax.value_and_grad(loss))(params, x)
        print(f"  dwi {jax.typeof(grads.wi)}")
        same = jax.tree.leaves(jax.tree.map(lambda g, p: jax.typeof(g) == jax.typeof(p), grads, params))
    print(
        f"explicit mesh on {count} devices: loss {float(value):.3f}; y has the type of x; "
        f"{sum(same)} of {len(same)} gradients have the types of their parameters"
    )


if __name__ == "__main__":
    main()
