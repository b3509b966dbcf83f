"""Fetching data sets: from mirrors with resume, or from files at hand; nothing unchecked gets a
name.
"""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from stepladder.core import durable
from stepladder.core.errors import InputError, as_input_error
from stepladder.data.disk import (
    MAKE_ROOM,
    Feedback,
    filled_folder,
    open_locked,
    refuse_no_file,
    sha256_of,
)
from stepladder.data.fetch.catalog import DataSet, RemoteFile
from stepladder.data.formats.archive import ARCHIVE_ERRORS, is_archive, open_archive, unpack

TIMEOUT_SECONDS = 30.0  # without a byte from the server
TRIES = 5  # for each mirror
CHUNK_BYTES = 1 << 18
NETWORK_ERRORS = (
    OSError,
    http.client.HTTPException,
    ValueError,
)  # ValueError: a redirect to nonsense

Opener = Callable[[], Any]  # a stream of bytes


def get(
    dataset: DataSet,
    target_dir: Path,
    source: Path | None = None,
    feedback: Feedback = Feedback(),  # noqa: B008 - frozen
) -> list[Path]:
    """Put the set's files into target_dir, from its mirrors or from source, and unpack archives.

    source is a folder, a zip or tar archive, or the single file. A file there with the right sha256
    is kept, one with a wrong sha256 is said and replaced. Returns the files' paths. InputError when
    no mirror or not the source has a right file, or when target_dir cannot be written."""
    wanted = [
        file for file in dataset.files if not is_right(file, target_dir / file.name, feedback)
    ]
    opened: AbstractContextManager[dict[str, Opener]]
    opened = open_source(source, dataset, wanted) if source else nullcontext({})
    with opened as held, filled_folder(target_dir, MAKE_ROOM):
        for file in wanted:
            with Part(file, target_dir) as part:
                if source:
                    copy(source, held[file.name], part, feedback)
                    feedback.say(f"{file.name}: copied {file.bytes:,} bytes")
                else:
                    feedback.say(f"{file.name}: fetching {file.bytes:,} bytes")
                    download(dataset, part, feedback)
    for file in dataset.files:
        if file.unpack:
            unpack(target_dir / file.name, unpacked_folder(file, target_dir))
    if dataset.build is not None:
        dataset.build(target_dir, feedback)
    return [target_dir / file.name for file in dataset.files]


def unpacked_folder(file: RemoteFile, target_dir: Path) -> Path:
    """Where an archive's files go: a folder with its name, without the ending."""
    return target_dir / file.name.split(".")[0]


def is_right(file: RemoteFile, path: Path, feedback: Feedback) -> bool:
    """Whether the file is there with the right sha256; tells the user what was found."""
    if not path.is_file():
        return False
    with as_input_error(f"cannot read {path}", "choose another --data-dir DIR"):
        right = sha256_of(path) == file.sha256
    feedback.say(
        f"{file.name}: here already" if right else f"{path}: the sha256 is wrong, replacing it"
    )
    return right


class SourceError(Exception):
    """A mirror or a local copy could not give the file; the text is the reason."""


class Part:
    """The .part file of `file` in `folder`, locked while open; `size` is its bytes so far.

    Opening goes on with the bytes an earlier run left. Full disks, unwritable folders and a second
    writer raise InputError and leave the bytes that were written.
    """

    def __init__(self, file: RemoteFile, folder: Path) -> None:
        self.file = file
        self.final = folder / file.name
        self.path = folder / f"{file.name}.part"

    def __enter__(self) -> Part:
        with durable.name_write_errors(self.path, MAKE_ROOM):
            self._out = open_locked(self.path)
            self._out.seek(0)
            self._hash = hashlib.file_digest(self._out, "sha256")
            self.size = self._out.tell()
        if self.size > self.file.bytes:
            self.restart()
        return self

    def __exit__(self, *_: object) -> None:
        if self.size == 0:
            self.path.unlink(missing_ok=True)
        self._out.close()

    def restart(self) -> None:
        """Drop all bytes."""
        with durable.name_write_errors(self.path, MAKE_ROOM):
            self._out.truncate(0)
        self._hash = hashlib.sha256()
        self.size = 0

    def write(self, chunk: bytes) -> None:
        """Append chunk. SourceError when the file grows beyond its known size."""
        if self.size + len(chunk) > self.file.bytes:
            self.restart()
            raise SourceError(f"more than the {self.file.bytes:,} bytes expected")
        rest = memoryview(chunk)
        with durable.name_write_errors(self.path, MAKE_ROOM):
            while rest:  # unbuffered: a disk that fills up takes the first bytes of a chunk only
                taken = self._out.write(rest)
                self._hash.update(rest[:taken])
                self.size += taken
                rest = rest[taken:]

    def place(self) -> None:
        """Give the file its final name. SourceError when it is not whole, or not right: then all is
        dropped.
        """
        if self.size < self.file.bytes:
            raise SourceError(f"stopped after {self.size:,} of {self.file.bytes:,} bytes")
        if self._hash.hexdigest() != self.file.sha256:
            self.restart()
            raise SourceError("the sha256 is wrong")
        with durable.name_write_errors(self.final, MAKE_ROOM):
            durable.move(self.path, self.final)


def fill(part: Part, read: Callable[[int], bytes], feedback: Feedback) -> None:
    """Append what is read, then give the file its name."""
    while chunk := read(CHUNK_BYTES):
        part.write(chunk)
        feedback.progress(part.file.name, part.size, part.file.bytes)
    part.place()


# -- from mirrors ----------------------------------------------------------------------------------


def download(dataset: DataSet, part: Part, feedback: Feedback) -> None:
    """Try each mirror in turn. InputError with every mirror's host and reason when none has it."""
    failures: dict[str, str] = {}
    for url in part.file.urls:
        for _ in range(TRIES):
            before = part.size
            try:
                receive(url, part, feedback)
                return
            except SourceError as error:
                failures[url] = f"{urlsplit(url).netloc}: {error}"
            if not (part.size > before or part.size == 0 < before):
                break  # again would help where it got further, or where old bytes were to blame
    raise InputError(
        f"no mirror gave {part.file.name} ({'; '.join(failures.values())})",
        f"try again later, or with files at hand: stepladder data get {dataset.name} --from PATH",
    )


def receive(url: str, part: Part, feedback: Feedback) -> None:
    """One request for the bytes the part still lacks. SourceError with the reason if it does not
    give them all.
    """
    if part.size == part.file.bytes:  # a server would answer an empty range with an error
        part.place()
        return
    headers = {"User-Agent": "stepladder"}
    if part.size:
        headers["Range"] = f"bytes={part.size}-"
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as reply:
            begin(part, reply)
            fill(part, reply.read1, feedback)
    except urllib.error.HTTPError as error:
        error.close()
        raise SourceError(f"HTTP {error.code} {reason(error)}") from error
    except NETWORK_ERRORS as error:
        raise SourceError(reason(error)) from error


def begin(part: Part, reply: Any) -> None:
    """Make the part ready for what the server is about to send; some ignore a Range."""
    goes_on = reply.status == http.HTTPStatus.PARTIAL_CONTENT
    if goes_on and not reply.headers.get("Content-Range", "").startswith(f"bytes {part.size}-"):
        part.restart()
        raise SourceError("sent another range than asked for")
    start = part.size if goes_on else 0
    length = reply.headers.get("Content-Length") or ""
    if length.isdigit() and start + int(length) != part.file.bytes:
        # A login page instead of the file must not cost the bytes fetched before.
        raise SourceError(f"offers {start + int(length):,} bytes instead of {part.file.bytes:,}")
    if start == 0:
        part.restart()


def reason(error: Exception) -> str:
    """An error's own words, without urllib's wrapping, on one line."""
    cause = getattr(error, "reason", error)
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(text.split())


# -- from files at hand ----------------------------------------------------------------------------


def copy(source: Path, opener: Opener, part: Part, feedback: Feedback) -> None:
    part.restart()
    try:
        with opener() as stream:
            fill(part, stream.read, feedback)
    except (SourceError, *ARCHIVE_ERRORS) as error:
        part.restart()
        raise InputError(
            f"cannot use {part.file.name} from {source}: {reason(error)}",
            "get another copy of it, or leave --from away to fetch it from its mirrors",
        ) from error


@contextmanager
def open_source(
    source: Path, dataset: DataSet, wanted: list[RemoteFile]
) -> Iterator[dict[str, Opener]]:
    """How to open each file of the set that source holds, by its name. InputError where it lacks a
    wanted one.
    """
    names = [file.name for file in dataset.files]
    held: dict[str, Opener] = {}
    if not source.exists():
        raise InputError(
            f"there is no {source}", "give --from a folder, an archive or the file itself"
        )
    with ExitStack() as opened:
        if not source.is_dir():
            refuse_no_file(source)
        if source.is_dir():
            held = {
                name: partial((source / name).open, "rb")
                for name in names
                if (source / name).is_file()
            }
        elif source.name in names:
            held = {source.name: partial(source.open, "rb")}
        else:
            if is_archive(source):
                members = opened.enter_context(open_archive(source))
                held = {PurePosixPath(m.name).name: m.open for m in members if m.kind == "file"}
            if len(names) == 1:  # the one file, perhaps an archive itself, under another name
                held.setdefault(names[0], partial(source.open, "rb"))
        if lacking := [file.name for file in wanted if file.name not in held]:
            raise InputError(
                f"{source} does not hold {', '.join(lacking)}",
                f"stepladder data get {dataset.name} --from PATH, a folder, an archive or the file itself",
            )
        yield held
