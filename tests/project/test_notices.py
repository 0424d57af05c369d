"""A wheel contains the licences of the code compiled into it. `make wheel` looks for them in the wheel itself."""

import importlib.metadata
import tomllib
from pathlib import Path

import nanobind

ROOT = Path(__file__).parents[2]


def words(text: str) -> list[str]:
    return [word for word in text.split() if word not in ("*", "/**")]


def test_the_notices_are_those_of_the_versions_that_are_compiled_in() -> None:
    (licence,) = [file for file in importlib.metadata.files("nanobind") or [] if file.name == "LICENSE"]
    assert words((ROOT / "LICENSES/nanobind.txt").read_text()) == words(licence.read_text())
    header = (Path(nanobind.include_dir()) / "../ext/robin_map/include/tsl/robin_map.h").read_text()
    assert words((ROOT / "LICENSES/robin_map.txt").read_text()) == words(header.partition("*/")[0])


def test_a_wheel_is_given_every_notice() -> None:
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    found = {file.relative_to(ROOT).as_posix() for pattern in given for file in ROOT.glob(pattern)}
    assert found == {"LICENSE", "LICENSES/nanobind.txt", "LICENSES/robin_map.txt"}
