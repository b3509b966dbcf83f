"""Files and folders that are whole or absent, whatever happens while they are written.

Written aside, fsynced, renamed, and the rename fsynced too: a reader finds the old one or the new
one, after a kill as after a power cut. Aside means beside it, under a name that no other writer can
have; what a killed writer left there ends in `.tmp`, and goes with `clear`."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from stepladder.core.errors import naming
from stepladder.core.own_file import open_own

UNFINISHED, REPLACED = ".tmp", ".old"


def write(path: Path, data: bytes | str, fsync: bool = True, mode: int | None = None) -> None:
    """Write the file anew. Raises OSError, and leaves what was there.

    fsync: False where a power cut need not be survived, and a disk's milliseconds would be felt.
    mode: whatever the umask says."""
    data = data.encode() if isinstance(data, str) else data
    with replacing(path, fsync) as aside, os.fdopen(open_own(aside, os.O_WRONLY), "wb") as file:
        file.write(data)
        if mode is not None:
            _set_mode(file.fileno(), aside, mode)


@contextmanager
def replacing(path: Path, fsync: bool = True) -> Iterator[Path]:
    """An empty file to be written in the block, which takes the place of `path` at its end, unless
    it raises.

    Its mode is that of the file before, or what the umask gives to a new one.
    """
    with _aside(path) as aside:
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with suppress(FileNotFoundError):
                _set_mode(file, aside, stat.S_IMODE(path.stat().st_mode))
        finally:
            os.close(file)
        yield aside
        if fsync:
            move(aside, path)
        else:
            aside.replace(path)


@contextmanager
def folder(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """An empty folder to be filled in the block, which takes the place of `path` at its end, unless
    it raises.

    check: called when all of it is on disk; what it raises keeps the folder from its place.
    """
    with _aside(path) as aside:
        aside.mkdir()
        yield aside
        sync_tree(aside)
        check()
        replaced = path.with_name(path.name + REPLACED)
        if os.path.lexists(
            path
        ):  # no folder can be renamed over it: killed in between, `clear` puts it back
            path.rename(replaced)
        aside.rename(path)
        sync(path.parent)
        with suppress(OSError):
            remove(replaced)


def move(source: Path, target: Path) -> None:
    """Give a file, or a folder that nothing is in the way of, its name, once all of it is on disk."""
    sync_tree(source)
    source.replace(target)
    sync(target.parent)


def make_folder(path: Path) -> None:
    """A folder with those above it, if it is not there; their names are on the disk before anything
    is in them.
    """
    if not path.exists():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def clear(parent: Path, prefix: str) -> None:
    """Remove what killed writers left of names in `parent` that begin with `prefix`. For the only
    writer.
    """
    for path in parent.glob(f"{prefix}*{UNFINISHED}"):
        remove(path)
    for path in parent.glob(f"{prefix}*{REPLACED}/"):
        if path.with_suffix("").exists():
            remove(path)
        else:
            path.rename(path.with_suffix(""))


def writing(path: Path, hint: str) -> AbstractContextManager[None]:
    """The operating system's errors in the block as InputError, with what could not be written and
    why.
    """
    return naming(f"cannot write {path}", hint)


def sync_tree(path: Path) -> None:
    for inside in path.rglob("*") if path.is_dir() else ():
        sync(inside)
    sync(path)


def sync(path: Path) -> None:
    """Onto the disk: a file's bytes, a folder's names."""
    if sys.platform == "win32" and path.is_dir():  # which opens no folders, and renames durably
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove(path: Path) -> None:
    """A file or a folder, if it is there. (rmtree opens what it is given, and would wait for a
    FIFO's writer.)
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _set_mode(file: int, path: Path, mode: int) -> None:
    """Set the mode of an open file; by its path only on Windows, which knows no other way."""
    os.chmod(file if os.chmod in os.supports_fd else path, mode)  # noqa: PTH101


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A name beside `path`; after an error nothing has it, and the error names `path` instead."""
    aside = path.with_name(
        f"{path.name[:60]}.{os.urandom(4).hex()}{UNFINISHED}"
    )  # a name has 255 bytes at most
    try:
        yield aside
    except BaseException as error:
        with suppress(OSError):
            remove(aside)
        if isinstance(error, OSError) and error.filename in (None, str(aside)):
            error.filename = str(path)
        raise
