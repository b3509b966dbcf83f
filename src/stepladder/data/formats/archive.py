"""Zip and tar archives: their members, and unpacking that cannot leave its folder."""

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
from stepladder.data.disk import MAKE_ROOM

# What reading a damaged archive can raise. RuntimeError is zipfile's for a password, and its
# subclass NotImplementedError for a compression it does not know.
DAMAGE_ERRORS = (zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError, RuntimeError)
ARCHIVE_ERRORS = (*DAMAGE_ERRORS, OSError)


@dataclass(frozen=True)
class ArchiveMember:
    """One entry; size in bytes; kind is "file", "folder" or "other" (links and devices)."""

    name: str
    size: int
    kind: str
    open: Callable[[], Any]  # of a file: a stream of its bytes


def is_archive(path: Path) -> bool:
    """Whether path is a zip or a tar (compressed or not), by its content."""
    try:
        if zipfile.is_zipfile(path):
            return True
        with path.open("rb") as file:
            begins = any(
                file.read(tarfile.BLOCKSIZE)
            )  # of a terabyte of zeros tarfile reads all, as empty xz
        return begins and tarfile.is_tarfile(path)
    except ARCHIVE_ERRORS:
        return False


@contextmanager
def open_archive(path: Path) -> Iterator[list[ArchiveMember]]:
    """The members of a zip or tar. InputError names the file when it is neither, or damaged."""
    archive: Any
    with as_input_error(f"cannot read {path}", "fetch it again", ARCHIVE_ERRORS):
        if zipfile.is_zipfile(path):
            archive = zipfile.ZipFile(path)
            members = [zip_member(archive, info) for info in archive.infolist()]
        else:
            archive = tarfile.open(path)  # noqa: SIM115 - closed below
            members = [tar_member(archive, info) for info in archive.getmembers()]
    with archive:
        yield members


def zip_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> ArchiveMember:
    kind = "folder" if info.filename.endswith("/") else "file"
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
        kind = "other"
    return ArchiveMember(info.filename, info.file_size, kind, partial(archive.open, info))


def tar_member(archive: tarfile.TarFile, info: tarfile.TarInfo) -> ArchiveMember:
    kind = "file" if info.isreg() else "folder" if info.isdir() else "other"
    return ArchiveMember(info.name, info.size, kind, partial(archive.extractfile, info))


def unpack(archive: Path, folder: Path) -> None:
    """Unpack archive into folder; files that are there with the right size are left alone.

    A leading `<folder name>/` in the members' names is dropped. The files are written to a
    temporary folder beside and renamed, so none is ever half there. InputError names a member that
    would land outside, a damaged archive, or the path that cannot be written; then folder is
    untouched."""
    with open_archive(archive) as members:
        refuse_escapes(archive, members)
        files = {m.name.removeprefix(f"{folder.name}/"): m for m in members if m.kind == "file"}
        there = ((folder / name, member.size) for name, member in files.items())
        if all(path.is_file() and path.stat().st_size == size for path, size in there):
            return
        with (
            durable.name_write_errors(folder, MAKE_ROOM),
            TemporaryDirectory(dir=folder.parent, prefix=".unpack-") as temp,
        ):
            fresh = Path(temp) / folder.name
            for name, member in files.items():
                write_member(archive, member, fresh / name)
            for name in files:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                durable.move(fresh / name, folder / name)


def refuse_escapes(archive: Path, members: list[ArchiveMember]) -> None:
    """InputError for the first member whose name or kind could reach outside the folder."""
    for member in members:
        path = PureWindowsPath(member.name)  # it knows both separators, and drives
        if member.kind == "other" or path.anchor or ".." in path.parts:
            raise InputError(
                f"{archive} is refused: its member {member.name!r} is a link or would land outside",
                "delete the archive and fetch it from a place you trust",
            )


def write_member(archive: Path, member: ArchiveMember, target: Path) -> None:
    """Write one member. InputError when its bytes are damaged, OSError for the disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        as_input_error(
            f"cannot unpack {member.name} of {archive}", "fetch it again", DAMAGE_ERRORS
        ),
        member.open() as stream,
        target.open("wb") as out,
    ):
        shutil.copyfileobj(stream, out)
