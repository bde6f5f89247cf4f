"""TrainState <-> a folder of orbax checkpoints: one array per name, restored onto the shardings of any mesh.

Several processes save and restore together, each its own shards, in a folder that all of them share.
"""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from moax.train.step import TrainState

KEPT = 2


class Checkpoints:
    """The checkpoints of one run, in `folder`; the newest two are kept. Saving goes on in the background, and leaving
    the context waits for the last save."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handler)

    def latest(self) -> int | None:
        """The newest step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Writes `state` as `step`, unless it is there. The caller may donate the state right after."""
        if step != self.latest():
            self._manager.save(step, args=ocp.args.StandardSave(_by_name(state)))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of `step`; `like` holds ShapeDtypeStructs whose shardings say where each array goes.

        Raises:
          ValueError: the checkpoint holds other names or shapes than `like`.
        """
        wanted = _by_name(like)
        _check_same(self._manager.item_metadata(step).tree, wanted, step)
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in wanted])

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        # After an error among several processes, a save that wants all of them to finish may never do so.
        if kind is None or jax.process_count() == 1:
            self._manager.wait_until_finished()
            self._manager.close()


def _by_name(state: PyTree) -> dict[str, object]:
    """{"params.layers.wqkv": leaf}: a checkpoint is readable without moax's classes, and None costs nothing."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _check_same(saved: dict, wanted: dict, step: int) -> None:
    for name in sorted(saved.keys() ^ wanted.keys()):
        where = "is not in the checkpoint" if name in wanted else "is in the checkpoint, but not in the model"
        raise ValueError(f"checkpoint of step {step}: {name} {where}; it was written by a run with another model")
    for name, leaf in wanted.items():
        if tuple(saved[name].shape) != tuple(leaf.shape):
            raise ValueError(
                f"checkpoint of step {step}: {name} has shape {tuple(saved[name].shape)}, the model needs {leaf.shape}"
            )
