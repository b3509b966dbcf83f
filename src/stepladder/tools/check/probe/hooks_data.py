"""Hooks that record which samples a rank reads.

These are passes over loaders, their batches, calls of set_epoch, and files of a data set that are
open when the workers of a loader are forked.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import dataloader as loaders
from torch.utils.data.distributed import DistributedSampler

from stepladder.tools.check.events import (
    Batch,
    EnoughPasses,
    PassEnd,
    PassStart,
    SetEpoch,
    SharedFile,
)
from stepladder.tools.check.probe import digests
from stepladder.tools.check.probe.patching import (
    Fields,
    WrappedCall,
    default_on_error,
    record_calls,
    wrap,
    wrap_after_import,
)
from stepladder.tools.check.probe.probe_log import current_log
from stepladder.tools.check.probe.shorter_loaders import shorten
from stepladder.tools.probe.events import CodeLine

EPOCHS_BY_DEFAULT = 2
BY_HAND = "by hand"
STEPS_OF_A_PASS = 64  # of a script that trains without a loader
MAX_BACKWARDS_PER_STEP = 16  # before a script without any step is ended as if it had made one
FILE_MODULES = ("h5py", "zipfile", "tarfile", "sqlite3", "lmdb")
FILE_CLASSES = ("ZipFile", "TarFile", "Connection", "Environment")
# Attributes that the probe gives to objects of torch.
LINE_ATTRIBUTE = "_stepladder_line"  # of a loader or a sampler: the line that made it
COUNT_ATTRIBUTE = "_stepladder_count"  # of a loader: how many that line had made before
WAY_ATTRIBUTE = "_stepladder_way"  # of a loader: the lines that led there
# Of a loader that is read ahead: what writes the events of later batches.
AHEAD_ATTRIBUTE = "_stepladder_ahead"
PASS_ATTRIBUTE = "_stepladder_pass"  # of an iterator: its PassState


class CheckIsDone(SystemExit):
    """Ends a rank as the script would, because the check has enough."""


@dataclass
class PassState:
    """The state of one pass over a loader.

    Args:
        number: Its number in this process; 0 for an iterator that no loader made.
        key: The file and the line that iterate.
        indices: The indices of batches that were requested and not yet returned.
        ahead: What writes the events of batches that the script has not got yet; None where it
            gets each batch as the iterator returns it.
    """

    number: int = 0
    key: str = ""
    indices: deque[Any] = field(default_factory=deque)
    ahead: deque[Callable[[], None]] | None = None

    def write(self, write_event: Callable[[], None]) -> None:
        """Write an event of the pass, now or when the script gets the batch."""
        if self.ahead is None:
            write_event()
        else:
            self.ahead.append(write_event)


class PassCounters:
    """The passes of this process, and the steps in the current one."""

    def __init__(self) -> None:
        self.passes = 0
        self.steps = 0
        self.backwards = 0  # without a step
        self.running = 0
        self.steps_by_hand = 0  # without a pass over a loader
        self.began: float | None = None
        self.trained: Counter[str] = Counter()  # finished training passes, by their key

    def begin_pass(self) -> int:
        """Count a pass, and return its number."""
        self.passes += 1
        self.running += 1
        self.steps = 0
        self.backwards = 0
        return self.passes

    def count_step(self) -> None:
        self.steps += 1

    def count_backward(self) -> int:
        """Count a backward pass of a script without a step, and return their number in the pass."""
        self.backwards += 1
        return self.backwards

    def has_made(self, steps: int) -> bool:
        """Return whether a pass has made as many steps, or has gone on for long without any."""
        return self.steps >= steps or self.backwards >= steps * MAX_BACKWARDS_PER_STEP

    def finish_pass(self, key: str) -> None:
        self.running -= 1
        if self.steps:
            self.trained[key] += 1

    def ends_pass_by_hand(self) -> bool:
        """Count a step without a pass over a loader, and return whether so many are one."""
        self.steps_by_hand += not self.running
        self.seconds_since_first_pass()
        ends_pass = not self.running and self.steps_by_hand % STEPS_OF_A_PASS == 0
        self.trained[BY_HAND] += ends_pass
        return ends_pass

    def seconds_since_first_pass(self) -> float:
        now = time.monotonic()
        if self.began is None:
            self.began = now
        return now - self.began


pass_counters = PassCounters()
loader_counts: Counter[CodeLine | None] = Counter()  # by the line that made them
loader_lines: dict[int, CodeLine | None] = {}  # of the script's own loaders, by id of the data set


def attach() -> None:
    wrap(DataLoader, "__iter__", record_pass)
    wrap(loaders._BaseDataLoaderIter, "_next_index", remember_index)
    wrap(loaders._BaseDataLoaderIter, "__next__", record_batch)
    record_calls(loaders._BaseDataLoaderIter, "_reset", forget_indices)
    record_calls(DistributedSampler, "set_epoch", set_epoch_event)
    wrap(DataLoader, "__init__", remember_line)
    wrap(DistributedSampler, "__init__", remember_line)
    wrap_after_import("accelerate.data_loader", "DataLoaderShard.__iter__", read_ahead)


def remember_line(call: WrappedCall) -> Any:
    """Make a loader or a sampler remember the line that made it.

    A library that makes a loader anew has its data set from the script's own loader.
    """
    result = call.run()
    loader = call.args[0]
    log = current_log()
    line = log.user_line()
    if isinstance(loader, DataLoader):
        data = id(loader.dataset)
        if log.is_called_by_user():
            loader_lines[data] = line
            vars(loader)[COUNT_ATTRIBUTE] = loader_counts[line]
            loader_counts[line] += 1
            vars(loader)[WAY_ATTRIBUTE] = list(map(log.line_of, log.user_frames()))
        line = loader_lines.get(data, line)
        if log.settings.batches:
            shorten(loader, log.settings.batches)
    vars(loader).setdefault(LINE_ATTRIBUTE, line)
    return result


def set_epoch_event(call: WrappedCall) -> SetEpoch:
    return SetEpoch(sampler=id(call.args[0]), value=call.argument(1, "epoch"))


def watch_set_epoch(owner: Any) -> None:
    """Wrap set_epoch of a user's own class of sampler or data set, once."""
    cls = type(owner)
    if cls.__dict__.get("set_epoch") is not None and not hasattr(cls.set_epoch, "__wrapped__"):
        record_calls(cls, "set_epoch", set_epoch_event)


def record_pass(call: WrappedCall) -> Any:
    loader = call.args[0]
    log = current_log()
    line = log.user_line()
    key = f"{line[0]}:{line[1]}" if line else "library"
    end_if_enough(key)
    for owner in (loader.sampler, loader.batch_sampler, loader.dataset):
        watch_set_epoch(owner)
    number = pass_counters.begin_pass()
    start = PassStart(number=number, way=log.user_stack(), **describe_loader(loader))
    log.write(start, line)
    context = loader.multiprocessing_context or multiprocessing
    if loader.num_workers > 0 and context.get_start_method() == "fork":
        record_open_files(loader.dataset, getattr(loader, LINE_ATTRIBUTE, line))
    iterator = call.run()
    ahead = getattr(loader, AHEAD_ATTRIBUTE, None)
    state = replace(pass_state(iterator), number=number, key=key, ahead=ahead)
    vars(iterator)[PASS_ATTRIBUTE] = state
    return iterator


def pass_state(iterator: Any) -> PassState:
    """Return the state of an iterator's pass, made on first use."""
    state: PassState = vars(iterator).setdefault(PASS_ATTRIBUTE, PassState())
    return state


def end_if_enough(key: str) -> None:
    """End this rank before a training pass if the check has enough.

    All ranks end before the same pass, or none does: the first rank writes its decision to a file.
    """
    settings = current_log().settings
    seconds = pass_counters.seconds_since_first_pass()
    trained = pass_counters.trained[key]
    if trained < (settings.epochs or EPOCHS_BY_DEFAULT):
        return
    decision = "stop"
    if not settings.epochs and seconds < settings.enough_after_s:
        decision = "go"
    path = Path(settings.folder) / f"pass-{trained}.{key.replace('/', '_')[-80:]}.word"
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(decision)
    except FileExistsError:
        decision = ""
        while not decision:  # until the first rank has written it
            decision = path.read_text(encoding="utf-8")
    if decision == "stop":
        current_log().write(EnoughPasses())
        raise CheckIsDone(0)


def end_if_enough_steps() -> None:
    """End this rank after a step without a loader if the check has enough: so many are a pass."""
    if pass_counters.ends_pass_by_hand():
        end_if_enough(BY_HAND)


def describe_loader(loader: Any) -> Fields:
    sampler = loader.sampler
    dataset = loader.dataset
    batch_sampler = loader.batch_sampler
    if type(batch_sampler) is torch.utils.data.BatchSampler:
        sampler = batch_sampler.sampler  # the loader's own may be a stand-in, never used
    elif hasattr(batch_sampler, "set_epoch"):
        sampler = batch_sampler
    is_iterable = isinstance(dataset, IterableDataset)
    base_dataset = base_of(dataset)
    return {
        "built": getattr(loader, LINE_ATTRIBUTE, None),
        "built_before": getattr(loader, COUNT_ATTRIBUTE, 0),
        "built_from": getattr(loader, WAY_ATTRIBUTE, ()),
        "sampler_built": getattr(sampler, LINE_ATTRIBUTE, None),
        "loader": id(loader),
        "loader_class": type(loader).__name__,
        "sampler_id": id(sampler),
        "epoch": epoch_of(sampler),
        "settable": hasattr(sampler, "set_epoch"),
        "data_settable": hasattr(dataset, "set_epoch"),
        "shuffle": shuffles(sampler),
        "distributed": isinstance(sampler, DistributedSampler),
        # Accelerate's batch samplers call it the number of processes.
        "replicas": getattr(sampler, "num_replicas", getattr(batch_sampler, "num_processes", None)),
        "sampler_rank": getattr(sampler, "rank", None),
        "iterable": is_iterable,
        "batch_size": getattr(batch_sampler, "batch_size", loader.batch_size),
        "drop_last": bool(getattr(batch_sampler, "drop_last", loader.drop_last)),
        "sampler_drop": bool(getattr(sampler, "drop_last", False)),
        "workers": loader.num_workers,
        "fingerprint": digests.dataset_fingerprint(base_dataset),
        "held": digests.held_sums(base_dataset),
        "length": None if is_iterable else length_of(dataset),
        "base_length": None if is_iterable else length_of(base_dataset),
    }


def shuffles(sampler: Any) -> bool:
    is_in_order = type(sampler).__name__ in ("SequentialSampler", "_InfiniteConstantSampler")
    return bool(getattr(sampler, "shuffle", not is_in_order))


def epoch_of(sampler: Any) -> int | None:
    """Return the epoch by which a sampler shuffles; None of one that knows none."""
    epoch = getattr(sampler, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def length_of(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def base_of(dataset: Any) -> Any:
    """Return the data set below all Subsets."""
    while isinstance(dataset, torch.utils.data.Subset):
        dataset = dataset.dataset
    return dataset


@default_on_error(lambda: None)
def base_indices(dataset: Any, indices: Any) -> list[int] | None:
    """Return indices of a data set as indices of the data set below all Subsets."""
    result = [int(index) for index in indices]
    while isinstance(dataset, torch.utils.data.Subset):
        result = [int(dataset.indices[index]) for index in result]
        dataset = dataset.dataset
    return result


def forget_indices(call: WrappedCall) -> None:
    pass_state(call.args[0]).indices.clear()


def remember_index(call: WrappedCall) -> Any:
    index = call.run()
    pass_state(call.args[0]).indices.append(index)
    return index


def record_batch(call: WrappedCall) -> Any:
    iterator = call.args[0]
    log = current_log()
    state = pass_state(iterator)
    if log.settings.steps and pass_counters.has_made(log.settings.steps):
        state.write(partial(record_pass_end, state, cut=True))
        raise StopIteration
    try:
        batch = call.run()
    except StopIteration:
        state.write(partial(record_pass_end, state, cut=False))
        raise
    requested = state.indices.popleft() if state.indices else None
    indices = indices_of_batch(iterator._dataset, requested)
    event = Batch(
        number=state.number,
        indices=indices,
        rows=digests.row_digests(batch),
        size=digests.row_count(batch) if indices is None else len(indices),
        sums=digests.row_sums(batch),
    )
    state.write(partial(log.write, event))
    return batch


def indices_of_batch(dataset: Any, requested: Any) -> list[int] | None:
    """Return the indices of a batch; None for a stream, which has none."""
    requested_list = requested if isinstance(requested, list | tuple) else [requested]
    is_stream = not requested_list or requested_list[0] is None
    return None if is_stream else base_indices(dataset, requested_list)


def record_pass_end(state: PassState, cut: bool) -> None:
    pass_counters.finish_pass(state.key)
    current_log().write(PassEnd(number=state.number, cut=cut))


@default_on_error(lambda: None)
def record_open_files(dataset: Any, line: CodeLine | None) -> None:
    """Record the open files of a data set, which the workers will share with this process.

    Args:
        dataset: The data set.
        line: The line that made the loader.
    """
    for path, value in digests.nested_attributes(dataset, "dataset"):
        if is_open_file(value):
            cls = type(value)
            shared = SharedFile(path=path, type=f"{cls.__module__} {cls.__name__}")
            current_log().write(shared, line)


def is_open_file(value: Any) -> bool:
    if isinstance(value, io.IOBase):
        is_in_memory = isinstance(value, io.BytesIO | io.StringIO)
        return not value.closed and not is_in_memory and has_descriptor(value)
    package = type(value).__module__.partition(".")[0]
    if package == "h5py":
        return bool(value)
    return package in FILE_MODULES and type(value).__name__ in FILE_CLASSES


def has_descriptor(file: Any) -> bool:
    try:
        return os.get_inheritable(file.fileno()) is not None
    except (OSError, ValueError):
        return False


def read_ahead(call: WrappedCall) -> Iterator[Any]:
    """Record the batches of a loader of Accelerate when the script gets them.

    The loader reads one batch ahead: the script would use the last batch of each pass after the end
    of that pass.
    """
    ahead: deque[Callable[[], None]] = deque()
    attributes = vars(call.args[0].base_dataloader)
    attributes[AHEAD_ATTRIBUTE] = ahead
    try:
        for batch in call.run():
            while len(ahead) > 1:
                write_event = ahead.popleft()
                write_event()
            yield batch
        for write_event in ahead:
            write_event()
    finally:
        attributes.pop(AHEAD_ATTRIBUTE, None)
