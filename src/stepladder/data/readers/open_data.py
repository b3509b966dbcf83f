"""`open_data`: a source over the files of a path or URL, whose format is recognised."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import fsdecode
from pathlib import Path
from typing import Any, Protocol

from stepladder.core.errors import InputError, as_input_error
from stepladder.data.readers.batches import Decode
from stepladder.data.readers.block_cache import CACHE_BYTES, BlockCache
from stepladder.data.readers.damage import Damage
from stepladder.data.readers.files import DATA_HINT, DataFile
from stepladder.data.readers.images import IMAGE_SUFFIXES, open_images
from stepladder.data.readers.mds import MDS_INDEX, open_mds
from stepladder.data.readers.open_options import OpenOptions, convert_columns, list_names
from stepladder.data.readers.record_index import INDEX_SUFFIX
from stepladder.data.shards.shard import H5_SUFFIXES
from stepladder.data.source import Source

CACHED_PREFIX = "cache-"  # of what Hugging Face's datasets keep beside their files


@dataclass(frozen=True)
class FileFormat:
    """A format whose files are each opened by themselves.

    Args:
        suffixes: What the names of its files end in.
        module: The module that reads it, in this package.
        function: The function of that module that opens files.
    """

    suffixes: tuple[str, ...]
    module: str
    function: str


TOKENS = "tokens"
FORMATS = {
    "parquet": FileFormat((".parquet",), "parquet_files", "open_parquet_files"),
    "arrow": FileFormat((".arrow",), "arrow_files", "open_arrow_files"),
    "webdataset": FileFormat((".tar",), "webdataset", "open_tar_files"),
    "array_record": FileFormat(
        (".arrayrecord", ".array_record"), "array_record", "ArrayRecordSource"
    ),
    "jsonl": FileFormat((".jsonl", ".ndjson"), "lines", "open_json_lines"),
    "csv": FileFormat((".csv", ".tsv"), "lines", "open_csv"),
    TOKENS: FileFormat((".bin",), "arrays", "open_tokens"),
    "npy": FileFormat((".npy",), "arrays", "open_npy"),
    "safetensors": FileFormat((".safetensors",), "arrays", "open_safetensors"),
}
MDS = "mds"
IMAGE_FOLDER = "images"
INDEXED_FORMATS = ("webdataset", "jsonl", "csv")
FORMAT_NAMES = ", ".join([*FORMATS, MDS, IMAGE_FOLDER])
FORMAT_HINT = f"open_data(PATH, format=FORMAT), where FORMAT is one of: {FORMAT_NAMES}"


class OpenedSource(Source, Protocol):
    """A source that `open_data` returns."""

    # The name of its format.
    format: str

    @property
    def num_files(self) -> int:
        """The number of files."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes of all files."""
        ...

    @property
    def columns(self) -> dict[str, str]:
        """The columns and their types, for people."""
        ...

    @property
    def fingerprint(self) -> str | None:
        """A text that is another one when the samples are; None if `decode` may change unseen."""
        ...

    def find_damage(self) -> Iterator[Damage]:
        """Read all samples, and yield those that cannot be read."""
        ...


def open_data(
    path: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] | None = None,
    decode: Decode | None = None,
    format: str | None = None,
    block: int | None = None,
    dtype: str | None = None,
    chunk_rows: int | None = None,
    cache_bytes: int = CACHE_BYTES,
    index_beside: bool = False,
) -> OpenedSource:
    """Open data where they lie, without conversion; give the result as a job's data.

    The format is recognised by the names of the files. A batch is a dict by column; with `columns`
    it is a list in that order.

    Args:
        path: A file, a folder, a pattern such as "data/*.parquet", a URL, or a list of these.
        columns: The columns to read, all by default.
        decode: Makes a sample of the dict of a row or record, as a Dataset would return it.
        format: The name of the format, where names of files do not tell it.
        block: Tokens of a sample, in files of tokens; each sample has one more.
        dtype: The type of tokens in files without a header, by default uint16.
        chunk_rows: Records that are read together, by default about a megabyte.
        cache_bytes: How much of what is read over the network may stay on disk.
        index_beside: Write an index of records beside its file, not into the user's cache.

    Returns:
        The source, which reads samples by index.

    Raises:
        InputError: There is no such data, they are damaged, or a library is missing.
    """
    options = OpenOptions(
        convert_columns(columns),
        decode,
        BlockCache(cache_bytes),
        chunk_rows,
        block,
        dtype,
        index_beside,
    )
    paths = list_given(path)
    if format == MDS:
        return open_mds(paths, options)
    return open_named(paths, format, options)


def list_given(path: str | Path | Sequence[str | Path]) -> list[str]:
    """Return the paths that a caller of `open_data` gives. Raises InputError if there are none."""
    given: Any = path
    if isinstance(path, (str, Path)):
        given = [path]
    with as_input_error(f"open_data({path!r:.60})", DATA_HINT, (TypeError,)):
        paths = list(map(fsdecode, given))
    if not paths or "" in paths:  # which would be the folder of the process
        kind = "path" if paths else "list"
        raise InputError(f"open_data got an empty {kind}", DATA_HINT)
    return paths


def open_named(paths: list[str], format: str | None, options: OpenOptions) -> OpenedSource:
    """Return the source of all files that paths name.

    Raises:
        InputError: They are of no format that is known.
    """
    listed = [name for path in paths for name in list_names(path)]
    names = [name for name in listed if not name.endswith(INDEX_SUFFIX)]
    chosen = format or find_format(names)
    if chosen == MDS:
        indexes = [name for name in names if Path(name).name == MDS_INDEX]
        return open_mds([name.removesuffix(MDS_INDEX) or "." for name in indexes], options)
    if chosen == IMAGE_FOLDER:
        return open_images(paths, names, options)
    if chosen not in FORMATS:
        problem = "is of no format that is known by its name"
        if format is not None:
            problem = f"cannot be read as {format!r}"
        is_shard = has_suffix(paths[0], H5_SUFFIXES)
        hint = f'stepladder.Shards("{paths[0]}")' if is_shard else FORMAT_HINT
        raise InputError(f"{paths[0]} {problem}", hint)
    file_format = FORMATS[chosen]
    if format is None:
        names = select_names(names, paths, chosen)
    if not names:
        raise InputError(f"{paths[0]} holds no files", DATA_HINT)
    return open_files(file_format, [options.open_file(name) for name in names], options)


def select_names(names: list[str], paths: list[str], chosen: str) -> list[str]:
    """Return the files of the chosen format.

    Raises:
        InputError: A path, not of a folder, names another file: its samples would be missing.
    """
    suffixes = FORMATS[chosen].suffixes
    for path in paths:
        if path in names and not has_suffix(path, suffixes):
            raise InputError(f"{path} is no file of {chosen}, as others are", "files of one format")
    return [name for name in names if has_suffix(name, suffixes)]


def open_files(
    file_format: FileFormat, files: list[DataFile], options: OpenOptions
) -> OpenedSource:
    """Return the source of files of one format, whose module may need a library."""
    try:
        module = importlib.import_module(f"stepladder.data.readers.{file_format.module}")
    except ImportError as error:
        raise InputError(
            f"{files[0].name} needs pyarrow", "pip install 'stepladder[parquet]'"
        ) from error
    source: OpenedSource = getattr(module, file_format.function)(files, options)
    return source


def find_format(names: list[str]) -> str | None:
    """Return the format that most names of files tell, or None."""
    base_names = [Path(name).name for name in names]
    if MDS_INDEX in base_names and (len(names) == 1 or any(".mds" in name for name in base_names)):
        return MDS
    suffixes: dict[str, Any] = {name: one.suffixes for name, one in FORMATS.items()}
    suffixes[IMAGE_FOLDER] = IMAGE_SUFFIXES
    counts = {
        name: sum(has_suffix(file, endings) for file in base_names)
        for name, endings in suffixes.items()
    }
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else None


def has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file has one of the suffixes, and is no cache of another program."""
    return name.lower().endswith(suffixes) and not Path(name).name.startswith(CACHED_PREFIX)
