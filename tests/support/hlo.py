"""Programs to read: texts of optimized HLO in the forms that XLA prints, and shapes on meshes."""

import functools
from textwrap import dedent

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def abstract(mesh, shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def mapped(mesh, ins, outs):
    return functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=ins,
        out_specs=outs,
        check_vma=False,
    )


def text_of(*lines: str, before: str = "", devices: int = 8) -> str:
    """Returns an HLO text whose entry holds these instructions, after the computations of `before`."""
    body = "\n".join(f"  {line}" for line in lines)
    header = f"HloModule jit_f, is_scheduled=true, entry_computation_layout={{()->f32[]}}, num_partitions={devices}"
    return f"{header}\n\n{dedent(before)}\n\nENTRY %main.0_spmd (param.1: f32[8]) -> f32[8] {{\n{body}\n}}\n"
