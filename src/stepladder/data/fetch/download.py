"""Put the files of a data set into a folder, from its mirrors or from local files.

A file gets its name only when all of it is there with the right SHA-256.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stepladder.core.errors import InputError, as_input_error
from stepladder.data.fetch.archive import ARCHIVE_ERRORS, unpack
from stepladder.data.fetch.catalog import DataSet, RemoteFile
from stepladder.data.fetch.local_source import Opener, open_source
from stepladder.data.fetch.partial_file import BrokenTransfer, PartialFile, SourceError
from stepladder.data.local_files import Feedback, compute_sha256, output_folder

DOWNLOAD_TIMEOUT_S = 30.0  # without a byte from the server
ATTEMPTS_PER_MIRROR = 5
# urllib raises ValueError for a redirect to something that is no URL.
NETWORK_ERRORS = (OSError, http.client.HTTPException, ValueError)


def fetch_dataset(
    dataset: DataSet,
    target_dir: Path,
    source: Path | None = None,
    feedback: Feedback = Feedback(),  # noqa: B008 - frozen
) -> list[Path]:
    """Put the files of a data set into a folder, and unpack archives.

    A file in the folder with the right SHA-256 is kept; one with a wrong SHA-256 is replaced.

    Args:
        dataset: What to fetch.
        target_dir: The folder for the files; it is made.
        source: A folder, a zip or tar archive, or the single file; None for the mirrors.
        feedback: Shows the progress.

    Returns:
        The paths of the files.

    Raises:
        InputError: No mirror, or not the source, has a right file; or the folder cannot be written.
    """
    missing = [
        file
        for file in dataset.files
        if not _has_right_file(file, target_dir / file.name, feedback)
    ]
    with ExitStack() as stack:
        openers: dict[str, Opener] = {}
        if source is not None:
            openers = stack.enter_context(open_source(source, dataset, missing))
        stack.enter_context(output_folder(target_dir))
        for file in missing:
            with PartialFile(file, target_dir) as part:
                if source is None:
                    feedback.on_message(f"{file.name}: fetching {file.bytes:,} bytes")
                    download(dataset, part, feedback)
                else:
                    copy(source, openers[file.name], part, feedback)
                    feedback.on_message(f"{file.name}: copied {file.bytes:,} bytes")
    for file in dataset.files:
        if file.unpack:
            unpack(target_dir / file.name, unpacked_folder(file, target_dir))
    if dataset.build is not None:
        dataset.build(target_dir, feedback)
    return [target_dir / file.name for file in dataset.files]


def unpacked_folder(file: RemoteFile, target_dir: Path) -> Path:
    """Return the folder for an archive's files: the archive's name without its ending."""
    return target_dir / file.name.split(".")[0]


def _has_right_file(file: RemoteFile, path: Path, feedback: Feedback) -> bool:
    """Return whether the file exists with the right SHA-256, and tell the user."""
    if not path.is_file():
        return False
    with as_input_error(f"cannot read {path}", "choose another --data-dir DIR"):
        is_right = compute_sha256(path) == file.sha256
    if is_right:
        feedback.on_message(f"{file.name}: here already")
    else:
        feedback.on_message(f"{path}: the sha256 is wrong, replacing it")
    return is_right


def download(dataset: DataSet, part: PartialFile, feedback: Feedback) -> None:
    """Download a file from the first mirror that has it.

    A transfer that breaks is tried again from its beginning.

    Raises:
        InputError: No mirror has the file; it names each mirror's host and reason.
    """
    failures: dict[str, str] = {}
    for url in part.file.urls:
        for _ in range(ATTEMPTS_PER_MIRROR):
            try:
                _request_file(url, part, feedback)
                return
            except SourceError as error:
                failures[url] = f"{urlsplit(url).netloc}: {error}"
                if not isinstance(error, BrokenTransfer):
                    break  # this mirror would give the same answer again
    raise InputError(
        f"no mirror gave {part.file.name} ({'; '.join(failures.values())})",
        f"try again later, or with local files: stepladder data get {dataset.name} --from PATH",
    )


def _request_file(url: str, part: PartialFile, feedback: Feedback) -> None:
    """Request all bytes of the file once.

    Args:
        url: Where a mirror has the file.
        part: The file on disk that receives the bytes. What it has already is dropped.
        feedback: Gets the number of bytes as they come.

    Raises:
        SourceError: The mirror does not have the file.
        BrokenTransfer: The connection broke after the first byte.
    """
    part.restart()
    request = urllib.request.Request(url, headers={"User-Agent": "stepladder"})
    try:
        with urllib.request.urlopen(request, timeout=DOWNLOAD_TIMEOUT_S) as response:
            _check_length(response, part.file)
            part.fill(response.read1, feedback)
    except urllib.error.HTTPError as error:
        error.close()
        raise SourceError(f"HTTP {error.code} {_describe_error(error)}") from error
    except NETWORK_ERRORS as error:
        kind = BrokenTransfer if part.size else SourceError
        raise kind(_describe_error(error)) from error


def _check_length(response: Any, file: RemoteFile) -> None:
    """Raise SourceError when the server announces another size, such as that of a login page."""
    length = response.headers.get("Content-Length") or ""
    if length.isdigit() and int(length) != file.bytes:
        raise SourceError(f"offers {int(length):,} bytes instead of {file.bytes:,}")


def _describe_error(error: Exception) -> str:
    """Return an error's message without urllib's wrapping, on one line."""
    cause = getattr(error, "reason", error)
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(text.split())


def copy(source: Path, opener: Opener, part: PartialFile, feedback: Feedback) -> None:
    """Copy a file of the source. Raises InputError when the source has another file."""
    try:
        with opener() as stream:
            part.fill(stream.read, feedback)
    except (SourceError, *ARCHIVE_ERRORS) as error:
        raise InputError(
            f"cannot use {part.file.name} from {source}: {_describe_error(error)}",
            "get another copy of it, or omit --from to fetch it from its mirrors",
        ) from error
