"""Replacing functions by wrappers, under every name by which they are known."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar, cast

from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.probe.events import ProbeEvent
from stepladder_exchange.after_import import call_after_import


class NestingDepth:
    """Tells the calls of a script from those that a running call makes itself."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


Fields = dict[str, Any]  # of an event, or arguments by name
F = TypeVar("F", bound=Callable[..., Any])


@dataclass
class WrappedCall:
    """A call of a function that has a wrapper.

    Args:
        original: The function.
        args: The arguments by position.
        kwargs: The arguments by name.
    """

    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Fields

    def run(self) -> Any:
        """Call the function, and return its result."""
        return self.original(*self.args, **self.kwargs)

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        """Return an argument that is passed by position or by name."""
        if len(self.args) > index:
            return self.args[index]
        return self.kwargs.get(name, default)

    def with_argument(self, index: int, name: str, value: Any) -> WrappedCall:
        """Return the call with another value of one argument."""
        if len(self.args) > index:
            args = (*self.args[:index], value, *self.args[index + 1 :])
            return WrappedCall(self.original, args, self.kwargs)
        return WrappedCall(self.original, self.args, {**self.kwargs, name: value})


Around = Callable[[WrappedCall], Any]
MakeEvent = Callable[[WrappedCall], ProbeEvent | None]


def wrap(owners: Any, name: str, around: Around) -> None:
    """Replace `owner.name` by a function that calls `around` with each call of it.

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
        return around(WrappedCall(original, args, kwargs))

    for owner in all_owners:
        has_original = getattr(owner, name, None) is original
        if owner is first or has_original:
            setattr(owner, name, wrapper)


def wrap_after_import(module: str, path: str, around: Around) -> None:
    """Wrap a function of a module, or a method of its class, once the module is imported."""
    *owners, name = path.split(".")

    def wrap_in(imported: Any) -> None:
        wrap(attrgetter(*owners)(imported) if owners else imported, name, around)

    call_after_import(module, wrap_in)


def recorder(make_event: MakeEvent, by_user_only: bool = False) -> Around:
    """Return a wrapper that records each call, or only those by the user's own code.

    Args:
        make_event: Returns the event of a call; None for a call that is left out.
        by_user_only: Whether calls by libraries are left out.
    """

    def record_and_call(call: WrappedCall) -> Any:
        log = current_log()
        if not by_user_only or log.is_called_by_user():
            event = make_event(call)
            if event is not None:
                log.write_with_line(event)
        return call.run()

    return record_and_call


def record_calls(owners: Any, name: str, make_event: MakeEvent) -> None:
    wrap(owners, name, recorder(make_event))


def record_user_calls(owners: Any, name: str, make_event: MakeEvent) -> None:
    wrap(owners, name, recorder(make_event, by_user_only=True))


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
