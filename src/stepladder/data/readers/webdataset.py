"""WebDataset's tar files: files that follow each other and differ after the dot are a sample."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepladder.core.order import IndexArray
from stepladder.data.formats.arrays import read_npy_header
from stepladder.data.readers.batches import Sample, decode_image, stack_values
from stepladder.data.readers.damage import Damage
from stepladder.data.readers.files import DataFile
from stepladder.data.readers.json_values import parse_carefully
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.records import IndexedFiles, RecordSource

TAR_BLOCK = 512
FILE_TYPES = (b"0", b"\0")
LONG_NAME = b"L"  # of GNU tar: the next member's name
PAX_HEADER = b"x"  # of POSIX: the next member's attributes
NUMBER_ENDINGS = ("cls", "cls2", "index", "count", "inx", "id")
TEXT_ENDINGS = ("txt", "text", "transcript")
IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp", "bmp", "ppm")
INDEXED_AT_ONCE = 1 << 16
KEY = re.compile(r"^((?:.*/)?[^/.]+)\.([^/]*)$", re.DOTALL)


class Member(NamedTuple):
    """A file in a tar file.

    Args:
        key: Its name before the first dot of its last part.
        suffix: What follows that dot, in small letters.
        header: Where its first header begins.
        begin: Where its contents begin.
        end: Where they end.
    """

    key: str
    suffix: str
    header: int
    begin: int
    end: int


class TarSamples(IndexedFiles):
    """Samples in tar files."""

    name = "webdataset"

    def __init__(self, files: list[DataFile], options: OpenOptions) -> None:
        super().__init__(files, find_samples, options)

    def parse(self, number: int, data: bytes, names: frozenset[str] | None) -> Sample:
        """Return the fields of a sample, decoded by their suffix, and its `__key__`.

        Raises:
            ValueError: A header or a field is damaged.
        """
        view = memoryview(data)
        sample: Sample = {}
        for member in list_members(view, 0, len(data)):
            sample["__key__"] = member.key
            if names is None or member.suffix in names:
                contents = bytes(view[member.begin : member.end])
                sample[member.suffix] = decode_field(member.suffix, contents)
        return sample

    def make_column(self, name: str, values: list[Any]) -> Any:
        """Return the fields of one suffix as an array, or as the list that they are."""
        return stack_values(name, values)


def open_tar_files(files: list[DataFile], options: OpenOptions) -> RecordSource:
    """Return the samples of tar files."""
    return RecordSource(files, TarSamples(files, options), options)


def decode_field(suffix: str, contents: bytes) -> Any:
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
        return parse_carefully(contents)
    if kind == "npy":
        return read_array(contents)
    if kind in IMAGE_ENDINGS:
        return decode_image(contents)
    return contents


def read_array(contents: bytes) -> np.ndarray:
    """Return the array of a .npy file. Raises ValueError if it is damaged, or has objects."""
    shape, _, dtype = read_npy_header(io.BytesIO(contents))
    if math.prod(shape) * dtype.itemsize > len(contents):  # NumPy would take memory for all of it
        raise ValueError(f"it has {len(contents):,} bytes, too few for {dtype} {list(shape)}")
    return np.lib.format.read_array(io.BytesIO(contents), allow_pickle=False)


def find_samples(file: DataFile) -> Iterator[IndexArray]:
    """Yield where the samples of a tar file begin, and where the last one ends.

    Raises:
        InputError: The file is damaged or cut; the message has the sample's number.
    """
    starts: list[int] = []
    count = 0
    key = None
    end = 0
    try:
        for member in list_members(FileBytes(file), 0, file.size):
            if member.key != key:
                starts.append(member.header)
                count += 1
                key = member.key
            end = round_up(member.end)
            if len(starts) >= INDEXED_AT_ONCE:
                yield np.array(starts, np.int64)
                starts = []
    except ValueError as error:
        raise Damage(file.name, max(0, count - 1), 1, str(error)).as_error() from error
    yield np.array([*starts, end], np.int64)


class FileBytes:
    """The bytes of a file, as slices."""

    def __init__(self, file: DataFile) -> None:
        self.file = file

    def __getitem__(self, part: slice) -> bytes:
        return self.file.read(part.start, min(part.stop, self.file.size))


def list_members(data: Any, begin: int, end: int) -> Iterator[Member]:
    """Yield the files between two positions of a tar file; hidden ones are left out.

    Args:
        data: Bytes, or what gives them for a slice.
        begin: Where the first header begins.
        end: Where the bytes end.

    Raises:
        ValueError: A header is damaged, or contents are cut.
    """
    first_header = begin
    attributes: dict[str, str] = {}  # of the next file, where its own header has no room for them
    while (header := read_header(data, begin, end)) is not None:
        contents = begin + TAR_BLOCK
        if header.kind in (LONG_NAME, PAX_HEADER):
            last = find_end(header.name, contents, header.size, end)
            attributes |= parse_attributes(header.kind, bytes(data[contents:last]))
            begin = round_up(last)
            continue
        name = attributes.get("path", header.name)
        last = find_end(name, contents, int(attributes.get("size", header.size)), end)
        match = KEY.match(name)
        is_hidden = Path(name).name.startswith("_")
        if header.kind in FILE_TYPES and match and not is_hidden:
            yield Member(match[1], match[2].lower(), first_header, contents, last)
        begin = round_up(last)
        first_header = begin
        attributes = {}


class Header(NamedTuple):
    """The name, the size and the type of a member, as its own header has them."""

    name: str
    size: int
    kind: bytes


def read_header(data: Any, begin: int, end: int) -> Header | None:
    """Return the header at a position; None at the end of the archive.

    Raises:
        ValueError: It is damaged.
    """
    if begin + TAR_BLOCK > end:
        return None
    header = bytes(data[begin : begin + TAR_BLOCK])
    return parse_header(header) if any(header) else None


def find_end(name: str, begin: int, size: int, end: int) -> int:
    """Return where contents end. Raises ValueError if that is not before the end of the file."""
    if size < 0:  # which would lead back to an earlier header, for ever
        raise ValueError(f"{name} has {size} bytes")
    if begin + size > end:
        raise ValueError(f"the tar file ends within {name}")
    return begin + size


def parse_header(header: bytes) -> Header:
    """Return the name, the size and the type of a member, whose header has a checksum.

    Raises:
        ValueError: The header is damaged.
    """
    stored = header[148:156].strip(b" \0")
    if not stored or int(stored, 8) != sum(header) - sum(header[148:156]) + 8 * ord(" "):
        raise ValueError("a header of the tar file is damaged")
    name = header[:100].partition(b"\0")[0]
    if header[257:262] == b"ustar" and header[345] and header[263:265] == b"00":
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    if header[124] & 0x80:  # GNU tar's way to write sizes from 8 GB on
        size = int.from_bytes(header[125:136], "big")
    else:
        size = int(header[124:136].strip(b" \0") or b"0", 8)
    return Header(name.decode(), size, header[156:157])


def parse_attributes(kind: bytes, text: bytes) -> dict[str, str]:
    """Return the attributes of the next member: of a PAX header, lines of `length name=value`.

    Raises:
        ValueError: They are damaged.
    """
    if kind == LONG_NAME:
        return {"path": text.rstrip(b"\0").decode()}
    attributes = {}
    while text:
        length = int(text.partition(b" ")[0])
        if not 0 < length <= len(text):
            raise ValueError("a header of the tar file is damaged")
        name, _, value = text[:length].partition(b" ")[2].rstrip(b"\n").partition(b"=")
        attributes[name.decode()] = value.decode()
        text = text[length:]
    return attributes


def round_up(position: int) -> int:
    """Return where the next block of a tar file begins."""
    return -(-position // TAR_BLOCK) * TAR_BLOCK
