"""Replacing functions by wrappers, under every name by which they are known."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.probe.events import ProbeEvent


class NestingDepth:
    """Tells the calls of a script from those that a running call makes itself."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


Arguments = tuple[Any, ...]  # by position
Fields = dict[str, Any]  # of an event, or arguments by name
F = TypeVar("F", bound=Callable[..., Any])


def wrap(owners: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by a call of `around(original, *args, **kwargs)`.

    Args:
        owners: One module or class, or a list of those that know the same function.
        name: The name of the function.
        around: The wrapper.
    """
    all_owners = owners if isinstance(owners, list) else [owners]
    first = all_owners[0]
    original = getattr(first, name, None)
    if original is None:
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    for owner in all_owners:
        has_original = getattr(owner, name, None) is original
        if owner is first or has_original:
            setattr(owner, name, wrapper)


def record_calls(
    owners: Any, name: str, make_event: Callable[..., ProbeEvent | None], by_user_only: bool = False
) -> None:
    """Record each call of `owner.name`, or only those by the user's own code.

    Args:
        owners: The modules or classes, as for wrap.
        name: The name of the function.
        make_event: Returns the event for the arguments of a call; None for a call that is left out.
        by_user_only: Whether calls by libraries are left out.
    """

    def record_and_call(original: Any, *args: Any, **kwargs: Any) -> Any:
        log = current_log()
        if not by_user_only or log.is_called_by_user():
            event = make_event(*args, **kwargs)
            if event is not None:
                log.write_with_line(event)
        return original(*args, **kwargs)

    wrap(owners, name, record_and_call)


record_user_calls = partial(record_calls, by_user_only=True)


def get_argument(args: Arguments, kwargs: Fields, index: int, name: str) -> Any:
    """Return an argument that is passed by position or by name, or None."""
    if len(args) > index:
        return args[index]
    return kwargs.get(name)


def default_on_error(default: Callable[[], Any]) -> Callable[[F], F]:
    """Make a function return `default()` where it raises.

    Functions of the probe that inspect a user's objects must never fail the user's script.
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call_or_default(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception:
                return default()

        return cast(F, call_or_default)

    return decorate
