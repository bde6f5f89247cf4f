"""`moax.scan` equals a scan of checkpointed layers, and the steps of a turn of its loops need nothing of each other.

Covers: kinds of meshes x recipes x policies, values and gradients, dense layers and arrays that a layer closes over
with them; what a loop's body computes from what; what crosses the wire; a module of nnx; wrong arguments.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import moax
from moax import inspect
from moax.nnx import MoE
from support import TOKENS, make_mesh, make_params, put, random, rel_error, some, spec

LAYERS, WIDTH = 3, 64
CONFIG = moax.MoEConfig(WIDTH, 96, 8, 2, router=moax.RouterConfig(aux_loss=0.01))
NAMES = jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES)
EVERYTHING = jax.checkpoint_policies.everything_saveable
CASES = [
    ("dp2x2x2", "explicit", None, None),
    ("2x4", "custom_partitioning", "fp8_block", NAMES),
    ("4x2", "shard_map", "fp8_block", EVERYTHING),
    ("tp2x2x2", "explicit", "mxfp8", NAMES),
]


def plain_scan(layer, carry, stack, policy):
    return lax.scan(jax.checkpoint(layer, policy=policy), carry, stack)


def our_scan(layer, carry, stack, policy):
    return moax.scan(layer, carry, stack, policy=policy)


def model(mesh: str, way: str):
    """The stacked weights of the layers, the tokens and a scale, on the mesh."""
    each = [make_params(CONFIG, seed=i) for i in range(LAYERS)]
    stack = {
        "moe": jax.tree.map(lambda *v: jnp.stack(v), *each),
        "dense": random(7, LAYERS, WIDTH, WIDTH) * WIDTH**-0.5,
        "number": jnp.arange(LAYERS, dtype=jnp.int32),
    }
    on, none = make_mesh(mesh, way), jax.sharding.PartitionSpec(None)
    rows = jax.tree.map(lambda s: spec(mesh, (), *s), moax.param_specs(CONFIG, mesh=on))
    specs = {"moe": rows, "dense": spec(mesh, (), ("fsdp", "ep")), "number": none}
    x = put(on, spec(mesh, TOKENS), random(1, 64, WIDTH))
    return put(on, specs, stack), x, put(on, none, random(2, WIDTH))


def step(scan, recipe, engine, policy, stack, x, scale):
    """The loss and its gradients in the weights, the tokens, and the scale that the layers close over."""

    def loss(floats, x, scale):
        def layer(carry, weights):
            x, count = carry
            h = moax.ops.dense(x, weights["dense"], recipe=recipe, engine=engine)
            y, stats = moax.moe(jnp.tanh(h) * scale[None], weights["moe"], CONFIG, recipe=recipe, engine=engine)
            return (x + y, count + weights["number"]), stats

        carry = x, jnp.zeros((), jnp.int32)
        (y, count), stats = scan(layer, carry, stack | floats, policy)
        return jnp.mean(y**2) + stats.aux_loss.sum(), (y, count, stats)

    floats = {name: stack[name] for name in ("moe", "dense")}
    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(floats, x, scale)


@pytest.mark.parametrize(("mesh", "way", "recipe", "policy"), some(CASES, 1))
def test_it_is_the_scan_of_checkpointed_layers(mesh, way, recipe, policy):
    """Breaks if a layer computes with the weights of another one, a gradient goes to another layer or is not summed
    over all of fsdp and dp, or an output is lost."""
    engine = way if way == "shard_map" else "auto"
    with jax.set_mesh(make_mesh(mesh, way)):
        arrays = model(mesh, way)
        got, want = (
            jax.jit(functools.partial(step, scan, recipe, engine, policy))(*arrays) for scan in (our_scan, plain_scan)
        )
    limit = 1e-5 if recipe is None else 2e-3  # where a rounding differs by the order of a sum, a product does
    jax.tree.map(lambda a, b: np.testing.assert_array_less(rel_error(a, b), limit), got, want)
    same = jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim), got[1], want[1])
    assert way == "custom_partitioning" or all(jax.tree.leaves(same))


PRODUCTS = ("dot_general", "ragged_dot_general")
WIRE = ("all_gather", "reduce_scatter")


def holds(eqn, names) -> bool:
    """Whether an operation, or one inside it, is one of `names`."""
    return eqn.primitive.name in names or any(holds(e, names) for jaxpr in inner(eqn) for e in jaxpr.eqns)


def inner(eqn):
    """The jaxprs of an operation: of a call, of a loop, or of the shards of an op."""
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, tuple | list) else (p,))]
    return [getattr(v, "jaxpr", v) for v in values if hasattr(getattr(v, "jaxpr", v), "eqns")]


def bodies(jaxpr):
    """The bodies of the loops over layers: of the scans that hold a product."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan" and holds(eqn, PRODUCTS):
            yield from inner(eqn)
        else:
            for each in inner(eqn):
                yield from bodies(each)


def needs(eqns, start) -> set:
    """The positions of the operations that operation `start` needs, with itself."""
    read, found = set(), set()
    for i in range(start, -1, -1):
        if i == start or not read.isdisjoint(eqns[i].outvars):
            found.add(i)
            read.update(v for v in eqns[i].invars if not hasattr(v, "val"))
    return found


def beside(body) -> tuple[int, int]:
    """How many operations of a body have a collective of weights, and how many of these stand free: none needs a
    product of the body, and no product needs it."""
    eqns = body.eqns
    wire = {i for i, eqn in enumerate(eqns) if holds(eqn, WIRE)}
    products = {i for i, eqn in enumerate(eqns) if holds(eqn, PRODUCTS)}
    needed = set().union(*(needs(eqns, i) for i in products))
    return len(wire), sum(products.isdisjoint(needs(eqns, i)) and i not in needed for i in wire)


@pytest.mark.parametrize(("scan", "free"), [(our_scan, True), (plain_scan, False)])
@pytest.mark.parametrize(("recipe", "policy"), some([("fp8_block", NAMES), (None, None)], 1))
def test_no_collective_of_weights_waits_for_a_product(recipe, policy, scan, free):
    """Breaks if the gather of a weight or the scatter of a gradient depends on what the layer of its turn computes, or
    the layer on it: the compiler could not run them at once. The plain scan shows that the test sees it. With
    `jax_remat3` the two scans are one."""
    free = free and not jax.config.jax_remat3
    with jax.set_mesh(make_mesh("8x1", "explicit")):
        arrays = model("8x1", "explicit")
        found = jax.make_jaxpr(functools.partial(step, scan, recipe, "auto", policy))(*arrays)
    counts = [beside(body) for body in bodies(found.jaxpr)]
    assert len(counts) == 2 and all(wire for wire, _ in counts)
    assert all((alone == wire) == free for wire, alone in counts), counts


@pytest.mark.more
def test_it_moves_the_bytes_of_one_layer_more():
    """Breaks if a loop gathers a weight twice in a turn, or unquantized."""
    with jax.set_mesh(make_mesh("2x4")):
        arrays = model("2x4", "custom_partitioning")
        ours, plain = (
            inspect.collectives(jax.jit(functools.partial(step, scan, "fp8_block", "auto", NAMES)), *arrays)
            for scan in (our_scan, plain_scan)
        )
    sent = [
        sum(c.bytes * c.times for c in inspect.weight_gathers(found) if c.dtype == "uint8") for found in (ours, plain)
    ]
    assert sent[0] * LAYERS == sent[1] * (LAYERS + 1)


def test_without_fsdp_it_is_a_plain_scan():
    """Breaks if a mesh that moves no weight pays for a second buffer of them."""
    params = jax.tree.map(lambda v: v[None], make_params(CONFIG))
    layer = lambda x, p: (x + moax.moe(x, p, CONFIG)[0], None)  # noqa: E731
    found = jax.make_jaxpr(functools.partial(our_scan, layer, policy=NAMES))(random(1, 64, WIDTH), params)
    (loop,) = [eqn for eqn in found.jaxpr.eqns if eqn.primitive.name == "scan"]
    assert len(loop.outvars) == 1, "x alone, and no gathered weight"


def test_second_derivatives_are_refused():
    """Breaks if a second derivative is wrong, or fails in the guts of a partitioned op."""
    with jax.set_mesh(make_mesh("8x1")):
        stack, x, _ = model("8x1", "auto")
        layer = lambda x, p: (x + moax.moe(x, p, CONFIG)[0], None)  # noqa: E731
        norm = lambda x: (our_scan(layer, x, stack["moe"], None)[0] ** 2).sum()  # noqa: E731
        with pytest.raises(moax.Unsupported, match="(scan|moe) has first derivatives"):
            jax.make_jaxpr(jax.grad(lambda x: (jax.grad(norm)(x) ** 2).sum()))(x)


@pytest.mark.skipif(not hasattr(jax.checkpoint_policies, "SaveOnlyTheseNames"), reason="this jax has no such class")
def test_a_policy_may_be_a_class():
    """Breaks if a policy given as a class saves other values than the same one given as a function."""
    classed = jax.checkpoint_policies.SaveOnlyTheseNames(frozenset(moax.CHECKPOINT_NAMES))
    with jax.set_mesh(make_mesh("8x1", "explicit")):
        arrays = model("8x1", "explicit")
        got, want = (
            jax.make_jaxpr(functools.partial(step, our_scan, None, "auto", p))(*arrays) for p in (classed, NAMES)
        )
    assert str(got) == str(want)


WRONG = [
    (dict(stack={"a": np.ones((2, 3)), "b": np.ones((3, 3))}), "leading dims"),
    (dict(stack={}), "leading dims"),
    (dict(unroll=0), "unroll=0"),
    (dict(layer=lambda x, w: (x[:1], None)), "float32\\[1\\]"),
    (dict(layer=lambda x, w: (x.astype(jnp.bfloat16), None)), "bfloat16"),
    (dict(layer=lambda x, w: ((x, x), None)), "must return"),
    (dict(layer=lambda x, w: x), "must return"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_wrong_arguments_are_named(wrong, message):
    """Breaks if a mistake of the caller is an error of a loop that the caller did not write."""
    given = dict(layer=lambda x, w: (x * w, None), carry=jnp.ones(3), stack=np.ones((2, 3), np.float32)) | wrong
    with pytest.raises(ValueError, match=message):
        moax.scan(given.pop("layer"), given.pop("carry"), given.pop("stack"), **given)


@pytest.mark.more
def test_it_takes_the_state_of_a_module():
    """Breaks if the layers of nnx, which `nnx.split` makes a tree of arrays, have other gradients in it."""
    with jax.set_mesh(make_mesh("8x1")):
        make = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: MoE(CONFIG, rngs=rngs)))
        graph, state = nnx.split(make(nnx.Rngs(0)))

        def loss(scan, state, x):
            def layer(x, state):
                y, stats = nnx.merge(graph, state)(x)
                return x + y, stats.aux_loss

            y, aux = scan(layer, x, state, NAMES)
            return jnp.mean(y**2) + aux.sum()

        x = random(1, 64, WIDTH)
        got, want = (
            jax.jit(jax.grad(functools.partial(loss, scan), allow_int=True))(state, x)
            for scan in (our_scan, plain_scan)
        )
    jax.tree.map(lambda a, b: np.testing.assert_array_less(rel_error(a, b), 1e-5), got, want)
