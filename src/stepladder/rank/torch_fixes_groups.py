"""Changes to how torch makes process groups and begins collectives; see torch_fixes.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FrameType, FunctionType
from typing import Any

from stepladder_exchange.after_import import call_after_import
from stepladder_exchange.torch_fixes_store import make_store_of_one_group

C10D_MODULE = "torch.distributed.distributed_c10d"
NEW_GROUP = "new_group "  # how the call of a stack begins that tells the members of a new group
MAX_MEMBERS_NAMED = 8
# Functions that only ask something of a group.
QUESTIONS = ("get_backend", "get_backend_config", "get_rank", "get_world_size")


@contextmanager
def calling_before_collectives(callback: Callable[[FrameType], None]) -> Iterator[None]:
    """Call a function with the frame of each collective that begins in the block.

    Each collective asks first whether this process is in its group. Seen with torch 2.13.
    """
    from torch.distributed import distributed_c10d as c10d

    ask = c10d._rank_not_in_group

    def ask_after_callback(group: Any) -> bool:
        frame = sys._getframe(1)
        if frame.f_code.co_name not in QUESTIONS:
            callback(frame)
        return ask(group)

    c10d._rank_not_in_group = ask_after_callback
    try:
        yield
    finally:
        c10d._rank_not_in_group = ask


def make_groups_by(load_function: Callable[[], Callable[..., Any]]) -> None:
    """Make torch create the process groups of this process by a function, from now on.

    torch has no setting for the class of its groups, or for the back end behind the name "gloo".
    Where torch is not imported yet, its import stays the script's. Seen with torch 2.11 to 2.15.

    Args:
        load_function: Returns the function when a group is to be made. The function is called with
            a store, a rank and a number of ranks, as torch's class is.
    """

    def replace_helper(c10d: Any) -> None:
        make_backends = c10d._new_process_group_helper
        if hasattr(make_backends, "__wrapped__"):
            return

        @wraps(make_backends)
        def make_by_function(
            size: int,
            rank: int | None,
            members: Sequence[int],
            backend: Any,
            store: Any,
            name: str,
            *args: Any,
            **options: Any,
        ) -> Any:
            make_group = load_function()
            if members and rank is not None:  # a new group, and this rank is in it
                store = make_store_of_one_group(store, rank, name)
            torch_class = c10d.ProcessGroup
            vars(c10d)["ProcessGroup"] = _GroupClass(torch_class, make_group)
            try:
                return make_backends(size, rank, members, backend, store, name, *args, **options)
            finally:
                vars(c10d)["ProcessGroup"] = torch_class

        vars(c10d)["_new_process_group_helper"] = make_by_function

    call_after_import(C10D_MODULE, replace_helper)


class _GroupClass:
    """Looks like torch's class of process groups, but creates them by a function."""

    def __init__(self, torch_class: Any, make_group: Callable[..., Any]) -> None:
        self._torch_class = torch_class
        self._make_group = make_group

    def __call__(self, *args: Any) -> Any:
        return self._make_group(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch_class, name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._torch_class)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self._torch_class)


def name_groups_in_stacks() -> None:
    """Make the stack of a rank that forms a group tell its number and its members, from now on.

    Ranks that form their groups in different orders wait at one and the same line, so the line does
    not tell them apart. A stack shows no arguments, but the name of a function, which is therefore
    changed. Seen with torch 2.13.
    """
    call_after_import(C10D_MODULE, _name_groups)


def _name_groups(c10d: Any) -> None:
    form_group = getattr(c10d, "_new_group_with_tag", None)
    if form_group is None or hasattr(form_group, "__wrapped__"):
        return  # torch has no such function, or is patched already
    formed: list[str] = []

    @wraps(form_group)
    def form_named_group(ranks: Sequence[int] | None = None, *args: Any, **options: Any) -> Any:
        def call() -> Any:
            return form_group(ranks, *args, **options)

        after = f", after that of {formed[-1]}" if formed else ""
        formed.append(describe_members(ranks))
        name = f"{NEW_GROUP}{len(formed)} of {formed[-1]}{after}"
        code = call.__code__.replace(co_name=name, co_qualname=name)
        return FunctionType(code, globals(), name, None, call.__closure__)()

    vars(c10d)["_new_group_with_tag"] = form_named_group


def describe_members(ranks: Sequence[int] | None) -> str:
    """Return the ranks of a group in words; None are all ranks."""
    if ranks is None:
        return "all ranks"
    members = [str(rank) for rank in sorted(ranks)]
    if len(members) > MAX_MEMBERS_NAMED:
        shown = ", ".join(members[: MAX_MEMBERS_NAMED - 1])
        return f"ranks {shown}, ..., {members[-1]} ({len(members)} ranks)"
    return f"{'rank' if len(members) == 1 else 'ranks'} {', '.join(members)}"
