"""Prints what an extra of this package needs, one requirement a line: `python requirements.py EXTRA`.

So `make` can install packages while it compiles the core, which `pip install -e '.[EXTRA]'` does one after the other.
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def requirements(project: dict[str, Any], extra: str) -> Iterator[str]:
    """Yields the requirements of the extra; those of extras that it names, too."""
    for requirement in project["optional-dependencies"][extra]:
        if named := re.fullmatch(rf"{project['name']}\[(.+)\]", requirement):
            for each in named[1].split(","):
                yield from requirements(project, each.strip())
        else:
            yield requirement


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    print(*project["dependencies"], *requirements(project, sys.argv[1]), sep="\n")
