"""`MoEParams` holds the parameters of a block; this file also has their shapes and names, and checks them."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array

from moax.checks import check_arrays, check_fields, check_value
from moax.config import MoEConfig
from moax.types import pytree


@pytree()
class MoEParams[Leaf]:
    """The parameters of one block. A field is None where the config has no such parameter.

    Attributes:
      router: [H, E], replicated over the mesh.
      wi: [E, H, 2, F]. `wi[:, :, 0]` is the gate and `wi[:, :, 1]` the up projection. Without a gate [E, H, 1, F].
      wo: [E, F, H], the down projection.
      router_bias: [E], added to the scores for selection alone; it has no gradient.
      logits_bias: [E], a trained bias of the logits.
      bi: [E, 2, F], or [E, 1, F] without a gate: the bias of wi. Either of bi and bo may be given alone.
      bo: [E, H], the bias of wo.
      shared_wi: [H, 2, S], or [H, 1, S] without a gate: the first weight of the shared expert of width S.
      shared_wo: [S, H], the second weight of the shared expert.
      shared_gate: [H], whose product with x is the logit of the shared expert's gate.
      expert_scale: [E], a trained factor on the weights of each expert.
      latent_down: [H, L], the projection of x that latent experts read. Their wi, wo and bo have L in the place of H.
      latent_up: [L, H], the projection of the sum of their outputs.
    """

    router: Leaf
    wi: Leaf
    wo: Leaf
    router_bias: Leaf | None = None
    logits_bias: Leaf | None = None
    bi: Leaf | None = None
    bo: Leaf | None = None
    shared_wi: Leaf | None = None
    shared_wo: Leaf | None = None
    shared_gate: Leaf | None = None
    expert_scale: Leaf | None = None
    latent_down: Leaf | None = None
    latent_up: Leaf | None = None


# The letters of the dims of each parameter: E experts, H model width, F expert width, G gate and up, S the width of the
# shared expert, L the width of latent experts. The H of `BY_EXPERT` is L in latent experts.
DIMS = dict(
    router="HE", wi="EHGF", wo="EFH", router_bias="E", logits_bias="E", bi="EGF", bo="EH", shared_wi="HGS",
    shared_wo="SH", shared_gate="H", expert_scale="E", latent_down="HL", latent_up="LH",
)  # fmt: skip
BY_EXPERT = ("wi", "wo", "bi", "bo")
ROUTER = ("router", "router_bias", "logits_bias", "expert_scale")  # the parameters that belong to no single expert


@dataclasses.dataclass(frozen=True)
class LogicalAxes:
    """The logical name of each dim letter of the parameters; None gives a dim no name.

    These are the dims of each parameter, and their names by default:

        router                      H E        ("embed", None)
        router_bias, logits_bias    E          (None,)
        expert_scale                E          (None,)
        wi                          E H G F    ("exp", "embed", None, "mlp")
        wo                          E F H      ("exp", "mlp", "embed")
        bi                          E G F      ("exp", None, "mlp")
        bo                          E H        ("exp", "embed")
        shared_wi                   H G S      ("embed", None, "mlp")
        shared_wo                   S H        ("mlp", "embed")
        shared_gate                 H          ("embed",)
        latent_down                 H L        ("embed", None)
        latent_up                   L H        (None, "embed")

    Attributes:
      E: the experts. The E of the router, of its biases and scales has no name, because every device needs all logits.
      H: the model width. The rows of latent experts, whose wi, wo and bo have L for H, have its name too.
      F: the expert width.
      G: gate and up, a dim of size 2 or 1.
      S: the width of the shared expert.
      L: the width of latent experts, in their two projections.

    Raises:
      ValueError: a field is neither a name nor None, or two dims of one parameter have the same name.
    """

    E: str | None = "exp"
    H: str | None = "embed"
    F: str | None = "mlp"
    G: str | None = None
    S: str | None = "mlp"
    L: str | None = None

    def __post_init__(self):
        check_fields(self, "LogicalAxes: ")
        for param in DIMS:
            named = [name for name in self.names(param) if name is not None]
            if len(set(named)) < len(named):
                raise ValueError(f"LogicalAxes: {param} has the names {named}; each dim needs a name of its own")

    def names(self, param: str) -> tuple[str | None, ...]:
        """Returns the names of the dims of a parameter: `names("wo")` is `("exp", "mlp", "embed")`."""
        return tuple(None if n == "E" and param in ROUTER else getattr(self, n) for n in DIMS[param])


def param_shapes(config: MoEConfig, *, optional: bool = False) -> MoEParams[tuple[int, ...]]:
    """Returns the global shape of each parameter that `init` makes; None where the config has no such parameter.

    With `optional` both expert biases have a shape wherever the config allows them.
    """
    c, biases = config, config.weights_at != "input" if optional else config.use_bias
    flags = dict(router_bias=c.router.bias, logits_bias=c.router.logits_bias, bi=biases, bo=biases)
    flags |= dict(shared_gate=c.shared_gate, expert_scale=c.router.expert_scale)
    sizes = dict(E=c.num_experts, H=c.d_model, F=c.d_ff, G=c.gates, S=c.shared_d_ff, L=c.d_latent or 0)
    shapes: dict[str, Any] = {}
    for name, letters in DIMS.items():
        own = sizes | dict(H=c.d_rows) if name in BY_EXPERT else sizes
        shape = tuple(own[letter] for letter in letters)
        shapes[name] = shape if flags.get(name, 0 not in shape) else None
    return MoEParams(**shapes)


def check_params(params: MoEParams[Array], config: MoEConfig, *, local: bool = False, quantized: bool = False) -> None:
    """Checks that params is a MoEParams of floating-point arrays, and that the config allows each of them.

    With `local` the parameters are shards inside a `shard_map`; a size may then be any divisor of the whole size. With
    `quantized` wi and wo may be None.

    Raises:
      ValueError: a parameter has a presence, a dtype or a shape that does not fit. The message names it.
    """
    check_value("params", params, MoEParams)
    optional = ("bi", "bo", "wi", "wo") if quantized else ("bi", "bo")
    for name, want in vars(param_shapes(config, optional=True)).items():
        value, sizes = getattr(params, name), dict(zip(DIMS[name], want or (), strict=False))
        if value is not None:
            check_arrays(f"params.{name} [{', '.join(DIMS[name])}]", value, local=local, **sizes)
            if want is None:
                raise ValueError(f"params.{name} is given, but the config has no such parameter; pass None")
        elif want is not None and name not in optional:
            raise ValueError(f"params.{name} is None; this config needs an array of shape {want}")
