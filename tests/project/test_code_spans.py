"""Every name between backticks in a docstring or comment of src/ exists: in the package, in the core, or in a library.

A span is checked if it is a name, or names with dots, maybe called: `stream`, `Store.lookup`, `save(wait=False)`. A
single name must be one that the source of the package or of the core uses, and a member must be one of its class. The
files are read and not imported.
"""

import ast
import keyword
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
CORE = [path for suffix in ("hpp", "cpp") for path in (ROOT / "core").rglob(f"*.{suffix}")]
LIBRARIES = {"JSONEncoder.encode", "cross_entropy", "nn.Embedding", "torch.nn.Embedding"}
"""Names of libraries that the package mentions and does not use."""
NAME = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\([^`]*\))?`(?!`)")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def read(path: Path) -> tuple[list[ast.AST], str]:
    """The nodes of a file's syntax tree, and its text."""
    text = path.read_text()
    return list(ast.walk(ast.parse(text))), text


@cache
def known() -> frozenset[str]:
    """Every name, attribute, argument, keyword and file of the package, and those in strings and in the core."""
    names = set(keyword.kwlist)
    names |= {part for path in SOURCES for part in path.relative_to(ROOT / "src").with_suffix("").parts}
    for path in [*SOURCES, ROOT / "src/satrap/_core.pyi"]:
        nodes = read(path)[0]
        docstrings = {id(text) for node in nodes if (text := _docstring(node)) is not None}
        for node in nodes:
            for _, value in ast.iter_fields(node):
                if isinstance(value, str) and id(node) not in docstrings:
                    names.update(re.findall(r"[A-Za-z_]\w*", value))
    for path in CORE:
        names |= set(re.findall(r"[A-Za-z_]\w*", re.sub(r"//.*", "", path.read_text())))
    return frozenset(names)


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """The classes of the package by name."""
    by_name: dict[str, list[ast.ClassDef]] = {}
    for path in [*SOURCES, ROOT / "src/satrap/_core.pyi"]:
        for node in read(path)[0]:
            if isinstance(node, ast.ClassDef):
                by_name.setdefault(node.name, []).append(node)
    return by_name


@cache
def members(name: str) -> frozenset[str] | None:
    """What the classes of this name and their bases declare or assign to self; None if a base is of a library."""
    names: set[str] = set()
    for node in classes()[name]:
        for part in ast.walk(node):
            match part:
                case ast.FunctionDef(name=declared) | ast.Name(id=declared) | ast.Attribute(attr=declared):
                    names.add(declared)
        for base in node.bases:
            base_name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            if base_name in ("Protocol", "ABC", "NamedTuple", "Generic", "Enum", "StrEnum", "IntEnum"):
                continue
            of_base = members(base_name) if base_name in classes() and base_name != name else None
            if of_base is None:
                return None
            names |= of_base
    return frozenset(names)


def _docstring(node: ast.AST) -> ast.expr | None:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return node.value if isinstance(node, ast.Expr) and is_text else None


def prose(path: Path) -> str:
    """The docstrings and comments of a file, and what follows a `#` in a string."""
    nodes, text = read(path)
    first_values = (_docstring(node) for node in nodes)
    docstrings = [node.value for node in first_values if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join([*docstrings, *re.findall("#.*", text)])


def exists(span: str) -> bool:
    parts = span.strip(".").split(".")
    for owner, member in pairwise(parts):
        declared = members(owner) if owner in classes() else None
        if declared is not None and member not in declared:
            return False
    return set(parts) <= known() or span in LIBRARIES


def unknown(text: str) -> set[str]:
    return {span for span in NAME.findall(text) if not exists(span)}


def test_names_in_backticks_exist() -> None:
    found = {relative(path): spans for path in SOURCES if (spans := unknown(prose(path)))}
    assert found == {}, "no such name in src/: mend the text"


def test_a_name_that_does_not_exist_is_seen() -> None:
    text = "`Store.lookup` `lookup(step=1)` `Store.batches` `renamed_away` `two words`"
    assert unknown(text) == {"Store.batches", "renamed_away"}
