"""`python -m lm` is the command line."""

import sys

from lm.command import main

sys.exit(main())
