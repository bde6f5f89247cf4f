"""The layouts of the experts' weights on a mesh, and of the quantized weights that a caller keeps."""

from __future__ import annotations

from jaxtyping import Array

from moax.config import MoEConfig
from moax.kernels import implementation
from moax.kernels.scales import find_scale_axes, weight_format
from moax.mesh.axes import Names, Roles
from moax.mesh.partition import MeshView
from moax.mesh.specs import Layout, Spec, local_shape, spec, weight_layout
from moax.params import MoEParams
from moax.recipe import Recipes
from moax.types import QShard, QuantizedParams

Layouts = tuple[Layout, Layout]  # of wi and wo


def find_layouts(roles: Roles, wi: Spec, wo: Spec) -> Layouts:
    """Returns the layouts of wi and wo of these specs."""
    return (
        weight_layout("params.wi", wi, (roles.ep, (), (), roles.tp), roles),
        weight_layout("params.wo", wo, (roles.ep, roles.tp, ()), roles),
    )


def split_axes(layout: Layout, roles: Roles) -> Names:
    """Returns the mesh axes that split the matrix of one expert: those that are gathered, and tp."""
    return tuple(name for names in layout.gather[1:] for name in names) + roles.tp


def local_widths(params: MoEParams[Array], config: MoEConfig, view: MeshView) -> dict[str, int]:
    """Returns the widths of one device's products, by which an implementation is chosen."""
    tp = 1 if view.manual else view.roles.size(view.roles.tp)
    return {"d_model": config.d_model, "d_ff": params.wo.shape[1] // tp}


def kept_specs(recipe: Recipes, kernels: str, roles: Roles, layouts: Layouts, shapes) -> QuantizedParams[Spec]:
    """Returns a QuantizedParams of specs; None for a weight that its recipe does not quantize.

    Args:
      recipe, kernels: those of the quantized weights.
      roles: the mesh axes by role.
      layouts: the declared layouts of wi and wo.
      shapes: the shapes of the whole wi and wo.
    """
    kept = (roles.ep, (), (), roles.tp), (roles.ep, roles.tp, ())
    wi, wo = (
        tuple(_shard_specs(own, kernels, roles, layout, axes, shape, over) for over in ("rows", "columns"))
        if own.w is not None
        else None
        for own, layout, axes, shape in zip(recipe.both, layouts, kept, shapes, strict=True)
    )
    return QuantizedParams(wi, wo, recipe, kernels)


def _shard_specs(recipe, kernels: str, roles: Roles, layout: Layout, kept: tuple[Names, ...], shape, contracted):
    """Returns the specs of data and scales of one weight of this shape, whose dims stay split over `kept`."""
    format = weight_format(recipe)
    along = find_scale_axes(local_shape(shape, layout.spec, roles), format, contracted, layout.gather)
    if format.block is None:
        kept = (kept[0], (), ())
    elif len(along) < len(kept):  # the columns of the scales are one dim
        kept = (*kept[:2], sum(kept[2:], ()))
    scale = [have + names for have, names in zip(kept, along, strict=True)]
    data = [*layout.spec, *[None] * (len(shape) - len(layout.spec))]
    if implementation(kernels).turns_weight(recipe, contracted):
        data, scale = ([dims[0], *dims[2:], dims[1]] for dims in (data, scale))
    return QShard(spec(*data), spec(*scale))
