"""Files of a data set that are on this machine: in a folder, in an archive, or a single file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from stepladder.core.errors import InputError
from stepladder.data.fetch.archive import is_archive, open_archive
from stepladder.data.fetch.catalog import DataSet, RemoteFile
from stepladder.data.local_files import validate_readable

Opener = Callable[[], Any]  # returns a stream of bytes


@contextmanager
def open_source(
    source: Path, dataset: DataSet, missing: list[RemoteFile]
) -> Iterator[dict[str, Opener]]:
    """Open a source for the block.

    Args:
        source: A folder, a zip or tar archive, or the single file, under any name.
        dataset: The data set of the files.
        missing: The files of it that the source must have.

    Yields:
        A function that opens the file, for each file of the source, by name.

    Raises:
        InputError: The source does not exist or lacks a file.
    """
    if not source.exists():
        raise InputError(
            f"there is no {source}", "give --from a folder, an archive or the file itself"
        )
    names = [file.name for file in dataset.files]
    with ExitStack() as stack:
        if source.is_dir():
            openers = _find_in_folder(source, names)
        else:
            validate_readable(source)
            openers = _find_in_file(source, names, stack)
        lacking = [file.name for file in missing if file.name not in openers]
        if lacking:
            raise InputError(
                f"{source} does not hold {', '.join(lacking)}",
                f"stepladder data get {dataset.name} --from PATH, a folder, an archive or the file"
                " itself",
            )
        yield openers


def _find_in_folder(folder: Path, names: list[str]) -> dict[str, Opener]:
    paths = [folder / name for name in names]
    return {path.name: partial(path.open, "rb") for path in paths if path.is_file()}


def _find_in_file(source: Path, names: list[str], stack: ExitStack) -> dict[str, Opener]:
    """Return openers for an archive's members, or for the file; `stack` closes the archive."""
    if source.name in names:
        return {source.name: partial(source.open, "rb")}
    openers: dict[str, Opener] = {}
    if is_archive(source):
        members = stack.enter_context(open_archive(source))
        for member in members:
            if member.is_file:
                openers[PurePosixPath(member.name).name] = member.open
    if len(names) == 1:  # the only file, perhaps an archive itself, under another name
        openers.setdefault(names[0], partial(source.open, "rb"))
    return openers
