"""Files -> two streams of bytes (training, held-out) -> batches, pure functions of (seed, step).

The hash of a file's path decides whether the file is held out, so that the split is the same on every machine with
the same files. A zero byte separates two files. The batches depend neither on the mesh nor on the number of processes:
a run that resumes on another mesh reads the same data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

HELD_OUT = 20
LIMIT = 256 * 2**20
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "node_modules",
}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Two streams of bytes and their source.

    Attributes:
      train, held_out: [bytes] u8.
      source: the folder or file and the number of files, in words.
      fingerprint: a hash of both streams; a run resumes only on the text that it began with.
    """

    train: UInt8[np.ndarray, " bytes"]
    held_out: UInt8[np.ndarray, " held_out_bytes"]
    source: str
    fingerprint: str

    def batch(
        self,
        seed: int,
        step: int,
        batch: int,
        seq: int,
        rows: slice = slice(None),
    ) -> UInt8[np.ndarray, "B S1"]:
        """Draws `batch` windows [B, S + 1] of the training stream, for the step after `step` updates.

        The result is the slice `rows` of them, so that a process reads its own sequences alone.
        """
        places = np.random.Generator(np.random.Philox(key=[seed, step]))
        starts = places.integers(0, self.train.size - seq, size=batch)
        return _windows(self.train, starts[rows], seq)

    def held_out_batch(
        self, index: int, count: int, batch: int, seq: int, rows: slice = slice(None)
    ) -> UInt8[np.ndarray, "B S1"]:
        """Returns the slice `rows` of batch `index` [B, S + 1] of `count` batches, which are the same for every seed.

        Their windows are spread evenly over the held-out stream; sequence b is window b * count + index.
        """
        starts = np.linspace(0, self.held_out.size - seq - 1, count * batch).astype(np.int64)
        return _windows(self.held_out, starts.reshape(batch, count)[rows, index], seq)


def load(text: str | None, seq: int, limit: int = LIMIT) -> Corpus:
    """Reads at most `limit` bytes of a file or folder; None reads the source files of Python's standard library.

    Raises:
      ValueError: the path does not exist, or one of the streams is shorter than one window of S + 1 bytes.
    """
    root = Path(sysconfig.get_path("stdlib") if text is None else text)
    if root.is_file():
        with root.open("rb") as file:
            everything = file.read(limit)
        cut = len(everything) - len(everything) // HELD_OUT
        train = everything[:cut]
        held_out = everything[cut:]
        files = "1 file"
    elif root.is_dir():
        train, held_out, count = _split(root, python_only=text is None, limit=limit)
        files = f"{count} files"
    else:
        raise ValueError(f"--text {text}: no such file or folder")
    for part, data in (("training", train), ("held-out", held_out)):
        if len(data) <= seq:
            raise ValueError(
                f"the text at {root} has {len(data)} {part} bytes in {files}, too few for seq={seq}: "
                f"give at least {HELD_OUT * (seq + 1)} bytes of text, or a shorter --seq"
            )
    digest = hashlib.sha256(train + b"|" + held_out).hexdigest()[:16]
    source = f"{'the Python standard library' if text is None else root}, {files}"
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), source, digest)


def is_held_out(path: str) -> bool:
    """Returns whether a file is held out: the hash of its path picks one file in twenty."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) % HELD_OUT == 0


def _split(root: Path, *, python_only: bool, limit: int) -> tuple[bytes, bytes, int]:
    """Returns (training bytes, held-out bytes, number of files); a twentieth is held out where no file is."""
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    total = 0
    for path in _files(root, python_only):
        with path.open("rb") as file:
            data = file.read(limit - total)
        if not data or b"\0" in data:
            continue
        parts[is_held_out(path.relative_to(root).as_posix())].append(data)
        total += len(data)
        if total >= limit:
            break
    count = len(parts[True]) + len(parts[False])
    if count and not (parts[True] and parts[False]):
        whole = b"\0".join(parts[True] or parts[False])
        cut = len(whole) - len(whole) // HELD_OUT
        return whole[:cut], whole[cut:], count
    return b"\0".join(parts[False]), b"\0".join(parts[True]), count


def _files(root: Path, python_only: bool) -> Iterator[Path]:
    """Yields the visible files below `root` in the order of their paths; or the .py files outside SKIPPED_FOLDERS."""
    paths = []
    for folder, folders, names in os.walk(root):
        skipped = SKIPPED_FOLDERS if python_only else {"__pycache__"}
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        names = [name for name in names if not name.startswith(".")]
        if python_only:
            names = [name for name in names if name.endswith(".py")]
        paths += [Path(folder, name) for name in names]
    files = [path for path in paths if path.is_file()]
    yield from sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _windows(stream: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    """Returns windows[b, s] = stream[starts[b] + s], [B, S + 1]."""
    return stream[starts[:, None] + np.arange(seq + 1)]
