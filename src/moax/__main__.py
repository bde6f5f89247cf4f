"""`python -m moax` is the command `moax`."""

import sys

from moax.cli import main

sys.exit(main())
