"""python benchmarks/shards_rivals.py READER FOLDER: one reader of shards.py, in a process of its
own.

Each reads one epoch in shuffled batches of 256 as torch tensors, without workers, and prints JSON:
rows per second and the resident memory that it took above the process before it opened anything
(MB)."""

import importlib.abc
import importlib.machinery
import json
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

BATCH = 256
SAMPLES_H5PY = 20_000  # of the reader that takes one row at a time: the whole would take minutes


def stepladder(folder: Path) -> Iterator[Any]:
    from stepladder import Plan, Shards
    from stepladder.data.sources import StreamSource

    shards = Shards(folder / "stepladder", columns=("image", "label"))
    plan = Plan(len(shards), BATCH, BATCH // 8, chunks=shards.chunks)
    steps = ((step, *plan.batch(step)) for step in range(plan.steps_per_epoch))
    assert plan.stream is not None
    order = plan.stream
    requests = ((0, order.indices(0, lo, hi)) for _, lo, hi in steps)
    for _, batch in StreamSource(shards, torch.device("cpu")).batches(requests):
        yield batch


class PerSample(torch.utils.data.Dataset):
    """What most scripts do: a chunked HDF5 file, a row per call. The first shard, which h5py opens
    as it is.
    """

    def __init__(self, path: Path) -> None:
        import h5py

        self.file = h5py.File(path)
        self.images = self.file["image"]
        self.labels = self.file["label"]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> Any:
        return self.images[row], self.labels[row]


def h5py(folder: Path) -> Iterator[Any]:
    data = PerSample(folder / "stepladder" / "shard-00000.h5")
    sampler = torch.utils.data.RandomSampler(data, num_samples=min(len(data), SAMPLES_H5PY))
    yield from torch.utils.data.DataLoader(data, BATCH, sampler=sampler)


def mosaicml(folder: Path) -> Iterator[Any]:
    stand_in_for("torchvision", "transformers")
    from streaming import StreamingDataset

    data = StreamingDataset(
        local=str(folder / "mosaicml"), shuffle=True, batch_size=BATCH, num_canonical_nodes=1
    )
    for batch in torch.utils.data.DataLoader(data, BATCH):
        yield batch["image"], batch["label"]


def webdataset(folder: Path) -> Iterator[Any]:
    import webdataset as wds

    shape = tuple(json.loads((folder / "shape.json").read_text()))
    urls = sorted(map(str, (folder / "webdataset").glob("*.tar")))

    def decoded(sample: dict[str, Any]) -> tuple[np.ndarray, int]:
        return np.frombuffer(sample["x"], np.uint8).reshape(shape), sample["y"][0]

    pipeline = wds.WebDataset(urls, shardshuffle=100, seed=0).shuffle(2000).map(decoded)
    for images, labels in pipeline.batched(BATCH):
        yield torch.from_numpy(np.stack(images)), torch.as_tensor(labels)


class Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def stand_in_for(*packages: str) -> None:
    """mosaicml-streaming imports these for data sets of images and texts, never for reading.

    torchvision from PyPI does not load beside a CPU build of torch, and both are large.
    """
    sys.meta_path.insert(0, Finder(packages))


READERS = {
    "stepladder": stepladder,
    "h5py, per sample": h5py,
    "mosaicml-streaming": mosaicml,
    "webdataset": webdataset,
}


def main() -> None:
    torch.set_num_threads(1)
    memory_info = psutil.Process().memory_info
    before = memory_info().rss
    peak = 0
    rows = 0
    total = 0
    batches = READERS[sys.argv[1]](Path(sys.argv[2]))
    start = None
    for number, (images, labels) in enumerate(batches):
        if start is None:
            start = time.perf_counter()  # opening and the first batch are not counted
        else:
            rows += len(images)
        total += int(labels[0])
        if number % 50 == 0:
            peak = max(peak, memory_info().rss)
    assert start is not None
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "rows_per_second": rows / seconds,
                "megabytes": (max(peak, memory_info().rss) - before) / 1e6,
            }
        )
    )


if __name__ == "__main__":
    main()
