"""This program measures `lax.ragged_all_to_all` with XLA flags of its own: python3 -m benchmarks.peers.ragged REQUEST

It moves the rows of the same routing between the same devices, and does less than an exchange: rows are sorted by
device before, every device knows all sizes, FP8 rows are quantized before, and no rows are summed. This favours it.

REQUEST is JSON: {"cases": [fields of Tokens], "devices": number or null, "repeats": fields of Repeats, "in_place":
whether XLA writes into its output buffer in place}. In place, the buffer of a round is the result of the round before,
so that no round copies it. The program checks sampled rows, and prints a line of JSON for each case, wire and
direction: {"case", "wire", "direction"} with the result of `rounds.measure`, or with a note of the failure. It prints
{"note"} where nothing can run.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.peers import wires
from benchmarks.report import why
from benchmarks.tokens import KINDS, Tokens, busiest
from benchmarks.wires import rounds
from moax.backend import platform
from moax.errors import Unsupported
from moax.mesh.place import named
from moax.tune.timing import Repeats

SAMPLE = 64  # compared rows of each pair of devices


def main(argv: list[str]) -> int:
    """Measures the request `argv[0]`, and prints the results. Returns 0."""
    request = json.loads(argv[0])
    try:
        if platform() == "cpu":
            raise Unsupported("XLA has no ragged_all_to_all on this platform, cpu")
        mesh = rounds.mesh_of(request["devices"])
    except (ValueError, NotImplementedError, RuntimeError) as error:
        print(json.dumps({"note": why(error)}), flush=True)
        return 1
    with jax.set_mesh(mesh):
        for case in (Tokens(**fields) for fields in request["cases"]):
            for wire, direction in KINDS:
                found: dict[str, Any] = {"case": case.name, "wire": wire, "direction": direction}
                try:
                    found |= measure(case, wire, direction, mesh, Repeats(**request["repeats"]), request["in_place"])
                except Exception as error:  # The other measurements go on.
                    found["note"] = why(error)
                print(json.dumps(found), flush=True)
    return 0


def measure(case: Tokens, wire: str, direction: str, mesh: Mesh, repeats: Repeats, in_place: bool) -> dict[str, Any]:
    """Checks one exchange of rows, and returns the result of `rounds.measure`.

    Raises:
      ValueError: a row arrived in a wrong place.
    """
    args, sizes = operands(case, wire, direction, mesh)
    check(rounds.single(wires.ragged, mesh)(*args), args[0], sizes)
    nbytes = busiest(sizes) * case.row_bytes(wire)
    return rounds.measure(wires.ragged, args, mesh, nbytes, repeats, into_results if in_place else rounds.keep)


def into_results(args: tuple, results: jax.Array) -> tuple:
    """Returns the operands of the next round, which overwrites the results of this round."""
    return args[0], results, args[2]


def operands(case: Tokens, wire: str, direction: str, mesh: Mesh) -> tuple[tuple[jax.Array, ...], np.ndarray]:
    """Returns (operands of `wires.ragged`, rows [from, to] between devices); buffers have room for any routing."""
    devices, sizes = mesh.size, case.between(mesh.size)
    rows = (
        case.tokens * min(case.top_k, devices),
        case.tokens * devices,
    )  # rows that a device sends and receives at most
    if direction == "combine":
        sizes, rows = sizes.T, rows[::-1]
    dtype, width = (jnp.bfloat16, case.width) if wire == "none" else (jnp.uint8, case.row_bytes(wire))
    place = named(mesh, rounds.EP)

    def draw():
        words = jax.random.bits(jax.random.key(1), (devices * rows[0], width), jnp.uint8)
        return words.astype(dtype), jnp.zeros((devices * rows[1], width), dtype)

    known = jax.device_put(np.tile(sizes.astype(np.int32), (devices, 1)), place)
    return (*jax.jit(draw, out_shardings=place)(), known), sizes


def check(got: jax.Array, sent: jax.Array, sizes: np.ndarray) -> None:
    """Compares sampled rows of each pair of devices.

    Device s sends sizes[s, d] rows to device d. They start at row sum(sizes[s, :d]) of its shard, and arrive at row
    sum(sizes[:s, d]) of the shard of d.

    Raises:
      ValueError: a row arrived in a wrong place.
    """
    send_starts, receive_starts = np.cumsum(sizes, axis=1) - sizes, np.cumsum(sizes, axis=0) - sizes
    devices, sent_rows, got_rows = len(sizes), [], []
    for (source, target), count in np.ndenumerate(sizes):
        some = np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int32)
        sent_rows.append(source * (len(sent) // devices) + send_starts[source, target] + some)
        got_rows.append(target * (len(got) // devices) + receive_starts[source, target] + some)
    sent_rows, got_rows = np.concatenate(sent_rows), np.concatenate(got_rows)
    wrong = (np.asarray(got[got_rows]) != np.asarray(sent[sent_rows])).any(1)
    if wrong.any():
        raise ValueError(f"{wrong.sum()} of {len(wrong)} sampled rows are not where they should be")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
