"""Paths that people give, checked in one place before anything is done with them."""

from __future__ import annotations

from pathlib import Path

from stepladder.core.errors import InputError, reason_of

A_PATH = (
    "a path of printable characters, shorter than 4,096, with fewer than 256 names shorter than 256"
)
SAFE_PATH = "PYTHONSAFEPATH"  # keeps the current folder, or a script's, out of sys.path
FOR_FORK_SERVER = "of stepladder's fork server"  # its value, where it is not the user's
MOST_NAMES = 256  # Python makes folders one within the other


def usable(what: str, text: str) -> Path:
    """The path that `text` is, whether or not something is there. what: a flag or an argument, for
    the message.

    Raises InputError where nothing can be there, or nothing be seen: later, each question would be
    an error of its own."""
    if not text.strip() or not text.isprintable():
        raise InputError(f"{what} {text!r} is not a path", A_PATH)
    path = Path(text)
    if len(path.parts) > MOST_NAMES:
        raise InputError(f"{what} is a path of {len(path.parts)} names", A_PATH)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise InputError(f"{what} {text}: {reason_of(error)}", A_PATH) from error
    return path
