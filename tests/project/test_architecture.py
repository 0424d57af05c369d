"""docs/architecture.md: the path of a batch names code that is in the files beside it.

Reads files only and imports nothing of ours.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINES = (ROOT / "docs/architecture.md").read_text().splitlines()
STATIONS = [line for line in LINES if line.startswith("|") and re.search(r"/\w+\.[chp]pp|/\w+\.py", line)]
SOURCE = re.compile(r"[\w/]+\.(?:py|cpp|hpp)")


@pytest.mark.parametrize("line", STATIONS, ids=lambda line: line.split("|")[1].strip())
def test_a_station_names_code_of_its_files(line: str) -> None:
    *cells, files = line.strip("|").split("|")
    text = ""
    for name in SOURCE.findall(files):
        path = ROOT / name if name.startswith("core/") else ROOT / "src/satrap" / name
        text += path.read_text()
        header = path.with_suffix(".hpp")
        text += header.read_text() if path.suffix == ".cpp" and header.exists() else ""
    for name in re.findall(r"`([\w.:]+)`", "".join(cells[1:])):
        missing = [part for part in re.split(r"\.|::", name) if not re.search(rf"\b{part}\b", text)]
        assert missing == [], f"{name} is not in {files}"
