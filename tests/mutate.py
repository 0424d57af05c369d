"""Mutation testing: changes a module in one place at a time, and checks whether its tests notice.

    .venv/bin/python tests/mutate.py satrap.sharding.autoscaler tests/sharding/test_autoscaler.py

Prints each change that no test noticed, with its line. A person judges whether it matters (a change of a limit that
only saves time does not). No file is changed: each change runs in a fork, which imports the module from the changed
tree. For pure modules with quick tests; of a large module, `--draw 60` tries 60 changes, drawn at random by `--seed`
(1). Options that it does not know are pytest's, such as `-k`. It is not a test itself.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.USub: ast.UAdd,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


def changes_of(node: Any) -> Iterator[tuple[str, Any]]:
    """Yields the possible changes of a node, each with a description."""
    other: Any
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in SWAPS:
                other = deepcopy(node)
                other.ops[i] = SWAPS[type(op)]()
                yield f"{type(op).__name__} -> {SWAPS[type(op)].__name__}", other
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.UnaryOp | ast.AugAssign) and type(node.op) in SWAPS:
        other = deepcopy(node)
        other.op = SWAPS[type(node.op)]()
        yield f"{type(node.op).__name__} -> {type(other.op).__name__}", other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not left out", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        other = not node.value if isinstance(node.value, bool) else node.value + 1
        yield f"{node.value!r} -> {other!r}", ast.Constant(other)
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield f"{node.id} -> {NAMES[node.id]}", ast.Name(NAMES[node.id], node.ctx)
    if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Constant):
        for value in (True, False) if not isinstance(node, ast.While) else (False,):
            other = deepcopy(node)
            other.test = ast.Constant(value)
            yield f"condition is {value}", other
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break):
        yield f"{type(node).__name__} left out", ast.Pass()
    elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        yield "call left out", ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "returns None", ast.Return(ast.Constant(None))


class Replace(ast.NodeTransformer):
    """Applies the change of that number to a tree."""

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0
        self.what = ""

    def visit(self, node: ast.AST) -> Any:
        if (
            isinstance(node, ast.keyword) and node.arg == "strict"
        ):  # an argument of zip that only guards against our own mistakes
            return node
        if isinstance(node, ast.Assert):
            return node
        if isinstance(node, ast.AnnAssign):
            node.value = None if node.value is None else self.visit(node.value)
            return node
        for what, other in changes_of(node):
            self.count += 1
            if self.count == self.number:
                self.what = f"line {node.lineno}: {what}"  # type: ignore[attr-defined]
                return ast.copy_location(other, node)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):  # annotations, defaults and decorators are not changed
            node.body = [each for each in map(self.visit, node.body) if each is not None]
            return node
        return self.generic_visit(node)


class Changed(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Imports one module from a changed tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname != self._name:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def get_source(self, fullname: str) -> str:
        return self._path.read_text()

    def get_code(self, fullname: str) -> Any:
        return compile(self._tree, str(self._path), "exec")


def noticed(name: str, path: Path, tree: ast.Module, tests: Sequence[str], seconds: float) -> bool:
    """Runs the tests in a fork that has the changed module. Returns whether one failed, or hung."""
    import pytest

    child = os.fork()
    if child == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.meta_path.insert(0, Changed(name, path, tree))
        status = 1
        try:
            options = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "--hypothesis-profile=mutation"]
            status = int(pytest.main([*options, *tests]))
        finally:
            os._exit(status != 0)
    fd = os.pidfd_open(child)
    in_time = bool(select.select([fd], [], [], seconds)[0])
    os.close(fd)
    if not in_time:
        os.killpg(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] != 0


def others_loaded_by(tests: Sequence[str]) -> list[str]:
    """Returns the modules of other packages that the tests load, so that forks need not."""
    import pytest

    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        try:
            pytest.main(["--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider", *tests])
            own = {each.stem for each in Path("tests").rglob("*.py")}
            found = [each for each in sys.modules if each.split(".")[0] not in {"satrap", "tests", "__main__", *own}]
            with open(writes, "w") as file:
                file.write("\n".join(found))
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads) as file:
        found = file.read().split("\n")
    os.waitpid(child, 0)
    return found


def main(name: str, tests: Sequence[str], options: argparse.Namespace) -> int:
    import hypothesis  # noqa: F401  once, for all forks
    import numpy  # noqa: F401
    import torch  # noqa: F401

    sys.path[:0] = [".", "tests", "tests/support"]
    for each in others_loaded_by(tests):
        with suppress(Exception):
            importlib.import_module(each)
    path = Path("src", *name.split(".")).with_suffix(".py")
    source = path.read_text()
    if noticed(name, path, ast.parse(source), tests, options.seconds):
        raise SystemExit(f"{' '.join(tests)} fail without any change; expected green tests of {name}")
    every = Replace(0)  # counts the changes
    every.visit(ast.parse(source))
    numbers = list(range(1, every.count + 1))
    if options.draw is not None and options.draw < len(numbers):
        numbers = sorted(random.Random(options.seed).sample(numbers, options.draw))
    lines, num_left = source.splitlines(), 0
    for number in numbers:
        replace = Replace(number)
        tree = ast.fix_missing_locations(replace.visit(ast.parse(source)))
        if not noticed(name, path, tree, tests, options.seconds):
            num_left += 1
            line = int(replace.what.split()[1].rstrip(":"))
            print(f"{name} {replace.what}\n    {lines[line - 1].strip()}", flush=True)
    print(f"{name}: {len(numbers)} of {every.count} changes, {num_left} not noticed", flush=True)
    return num_left


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("module")
    made.add_argument("--draw", type=int)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--seconds", type=float, default=120.0, help="a change that makes the tests longer is noticed")
    return made


if __name__ == "__main__":
    known, others = parser().parse_known_args()
    raise SystemExit(main(known.module, others, known) > 0)
