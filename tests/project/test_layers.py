"""The packages' allowed imports, declared here and checked against the sources; and the limits of file sizes.

Reads files only and imports nothing of ours.
"""

import ast
import graphlib
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/satrap"

# Which packages a package may import from, besides itself and BASE. None may import what imports it, except among its
# own parts: `test_no_file_imports_itself_in_a_circle` sees to the files.
BASE = {
    "errors",
    "byte_sizes",
    "event_log",
    "interrupts",
    "collected",
    "hidden_names",
    "run_context",
    "transfer",
    "cgroups",
    "_core",
}
ARROWS: dict[str, str] = {
    "config": "",
    "rpc": "config",
    "monitor": "config",
    "sharding": "config",
    "storage": "config",
    "table": "config storage table.snapshot",
    "table.snapshot": "config storage table",
    "data": "config monitor storage",
    "server": "config rpc monitor sharding storage table table.snapshot server.migration",
    "server.migration": "config rpc monitor sharding table server",
    "worker": "config rpc sharding storage table table.snapshot data server",
    "worker.remote": "config rpc monitor data worker",
    "device": "config rpc monitor sharding table data worker",
    "train": "config rpc monitor sharding table data server worker worker.remote device",
    "models": "config train",
    "nn": "config monitor train",
    "checkpoint": "config monitor storage table.snapshot data train",
    "serving": "config rpc storage table table.snapshot data worker train checkpoint",
    "launch": "config rpc monitor sharding server server.migration",
    "deploy": "config launch",
    "html_report": "monitor",
    "planning": "config data table table.snapshot train",
    "cli": "config rpc monitor sharding storage table data server server.migration worker.remote train models "
    "checkpoint launch deploy html_report planning",
    "__main__": "cli",
}
# The same for the folders of the core and their includes.
CORE_ARROWS = {
    "base": "",
    "kernels": "base",
    "storage": "base",
    "ids": "base kernels storage",
    "table": "base ids kernels storage",
    "bags": "base ids",
    "engine": "bags base ids kernels storage table",
    "sharding": "bags base ids kernels",
    "data": "base",
    "models": "base kernels",
    "bindings": "base data engine kernels models sharding",
}
# Which packages and files may import a package from outside the standard library; None: all may.
OUTSIDE: dict[str, str | None] = {
    "numpy": None,
    "pyarrow": "config.optional_deps data table.snapshot.arrow_files",
    "torch": "device train models nn checkpoint serving launch.trainer_main cli.doctor monitor.sinks "
    "planning.calibration",
    "safetensors": "checkpoint.state_dict_file",
    "fsspec": "storage.fsspec_store",
    "obstore": "storage.obstore_store",
    "zmq": "rpc",
    "ray": "launch.ray_launcher",
    "triton": "device.triton_initial device.triton_kernels device.triton_optimizers",
    "prometheus_client": "monitor.endpoint",
    "torchrec": "nn.collections",
}
# The standard library only: what decides, apart from what does.
PURE = [
    "byte_sizes",
    "errors",
    "run_context",
    "sharding.autoscaler",
    "sharding.bucket_map",
    "sharding.shard_map",
    "config.validation",
    "config.tables",
    "config.features",
    "config.job",
    "config.location",
    "config.path_allowlist",
    "deploy.job_file",
    "deploy.kuberay",
    "deploy.kubernetes",
    "deploy.pods",
    "deploy.render",
    "deploy.yaml_text",
    "train.ledger",
    "checkpoint.catalog",
    "worker.remote.worker_spec",
    "launch.run_events",
    "launch.run_state",
    "launch.supervisor",
    "monitor.metric_table",
    "monitor.samples",
    "html_report.chart",
    "html_report.figures",
    "html_report.markup",
    "html_report.run_records",
    "html_report.summary",
    "planning.coefficients",
    "planning.estimate",
    "planning.machines",
    "planning.planner",
    "planning.report",
    "planning.workload",
]
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


def module(path: Path) -> str:
    """Returns the name that a file is imported by, without `satrap.`."""
    *folders, name = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(folders if folders and name == "__init__" else [*folders, name])


def package(name: str) -> str:
    """Returns the longest package of ARROWS that a module is in; "" if it is in none."""
    return max((each for each in ARROWS if f"{name}.".startswith(f"{each}.")), key=len, default="")


def within(name: str, allowed: Iterable[str]) -> bool:
    """Returns whether a module is among those named, or in one of the packages."""
    return any(f"{name}.".startswith(f"{each}.") for each in allowed)


@cache
def tree(path: Path) -> list[ast.AST]:
    """Returns the nodes of a file's syntax tree, the module first."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> list[str]:
    """Returns every module imported anywhere in the file, including functions and TYPE_CHECKING blocks."""
    found: list[str] = []
    for node in tree(path):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}, line {node.lineno}: write imports in full"
            is_ours = node.module == "satrap"
            found += [f"satrap.{alias.name}" for alias in node.names] if is_ours else [node.module or ""]
    return found


def test_imports_follow_the_arrows() -> None:
    for path in package_files:
        own = module(path)
        if own == "__init__":
            continue
        allowed = {*BASE, package(own), *ARROWS.get(package(own), "").split()}
        if own in BASE:
            allowed = {*BASE, "config"}
        assert package(own) or own in BASE, f"{relative(path)} is in no package of ARROWS"
        for name in imports(path):
            top, _, rest = name.partition(".")
            if top == "satrap":
                found = rest if rest in BASE else package(rest)
                assert found in allowed, f"{own} imports {name}; {package(own)} may import from {sorted(allowed)}"


def test_the_architecture_page_names_all_packages_and_folders_the_lowest_first() -> None:
    section = (ROOT / "docs/architecture.md").read_text().partition("## Packages")[2]
    rows = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    packages = [name for name in ARROWS if "." not in name and name != "__main__"]
    assert rows == [*packages, *CORE_ARROWS]
    for i, name in enumerate(packages):
        above = {imported.partition(".")[0] for imported in ARROWS[name].split()}
        assert above <= {*packages[: i + 1]}, f"{name} imports from a package below it"


def test_no_file_imports_itself_in_a_circle() -> None:
    modules = {module(path): path for path in package_files}
    graph = {
        own: {
            rest
            for name in imports(path)
            if name.startswith("satrap.") and (rest := name.removeprefix("satrap.")) in modules
        }
        for own, path in modules.items()
    }
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(modules)


def test_outside_packages_stay_where_they_are_allowed() -> None:
    for path, name in ((each, name) for each in package_files for name in imports(each)):
        top = name.partition(".")[0]
        if top == "satrap" or top in sys.stdlib_module_names:
            continue
        own = module(path)
        assert top in OUTSIDE, f"{own} imports {top}, which Satrap does not need at run time"
        allowed = OUTSIDE[top]
        assert not within(own, PURE), f"{own} imports {top}; it is pure"
        assert allowed is None or within(own, allowed.split()), f"{own} imports {top}; only {allowed} may"


def test_the_environment_is_never_read() -> None:
    for path, node in ((each, node) for each in package_files for node in tree(each)):
        names = {node.attr} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
        found = names & {"environ", "environb", "getenv", "putenv"}
        assert not found, f"{relative(path)}: {found}"


WALL_CLOCK = {
    *("checkpoint.checkpoint", "cli.report", "cli.status", "launch.run_monitor", "monitor.training_record", "transfer")
}
"""The files that read the wall clock, for what is shown: it may jump at any moment."""


def test_no_decision_depends_on_the_wall_clock() -> None:
    """Deadlines, leases and intervals are measured by time.monotonic()."""
    found = {module(path) for path in package_files if re.search(r"\btime\.time\(|datetime\.now\(", path.read_text())}
    assert found == WALL_CLOCK


def functions_in(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the functions of a tree, those inside others too; expressions, which are most of its nodes, have none."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        if not isinstance(child, ast.expr):
            yield from functions_in(child)


def faults_of_python(path: Path) -> Iterator[str]:
    text = path.read_text()
    top = ast.parse(text)
    if text.strip() and not ast.get_docstring(top):
        yield "a file opens by saying its job"
    if (lines := len(text.splitlines())) >= MAX_FILE_LINES:
        yield f"{lines} lines"
    for node in functions_in(top):
        if (lines := (node.end_lineno or 0) - node.lineno + 1) >= MAX_FUNCTION_LINES:
            yield f"{node.name} has {lines} lines"


def test_python_files_open_with_a_paragraph_and_stay_short() -> None:
    faults = [f"{relative(path)}: {fault}" for path in python_files for fault in faults_of_python(path)]
    assert not faults, "\n".join(faults)


def test_includes_of_the_core_follow_the_arrows() -> None:
    for path in core_files:
        room = path.parent.name
        if room == "tests":
            continue
        allowed = {room, *CORE_ARROWS[room].split()}
        for header in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE):
            assert header.partition("/")[0] in allowed, f"{relative(path)} includes {header}, not of {allowed}"


def test_only_the_bindings_know_python() -> None:
    for path in core_files:
        if path.parent.name == "bindings":
            continue
        for header in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', path.read_text(), re.MULTILINE):
            assert not header.startswith(("nanobind", "Python.h", "numpy", "torch", "ATen", "cuda")), (
                f"{relative(path)} includes {header}"
            )


def faults_of_the_core(path: Path) -> Iterator[str]:
    text = path.read_text()
    if not text.startswith("// "):
        yield "a file opens by saying its job"
    if (lines := len(text.splitlines())) >= MAX_FILE_LINES:
        yield f"{lines} lines"
    for first, lines in cpp_functions(text):
        if lines >= MAX_FUNCTION_LINES:
            yield f"the function at line {first} has {lines} lines"


def test_core_files_open_with_a_paragraph_and_stay_short() -> None:
    faults = [f"{relative(path)}: {fault}" for path in core_files for fault in faults_of_the_core(path)]
    assert not faults, "\n".join(faults)


def cpp_functions(text: str) -> Iterator[tuple[int, int]]:
    """Returns (first line, number of lines) of each function that is not inside another one.

    clang-format keeps the code in one shape, so this needs no parser. A brace after a space opens a function when the
    text before it, back to the last `;` or such brace, has a parameter list and does not declare a type; a brace with
    no space before it is an initialiser.
    """
    text = NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    opened: list[int | None] = []  # for each open brace: where its function began, None if it opened none
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


def cpp_names(text: str) -> Iterator[tuple[str, bool]]:
    """Returns (name, whether it is defined there) of what C++ code declares outside of functions and types.

    Like `cpp_functions` it relies on the shape that clang-format gives. It sees functions, types, aliases and
    variables; no operators, no members that are defined outside of their class, and nothing that macros make.
    """
    text = re.sub(r"^(inline )?namespace( [\w:]+)? \{", "", NOT_CODE.sub("", text), flags=re.MULTILINE)
    statement, depth = "", 0
    for char in text:
        if char == "}" and depth == 0:  # end of a namespace
            statement = ""
            continue
        depth -= char == "}"
        if depth == 0:
            statement += char
        depth += char == "{"
        of_function = char == "}" and re.search(r"\)[^={]*\{\}$", statement)
        if depth == 0 and (char == ";" or of_function):
            yield from names_of(statement)
            statement = ""


def names_of(statement: str) -> Iterator[tuple[str, bool]]:
    """Returns the same for one statement, whose braces are empty."""
    outer = re.sub(r"\[\[.*?\]\]|\b\w+\(\w+\) (?=\w+ \{)", "", statement)  # attributes and alignas
    while re.search(r"<[^<>]*>", outer):
        outer = re.sub(r"<[^<>]*>", "", outer)
    outer = re.sub(r"^\s*(template\s+)?", "", outer)
    if declared := re.match(r"(?:struct|class|union|enum(?: class)?) (\w+)", outer):
        yield declared[1], "{" in outer
    elif declared := re.match(r"using (\w+) =", outer):
        yield declared[1], True
    elif re.match(r"(using|static_assert|extern|namespace)\b", outer) or "operator" in outer:
        return
    elif declared := re.match(r"[^=(]*?([\w:~]+)\(", outer):
        if "::" not in declared[1]:
            yield declared[1], outer.endswith("}")
    else:
        yield from ((name, True) for name in re.findall(r"(\w+)(?:\[\w*\])?(?: =[^,;]*|\{\})?(?=[,;])", outer))


def clashing_names(texts: dict[str, str]) -> list[str]:
    """Returns the names that a file of core/bindings defines though another one, or a header of the core, has them.

    texts: of the files, by their paths. CMake compiles several of these files as one, in which a call may choose a
    function of any file before it: silently, if both have a function of that name.
    """
    owners: dict[str, list[str]] = {}
    for path, text in sorted(texts.items()):
        of_bindings = "/bindings/" in path
        for name in {name for name, defined in cpp_names(text) if defined or not of_bindings}:
            owners.setdefault(name, []).append(path)
    return [
        f"{name} is in {', '.join(paths)}; give it a name that says what differs"
        for name, paths in sorted(owners.items())
        if len(paths) > 1 and any("/bindings/" in path for path in paths)
    ]


def test_no_two_files_of_the_bindings_define_one_name() -> None:
    code = [path for path in core_files if "tests" not in path.parts]
    read = [path for path in code if path.suffix == ".hpp" or path.parent.name == "bindings"]
    assert clashing_names({relative(path): path.read_text() for path in read}) == []


def test_names_of_the_core_are_seen() -> None:
    source = """namespace a {
namespace b = c;
using c::f1;
using Alias = std::vector<std::pair<int, B>>;
template <typename T> using Other = T;
constexpr std::size_t kOne = 1, kTwo = f2(1, 2);
constexpr const char* kNames[] = {"{", "}"};
struct Declared;
struct alignas(64) Type {
    int member() { return 1; }
};
enum class Kind : unsigned { first = 1, second };
namespace {
[[noreturn]] inline void refuse(const std::string& message = "") { throw Type(message); }
template <typename T = int, std::size_t Rank = 1>
Array<T, Rank> as_array(std::unique_ptr<T[]> memory, const std::array<int, Rank>& shape) {
    if (shape) {
        return {f3(memory)};
    }
}
void Type::member_of(int x) : x_{1} { f4(x); }
bool operator==(const Type& x, const Type& y) { return true; }
} // namespace
int declared(int x);
static_assert(sizeof(Type) == 64);
Type object{1}, *pointer;
} // namespace a
"""
    assert list(cpp_names(source)) == [
        *[(name, True) for name in ("Alias", "Other", "kOne", "kTwo", "kNames")],
        *[("Declared", False), ("Type", True), ("Kind", True), ("refuse", True), ("as_array", True)],
        *[("declared", False), ("object", True), ("pointer", True)],
    ]


def test_clashing_names_of_the_bindings_are_seen() -> None:
    header = {"core/bindings/shared.hpp": "void bind(int x);\ninline void require(const char* x) {}\n"}
    texts = header | {"core/bindings/a.cpp": "void bind(int x) {}\nvoid f(int x) {}\n", "core/ids/a.hpp": "void g();\n"}
    assert clashing_names(texts) == []
    for other in ("void require(std::string x) {\n}\n", "constexpr int f = 1;\n", "struct g {};\n"):
        assert len(clashing_names(texts | {"core/bindings/b.cpp": f"namespace {{\n{other}}}\n"})) == 1
