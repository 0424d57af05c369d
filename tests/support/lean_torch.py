"""Keeps a short-lived process of a test from importing torch's compiler, which takes longer than all that the process
does: torch imports it at the first optimizer only to exclude functions from compilation."""

import sys
from types import ModuleType
from typing import Any


class _NoCompiler(ModuleType):
    """Stands for `torch._dynamo`: excluding a function from compilation returns the function."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _NoCompiler(name)

    def __call__(self, function: object = None, *_: object, **__: object) -> object:
        return function if callable(function) else None


def skip_compiler() -> None:
    """Call before the first optimizer, in a job that compiles nothing."""
    sys.modules.setdefault("torch._dynamo", _NoCompiler("torch._dynamo"))
