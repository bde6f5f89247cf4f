"""PTX of the kernels, run in NumPy, since no interpreter knows it."""

import re

import numpy as np

TID = np.arange(256, 384)  # the threads of the third warpgroup


def run_ptx(code, operands, on_load=None, on_copy=None, on_store=None):
    """Runs straight-line PTX in 128 threads at one time, and returns the registers by name.

    Loads and stores alone may have a predicate.

    on_load(addresses) -> values; on_copy(to, from, chunk, size) sees each cp.async, and on_store(addresses, values,
    stored) each store.
    """
    held = {"%tid.x": TID} | {f"${i}": np.broadcast_to(value, 128) for i, value in enumerate(operands)}

    def read(text):
        return held[text] if text in held else np.full(128, eval(text))

    for line in code.strip().strip("{}").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        where, line = (held[line[1:].split()[0]], line.split(maxsplit=1)[1]) if line[0] == "@" else (True, line)
        op, *args = re.split(r",\s*|\s+", re.sub(r"\s*([-+])\s*", r"\1", line))
        if op.startswith("cp.async"):
            to, start, chunk, size = args
            to, shift = re.match(r"\[(\w+)\+(\d+)\]", to).groups()
            start, extra = re.match(r"\[(\w+)\+(\d+)\]", start).groups()
            on_copy(held[to] + int(shift), held[start] + int(extra), int(chunk), read(size))
            continue
        if op.startswith("st."):
            on_store(held[args[0].strip("[]")], read(args[1]), where)
            continue
        into = args[0]
        values = args[1:]
        if op.startswith("ld."):
            index = held[values[0].strip("[]")]
            held[into] = (
                on_load(index) if where is True else np.where(where, on_load(np.where(where, index, 0)), held[into])
            )
            continue
        a, *others = map(read, values)
        b, c = (*others, None, None)[:2]
        match op.split(".")[0]:
            case "mov":
                held[into] = a
            case "shfl":
                held[into] = a[TID // 32 * 32 - TID[0] + b]
            case "selp":
                held[into] = np.where(c, a, b)
            case "setp":
                a, b = (np.int64(v) % 2**32 if "u32" in op else v for v in (a, b))
                held[into] = (a < b if ".lt" in op else a > b) & (c if ".and" in op else True)
            case "mad":
                held[into] = a * b + c
            case name:
                ops = {
                    "shr": "right_shift",
                    "and": "bitwise_and",
                    "xor": "bitwise_xor",
                    "add": "add",
                }
                held[into] = getattr(np, ops.get(name, {"mul": "multiply", "sub": "subtract"}.get(name, name)))(a, b)
    return held
