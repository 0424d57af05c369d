"""`python -m satrap`: the command `satrap` where only the interpreter is known."""

import sys

from satrap.cli.main import main

sys.exit(main())
