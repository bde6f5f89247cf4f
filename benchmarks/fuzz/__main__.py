"""`python -m benchmarks.fuzz` runs `benchmarks.fuzz.run`."""

import sys

from benchmarks.fuzz.run import main

if __name__ == "__main__":
    sys.exit(main())
