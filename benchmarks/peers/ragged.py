"""`lax.ragged_all_to_all` in a process of its own, whose XLA flags it takes: python3 -m benchmarks.peers.ragged REQUEST

Moves the rows of the same routing between the same devices, and nothing else of an exchange: rows lie sorted by device,
every device knows all sizes, FP8 rows come quantized with their scales, and nothing is summed. All of this favours it.

REQUEST is JSON: {"cases": [fields of Tokens], "devices": number or null, "repeats": fields of Repeats, "in_place":
whether XLA writes rows into the buffer that it is given, which in rounds is then that of the results before: no round
copies it}. Prints a line of JSON for each case, wire and direction: {"case", "wire", "direction"} with what
`rounds.measure` found once sampled rows arrived where they should, or with a note that says why not; {"note"} if
nothing can run.
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

SAMPLE = 64  # rows of each pair of devices that are compared


def main(argv: list[str]) -> int:
    """Prints what was measured of a request."""
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
                except Exception as error:  # one that fails does not take the others with it
                    found["note"] = why(error)
                print(json.dumps(found), flush=True)
    return 0


def measure(case: Tokens, wire: str, direction: str, mesh: Mesh, repeats: Repeats, in_place: bool) -> dict[str, Any]:
    """What `rounds.measure` finds.

    Raises:
      ValueError: a row is not where it should be.
    """
    args, sizes = operands(case, wire, direction, mesh)
    check(rounds.single(wires.ragged, mesh)(*args), args[0], sizes)
    nbytes = busiest(sizes) * case.row_bytes(wire)
    return rounds.measure(wires.ragged, args, mesh, nbytes, repeats, into_results if in_place else rounds.keep)


def into_results(args: tuple, results: jax.Array) -> tuple:
    """Operands of the next round, which writes over these results."""
    return args[0], results, args[2]


def operands(case: Tokens, wire: str, direction: str, mesh: Mesh) -> tuple[tuple[jax.Array, ...], np.ndarray]:
    """(operands of `wires.ragged`, rows from device to device); buffers have room for the worst routing."""
    devices, sizes = mesh.size, case.between(mesh.size)
    rows = case.tokens * min(case.top_k, devices), case.tokens * devices  # of tokens, and of their experts' ranks
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
    """Compares some rows of each pair of devices.

    Raises:
      ValueError: a row is not where it should be.
    """
    begin, there = np.cumsum(sizes, axis=1) - sizes, np.cumsum(sizes, axis=0) - sizes
    devices, here, at = len(sizes), [], []
    for (source, target), count in np.ndenumerate(sizes):
        some = np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int32)
        here.append(source * (len(sent) // devices) + begin[source, target] + some)
        at.append(target * (len(got) // devices) + there[source, target] + some)
    here, at = np.concatenate(here), np.concatenate(at)
    wrong = (np.asarray(got[at]) != np.asarray(sent[here])).any(1)
    if wrong.any():
        raise ValueError(f"{wrong.sum()} of {len(wrong)} sampled rows are not where they should be")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
