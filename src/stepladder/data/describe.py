"""Descriptions of data folders and files, as `stepladder data info` shows them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data import idx
from stepladder.data.local_files import compute_sha256, validate_readable
from stepladder.data.movielens.ratings import find_file, read_ratings
from stepladder.data.readers.file_rows import OpenedSource
from stepladder.data.readers.listing import list_names
from stepladder.data.readers.open_data import TOKENS, find_format, open_data
from stepladder.data.shards.array_files import npz_table, read_idx_magic
from stepladder.data.shards.dataset import Shards
from stepladder.data.shards.inputs import NPZ_SUFFIX, holds_shards, make_kind_error
from stepladder.data.shards.reader import ShardReader
from stepladder.data.shards.shard import recommend_chunk_rows, shards_error

HISTOGRAM_ROWS = 1000  # images that are counted at once


def describe_data(
    path: Path, check: bool = False, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the facts about a folder or file, as `info --json` prints them.

    Args:
        path: A folder or file of any kind that the package knows.
        check: Read all of the shards too, and compare them with their checksums.
        settings: Arguments of `open_data`, or `columns` of Shards.

    Raises:
        InputError: The path holds nothing that is known, or something damaged.
    """
    if not path.is_dir():
        validate_readable(path)
    if find_shard_folders(path):
        return describe_shards(path, check, settings)
    if settings:
        return describe_source(str(path), settings)
    if path.suffix == NPZ_SUFFIX:
        table = npz_table(path, ())
        return {
            "dataset": "npz",
            "path": str(path),
            "bytes": path.stat().st_size,
            "rows": table.rows,
            "chunks": None,
            "num_files": 1,
            "columns": {name: str(column) for name, column in table.columns.items()},
        }
    ratings_file = find_file(path) or (path if zipfile.is_zipfile(path) else None)
    if ratings_file is not None:
        return _describe_ratings(path, ratings_file)
    if find_format(list_names(str(path))) is not None:
        return describe_source(str(path), {})
    text = path / "input.txt"
    if text.is_file():
        return {"dataset": "text", "path": str(path), "bytes": text.stat().st_size}
    return _describe_idx(path)


def _describe_idx(path: Path) -> dict[str, Any]:
    """Return the facts about an IDX file, or a folder of MNIST's."""
    if not path.is_dir():
        if read_idx_magic(path) not in (-1, idx.LABELS_MAGIC, idx.IMAGES_MAGIC):
            raise make_kind_error(str(path), "is of no kind that is known")
        return _describe_arrays("idx", path, {path: idx.read_idx(path)})
    if idx.has_mnist_files(path):
        mnist = vars(idx.read_mnist(path))
        arrays = {file: mnist[name] for name, file in idx.find_mnist_files(path).items()}
        return _describe_arrays("mnist", path, arrays)
    raise InputError(
        f"{path} holds neither MNIST files nor ratings.csv nor input.txt nor shards",
        idx.download_hint(path),
    )


def _describe_ratings(path: Path, file: Path) -> dict[str, Any]:
    ratings = read_ratings(file)
    return {
        "dataset": "movielens-small",
        "path": str(path),
        "rows": len(ratings.users),
        "users": len(ratings.user_ids),
        "items": len(ratings.item_ids),
        "bytes": file.stat().st_size,
    }


def _describe_arrays(dataset: str, path: Path, arrays: dict[Path, np.ndarray]) -> dict[str, Any]:
    files = [_describe_array(file, array) for file, array in arrays.items()]
    return {
        "dataset": dataset,
        "path": str(path),
        "files": files,
        "bytes": sum(facts["bytes"] for facts in files),
    }


def _describe_array(path: Path, array: np.ndarray) -> dict[str, Any]:
    """Return the rows, shape, type and size of an array in a file, and statistics of its values.

    Labels are counted. Pixels have the mean and the standard deviation of their values in 0..1.
    """
    facts: dict[str, Any] = {
        "name": path.name,
        "rows": len(array),
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "bytes": path.stat().st_size,
    }
    if array.ndim == 1:
        return facts | {"labels": np.bincount(array, minlength=10).tolist()}
    if not array.size:
        return facts | {"mean": None, "std": None}
    # A histogram of a few rows at a time: array.std() would make a copy of floats, eight times the
    # size.
    parts = np.array_split(array, 1 + len(array) // HISTOGRAM_ROWS)
    counts = sum(np.bincount(part.ravel(), minlength=256) for part in parts)
    values = np.arange(256) / 255
    mean = float(np.average(values, weights=counts))
    variance = float(np.average((values - mean) ** 2, weights=counts))
    return facts | {"mean": round(mean, 6), "std": round(variance**0.5, 6)}


def describe_source(path: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about data that `open_data` opens with these arguments."""
    source = open_described(path, settings)
    edges = source.chunk_edges
    return {
        "dataset": source.format,
        "path": path,
        "bytes": source.num_bytes,
        "rows": len(source),
        "chunks": None if edges is None else len(edges) - 1,
        "num_files": source.num_files,
        "columns": source.columns,
    }


def open_described(path: str, settings: dict[str, Any], index_beside: bool = False) -> OpenedSource:
    """Open data to describe or to check them; tokens as samples of one token and its target."""
    kind = settings.get("format") or find_format(list_names(path))
    return open_data(
        path, index_beside=index_beside, **({"block": 1} if kind == TOKENS else {}) | settings
    )


# -- shards ----------------------------------------------------------------------------------------


def find_shard_folders(path: Path) -> dict[str, Path]:
    """Return the sharded data sets at a path by name.

    The path itself is ".". Where it is no data set, its subfolders may be, such as train and test.
    """
    if holds_shards(path):
        return {".": path}
    if not path.is_dir():
        return {}
    return {
        child.name: child
        for child in sorted(path.iterdir())
        if child.is_dir() and holds_shards(child)
    }


def describe_shards(
    path: Path, check: bool = False, settings: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return rows, chunks, bytes and columns of sharded data sets, and the recommended chunk size.

    Args:
        path: A data set, or a folder of data sets.
        check: Read all chunks too, and compare them with their checksums.
        settings: The `columns`, if not all.

    Raises:
        InputError: A shard is missing or damaged; it names the chunk.
    """
    if settings and list(settings) != ["columns"]:
        raise InputError(f"{path} holds shards, not {', '.join(settings)}", "columns= alone")
    parts = []
    for name, folder in find_shard_folders(path).items():
        shards = Shards(folder, **(settings or {}))
        if check:
            _verify_shards(shards)
        parts.append(_describe_data_set(name, shards))
    totals = {name: sum(part[name] for part in parts) for name in ("bytes", "rows", "chunks")}
    return {"dataset": "shards", "path": str(path), **totals, "parts": parts}


def _describe_data_set(name: str, shards: Shards) -> dict[str, Any]:
    chunk_rows = max(shard.chunk_rows for shard in shards.shards)
    return {
        "name": name,
        "rows": len(shards),
        "shards": len(shards.shards),
        "chunks": sum(shard.num_chunks for shard in shards.shards),
        "bytes": sum(shard.path.stat().st_size for shard in shards.shards),
        "columns": {name: str(column) for name, column in shards.columns.items()},
        "chunk_rows": chunk_rows,
        "chunk_bytes": shards.chunk_bytes,
        "advised_chunk_rows": recommend_chunk_rows(shards.chunk_bytes / chunk_rows),
    }


def _verify_shards(shards: Shards) -> None:
    """Read all chunks and files, and raise InputError if a checksum shows that one is damaged."""
    with ShardReader(shards) as reader:
        for first_row in reader.chunk_edges[:-1]:
            reader.read(np.array([first_row]))
    for shard in shards.shards:
        if shard.sha256 is not None and compute_sha256(shard.path) != shard.sha256:
            raise shards_error(
                shard.path.parent, f"{shard.path} is damaged outside of its chunks (sha256)"
            )
