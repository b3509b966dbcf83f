"""Arrays in files: tokens (.bin, .npy), rows of an array (.npy), and tensors (.safetensors)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.order import IndexArray
from stepladder.core.typed_file import parse_json
from stepladder.data.readers.damage import DAMAGE_HINT, Damage
from stepladder.data.readers.file_rows import FileRows
from stepladder.data.readers.files import DataFile, FileView, read_pieces
from stepladder.data.readers.npy import NPY_HINT, read_npy_header
from stepladder.data.readers.open_options import OpenOptions
from stepladder.data.table import select_columns

TOKEN_HEADER_BYTES = 1024  # of llm.c's and modded-nanogpt's token files: 256 numbers
TOKEN_TYPES = {20240520: "uint16", 20240801: "uint32"}  # by the first of these numbers
DEFAULT_TOKEN_TYPE = "uint16"  # of nanoGPT, whose files have no header
MIN_TOKENS_JUDGED = 64  # by which the type of tokens is judged
JUDGED_BYTES = 1 << 16
MAX_HIGH_BITS = 16  # of a token of 32 bits, in a vocabulary of a million
# The type that tokens are taken for, the one that they look like, and how to say that they are not.
MISTAKEN_TYPES = (("uint32", "int64", "int32"), ("uint16", "uint32", "uint16"))
MAX_SAFETENSORS_HEADER_BYTES = 1 << 26
BLOCK_HINT = "block=1024, the tokens of a sample"
TOKENS_HINT = "save tokens.astype(np.uint16); or leave block out"
SAFETENSORS_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class _Rows:
    """The rows of one array in a file.

    Args:
        begin: The position of the first row.
        stride: The bytes from one row to the next.
        count: The number of rows.
        shape: The shape of a row.
        dtype: The type of its numbers, a name of torch's or NumPy's.
    """

    begin: int
    stride: int
    count: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def row_bytes(self) -> int:
        """The bytes of a row."""
        return math.prod(self.shape) * (
            2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        )

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.begin + (self.count - 1) * self.stride + self.row_bytes


class _ArraySource(FileRows):
    """Rows of arrays that lie in files."""

    def __init__(
        self,
        format_name: str,
        files: list[DataFile],
        arrays: list[dict[str, _Rows]],
        options: OpenOptions,
    ) -> None:
        self.names = select_columns(options.columns or (), arrays[0], files[0].name)
        self.arrays = [
            _validate_arrays(file, self.names, rows, arrays[0])
            for file, rows in zip(files, arrays, strict=True)
        ]
        counts = [next(iter(rows.values())).count for rows in self.arrays]
        super().__init__(files, counts, options)
        self.format = format_name

    @property
    def columns(self) -> dict[str, str]:
        """The name and the type of each column, as texts to print."""
        texts = {}
        for name, rows in self.arrays[0].items():
            texts[name] = " ".join([" x ".join(map(str, rows.shape)), rows.dtype]).strip()
        return texts

    def read_columns(self, indices: IndexArray) -> dict[str, Any]:
        """Return these rows by column."""
        located = list(self.locate(indices))
        return {name: self._read_column(name, len(indices), located) for name in self.names}

    def find_damage(self) -> Iterator[Damage]:
        """Read all files, and yield those that cannot be read; their numbers have no checksum."""
        for number, file in enumerate(self.files):
            try:
                for _ in read_pieces(file):
                    pass
            except InputError as error:
                yield Damage(file.name, 0, self.count_rows(number), error.problem)

    def _read_column(
        self, name: str, count: int, located: list[tuple[int, IndexArray, IndexArray]]
    ) -> torch.Tensor:
        """Return `count` values of a column, in the rows that `locate` has found."""
        first = self.arrays[0][name]
        data = np.empty((count, first.row_bytes), np.uint8)
        for number, positions, indices in located:
            rows = self.arrays[number][name]
            begins = rows.begin + indices * rows.stride
            ends = begins + rows.row_bytes
            parts = self.files[number].read_parts(begins.tolist(), ends.tolist())
            data[positions] = np.frombuffer(b"".join(parts), np.uint8).reshape(len(parts), -1)
        shape = (count, *first.shape)
        if first.dtype in ("uint16", "uint32"):  # of which torch has too few operations
            return torch.from_numpy(data.view(first.dtype).astype(np.int64)).reshape(shape)
        dtype: torch.dtype = getattr(torch, first.dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(shape)


def _validate_arrays(
    file: DataFile, names: list[str], arrays: dict[str, _Rows], expected: dict[str, _Rows]
) -> dict[str, _Rows]:
    """Return the arrays of these names.

    Args:
        file: The file.
        names: The names.
        arrays: All arrays of the file, by name.
        expected: The arrays of the first file, whose shapes and types these must have.

    Raises:
        InputError: The file lacks one of them, or has too few bytes for it, or it differs.
    """
    selected = {}
    for name in names:
        rows = arrays.get(name)
        if rows is None or (rows.shape, rows.dtype) != (expected[name].shape, expected[name].dtype):
            raise InputError(
                f"{file.name}: {name} is not as in the first file", "columns= without it"
            )
        if rows.count < 0 or rows.row_bytes < 1:
            raise InputError(f"{file.name}: the rows of {name} hold nothing", "columns= without it")
        if rows.count and rows.end > file.size:
            num_complete = max(0, (file.size - rows.begin - rows.row_bytes) // rows.stride + 1)
            raise Damage(
                file.name, num_complete, rows.count - num_complete, "the file ends before"
            ).as_error()
        selected[name] = rows
    counts = {name: rows.count for name, rows in selected.items()}
    if len(set(counts.values())) > 1:
        text = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise InputError(
            f"{file.name} has arrays of several lengths: {text}", "columns=, of one length"
        )
    return selected


def open_tokens(files: list[DataFile], options: OpenOptions) -> _ArraySource:
    """Return blocks of tokens. Each has `block` tokens and the one after them, as the last target.

    Args:
        files: Files of tokens, with the header of llm.c or without one.
        options: What the caller of `open_data` has set.

    Raises:
        InputError: `block` is missing, or the header of a file is cut.
    """
    block = _require_block(files[0], options)
    dtype = _find_token_type(options)
    arrays = []
    for file in files:
        head = file.read(0, min(TOKEN_HEADER_BYTES, file.size))
        magic = int.from_bytes(head[:4], "little")
        if magic in TOKEN_TYPES:
            if len(head) < TOKEN_HEADER_BYTES:
                raise InputError(f"{file.name} cannot be used: its header is cut", DAMAGE_HINT)
            count = int.from_bytes(head[8:12], "little")
            begin = TOKEN_HEADER_BYTES
            kind = TOKEN_TYPES[magic]
        else:
            _validate_token_type(file, options.dtype and dtype)
            begin = 0
            kind = dtype
            count = file.size // np.dtype(dtype).itemsize
        _validate_end(file, begin + count * np.dtype(kind).itemsize)
        arrays.append({"tokens": _divide_tokens(file, begin, count, kind, block)})
    return _ArraySource("tokens", files, arrays, options)


def _validate_end(file: DataFile, end: int) -> None:
    """Raise InputError if more follows what the header of a file, or its type, describes."""
    if file.size > end:
        raise InputError(
            f"{file.name}: {file.size - end:,} bytes follow its last value", DAMAGE_HINT
        )


def _validate_token_type(file: DataFile, given: str | None) -> None:
    """Validate that not each second token is the rest of one of twice as many bits.

    Args:
        file: The file.
        given: The type that the caller says; None if tokens are taken for those of 16 bits.

    Raises:
        InputError: It is 0 or small.
    """
    data = file.read(0, min(JUDGED_BYTES, file.size // 8 * 8))
    for kind, likely, denial in MISTAKEN_TYPES:
        tokens = np.frombuffer(data, kind)
        if given not in (None, kind) or given == denial or len(tokens) <= MIN_TOKENS_JUDGED:
            continue
        low, high = (np.unique(part[part > 0]) for part in (tokens[::2], tokens[1::2]))
        if 4 * len(high) < len(low) and high.max(initial=0) < MAX_HIGH_BITS:
            bits = 8 * tokens.itemsize
            problem = f"each second token of {bits} bits is 0 or small, as of {2 * bits} bits"
            hint = f'dtype="{likely}"; or dtype="{denial}" if they are right'
            raise InputError(f"{file.name}: {problem}", hint)


def _find_token_type(options: OpenOptions) -> str:
    """Return the type of tokens in files without a header.

    Raises:
        InputError: The caller has set something that is no type of whole numbers.
    """
    hint = 'dtype="uint16" or another type of whole numbers, in the order of bytes of this machine'
    with as_input_error(f"dtype={options.dtype!r}", hint, (TypeError,)):
        dtype = np.dtype(options.dtype or DEFAULT_TOKEN_TYPE)
    if dtype.kind not in "iu" or not dtype.isnative:
        raise InputError(f"dtype={options.dtype!r}", hint)
    return dtype.name


def _require_block(file: DataFile, options: OpenOptions) -> int:
    """Return the length of a block. Raises InputError if the caller has set none."""
    if options.block is None:
        raise InputError(f"{file.name} holds tokens, and block is None", BLOCK_HINT)
    return options.block


def _divide_tokens(file: DataFile, begin: int, count: int, dtype: str, block: int) -> _Rows:
    """Return blocks of tokens; the last token of a block is the first one of the next block.

    Raises:
        InputError: The file has tokens, and not one block.
    """
    if np.dtype(dtype).kind not in "iu":
        raise InputError(f"{file.name} holds {dtype}, and tokens are whole numbers", TOKENS_HINT)
    if 0 < count <= block:
        problem = f"{file.name} has {count} tokens, too few for one sample of block={block}"
        raise InputError(problem, "a smaller block=, or the other files alone")
    size = np.dtype(dtype).itemsize
    return _Rows(begin, block * size, max(0, (count - 1) // block), (block + 1,), dtype)


def open_npy(files: list[DataFile], options: OpenOptions) -> _ArraySource:
    """Return the rows of arrays, or blocks of tokens if arrays have one axis and `block` is set.

    Args:
        files: Files that numpy.save has written.
        options: What the caller of `open_data` has set.
    """
    arrays = []
    for file in files:
        begin, shape, dtype = _find_numbers(file)
        if len(shape) == 1 and options.block is not None:
            rows = _divide_tokens(file, begin, shape[0], dtype, options.block)
            arrays.append({"tokens": rows})
            continue
        row_bytes = math.prod(shape[1:]) * np.dtype(dtype).itemsize
        arrays.append({"array": _Rows(begin, row_bytes, shape[0], shape[1:], dtype)})
    return _ArraySource("npy", files, arrays, options)


def _find_numbers(file: DataFile) -> tuple[int, tuple[int, ...], str]:
    """Return where the numbers of a .npy file begin, their shape, and their type.

    Raises:
        InputError: It is no such file, or has no rows of numbers that are read as they lie.
    """
    stream: Any = FileView(file)
    with as_input_error(f"{file.name} cannot be used", DAMAGE_HINT, (ValueError,)):
        header = read_npy_header(stream)
    shape, _, dtype = header
    if header.problem:
        raise InputError(f"{file.name} {header.problem}", NPY_HINT)
    begin = stream.tell()
    _validate_end(file, begin + math.prod(shape) * dtype.itemsize)
    return begin, shape, dtype.name


def open_safetensors(files: list[DataFile], options: OpenOptions) -> _ArraySource:
    """Return the rows of tensors, all of which have the same number of rows.

    Args:
        files: Files of the safetensors library.
        options: What the caller of `open_data` has set.
    """
    arrays = [_read_tensors(file) for file in files]
    source = _ArraySource("safetensors", files, arrays, options)
    for file, tensors in zip(files, arrays, strict=True):
        _validate_end(file, max(rows.end for rows in tensors.values()))
    return source


def _read_tensors(file: DataFile) -> dict[str, _Rows]:
    """Return the tensors of a safetensors file.

    Raises:
        InputError: Its header is damaged, or it has types that are not read.
    """
    length = int.from_bytes(file.read(0, min(8, file.size)), "little")
    if not 0 < length <= min(MAX_SAFETENSORS_HEADER_BYTES, file.size - 8):
        raise InputError(f"{file.name} cannot be used: its header is cut", DAMAGE_HINT)
    errors = (ValueError, LookupError, TypeError, OverflowError)
    tensors = {}
    with as_input_error(f"{file.name} cannot be used", DAMAGE_HINT, errors):
        header = parse_json(file.read(8, 8 + length), dict)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if not entry["shape"]:
                raise InputError(
                    f"{file.name}: {name} is a single number", "tensors with a row for each sample"
                )
            count, *shape = map(int, entry["shape"])
            if (dtype := SAFETENSORS_TYPES.get(entry["dtype"])) is None:
                problem = f"{file.name}: {name} is of type {entry['dtype']}, which is not read"
                raise InputError(problem, f"tensors of {', '.join(SAFETENSORS_TYPES)}")
            begin = 8 + length + int(entry["data_offsets"][0])
            rows = _Rows(begin, 0, count, tuple(shape), dtype)
            tensors[name] = replace(rows, stride=rows.row_bytes)
    if not tensors:
        raise InputError(f"{file.name} holds no tensors", "a file with some")
    _validate_neighbours(file, 8 + length, tensors)
    return tensors


def _validate_neighbours(file: DataFile, end: int, tensors: dict[str, _Rows]) -> None:
    """Raise InputError if a tensor does not begin where the one before ends, the first at `end`."""
    for name, rows in sorted(tensors.items(), key=lambda item: item[1].begin):
        if rows.begin != end:
            problem = f"{name} begins at byte {rows.begin:,}, and the tensor before ends at {end:,}"
            raise InputError(f"{file.name} cannot be used: {problem}", DAMAGE_HINT)
        end = rows.end
