"""One word for one concept: names and prose contain nothing that CONTRIBUTING.md has retired, and no fragments.

Its tables "Retired names" and "Retired phrases" are the lists; a line there extends this test. Reads files
only and imports nothing of ours.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = sorted((ROOT / "src").rglob("*.py"))
CORE = sorted(path for suffix in ("hpp", "cpp") for path in (ROOT / "core").rglob(f"*.{suffix}"))
OTHERS = ("docs/internals/log.md", "docs/reference/")
"""A dated record, and pages that are generated from src/."""
TESTS = sorted(path for name in ("tests", "benchmarks", "examples") for path in (ROOT / name).rglob("*.py"))
TESTS.remove(Path(__file__))  # has some phrases, to test how they are found
DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")]
DOCS += [ROOT / "CMakeLists.txt", ROOT / "core/tests/isolated_kernels.cmake"]
DOCS += sorted(
    path for path in (ROOT / "docs").rglob("*.md") if not path.relative_to(ROOT).as_posix().startswith(OTHERS)
)
PERMITTED = {"so_far"}
COMMENT_OR_STRING = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL)
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
THIRD_PERSON = {"Returns", "Yields", "Raises", "Reads", "Writes", "Logs", "Starts", "Runs", "Creates", "Stops", "Sets"}
FRAGMENT = re.compile(r"""(?:["'#]|//)\s*(?:Of|As|Those)\b.*|(?<=\S)[ ]+(?:#|//)[ ]of .*""")
FRAMING = re.compile(r"""^\s*(?://|#|\||-)?|["'`*]""", re.MULTILINE)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def retired(title: str) -> list[str]:
    """The first column of one of the tables."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([a-z; ]+) \|", section, re.MULTILINE)[1:]


NAMES = set(retired("Retired names"))
PHRASES = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, retired('Retired phrases')))})(?!\w)")


def names_in(path: Path) -> set[str]:
    """The names of a source file that contain a retired part, its own among them."""
    text = path.read_text()
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found = {token.string for token in tokens if token.type == tokenize.NAME}
    else:
        found = set(re.findall(r"[A-Za-z_]\w*", COMMENT_OR_STRING.sub(" ", text)))
    found |= set(path.relative_to(ROOT).with_suffix("").parts)
    return {name for name in found - PERMITTED if NAMES & parts(name)}


def parts(name: str) -> set[str]:
    return {part.lower() for part in PART.findall(name)}


def phrases_in(path: Path) -> set[str]:
    """The retired phrases of a file, also across the ends of lines."""
    text = path.read_text()
    if path.suffix in (".hpp", ".cpp"):
        text = "\n".join(COMMENT_OR_STRING.findall(text))
    if path.name == "CONTRIBUTING.md":
        text = text.partition("## Retired names")[0]
    return set(PHRASES.findall(" ".join(FRAMING.sub(" ", text).lower().split())))


def refuse(find: Callable[[Path], Any], paths: list[Path], rule: str) -> None:
    """Fail with each file where something is found; pytest cuts a comparison of many."""
    found = [f"{relative(path)}: {each}" for path in paths if (each := find(path))]
    assert not found, "\n".join([rule, *found])


def test_names_are_not_retired() -> None:
    refuse(names_in, [*PYTHON, *CORE], "CONTRIBUTING.md has what to use instead")


def test_phrases_are_not_retired() -> None:
    refuse(phrases_in, [*PYTHON, *CORE, *TESTS, *DOCS], "CONTRIBUTING.md has what to use instead")


def test_no_docstring_comment_or_message_begins_with_a_fragment() -> None:
    refuse(lambda path: FRAGMENT.findall(path.read_text()), [*PYTHON, *CORE, *TESTS], "begin with a noun or a verb")


def declarative_docstrings(path: Path) -> list[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [each.name for each in functions if (ast.get_docstring(each) or "-").split()[0] in THIRD_PERSON]


def test_docstrings_of_functions_are_imperative() -> None:
    refuse(declarative_docstrings, PYTHON, "write 'Return the ids', not 'Returns the ids'")


def test_the_lists_are_read() -> None:
    assert {"far", "door", "mover"} <= NAMES and PHRASES.search("told whoever asks")


def test_parts_of_names_are_found_and_other_words_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts("FarWorker") & NAMES and parts("is_far") & NAMES and not parts("farewell") & NAMES
    file = tmp_path / "a.py"
    file.write_text("# what goes\n# on here\nROAD_of = 'mover'\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert names_in(file) == {"ROAD_of"} and phrases_in(file) == {"goes on"}


def test_fragments_are_found_and_sentences_are_not() -> None:
    assert FRAGMENT.findall('x: int\n"""Of all servers."""\nf()  # As in `Store`.\n') == [
        '"Of all servers."""',
        "# As in `Store`.",
    ]
    assert FRAGMENT.findall("// Those of a bucket.\nraise Error(f'As is')") == ["// Those of a bucket.", "'As is')"]
    assert FRAGMENT.findall("count = 1  # of rows\nlong n; // of rows\n") == ["  # of rows", " // of rows"]
    assert not FRAGMENT.findall('"""Return those of a bucket. As each is locked, """  # Offsets')
