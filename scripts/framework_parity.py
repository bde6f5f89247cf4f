#!/usr/bin/env python3
"""This script compares moax with MaxText, tunix and Levanter, whose packages it runs, and prints a table.

It also looks up the names of the migration pages in the sources of Megatron-Core and Transformer Engine ("sources").

`framework_parity.py [FRAMEWORK ...]` runs the files of tests/support/frameworks/ of each framework (by default of all)
with the Python of .venv-FRAMEWORK, and moax on PYTHONPATH. Each file prints rows. The exit status is 1 where an error
is above the limit of its row, where a file fails, and where a file has no row.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RUNS = {
    "sources": ["sources_rows.py"],
    "maxtext": ["maxtext_settings.py", "maxtext_rows.py", "maxtext_training.py"],
    "tunix": ["tunix_rows.py"],
    "levanter": ["levanter_rows.py"],
}
HEAD = f"{'framework':14} {'what':48} {'mesh':24} {'recipe':10} {'limit':>7}  errors"


def show(row: dict) -> str:
    """Returns a line of the table."""
    errors = "  ".join(f"{name} {value:.1e}" for name, value in row["errors"].items())
    wrong = "" if row["right"] else "  ABOVE THE LIMIT"
    case = f"{row['framework']:14} {row['what']:48} {row['mesh']:24} {row['recipe']:10}"
    return f"{case} {row['limit']:7.0e}  {errors}{wrong}"


def run(framework: str, name: str) -> list[dict]:
    """Prints the rows of one file, as they come, and returns them. A file that fails adds a row that is wrong."""
    support = ROOT / "tests" / "support"
    paths = [ROOT / "src", support, support / "frameworks"]
    python_path = os.pathsep.join(map(str, paths))
    environment = os.environ | {"PYTHONPATH": python_path, "DECOUPLE_GCLOUD": "TRUE"}
    command = [
        str(ROOT / f".venv-{framework}" / "bin" / "python"),
        str(support / "frameworks" / name),
    ]
    rows = []
    log = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in process.stdout:
            if line.startswith("ROW "):
                rows.append(json.loads(line.removeprefix("ROW ")))
                print(show(rows[-1]), flush=True)
            else:
                log.append(line)
    if process.returncode or not rows:
        print(
            f"{name} ended with {process.returncode} after {len(rows)} rows:\n{''.join(log[-30:])}",
            flush=True,
        )
        rows.append({"right": False})
    return rows


def main(frameworks: list[str]) -> int:
    """Prints the table of these frameworks, and returns the exit status."""
    print(HEAD)
    rows = []
    for framework in frameworks:
        for name in RUNS[framework]:
            rows += run(framework, name)
    wrong = sum(not row["right"] for row in rows)
    print(f"{len(rows)} rows, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(RUNS)))
