"""Who may know what, declared once here and checked by reading the sources; and the ceilings on their sizes.

Reads files only and imports nothing of ours.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src/satrap"

# Lowest first. A file imports from files of the layers before its own; the native module knows nobody but errors.
LAYERS = [
    "errors",
    "durable",
    "optional_deps",
    "interrupts",
    "collected",
    "checks",
    "cores",
    "path_allowlist",
    "config",
    "metrics",
    "_core",
    "arrays",
    "hashing",
    "rpc.header",
    "rpc.values",
    "rpc.methods",
    "rpc.faults",
    "rpc.schedule",
    "rpc.ledger",
    "rpc.address",
    "rpc.unix_socket",
    "rpc.connections",
    "rpc.guard",
    "rpc.keys",
    "rpc.service",
    "rpc.channel",
    "rpc.channels",
    "rpc.client",
    "rpc",
    "place",
    "features",
    "inputs",
    "sync",
    "stages",
    "pipeline",
    "threads",
    "engine",
    "manifest",
    "folder",
    "storage",
    "saved_table",
    "datafiles",
    "saving",
    "snapshot",
    "store",
    "tables",
    "synthetic",
    "models.parts",
    "models.interaction",
    "models.dlrm",
    "models.dcn",
    "models.ffnn",
    "models",
    "report",
    "meter",
    "sinks",
    "progress",
    "columns",
    "sources.left_out",
    "sources.block",
    "sources.order",
    "sources.deal",
    "sources.ahead",
    "sources.files",
    "sources.decode",
    "sources.road",
    "sources.length",
    "sources.source",
    "sources.text_file",
    "sources.text",
    "sources.criteo",
    "sources.parquet",
    "sources.arrow",
    "sources.frame",
    "sources.iterable",
    "sources.declared",
    "sources",
    "worker",
    "local",
    "bucketmap",
    "members",
    "job",
    "scaling",
    "server_calls",
    "lease",
    "meeting",
    "moving",
    "served",
    "door",
    "moving_server",
    "server",
    "mover",
    "servers",
    "reader_servers",
    "remote_tables",
    "remote",
    "assignment",
    "worker_calls",
    "reading",
    "host",
    "far",
    "joint_step",
    "trainers",
    "workers",
    "twin",
    "dense",
    "batch",
    "lookup",
    "stream",
    "optimizer",
    "embeddings",
    "statefile",
    "catalog",
    "run_owner",
    "runfolder",
    "reader",
    "checkpoint",
    "evaluation",
    "cluster.membership",
    "cluster.supervisor",
    "cluster.children",
    "cluster.terminal",
    "cluster.output",
    "cluster.resizer",
    "cluster.command",
    "cluster.rows_file",
    "cluster.processes",
    "cluster.resources",
    "cluster.rays",
    "cluster.run",
    "cluster.trainer",
    "cluster",
    "doctor",
    "cli",
    "__main__",
    "__init__",
]
# Which files may import a package from outside the standard library; None: all may.
OUTSIDE: dict[str, set[str] | None] = {
    "numpy": None,
    "pyarrow": {"datafiles", "synthetic", "hashing", "sources.files", "sources.parquet", "sources.arrow"},
    "torch": {
        *(
            "threads",
            "trainers",
            "twin",
            "dense",
            "batch",
            "lookup",
            "stream",
            "optimizer",
            "embeddings",
            "reader",
            "statefile",
            "checkpoint",
            "evaluation",
            "cluster.trainer",
            "doctor",
            "sinks",
        ),
        *("models.parts", "models.interaction", "models.dlrm", "models.dcn", "models.ffnn"),
    },
    "safetensors": {"statefile"},
    "fsspec": {"storage", "sources.files"},
    "zmq": {"rpc.keys", "rpc.guard", "rpc.service", "rpc.channel", "rpc.channels"},
    "ray": {"cluster.rays"},
}
PURE = {  # the standard library only
    *(
        "errors",
        "checks",
        "path_allowlist",
        "config",
        "features",
        "sync",
        "bucketmap",
        "catalog",
        "members",
        "job",
        "assignment",
        "scaling",
        "place",
    ),
    *("cluster.membership", "cluster.supervisor"),
}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

package_files = sorted(PACKAGE.rglob("*.py"))
python_files = sorted(
    path for name in ("src", "tests", "benchmarks", "examples") for path in (ROOT / name).rglob("*.py")
)
core_files = sorted(path for suffix in ("hpp", "cpp") for path in (ROOT / "core").rglob(f"*.{suffix}"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# Comments, strings, characters and preprocessor lines of C++.
NOT_CODE = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'|^[ \t]*\#(?:\\\n|[^\n])*""", re.DOTALL | re.MULTILINE
)
TYPE = re.compile(r"(template\s*<.*>\s*)?(inline\s+)?(namespace|struct|class|union|enum|extern)\b", re.DOTALL)

each_package_file = pytest.mark.parametrize("path", package_files, ids=relative)
each_python_file = pytest.mark.parametrize("path", python_files, ids=relative)
each_core_file = pytest.mark.parametrize("path", core_files, ids=relative)


def layer(path: Path) -> str:
    """The name of a file in LAYERS: as it is imported, less `satrap.`."""
    *folders, name = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(folders if folders and name == "__init__" else [*folders, name])


def imports(tree: ast.AST) -> Iterator[str]:
    """Every module imported anywhere in the file, functions and TYPE_CHECKING blocks included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            if node.module == "satrap":
                yield from (f"satrap.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


@each_package_file
def test_imports_go_down_the_layers(path: Path) -> None:
    own = layer(path)
    assert own in LAYERS, f"{relative(path)} has no layer: add it to LAYERS"
    for name in imports(ast.parse(path.read_text())):
        top, _, rest = name.partition(".")
        if top == "satrap":
            below = LAYERS[: LAYERS.index(own)]
            assert rest in below or rest.split(".")[0] in below, f"{own} imports {name}, which is not below it"


@each_package_file
def test_outside_packages_stay_where_they_are_allowed(path: Path) -> None:
    for name in imports(ast.parse(path.read_text())):
        top = name.partition(".")[0]
        if top == "satrap" or top in sys.stdlib_module_names:
            continue
        own = layer(path)
        assert top in OUTSIDE, f"{own} imports {top}, which Satrap does not need at run time"
        allowed = OUTSIDE[top]
        assert own not in PURE, f"{own} imports {top}; it is pure"
        assert allowed is None or own in allowed, f"{own} imports {top}; only {allowed} may"


@each_package_file
def test_the_environment_is_never_read(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        names = {node.attr} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        found = names & {"environ", "environb", "getenv", "putenv"}
        assert not found, f"{relative(path)}: {found}"


@each_python_file
def test_python_files_open_with_a_paragraph_and_stay_short(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not text.strip(), "a file opens by saying its job"
    assert len(text.splitlines()) < MAX_FILE_LINES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            assert lines < MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


@each_core_file
def test_only_the_bindings_know_python(path: Path) -> None:
    if path.name.startswith("bindings"):
        return
    for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE):
        assert not header.startswith(("nanobind", "Python.h", "numpy", "torch", "ATen", "cuda")), header


@each_core_file
def test_core_files_open_with_a_paragraph_and_stay_short(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("// "), "a file opens by saying its job"
    assert len(text.splitlines()) < MAX_FILE_LINES
    for first, lines in cpp_functions(text):
        assert lines < MAX_FUNCTION_LINES, f"the function at line {first} has {lines} lines"


def cpp_functions(text: str) -> Iterator[tuple[int, int]]:
    """(first line, number of lines) of each function that is not inside another one.

    clang-format keeps the code in one shape, so this needs no parser. A brace after a space opens a function when the
    text before it, back to the last `;` or such brace, has a parameter list and does not declare a type; a brace with
    no space before it is an initialiser.
    """
    text = NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    opened: list[int | None] = []  # of each open brace: where its function began, None if it opened none
    start = initialisers = 0
    for at, char in enumerate(text):
        if char == "{" and (initialisers or not text[at - 1].isspace()):
            initialisers += 1
        elif char == "}" and initialisers:
            initialisers -= 1
        elif char == "{":
            before = text[start:at].lstrip()
            new = "(" in before and not TYPE.match(before) and not any(begin is not None for begin in opened)
            opened.append(at - len(before) if new else None)
            start = at + 1
        elif char == "}":
            begin = opened.pop()
            if begin is not None:
                yield text.count("\n", 0, begin) + 1, text.count("\n", begin, at) + 1
            start = at + 1
        elif char == ";":
            start = at + 1


def test_functions_of_the_core_are_measured() -> None:
    source = """// A file.
namespace a {
struct alignas(64) B {
    int x{0};
    explicit B(int y) : x{y}, z_{1, {2}} {
        if (y) {
            f({y});
        }
    }
    template <typename T> int f(T y) const {
        auto g = [&](char c) { return "}"[0] == c || c == '{'; };
        return y;
    }
#define OPEN {
};
} // namespace a
int g() { return 1; }
"""
    assert list(cpp_functions(source)) == [(5, 5), (10, 4), (17, 1)]
