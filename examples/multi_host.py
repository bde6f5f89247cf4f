"""One program on one machine or on many: the processes join, and the rest is the same program.

The mesh keeps each group of `ep` on the fast wires of one host, and lets `fsdp` cross the network, where weights
travel as bytes. Each process makes the rows of its own devices. Two runs on the same processes have the same losses.
With another number of processes the sums have another order: the first losses agree to six digits, and the roundings to
FP8 make two digits of that after 20 steps, as they do where one last bit of each weight is another.
Run: `python examples/multi_host.py [--devices N]`; N CPU devices are emulated where there is no GPU. On a cluster, one
process a host: add `--distributed` under Slurm, elsewhere `--coordinator HOST:PORT --num-processes N --process-id I`.
"""

import argparse
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import moax

CONFIG = moax.MoEConfig(d_model=64, d_ff=128, num_experts=8, top_k=2)
ROWS, SEQ, STEPS, RATE = 16, 32, 20, 20.0


def batch_of(step: int, index: tuple) -> np.ndarray:
    """[rows, S, H]: the rows of the global batch that one device has; a real program reads them from files."""
    rows = [np.random.default_rng([step, row]).standard_normal((SEQ, CONFIG.d_model)) for row in range(ROWS)[index[0]]]
    return np.stack(rows).astype(jnp.bfloat16)


def train_step(params, x):
    """Learns y = -x."""

    def loss_of(params):
        y, stats = moax.moe(x, params, CONFIG, recipe="fp8_block")
        return jnp.mean(jnp.square((x + y).astype(jnp.float32))) + stats.aux_loss

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), loss


def main(args):
    if args.coordinator or args.distributed:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    jax.config.update("jax_num_cpu_devices", args.devices // (args.num_processes or 1))
    count, local = jax.device_count(), jax.local_device_count()
    ep = math.gcd(4, local)
    mesh = moax.make_mesh({"fsdp": count // ep, "ep": ep})  # jax.make_mesh refuses GPUs of several hosts
    rows = jax.sharding.NamedSharding(mesh, moax.params.token_spec(moax.Axes(), ndim=3, mesh=mesh))
    shape, losses = (ROWS, SEQ, CONFIG.d_model), []
    with jax.set_mesh(mesh):
        params = moax.init(jax.random.key(0), CONFIG)
        # The loss is replicated, so every process can read it.
        step = jax.jit(train_step, donate_argnums=0, out_shardings=(None, jax.NamedSharding(mesh, jax.P())))
        for i in range(STEPS):
            params, loss = step(params, jax.make_array_from_callback(shape, rows, functools.partial(batch_of, i)))
            losses.append(float(loss))
    if jax.process_index() == 0:
        print(f"multi host on {count} devices: in {jax.process_count()} process(es), mesh {dict(mesh.shape)}, "
              f"loss {losses[0]:.6f} -> {losses[-1]:.6f}")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="CPU devices to emulate in all: a power of two")
    parser.add_argument("--distributed", action="store_true", help="join the other processes of this Slurm job")
    parser.add_argument("--coordinator", help="HOST:PORT where process 0 listens")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    main(parser.parse_args())
