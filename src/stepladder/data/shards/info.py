"""What a folder of shards holds, and whether its bytes are those that were written."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from stepladder.core.errors import InputError
from stepladder.data.shards.dataset import Shards, advised_chunk_rows, is_shards, shard_hint
from stepladder.data.shards.reader import Reader


def parts_of(path: Path) -> dict[str, Path]:
    """The data sets at `path`, by name: itself as ".", or those of its subfolders, such as train and test."""
    if is_shards(path):
        return {".": path}
    if not path.is_dir():
        return {}
    return {child.name: child for child in sorted(path.iterdir()) if child.is_dir() and is_shards(child)}


def describe_shards(path: Path, check: bool = False) -> dict[str, Any]:
    """Rows, chunks, bytes and columns, and the chunk size to take. check: read and check all of it too.

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
        "advised_chunk_rows": advised_chunk_rows(shards.chunk_bytes / max(s.chunk_rows for s in shards.shards)),
    }


def check_all(shards: Shards) -> None:
    """Read every chunk, which checks it, then every file's sha256. InputError for the first that is wrong."""
    with Reader(shards) as reader:
        for first in reader.edges[:-1]:
            reader.read(np.array([first]))
    for shard in shards.shards:
        if shard.sha256 is not None:
            with shard.path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                    raise InputError(
                        f"{shard.path} is damaged outside of its chunks (sha256)", shard_hint(shard.path.parent)
                    )


def shard_lines(facts: dict[str, Any]) -> list[str]:
    """The same for a person."""
    text = []
    for part in facts["parts"]:
        columns = ", ".join(f"{name} ({column})" for name, column in part["columns"].items())
        text.append(f"{part['name']}: {part['rows']:,} rows of {columns}")
        text.append(
            f"  {part['bytes']:,} bytes; files: {part['shards']:,}; chunks: {part['chunks']:,}, each of"
            f" {part['chunk_rows']:,} rows and {part['chunk_bytes']:,} bytes"
        )
        advised = part["advised_chunk_rows"]
        if not advised / 4 <= part["chunk_rows"] <= advised * 4:
            text.append(f"  better: chunks of about 0.4 MB, stepladder data shard ... --chunk-rows {advised}")
        else:
            text.append("  a good chunk size: about 0.4 MB is advised")
    return text
