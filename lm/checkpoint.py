"""TrainState <-> a folder of orbax checkpoints. A checkpoint has an array for each name; any mesh can restore it.

Several processes save and restore together in a folder that they share; each reads and writes its own shards.
"""

from __future__ import annotations

from pathlib import Path

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from lm.step import TrainState

KEPT = 2


class Checkpoints:
    """The newest two checkpoints of a run. A save goes on in the background; leaving the context waits for the last."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=handler)

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Writes `state` as the checkpoint of `step`, unless that exists. The caller may then donate the state."""
        if step != self.latest():
            self._manager.save(step, args=ocp.args.StandardSave(_flatten_by_path(state)))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Reads the checkpoint of `step` into the shardings of `like`, the state as ShapeDtypeStructs.

        Raises:
          ValueError: the checkpoint holds other names or shapes than `like`.
        """
        wanted = _flatten_by_path(like)
        _check_same(self._manager.item_metadata(step).tree, wanted, step)
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in wanted])

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        # A save waits for all processes. After an error in one of several processes it might wait for ever.
        if kind is None or jax.process_count() == 1:
            self._manager.wait_until_finished()
            self._manager.close()


def _flatten_by_path(state: PyTree) -> dict[str, object]:
    """Returns {"params.layers.wqkv": leaf, ...}: a reader of the file needs no class of ours."""
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
