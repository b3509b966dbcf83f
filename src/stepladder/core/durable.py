"""Files and folders that are whole or absent, whatever happens while they are written.

Written aside, fsynced, renamed, and the rename fsynced too: a reader finds the old one or the new
one, after a kill as after a power cut. Aside means beside it, under a name that no other writer can
have; what a killed writer left there ends in `.tmp`, and goes with `remove_unfinished`.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from stepladder.core.errors import as_input_error
from stepladder.core.safe_open import open_without_links

UNFINISHED_SUFFIX = ".tmp"
REPLACED_SUFFIX = ".old"
MAX_NAME_LETTERS = 60  # of the file, within a temporary name: a name has 255 bytes at most


def write(path: Path, data: bytes | str, fsync: bool = True, mode: int | None = None) -> None:
    """Write a file, in place of the one that was there.

    Args:
        path: The file.
        data: Its contents; a text is written as UTF-8.
        fsync: False if the file need not survive a power cut, and the disk's milliseconds matter.
        mode: The file's mode, whatever the umask says.

    Raises:
        OSError: It cannot be written; the old file is still there.
    """
    data = data.encode() if isinstance(data, str) else data
    with (
        replace_file(path, fsync) as temporary,
        os.fdopen(open_without_links(temporary, os.O_WRONLY), "wb") as file,
    ):
        file.write(data)
        if mode is not None:
            _set_mode(file.fileno(), temporary, mode)


@contextmanager
def replace_file(path: Path, fsync: bool = True) -> Iterator[Path]:
    """Yield an empty file that replaces `path` at the end of the block, unless the block raises.

    The new file has the mode of the old one, or the one that the umask gives.

    Args:
        path: The file to replace.
        fsync: Whether the new file must survive a power cut.

    Yields:
        The path of the file to write.
    """
    with _temporary_path(path) as temporary:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with suppress(FileNotFoundError):
                _set_mode(file, temporary, stat.S_IMODE(path.stat().st_mode))
        finally:
            os.close(file)
        yield temporary
        if fsync:
            move(temporary, path)
        else:
            temporary.replace(path)


@contextmanager
def replace_folder(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Yield an empty folder that replaces `path` at the end of the block, unless the block raises.

    Meanwhile nobody but this user may enter it: somebody who shares `path.parent` can put no link
    in the place of its files.

    Args:
        path: The folder to replace.
        check: Called when all files are on disk; if it raises, `path` stays as it was.

    Yields:
        The path of the folder to fill.
    """
    with _temporary_path(path) as temporary:
        temporary.mkdir()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        _set_folder_mode(temporary, mode & ~(stat.S_IRWXG | stat.S_IRWXO))
        yield temporary
        _set_folder_mode(temporary, mode)
        _sync_tree(temporary)
        check()
        replaced = path.with_name(path.name + REPLACED_SUFFIX)
        # No folder can be renamed over another one. After a kill between the two renames,
        # `remove_unfinished` puts the old folder back.
        if os.path.lexists(path):
            path.rename(replaced)
        temporary.rename(path)
        sync(path.parent)
        with suppress(OSError):
            remove(replaced)


def move(source: Path, target: Path) -> None:
    """Rename a file, or a folder that replaces nothing, once all of it is on disk."""
    _sync_tree(source)
    source.replace(target)
    sync(target.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those above it; their names are on disk before anything is in them."""
    if not path.exists():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def remove_unfinished(parent: Path, prefix: str) -> None:
    """Remove what killed writers left behind. Only the one process that writes may call this.

    Args:
        parent: The folder in which they wrote.
        prefix: How the names of their files and folders begin.
    """
    for path in parent.glob(f"{prefix}*{UNFINISHED_SUFFIX}"):
        remove(path)
    for path in parent.glob(f"{prefix}*{REPLACED_SUFFIX}/"):
        original = path.with_suffix("")
        if original.exists():
            remove(path)
        else:
            path.rename(original)


def name_write_errors(path: Path, hint: str) -> AbstractContextManager[None]:
    """Raise the operating system's errors in the block as InputError that names the file."""
    return as_input_error(f"cannot write {path}", hint)


def _sync_tree(path: Path) -> None:
    """Write a file, or a folder with all that is in it, to the disk."""
    if path.is_dir():
        for entry in path.rglob("*"):
            sync(entry)
    sync(path)


def sync(path: Path) -> None:
    """Write a file's bytes, or a folder's names, to the disk."""
    if sys.platform == "win32" and path.is_dir():  # which opens no folders, and renames durably
        return
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists.

    rmtree opens what it is given, and would wait for the writer of a FIFO.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _set_mode(file: int, path: Path, mode: int) -> None:
    """Set the mode of an open file; by its path only on Windows, which knows no other way."""
    os.chmod(file if os.chmod in os.supports_fd else path, mode)  # noqa: PTH101


def _set_folder_mode(path: Path, mode: int) -> None:
    """Set the mode of a folder, except on a file system that has no modes of its own."""
    if stat.S_IMODE(path.stat().st_mode) != mode:
        with suppress(PermissionError):  # as on a mount with `file_mode` and `dir_mode`
            path.chmod(mode)


@contextmanager
def _temporary_path(path: Path) -> Iterator[Path]:
    """Yield a name beside `path`. After an error it is removed, and the error names `path`."""
    suffix = f".{os.urandom(4).hex()}{UNFINISHED_SUFFIX}"
    temporary = path.with_name(path.name[:MAX_NAME_LETTERS] + suffix)
    try:
        yield temporary
    except BaseException as error:
        with suppress(OSError):
            remove(temporary)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise
