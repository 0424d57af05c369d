"""Leaves members that packages of Satrap use, and users do not, out of `dir` and so out of completion by tab."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def internal(names: str) -> Callable[[T], T]:
    """Return a decorator that hides members of a class, and those that begin with an underscore, from `dir` of its
    objects, and these members from docs/reference.

    names: the members' names, with spaces between them."""

    def hide(cls: T) -> T:
        decorated: Any = cls
        listed, hidden = decorated.__dir__, tuple(names.split())

        def shown(self: object) -> Iterable[str]:
            names = (name for name in listed(self) if name not in hidden)
            return [name for name in names if not name.startswith("_") or name.startswith("__")]

        decorated.__dir__, decorated._internal = shown, hidden
        return cls

    return hide
