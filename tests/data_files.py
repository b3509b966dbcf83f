"""The same rows in files of many formats, written without the library of the format where it is
simple: id, x (four numbers), y (a class), text.
"""

from __future__ import annotations

import csv
import io
import json
import os
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

ROWS = 240
FILES = 3
CHUNK = 20
PER_FILE = ROWS // FILES
Row = dict[str, Any]


def make_rows(first: int = 0, count: int = ROWS) -> list[Row]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    return [
        {"id": i, "x": x[i], "y": i % 3, "text": f'text "{i}",\n'}
        for i in range(first, first + count)
    ]


def each_file() -> Iterator[tuple[int, list[Row]]]:
    for number in range(FILES):
        yield number, make_rows(number * PER_FILE, PER_FILE)


def make_table(rows: list[Row]) -> pa.Table:
    x = pa.array(np.concatenate([row["x"] for row in rows]))
    columns = {name: [row[name] for row in rows] for name in ("id", "y", "text")}
    tags = [[row["id"]] * (row["id"] % 3) for row in rows]
    return pa.table(columns | {"x": pa.FixedSizeListArray.from_arrays(x, 4), "tags": tags})


def write_parquet(folder: Path) -> None:
    for number, rows in each_file():
        pq.write_table(
            make_table(rows),
            folder / f"part-{number}.parquet",
            row_group_size=CHUNK,
            write_page_checksum=True,
        )


def write_arrow(folder: Path) -> None:
    for number, rows in each_file():
        table = make_table(rows)
        path = str(folder / f"data-{number}.arrow")
        with pa.OSFile(path, "wb") as file, pa.ipc.new_stream(file, table.schema) as out:
            for batch in table.to_batches(CHUNK):
                out.write_batch(batch)


def to_npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def write_tar(folder: Path) -> None:
    for number, rows in each_file():
        with tarfile.open(folder / f"part-{number}.tar", "w") as tar:
            for row in rows:
                # A long name needs a header of its own.
                key = f"{'folder/' * (20 * (row['id'] % 7 == 0))}{row['id']:06d}"
                fields = {
                    "id.cls": str(row["id"]).encode(),
                    "x.npy": to_npy(row["x"]),
                    "y.cls": str(row["y"]).encode(),
                    "text.txt": row["text"].encode(),
                }
                for name, data in fields.items():
                    member = tarfile.TarInfo(f"{key}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


MDS_COLUMNS = {"id": "int", "text": "str", "x": "ndarray:float32:4", "y": "int64"}


def write_mds(folder: Path) -> None:
    shards = []
    for number, rows in each_file():
        samples = []
        for row in rows:
            text = row["text"].encode()
            values = [struct.pack("<q", row["id"]), text, row["x"].tobytes()]
            values.append(struct.pack("<q", row["y"]))
            samples.append(struct.pack("<I", len(text)) + b"".join(values))
        header = 4 * (len(samples) + 2)
        ends = np.cumsum([header, *map(len, samples)]).astype("<u4")
        name = f"shard.{number:05d}.mds"
        data = struct.pack("<I", len(samples)) + ends.tobytes() + b"".join(samples)
        (folder / name).write_bytes(data)
        shards.append(
            {
                "column_names": list(MDS_COLUMNS),
                "column_encodings": list(MDS_COLUMNS.values()),
                "column_sizes": [8, None, 16, 8],
                "compression": None,
                "format": "mds",
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(samples),
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": shards, "version": 2}))


def write_jsonl(folder: Path) -> None:
    for number, rows in each_file():
        lines = [json.dumps(row | {"x": row["x"].tolist()}) for row in rows]
        text = "\n" + "\n\r\n".join(lines) + "\n" * (number % 2)
        (folder / f"part-{number}.jsonl").write_text(text)


def write_csv(folder: Path) -> None:
    for number, rows in each_file():
        with (folder / f"part-{number}.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["id", "y", "text"])
            out.writerows([row["id"], row["y"], row["text"]] for row in rows)


def write_npy(folder: Path) -> None:
    for number, rows in each_file():
        np.save(folder / f"part-{number}.npy", np.stack([row["x"] for row in rows]))


def write_safetensors(folder: Path) -> None:
    for number, rows in each_file():
        columns = {name: np.stack([row[name] for row in rows]) for name in ("id", "x", "y")}
        save_file(columns, folder / f"part-{number}.safetensors")


# -- by the libraries of the formats ---------------------------------------------------------------


def write_saved_dataset(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # else it leaves a thread
    rows = [row | {"x": row["x"].tolist()} for row in make_rows()]
    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved", num_shards=FILES)


def write_webdataset(folder: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    pattern = str(folder / "part-%06d.tar")
    with webdataset.ShardWriter(pattern, maxcount=PER_FILE, verbose=0) as out:
        for row in make_rows():
            fields = {"id.cls": row["id"], "x.npy": row["x"], "y.cls": row["y"]}
            out.write({"__key__": f"{row['id']:06d}", **fields, "text.txt": row["text"]})


STREAMING_WRITER = """
import sys
import numpy as np
from shards_rivals import stand_in_for
stand_in_for("torchvision", "transformers")  # which it imports, and needs for no numbers
import streaming
from data_files import MDS_COLUMNS, make_rows
with streaming.MDSWriter(
    out=sys.argv[1], columns=MDS_COLUMNS, hashes=["sha1", "xxh64"], size_limit=4000
) as out:
    for row in make_rows():
        out.write(row | {"y": np.int64(row["y"])})
"""


def write_streaming(folder: Path) -> None:
    if find_spec("streaming") is None:
        pytest.skip("needs mosaicml-streaming")
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(tests), str(tests.parent / "benchmarks")])
    subprocess.run(
        [sys.executable, "-c", STREAMING_WRITER, folder / "mds"],
        env=os.environ | {"PYTHONPATH": paths},
        check=True,
    )


WRITERS: dict[str, Callable[[Path], None]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "webdataset": write_tar,
    "mds": write_mds,
    "jsonl": write_jsonl,
    "csv": write_csv,
    "npy": write_npy,
    "safetensors": write_safetensors,
}
LIBRARIES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "datasets": ("arrow", write_saved_dataset),
    "webdataset": ("webdataset", write_webdataset),
    "mosaicml-streaming": ("mds", write_streaming),
}
