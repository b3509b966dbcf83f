"""What a data folder or file holds, whatever it is: the facts that `stepladder data info` shows."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data.disk import refuse_no_file, sha256_of
from stepladder.data.formats import idx
from stepladder.data.movielens.ratings import locate, read_ratings
from stepladder.data.shards.dataset import Shards, advised_chunk_rows, bad_shards, is_shards
from stepladder.data.shards.reader import Reader


def describe(path: Path, check: bool = False) -> dict[str, Any]:
    """The facts about a folder or file, as `info --json` prints them. check: read all shards too."""
    if not path.is_dir():
        refuse_no_file(path)
    if parts_of(path):
        return describe_shards(path, check)
    file = locate(path) or (path if zipfile.is_zipfile(path) else None)
    if file is not None:
        ratings = read_ratings(file)
        counts = {
            "rows": len(ratings.users),
            "users": len(ratings.user_ids),
            "items": len(ratings.item_ids),
        }
        return {
            "dataset": "movielens-small",
            "path": str(path),
            **counts,
            "bytes": file.stat().st_size,
        }
    if (text := path / "input.txt").is_file():
        return {"dataset": "text", "path": str(path), "bytes": text.stat().st_size}
    if not path.is_dir():
        return files_facts("idx", path, [(path, idx.read_idx(path))])
    if idx.has_mnist(path):
        arrays = vars(idx.read_mnist(path))
        return files_facts(
            "mnist", path, [(p, arrays[k]) for k, p in idx.mnist_paths(path).items()]
        )
    raise InputError(
        f"{path} holds neither MNIST files nor ratings.csv nor input.txt nor shards",
        idx.get_hint(path),
    )


def files_facts(dataset: str, path: Path, arrays: list[tuple[Path, np.ndarray]]) -> dict[str, Any]:
    files = [array_facts(file, array) for file, array in arrays]
    return {
        "dataset": dataset,
        "path": str(path),
        "files": files,
        "bytes": sum(facts["bytes"] for facts in files),
    }


def array_facts(path: Path, array: np.ndarray) -> dict[str, Any]:
    """Rows, shape, dtype and size on disk; label counts, or mean and deviation of pixels of 0..1."""
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
    # By histogram, in pieces: array.std() would make a float copy, eight times the size.
    parts = np.array_split(array, 1 + len(array) // 1000)
    counts = sum(np.bincount(part.ravel(), minlength=256) for part in parts)
    values = np.arange(256) / 255
    mean = float(np.average(values, weights=counts))
    variance = float(np.average((values - mean) ** 2, weights=counts))
    return facts | {"mean": round(mean, 6), "std": round(variance**0.5, 6)}


# -- shards ----------------------------------------------------------------------------------------


def parts_of(path: Path) -> dict[str, Path]:
    """The data sets at `path`, by name: itself as ".", or those of its subfolders, such as train
    and test.
    """
    if is_shards(path):
        return {".": path}
    if not path.is_dir():
        return {}
    return {
        child.name: child for child in sorted(path.iterdir()) if child.is_dir() and is_shards(child)
    }


def describe_shards(path: Path, check: bool = False) -> dict[str, Any]:
    """Rows, chunks, bytes and columns, and the chunk size to take. check: read and check all of it
    too.

    InputError names the shard and chunk that is damaged.
    """
    parts = [part_facts(name, Shards(child), check) for name, child in parts_of(path).items()]
    totals = {name: sum(part[name] for part in parts) for name in ("bytes", "rows", "chunks")}
    return {"dataset": "shards", "path": str(path), **totals, "parts": parts}


def part_facts(name: str, shards: Shards, check: bool) -> dict[str, Any]:
    if check:
        check_all(shards)
    return {
        "name": name,
        "rows": len(shards),
        "shards": len(shards.shards),
        "chunks": sum(shard.num_chunks for shard in shards.shards),
        "bytes": sum(shard.path.stat().st_size for shard in shards.shards),
        "columns": {name: str(column) for name, column in shards.columns.items()},
        "chunk_rows": max(shard.chunk_rows for shard in shards.shards),
        "chunk_bytes": shards.chunk_bytes,
        "advised_chunk_rows": advised_chunk_rows(
            shards.chunk_bytes / max(s.chunk_rows for s in shards.shards)
        ),
    }


def check_all(shards: Shards) -> None:
    """Read every chunk, which checks it, then every file's sha256. InputError for the first that is
    wrong.
    """
    with Reader(shards) as reader:
        for first in reader.edges[:-1]:
            reader.read(np.array([first]))
    for shard in shards.shards:
        if shard.sha256 is not None and sha256_of(shard.path) != shard.sha256:
            raise bad_shards(
                shard.path.parent, f"{shard.path} is damaged outside of its chunks (sha256)"
            )
