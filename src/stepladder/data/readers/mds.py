"""MosaicML's MDS shards: each begins with where its samples are, index.json has their columns."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import xxhash

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.order import IndexArray
from stepladder.core.typed_file import parse_json
from stepladder.data.readers.batches import Sample, decode_image, validate_type
from stepladder.data.readers.companions import is_companion
from stepladder.data.readers.damage import DAMAGE_HINT, Damage
from stepladder.data.readers.files import DataFile, read_pieces
from stepladder.data.readers.json_values import decode_json
from stepladder.data.readers.listing import validate_distinct
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.readers.records import RecordSource
from stepladder.data.table import join_lists

MDS_INDEX = "index.json"
LENGTH_TYPE = np.dtype("<u4")
MAX_SHARD_SAMPLES = 1 << 30  # of a shard: where each begins has four bytes, which count bytes
BITS_MASK = 0b11111000  # of the byte that stands for a type of numbers; the rest is its kind
KINDS = "uif"
# Those that an index may name, by the name that hashlib or xxhash gives them.
HASHES = hashlib.algorithms_guaranteed | set(xxhash.algorithms_available)
HASHES_OF_ANY_LENGTH = {"shake_128", "shake_256"}
ENCODINGS_HINT = "columns of numbers, texts, bytes, json, jpeg, png or ndarray"
SCALAR = re.compile("u?int(8|16|32|64)|float(16|32|64)")


@dataclass(frozen=True)
class _MdsFile:
    """A file of a shard, as index.json describes it."""

    basename: str
    bytes: int
    hashes: dict[str, str]


@dataclass(frozen=True)
class _MdsShard:
    """A shard, as index.json describes it."""

    column_encodings: list[str]
    column_names: list[str]
    column_sizes: list[int | None]
    samples: int
    raw_data: _MdsFile
    compression: str | None = None
    format: str = "mds"


@dataclass(frozen=True)
class _MdsIndex:
    """What index.json holds."""

    shards: list[_MdsShard]


class _MdsSource(RecordSource):
    """Samples of MDS shards, which have checksums of whole files."""

    format = "mds"

    def __init__(
        self, files: list[DataFile], shards: list[_MdsShard], options: OpenOptions
    ) -> None:
        self.files = files
        self.shards = shards
        columns = list(zip(shards[0].column_names, shards[0].column_encodings, strict=True))
        file = files[0].name
        self.decoders = {name: _find_decoder(encoding, file, name) for name, encoding in columns}
        self.ragged = frozenset(name for name, encoding in columns if _has_lengths(encoding))
        super().__init__(files, [shard.samples for shard in shards], options)

    def parse(self, number: int, data: bytes, names: frozenset[str] | None) -> Sample:
        """Return the values of a sample; before them are the lengths of those without a fixed one.

        Raises:
            ValueError: The sample is damaged.
        """
        shard = self.shards[number]
        sizes: list[int] = []
        position = 0
        for fixed_size in shard.column_sizes:
            size = fixed_size
            if not size:
                size = int.from_bytes(data[position : position + 4], "little")
                position += 4
            sizes.append(size)
        if position + sum(sizes) != len(data):
            raise ValueError(f"it has {len(data)} bytes, its columns {position + sum(sizes)}")
        sample = {}
        for name, size in zip(shard.column_names, sizes, strict=True):
            if names is None or name in names:
                sample[name] = self._decode(name, data[position : position + size])
            position += size
        return sample

    def make_column(self, name: str, values: list[Any], first: Any) -> Any:
        """Return values of a column as one; arrays that say their own shape as Ragged."""
        if name not in self.ragged:
            return super().make_column(name, values, first)
        validate_type(name, values, first)
        return join_lists(values)

    def _decode(self, name: str, data: bytes) -> Any:
        try:
            return self.decoders[name](data)
        except (IndexError, TypeError, RecursionError) as error:
            raise ValueError(f"column {name}: {error}") from error

    def load_offsets(self, number: int) -> IndexArray:
        """Return where the samples of a shard begin, and where the last one ends."""
        file = self.files[number]
        count = self.shards[number].samples
        data = file.read(0, min(file.size, 4 * (count + 2)))
        numbers = np.frombuffer(data[: len(data) // 4 * 4], LENGTH_TYPE).astype(np.int64)
        offsets = numbers[1:]
        is_whole = len(numbers) == count + 2 and numbers[0] == count
        if not is_whole or offsets[-1] > file.size or (np.diff(offsets) < 0).any():
            raise Damage(file.name, 0, count, "where its samples begin is damaged").as_error()
        return offsets

    def find_file_problem(self, number: int) -> str:
        """Return why a shard is not the file that index.json describes, or ""."""
        file = self.files[number]
        expected = self.shards[number].raw_data
        if file.size != expected.bytes:
            return f"it has {file.size:,} bytes, not {expected.bytes:,}"
        for name, digest in expected.hashes.items():
            if name not in HASHES - HASHES_OF_ANY_LENGTH:
                continue
            library = hashlib if name in hashlib.algorithms_guaranteed else xxhash
            computed = getattr(library, name)()
            for piece in read_pieces(file):
                computed.update(piece)
            if computed.hexdigest() != digest:
                return f"its {name} is wrong"
        return ""


def open_mds(folders: list[str], listed: list[str], options: OpenOptions) -> _MdsSource:
    """Return the samples of MDS folders.

    Args:
        folders: Folders or their URLs, each with an index.json.
        listed: All files in them, as far as they are known.
        options: What the caller of `open_data` has set.

    Raises:
        InputError: An index or a shard is damaged or missing, or of a kind that is not read, or
            another file may hold samples, or two shards are one file.
    """
    files: list[DataFile] = []
    shards: list[_MdsShard] = []
    for folder in folders:
        base = folder.rstrip("/")
        index = options.open_file(f"{base}/{MDS_INDEX}")
        with as_input_error(f"{index.name} cannot be used", DAMAGE_HINT, (ValueError,)):
            parsed = parse_json(index.read(0, index.size), _MdsIndex)
        for shard in parsed.shards:
            shards.append(shard)
            _validate_shard(index.name, shard, shards[0])
            files.append(options.open_file(f"{base}/{shard.raw_data.basename}"))
    if not shards:
        raise InputError(f"{folders[0]} has no shards", "a folder with some")
    validate_distinct([file.name for file in files])
    named = {Path(file.name) for file in files}
    for name in listed:
        if Path(name) not in named and not is_companion(name):
            raise InputError(f"{MDS_INDEX} does not name {name}", "shards of one index alone")
    return _MdsSource(files, shards, options)


def _validate_shard(index: str, shard: _MdsShard, first: _MdsShard) -> None:
    """Raise InputError for a shard that is not read."""
    name = shard.raw_data.basename
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise InputError(f"{index} names a file outside of its folder: {name}", DAMAGE_HINT)
    if shard.format != "mds" or shard.compression:
        problem = f"{index}: {name} is {shard.compression or shard.format}, not plain MDS"
        raise InputError(problem, "MDSWriter(compression=None), or decompress the shards")
    if shard.column_encodings != first.column_encodings or shard.column_names != first.column_names:
        raise InputError(f"{index}: {name} has other columns than the first shard", DAMAGE_HINT)
    if not 0 <= shard.samples < MAX_SHARD_SAMPLES:
        raise InputError(f"{index}: {name} has {shard.samples} samples", DAMAGE_HINT)
    lengths = {len(shard.column_names), len(shard.column_encodings), len(shard.column_sizes)}
    num_names = len(set(shard.column_names))
    fixed_sizes = [size for size in shard.column_sizes if size is not None]
    has_negative = any(size < 0 for size in fixed_sizes)
    if lengths != {num_names} or not num_names or has_negative:
        raise InputError(f"{index}: the columns of {name} are damaged", DAMAGE_HINT)


def _find_decoder(encoding: str, file: str, column: str) -> Callable[[bytes], Any]:
    """Return the function that makes a value of bytes.

    Raises:
        InputError: The encoding is not read.
    """
    kind, _, rest = encoding.partition(":")
    simple: dict[str, Callable[[bytes], Any]] = {
        "bytes": bytes,
        "str": bytes.decode,
        "int": partial(_decode_scalar, np.dtype("<i8")),
        "json": decode_json,
        "jpeg": decode_image,
        "png": decode_image,
        "str_int": int,
        "str_float": float,
    }
    if kind in simple:
        return simple[kind]
    if SCALAR.fullmatch(kind):
        return partial(_decode_scalar, np.dtype(kind).newbyteorder("<"))
    problem = f"{file}: column {column} has the encoding {encoding!r:.60}, which is not read"
    if kind == "ndarray":
        with as_input_error(problem, ENCODINGS_HINT, (ValueError,)):
            return partial(_decode_array, *_parse_array_type(rest))
    reason = "pickles run code" if kind == "pkl" else "it is not known"
    raise InputError(f"{problem}: {reason}", ENCODINGS_HINT)


def _parse_array_type(text: str) -> tuple[np.dtype[Any] | None, tuple[int, ...] | None]:
    """Return the type and the shape of DTYPE:LENGTH,LENGTH; None where the values say it.

    Raises:
        ValueError: It is no type of numbers, or no shape.
    """
    name, _, lengths = text.partition(":")
    if name and not SCALAR.fullmatch(name):
        raise ValueError(f"{name!r} is no type of numbers")
    shape = tuple(map(int, lengths.split(","))) if lengths else None
    if shape is not None and min(shape) < 1:
        raise ValueError(f"{lengths!r} is no shape")
    return np.dtype(name) if name else None, shape


def _has_lengths(encoding: str) -> bool:
    """Return whether the values of an encoding are arrays that say their own shape."""
    return encoding.startswith("ndarray") and encoding.count(":") < 2


def _decode_scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    """Return one number."""
    return np.frombuffer(data, dtype, 1)[0]


def _decode_array(
    dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, data: bytes
) -> np.ndarray:
    """Return an array, whose type and shape stand before its values unless they are fixed.

    Raises:
        ValueError: They do not fit the values.
    """
    position = 0
    if dtype is None:
        code = data[0]
        dtype = np.dtype(f"<{KINDS[code & 7]}{(code & BITS_MASK) // 8}")
        position = 1
    if shape is None:
        dimensions = data[position] >> 2
        length_type = np.dtype(f"<u{1 << (data[position] & 3)}")
        lengths = np.frombuffer(data, length_type, dimensions, position + 1)
        shape = tuple(int(length) for length in lengths)
        position += 1 + lengths.nbytes
    return np.frombuffer(data, dtype, offset=position).reshape(shape).copy()
