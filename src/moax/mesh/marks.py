"""Names in a program where the bytes of weights enter it and where the terms of their gradients leave it.

`moax.scan` moves what stands before the first and behind the second to another turn of its loop. Elsewhere a name
changes nothing.
"""

from __future__ import annotations

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import PyTree

from moax.mesh.axes import Roles

GATHERED, TERM = "moax_gathered", "moax_term"


def mark_gathered[Tree: PyTree](tree: Tree, roles: Roles) -> Tree:
    """Returns gathered weights, named where a mesh of these roles gathers any."""
    return _mark(tree, GATHERED) if roles.fsdp else tree


def mark_terms[Tree: PyTree](tree: Tree, roles: Roles) -> Tree:
    """Returns each device's terms of the gradients of weights, named where devices of these roles sum any."""
    return _mark(tree, TERM) if roles.same_experts else tree


def _mark(tree, name: str):
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)
