"""Fetching data sets: from mirrors with resume, or from files at hand; nothing unchecked gets a name."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import urlsplit

from stepladder.core import durable
from stepladder.core.errors import InputError
from stepladder.data.disk import MAKE_ROOM, Feedback
from stepladder.data.fetch.catalog import DataSet, RemoteFile
from stepladder.data.fetch.part import CutShortError, Part, SourceError, WrongBytesError
from stepladder.data.formats.archive import ARCHIVE_ERRORS, is_archive, open_archive, unpack

TIMEOUT_SECONDS = 30.0  # without a byte from the server
TRIES = 5  # for each mirror
CHUNK_BYTES = 1 << 18
NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError)  # ValueError: a redirect to nonsense

Opener = Callable[[], IO[bytes] | None]


def get(
    dataset: DataSet,
    target_dir: Path,
    source: Path | None = None,
    feedback: Feedback = Feedback(),  # noqa: B008 - frozen
) -> list[Path]:
    """Put the set's files into target_dir, from its mirrors or from source, and unpack archives.

    source is a folder, a zip or tar archive, or the single file. A file there with the right sha256
    is kept, one with a wrong sha256 is said and replaced. Returns the files' paths.
    InputError when no mirror or not the source has a right file, or when target_dir cannot be written.
    """
    wanted = [file for file in dataset.files if not is_right(file, target_dir / file.name, feedback)]
    opened: AbstractContextManager[dict[str, Opener]]
    opened = open_source(source, dataset, wanted) if source else nullcontext({})
    with opened as held, filled_folder(target_dir):
        for file in wanted:
            feedback.say(f"{file.name}: {'copying' if source else 'fetching'} {file.bytes:,} bytes")
            with Part(file, target_dir) as part:
                if source:
                    copy(source, held[file.name], part, feedback)
                else:
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
    try:
        with path.open("rb") as stream:
            right = hashlib.file_digest(stream, "sha256").hexdigest() == file.sha256
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "choose another --data-dir DIR") from error
    feedback.say(f"{file.name}: here already" if right else f"{path}: the sha256 is wrong, replacing it")
    return right


@contextmanager
def filled_folder(path: Path) -> Iterator[None]:
    """The folder is there in the block. Where nothing came into it, what was made for it goes again."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    with durable.writing(path, MAKE_ROOM):
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty, as it should be
            for folder in made:
                folder.rmdir()


def fill(part: Part, chunks: Iterable[bytes], feedback: Feedback) -> None:
    """Append the chunks, then give the file its name."""
    for chunk in chunks:
        part.write(chunk)
        feedback.progress(part.file.name, part.size, part.file.bytes)
    part.place()


def download(dataset: DataSet, part: Part, feedback: Feedback) -> None:
    """Try each mirror in turn. InputError with every mirror's host and reason when none has it."""
    failures = []
    for url in part.file.urls:
        try:
            from_mirror(url, part, feedback)
            return
        except SourceError as error:
            failures.append(f"{urlsplit(url).netloc}: {error}")
    raise InputError(
        f"no mirror gave {part.file.name} ({'; '.join(failures)})",
        f"try again later, or with files at hand: stepladder data get {dataset.name} --from PATH",
    )


def from_mirror(url: str, part: Part, feedback: Feedback) -> None:
    """One mirror, again as long as that can help: it got further, or old bytes were to blame."""
    for tries_left in reversed(range(TRIES)):
        before = part.size
        try:
            receive(url, part, feedback)
            return
        except CutShortError:
            if part.size <= before or not tries_left:
                raise
        except WrongBytesError:
            if before == 0 or not tries_left:
                raise


def receive(url: str, part: Part, feedback: Feedback) -> None:
    """One request for the bytes the part still lacks."""
    if part.size == part.file.bytes:  # a server would answer an empty range with an error
        part.place()
        return
    with request(url, part.size) as reply:
        goes_on = reply.status == http.HTTPStatus.PARTIAL_CONTENT  # some servers ignore a Range
        if goes_on and not reply.headers.get("Content-Range", "").startswith(f"bytes {part.size}-"):
            part.restart()
            raise WrongBytesError("sent another range than asked for")
        start = part.size if goes_on else 0
        length = reply.headers.get("Content-Length") or ""
        if length.isdigit() and start + int(length) != part.file.bytes:
            # A login page instead of the file must not cost the bytes fetched before.
            raise SourceError(f"offers {start + int(length):,} bytes instead of {part.file.bytes:,}")
        if start == 0:
            part.restart()
        fill(part, read_chunks(reply), feedback)


def request(url: str, start: int) -> Any:
    """The open reply, from byte `start` on if the server can. SourceError with the reason if not."""
    headers = {"User-Agent": "stepladder"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()
        raise SourceError(f"HTTP {error.code} {reason(error)}") from error
    except NETWORK_ERRORS as error:
        raise SourceError(reason(error)) from error


def read_chunks(reply: Any) -> Iterator[bytes]:
    try:
        while chunk := reply.read1(CHUNK_BYTES):
            yield chunk
    except NETWORK_ERRORS as error:
        raise CutShortError(reason(error)) from error


def reason(error: Exception) -> str:
    """An error's own words, without urllib's wrapping, on one line."""
    cause = getattr(error, "reason", error)
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(text.split())


def copy(source: Path, opener: Opener, part: Part, feedback: Feedback) -> None:
    part.restart()
    try:
        stream = opener()
        assert stream is not None, "open_source gives plain files only"
        with stream:
            fill(part, iter(lambda: stream.read(CHUNK_BYTES), b""), feedback)
    except (SourceError, *ARCHIVE_ERRORS) as error:
        part.restart()
        raise InputError(
            f"cannot use {part.file.name} from {source}: {reason(error)}",
            "get another copy of it, or leave --from away to fetch it from its mirrors",
        ) from error


@contextmanager
def open_source(source: Path, dataset: DataSet, wanted: list[RemoteFile]) -> Iterator[dict[str, Opener]]:
    """How to open each file of the set that source holds, by its name. InputError where it lacks a wanted one."""
    names = [file.name for file in dataset.files]
    held: dict[str, Opener] = {}
    if not source.exists():
        raise InputError(f"there is no {source}", "give --from a folder, an archive or the file itself")
    with ExitStack() as opened:
        if source.is_dir():
            held = {name: opener(source / name) for name in names if (source / name).is_file()}
        elif source.name in names:
            held = {source.name: opener(source)}
        else:
            if is_archive(source):
                members = opened.enter_context(open_archive(source))
                held = {PurePosixPath(m.name).name: m.open for m in members if m.kind == "file"}
            if len(names) == 1:  # the one file, perhaps an archive itself, under another name
                held.setdefault(names[0], opener(source))
        if lacking := [file.name for file in wanted if file.name not in held]:
            raise InputError(
                f"{source} does not hold {', '.join(lacking)}",
                f"stepladder data get {dataset.name} --from PATH, a folder, an archive or the file itself",
            )
        yield held


def opener(path: Path) -> Opener:
    return lambda: path.open("rb")
