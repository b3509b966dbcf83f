"""What a data folder or file holds, whatever it is: the facts that `stepladder data info` shows."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data.formats import idx
from stepladder.data.movielens.ratings import describe_ratings, locate
from stepladder.data.shards.info import describe_shards, parts_of


def describe(path: Path, check: bool = False) -> dict[str, Any]:
    """The facts about a folder or file, as `info --json` prints them. check: read all shards too."""
    if parts_of(path):
        return describe_shards(path, check)
    ratings = locate(path) or (path if zipfile.is_zipfile(path) else None)
    if ratings is not None:
        return describe_ratings(path, ratings)
    if not path.is_dir():
        return files_facts("idx", path, [(path, idx.read_idx(path))])
    if idx.has_mnist(path):
        arrays = vars(idx.read_mnist(path))
        return files_facts("mnist", path, [(p, arrays[k]) for k, p in idx.mnist_paths(path).items()])
    raise InputError(f"{path} holds neither MNIST files nor ratings.csv nor shards", idx.get_hint(path))


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
