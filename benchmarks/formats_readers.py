"""The readers of benchmarks/formats.py, ours and the formats' own, and what writes their files.

Each reader yields the ids of the rows of one batch after the other, to the end of an epoch."""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import webdataset
from datasets.distributed import split_dataset_by_node
from shards_rivals import stand_in_for
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from stepladder import Loader, World, open_data

stand_in_for("torchvision", "transformers")
import streaming  # noqa: E402 - it imports the two above, and needs them for no numbers

WIDTH = 64  # numbers of a row
NUM_FILES = 12  # which 2 and 3 ranks divide
GROUP = 250  # rows of a row group or record batch
BUFFER = 1000  # rows that a streaming loader shuffles
BLOCK = 256  # tokens of a sample
SEED = 1
Row = dict[str, Any]


class Rank(NamedTuple):
    """The rank that reads, and what all ranks read together in a step."""

    rank: int
    ranks: int
    workers: int
    global_batch: int

    @property
    def batch(self) -> int:
        return self.global_batch // self.ranks


# -- files -----------------------------------------------------------------------------------------


def make_files(count: int) -> Iterator[list[Row]]:
    """Yield the rows of each file: a number, and WIDTH numbers with three decimals."""
    x = np.random.default_rng(0).normal(size=(count, WIDTH)).astype(np.float32).round(3)
    for part in np.array_split(np.arange(count), NUM_FILES):
        yield [{"id": index, "x": x[index]} for index in part.tolist()]


def make_table(rows: list[Row]) -> pa.Table:
    flat = pa.array(np.concatenate([row["x"] for row in rows]))
    offsets = pa.array(np.arange(len(rows) + 1, dtype=np.int32) * WIDTH)
    x = pa.ListArray.from_arrays(offsets, flat)
    return pa.table({"id": [row["id"] for row in rows], "x": x})


def write_parquet(folder: Path, count: int) -> None:
    for number, rows in enumerate(make_files(count)):
        pq.write_table(make_table(rows), folder / f"{number:03d}.parquet", row_group_size=GROUP)


def write_arrow(folder: Path, count: int) -> None:
    numbers = datasets.List(datasets.Value("float32"))
    features = datasets.Features({"id": datasets.Value("int64"), "x": numbers})
    rows = [row for part in make_files(count) for row in part]
    columns = {name: [row[name] for row in rows] for name in features}
    data = datasets.Dataset.from_dict(columns, features=features)
    data.save_to_disk(folder, num_shards=NUM_FILES)


def write_webdataset(folder: Path, count: int) -> None:
    for number, rows in enumerate(make_files(count)):
        with webdataset.TarWriter(str(folder / f"{number:03d}.tar")) as out:
            for row in rows:
                out.write({"__key__": f"{row['id']:09d}", "cls": row["id"], "npy": row["x"]})


def write_mds(folder: Path, count: int) -> None:
    columns = {"id": "int", "x": f"ndarray:float32:{WIDTH}"}
    limit = count // NUM_FILES * (WIDTH * 4 + 16)
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=limit) as out:
        for rows in make_files(count):
            for row in rows:
                out.write(row)


def write_jsonl(folder: Path, count: int) -> None:
    for number, rows in enumerate(make_files(count)):
        lines = [json.dumps({"id": row["id"], "x": row["x"].tolist()}) + "\n" for row in rows]
        (folder / f"{number:03d}.jsonl").write_text("".join(lines))


def write_csv(folder: Path, count: int) -> None:
    for number, rows in enumerate(make_files(count)):
        with (folder / f"{number:03d}.csv").open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["id", *(f"x{column}" for column in range(WIDTH))])
            out.writerows([row["id"], *row["x"].tolist()] for row in rows)


def write_array_record(folder: Path, count: int) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    for number, rows in enumerate(make_files(count)):
        out = ArrayRecordWriter(str(folder / f"{number:03d}.arrayrecord"), "group_size:1")
        for row in rows:
            out.write(struct.pack("<q", row["id"]) + row["x"].tobytes())
        out.close()


def parse_record(record: dict[str, bytes] | bytes) -> tuple[int, np.ndarray]:
    """Return the id and the numbers of a record of write_array_record."""
    data = record["record"] if isinstance(record, dict) else record
    return int.from_bytes(data[:8], "little"), np.frombuffer(data, np.float32, offset=8).copy()


def write_litdata(folder: Path, count: int) -> None:
    """The rows in litdata's chunks, which its loader reads, and in Parquet, which ours reads."""
    import litdata

    for name in ("chunks", "rows"):
        (folder / name).mkdir()
    write_parquet(folder / "rows", count)
    rows = [row for part in make_files(count) for row in part]
    litdata.optimize(
        keep_row, rows, str(folder / "chunks"), chunk_size=GROUP, num_workers=1, verbose=False
    )


def keep_row(row: Row) -> Row:
    return row


def write_tokens(folder: Path, count: int) -> None:
    np.arange(count * BLOCK + 1, dtype=np.uint32).tofile(folder / "train.bin")


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "parquet": write_parquet,
    "arrow": write_arrow,
    "webdataset": write_webdataset,
    "mds": write_mds,
    "jsonl": write_jsonl,
    "csv": write_csv,
    "tokens": write_tokens,
    "array_record": write_array_record,
    "litdata": write_litdata,
}
OPTIONAL = {"array_record": ("grain",), "litdata": ("litdata", "boto3")}  # libraries


def list_formats() -> list[str]:
    """Return the formats whose native loaders are installed."""
    return [name for name in WRITERS if all(map(find_spec, OPTIONAL.get(name, ())))]


# -- readers ---------------------------------------------------------------------------------------


class Ours:
    """A Loader of open_data."""

    def __init__(self, name: str, folder: Path, reader_rank: Rank) -> None:
        columns = {"webdataset": ("cls", "npy")}.get(name)
        decode = parse_record if name == "array_record" else None
        self.key: Any = 0 if columns or decode else "id"
        if name == "litdata":
            folder = folder / "rows"
        self.loader = Loader(
            open_data(folder, columns=columns, decode=decode, block=BLOCK, dtype="uint32"),
            reader_rank.global_batch,
            seed=SEED,
            num_workers=reader_rank.workers,
            world=World(reader_rank.rank, reader_rank.ranks, reader_rank.rank, reader_rank.ranks),
        )
        self.state_dict = self.loader.state_dict
        self.load_state_dict = self.loader.load_state_dict
        self.close = self.loader.close

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.loader:
            if self.key == "id" and "tokens" in batch:
                yield (batch["tokens"][:, 0] // BLOCK).tolist()
            else:
                yield batch[self.key].tolist()


class Theirs:
    """The format's own loader, with the state that its documentation says."""

    def __init__(self, name: str, folder: Path, reader_rank: Rank) -> None:
        self.loader = OPENERS[name](name, folder, reader_rank)
        self.state_dict = self.loader.state_dict
        self.load_state_dict = self.loader.load_state_dict

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.loader:
            ids = batch["id"] if isinstance(batch, dict) else batch[0]
            yield ids.tolist() if hasattr(ids, "tolist") else [int(value) for value in ids]

    def close(self) -> None:
        """End the workers."""
        del self.loader


def open_stream(name: str, folder: Path) -> Any:
    """Hugging Face's datasets with streaming=True, shuffled by its buffer."""
    kind = {"jsonl": "json"}.get(name, name)
    files = sorted(map(str, folder.glob(f"*.{name}")))
    data = datasets.load_dataset(kind, data_files=files, streaming=True, split="train")
    return data.shuffle(seed=SEED, buffer_size=BUFFER).with_format("numpy")


def open_streamed(name: str, folder: Path, reader_rank: Rank) -> Any:
    data = split_dataset_by_node(open_stream(name, folder), reader_rank.rank, reader_rank.ranks)
    return StatefulDataLoader(data, reader_rank.batch, num_workers=reader_rank.workers)


def open_saved(name: str, folder: Path, reader_rank: Rank) -> Any:
    data = datasets.load_from_disk(folder).with_format("numpy")
    sampler = StatefulDistributedSampler(
        data, reader_rank.ranks, reader_rank.rank, shuffle=True, seed=SEED
    )
    return StatefulDataLoader(
        data, reader_rank.batch, sampler=sampler, num_workers=reader_rank.workers
    )


def open_webdataset(name: str, folder: Path, reader_rank: Rank) -> Any:
    urls = sorted(map(str, folder.glob("*.tar")))
    data = webdataset.WebDataset(
        urls, shardshuffle=NUM_FILES, seed=SEED, nodesplitter=webdataset.split_by_node
    )
    data = (
        data.shuffle(BUFFER, seed=SEED).decode().to_tuple("cls", "npy").batched(reader_rank.batch)
    )
    return StatefulDataLoader(data, None, num_workers=reader_rank.workers)


def open_streaming(name: str, folder: Path, reader_rank: Rank) -> Any:
    data = streaming.StreamingDataset(
        local=str(folder), shuffle=True, batch_size=reader_rank.batch, shuffle_seed=SEED
    )
    return streaming.StreamingDataLoader(
        data, batch_size=reader_rank.batch, num_workers=reader_rank.workers
    )


class RandomBlocks:
    """The loop of nanoGPT: blocks at random places, a map anew for each batch, a seed by rank."""

    def __init__(self, name: str, folder: Path, reader_rank: Rank) -> None:
        self.file = folder / "train.bin"
        self.batch = reader_rank.batch
        self.steps = self.file.stat().st_size // 4 // BLOCK // reader_rank.global_batch
        self.step = 0
        torch.manual_seed(1337 + reader_rank.rank)

    def __iter__(self) -> Iterator[Any]:
        while self.step < self.steps:
            data = np.memmap(self.file, dtype=np.uint32, mode="r")
            places = torch.randint(len(data) - BLOCK, (self.batch,))
            x = [torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in places]
            y = [torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in places]
            self.step += 1
            yield torch.stack(x)[:, 0] // BLOCK, torch.stack(y)
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class GrainBatches:
    """Grain's MapDataset over ArrayRecord, in the iterator whose state holds on other ranks."""

    def __init__(self, name: str, folder: Path, reader_rank: Rank) -> None:
        self.paths = sorted(map(str, folder.glob("*.arrayrecord")))
        self.rank = reader_rank
        self.iterator = self._open()

    def _open(self) -> Any:
        import grain

        data = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(self.paths))
        workers = None
        if self.rank.workers:
            workers = grain.multiprocessing.MultiprocessingOptions(self.rank.workers)
        elastic = grain.experimental.ElasticIterator(
            data.seed(SEED).shuffle().map(parse_record),
            self.rank.global_batch,
            grain.sharding.ShardOptions(self.rank.rank, self.rank.ranks),
            multiprocessing_options=workers,
        )
        return iter(elastic)

    def __iter__(self) -> Iterator[Any]:
        yield from self.iterator
        self.iterator = self._open()

    def state_dict(self) -> Any:
        return self.iterator.get_state()

    def load_state_dict(self, state: Any) -> None:
        self.iterator.set_state(state)


def open_litdata(name: str, folder: Path, reader_rank: Rank) -> Any:
    import litdata

    if reader_rank.ranks > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")  # where litdata finds the rank
    data = litdata.StreamingDataset(str(folder / "chunks"), shuffle=True, seed=SEED)
    return litdata.StreamingDataLoader(
        data, batch_size=reader_rank.batch, num_workers=reader_rank.workers
    )


OPENERS: dict[str, Callable[[str, Path, Rank], Any]] = {
    "parquet": open_streamed,
    "arrow": open_saved,
    "webdataset": open_webdataset,
    "mds": open_streaming,
    "jsonl": open_streamed,
    "csv": open_streamed,
    "tokens": RandomBlocks,
    "array_record": GrainBatches,
    "litdata": open_litdata,
}
NATIVE = {
    "parquet": "datasets, streaming",
    "arrow": "datasets, from disk",
    "webdataset": "webdataset",
    "mds": "mosaicml-streaming",
    "jsonl": "datasets, streaming",
    "csv": "datasets, streaming",
    "tokens": "the loop of nanoGPT",
    "array_record": "Grain",
    "litdata": "litdata, and ours of Parquet",
}
READERS: dict[str, Callable[[str, Path, Rank], Any]] = {"ours": Ours, "native": Theirs}


class FastBatches:
    """The fastest way to batches of Hugging Face's datasets, which has no loader around it."""

    def __init__(self, name: str, folder: Path, reader_rank: Rank) -> None:
        if name == "arrow":
            self.data = datasets.load_from_disk(folder).shuffle(seed=SEED).with_format("numpy")
        else:
            self.data = open_stream(name, folder)
        self.batch = reader_rank.batch

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.data.iter(self.batch):
            yield batch["id"].tolist()

    def close(self) -> None:
        """Nothing is left running."""


def open_fastest(name: str, reader: str, folder: Path, reader_rank: Rank) -> Any:
    """Return the reader whose rows a second are compared."""
    if reader == "native" and OPENERS[name] in (open_streamed, open_saved):
        return FastBatches(name, folder, reader_rank)
    return READERS[reader](name, folder, reader_rank)
