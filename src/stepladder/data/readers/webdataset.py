"""WebDataset's tar files: files that follow each other and differ after the dot are a sample."""

from __future__ import annotations

import io
import math
import re
import tarfile
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import numpy as np

from stepladder.core.order import IndexArray
from stepladder.data.readers.batches import Sample, decode_image
from stepladder.data.readers.damage import Damage
from stepladder.data.readers.files import PIECE_BYTES, DataFile, FileView
from stepladder.data.readers.json_values import decode_json
from stepladder.data.readers.npy import read_npy_header
from stepladder.data.readers.records import IndexedSource

END_BYTES = 2 * tarfile.BLOCKSIZE  # of zeros
NUMBER_ENDINGS = ("cls", "cls2", "index", "count", "inx", "id")
TEXT_ENDINGS = ("txt", "text", "transcript")
IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "bmp", "ppm")
INDEXED_AT_ONCE = 1 << 16
KEY = re.compile(r"^((?:.*/)?[^/.]+)\.([^/]*)$", re.DOTALL)


class _Member(NamedTuple):
    """A file in a tar file.

    Args:
        key: Its name before the first dot of its last part.
        suffix: What follows that dot, in small letters.
        header: Where its first header begins.
        begin: Where its contents begin.
        end: Where they end.
        next_header: Where the next member begins.
    """

    key: str
    suffix: str
    header: int
    begin: int
    end: int
    next_header: int


class TarSource(IndexedSource):
    """Samples in tar files."""

    format = "webdataset"

    def find_offsets(self, file: DataFile) -> Iterator[IndexArray]:
        """Yield where samples begin, and where the last one ends."""
        return _find_samples(file)

    def parse(self, number: int, data: bytes, names: frozenset[str] | None) -> Sample:
        """Return the fields of a sample, decoded by their suffix, and its `__key__`.

        Raises:
            ValueError: A header or a field is damaged.
        """
        sample: Sample = {}
        for member in _list_members(io.BytesIO(data + bytes(END_BYTES))):
            sample["__key__"] = member.key
            if names is None or member.suffix in names:
                contents = data[member.begin : member.end]
                sample[member.suffix] = _decode_field(member.suffix, contents)
        return sample


def _decode_field(suffix: str, contents: bytes) -> Any:
    """Return what the contents of a member mean; its bytes if the suffix does not say it.

    Nothing is unpickled.

    Raises:
        ValueError: They do not mean that.
    """
    kind = suffix.rpartition(".")[2]
    if kind in NUMBER_ENDINGS:
        return int(contents)
    if kind in TEXT_ENDINGS:
        return contents.decode()
    if kind == "json":
        return decode_json(contents)
    if kind == "npy":
        return _read_array(contents)
    if kind in IMAGE_ENDINGS:
        return decode_image(contents)
    return contents


def _read_array(contents: bytes) -> np.ndarray:
    """Return the array of a .npy file. Raises ValueError if it is damaged, or has objects."""
    stream = io.BytesIO(contents)
    shape, _, dtype = read_npy_header(stream)
    size = stream.tell() + math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and size != len(contents):  # NumPy would take memory for all of it
        raise ValueError(f"{dtype} {list(shape)} has {size:,} bytes, and it has {len(contents):,}")
    stream.seek(0)
    return np.lib.format.read_array(stream, allow_pickle=False)


def _find_samples(file: DataFile) -> Iterator[IndexArray]:
    """Yield where the samples of a tar file begin, and where the last one ends.

    Raises:
        InputError: The file is damaged or cut, or two samples have one name; the message has the
            sample's number.
    """  # noqa: DOC501 - the ValueError becomes an InputError
    starts: list[int] = []
    count = 0
    key = None
    suffixes: set[str] = set()
    end = 0
    stream: Any = FileView(file)
    try:
        for member in _list_members(stream):
            if member.key != key:
                starts.append(member.header)
                count += 1
                key = member.key
                suffixes = set()
            if member.suffix in suffixes:
                raise ValueError(f"{key}.{member.suffix} is there twice, as of two samples")
            suffixes.add(member.suffix)
            end = member.next_header
            if len(starts) >= INDEXED_AT_ONCE:
                yield np.array(starts, np.int64)
                starts = []
    except ValueError as error:
        raise Damage(file.name, max(0, count - 1), 1, str(error)).as_error() from error
    yield np.array([*starts, end], np.int64)


def _list_members(stream: IO[bytes]) -> Iterator[_Member]:
    """Yield the files of an archive that are fields of samples: a dot is in their names.

    Names that begin with a dot are not of samples.

    Args:
        stream: The archive.

    Raises:
        ValueError: It is damaged, or has a field that is a link or has holes.
    """
    try:
        with tarfile.open(fileobj=stream, mode="r:", encoding="utf-8") as archive:
            while (info := archive.next()) is not None:
                # A million members would need a gigabyte.
                archive.members.clear()  # type: ignore[attr-defined]
                if info.size < 0:  # which would lead back to an earlier header, for ever
                    raise ValueError(f"{info.name} has {info.size} bytes")
                match = KEY.match(info.name)
                if info.isdir() or not match:
                    continue
                if not info.isreg() or info.issparse():
                    raise ValueError(f"{info.name} is a link, or no plain file")
                begin = info.offset_data
                yield _Member(
                    match[1],
                    match[2].lower(),
                    info.offset,
                    begin,
                    begin + info.size,
                    archive.offset,
                )
            _validate_end(stream, archive.offset)
    except (tarfile.TarError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _validate_end(stream: IO[bytes], end: int) -> None:
    """Validate that an archive ends where no further member was found, which tarfile does not.

    Args:
        stream: The archive.
        end: Where the last member ends.

    Raises:
        ValueError: The two empty blocks that end it are not there, or something follows them.
    """
    stream.seek(end)
    blocks = stream.read(END_BYTES)
    if blocks != bytes(END_BYTES):
        raise ValueError(f"the tar file has neither a header nor its end at byte {end:,}")
    while piece := stream.read(PIECE_BYTES):
        if piece.count(0) != len(piece):
            raise ValueError(f"more follows after the end of the tar file at byte {end:,}")
