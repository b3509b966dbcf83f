"""`open_data`: a source over the files of a path or URL, whose format is recognised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import fsdecode
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.extras import import_extra
from stepladder.data.readers.batches import Decode
from stepladder.data.readers.block_cache import CACHE_BYTES, BlockCache
from stepladder.data.readers.companions import (
    IMAGE_SUFFIXES,
    INDEX_SUFFIX,
    has_suffix,
    is_companion,
)
from stepladder.data.readers.file_rows import OpenedSource
from stepladder.data.readers.files import DATA_HINT, DataFile, is_url
from stepladder.data.readers.images import open_images
from stepladder.data.readers.listing import (
    is_folder,
    list_names,
    relate,
    validate_all_parts,
    validate_distinct,
    validate_finished,
    validate_one_set,
)
from stepladder.data.readers.mds import MDS_INDEX, open_mds
from stepladder.data.readers.open_options import OpenOptions, convert_columns
from stepladder.data.shards.shard import H5_SUFFIXES


@dataclass(frozen=True)
class _FileFormat:
    """A format.

    Args:
        suffixes: What the names of its files end in.
        module: The module that reads it, in this package.
        function: The function of that module that opens files.
    """

    suffixes: tuple[str, ...]
    module: str
    function: str


TOKENS = "tokens"
MDS = "mds"
IMAGE_FOLDER = "images"
FORMATS = {
    "parquet": _FileFormat((".parquet",), "parquet_files", "open_parquet_files"),
    "arrow": _FileFormat((".arrow", ".feather", ".ipc"), "arrow_files", "open_arrow_files"),
    "webdataset": _FileFormat((".tar",), "webdataset", "TarSource"),
    "array_record": _FileFormat(
        (".arrayrecord", ".array_record"), "array_record", "ArrayRecordSource"
    ),
    "jsonl": _FileFormat((".jsonl", ".ndjson"), "lines", "JsonLinesSource"),
    "csv": _FileFormat((".csv", ".tsv"), "lines", "CsvSource"),
    TOKENS: _FileFormat((".bin",), "arrays", "open_tokens"),
    "npy": _FileFormat((".npy",), "arrays", "open_npy"),
    "safetensors": _FileFormat((".safetensors",), "arrays", "open_safetensors"),
    MDS: _FileFormat((), "mds", "open_mds"),  # which its index tells
    IMAGE_FOLDER: _FileFormat(IMAGE_SUFFIXES, "images", "open_images"),
}
INDEXED_FORMATS = ("webdataset", "jsonl", "csv")
FORMAT_NAMES = ", ".join(FORMATS)
FORMAT_HINT = f"format=FORMAT, one of: {FORMAT_NAMES}"
COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4", ".zip")
COMPRESSED_HINT = "a decompressed copy in a folder of its own, such as of gzip -dk or zstd -dk"


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
    header: Sequence[str] | None = None,
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
        header: The names of all columns of CSV files without a first line that has them.

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
        convert_columns(header, "header"),
    )
    paths = _list_given(path)
    if format == MDS:
        local = [path for path in paths if not is_url(path)]
        return open_mds(paths, [name for path in local for name in list_names(path)], options)
    return open_named(paths, format, options)


def _list_given(path: str | Path | Sequence[str | Path]) -> list[str]:
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
    """  # noqa: DOC501 - make_format_error makes an InputError
    listed = [name for path in paths for name in list_names(path)]
    chosen = format or find_format(listed)
    if chosen == MDS:
        names = [name for name in listed if Path(name).name == MDS_INDEX]
    elif chosen in FORMATS:
        names = _select_names(listed, paths, chosen, format is not None)
    else:
        raise _make_format_error(paths[0], listed, format)
    if not names:
        raise InputError(f"{paths[0]} holds no files", DATA_HINT)
    validate_distinct(names)
    validate_all_parts(paths, names)
    for path in filter(is_folder, paths):
        validate_finished(path, relate(listed, path))
        if chosen != IMAGE_FOLDER:  # whose own names say nothing
            validate_one_set(path, relate(names, path))
    if chosen == IMAGE_FOLDER:
        return open_images(paths, names, options, format is not None)
    if chosen == MDS:
        return open_mds([name.removesuffix(MDS_INDEX) or "." for name in names], listed, options)
    return _open_files(FORMATS[chosen], [options.open_file(name) for name in names], options)


def _make_format_error(path: str, listed: list[str], format: str | None) -> InputError:
    """Return the error for files of no format that is read."""
    if format is not None:
        return InputError(f"{path} cannot be read as {format!r}", FORMAT_HINT)
    if any(has_suffix(name, COMPRESSED) for name in listed):
        return InputError(f"{path} is compressed, which is not read", COMPRESSED_HINT)
    hint = f'stepladder.Shards("{path}")' if has_suffix(path, H5_SUFFIXES) else FORMAT_HINT
    return InputError(f"{path} is of no format that is known by its name", hint)


def _select_names(listed: list[str], paths: list[str], chosen: str, is_given: bool) -> list[str]:
    """Return the files of the chosen format.

    Args:
        listed: The files that the paths name.
        paths: The paths.
        chosen: The format.
        is_given: Whether the caller says the format, not the names of files.

    Raises:
        InputError: Another file may hold samples, which would be missing.
    """
    suffixes = FORMATS[chosen].suffixes
    names = []
    for name in listed:
        if has_suffix(name, suffixes) or (is_given and chosen != IMAGE_FOLDER):
            if not name.endswith(INDEX_SUFFIX):
                names.append(name)
        elif not is_given and (name in paths or not is_companion(name, chosen == IMAGE_FOLDER)):
            hint = f"files of one format alone, such as 'data/*{suffixes[0]}'"
            if chosen == IMAGE_FOLDER:
                kinds = ", ".join(IMAGE_SUFFIXES)
                hint = f'images of {kinds}; format="images" leaves out all other files'
            if has_suffix(name, COMPRESSED):
                hint = COMPRESSED_HINT
            raise InputError(f"{name} is no file of {chosen}, as others are", hint)
    return names


def _open_files(
    file_format: _FileFormat, files: list[DataFile], options: OpenOptions
) -> OpenedSource:
    """Return the source of files of one format, whose module may need a library."""
    name = f"stepladder.data.readers.{file_format.module}"
    module = import_extra(name, f"{files[0].name} needs pyarrow", "parquet")
    source: OpenedSource = getattr(module, file_format.function)(files, options)
    return source


def find_format(names: list[str]) -> str | None:
    """Return the format that most names of files tell, or None."""
    base_names = [Path(name).name for name in names]
    if MDS_INDEX in base_names and (len(names) == 1 or any(".mds" in name for name in base_names)):
        return MDS
    counts = {
        name: sum(has_suffix(file, file_format.suffixes) for file in names)
        for name, file_format in FORMATS.items()
    }
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else None
