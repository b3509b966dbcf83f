"""Objects that this package and others offer by name, as entry points of a group.

An installed package adds one in its pyproject.toml, for example a logger:

    [project.entry-points."stepladder.loggers"]
    csv = "csv_logger:CsvLogger"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepladder.core.errors import InputError, get_text

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def find_plugin(group: str, name: str, flag: str) -> EntryPoint:
    """Return the entry point of that name, without importing what it names.

    Args:
        group: The group of entry points.
        name: The name that the user has chosen.
        flag: The flag or key by which names are chosen, for error messages.

    Returns:
        The entry point.

    Raises:
        InputError: No installed package offers the name, or several do.
    """
    from importlib.metadata import entry_points  # late: it takes 15 ms, and few commands need it

    offered = entry_points(group=group)
    matches = {entry.value: entry for entry in offered if entry.name == name}
    if not matches:
        names = ", ".join(sorted(offered.names))
        hint = f"{flag}, one of {names}" if names else f"pip install the package that has {name}"
        raise InputError(f"{flag} {name!r} is unknown", hint)
    if len(matches) > 1:
        raise InputError(
            f"{flag} {name!r} has several meanings: {', '.join(sorted(matches))}",
            "pip uninstall all but one of these packages",
        )
    return next(iter(matches.values()))


def load_plugin(group: str, name: str, flag: str) -> Any:
    """Import the object of that name, see `find_plugin`.

    Returns:
        The object.

    Raises:
        InputError: It cannot be imported.
    """
    entry = find_plugin(group, name, flag)
    try:
        return entry.load()
    except Exception as error:  # the code of another package may raise anything
        reason = get_text(error).partition("\n")[0]
        raise InputError(
            f"{flag} {name}: {entry.value} cannot be imported: {type(error).__name__}: {reason}",
            f'python -c "import {entry.module}"',
        ) from error
