"""Which samples each rank reads: passes of loaders, their batches, set_epoch, and what a fork takes
along.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data import dataloader as loaders
from torch.utils.data.distributed import DistributedSampler

from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.patching import careful, wrap
from stepladder.tools.check.probe.recorder import here


class Stopped(SystemExit):
    """The check has seen enough: the rank ends as if the script had."""


class Counts:
    """Of this process: passes over loaders, and steps in the one that is under way."""

    passes = 0
    trained: dict[str, int] = {}  # noqa: RUF012  # finished training passes, by the line that iterates
    steps = 0  # in the current pass
    began = 0.0


def attach() -> None:
    wrap(DataLoader, "__iter__", iterate)
    wrap(loaders._BaseDataLoaderIter, "_next_index", next_index)
    wrap(loaders._BaseDataLoaderIter, "__next__", next_batch)
    wrap(loaders._BaseDataLoaderIter, "_reset", reset)
    wrap(DistributedSampler, "set_epoch", set_epoch)
    wrap(DistributedSampler, "__iter__", sampled)
    wrap(DataLoader, "__init__", build)
    wrap(DistributedSampler, "__init__", build)


def build(original: Any, loader: Any, *args: Any, **kwargs: Any) -> Any:
    """A loader or a sampler remembers the line that made it."""
    done = original(loader, *args, **kwargs)
    loader.__dict__.setdefault("_sl_at", here().where())
    return done


def set_epoch(original: Any, sampler: Any, epoch: Any) -> Any:
    here().at("setepoch", sampler=id(sampler), value=epoch)
    return original(sampler, epoch)


def sampled(original: Any, sampler: Any) -> Any:
    """A script that goes through the sampler itself."""
    if not here().direct():
        return original(sampler)
    indices = list(original(sampler))
    here().at(
        "sampled", indices=indices, length=length(sampler.dataset), shuffle=bool(sampler.shuffle)
    )
    return iter(indices)


def watch_set_epoch(owner: Any) -> None:
    """Of a user's own sampler or data set: the class's method is wrapped when it is first seen."""
    cls = type(owner)
    if cls.__dict__.get("set_epoch") is not None and not hasattr(cls.set_epoch, "__wrapped__"):
        wrap(cls, "set_epoch", set_epoch)


def iterate(original: Any, loader: Any) -> Any:
    recorder = here()
    place = recorder.where()
    key = f"{place[0]}:{place[1]}" if place else "library"
    Counts.began = Counts.began or time.monotonic()
    stop_where_enough(key)
    for owner in (loader.sampler, loader.batch_sampler, loader.dataset):
        watch_set_epoch(owner)
    Counts.passes, Counts.steps = Counts.passes + 1, 0
    number = Counts.passes
    recorder.write("pass", number=number, at=place, way=recorder.stack(), **about(loader))
    context = loader.multiprocessing_context or multiprocessing
    if loader.num_workers > 0 and context.get_start_method() == "fork":
        handles(loader.dataset, getattr(loader, "_sl_at", place))
    iterator = original(loader)
    iterator._sl_pass = (number, key)
    return iterator


def stop_where_enough(key: str) -> None:
    """Before the next training pass, on all ranks or on none: who comes first writes down what all
    do.
    """
    settings, done = here().settings, Counts.trained.get(key, 0)
    if done < (settings.epochs or 2):
        return
    word = "stop"
    if not settings.epochs and time.monotonic() - Counts.began < settings.seconds:
        word = "go"
    path = Path(settings.folder) / f"pass-{done}.{key.replace('/', '_')[-80:]}.word"
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(word)
    except FileExistsError:
        word = ""
        while not word:
            word = path.read_text(encoding="utf-8")
    if word == "stop":
        here().stopped = True
        here().write("enough", passes=done)
        raise Stopped(0)


def about(loader: Any) -> dict[str, Any]:
    """What a loader says of itself."""
    sampler, dataset = loader.sampler, loader.dataset
    batches = (
        loader.batch_sampler
        if type(loader.batch_sampler) is not torch.utils.data.BatchSampler
        else None
    )
    iterable = isinstance(dataset, IterableDataset)
    told = batches if batches is not None and hasattr(batches, "set_epoch") else sampler
    generator = getattr(sampler, "generator", None)
    return {
        "built": getattr(loader, "_sl_at", None),
        "sampler_built": getattr(told, "_sl_at", None),
        "loader": id(loader),
        "batcher": type(loader.batch_sampler).__name__,
        "class": type(loader).__name__,
        "sampler": type(told).__name__,
        "sampler_id": id(told),
        "settable": hasattr(told, "set_epoch"),
        "data_settable": hasattr(dataset, "set_epoch"),
        "shuffle": shuffles(told),
        "distributed": isinstance(told, DistributedSampler),
        "replicas": getattr(told, "num_replicas", None),
        "iterable": iterable,
        "drop_last": bool(loader.drop_last),
        "sampler_drop": bool(getattr(told, "drop_last", False)),
        "batch_size": loader.batch_size,
        "workers": loader.num_workers,
        "generator": generator is not None,
        "length": None if iterable else length(dataset),
        "batches": None if iterable else length(loader),
        "print": digests.fingerprint(base_of(dataset)),
        "dataset": type(base_of(dataset)).__name__,
        "base_length": None if iterable else length(base_of(dataset)),
    }


def shuffles(sampler: Any) -> bool:
    if hasattr(sampler, "shuffle"):
        return bool(sampler.shuffle)
    return type(sampler).__name__ not in ("SequentialSampler", "_InfiniteConstantSampler")


def length(thing: Any) -> int | None:
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        return None


def base_of(dataset: Any) -> Any:
    """The data set below all Subsets."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    return dataset


@careful(lambda: None)
def base_indices(dataset: Any, indices: Any) -> list[int] | None:
    """In the data set below all Subsets."""
    try:
        found = [int(index) for index in indices]
        while isinstance(dataset, torch.utils.data.Subset):
            found = [int(dataset.indices[index]) for index in found]
            dataset = dataset.dataset
    except (TypeError, ValueError, IndexError):
        return None
    return found


def reset(original: Any, iterator: Any, *args: Any, **kwargs: Any) -> Any:
    iterator._sl_queue = deque()
    return original(iterator, *args, **kwargs)


def next_index(original: Any, iterator: Any) -> Any:
    index = original(iterator)
    if not hasattr(iterator, "_sl_queue"):
        iterator._sl_queue = deque()
    iterator._sl_queue.append(index)
    return index


def next_batch(original: Any, iterator: Any) -> Any:
    recorder, (number, key) = here(), getattr(iterator, "_sl_pass", (0, ""))
    if recorder.settings.steps and Counts.steps >= recorder.settings.steps:
        finish(number, key, cut=True)
        raise StopIteration
    try:
        batch = original(iterator)
    except StopIteration:
        finish(number, key, cut=False)
        raise
    queue = getattr(iterator, "_sl_queue", None)
    asked = queue.popleft() if queue else None
    if asked is not None and not isinstance(asked, (list, tuple)):
        asked = [asked]
    indices = base_indices(iterator._dataset, asked) if asked and asked[0] is not None else None
    states = digests.random_states() if Counts.steps < 3 else None
    size = len(indices) if indices is not None else digests.size_of(batch)
    recorder.write(
        "batch", number=number, indices=indices, rows=digests.rows(batch), size=size, states=states
    )
    return batch


def finish(number: int, key: str, cut: bool) -> None:
    if Counts.steps:
        Counts.trained[key] = Counts.trained.get(key, 0) + 1
    here().write("endpass", number=number, cut=cut, steps=Counts.steps)


HANDLES = ("h5py", "zipfile", "tarfile", "sqlite3", "lmdb")


@careful(lambda: None)
def handles(owner: Any, at: Any, path: str = "dataset", depth: int = 0) -> None:
    """Open files that the workers will share with this process, by their place in the data set."""
    for name, value in list(getattr(owner, "__dict__", {}).items())[:50]:
        parts = enumerate(value[:20]) if isinstance(value, (list, tuple)) else [(-1, value)]
        for number, part in parts:
            if is_open(part):
                of = type(part)
                where = f"{path}.{name}" + (f"[{number}]" if number >= 0 else "")
                here().write("shared", at=at, path=where, type=of.__name__, module=of.__module__)
        if (
            depth < 2
            and hasattr(value, "__dict__")
            and not isinstance(value, (torch.Tensor, type, Sampler))
        ):
            handles(value, at, f"{path}.{name}", depth + 1)


def is_open(value: Any) -> bool:
    top = type(value).__module__.partition(".")[0]
    if isinstance(value, io.IOBase):
        return (
            not value.closed
            and not isinstance(value, (io.BytesIO, io.StringIO))
            and has_number(value)
        )
    if top == "h5py":
        return bool(value)
    return top in HANDLES and type(value).__name__ in (
        "ZipFile",
        "TarFile",
        "Connection",
        "Environment",
    )


def has_number(file: Any) -> bool:
    try:
        return os.get_inheritable(file.fileno()) is not None
    except (OSError, ValueError):
        return False
