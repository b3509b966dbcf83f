"""python benchmarks/loader.py [--write]

What does a resume of `stepladder.Loader` lose, beside torchdata's StatefulDataLoader? Both read the
same map-style data set. They are stopped at random places of an epoch, and resumed on the same or
another number of ranks and of workers: samples lost, samples repeated. Then: seconds to the first
batch after a resume in an epoch of 10 million rows, and rows a second, in turns, medians of five.

Ranks are made one after the other in one process: no rank waits for another. StatefulDataLoader
has a StatefulDistributedSampler, each rank saves its own state, and a rank that had none before
takes the state of the last one. `pip install torchdata`."""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from report import Report, bar, table
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from stepladder import Loader, World

NUM_ROWS = 4_003  # no number of ranks divides it
GLOBAL_BATCH = 96
STOPS = 3
RATE_ROWS = 9_600
ROUNDS = 5
LARGE_ROWS = 10**7
LARGE_BATCH = 128
MOST_SECONDS = 0.5
LEAST_RATE = 0.95
TENSORS = "stepladder.Loader of tensors"
TRIED = (
    "an item of this Dataset takes 1 us to read, and 10 us to seed Python's, NumPy's and torch's"
    " generators for it, so that its augmentation is the same on any worker and after a resume"
)
CELLS = [  # ranks and workers before, and after
    ((2, 0), (2, 0)),
    ((2, 2), (2, 2)),
    ((2, 2), (2, 1)),
    ((2, 0), (3, 0)),
    ((3, 0), (2, 0)),
]


class Rows(Dataset[Any]):
    """Rows of 784 numbers that begin with their index; the large data set has one row for all."""

    def __init__(self, num_rows: int, is_large: bool = False) -> None:
        self.num_rows = num_rows
        self.rows = torch.zeros(1 if is_large else num_rows, 784, dtype=torch.uint8)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.rows[index % len(self.rows)]


Make = Callable[[Rows, int, int, int, int], Any]


def make_ours(data: Rows, batch: int, rank: int, ranks: int, workers: int) -> Loader:
    world = World(rank, ranks, rank, ranks)
    return Loader(data, batch, seed=1, num_workers=workers, world=world)


def make_theirs(data: Rows, batch: int, rank: int, ranks: int, workers: int) -> StatefulDataLoader:
    sampler = StatefulDistributedSampler(data, ranks, rank, shuffle=True, seed=1)
    return StatefulDataLoader(data, batch // ranks, sampler=sampler, num_workers=workers)


READERS: dict[str, Make] = {"stepladder.Loader": make_ours, "StatefulDataLoader": make_theirs}


def read_indices(loader: Any, steps: int | None = None) -> Iterator[int]:
    """Yield the indices of the rest of the epoch, or of some steps."""
    for number, (indices, _) in enumerate(loader):
        yield from indices.tolist()
        if number + 1 == steps:
            return


def close(loader: Any) -> None:
    if isinstance(loader, Loader):
        loader.close()
    else:
        loader._iterator = None  # ends its workers


def lost_and_repeated(
    make: Make, before: tuple[int, int], after: tuple[int, int], stop: int
) -> str:
    """Return how many samples of an epoch were lost and repeated, or the refusal."""
    data = Rows(NUM_ROWS)
    given: Counter[int] = Counter()
    states = []
    for rank in range(before[0]):
        loader = make(data, GLOBAL_BATCH, rank, *before)
        given.update(read_indices(loader, stop))
        states.append(loader.state_dict())
        close(loader)
    for rank in range(after[0]):
        loader = make(data, GLOBAL_BATCH, rank, *after)
        try:
            loader.load_state_dict(states[min(rank, len(states) - 1)])
            given.update(read_indices(loader))
        except AssertionError:
            return "refused"
        finally:
            close(loader)
    lost = NUM_ROWS - len(given)
    return f"{lost} / {sum(given.values()) - len(given)}"


def first_batch_seconds(make: Make, part: float) -> float:
    """Return the seconds from load_state_dict to the first batch of a resumed epoch."""
    data = Rows(LARGE_ROWS, is_large=True)
    loader = make(data, LARGE_BATCH, 0, 2, 0)
    next(iter(loader))
    state = at_step(loader.state_dict(), int(part * LARGE_ROWS / LARGE_BATCH))
    resumed = make(data, LARGE_BATCH, 0, 2, 0)
    start = time.perf_counter()
    resumed.load_state_dict(state)
    next(iter(resumed))
    return time.perf_counter() - start


def at_step(state: dict[str, Any], step: int) -> dict[str, Any]:
    """Return the state that the loader would have after `step` batches, without reading them."""
    if "seed" in state:
        return {**state, "step": step}
    rows = step * LARGE_BATCH // 2
    sampler = {"samples_yielded": rows, "sampler_state": {"yielded": rows}}
    counts = {"_sampler_iter_yielded": step, "_num_yielded": step}
    return {**state, "_sampler_iter_state": sampler, **counts}


def rows_a_second(make: Make, workers: int) -> float:
    loader = make(Rows(RATE_ROWS), GLOBAL_BATCH, 0, 1, workers)
    list(read_indices(loader))  # the first epoch starts the workers
    start = time.perf_counter()
    count = sum(1 for _ in read_indices(loader))
    seconds = time.perf_counter() - start
    close(loader)
    return count / seconds


def make_of_tensors(data: Rows, batch: int, rank: int, ranks: int, workers: int) -> Loader:
    """The same rows as tensors, which a Loader takes without a Dataset around them."""
    world = World(rank, ranks, rank, ranks)
    return Loader((torch.arange(data.num_rows), data.rows), batch, seed=1, world=world)


def measure_rates(workers: int) -> dict[str, float]:
    """Return the rows a second of each reader, measured in turns."""
    readers = {**READERS, TENSORS: make_of_tensors}
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(ROUNDS):
        for name in list(readers)[:: 1 if number % 2 else -1]:
            rates[name].append(rows_a_second(readers[name], workers))
    return {name: median(values) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="save the report under results/")
    write = parser.parse_args().write
    report = Report("loader.py", "A resume in any loop", ["torch", "torchdata", "stepladder"], "2")
    stops = random.Random(1).sample(range(3, NUM_ROWS // GLOBAL_BATCH - 3), STOPS)
    header = [f"lost / repeated of {NUM_ROWS}, stopped after steps {stops}", *READERS]
    rows = []
    for before, after in CELLS:
        cell = f"{before[0]} ranks, {before[1]} workers -> {after[0]} ranks, {after[1]} workers"
        results = [
            ", ".join(lost_and_repeated(make, before, after, stop) for stop in stops)
            for make in READERS.values()
        ]
        rows.append([cell, *results])
    ours = [result for row in rows for result in row[1].split(", ")]
    whole = sum(result == "0 / 0" for result in ours)
    verdict = "PASS" if whole == len(ours) else "FAIL"
    lines = [f"- {verdict}: resumes with no sample lost or repeated: {whole} of {len(ours)}"]
    seconds_rows = []
    for part in (0.0, 0.5, 0.9):
        seconds = [
            median(first_batch_seconds(make, part) for _ in range(3)) for make in READERS.values()
        ]
        seconds_rows.append([f"{part:.0%}", *(f"{value:.4f}" for value in seconds)])
    verdict = "PASS" if float(seconds_rows[-1][1]) <= MOST_SECONDS else "FAIL"
    lines.append(
        f"- {verdict}: first batch after a resume at 90 % of {LARGE_ROWS:,} rows:"
        f" {seconds_rows[-1][1]} s (bar: <= {MOST_SECONDS} s)"
    )
    rate_rows = []
    for workers in (0, 2):
        rates = measure_rates(workers)
        rate_rows.append([f"{workers} workers", *(f"{rate:,.0f}" for rate in rates.values())])
        mine, theirs, of_tensors = rates.values()
        what = f"rows a second, {workers} workers, ours / StatefulDataLoader"
        lines.append(bar(what, mine / theirs, LEAST_RATE, at_most=False, tried=TRIED))
        if not workers:
            what = "rows a second, no workers, ours of tensors / StatefulDataLoader"
            lines.append(bar(what, of_tensors / theirs, LEAST_RATE, at_most=False))
    sections = [
        table(header, rows),
        table(["seconds to the first batch, resumed at", *READERS], seconds_rows),
        table(["rows of 784 bytes a second", *READERS, TENSORS], rate_rows),
        "\n".join(lines),
    ]
    report.finish(sections, write)


if __name__ == "__main__":
    main()
