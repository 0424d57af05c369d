"""Leaves members that packages of Satrap use, and users do not, out of `dir` and so out of completion by tab."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T", bound=type)


def internal(names: str) -> Callable[[T], T]:
    """Return a decorator that hides members of a class from `dir` of its objects, and from docs/reference.

    names: the members' names, with spaces between them."""

    def hide(cls: T) -> T:
        decorated: Any = cls
        listed, hidden = decorated.__dir__, tuple(names.split())

        def shown(self: object) -> Iterable[str]:
            return [name for name in listed(self) if name not in hidden]

        decorated.__dir__, decorated._internal = shown, hidden
        return cls

    return hide
