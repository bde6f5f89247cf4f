"""The program of layer.md: its Python blocks, in order.

Run: `python docs/tutorial/layer.py [--gpus] [--keep] [--sha SHA]`, on four emulated CPU devices or on four GPUs or two.
"""

import argparse
import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import jax

PAGE = Path(__file__).with_name("layer.md")
ROOT = PAGE.parents[2]
EMULATED = 4


def program() -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))


def origin(devices: int, sha: str | None) -> str:
    """What the output was captured on, and by what."""
    sys.path.insert(0, str(ROOT))  # benchmarks/ is a package of the repository, not of the wheel
    from benchmarks import report

    head = report.header(["python", "docs/tutorial/layer.py", *sys.argv[1:]], sha, {})
    on = f"# {devices} x {head['device']}, driver {head['driver']}\n"
    return on + f"# jax {jax.__version__}, moax {head['git_sha']}, {head['date']}: {head['command']}\n"


def main(gpus: bool, keep: bool, sha: str | None = None) -> None:
    if not gpus:
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", EMULATED)  # as the page has it; too late once JAX has started
    if (gpus or keep) and (jax.default_backend() != "gpu" or jax.device_count() < 2):
        raise SystemExit(f"--gpus needs two GPUs or four; here are {jax.devices()}. Leave it out to emulate devices")
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) if keep else contextlib.nullcontext() as printed:
        exec(compile(program(), str(PAGE), "exec"), names)
    if printed is not None:
        record = origin(names["mesh"].size, sha) + "\n" + printed.getvalue()
        PAGE.with_name("layer_gpus.txt").write_text(record, encoding="utf-8")
        print(record)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", action="store_true", help="on four GPUs or two, at full size")
    parser.add_argument("--keep", action="store_true", help="with --gpus: write the output beside the page")
    parser.add_argument("--sha", help="the commit that runs (default: asked of git)")
    main(**vars(parser.parse_args()))
