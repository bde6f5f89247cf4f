"""Bytes to train on: files -> two streams (train, held-out) -> batches, each a pure function of (seed, step).

A file is held out by the hash of its path, so that the split is the same on every machine with the same files. Files
are joined with a zero byte between them. Nothing here depends on the mesh or the number
of processes: resuming on others sees the same data.
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
LIMIT = 64 * 2**20
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "node_modules"}


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Two streams of bytes and where they come from.

    Attributes:
      train, held_out: [bytes] u8.
      source: in words, for people.
      fingerprint: a hash of both streams; a run resumes only on the text it began with.
    """

    train: UInt8[np.ndarray, " bytes"]
    held_out: UInt8[np.ndarray, " held_out_bytes"]
    source: str
    fingerprint: str

    def batch(self, seed: int, step: int, batch: int, seq: int, rows: slice = slice(None)) -> UInt8[np.ndarray, "B S1"]:
        """[B, S + 1] bytes: B windows of the training stream at places drawn from (seed, step); of those, `rows`."""
        places = np.random.Generator(np.random.Philox(key=[seed, step]))
        starts = places.integers(0, self.train.size - seq, size=batch)
        return _windows(self.train, starts[rows], seq)

    def held_out_batch(
        self, index: int, count: int, batch: int, seq: int, rows: slice = slice(None)
    ) -> UInt8[np.ndarray, "B S1"]:
        """[B, S + 1] bytes: batch `index` of `count` that lie evenly over the held-out stream, for every seed; of its
        sequences, `rows`."""
        starts = np.linspace(0, self.held_out.size - seq - 1, count * batch).astype(np.int64)
        return _windows(self.held_out, starts.reshape(batch, count)[rows, index], seq)


def load(text: str | None, seq: int, limit: int = LIMIT) -> Corpus:
    """The corpus of a file or folder; None for the source files of Python's standard library. At most `limit` bytes.

    Raises:
      ValueError: the path is missing, or has too little text for one window of seq + 1 bytes in both streams.
    """
    root = Path(sysconfig.get_path("stdlib") if text is None else text)
    if root.is_file():
        with root.open("rb") as file:
            everything = file.read(limit)
        cut = len(everything) - len(everything) // HELD_OUT
        train, held_out, files = everything[:cut], everything[cut:], "1 file"
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
    """One path in twenty, by its hash."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) % HELD_OUT == 0


def _split(root: Path, *, python_only: bool, limit: int) -> tuple[bytes, bytes, int]:
    """(training bytes, held-out bytes, files) of a folder; cut at its end where all files fall on one side."""
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
    """Files below root in the order of their relative paths, without hidden ones and folders of tests."""
    found = []
    for folder, folders, names in os.walk(root):
        skipped = SKIPPED_FOLDERS if python_only else {"__pycache__"}
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        names = [name for name in names if not name.startswith(".") and (not python_only or name.endswith(".py"))]
        found += [Path(folder, name) for name in names]
    yield from sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(root).as_posix())


def _windows(stream: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    return stream[starts[:, None] + np.arange(seq + 1)]
