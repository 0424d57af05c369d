"""Makes the packages that `make public-models` installed importable, after those of .venv: torch is never theirs."""

from __future__ import annotations

import sys
from pathlib import Path

_INSTALLED = Path(__file__).parents[2] / "build/public-models"

if _INSTALLED.is_dir():
    sys.path.append(str(_INSTALLED))
