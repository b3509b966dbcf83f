"""Putting a wrapper in place of a function, wherever it is known by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar


def wrap(owners: Any, name: str, around: Callable[..., Any]) -> None:
    """`around(original, *args, **kwargs)` takes the place of `owner.name`. owners: one or several."""
    owners = owners if isinstance(owners, list) else [owners]
    original = getattr(owners[0], name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    for owner in owners:
        if getattr(owner, name, None) is original or owner is owners[0]:
            setattr(owner, name, wrapper)


def argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any = None
) -> Any:
    """An argument that may come by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


P = ParamSpec("P")
R = TypeVar("R")


def careful(default: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """What looks at a user's objects must never fail his script: where it cannot look, it has seen
    `default()`.
    """

    def around(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def looked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except Exception:
                seen: R = default()
                return seen

        return looked

    return around
