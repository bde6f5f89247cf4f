"""Inside your own `shard_map` over a pipeline axis: two stages, each an MoE layer on its own half of the devices.

The `shard_map` names the axis `stage` alone. The other axes stay Auto, and `moax.moe` shards over them as it does
everywhere. `ppermute` sends microbatches from stage to stage; the results are those of one layer after the other.
Run: `python examples/pipeline_stage.py`; 8 CPU devices are emulated where there is no GPU.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moax

STAGES, MICROBATCHES = 2, 4
CONFIG = moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2)
AXES = moax.Axes(other="stage")  # moax leaves the pipeline's axis to the pipeline


def layer(params, x):
    return x + moax.moe(x, params, CONFIG, axes=AXES)[0]


@jax.shard_map(axis_names={"stage"}, in_specs=(P("stage"), P()), out_specs=P("stage"), check_vma=False)
def pipeline(params, x):
    """params: of this stage, with a dim of 1 first. x: [MICROBATCHES, B, S, H]. Returns [1, MICROBATCHES, B, S, H]."""
    stage, params = lax.axis_index("stage"), jax.tree.map(lambda p: p[0], params)

    def tick(carried, entering):
        y = layer(params, jnp.where(stage == 0, entering, carried))
        return lax.ppermute(y, "stage", [(i, i + 1) for i in range(STAGES - 1)]), y

    # After the last microbatch, zeros enter until that microbatch has left the last stage.
    _, y = lax.scan(tick, jnp.zeros_like(x[0]), jnp.pad(x, [(0, STAGES - 1)] + [(0, 0)] * 3))
    return y[None, STAGES - 1 :]


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    if (count := jax.device_count()) % STAGES:
        raise SystemExit(f"{count} devices: two stages need an even number")
    ep = math.gcd(4, count // STAGES)
    mesh = jax.make_mesh((STAGES, count // STAGES // ep, ep), ("stage", "fsdp", "ep"), (AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
        params = jax.vmap(lambda key: moax.init(key, CONFIG, axes=AXES))(jax.random.split(jax.random.key(0), STAGES))
        specs = jax.tree.map(lambda spec: P("stage", *spec), moax.param_specs(CONFIG, AXES))
        params = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), params, specs)
        x = jax.random.normal(jax.random.key(1), (MICROBATCHES, count, 16, CONFIG.d_model))

        def staged(params):
            return pipeline(params, x)[-1]  # the last stage has the results

        def plain(params):
            return functools.reduce(lambda x, i: layer(jax.tree.map(lambda p: p[i], params), x), range(STAGES), x)

        def results(run):
            def loss(params):
                return jnp.mean(jnp.square(y := run(params))), y

            (_, y), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
            return y, grads.wi

        pairs = zip(results(staged), results(plain), strict=True)
        y, grad = (float(jnp.abs(got - want).max() / jnp.abs(want).max()) for got, want in pairs)
    print(
        f"pipeline of {STAGES} stages on {count} devices: {MICROBATCHES} microbatches, "
        f"off from one layer after the other by {y:.1e} (y) and {grad:.1e} (gradient of wi)"
    )


if __name__ == "__main__":
    main()
