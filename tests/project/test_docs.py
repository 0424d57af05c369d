"""The pages: every code block runs, every command line is one that the programs take, and the site builds.

Python blocks of a page run in order, in one namespace and in an empty folder, after `SETUP` has created the files and
servers that the page names. A `text` block that follows is what the block before it prints to standard output, or else
its last line on standard error; `...` in it stands for a figure that differs from run to run. Commands in `sh` blocks
are parsed by the programs that they call, and those of `RUN` are run. No page has a block of another kind, except the
pages of `ELSEWHERE`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from browser import NAMES, find_browser, running_browser
from satrap.cli import main as command_line
from satrap.rpc import Keys, Service
from satrap.rpc.keys import create_keys
from satrap.server.protocol import ServerCalls
from satrap.server.server import Server
from satrap.worker.remote.protocol import WorkerCalls
from satrap.worker.remote.service import WorkerService
from waiting import wait_until

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ELSEWHERE = {
    "docs/reference/": "generated; its blocks are signatures",
    "docs/cli.md": "generated; its blocks are the help of commands",
    "docs/format.md": "tests/table/test_snapshot.py runs its lines",
    "docs/internals": "drawings, formulas and a log",
}
LOOPBACK = "tcp://127.0.0.1:0"
RUN = ("satrap keys keys/", "satrap doctor --no-run")
"""Commands that take little time and need nothing."""


def pages() -> list[Path]:
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [file for file in files if not any(relative(file).startswith(each) for each in ELSEWHERE)]


def relative(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text()) if found == language]


def with_output(page: Path, language: str) -> list[tuple[str, str]]:
    """The blocks of a page in `language`, each with the `text` block after it, or ""."""
    fences = [*FENCE.findall(page.read_text()), ("", "")]
    return [
        (code, output if following == "text" else "")
        for (found, code), (following, output) in pairwise(fences)
        if found == language
    ]


def is_output(printed: str, written: str) -> bool:
    """Whether a page's `text` block is what was printed, where `...` stands for one or more characters of a line, and
    alone in a line for one or more lines."""
    lines = [
        r"(?s:.+\n)" if line == "..." else re.escape(line).replace(re.escape("..."), ".+?") + r"\n"
        for line in written.splitlines()
    ]
    return re.fullmatch("".join(lines), printed) is not None


def test_output_is_compared_but_for_what_varies() -> None:
    assert is_output("AUC 0.81\n1.5 s\n", "AUC 0.81\n... s\n")
    assert is_output("a\nb\nc\nd 1\n", "a\n...\nd ...\n") and not is_output("a\nd 1\n", "a\n...\nd ...\n")
    for other in ("AUC 0.82\n1.5 s\n", "AUC 0.81\n s\n", "AUC 0.81\n1.5\n2 s\n", "AUC 0.81\n1.5 s\nmore\n"):
        assert not is_output(other, "AUC 0.81\n... s\n")


each_page = pytest.mark.parametrize("page", pages(), ids=relative)


@each_page
def test_a_page_has_blocks_of_python_commands_and_their_output_only(page: Path) -> None:
    text = page.read_text()
    languages = [language for language, _ in FENCE.findall(text)]
    assert set(languages) <= {"python", "sh", "text"}
    assert all(before in ("python", "sh") for before, after in pairwise(["", *languages]) if after == "text")
    outside = FENCE.sub("", text)
    assert "```" not in outside, "a fence is not closed, or is indented"
    assert not re.search(r"^\n    \S", outside, re.MULTILINE), "an indented block of code is run by no test: fence it"
    assert not re.search(r"^(<{7}|>{7}) ", text, re.MULTILINE), "a conflict of a merge is not resolved"


@each_page
def test_code_of_a_page_has_80_columns(page: Path) -> None:
    """But for the address of a file."""
    fences = FENCE.findall(page.read_text())
    lines = [line for language, code in fences if language != "text" for line in code.splitlines()]
    assert [line for line in lines if len(line) > 80 and "://" not in line] == []


RENAMED = re.compile(r"^### Renamed\n.*?(?=^### )", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"(?<![\w./-])satrap(?:\.[A-Za-z_]\w*)+")


def has_name(name: str) -> bool:
    """Returns whether `name` is a module, or an attribute of one or of a class in it."""
    _, *parts = name.split(".")
    found: Any = importlib.import_module("satrap")
    path = "satrap"
    for part in parts:
        path += f".{part}"
        if hasattr(found, part):
            found = getattr(found, part)
        elif isinstance(found, ModuleType) and importlib.util.find_spec(path) is not None:
            found = importlib.import_module(path)
        else:
            return False
    return True


@pytest.mark.parametrize("page", [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *pages()], ids=relative)
def test_every_name_of_the_package_exists(page: Path) -> None:
    """Names in code spans, but for those that the changelog lists as renamed, and the keys of files' metadata."""
    text = FENCE.sub("", RENAMED.sub("", page.read_text()))
    names = {name for span in re.findall(r"`([^`]+)`", text) for name in NAME.findall(span)}
    assert not {name for name in names if not has_name(name)}


# -- Python ----------------------------------------------------------------------------------------------------------


def missing_files(text: str) -> list[str]:
    """The files of deploy/, or of another folder of the repository, that a text names between backticks and that do not
    exist. YAML is named without its folder, too."""
    named = re.findall(r"`((?:benchmarks|core|deploy|docs|examples|src|tests)/[\w./*-]+|[\w./-]+\.yaml)`", text)
    return [name for name in named if not [*ROOT.glob(name.rstrip("/")), *(ROOT / "deploy").rglob(Path(name).name)]]


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *pages()], ids=relative)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert missing_files(page.read_text()) == []
    assert missing_files("`deploy/gke/queue.yaml` `trainers.yaml` `src/none.py`") == ["trainers.yaml", "src/none.py"]


@contextmanager
def clicks() -> Iterator[dict[str, str]]:
    the_clicks()
    yield {}


@contextmanager
def adult() -> Iterator[dict[str, str]]:
    Path("examples").symlink_to(ROOT / "examples")
    yield {}


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Servers and a worker with keys at the addresses of the page; this process is the only trainer of its group."""
    create_keys("keys")
    own, client = Keys.read("keys/server.key"), Keys.read("keys/client.key")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Service(Server(num_threads=1, checkpoints=["/"]), ServerCalls, LOOPBACK, own))
            for _ in range(3)
        ]
        host = WorkerService(keys=client, num_threads=1, data=["/"])
        stack.callback(host.close)
        worker = stack.enter_context(Service(host, WorkerCalls, LOOPBACK, own, num_threads=4))
        group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in group.items():
            patch.setenv(name, value)
        stack.callback(torch.distributed.destroy_process_group)
        named = ("tcp://10.0.0.5:5555", "tcp://10.0.0.6:5555", "tcp://10.0.0.8:5555", "tcp://10.0.0.7:5556")
        yield dict(zip(named, [each.address for each in [*servers, worker]], strict=True))


@contextmanager
def nothing() -> Iterator[dict[str, str]]:
    yield {}


SETUP: dict[str, Callable[[], Any]] = {
    "docs/training.md": clicks,
    "docs/sources.md": clicks,
    "docs/loops.md": clicks,
    "docs/checkpoints.md": clicks,
    "docs/gpu.md": clicks,
    "docs/tutorial.md": adult,
    "docs/by-hand.md": cluster,
}


def after_training(namespace: dict[str, Any]) -> None:
    given = torch.ones(7, 2), torch.ones(7, 24), torch.ones(7, 2, 8)
    assert torch.export.load("model.pt2").module()(*given[:2]).shape == (7,)
    ranker = namespace["ranker"]
    torch.testing.assert_close(namespace["program"].module()(*given), ranker.score(*given))
    assert ranker.base is not namespace["model"] and (ranker.score(*given) != ranker.base(*given[:2])).all()


def after_checkpoints(namespace: dict[str, Any]) -> None:
    assert namespace["embeddings"].step == 40 and sorted(os.listdir("item-run"))[-1].endswith("step-40")


def after_gpu(namespace: dict[str, Any]) -> None:
    assert namespace["embeddings"].step == 41 and namespace["looked_up"].embeddings.shape == (512, 48)
    assert sorted(os.listdir("gpu-run"))[-1].endswith("step-40") and len(namespace["embeddings"].tables["item"]) > 100


CHECKS: dict[str, Callable[[dict[str, Any]], None]] = {
    "docs/training.md": after_training,
    "docs/checkpoints.md": after_checkpoints,
    "docs/gpu.md": after_gpu,
}


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning")
@pytest.mark.parametrize("page", [page for page in pages() if blocks(page, "python")], ids=relative)
def test_the_python_of_a_page_runs_as_written(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "page"}
    with SETUP.get(relative(page), nothing)() as replaced, closing(namespace):
        for code, output in with_output(page, "python"):
            for written, real in replaced.items():
                code = code.replace(written, real)
            exec(compile(code, relative(page), "exec"), namespace)
            out, err = capsys.readouterr()
            out = re.sub(r"[^\n]*\r[^\n]*\n?", "", out)  # without Lightning's bars
            printed = out or "".join(err.splitlines(keepends=True)[-1:] if output else [])
            assert is_output(printed, output), f"{code}\nprinted:\n{printed}"
        if relative(page) in CHECKS:
            CHECKS[relative(page)](namespace)


@contextmanager
def closing(namespace: dict[str, Any]) -> Iterator[None]:
    """Closes what a page has left open, the last first."""
    try:
        yield
    finally:
        for value in reversed(list(namespace.values())):
            if type(value).__name__ in ("Embeddings", "Reader"):
                value.close()


def test_the_readme_is_short() -> None:
    page = ROOT / "README.md"
    assert len(page.read_text().splitlines()) <= 72
    assert all(len(code.splitlines()) <= 18 for code in blocks(page, "python"))


def test_the_pages_are_short() -> None:
    """All but those of docs/internals together."""
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/reference/*.md")]
    assert sum(len(page.read_text().split()) for page in files) < 60_000


# -- commands --------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[str]:
    """The command lines of a page, comments left out and continued lines joined."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if not line.startswith("#")]


def the_clicks() -> None:
    subprocess.run([sys.executable, ROOT / "examples/make_clicks.py"], check=True, timeout=300)


def the_examples() -> None:
    Path("examples").symlink_to(ROOT / "examples")


PREPARED = {"docs/training.md": the_clicks, "docs/planning.md": the_examples}
"""What the commands read whose output a page shows. That of `satrap status` is an example: it needs a live run."""
SHOWN = [
    (relative(page), code, output)
    for page in pages()
    for code, output in with_output(page, "sh")
    if output and code.strip() != "satrap status"
]


@pytest.mark.parametrize(("page", "code", "output"), SHOWN, ids=[code.split("\n")[0] for _, code, _ in SHOWN])
def test_the_output_of_a_command_is_what_it_prints(
    page: str, code: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    PREPARED[page]()
    program, *arguments = shlex.split(code.replace("\\\n", " "))
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and is_output(done.stdout, output), f"{done.stdout}\n{done.stderr}"


EACH_COMMAND = sorted({line for page in [*pages(), ROOT / "CONTRIBUTING.md"] for line in commands(page)})


@pytest.mark.parametrize("line", EACH_COMMAND)
def test_a_command_of_a_page_is_one_that_is_taken(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(line)
    known = {"satrap": is_taken_by_satrap, "make": is_a_target, "pip": is_an_extra, "ray": is_a_job_of_satrap}
    known |= dict.fromkeys(("docker", "kubectl", "gcloud", "helm", "openssl"), names_files_that_exist)
    name = Path(program).name
    if name in known:
        known[name](arguments, monkeypatch)
    elif name in ("python", "python3", "ninja", "pytest", "torchrun") or program.startswith(("tests/", "build/")):
        for each in arguments:
            written = "/" in each and not each.startswith(("build", "-")) and "<" not in each
            assert not written or (ROOT / each.partition(" ")[0]).exists(), f"{each} is no file of the repository"
    else:
        pytest.fail(f"{program} is no command that this test knows")


def is_taken_by_satrap(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsed by the real parser; what it would start is replaced."""
    started: list[Any] = []

    def start(given: Any, _: object) -> int:
        started.append(given)
        return 0

    def lines(given: Any) -> list[str]:
        started.append(given)
        return []

    monkeypatch.setattr("satrap.cli.run_command.run_script", start)
    monkeypatch.setattr("satrap.cli.trainer_command.check_trainer", started.append)
    monkeypatch.setattr("satrap.cli.trainer_command.run_script_as_trainer", lambda *_: None)
    monkeypatch.setattr("satrap.cli.plan_command.print_plan", start)
    monkeypatch.setattr(command_line, "_output_lines", lines)
    assert command_line.main(arguments) == 0
    assert [each.command for each in started] == arguments[:1]


def is_a_job_of_satrap(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    at = arguments.index("--")
    assert arguments[: at + 1] == ["job", "submit", "--working-dir", ".", "--"] and arguments[at + 1] == "satrap"
    is_taken_by_satrap(arguments[at + 2 :], monkeypatch)


def names_files_that_exist(arguments: list[str], _: pytest.MonkeyPatch) -> None:
    """Files of deploy/, of which pages name no others."""
    assert all((ROOT / each).exists() for each in arguments if each.startswith("deploy/"))


def is_a_target(arguments: list[str], _: pytest.MonkeyPatch) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert next(each for each in arguments if "=" not in each and not each.startswith("-")) in targets


def is_an_extra(arguments: list[str], _: pytest.MonkeyPatch) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert arguments[0] == "install"
    for each in arguments[1:]:
        if found := re.fullmatch(r"\.\[(.*)\]", each):
            assert set(found[1].split(",")) <= set(extras)


@pytest.mark.parametrize("line", RUN)
def test_a_short_command_runs(line: str, tmp_path: Path) -> None:
    assert line in EACH_COMMAND
    program = Path(sys.executable).with_name("satrap")
    command = [str(program), *shlex.split(line)[1:]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout, done.stderr


# -- the site ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, where a warning is an error, and return its folder."""
    pytest.importorskip("material", reason="`make docs` needs mkdocs-material: pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_has_every_page(site: Path) -> None:
    for page in pages()[1:]:
        assert (site / relative(page).removeprefix("docs/").replace(".md", ".html")).is_file()


@pytest.mark.skipif(find_browser() is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH")
def test_a_site_in_a_folder_finds_words_without_a_network(site: Path, tmp_path: Path) -> None:
    with running_browser(tmp_path) as browser:
        browser.open(site / "reference/tables.html")
        browser.evaluate("document.querySelector('.md-search__input').focus()")
        browser.call("Input.insertText", text="staleness")
        browser.call("Input.dispatchKeyEvent", type="keyUp", key="s")
        wait_until(lambda: browser.evaluate("document.querySelectorAll('.md-search-result__item').length"))
        assert browser.problems == []
        assert [each for each in browser.requests if not each.startswith(("file:", "data:"))] == []


@pytest.mark.skipif(find_browser() is None, reason=f"no browser: none of {', '.join(NAMES)} is on the PATH")
def test_figures_are_light_or_dark_as_the_page_is(site: Path, tmp_path: Path) -> None:
    """By the toggle of the site, whatever the system prefers."""
    with running_browser(tmp_path) as browser:
        for page, scheme in product(("default", "slate"), ("light", "dark")):
            browser.open(site / "internals/paper.html", scheme=scheme)
            browser.evaluate(f"document.body.dataset.mdColorScheme = '{page}'")
            figure = browser.evaluate("document.querySelector('img').getBoundingClientRect().toJSON()")
            assert (np.median(browser.picture(figure)) > 128) == (page == "default"), (page, scheme)


def test_every_page_is_reached_from_the_first() -> None:
    """Or, for a page of the reference, from the reference's first."""
    reference = ROOT / "docs/reference"
    described = set(reference.glob("*.md")) - {reference / "index.md"}
    others = set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs/index.md"} - described
    for first, linked in ((ROOT / "docs/index.md", others), (reference / "index.md", described)):
        text = first.read_text()
        assert all(f"({page.relative_to(first.parent).as_posix()})" in text for page in linked)


def test_the_figures_are_what_their_script_draws() -> None:
    """If not: python docs/figures.py."""
    drawn = runpy.run_path(str(ROOT / "docs/figures.py"))["figures"]()
    assert drawn == {name: (ROOT / "docs/figures" / name).read_text() for name in drawn}
