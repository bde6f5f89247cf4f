"""The program of layer.md: its Python blocks, in order.

Run: `python docs/tutorial/layer.py [--gpus] [--keep]`, on four emulated CPU devices or on four GPUs.
"""

import argparse
import contextlib
import io
import os
import re
import sys
from pathlib import Path

import jax

from moax.bench import report

PAGE = Path(__file__).with_name("layer.md")
DEVICES = 4


def program() -> str:
    """The blocks of the page as one program."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


def origin() -> str:
    """What the output was captured on, and by what."""
    head = report.header(["python", "docs/tutorial/layer.py", *sys.argv[1:]], None, {})
    where = f"{DEVICES} x {head['device']}, driver {head['driver']}"
    if jax.default_backend() == "cpu":
        where = f"{DEVICES} CPU devices emulated on {os.cpu_count()} cores; times say nothing about a GPU"
    return f"# {where}\n# jax {jax.__version__}, moax {head['git_sha']}, {head['date']}: {head['command']}\n"


class Tee(io.StringIO):
    """Keeps what is printed, and prints it."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)  # pyrefly: ignore[missing-attribute]
        return super().write(text)


def main(gpus: bool, keep: bool) -> None:
    if not gpus:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)  # as the page has it; too late once JAX has started
    if gpus and (jax.default_backend() != "gpu" or jax.device_count() < DEVICES):
        raise SystemExit(f"--gpus needs {DEVICES} GPUs; here are {jax.devices()}. Leave it out to emulate devices")
    with contextlib.redirect_stdout(Tee()) as printed:
        exec(compile(program(), str(PAGE), "exec"), {"__name__": "__main__"})
    if keep:
        kept = PAGE.with_name("layer_gpus.txt" if gpus else "layer_emulated.txt")
        kept.write_text(origin() + "\n" + printed.getvalue(), encoding="utf-8")
        print(f"wrote {kept.name}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", action="store_true", help="on four GPUs, at full size")
    parser.add_argument("--keep", action="store_true", help="write the output beside the page")
    main(**vars(parser.parse_args()))
