"""`python -m satrap`: the command `satrap`, for where only the interpreter is known."""

import sys

from satrap.cli import main

sys.exit(main())
