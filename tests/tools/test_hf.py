"""The weights of MoE layers in safetensors files, read onto meshes and written back bit for bit.

tests/data/hf/ is what scripts/hf_reference.py wrote.

Covers: five model types x layouts x dtypes; meshes; FP8 and MXFP4; what is refused.
"""

import dataclasses
import functools
import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding

import moax
from moax import MoEConfig, RouterConfig, Unsupported, hf
from moax.hf.config import change_config
from moax.hf.families import layout_of
from moax.hf.files import Entry, Output, decode_fp8, write_files
from moax.hf.tensor_layouts import tensors_of
from moax.params import DIMS
from support import MESHES, mark_rest

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "hf"
RECORDED = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
BEST = RouterConfig(order="topk_then_score", normalize=False)


def tiny(family: str) -> MoEConfig:
    return hf.config_from_hf(DATA / family)


def bits(array) -> bytes:
    return np.ascontiguousarray(array).view(np.uint8).tobytes()


def assert_same(got, want):
    """Bit for bit, NaN and -0 included, and of one dtype."""
    assert sorted(got) == sorted(want)
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, name
        assert bits(got[name]) == bits(want[name]), name


def random_state(
    config: MoEConfig,
    family: str,
    dtype,
    prefix: str = "",
    stacked=False,
) -> dict[str, np.ndarray]:
    """Random bits under the names of a family: NaNs, infinities and subnormals among them."""
    generator = np.random.default_rng(0)
    size = np.dtype(dtype).itemsize
    shapes = {prefix + tensor.name: tensor.shape for tensor in tensors_of(layout_of(family, stacked), config)}
    return {
        name: np.frombuffer(generator.bytes(size * int(np.prod(shape))), dtype).reshape(shape)
        for name, shape in shapes.items()
    }


def test_config_to_hf_knows_what_a_model_cannot_be():
    """Breaks if a checkpoint is written whose config.json is another function than its weights were trained for."""
    # Softmax over all, and the best two over their sum, is Mixtral's routing by another name.
    config = MoEConfig(8, 16, 4, 2)
    assert hf.config_from_hf(hf.config_to_hf(config, "mixtral")).router == BEST
    losses = RouterConfig(aux_loss=0.01, sequence_aux_loss=0.01)
    trained = dataclasses.replace(config, router=losses, capacity_factor=1.25)
    assert hf.config_to_hf(trained, "olmoe") == hf.config_to_hf(config, "olmoe")
    for change, says in (
        (dict(activation="relu2"), "no activation='relu2'"),
        (dict(shared_d_ff=16), "no shared_d_ff=16"),
        (dict(router=RouterConfig(z_loss=0.1, scale=2.0)), "no router.scale=2.0"),
        (dict(router=RouterConfig(normalize=False)), "no router.order='score_then_topk'"),
    ):
        with pytest.raises(Unsupported, match=says):
            hf.config_to_hf(dataclasses.replace(config, **change), "mixtral")
    with pytest.raises(ValueError, match="is no file"):
        hf.config_from_hf(DATA / "nowhere")


@pytest.mark.parametrize(
    ("family", "stacked", "dtype"),
    mark_rest([(f, i % 2 == 0, (jnp.bfloat16, np.float32)[i // 2 % 2]) for i, f in enumerate(RECORDED)]
         + [(f, i % 2 == 1, np.float32) for i, f in enumerate(RECORDED)], len(RECORDED)),
)  # fmt: skip
def test_round_trip(family, stacked, dtype):
    """Breaks if a weight comes back with one other bit, in either layout."""
    config = tiny(family)
    prefix = f"model.layers.7.{layout_of(family, stacked).block}"
    state = random_state(config, family, dtype, prefix, stacked)
    params = hf.params_from_hf(state, config, layer=7, model_type=family)
    moax.params.check_params(params, config)
    assert_same(hf.params_to_hf(params, config, family, layer=7, stacked=stacked), state)
    written = hf.params_to_hf(params, config, family, stacked=stacked)
    again = hf.params_from_hf(written, config, model_type=family)
    for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        assert bits(one) == bits(other)


def test_spellings_are_the_same_layer():
    """Breaks if the stacked spelling is read as other weights than that of one tensor an expert."""
    config = tiny("deepseek_v3")
    params = hf.params_from_hf(DATA / "deepseek_v3" / "model.safetensors", config, layer=0)
    stacked = hf.params_to_hf(params, config, "deepseek_v3", stacked=True)
    one = hf.params_to_hf(params, config, "deepseek_v3")
    gate = one["experts.3.gate_proj.weight"]
    up = one["experts.3.up_proj.weight"]
    assert bits(stacked["experts.gate_up_proj"][3]) == bits(np.concatenate([gate, up]))
    assert bits(stacked["experts.down_proj"][3]) == bits(one["experts.3.down_proj.weight"])


LAYOUTS = [
    ("2x4", "experts", AxisType.Auto),
    ("2x4", "model", AxisType.Explicit),
    ("tp2x2x2", "model", AxisType.Auto),
    ("dp2x2x2", "experts", AxisType.Explicit),
]


@pytest.mark.parametrize(
    ("family", "mesh", "fsdp_dim", "kind"),
    mark_rest(
        [
            ("deepseek_v3", *LAYOUTS[2]),
            ("gpt_oss", *LAYOUTS[1]),
            ("gpt_oss", *LAYOUTS[3]),
            *((family, *layout) for family in ("deepseek_v3", "gpt_oss") for layout in LAYOUTS[:2]),
        ],
        2,
    ),
)
def test_layouts(family, mesh, fsdp_dim, kind):
    """Breaks if a shard gets another's part, or an array another layout than `param_specs` says."""
    config = tiny(family)
    axes = moax.Axes(fsdp_dim=fsdp_dim)
    sizes = MESHES[mesh]
    on = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
    want = hf.params_from_hf(DATA / family / "model.safetensors", config, layer=0)
    with jax.set_mesh(on):
        got = hf.params_from_hf(DATA / family / "model.safetensors", config, layer=0, axes=axes)
    specs = moax.param_specs(config, axes, on)
    for field in DIMS:
        have = getattr(got, field)
        array = getattr(want, field)
        assert (have is None) == (array is None)
        if have is not None:
            assert have.sharding == NamedSharding(on, getattr(specs, field)), field
            assert bits(have) == bits(array), field
            for shard in have.addressable_shards:
                assert bits(shard.data) == bits(np.asarray(array)[shard.index]), (
                    field,
                    shard.index,
                )
    with jax.set_mesh(on):
        written = hf.params_to_hf(got, config, family)
    assert_same(written, hf.params_to_hf(want, config, family))


@pytest.mark.parametrize("stacked", [False, True])
def test_reads_one_expert_at_a_time(tmp_path, monkeypatch, stacked):
    """Breaks if a layer is read whole, or an expert more than once: what a 235B model's host has no memory for."""
    config = dataclasses.replace(tiny("qwen3_moe"), d_model=64, d_ff=32, num_experts=16)
    state = random_state(config, "qwen3_moe", jnp.bfloat16, stacked=stacked)
    safetensors.numpy.save_file(state, tmp_path / "model.safetensors")
    reads = []
    real = Entry.read
    monkeypatch.setattr(Entry, "read", lambda *part: reads.append(real(*part)) or reads[-1])
    mesh = jax.make_mesh((2, 4), ("fsdp", "ep"))
    hf.params_from_hf(tmp_path, config, mesh=mesh, model_type="qwen3_moe")
    biggest = 2 * config.d_model * config.d_ff * (2 if stacked else 1)
    assert max(array.nbytes for array in reads) == biggest
    assert sum(array.nbytes for array in reads) == sum(array.nbytes for array in state.values())


WORKER = """
import sys, jax, numpy as np
address, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(address, 2, rank)
from moax import hf
from moax.hf.files import Entry
found, sizes, read = hf.Checkpoint(folder + "/model.safetensors"), [], Entry.read
Entry.read = lambda *part: sizes.append(read(*part).nbytes) or read(*part)
mesh = jax.make_mesh((2, 4), ("fsdp", "ep"))
params = hf.params_from_hf(found, hf.config_from_hf(folder), layer=0, mesh=mesh)
print(sum(sizes), len(params.wo.addressable_shards), flush=True)
for shard in params.wo.addressable_shards:
    name = f"model.layers.0.mlp.experts.{shard.index[0].start}.down_proj.weight"
    np.testing.assert_array_equal(shard.data[0], found[name].T)
"""


def test_two_processes():
    """Breaks if a host reads the experts of another's devices: each would need memory and disk for the whole model."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    start = functools.partial(
        subprocess.Popen,
        env={"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    checkpoint = hf.Checkpoint(DATA / "olmoe" / "model.safetensors")
    experts = sum(checkpoint[name].nbytes for name in checkpoint if ".experts." in name)
    router = checkpoint["model.layers.0.mlp.gate.weight"].nbytes
    workers = [start([sys.executable, "-c", WORKER, address, str(rank), str(DATA / "olmoe")]) for rank in range(2)]
    try:
        for worker in workers:
            out, errors = worker.communicate(timeout=300)
            assert worker.returncode == 0, errors.decode()[-3000:]
            assert out.split() == [b"%d" % (experts // 2 + router), b"4"]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


@pytest.mark.more
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_of_a_load():
    """Breaks if loading takes memory beside the arrays: an expert's tensor is 2 MiB here, a layer 384 MiB."""
    command = [
        sys.executable,
        str(ROOT / "scripts" / "hf_load.py"),
        "--gib",
        "0.25",
        "--limit",
        "192",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: True" in done.stdout


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_a_router_that_cannot_learn(name):
    """Breaks if one normalized weight, which is 1 for all logits, becomes a config whose router has no gradient."""
    values = hf.config_to_hf(tiny(name), name)
    with pytest.raises(Unsupported, match="num_experts_per_tok=1 makes every weight 1"):
        hf.config_from_hf(values | {"num_experts_per_tok": 1, "norm_topk_prob": True})


def test_dtype():
    """Breaks if `dtype` is not that of the parameters, or the selection bias loses bits to it."""
    config = tiny("deepseek_v3")
    params = hf.params_from_hf(
        DATA / "deepseek_v3" / "model.safetensors",
        config,
        layer=0,
        dtype=jnp.bfloat16,
    )
    assert params.wi.dtype == params.router.dtype == params.shared_wo.dtype == jnp.bfloat16
    assert params.router_bias.dtype == jnp.float32
    deepseek = functools.partial(hf.params_from_hf, config=config, model_type="deepseek_v3")
    state = hf.params_to_hf(params, config, "deepseek_v3", dtype=np.float32)
    assert {array.dtype for array in state.values()} == {np.dtype(np.float32)}
    state["experts.1.up_proj.weight"] = state["experts.1.up_proj.weight"].astype(np.float16)
    with pytest.raises(ValueError, match=r"experts.1.up_proj.weight float16; give dtype="):
        deepseek(state)
    assert deepseek(state, dtype=np.float32).wi.dtype == np.float32
    wide = {name: array.astype(np.float64) for name, array in state.items()}
    with pytest.raises(
        ValueError,
        match="would be float64, which JAX has with jax_enable_x64 alone",
    ):
        deepseek(wide)
    with pytest.raises(ValueError, match="would be float64"):
        deepseek(state, dtype=np.float64)
    with pytest.raises(ValueError, match="dtype=int32"):
        deepseek(state, dtype=np.int32)


def test_mxfp4(tmp_path):
    """Breaks if GPT-OSS's published experts are not worth what transformers says, to the last bit."""
    checkpoint = hf.Checkpoint(DATA / "mxfp4.safetensors")
    experts, rows, groups, _ = checkpoint.entry("blocks").shape
    config = MoEConfig(32 * groups, rows // 2, experts, 2, activation="swiglu_oai", use_bias=True,
                       router=dataclasses.replace(BEST, logits_bias=True))  # fmt: skip
    gpt_oss = functools.partial(hf.params_from_hf, config=config, model_type="gpt_oss")
    plain = random_state(config, "gpt_oss", jnp.bfloat16)
    packed = {name: array for name, array in plain.items() if name != "experts.gate_up_proj"}
    packed |= {
        "experts.gate_up_proj_blocks": checkpoint["blocks"],
        "experts.gate_up_proj_scales": checkpoint["scales"],
    }
    params = gpt_oss(packed)
    assert params.wi.dtype == jnp.bfloat16
    assert_same(
        hf.params_to_hf(params, config, "gpt_oss"),
        plain | {"experts.gate_up_proj": checkpoint["values"]},
    )
    safetensors.numpy.save_file(packed, tmp_path / "model.safetensors")
    assert_same(hf.params_to_hf(gpt_oss(tmp_path), config, "gpt_oss"),
                plain | {"experts.gate_up_proj": checkpoint["values"]})  # fmt: skip
    packed["experts.gate_up_proj_scales"] = checkpoint["scales"].repeat(2, 2)
    with pytest.raises(Unsupported, match="experts.gate_up_proj_scales has shape"):
        gpt_oss(packed)


@pytest.mark.parametrize("shape", [(256, 128), (130, 300), (16, 24)])
def test_fp8(shape):
    """Breaks if a weight of DeepSeek-V3's published files gets another block's scale, edge blocks included."""
    generator = np.random.default_rng(0)
    data = generator.standard_normal(shape).astype(jnp.float8_e4m3fn)
    scale = generator.random([-(-n // 128) for n in shape], np.float32)
    want = np.array(data.astype(np.float32))
    for i, j in np.ndindex(shape):
        want[i, j] *= scale[i // 128, j // 128]
    assert bits(decode_fp8(data, scale, np.dtype(np.float32))) == bits(want)
    assert bits(decode_fp8(data, scale, np.dtype(jnp.bfloat16))) == bits(want.astype(jnp.bfloat16))


def test_fp8_checkpoint(tmp_path):
    """Breaks if a checkpoint whose experts are fp8 with scales is not read as their product."""
    config = tiny("deepseek_v3")
    state = hf.params_to_hf(
        hf.params_from_hf(DATA / "deepseek_v3" / "model.safetensors", config, layer=0),
        config,
        "deepseek_v3",
    )
    deepseek = functools.partial(hf.params_from_hf, config=config, model_type="deepseek_v3")
    name = "experts.5.down_proj.weight"
    state[name] = state[name].astype(jnp.float8_e4m3fn)
    with pytest.raises(Unsupported, match=rf"{name} has dtype float8_e4m3fn, and no scales"):
        deepseek(state)
    state[f"{name}_scale_inv"] = np.full((1, 1), 0.5, np.float32)
    safetensors.numpy.save_file(state, tmp_path / "model.safetensors")
    for source in (state, tmp_path):
        params = deepseek(source, dtype=np.float32)
        np.testing.assert_array_equal(params.wo[5], 0.5 * state[name].astype(np.float32).T)
    state[f"{name}_scale_inv"] = np.full((2, 1), 0.5, np.float32)
    with pytest.raises(Unsupported, match=rf"{name}_scale_inv has shape \(2, 1\)"):
        deepseek(state)


@pytest.mark.parametrize("d_ff", [127, 32, 128])
def test_fp8_of_concatenated_experts(tmp_path, d_ff):
    """Breaks if an expert whose rows start inside a block of 128 gets another block's scales, or is refused."""
    config = MoEConfig(160, d_ff, 8, 2)
    rows = config.num_experts * d_ff
    generator = np.random.default_rng(0)
    state = {"router.layer.weight": np.zeros((8, 160), np.float32)}
    want = {}
    for name in ("w1", "v1", "w2"):
        data = generator.standard_normal((rows, 160)).astype(jnp.float8_e4m3fn)
        scale = generator.uniform(0.5, 2, (-(-rows // 128), 2)).astype(np.float32)
        state |= {f"experts.mlp.{name}": data, f"experts.mlp.{name}_scale_inv": scale}
        values = data.astype(np.float32) * scale[np.arange(rows)[:, None] // 128, np.arange(160) // 128]
        want[name] = values.reshape(8, d_ff, 160)
    safetensors.numpy.save_file(state, tmp_path / "model.safetensors")
    for source in (state, tmp_path):
        params = hf.params_from_hf(source, config, model_type="dbrx", dtype=np.float32)
        np.testing.assert_array_equal(params.wo, want["w2"])
        np.testing.assert_array_equal(params.wi[:, :, 0], want["w1"].swapaxes(1, 2))
        np.testing.assert_array_equal(params.wi[:, :, 1], want["v1"].swapaxes(1, 2))


FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def deepseek_v4(kind: str) -> tuple[MoEConfig, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A config, a layer as DeepSeek-V4 is published, and its values: FP8 for "base"; FP4 and FP8 for "flash"."""
    values = {
        "model_type": "deepseek_v4",
        "hidden_size": 192,
        "moe_intermediate_size": 160,
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
    }
    config = hf.config_from_hf(values)
    generator = np.random.default_rng(0)
    scale_dtype = np.float32 if kind == "base" else jnp.float8_e8m0fnu
    state = {}
    plain = {}
    for tensor in tensors_of(layout_of("deepseek_v4"), config):
        name = tensor.name
        shape = tensor.shape
        rows, columns = (*tensor.shape, 1)[:2]
        if "experts" not in name:
            state[name] = plain[name] = generator.standard_normal(shape).astype(np.float32)
            continue
        if kind == "flash" and name.startswith("experts."):
            packed = generator.integers(0, 256, (rows, columns // 2), np.uint8)
            values = np.array(FP4, np.float32)[np.stack([packed & 15, packed >> 4], -1)].reshape(shape)
            scale = 2.0 ** generator.integers(-9, 2, (rows, columns // 32))
            wide = scale.repeat(32, 1)
            state[name] = packed.view(np.int8)
        else:
            state[name] = generator.standard_normal(shape).astype(jnp.float8_e4m3fn)
            values = state[name].astype(np.float32)
            scale = 2.0 ** generator.integers(-9, 2, (-(-rows // 128), -(-columns // 128)))
            wide = scale.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
        state[name.replace(".weight", ".scale")] = scale.astype(scale_dtype)
        plain[name] = values * wide.astype(np.float32)
    return config, state, plain


@pytest.mark.parametrize("kind", ["base", "flash"])
def test_deepseek_v4_as_published(tmp_path, kind):
    """Breaks if the published files of DeepSeek-V4 are not read as the products of their values and scales."""
    config, state, plain = deepseek_v4(kind)
    whole = {f"layers.3.ffn.{name}": array for name, array in state.items()}
    whole |= {f"mtp.0.ffn.{name}": array for name, array in state.items()}
    outputs = {
        name: Output(array.dtype, array.shape, lambda array=array: iter([array])) for name, array in whole.items()
    }
    write_files(tmp_path, outputs, 2**30)
    for source, where in (
        (whole, dict(layer=3)),
        (tmp_path, dict(layer=3)),
        (whole, dict(prefix="mtp.0.ffn.")),
    ):
        params = hf.params_from_hf(
            source,
            config,
            model_type="deepseek_v4",
            dtype=np.float32,
            **where,
        )
        assert_same(hf.params_to_hf(params, config, "deepseek_v4"), plain)


@pytest.mark.parametrize(
    ("kind", "name", "change", "says"),
    [
        (
            "flash",
            "experts.1.w2.scale",
            lambda a: a.view(np.uint8),
            r"w2.scale has dtype uint8; scales of .*, int8, must be float8_e8m0fnu",
        ),
        (
            "flash",
            "experts.1.w2.scale",
            lambda a: a[:, :-1],
            r"scale has shape \(192, 4\).* must be \(192, 5\)",
        ),
        (
            "flash",
            "experts.1.w2.weight",
            lambda a: a[:, :-8],
            r"holds values of shape \(192, 144\); this config needs",
        ),
        (
            "flash",
            "experts.1.w2.scale",
            lambda a: np.full_like(a, 2.0**127),
            "w2.scale has a scale of 1.7.*e.38; .* at most",
        ),
        (
            "flash",
            "experts.1.w2.scale",
            lambda a: np.full_like(a, np.nan),
            "w2.scale has a scale of nan",
        ),
        (
            "base",
            "experts.1.w2.scale",
            lambda a: a.view(np.int32),
            r"w2.scale has dtype int32; scales of .* must be float32 or float8_e8m0fnu",
        ),
        (
            "base",
            "experts.1.w2.scale",
            lambda a: 0 * a,
            "w2.scale has a scale of 0.0; scales must be finite and above 0",
        ),
        (
            "base",
            "experts.1.w2.scale",
            lambda a: a.repeat(2, 0),
            r"scale has shape \(4, 2\).* must be \(2, 2\)",
        ),
    ],
)
def test_deepseek_v4_refuses(kind, name, change, says):
    """Breaks if scales of another dtype, shape or sign make weights of any value."""
    config, state, _ = deepseek_v4(kind)
    state[name] = change(state[name])
    with pytest.raises(ValueError, match=says):
        hf.params_from_hf(state, config, model_type="deepseek_v4")


def drop(name):
    return lambda state: state.pop(name)


def put(name, array):
    return lambda state: state.update({name: array})


def rename(old, new):
    def change(state):
        for name in [name for name in state if old in name]:
            if "gate.weight" not in name:
                state[name.replace(old, new)] = state.pop(name)

    return change


@pytest.mark.parametrize(
    ("change", "options", "error", "says"),
    [
        (drop("m.layers.2.mlp.experts.3.up_proj.weight"), {}, ValueError,
         r"m.layers.2.mlp.experts.3.up_proj.weight of shape \(16, 24\) is not in the checkpoint"),
        (drop("m.layers.2.mlp.gate.weight"), {}, ValueError, r"mlp.gate.weight of shape \(8, 24\) is not in"),
        (put("m.layers.2.mlp.experts.3.up_proj.weight", np.ones((24, 16), np.float32)), {}, ValueError,
         r"m.layers.2.mlp.experts.3.up_proj.weight has shape \(24, 16\); this config needs \(16, 24\)"),
        (put("m.layers.2.mlp.experts.8.up_proj.weight", np.ones((16, 24), np.float32)), {}, ValueError,
         r"experts.8.up_proj.weight is in the checkpoint, but this config has no such"),
        (put("m.layers.2.mlp.gate.weight", np.ones((8, 24), np.int32)), {}, Unsupported,
         "gate.weight has dtype int32, and no scales"),
        (put("m.layers.2.mlp.gate.weight", [1.0]), {}, ValueError, "gate.weight is a list; it must be an array of"),
        (put("n.layers.2.mlp.experts.0.down_proj.weight", np.ones(1)), {}, ValueError,
         "layer=2 is m.layers.2.mlp. and n.layers.2.mlp.; give prefix="),
        (rename("m.layers", "mtp.layers"), {}, ValueError,
         "its MoE layers are those of 'mtp.layers.'; give prefix= of the block that you mean"),
        (rename("experts.0.down_proj.weight", "experts.0.down_proj.weight_packed"), {}, Unsupported,
         "m.layers.2.mlp.experts.0.down_proj.weight_packed is packed as compressed-tensors packs it"),
        (rename(".weight", ".qweight"), dict(layer=None, prefix="m.layers.2.mlp."), Unsupported,
         r"experts.0.(gate|up)_proj.qweight is packed as GPTQ or AWQ packs it"),
        (lambda _: None, dict(layer=3), ValueError, "layer=3 is not in the checkpoint: its MoE layers are 2 to 2"),
        (lambda _: None, dict(prefix="m."), ValueError, "layer=2 and prefix='m.': give one of them"),
        (lambda _: None, dict(layer=None), ValueError, r"^gate.weight of shape \(8, 24\) is not in the checkpoint"),
        (lambda state: state.clear(), {}, ValueError, "no layers.N has experts"),
        (lambda _: None, dict(model_type=None), ValueError, "no config.json beside the checkpoint says it"),
    ],
)  # fmt: skip
def test_load_refuses(change, options, error, says):
    """Breaks if a checkpoint that is not what the config says loads all the same, or fails without a name."""
    config = tiny("qwen3_moe")
    state = random_state(config, "qwen3_moe", np.float32, "m.layers.2.mlp.")
    change(state)
    with pytest.raises(error, match=says):
        hf.params_from_hf(state, config, **dict(layer=2, model_type="qwen3_moe") | options)


def test_mesh_must_divide():
    """Breaks if a mesh that does not divide the experts is not refused by their name."""
    config = tiny("olmoe")
    mesh = jax.make_mesh((3,), ("ep",), devices=jax.devices()[:3])
    with pytest.raises(
        ValueError,
        match="params.wi: dim 0 of size 8 is not divisible by mesh axes",
    ):
        hf.params_from_hf(DATA / "olmoe" / "model.safetensors", config, layer=0, mesh=mesh)


@pytest.mark.parametrize("shard_bytes", [2**30, 5_000])
def test_files(tmp_path, shard_bytes):
    """Breaks if the reference implementation reads other tensors from our files than we wrote, or we from its; the
    tensors of a model around its MoE layers must come through too."""
    source = random_state(tiny("olmoe"), "olmoe", jnp.bfloat16, "model.layers.1.mlp.")
    source |= {
        "model.norm.weight": np.ones(24, np.float32),
        "model.step": np.int64([7]),
        "flags": np.array([True]),
    }
    (tmp_path / "in").mkdir()
    safetensors.numpy.save_file(source, tmp_path / "in" / "model.safetensors")
    config = tiny("olmoe")
    checkpoint = hf.Checkpoint(tmp_path / "in")
    assert_same(dict(checkpoint), source)
    params = hf.params_from_hf(checkpoint, config, layer=1, model_type="olmoe")
    values = json.loads((DATA / "olmoe" / "config.json").read_text())
    out = tmp_path / "out"
    files = hf.save_hf(
        out,
        {1: params},
        config,
        "olmoe",
        others=checkpoint,
        hf_config=values,
        shard_bytes=shard_bytes,
    )
    assert (len(files) > 1) == (shard_bytes < 2**30)
    assert sorted(files) == sorted(out.glob("*.safetensors"))
    theirs = {}
    for file in files:
        theirs |= safetensors.numpy.load_file(file)
    assert_same(theirs, source)
    assert_same(dict(hf.Checkpoint(out)), source)
    assert json.loads((out / "config.json").read_text()) == values
    if len(files) == 1:
        assert files[0].read_bytes() == safetensors.numpy.save(source, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"holds {files[0].name} already"):
        hf.save_hf(out, {1: params}, config, "olmoe")
    if len(files) > 1:
        files[-1].unlink()
        with pytest.raises(ValueError, match=f"{files[-1].name} is not there"):
            hf.Checkpoint(out)


def test_save_replaces_a_layer(tmp_path):
    """Breaks if a fine-tuned layer is written beside its old weights, or another layer is lost: stacked experts in
    place of one tensor each, float32 weights in place of bfloat16."""
    config = tiny("mixtral")
    old = {}
    for layer in range(2):
        old |= random_state(
            config,
            "mixtral",
            jnp.bfloat16,
            f"model.layers.{layer}.block_sparse_moe.",
        )
    new = moax.init(jax.random.key(0), config)
    values = hf.config_to_hf(config, "mixtral")
    hf.save_hf(
        tmp_path,
        {1: new},
        config,
        others=old,
        hf_config=values,
        stacked=True,
        dtype=jnp.bfloat16,
    )
    checkpoint = hf.Checkpoint(tmp_path)
    assert_same(
        {n: checkpoint[n] for n in checkpoint if ".0." in n},
        {n: old[n] for n in old if "layers.0." in n},
    )
    assert not [name for name in checkpoint if ".1.block_sparse_moe" in name]
    again = hf.params_from_hf(tmp_path, config, layer=1)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(new), strict=True):
        assert bits(one) == bits(other.astype(jnp.bfloat16))
    assert hf.config_from_hf(tmp_path) == config
    # A model without a head is saved so.
    bare = {name.removeprefix("model."): array for name, array in old.items()}
    # Blocks without experts are no MoE layers.
    bare["visual.blocks.0.mlp.fc1.weight"] = np.ones(1, np.float32)
    params = hf.params_from_hf(bare, config, layer=1, model_type="mixtral")
    hf.save_hf(tmp_path / "bare", {1: params}, config, "mixtral", others=bare, hf_config={})
    assert_same(dict(hf.Checkpoint(tmp_path / "bare")), bare)


def test_save_refuses(tmp_path):
    """Breaks if what a model has no place for is dropped from its checkpoint in silence."""
    config = tiny("mixtral")
    params = moax.init(jax.random.key(0), config)
    biased = dataclasses.replace(params, bo=jnp.zeros((config.num_experts, config.d_model)))
    with pytest.raises(Unsupported, match=r"params.bo is of shape \(8, 24\); in a mixtral model"):
        hf.params_to_hf(biased, config, "mixtral")
    oss = tiny("gpt_oss")
    unbiased = dataclasses.replace(moax.init(jax.random.key(0), oss), bi=None)
    with pytest.raises(ValueError, match="params.bi is None"):
        hf.params_to_hf(unbiased, oss, "gpt_oss")
    with pytest.raises(Unsupported, match="model_type='gpt_oss' has no"):
        hf.params_to_hf(params, config, "gpt_oss")
    with pytest.raises(ValueError, match="layer=1 and prefix='a.'"):
        hf.params_to_hf(params, config, "mixtral", layer=1, prefix="a.")
    with pytest.raises(ValueError, match="dtype=int8"):
        hf.params_to_hf(params, config, "mixtral", dtype=np.int8)
    with pytest.raises(ValueError, match="shard_bytes=0"):
        hf.save_hf(tmp_path, {0: params}, config, "mixtral", shard_bytes=0)
    two = {f"{stem}.layers.0.mlp.gate.weight": np.ones(1, np.float32) for stem in "ab"}
    for others, options, error, says in (
        ({"a_scale_inv": np.ones(1)}, {}, Unsupported, "others: a_scale_inv is quantized"),
        (
            {"a.scale": np.ones(1, jnp.float8_e8m0fnu)},
            {},
            Unsupported,
            "others: a.scale is quantized",
        ),
        ({"a.weight": np.ones(1, np.int8)}, {}, Unsupported, "others: a.weight is quantized"),
        (two, {}, Unsupported, "layers start with 'a.layers.' and with 'b.layers.'; give prefix="),
        (
            two,
            dict(hf_config=None),
            ValueError,
            "others has no config.json beside it; give hf_config=",
        ),
        (
            {},
            dict(model_type=None),
            ValueError,
            "model_type=None, and neither others nor hf_config says it",
        ),
        (
            {},
            dict(hf_config=dict(model_type="olmoe")),
            ValueError,
            "'mixtral', and config.json has 'olmoe'",
        ),
        ({}, dict(prefix="mtp.layers.0."), ValueError, "prefix='mtp.layers.0.' must have {layer}"),
    ):
        with pytest.raises(error, match=says):
            hf.save_hf(
                tmp_path,
                {0: params},
                config,
                **dict(others=others, hf_config={}, model_type="mixtral") | options,
            )
    assert not list(tmp_path.iterdir())


def test_an_old_index_is_refused(tmp_path):
    """Breaks if a file is written beside an index that names others: nobody can read the folder."""
    config = tiny("mixtral")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(
        ValueError,
        match="holds model.safetensors.index.json already; give a new one",
    ):
        hf.save_hf(tmp_path, {}, config, "mixtral")
    assert len(list(tmp_path.iterdir())) == 1


WHOLE = {
    "architectures": ["A"],
    "num_hidden_layers": 2,
    "vocab_size": 8,
    "router_aux_loss_coef": 0.1,
}


def test_the_config_of_others_is_written(tmp_path):
    """Breaks if a fine-tuned model has a config.json of another size than the model that it came from: the values of
    the MoE layers alone make transformers build 32 layers and a vocabulary of 32000."""
    config = tiny("mixtral")
    values = hf.config_to_hf(config, "mixtral") | WHOLE
    state = random_state(config, "mixtral", np.float32, "model.layers.1.block_sparse_moe.") | {"a": np.ones(1)}
    params = hf.params_from_hf(state, config, layer=1, model_type="mixtral")
    hf.save_hf(tmp_path / "whole", {1: params}, config, others=state, hf_config=values)
    checkpoint = hf.Checkpoint(tmp_path / "whole")
    hf.save_hf(tmp_path / "out", {1: params}, config, "mixtral", others=checkpoint)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == values
    hf.save_hf(
        tmp_path / "named",
        {1: params},
        config,
        others=checkpoint,
        hf_config={"vocab_size": 9},
    )
    expected = values | {"vocab_size": 9}
    assert json.loads((tmp_path / "named" / "config.json").read_text()) == expected
    (tmp_path / "whole" / "config.json").unlink()
    with pytest.raises(ValueError, match="others has no config.json beside it"):
        hf.save_hf(tmp_path / "bare", {1: params}, config, "mixtral", others=checkpoint)
    assert not (tmp_path / "bare").exists()


@pytest.mark.parametrize("nested", [("text_config",), ("thinker_config", "text_config"), ()])
def test_a_nested_config_is_changed_where_it_is_read(tmp_path, nested):
    """Breaks if a multimodal model gets new sizes at the top, where nobody reads them, or stays quantized by name."""
    config = tiny("qwen3_moe")
    quantization = {"quantization_config": {"quant_method": "fp8"}}
    inner = hf.config_to_hf(config, "qwen3_moe") | WHOLE
    values = functools.reduce(
        lambda inner, part: {part: inner | quantization},
        reversed(nested),
        inner | quantization,
    )
    outside = {} if not nested else {"model_type": "qwen3_moe", "vision_config": {"depth": 2}}
    wider = dataclasses.replace(config, d_ff=2 * config.d_ff, num_experts=4)
    params = hf.params_from_hf(
        random_state(wider, "qwen3_moe", np.float32),
        wider,
        model_type="qwen3_moe",
    )
    hf.save_hf(tmp_path, {0: params}, wider, "qwen3_moe", hf_config=values | outside)
    assert hf.config_from_hf(tmp_path) == wider
    sizes = {"moe_intermediate_size": wider.d_ff, "num_experts": 4}
    want = functools.reduce(lambda inner, part: {part: inner}, reversed(nested), inner | sizes) | outside
    assert json.loads((tmp_path / "config.json").read_text()) == want


def test_a_size_is_changed_under_its_own_name():
    """Breaks if config.json has a size twice: transformers would read the old one."""
    values = hf.config_to_hf(tiny("qwen3_moe"), "qwen3_moe")
    values["num_local_experts"] = values.pop("num_experts")
    wider = dataclasses.replace(tiny("qwen3_moe"), num_experts=4)
    changed = change_config(values, wider, "qwen3_moe")
    assert changed == values | {"num_local_experts": 4}


@pytest.mark.parametrize(
    ("own", "second", "options"),
    [
        ("model.layers", "mtp.layers", {}),
        ("model.language_model.layers", "mtp.layers", {}),
        ("thinker.model.layers", "talker.model.layers", {}),
        ("mtp.layers", "model.layers", dict(prefix="mtp.layers.{layer}.mlp.")),
        ("mtp", "model.layers", dict(prefix="mtp.{layer}.mlp.")),
    ],
)
def test_second_stacks(tmp_path, own, second, options):
    """Breaks if layer 0 is that of multi-token prediction or of the talker, or if writing it back changes another."""
    config = tiny("qwen3_moe")
    state = random_state(config, "qwen3_moe", np.float32, f"{own}.0.mlp.")
    beside = {name.replace(own, second): np.negative(array) for name, array in state.items()}
    both = state | beside
    where = dict(prefix=f"{own}.0.mlp.") if options else dict(layer=0)
    params = hf.params_from_hf(both, config, model_type="qwen3_moe", **where)
    assert_same(hf.params_to_hf(params, config, "qwen3_moe", prefix=f"{own}.0.mlp."), state)
    old = {name: np.zeros_like(array) for name, array in state.items()} | beside
    hf.save_hf(tmp_path, {0: params}, config, "qwen3_moe", others=old, hf_config={}, **options)
    assert_same(dict(hf.Checkpoint(tmp_path)), both)


@pytest.mark.parametrize("stacked", [False, True])
def test_layers_are_written_as_others_has_them(tmp_path, stacked):
    """Breaks if a checkpoint of stacked experts comes back with one tensor an expert, or the other way round."""
    config = tiny("olmoe")
    state = random_state(config, "olmoe", np.float32, "model.layers.1.mlp.", stacked)
    params = hf.params_from_hf(state, config, layer=1, model_type="olmoe")
    hf.save_hf(tmp_path, {1: params}, config, "olmoe", others=state, hf_config={})
    assert_same(dict(hf.Checkpoint(tmp_path)), state)


def test_broken_files(tmp_path):
    """Breaks if a download that was cut short loads, or fails without the file's name."""
    whole = (DATA / "olmoe" / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    wrong = whole.replace(b'"shape":[8,24]', b'"shape":[8,23]')
    for content, says in (
        (whole[:-1], "was cut short: it has"),
        (whole[:100], "cut short"),
        (b"no", "no safetensors"),
        (b"\2" + bytes(7) + b"[]", "no safetensors"),
        (wrong, r"is broken: .*gate.weight, F32 of shape \(8, 23\), has 768 bytes"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"model.safetensors .*{says}"):
            hf.Checkpoint(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="a safetensors file is not there"):
        hf.Checkpoint(tmp_path)
    safetensors.numpy.save_file({"a": np.ones(2, np.float32)}, path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"b": "model.safetensors"}}')
    with pytest.raises(ValueError, match="b is in the index, but not in model.safetensors"):
        hf.Checkpoint(tmp_path)
