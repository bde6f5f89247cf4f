"""`jax.export` of the block: what is serialized and called again computes the same; what cannot be says what can.

Covers: one device, with a number of tokens and without; a mesh; gradients; recipes; classes; the other engine.
"""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("flatbuffers")  # `jax.export` serializes with it

import moax
from support import make_mesh

ROUTER = moax.RouterConfig(score="sigmoid", bias=True, logits_bias=True, aux_loss=0.1)
FULL = moax.MoEConfig(16, 16, 8, 2, use_bias=True, shared_d_ff=8, router=ROUTER)
BARE = moax.MoEConfig(16, 16, 8, 2)


def x_of(rows: int) -> jax.Array:
    return jax.random.normal(jax.random.key(rows), (rows, 16))


def back(exported: export.Exported) -> export.Exported:
    """The program, as another process reads it."""
    return export.deserialize(exported.serialize(vjp_order=exported.fun_name == "loss"))


@pytest.mark.more
def test_a_symbolic_number_of_tokens():
    """Breaks if a served program must be compiled for each number of tokens, or is wrong for one that is no multiple of
    anything; or if `MoEParams` and `MoEStats` are not known to `jax.export`."""
    params = moax.init(jax.random.key(0), FULL)
    (tokens,) = export.symbolic_shape("t")
    block = jax.jit(lambda x, p: moax.moe(x, p, FULL, recipe="fp8_block"))
    program = back(export.export(block)(jax.ShapeDtypeStruct((tokens, 16), jnp.float32), params))
    for rows in (1, 301):
        got = program.call(x_of(rows), params)
        want = block(x_of(rows), params)
        assert type(got[1]) is moax.MoEStats
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.more
def test_gradients_of_a_symbolic_number_of_tokens():
    """Breaks if an exported loss has no gradient, or if the balance loss of a sequence needs a number of tokens."""
    router = dataclasses.replace(ROUTER, sequence_aux_loss=0.1)
    config = dataclasses.replace(FULL, router=router)
    params = moax.init(jax.random.key(0), config)
    batch, seq = export.symbolic_shape("b, s")

    @jax.jit
    def loss(x, p):
        y, stats = moax.moe(x, p, config)
        return jnp.square(y).mean() + stats.aux_loss

    program = back(export.export(loss)(jax.ShapeDtypeStruct((batch, seq, 16), jnp.float32), params))
    x = x_of(12).reshape(3, 4, 16)
    got = jax.grad(program.call, (0, 1))(x, params)
    want = jax.grad(loss, (0, 1))(x, params)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["shard_map", pytest.param("explicit", marks=pytest.mark.more)])
def test_on_a_mesh(way):
    """Breaks if the program of a mesh cannot be written to a file and run by another process on such a mesh."""
    mesh = make_mesh("2x4", way)
    tokens = P(("fsdp", "ep"))
    with jax.set_mesh(mesh):
        params = moax.init(jax.random.key(0), BARE)
        x = jax.device_put(x_of(16), NamedSharding(mesh, tokens))
        block = jax.jit(lambda x, p: moax.moe(x, p, BARE, engine="shard_map", recipe="fp8_block"))
        program = back(export.export(block)(x, params))
        got = jax.jit(program.call)(x, params)
        want = block(x, params)
    assert program.nr_devices == 8
    np.testing.assert_array_equal(got[0], want[0])
    assert got[1].tokens_per_expert.sum() == 32


OWN = moax.Recipe(None, moax.Format("e5m2", 16, scale="e8m0"), None)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda p: moax.quantize_params(p, BARE, recipe=OWN, dtype=jnp.float32), dict(recipe=moax.Recipe(*[None] * 3))),
        (lambda p: moax.lora.Adapters(p.wi[..., 0, :2], p.wi[:, :2], None, None, 0.1), dict(scale=0.2)),
        pytest.param(
            lambda p: moax.quantize_params(p, BARE, recipe="mxfp8", gather=True, dtype=jnp.float32),
            dict(gathered=False),
            marks=pytest.mark.more,
        ),
    ],
    ids=["shards", "adapters", "gathered"],
)
def test_classes_with_static_fields(make, change):
    """Breaks if a program cannot take and return `QuantizedParams` or `Adapters`, or is read back for values of another
    recipe, name or scale than it was exported for."""
    params = moax.init(jax.random.key(0), BARE)
    value = jax.jit(make)(params)
    recipe = getattr(value, "recipe", None)
    option = "quantized" if recipe else "adapters"
    block = jax.jit(lambda x, p, value: (moax.moe(x, p, BARE, recipe=recipe, **{option: value})[0], value))
    program = back(export.export(block)(x_of(16), params, value))
    got = program.call(x_of(16), params, value)
    want = block(x_of(16), params, value)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="pytree node metadata does not match"):
        program.call(x_of(16), params, dataclasses.replace(value, **change))


def test_static_fields_of_other_types():
    """Breaks if a scale of NumPy is refused, or a static field that JSON has no form for stands as something else."""
    adapters = moax.lora.Adapters(jnp.ones(2), None, None, None, np.float32(0.1))
    program = back(export.export(jax.jit(lambda value: value))(adapters))
    got = program.call(adapters)
    assert got.scale == np.float32(0.1)
    other = moax.lora.Adapters(jnp.ones(2), None, None, None, jnp.float32)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(ValueError, match="a static field of a program must be a number, a name or a moax.Recipe"):
        export.export(jax.jit(lambda value: value))(other).serialize()


@pytest.mark.more
def test_what_another_process_imports(tmp_path):
    """Breaks if a process that imports what docs/how-to/export.md names cannot read a program of moax's classes."""
    params = moax.init(jax.random.key(0), BARE)
    quantized = jax.eval_shape(lambda p: moax.quantize_params(p, BARE, recipe=OWN, dtype=jnp.float32), params)
    adapters = jax.eval_shape(lambda key: moax.lora.init(key, BARE, 2), jax.random.key(1))
    values = (params, quantized, adapters)
    (tmp_path / "program").write_bytes(export.export(jax.jit(lambda *values: values))(*values).serialize())
    code = """
import sys
from jax import export
from moax import MoEParams
import moax.lora
print(export.deserialize(open(sys.argv[1], "rb").read()).in_tree)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "program")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == str(jax.tree.structure((values, {})))


def test_the_engine_that_cannot():
    """Breaks if a user is not told which engine can be exported: JAX names host callbacks alone."""
    with jax.set_mesh(make_mesh("2x4", "custom_partitioning")):
        params = moax.init(jax.random.key(0), BARE)
        block = jax.jit(lambda x, p: moax.moe(x, p, BARE)[0])
        block.lower(x_of(16), params)
        with pytest.raises(
            moax.Unsupported,
            match="cannot serialize engine='custom_partitioning'.*use engine='shard_map'",
        ):
            export.export(block)(x_of(16), params)


@pytest.mark.parametrize(
    "way, config, message",
    [
        ("shard_map", BARE, "x has 8.t rows, which is symbolic, on a mesh.*export for one device"),
        (None, moax.MoEConfig(16, 16, 8, 2, capacity_factor=1.25), "use capacity_factor=None"),
    ],
)
def test_symbolic_tokens_that_cannot_be(way, config, message):
    """Breaks if a program is exported that ends its process when it is called, or JAX fails in the guts."""
    (tokens,) = export.symbolic_shape("t")
    x = jax.ShapeDtypeStruct((8 * tokens, 16), jnp.float32)
    params = moax.init(jax.random.key(0), config)

    def block(x, p):
        return moax.moe(x, p, config, engine="auto" if way is None else way)[0]

    with jax.set_mesh(make_mesh("2x4", way)) if way else jax.disable_jit(False):
        with pytest.raises(moax.Unsupported, match=message):
            export.export(jax.jit(block))(x, params)
