"""A file that a person has named for output.

It is written through links, and into a device, a pipe or stdout as they are.

Only a regular file is replaced, and never left half written; as root, /dev/null would be gone
otherwise.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from stepladder.core import durable
from stepladder.core.errors import InputError, as_input_error

STDOUT = 1
STDERR = 2
HEAD_BYTES = 512


def validate_writable(path: Path, flag: str, mark: bytes = b"") -> None:
    """Check that `write_output` would not fail, as far as this is known before the work.

    Args:
        path: Where to write.
        flag: The flag that named the path, for messages.
        mark: What stands at the head of each earlier output, and in no file of others, which is
            not replaced.

    Raises:
        InputError: It cannot be written, or is a file of others.
    """
    failed = f"{flag} {path} cannot be written"
    target = Path(os.path.realpath(path))
    with as_input_error(failed, f"{flag} FILE, in a folder that you can write to"):
        if path.is_dir():
            raise InputError(f"{failed}: it is a folder", f"{flag} {path / 'FILE'}")
        if not target.parent.is_dir():
            raise InputError(f"{failed}: there is no such folder", f"mkdir -p {path.parent}")
        if target.is_symlink():  # links in a circle, for which stat raises
            target.stat()
        stream = _find_stream(path)
        if not os.access(path if stream else target.parent, os.W_OK):
            raise InputError(f"{failed}: Permission denied", f"{flag} FILE, in a folder of yours")
        if mark and not stream and path.exists():
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
            if head and mark not in head:
                raise InputError(
                    f"{flag} {path} is there already, and is no earlier output of stepladder",
                    f"{flag} FILE, which is new",
                )


def write_output(path: Path, text: str, flag: str) -> None:
    """Write a text as UTF-8 in every locale; bytes of names that are no UTF-8 are escaped.

    Args:
        path: Where to write.
        text: What to write.
        flag: The flag that named the path, for messages.

    Raises:
        InputError: It cannot be written.
    """
    validate_writable(path, flag)
    data = text.encode(errors="backslashreplace")
    with as_input_error(f"{flag} {path} cannot be written", f"{flag} FILE, where there is space"):
        stream = _find_stream(path)
        if stream is None:
            durable.write(Path(os.path.realpath(path)), data)
        else:
            with open(stream, "wb", closefd=not isinstance(stream, int)) as file:
                file.write(data)


def _find_stream(path: Path) -> Path | int | None:
    """Return what must be opened and not replaced, or None for a regular file.

    Stdout and stderr are returned by their number, even if they are regular files; a device or a
    pipe by its path.
    """
    for number in (STDOUT, STDERR):
        with suppress(OSError):  # the stream is closed, or nothing is at the path
            if os.path.samestat(os.fstat(number), path.stat()):
                return number
    return path if path.exists() and not path.is_file() else None
