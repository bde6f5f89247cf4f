"""H200s that this machine does not have, as XLA describes them: a mesh to compile for, and the operands of a layer."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import moax
from moax.params import token_spec

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 151397597184 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  device_address_bits: 64 name: "NVIDIA H200" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def mesh_of_h200s(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    kind: AxisType = AxisType.Auto,
) -> Mesh:
    """Returns a mesh to compile for."""
    size = f"1x1x{math.prod(shape)}"
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology=size)
    devices = topologies.make_mesh(topo=topology, mesh_shape=shape, axis_names=names).devices
    return Mesh(devices, names, axis_types=(kind,) * len(names))


def make_operands(
    config: moax.MoEConfig,
    tokens: int,
    *,
    axes=moax.Axes(),
    dtype=jnp.bfloat16,
    layers=None,
):
    """Returns the types of the parameters, stacked where `layers` is a number, and of x, on the mesh in force."""
    mesh = jax.sharding.get_mesh()
    stacked = () if layers is None else (layers,)

    def place(leaf, spec):
        spec = PartitionSpec(*[None] * len(stacked), *spec)
        return jax.ShapeDtypeStruct(
            (*stacked, *leaf.shape),
            leaf.dtype,
            sharding=NamedSharding(mesh, spec),
        )

    shapes = jax.eval_shape(lambda: moax.init(jax.random.key(0), config, dtype=dtype, axes=axes))
    x = jax.ShapeDtypeStruct(
        (tokens, config.d_model),
        jnp.bfloat16,
        sharding=NamedSharding(mesh, token_spec(axes)),
    )
    return jax.tree.map(place, shapes, moax.param_specs(config, axes)), x
