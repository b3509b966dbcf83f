"""Zip and tar archives: their members, and unpacking that cannot write outside of its folder."""

from __future__ import annotations

import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PureWindowsPath
from tempfile import TemporaryDirectory
from typing import Any

from stepladder.core import durable
from stepladder.core.errors import InputError, as_input_error
from stepladder.data.local_files import FULL_DISK_HINT

# What reading a damaged archive can raise. RuntimeError is zipfile's error for a password, and its
# subclass NotImplementedError for a compression that it does not know.
ARCHIVE_DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError)
ARCHIVE_ERRORS = (*ARCHIVE_DAMAGE, OSError)


@dataclass(frozen=True)
class _ArchiveMember:
    """An entry of an archive.

    Args:
        name: Its path in the archive.
        size: Its size in bytes.
        is_file: Whether it is a regular file.
        is_special: Whether it is neither a file nor a folder, but a link or a device.
        open: Returns a stream of a file's bytes.
    """

    name: str
    size: int
    is_file: bool
    is_special: bool
    open: Callable[[], Any]


def is_archive(path: Path) -> bool:
    """Return whether a file is a zip or a tar (compressed or not), by its content."""
    try:
        if zipfile.is_zipfile(path):
            return True
        # Of a file of zeros tarfile reads all, however long, and then calls it an empty xz.
        with path.open("rb") as file:
            begins_with_zeros = not any(file.read(tarfile.BLOCKSIZE))
        return not begins_with_zeros and tarfile.is_tarfile(path)
    except ARCHIVE_ERRORS:
        return False


@contextmanager
def open_archive(path: Path) -> Iterator[list[_ArchiveMember]]:
    """Open a zip or tar file for the block, and yield its members.

    Yields:
        The members in the order of the archive; they can be read until the block ends.

    Raises:
        InputError: The file is neither a zip nor a tar, or is damaged.
    """
    archive: Any
    with as_input_error(f"cannot read {path}", "fetch it again", ARCHIVE_ERRORS):
        if zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(path)
            members = [_make_zip_member(archive, info) for info in archive.infolist()]
        else:
            archive = tarfile.open(path)  # noqa: SIM115 - closed below
            members = [_make_tar_member(archive, info) for info in archive.getmembers()]
    with archive:
        yield members


def _make_zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> _ArchiveMember:
    # info.is_dir() fails on an empty name, which a damaged archive may have.
    is_folder = info.filename.endswith("/")
    is_special = stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR)
    is_file = not is_folder and not is_special
    opener = partial(archive.open, info)
    return _ArchiveMember(info.filename, info.file_size, is_file, is_special, opener)


def _make_tar_member(archive: tarfile.TarFile, info: tarfile.TarInfo) -> _ArchiveMember:
    is_special = not info.isreg() and not info.isdir()
    opener = partial(archive.extractfile, info)
    return _ArchiveMember(info.name, info.size, info.isreg(), is_special, opener)


def unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a folder, unless all files exist with the right size.

    A leading `<folder name>/` in the members' names is dropped. Files are written to a temporary
    folder and then renamed, so none is ever incomplete.

    Raises:
        InputError: The archive is damaged, a member would be written outside of the folder, or the
            folder cannot be written. Then the folder is unchanged.
    """
    with open_archive(archive) as members:
        _validate_members(archive, members)
        prefix = f"{folder.name}/"
        files = {member.name.removeprefix(prefix): member for member in members if member.is_file}
        if all(_has_size(folder / name, member.size) for name, member in files.items()):
            return
        with (
            durable.name_write_errors(folder, FULL_DISK_HINT),
            TemporaryDirectory(dir=folder.parent, prefix=".unpack-") as temporary,
        ):
            unpacked = Path(temporary) / folder.name
            for name, member in files.items():
                _write_member(archive, member, unpacked / name)
            for name in files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                durable.move(unpacked / name, folder / name)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _validate_members(archive: Path, members: list[_ArchiveMember]) -> None:
    """Raise InputError for the first member whose name or kind could reach outside the folder."""
    for member in members:
        path = PureWindowsPath(member.name)  # it knows both separators, and drives
        if member.is_special or path.anchor or ".." in path.parts:
            raise InputError(
                f"{archive} is refused: its member {member.name!r} is a link or would land outside",
                "delete the archive and fetch it from a source you trust",
            )


def _write_member(archive: Path, member: _ArchiveMember, target: Path) -> None:
    """Write a member to a file.

    Args:
        archive: The archive, for messages.
        member: The member.
        target: The file to write. Its folder is made.

    Raises:
        InputError: The member's bytes are damaged.
        OSError: The file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        as_input_error(
            f"cannot unpack {member.name} of {archive}", "fetch it again", ARCHIVE_DAMAGE
        ),
        member.open() as stream,
        target.open("wb") as output,
    ):
        shutil.copyfileobj(stream, output)
