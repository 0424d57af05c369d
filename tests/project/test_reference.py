"""docs/reference.md is up to date with the docstrings, and names every public class and function."""

import importlib.util
from pathlib import Path
from types import ModuleType

import satrap

DOCS = Path(__file__).parents[2] / "docs"


def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current() -> None:
    assert (DOCS / "reference.md").read_text() == writer().reference(), "a docstring changed: run `make reference`"


def test_every_public_name_is_in_it() -> None:
    known = {name.rpartition(".")[2] for names in writer().GROUPS.values() for name in names}
    public = {name for name in satrap.__all__ if not name.endswith("Error") and name not in ("__version__", "models")}
    assert public - known == {"synthetic"}
