"""Files as an adversary would give them: functions that write them into a folder, or read them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from data_files import write_mds
from stepladder import open_data
from stepladder.data.table import Ragged

Make = Callable[[Path], Any]
ONE = '{"x": 1}\n'
TWO = '{"x": 2}\n'


def files(**contents: str | bytes) -> Make:
    """Write files, in whose names "__" is a slash and "_dot_" a dot."""

    def make(folder: Path) -> None:
        for name, content in contents.items():
            path = folder / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return make


def steps(*makes: Make) -> Make:
    return lambda folder: [make(folder) for make in makes] and None


def link(name: str, target: str) -> Make:
    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)

    return make


def hard_link(name: str, target: str) -> Make:
    return lambda folder: (folder / name).hardlink_to(folder / target)


def csv(text: str | bytes, name: str = "a_dot_csv") -> Make:
    return files(**{name: text})


def jsonl(text: str | bytes) -> Make:
    return files(a_dot_jsonl=text)


def tar(*members: tuple[str, bytes], cut: int | None = None, tail: bytes = b"") -> Make:
    """Write a tar file.

    Args:
        members: The names and the contents.
        cut: How many bytes of the file stay.
        tail: What follows them.
    """

    def make(folder: Path) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for name, content in members:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        (folder / "a.tar").write_bytes(buffer.getvalue()[:cut] + tail)

    return make


def tar_link(kind: bytes) -> Make:
    def make(folder: Path) -> None:
        with tarfile.open(folder / "a.tar", "w") as archive:
            archive.addfile(tarfile.TarInfo("0.txt"))
            info = tarfile.TarInfo("1.txt")
            info.type = kind
            info.linkname = "0.txt"
            archive.addfile(info)

    return make


def table(name: str = "a.parquet", **columns: Any) -> Make:
    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path)

    return make


def array(value: Any, tail: bytes = b"") -> Make:
    def make(folder: Path) -> None:
        with (folder / "a.npy").open("wb") as file:
            np.save(file, value)
            file.write(tail)

    return make


def image(name: str, mode: str = "RGB", size: tuple[int, int] = (2, 1), **options: Any) -> Make:
    def make(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size).save(path, **options)

    return make


def pages(folder: Path) -> None:
    """Write an image of two pages."""
    (folder / "a").mkdir()
    page = Image.new("RGB", (2, 1))
    page.save(folder / "a" / "0.tif", save_all=True, append_images=[page])


def photo(second_size: tuple[int, int]) -> Make:
    """Write a photo with a second picture of some size in it, as telephones do."""

    def make(folder: Path) -> None:
        (folder / "a").mkdir()
        second = Image.new("RGB", second_size)
        first = Image.new("RGB", (16, 8))
        first.save(folder / "a/0.jpg", format="MPO", save_all=True, append_images=[second])

    return make


def mds(names: int, shards: int) -> Make:
    """Write a folder of MDS, whose index names its first shard some times, and copy the shard.

    Args:
        names: How often the index names the shard.
        shards: How many files there are.
    """

    def make(folder: Path) -> None:
        write_mds(folder)
        index = json.loads((folder / "index.json").read_text())
        for path in folder.glob("*.mds"):
            if path.name != index["shards"][0]["raw_data"]["basename"]:
                path.unlink()
        index["shards"] = index["shards"][:1] * names
        (folder / "index.json").write_text(json.dumps(index))
        for number in range(1, shards):
            content = (folder / "shard.00000.mds").read_bytes()
            (folder / f"shard.{number:05d}.mds").write_bytes(content)

    return make


def cut(make: Make, name: str, num_bytes: int) -> Make:
    """Cut the last bytes of a file."""

    def cut_file(folder: Path) -> None:
        make(folder)
        path = folder / name
        path.write_bytes(path.read_bytes()[:-num_bytes])

    return cut_file


def saved(*names: str, listed: tuple[str, ...], **state: Any) -> Make:
    """Write a folder as save_to_disk does: each file has a row with its number."""

    def make(folder: Path) -> None:
        for number, name in enumerate(names):
            rows = pa.table({"x": [number]})
            with (
                pa.OSFile(str(folder / name), "wb") as file,
                pa.ipc.new_stream(file, rows.schema) as out,
            ):
                out.write_table(rows)
        entries = [{"filename": name} for name in listed]
        (folder / "state.json").write_text(json.dumps({"_data_files": entries, **state}))

    return make


def tokens(*values: int, dtype: str = "<u2", tail: bytes = b"") -> Make:
    return lambda folder: (
        (folder / "a.bin").write_bytes(np.array(values, dtype).tobytes() + tail) and None
    )


def write_split(folder: Path) -> None:
    folder.mkdir()
    write_mds(folder)


def read_all(folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return all rows, each read with its neighbour."""
    monkeypatch.chdir(folder)
    options = dict(options)
    source = open_data(options.pop("path", str(folder)), **options)
    return source, source.read(np.arange(len(source)))


def to_list(column: Any) -> list[Any]:
    if isinstance(column, Ragged):
        edges = np.asarray(column.offsets).tolist()
        return [np.asarray(column.values)[lo:hi].tolist() for lo, hi in pairwise(edges)]
    if isinstance(column, (np.ndarray, torch.Tensor)):
        return list(column.tolist())
    return list(column)
