"""Arrays that lie row after row in a stream, as tables: NPZ members, and IDX files, gzip'd or not."""

from __future__ import annotations

import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from stepladder.data.formats import idx
from stepladder.data.table import Block, Column, Table, chosen, identity, row_bytes, rows_per_block, unusable

DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError)


@dataclass(kw_only=True)
class StreamTable(Table):
    """path: what errors name."""

    path: Path

    @abstractmethod
    def open(self, streams: ExitStack) -> dict[str, IO[bytes]]:
        """A stream per column, at its first row. They close with `streams`."""

    def blocks(self, skip: int) -> Iterator[Block]:
        try:
            with ExitStack() as opened:
                streams = self.open(opened)
                for name, stream in streams.items():
                    pass_over(stream, skip * self.columns[name].row_bytes)
                size = rows_per_block(self.columns)
                for lo in range(skip, self.total, size):
                    count = min(size, self.total - lo)
                    block = {n: read_rows(s, self.columns[n], count, f"{n}, row {lo}") for n, s in streams.items()}
                    self.done = lo + count
                    yield block
        except DAMAGE as error:
            raise unusable(self.path, error) from error


def pass_over(stream: IO[bytes], count: int) -> None:
    while count and (read := len(stream.read(min(count, 1 << 20)))):
        count -= read


def read_rows(stream: IO[bytes], column: Column, rows: int, where: str) -> np.ndarray:
    data = stream.read(rows * column.row_bytes)
    if len(data) != rows * column.row_bytes:
        raise EOFError(f"the data of {where} and after ends early")
    return np.frombuffer(data, column.dtype).reshape(rows, *column.shape)


def common_length(lengths: dict[str, int], path: Path, wrong: str = "", hint: str = "") -> int:
    """The rows that all of them have. lengths: by what a message calls the column.  wrong: how it begins."""
    if len(set(lengths.values())) != 1:
        found = ", ".join(f"{name} has {rows} rows" for name, rows in lengths.items())
        raise unusable(path, wrong + found, hint)
    return next(iter(lengths.values()))


# -- NPZ --------------------------------------------------------------------------------------------------------


class NpzTable(StreamTable):
    def open(self, streams: ExitStack) -> dict[str, IO[bytes]]:
        archive = streams.enter_context(zipfile.ZipFile(self.path))
        members = {name: streams.enter_context(archive.open(f"{name}.npy")) for name in self.columns}
        for stream in members.values():
            read_npy_head(stream)
        return members


def npz_table(path: Path, names: tuple[str, ...]) -> NpzTable:
    """The arrays `names` (all by default), a row per sample each."""
    try:
        with zipfile.ZipFile(path) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
            heads = {name: npy_head(archive, name, path) for name in chosen(names, there, path)}
    except (*DAMAGE, ValueError) as error:
        raise unusable(path, error) from error
    if not heads:
        raise unusable(path, "it holds no arrays")
    columns = {name: Column(dtype, shape[1:]) for name, (shape, dtype) in heads.items()}
    lengths = {name: shape[0] for name, (shape, _) in heads.items()}
    wrong, hint = "its arrays differ in length: ", "--columns with those that belong together"
    rows = common_length(lengths, path, wrong, hint)
    return NpzTable(str(path), columns, identity("npz", path), rows, row_bytes(columns), path=path)


def npy_head(archive: zipfile.ZipFile, name: str, path: Path) -> tuple[tuple[int, ...], np.dtype[Any]]:
    with archive.open(f"{name}.npy") as stream:
        shape, fortran, dtype = read_npy_head(stream)
    if not shape or dtype.kind not in "biuf" or (fortran and len(shape) > 1) or not dtype.isnative:
        kind = "Fortran order" if fortran else f"{dtype} of shape {list(shape)}"
        raise unusable(
            path, f"{name}.npy is {kind}, not rows of numbers", "np.savez with C-ordered arrays of numbers"
        )
    return shape, dtype


def read_npy_head(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(stream)


# -- IDX --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class IdxTable(StreamTable):
    """files, and where in them the rows begin: by column."""

    files: dict[str, Path]
    starts: dict[str, int]

    def open(self, streams: ExitStack) -> dict[str, IO[bytes]]:
        opened = {name: streams.enter_context(idx.open_plain(self.files[name])) for name in self.columns}
        for name, stream in opened.items():
            stream.read(self.starts[name])
        return opened


def idx_table(files: dict[str, Path], names: tuple[str, ...], source: Path) -> IdxTable:
    """IDX files with a row per sample each, by column; those of `names` (all by default)."""
    heads = {name: idx_head(files[name]) for name in chosen(names, files, source)}
    rows = common_length({files[name].name: shape[0] for name, (shape, _) in heads.items()}, source)
    columns = {name: Column(np.dtype(np.uint8), shape[1:]) for name, (shape, _) in heads.items()}
    return IdxTable(
        str(source), columns, identity("idx", *files.values()), rows, row_bytes(columns),
        path=source, files=files, starts={name: start for name, (_, start) in heads.items()},
    )  # fmt: skip


def idx_head(path: Path) -> tuple[tuple[int, ...], int]:
    try:
        with idx.open_plain(path) as stream:
            return idx.read_header(stream.read(64), path)
    except DAMAGE as error:
        raise unusable(path, error) from error


def idx_magic(path: Path) -> int:
    try:
        with idx.open_plain(path) as stream:
            return int.from_bytes(stream.read(4), "big")
    except DAMAGE:
        return -1
