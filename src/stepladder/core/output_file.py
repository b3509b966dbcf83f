"""A file that a person has named for output: through links, and into a device, a pipe or stdout as
they are.

Only a regular file is replaced, and whole; as root, /dev/null would be gone otherwise.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from stepladder.core import durable
from stepladder.core.errors import InputError, naming


def refuse_unwritable(path: Path, flag: str) -> None:
    """Raises InputError where `write_output` would, as far as can be seen before the work that it
    is for.
    """
    failed, target = f"{flag} {path} cannot be written", Path(os.path.realpath(path))
    with naming(failed, f"{flag} FILE, in a folder that you can write to"):
        if path.is_dir():
            raise InputError(f"{failed}: it is a folder", f"{flag} {path / 'FILE'}")
        if not target.parent.is_dir():
            raise InputError(f"{failed}: there is no such folder", f"mkdir -p {path.parent}")
        if target.is_symlink():  # links in a circle
            target.stat()
        if not os.access(path if _open_as(path) else target.parent, os.W_OK):
            raise PermissionError("Permission denied")


def write_output(path: Path, text: str, flag: str) -> None:
    """As UTF-8 in every locale, and with \\udc80 for a byte of a name that is none. Raises
    InputError.
    """
    refuse_unwritable(path, flag)
    data = text.encode(errors="backslashreplace")
    with naming(f"{flag} {path} cannot be written", f"{flag} FILE, where there is space"):
        there = _open_as(path)
        if there is None:
            durable.write(Path(os.path.realpath(path)), data)
        else:
            with open(there, "wb", closefd=not isinstance(there, int)) as stream:
                stream.write(data)


def _open_as(path: Path) -> Path | int | None:
    """What is not replaced: stdout or stderr by its number, also where that is a file; else no
    regular file.
    """
    for number in (1, 2):
        with suppress(OSError):  # it is closed, or nothing is at the path
            if os.path.samestat(os.fstat(number), path.stat()):
                return number
    return path if path.exists() and not path.is_file() else None
