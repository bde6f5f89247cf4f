"""Loss-free balancing: a bias on the router's selection evens out the load of experts, without a loss term.

All tokens point in nearly one direction, so a fresh router sends most of them to a few experts. After each step
`update_router_bias` raises the bias of experts with too few tokens and lowers the bias of the others. The weights
stay as they are and every step has new tokens, so the bias alone changes the load. In training, update the bias once
in each step, after the optimizer. It has no gradient, and `optax.adamw(1e-3, mask=moax.trainable_mask)` does not decay
it. `--rule quantile` needs a few steps.
Run: `python examples/loss_free_balancing.py`; 8 CPU devices are emulated where there is no GPU.
"""

import argparse
import dataclasses
import functools
import math

import jax

import moax

STEPS, RATE, TOKENS, WIDTH = 60, 1e-2, 128, 64
CONFIG = moax.MoEConfig(
    d_model=WIDTH, d_ff=64, num_experts=8, top_k=2, router=moax.RouterConfig("sigmoid", bias=True, histogram=True)
)


@functools.partial(jax.jit, static_argnums=2)
def step(params: moax.MoEParams, x, rule):
    y, stats = moax.moe(x, params, CONFIG)
    settings = dict(rate=RATE) if rule == "sign" else dict(rule=rule, histogram=stats.histogram)
    bias = moax.update_router_bias(params.router_bias, stats.tokens_per_expert, **settings)
    return dataclasses.replace(params, router_bias=bias), stats.tokens_per_expert


def bars(tokens) -> str:
    """Each expert's share of all assignments."""
    return " ".join(f"{share:4.0%}" for share in tokens / tokens.sum())


def main(rule: str):
    jax.config.update("jax_num_cpu_devices", 8)
    count = jax.device_count()
    ep = math.gcd(4, count)
    with jax.set_mesh(jax.make_mesh((count // ep, ep), ("fsdp", "ep"), (jax.sharding.AxisType.Auto,) * 2)):
        params = moax.init(jax.random.key(0), CONFIG)
        common = jax.random.normal(jax.random.key(1), (WIDTH,))
        busiest = []
        for i in range(STEPS):
            noise = jax.random.normal(jax.random.key(2 + i), (TOKENS * count, WIDTH))
            params, tokens = step(params, common + noise, rule)
            busiest.append(float(tokens.max() / tokens.sum()))
            if i in (0, 3, STEPS // 4, STEPS - 1):
                print(f"  step {i + 1:3}  share of each expert: {bars(tokens)}")
    print(
        f"loss-free balancing on {count} devices: busiest expert {busiest[0]:.1%} -> {busiest[-1]:.1%} of assignments "
        f"in {STEPS} steps (even: {1 / CONFIG.num_experts:.1%})"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rule", choices=("sign", "quantile"), default="sign")
    main(parser.parse_args().rule)
