"""Safetensors files, indices and config.json that are broken or name other files: each one is refused by its name.

Covers: which file of an index a tensor is read from; paths out of the folder; headers; JSON that is no object; types
and ranges of the keys of config.json; dtypes and values of scales; 2,000 random mutations of a small checkpoint.
"""

import dataclasses
import functools
import json
import random
import struct
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from moax import Unsupported, hf
from moax.hf.families import Family, Layers
from moax.hf.files import Stored, locate
from moax.hf.keys import FAMILY_KINDS, LAYERS_KINDS, MAX_COUNT

DATA = Path(__file__).parents[2] / "tests" / "data" / "hf"
TINY = json.loads((DATA / "families.json").read_text(encoding="utf-8"))["tiny"]
INDEX = "model.safetensors.index.json"
ONE = np.ones(1, np.float32)


def write_index(folder: Path, weight_map) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def write_file(path: Path, header, data: bytes = bytes(16)) -> Path:
    """A file of this header: the text itself, or values of JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("files", [("m-1", "m-2"), ("m-2", "m-1")])
def test_index_chooses_the_file(tmp_path, files):
    """Breaks if an older copy of a tensor in another file is read in place of the one that the index names, or one of
    two copies is read without an index."""
    mine, old = (f"{name}.safetensors" for name in files)
    safetensors.numpy.save_file({"a": ONE}, tmp_path / mine)
    safetensors.numpy.save_file({"a": 9 * ONE, "b": 2 * ONE, "c": ONE}, tmp_path / old)
    with pytest.raises(
        ValueError,
        match=r"a is in m-1.safetensors and in m-2.safetensors; give one of the files",
    ):
        hf.Checkpoint(tmp_path)
    write_index(tmp_path, {"a": mine, "b": old})
    state = hf.Checkpoint(tmp_path)
    assert dict(state) == {"a": ONE, "b": 2 * ONE}
    write_index(tmp_path, {"b": mine})
    with pytest.raises(ValueError, match=f"b is in the index, but not in {mine}"):
        hf.Checkpoint(tmp_path)


OUTSIDE = (
    "../secret.safetensors",
    "sub/../../secret.safetensors",
    "sub/../model.safetensors",
    "/secret.safetensors",
    "..\\secret.safetensors",
    "C:secret.safetensors",
    "C:\\secret.safetensors",
    "\\\\host\\secret.safetensors",
)


@pytest.mark.parametrize("name", [*OUTSIDE, "ABSOLUTE", 3, None, ["model.safetensors"]])
def test_index_stays_in_the_folder(tmp_path, name):
    """Breaks if an index makes a host read a file of its own choice."""
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "secret.safetensors", folder / "model.safetensors"):
        safetensors.numpy.save_file({"a": ONE}, path)
    name = str(tmp_path / "secret.safetensors") if name == "ABSOLUTE" else name
    write_index(folder, {"a": name})
    with pytest.raises(
        ValueError,
        match=rf"{INDEX}: weight_map has 'a' in .*; it must be a file in this folder",
    ):
        hf.Checkpoint(folder)


def test_links_are_followed(tmp_path):
    """Breaks if a snapshot of the hub does not load: it is made of links to files of another folder."""
    snapshot = tmp_path / "snapshots" / "1"
    (tmp_path / "blobs").mkdir()
    (snapshot / "sub").mkdir(parents=True)
    safetensors.numpy.save_file({"a": ONE}, tmp_path / "blobs" / "0")
    (snapshot / "sub" / "model-1.safetensors").symlink_to("../../../blobs/0")
    write_index(tmp_path / "blobs", {"a": "sub/model-1.safetensors"})
    (snapshot / INDEX).symlink_to(f"../../blobs/{INDEX}")
    assert hf.Checkpoint(snapshot)["a"] == ONE


def tensor(start, end, shape=(1,), dtype="F32", **fields) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]} | fields


WHOLE = tensor(0, 16, [4])


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": tensor(-4, 0)}, r"a has data_offsets \[-4, 0\]"),
        (
            {"a": tensor(0, 16, [4]), "b": tensor(12, 16)},
            "b at bytes 12 to 16 overlaps the tensor before it",
        ),
        (
            {"a": tensor(0, 4), "b": tensor(8, 16, [2])},
            "b at bytes 8 to 16 leaves a hole before it",
        ),
        ({"a": tensor(4, 16, [3])}, "a at bytes 4 to 16 leaves a hole before it"),
        ({"a": tensor(0, 12, [3])}, "its tensors end at"),
        ({"a": tensor(0, 20, [5])}, "was cut short: it has"),
        ({"a": tensor(16, 0, [4])}, r"a has data_offsets \[16, 0\]; they must be start and end"),
        ({"a": tensor(0, 16, [-2, -2])}, r"a has shape \[-2, -2\]"),
        ({"a": tensor(0, 16, [True, 4])}, r"a has shape \[True, 4\]"),
        ({"a": tensor(0.0, 16.0, [4])}, r"a has data_offsets \[0.0, 16.0\]"),
        ({"a": tensor(0, 16, "1111")}, "a has shape '1111'"),
        ({"a": tensor(0, 16, [4] + [1] * 80)}, r"a has shape \(4, 1, .*, which no array has"),
        ({"a": tensor(0, 0, [0, 2**62]), "b": WHOLE}, r"a has shape \(0, .*, which no array has"),
        ({"a": tensor(0, 16, [4], ["F32"])}, r"a has dtype \['F32'\]"),
        ({"a": {"shape": [4], "data_offsets": [0, 16]}}, "a has dtype None"),
        ({"a": tensor(0, 16, [2])}, r"a, F32 of shape \(2,\), has 16 bytes"),
        ({"a": [4]}, r"a is \[4\]; it must be a JSON object"),
        ({"a": WHOLE, "__metadata__": 3}, "__metadata__ must have strings alone"),
        ({"a": WHOLE, "__metadata__": {"format": 3}}, "__metadata__ must have strings alone"),
        (b'{"a": {}, "a": ' + json.dumps(WHOLE).encode() + b"}", "it has the key 'a' twice"),
        (
            b'{"a": ' + json.dumps(WHOLE).replace("{", '{"shape": [2], ').encode() + b"}",
            "it has the key 'shape' twice",
        ),
        (json.dumps({"a": WHOLE}).encode("utf-16"), "no JSON that can be read"),
        (b"[" * 100_000, "no JSON that can be read"),
        (b"[]", "holds a list; it must be a JSON object"),
    ],
    ids=range(24),
)
def test_headers(tmp_path, header, says):
    """Breaks if bytes of the header or of another tensor are read as weights, or a broken header fails without the name
    of its file."""
    path = write_file(tmp_path / "model.safetensors", header)
    with pytest.raises(ValueError, match=f"{path}.*{says}"):
        hf.Checkpoint(tmp_path)


def test_a_header_is_short(tmp_path):
    """Breaks if a file makes a host read 600 MB as its header."""
    path = tmp_path / "model.safetensors"
    size = 600 * 2**20
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", size))
        file.truncate(8 + size)
    with pytest.raises(
        ValueError,
        match=f"{path} has a header of {size} bytes; safetensors has at most 100000000",
    ):
        hf.Checkpoint(tmp_path)


def test_a_file_that_shrinks(tmp_path):
    """Breaks if a file that another process cut after its header was read gives an error without its name."""
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"a": np.ones(4, np.float32)}, path)
    state = hf.Checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=f"{path} was cut short after its header was read"):
        _ = state["a"]


def test_an_unknown_dtype(tmp_path):
    """Breaks if a tensor of a dtype that NumPy does not have makes the others unreadable."""
    path = write_file(
        tmp_path / "model.safetensors",
        {"a": tensor(0, 8, [16], "F4"), "b": tensor(8, 16, [2])},
    )
    state = hf.Checkpoint(path)
    assert state["b"].shape == (2,)
    with pytest.raises(Unsupported, match=f"{path}: a has dtype F4; moax.hf knows F64"):
        _ = state["a"]


NO_JSON = (
    "",
    "{",
    "[]",
    "3",
    "null",
    '{"a": 1, "a": 2}',
    "[" * 100_000,
    '{"a": 1' + "0" * 5000 + "}",
    "\xff",
)


@pytest.mark.parametrize("text", NO_JSON, ids=range(len(NO_JSON)))
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json(tmp_path, name, text):
    """Breaks if a file that is no JSON object raises what names neither file nor key."""
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    read = hf.Checkpoint if name == INDEX else hf.config_from_hf
    with pytest.raises(ValueError, match=f"{tmp_path / name} (is no JSON|holds a)") as raised:
        read(tmp_path)
    assert raised.type is ValueError


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [
        (None, "weight_map is None"), ([], r"weight_map is \[\]"), ({}, r"weight_map is {}"),
        ({"a": ""}, "is not there"), ({"a": "."}, "is not there"), ({"a": "x" * 300}, "is not there"),
        ({"a": "x\0"}, "is not there"), ({"a": "\ud800"}, "is not there"),
        ({"a": "config.json"}, "no safetensors file"),
    ],
    ids=range(9),
)  # fmt: skip
def test_indices(tmp_path, weight_map, says):
    """Breaks if an index that maps no names to files raises what names neither file nor key."""
    (tmp_path / "config.json").write_text("{}")
    write_index(tmp_path, weight_map)
    with pytest.raises(ValueError, match=f"{tmp_path}.*{says}"):
        hf.Checkpoint(tmp_path)


@pytest.mark.parametrize("read", [hf.config_from_hf, hf.moe_layers])
@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        (
            "qwen3_moe",
            dict(norm_topk_prob="false"),
            "norm_topk_prob='false'; it must be true or false",
        ),
        ("qwen3_moe", dict(norm_topk_prob=0), "norm_topk_prob=0; it must be true or false"),
        (
            "deepseek_v3",
            dict(routed_scaling_factor=0),
            "routed_scaling_factor=0; it must be a finite number above 0",
        ),
        ("deepseek_v3", dict(routed_scaling_factor="2.5"), "routed_scaling_factor='2.5'"),
        ("deepseek_v3", dict(routed_scaling_factor=float("nan")), "routed_scaling_factor=nan"),
        ("deepseek_v3", dict(n_group=0), "n_group=0; it must be an integer from 1"),
        ("deepseek_v3", dict(n_group=True), "n_group=True"),
        ("deepseek_v3", dict(n_shared_experts="1"), "n_shared_experts='1'"),
        ("deepseek_v3", dict(first_k_dense_replace="1"), "first_k_dense_replace='1'"),
        ("mixtral", dict(hidden_size="24"), "hidden_size='24'"),
        ("mixtral", dict(hidden_size=24.0), "hidden_size=24.0"),
        ("mixtral", dict(hidden_size=[[24]]), r"hidden_size=\[\[24\]\]"),
        ("mixtral", dict(hidden_act=["silu"]), r"hidden_act=\['silu'\]"),
        (
            "mixtral",
            dict(num_local_experts=10**9),
            "num_local_experts=1000000000; it must be an integer from 1 to",
        ),
        (
            "mixtral",
            dict(num_hidden_layers=10**9),
            "num_hidden_layers=1000000000; it must be an integer from 0 to",
        ),
        ("mixtral", dict(num_hidden_layers="2"), "num_hidden_layers='2'"),
        ("mixtral", dict(model_type=["mixtral"]), r"model_type=\['mixtral'\] must be a string"),
        ("mixtral", dict(text_config=[1]), r"text_config=\[1\]; it must be an object"),
        ("dbrx", dict(ffn_config=[1]), r"ffn_config=\[1\]; it must be an object"),
        ("gpt_oss", dict(swiglu_limit="7"), "swiglu_limit='7'"),
        ("qwen3_moe", dict(mlp_only_layers=3), "mlp_only_layers=3; it must be a list of integers"),
        ("qwen3_moe", dict(mlp_only_layers="0"), "mlp_only_layers='0'"),
        ("llama4", dict(moe_layers=["x"]), r"moe_layers=\['x'\]"),
        ("step3p7", dict(moe_layers_enum=4), "moe_layers_enum=4"),
    ],
    ids=range(24),
)
def test_types_and_ranges_of_keys(tmp_path, read, family, change, says):
    """Breaks if a value of another type is taken for the nearest one that works, 0 for a missing value, or a size of
    10**9 for a loop; and if the error does not name file and key."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY[family]["config"] | change))
    with pytest.raises(ValueError, match=f"{path}: .*{says}"):
        read(path)
    with pytest.raises(ValueError, match=says):
        read(TINY[family]["config"] | change)


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("step3p7", dict(moe_layers_enum="4,x"), "moe_layers_enum='4,x'; it must be as '4,5'"),
        (
            "glm5_next",
            dict(num_hidden_layers=9),
            "2 marks of layers .mlp_layer_types. for 9 layers",
        ),
        ("nemotron_h", dict(layers_block_type=7), "has no num_hidden_layers"),
    ],
)
def test_layers_that_no_model_has(family, change, says):
    """Breaks if layers without a mark are dense in silence, or a broken list of layers fails without its key."""
    with pytest.raises(ValueError, match=says):
        hf.moe_layers(TINY[family]["config"] | change)


def test_layers_end_with_the_model():
    """Breaks if a list of MoE layers makes layers that the model does not have, or null fails where it means all."""
    llama = TINY["llama4"]["config"] | dict(num_hidden_layers=3)
    assert hf.moe_layers(llama | dict(moe_layers=[2, 0, 3])) == (0, 2)
    ernie = TINY["ernie4_5_moe"]["config"] | dict(moe_layer_end_index=None)
    assert hf.moe_layers(ernie)[-1] == ernie["num_hidden_layers"] - 1


def test_the_model_type_beside_a_checkpoint(tmp_path):
    """Breaks if a config.json without a model type, or of another model, fails without its name."""
    safetensors.numpy.save_file({"a": ONE}, tmp_path / "model.safetensors")
    config = hf.config_from_hf(TINY["mixtral"]["config"])
    for values in ({}, {"model_type": 3}, {"model_type": "llama"}):
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(
            (ValueError, Unsupported),
            match=f"{tmp_path / 'config.json'}: model_type=",
        ):
            hf.params_from_hf(tmp_path, config)


def test_the_most_experts_are_few(tmp_path):
    """Breaks if a config.json of the most experts makes a loop that seems to hang."""
    values = TINY["mixtral"]["config"] | dict(num_local_experts=MAX_COUNT)
    safetensors.numpy.save_file(
        {"model.layers.0.block_sparse_moe.experts.0.w2.weight": ONE}, tmp_path / "m.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(values))
    start = time.process_time()  # other processes may have the cores
    with pytest.raises(ValueError, match=f"{tmp_path}: .* is not in the checkpoint"):
        hf.params_from_hf(tmp_path, hf.config_from_hf(values), layer=0)
    assert time.process_time() - start < 5


def fp8(scale) -> dict[str, np.ndarray]:
    return {
        "w": np.ones((130, 8), jnp.float8_e4m3fn),
        "w_scale_inv": np.asarray(scale).reshape(2, 1),
    }


def mxfp4(scale) -> dict[str, np.ndarray]:
    return {
        "w_blocks": np.full((1, 2, 1, 16), 0x22, np.uint8),
        "w_scales": np.asarray(scale).reshape(1, 2, 1),
    }


def read_stored(state) -> np.ndarray:
    stored = locate(state, "w")
    assert isinstance(stored, Stored)
    stored.check((130, 8) if "w" in state else (1, 32, 2))
    return stored.read(np.dtype(np.float32))


@pytest.mark.parametrize(
    ("state", "value"),
    [
        (fp8(np.float32([2**-7, 1])), 2**-7), (fp8(jnp.array([2**-7, 1], jnp.bfloat16)), 2**-7),
        (fp8(np.float16([2**-7, 1])), 2**-7), (fp8(np.array([2**-7, 1], jnp.float8_e8m0fnu)), 2**-7),
        (mxfp4(np.uint8([120, 127])), 2**-7), (mxfp4(np.uint8([0, 127])), 2**-127),
        (mxfp4(np.array([2**-7, 1], jnp.float8_e8m0fnu)), 2**-7),
    ],
    ids=range(7),
)  # fmt: skip
def test_dtypes_of_scales(state, value):
    """Breaks if a dtype of scales that models are published with is not read as their numbers."""
    got = read_stored(state)
    assert np.float32(value) == (got[0, 0] if "w" in state else got[0, 0, 0])


@pytest.mark.parametrize(
    ("state", "says"),
    [
        *((fp8(np.array([120, 127], dtype)), "w_scale_inv has dtype .*; scales of w must be float32 or")
          for dtype in ("uint8", "int8", "int32", "bool", "float64", jnp.float8_e4m3fn)),
        *((mxfp4(np.array([120, 127], dtype)), "w_scales has dtype .*; scales of w_blocks must be uint8 or")
          for dtype in ("bool", "int8", "float32", jnp.float8_e4m3fn)),
        *((fp8(np.float32([1, scale])), f"w_scale_inv has a scale of {scale}; scales must be finite and above 0")
          for scale in (np.nan, np.inf, 0.0, -1.0)),
        (mxfp4(np.uint8([120, 255])), "w_scales has a scale of nan"),
    ],
    ids=range(15),
)  # fmt: skip
def test_scales_that_no_format_has(state, says):
    """Breaks if bytes of another dtype are read as scales (2**-7 of float8_e8m0fnu is 120 as uint8), or weights are
    NaN, zero or of the other sign by a broken scale."""
    with pytest.raises(ValueError, match=says):
        read_stored(state)


def test_every_key_has_a_kind():
    """Breaks if a key string of a family has no kind: `check_values` would let any value pass."""
    others = {
        "published",
        "memory",
        "read",
        "types",
        "group_method",
        "layers",
        "fixed",
        "shared_fixed",
        "router",
        "activation",
        "use_bias",
        "shared_gate",
        "weights_at",
    }
    assert {field.name for field in dataclasses.fields(Family)} - others == set(FAMILY_KINDS)
    assert set(Layers._fields) == set(LAYERS_KINDS)


HOSTILE = (
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3,
    4,
    16,
    24,
    10**9,
    2**63,
    10**30,
    1.5,
    -0.5,
    float("nan"),
    "",
    "x",
    "false",
    "1",
    "silu",
    *OUTSIDE,
    "/etc/passwd",
    "F32",
    "U8",
    "F8_E4M3",
    "F8_E8M0",
    "F4",
    "BOOL",
    [],
    [1],
    [24, 24],
    [[]],
    {},
    {"a": 1},
    "x" * 300,
    "x\0",
)


def mutate_values(values, rng: random.Random) -> str:
    """The text of JSON values with one node replaced, removed, renamed, moved or doubled."""
    values = json.loads(json.dumps(values))
    nodes = [(values, key) for key in values]
    for owner, key in nodes:
        inner = owner[key]
        if isinstance(inner, dict | list):
            nodes += [(inner, k) for k in (inner if isinstance(inner, dict) else range(len(inner)))]
    owner, key = rng.choice(nodes)
    way = rng.choice(("replace", "replace", "number", "remove", "rename", "swap", "double"))
    if way == "number" and type(owner[key]) in (int, float):
        owner[key] += rng.choice((-4, -1, 1, 4, 8))
    elif way == "remove":
        del owner[key]
    elif way == "rename" and isinstance(owner, dict):
        owner[rng.choice(("", "x", "a.b", *owner))] = owner.pop(key)
    elif way == "swap":
        other = rng.choice(list(owner) if isinstance(owner, dict) else range(len(owner)))
        owner[key], owner[other] = owner[other], owner[key]
    elif way == "double":
        twice = rng.choice(list(values))
        return f"{{{json.dumps(twice)}: {json.dumps(rng.choice(HOSTILE))}, {json.dumps(values)[1:]}"
    else:
        owner[key] = rng.choice(HOSTILE)
    return json.dumps(values)


def mutate_bytes(data: bytes, rng: random.Random, end: int) -> bytes:
    """Bytes with one of the first `most` changed, or some removed, put in or cut off."""
    start = rng.randrange(min(end, len(data)))
    way = rng.choice(("change", "remove", "insert", "cut"))
    if way == "change":
        return data[:start] + bytes([rng.randrange(256)]) + data[start + 1 :]
    if way == "insert":
        return data[:start] + bytes(rng.choice(b'{}[]",:0-9\\ \xff') for _ in range(rng.randrange(1, 9))) + data[start:]
    return data[:start] + (data[start + rng.randrange(1, 9) :] if way == "remove" else b"")


def mutate_file(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.3:
        return mutate_bytes(data, rng, 8 + length)
    text = mutate_values(json.loads(data[8 : 8 + length]), rng).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


OPENED: list[str] | None = None


@functools.cache
def watch_files() -> None:
    """Puts the name of every file that is opened into OPENED, while that is a list."""

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and OPENED is not None and not isinstance(arguments[0], int):
            OPENED.append(str(arguments[0]))

    sys.addaudithook(hook)


def read_all(folder: Path, config) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a checkpoint; loads its layer too."""
    state = hf.Checkpoint(folder)
    tensors = {name: (str(value.dtype), value.shape, value.tobytes()) for name, value in state.items()}
    hf.params_from_hf(state, config, layer=0)
    return tensors


def read_by_library(folder: Path) -> dict[str, tuple[tuple[int, ...], bytes]] | None:
    """The tensors that the library safetensors reads by the index; None where a file is refused or lacks one."""
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = {}
    for file in set(weight_map.values()):
        try:
            files[file] = dict(safetensors.deserialize((folder / file).read_bytes()))
        except safetensors.SafetensorError:
            return None
    if any(name not in files[file] for name, file in weight_map.items()):
        return None
    return {name: (tuple(files[f][name]["shape"]), bytes(files[f][name]["data"])) for name, f in weight_map.items()}


def read_expected(values: dict) -> dict:
    """What a config of deepseek_v3 must be, by the values that it has."""

    def read(key, default, null=None):
        value = values.get(key, default)
        return null if key in values and value is None else value

    def read_size(key):
        return values[key][0] if isinstance(values[key], list) else values[key]

    return dict(
        d_model=read_size("hidden_size"), d_ff=read_size("moe_intermediate_size"),
        top_k=read_size("num_experts_per_tok"), scale=read("routed_scaling_factor", 2.5, 1.0),
        num_groups=read("n_group", 8, 1), normalize=read("norm_topk_prob", True, False),
        layers=read_size("num_hidden_layers"),
    )  # fmt: skip


@pytest.mark.more
@pytest.mark.parametrize("seed", range(4))
def test_mutations(tmp_path, seed):
    """Breaks if one of 500 changed checkpoints is read as something else than it says, raises an error without the name
    of its folder, takes two seconds, or opens a file outside its folder."""
    global OPENED
    rng = random.Random(seed)
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.numpy.save_file({"a": ONE}, tmp_path / "secret.safetensors")
    values = json.loads((DATA / "deepseek_v3" / "config.json").read_text())
    config = hf.config_from_hf(values)
    params = hf.params_from_hf(DATA / "deepseek_v3" / "model.safetensors", config, layer=0)
    files = hf.save_hf(
        folder,
        {0: params},
        config,
        "deepseek_v3",
        hf_config=values,
        shard_bytes=20_000,
    )
    assert len(files) > 1
    names = [*(file.name for file in files), INDEX, "config.json"]
    whole = {name: (folder / name).read_bytes() for name in names}
    tensors = read_all(folder, config)
    watch_files()
    outcomes = {"read": 0, "refused": 0}
    for number in range(500):
        kind = rng.choice(("header", "index", "config"))
        name = {"header": rng.choice(names[:-2]), "index": INDEX, "config": "config.json"}[kind]
        if kind == "header":
            data = mutate_file(whole[name], rng)
        elif rng.random() < 0.3:
            data = mutate_bytes(whole[name], rng, len(whole[name]))
        else:
            data = mutate_values(json.loads(whole[name]), rng).encode()
        (folder / name).write_bytes(data)
        start = time.process_time()
        error = None
        got = None
        layers = ()
        OPENED = []
        try:
            if kind == "config":
                got = hf.config_from_hf(folder)
                layers = hf.moe_layers(folder)
            else:
                got = read_all(folder, config)
        except Exception as raised:
            error = raised
        opened = OPENED
        OPENED = None
        case = f"seed {seed}, {number}, {name}: {data[:4000]!r}: {error!r}"
        assert time.process_time() - start < 2, case
        outside = [
            path for path in opened if not Path(path).is_relative_to(folder) and not path.endswith((".py", "pyc"))
        ]
        assert not outside, f"{outside}: {case}"
        outcomes["refused" if error else "read"] += 1
        if error:
            assert type(error) in (ValueError, Unsupported) and str(folder) in str(error), case
            if kind == "header" and "twice" not in str(error) and read_by_library(folder) is not None:
                hf.Checkpoint(folder)  # The layer is refused, and not the file.
        elif kind == "config":
            changed = json.loads(data)
            have = dict(
                d_model=got.d_model,
                d_ff=got.d_ff,
                top_k=got.top_k,
                scale=got.router.scale,
                num_groups=got.router.num_groups,
                normalize=got.router.normalize,
            )
            wanted = read_expected(changed)
            assert set(layers) <= set(range(wanted.pop("layers"))), case
            # Equal text: 1 is not True.
            assert str(have | {"scale": None}) == str(wanted | {"scale": None}), case
            assert have["scale"] == wanted["scale"], case
        elif kind == "header":
            library = read_by_library(folder)
            assert library is not None and {name: value[1:] for name, value in got.items()} == library, case
        else:
            weight_map = json.loads(data)["weight_map"]
            assert got == {name: tensors[name] for name in weight_map}, case
        (folder / name).write_bytes(whole[name])
    assert min(outcomes.values()) > 20, outcomes
