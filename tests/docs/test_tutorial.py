"""docs/tutorial: its program, the output that it quotes, and the layer of JAX alone beside which it times `moax.moe`.

tests/docs/test_docs.py runs the page.
"""

import dataclasses
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxtyping import Array, Float

import moax
from moax import reference
from support import make_params, pages, put, random, rel_norm

TUTORIAL = pages.ROOT / "docs" / "tutorial"
PAGE = TUTORIAL / "layer.md"
LAYER: dict = {"jax": jax, "jnp": jnp, "lax": lax, "Array": Array, "Float": Float}
for block in pages.programs(PAGE):
    if "def layer(\n" in block.text:
        exec(compile(block.text, str(block), "exec"), LAYER)

CONFIG = moax.MoEConfig(32, 48, 8, 2)
FLOAT32, BF16 = 5e-6, 2e-2  # sums in another order; products and weights rounded to 8 bits


def load():
    spec = importlib.util.spec_from_file_location("layer", TUTORIAL / "layer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_runs_the_page():
    """Breaks if `python docs/tutorial/layer.py` runs anything but the blocks of the page, which tests run."""
    assert load().program() == "\n".join(block.text + "\n" for block in pages.programs(PAGE))


def test_script_refuses_what_is_not_there(monkeypatch):
    """Breaks if --gpus without GPUs writes times of a CPU into the file for GPUs."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # this process keeps its devices
    with pytest.raises(SystemExit, match="--gpus needs two GPUs or four; here are"):
        load().main(gpus=True, keep=True)


def test_captured_output():
    """Breaks if the captured file does not say where it comes from, or the page names another factor over JAX alone."""
    head, printed = (TUTORIAL / "layer_gpus.txt").read_text().split("\n\n", 1)
    assert re.match(r"# [24] x .*\n# jax [\d.]+, moax \w+, \d{4}\S+: python docs/tutorial/layer.py", head)
    assert len(printed.splitlines()) > 10 and all(b.output for b in pages.programs(PAGE) if "print(" in b.text)
    times = {way: [float(ms) for ms in re.findall(rf"  {way} .*backward +(\S+)$", printed, re.MULTILINE)]
             for way in ("native", "moax ", "moax, fp8_block")}  # fmt: skip
    factors = []
    for way in ("moax ", "moax, fp8_block"):
        ratios = [native / ours for native, ours in zip(times["native"], times[way], strict=True)]
        factors.append(f"{min(ratios):.1f} to {max(ratios):.1f} times as long as moax")
    prose = " ".join(PAGE.read_text().split())
    assert f"the layer of JAX alone takes {factors[0]} in bf16, and {factors[1]} in FP8." in prose
    forward = re.findall(r"  moax.* forward +(\S+)  ", printed)
    slower = [float(fp8) > float(bf16) for bf16, fp8 in zip(forward[::2], forward[1::2], strict=True)]
    assert sum(slower) == 2 and "two rows of forward alone are slower in FP8" in prose


def make_mesh(fsdp: int, ep: int) -> jax.sharding.Mesh:
    return moax.make_mesh({"fsdp": fsdp, "ep": ep}, devices=jax.devices()[: fsdp * ep])


@functools.cache
def problem(routing: str = "random", top_k: int = 2, d_model: int = 32, d_ff: int = 48):
    """(config, x, dy, params); `one`: every token goes to the same experts."""
    config = dataclasses.replace(CONFIG, top_k=top_k, d_model=d_model, d_ff=d_ff)
    x, dy = (jnp.asarray(random(i, 64, d_model)) for i in (1, 2))
    params = make_params(config)
    if routing == "one":
        x = jnp.abs(x)
        params = dataclasses.replace(params, router=jnp.zeros((d_model, 8)).at[:, 5].set(0.05).at[:, 6].set(0.02))
    return config, x, dy, params


def graded(layer, x, dy, params):
    y, pull = jax.vjp(layer, x, params)
    dx, d = pull(dy)
    return y, dx, d.router, d.wi, d.wo


@functools.cache
def expected(*case):
    config, x, dy, params = problem(*case)
    return jax.jit(lambda *args: graded(lambda x, p: reference.moe(x, p, config)[0], *args))(x, dy, params)


def on_mesh(mesh, config, x, dy, params):
    """Returns the results of the layer of the page."""
    tokens, experts = jax.P(("fsdp", "ep")), jax.P(("ep", "fsdp"))
    specs = dict(in_specs=(tokens, jax.P(), experts, experts), out_specs=tokens, check_vma=False)
    mapped = jax.shard_map(functools.partial(LAYER["layer"], top_k=config.top_k), mesh=mesh, **specs)
    layer = lambda x, params: mapped(x, params.router, params.wi, params.wo)  # noqa: E731
    placed = put(mesh, (tokens, tokens, moax.param_specs(config, mesh=mesh)), (x, dy, params))
    return jax.jit(lambda *args: graded(layer, *args))(*placed)


def check(got, want, limit):
    for name, g, w in zip(("y", "dx", "router", "wi", "wo"), got, want, strict=True):
        error = rel_norm(g, w, per=0 if name in ("wi", "wo") else None)
        assert error <= limit, f"{name}: {error:.2e} > {limit:.0e}"


@pytest.mark.more
@pytest.mark.parametrize(("mesh", "case"), [((2, 2), ()), ((4, 1), ()), ((2, 4), ("one", 5))])
def test_native_is_the_reference(mesh, case):
    """Breaks if the layer beside moax has other gradients, or if its buffers do not hold all tokens on one rank."""
    check(on_mesh(make_mesh(*mesh), *problem(*case)), expected(*case), FLOAT32)


@pytest.mark.more
@pytest.mark.gpu
def test_layer_on_gpus():
    """Breaks if what is timed on GPUs, by their own collectives and kernels, is not what was checked without them."""
    if jax.device_count() < 4:
        pytest.skip("needs four GPUs")
    config, x, dy, params = problem("random", 2, 128, 128)
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    got = on_mesh(make_mesh(2, 2), config, x, dy, params)
    check(got, expected("random", 2, 128, 128), BF16)


@pytest.mark.more
def test_native_in_bf16():
    """Breaks if the layer loses more than bf16 does, or returns gradients of another dtype than their primals."""
    config, x, dy, params = problem()
    got = on_mesh(make_mesh(2, 2), config, x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16), params)
    assert [v.dtype for v in got] == [jnp.bfloat16] * 2 + [jnp.float32] * 3
    check(got, expected(), BF16)
