"""python benchmarks/formats.py [--formats NAMES] [--lines N] [--write]

What does a resume over files of common formats lose, beside the loader that each format comes with?
`stepladder.Loader` over `open_data`, and the native loader, are stopped at a random place of an
epoch and resumed on the same or another number of ranks and workers, each rank a process: samples
lost, samples repeated. Then on one rank without workers: seconds to the first batch after a resume
at 90 % of an epoch; rows a second, cold and warm (in turns, medians of five); memory above the
imports; how well an epoch is shuffled. At last 10^7 and 10^8 rows of JSON Lines, ours alone.

A native loader saves its state as its documentation says: datasets and webdataset by torchdata's
StatefulDataLoader, Grain by its ElasticIterator, the others by their own. Each rank saves its own; a rank that had none
before takes that of the last one. All libraries are in one environment:

    pip install -e packages/slurm-lab -e packages/stepladder-exchange -e '.[json,parquet]'
    pip install datasets webdataset torchdata
    pip install --no-deps mosaicml-streaming
    pip install catalogue brotli python-snappy zstd
    pip install grain litdata  # optional: without them ArrayRecord and litdata are left out"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from formats_readers import NATIVE, OPTIONAL, READERS, WRITERS, Rank, list_formats, open_fastest
from report import Report, bar, table

from stepladder import Loader, open_data

ROWS = 12_000
GLOBAL_BATCH = 96
RATE_BATCH = 256
CELLS = [  # ranks and workers before, and after
    ((2, 0), (2, 0)),
    ((2, 0), (3, 0)),
    ((3, 0), (2, 0)),
    ((2, 2), (2, 1)),
]
ROUNDS = 5
SECONDS = 0.5  # of each measured round
LIMIT = 180  # seconds, after which a rank is ended
MOST_SECONDS = 0.5
LEAST_RATE = 0.95
MOST_MEGABYTES = 100
LARGE_ROWS = 10**7
NO_END = "no end"


# -- processes -------------------------------------------------------------------------------------


def run_ranks(calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Return what functions return that run at the same time, each in a rank of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    children = []
    for rank, (function, args) in enumerate(calls):
        receive, send = context.Pipe(duplex=False)
        env = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": len(calls),
            "LOCAL_WORLD_SIZE": len(calls),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        child = context.Process(target=run_rank, args=(send, env, function, args))
        child.start()
        send.close()
        children.append((child, receive))
    results = []
    end = time.monotonic() + LIMIT
    for child, receive in children:
        result: Any = NO_END
        if receive.poll(max(0.0, end - time.monotonic())):
            result = receive.recv()
        child.join(5)
        if child.is_alive():
            child.kill()
        results.append(result)
    return results


def run_rank(
    send: Any, env: dict[str, Any], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ |= {name: str(value) for name, value in env.items()}
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars and warnings of libraries
    try:
        send.send(function(*args))
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        send.send(type(error).__name__)
    send.close()
    os._exit(0)  # what a library leaves running does not count


def run_alone(function: Callable[..., Any], *args: Any) -> Any:
    (result,) = run_ranks([(function, args)])
    return result


# -- samples lost and repeated ---------------------------------------------------------------------


def read_part(
    name: str, reader: str, folder: Path, reader_rank: Rank, state: Any, steps: int | None
) -> tuple[list[int], Any]:
    """Return the ids of the batches up to a step or to the end, and the state after them."""
    loader = READERS[reader](name, folder, reader_rank)
    if state is not None:
        loader.load_state_dict(state)
    ids = [value for batch in islice(loader, steps) for value in batch]
    state = loader.state_dict() if steps is not None else None
    loader.close()
    return ids, state


def lost_and_repeated(
    name: str, reader: str, folder: Path, cell: tuple[tuple[int, int], tuple[int, int]], stop: int
) -> str:
    given: Counter[int] = Counter()
    states: list[Any] = [None]
    for (ranks, workers), steps in zip(cell, (stop, None), strict=True):
        calls = []
        for rank in range(ranks):
            reader_rank = Rank(rank, ranks, workers, GLOBAL_BATCH)
            state = states[min(rank, len(states) - 1)]
            calls.append((read_part, (name, reader, folder, reader_rank, state, steps)))
        results = run_ranks(calls)
        failures = [result for result in results if isinstance(result, str)]
        if failures:
            return failures[0]
        for ids, _ in results:
            given.update(ids)
        states = [state for _, state in results]
    return f"{ROWS - len(given):,} / {sum(given.values()) - len(given):,}"


# -- time, memory and order ------------------------------------------------------------------------


def read_epoch(name: str, reader: str, folder: Path) -> dict[str, Any]:
    """Return rows a second of a first epoch, the memory above the imports, and the order of ids."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = peak = private_megabytes()
    start = time.perf_counter()
    loader = open_fastest(name, reader, folder, Rank(0, 1, 0, RATE_BATCH))
    ids: list[int] = []
    for number, batch in enumerate(loader):
        ids += batch
        if number % 8 == 0:
            peak = max(peak, private_megabytes())
    seconds = time.perf_counter() - start
    loader.close()
    return {"cold": len(ids) / seconds, "megabytes": peak - before, "shuffle": measure_shuffle(ids)}


def private_megabytes() -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)[0]) / 1024


def measure_shuffle(ids: list[int]) -> float:
    """Return the spread of ids within batches, as a part of that of a random permutation."""
    full_rows = len(ids) // RATE_BATCH * RATE_BATCH
    batches = np.array(ids[:full_rows]).reshape(-1, RATE_BATCH)
    return float(batches.std(1).mean() / np.std(np.arange(len(ids))))


def save_at_90_percent(name: str, reader: str, folder: Path) -> Any:
    reader_rank = Rank(0, 1, 0, GLOBAL_BATCH)
    return read_part(name, reader, folder, reader_rank, None, int(0.9 * ROWS / GLOBAL_BATCH))[1]


def time_first_batch(name: str, reader: str, folder: Path, state: Any) -> float:
    loader = READERS[reader](name, folder, Rank(0, 1, 0, GLOBAL_BATCH))
    start = time.perf_counter()
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - start


def measure_rates(name: str, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return rows a second, and a second of processor time, of both readers in turns."""
    endless = {}
    for reader in READERS:
        loader = open_fastest(name, reader, folder, Rank(0, 1, 0, RATE_BATCH))
        endless[reader] = repeat_epochs(loader)
        for _ in range(ROWS // RATE_BATCH):
            next(endless[reader])
    rates: dict[str, list[tuple[float, float]]] = {reader: [] for reader in READERS}
    for number in range(ROUNDS):
        for reader in list(READERS)[:: 1 if number % 2 else -1]:
            rows = 0
            start = time.perf_counter()
            start_processor = time.process_time()
            while (seconds := time.perf_counter() - start) < SECONDS:
                rows += next(endless[reader])
            processor_seconds = time.process_time() - start_processor
            rates[reader].append((rows / seconds, rows / processor_seconds))
    return rates


def repeat_epochs(loader: Any) -> Iterator[int]:
    while True:
        for batch in loader:
            yield len(batch)


def measure_format(name: str, folder: Path) -> tuple[list[list[str]], list[str], list[str]]:
    """Return our matrix rows, the row of figures, and the bars of a format."""
    folder.mkdir()
    run_alone(WRITERS[name], folder, ROWS)
    stop = random.Random(name).randrange(20, ROWS // GLOBAL_BATCH - 20)
    matrix = []
    for cell in CELLS:
        (ranks, workers), (ranks_after, workers_after) = cell
        text = f"{name}, {ranks} ranks, {workers} workers -> {ranks_after}, {workers_after}"
        results = [lost_and_repeated(name, reader, folder, cell, stop) for reader in READERS]
        matrix.append([text, *results])
        print(matrix[-1], flush=True)
    firsts = []
    for reader in READERS:
        state = run_alone(save_at_90_percent, name, reader, folder)
        times = [run_alone(time_first_batch, name, reader, folder, state) for _ in range(3)]
        firsts.append(median(times))
    epochs = [run_alone(read_epoch, name, reader, folder) for reader in READERS]
    rates = run_alone(measure_rates, name, folder)
    warm, by_processor = np.transpose([np.median(rates[reader], 0) for reader in READERS])
    ratio = float(np.median(np.divide(rates["ours"], rates["native"]), 0)[0])
    figures = [
        f"{name}, {NATIVE[name]}",
        " / ".join(f"{seconds:.3f}" for seconds in firsts),
        " / ".join(f"{epoch['cold']:,.0f}" for epoch in epochs),
        " / ".join(f"{rate:,.0f}" for rate in warm),
        " / ".join(f"{rate:,.0f}" for rate in by_processor),
        " / ".join(f"{epoch['megabytes']:.0f}" for epoch in epochs),
        " / ".join(f"{epoch['shuffle']:.2f}" for epoch in epochs),
    ]
    print(figures, flush=True)
    return matrix, figures, [bar(f"{name}, rows a second, warm", ratio, LEAST_RATE, at_most=False)]


# -- many rows -------------------------------------------------------------------------------------


def write_many(path: Path, count: int) -> None:
    lines = "".join(f'{{"id": {index}, "x": {index % 97}}}\n' for index in range(count // 100))
    with path.open("w") as file:
        for _ in range(100):
            file.write(lines)


def open_many(path: Path, batches: int) -> dict[str, float]:
    """Return the time of the index, of a first batch at 90 %, and the memory of reading."""
    few = path.with_name("few.jsonl")
    few.write_text('{"id": 1, "x": 2}\n' * 2)
    next(iter(Loader(open_data(few), 1)))
    before = peak = private_megabytes()
    start = time.perf_counter()
    loader = Loader(open_data(path), RATE_BATCH)
    opening = time.perf_counter() - start
    peak = max(peak, private_megabytes())
    start = time.perf_counter()
    step = int(0.9 * len(loader))
    loader.load_state_dict({**loader.state_dict(), "step": step})
    iterator = iter(loader)
    next(iterator)  # the index is mapped, and the order computed, at the place
    first = time.perf_counter() - start
    for _ in islice(iterator, batches):
        peak = max(peak, private_megabytes())
    loader.close()
    return {"opening": opening, "first": first, "megabytes": peak - before}


def measure_many(folder: Path, count: int) -> dict[str, float]:
    path = folder / "many.jsonl"
    run_alone(write_many, path, count)
    indexing = run_alone(open_many, path, 0)["opening"]
    measured = run_alone(open_many, path, 400)
    path.unlink()
    return {**measured, "indexing": indexing}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=",".join(list_formats()))
    parser.add_argument("--lines", type=int, default=10**8, help="of JSON, for the memory")
    parser.add_argument("--write", action="store_true", help="save the report under results/")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    packages = ["torch", "pyarrow", "datasets", "torchdata", "webdataset", "mosaicml-streaming"]
    packages += [OPTIONAL[name][0] for name in args.formats.split(",") if name in OPTIONAL]
    packages += ["msgspec", "stepladder"]
    report = Report("formats.py", "Files of common formats, in any loop", packages, "2")
    matrix: list[list[str]] = []
    figures: list[list[str]] = []
    rates: list[str] = []
    with tempfile.TemporaryDirectory() as root:
        os.environ |= {"XDG_CACHE_HOME": root, "HF_HOME": root}
        for name in args.formats.split(","):
            cells, row, bars = measure_format(name, Path(root) / name)
            matrix += cells
            figures.append(row)
            rates += bars
        large_rows = min(LARGE_ROWS, args.lines)
        large = measure_many(Path(root), large_rows)
        large_set = measure_many(Path(root), args.lines)
    ours = [row[1] for row in matrix]
    num_exact = ours.count("0 / 0")
    verdict = "PASS" if num_exact == len(ours) else "FAIL"
    lines = [f"- {verdict}: resumes with no sample lost or repeated: {num_exact} of {len(ours)}"]
    verdict = "PASS" if large["first"] <= MOST_SECONDS else "FAIL"
    lines.append(
        f"- {verdict}: first batch after a resume at 90 % of {large_rows:,} rows of JSON Lines:"
        f" {large['first']:.3f} s (bar: <= {MOST_SECONDS} s)"
    )
    verdict = "PASS" if large_set["megabytes"] <= MOST_MEGABYTES else "FAIL"
    lines.append(
        f"- {verdict}: private memory above the imports at {args.lines:,} rows of JSON Lines:"
        f" {large_set['megabytes']:.0f} MB (bar: <= {MOST_MEGABYTES} MB)"
    )
    text = (
        "The name of an error: the native loader refuses the state of another number of ranks or"
        " workers, or fails with it. A loader whose rows a second of processor time are many times its"
        " rows a second waits most of the time: look at the former. "
        f"The index of {args.lines:,} rows takes {large_set['indexing']:.0f} s once; with it, opening"
        f" takes {large_set['opening']:.3f} s, and the first batch at 90 % {large_set['first']:.3f} s."
    )
    header = [f"lost / repeated of {ROWS:,}", "stepladder.Loader", "native loader"]
    columns = ["ours / native", "s to the first batch at 90 %", "rows a second, cold"]
    columns += ["rows a second, warm", "of processor time", "MB", "spread of a batch (1 is random)"]
    sections = [table(header, matrix), table(columns, figures), text, "\n".join([*lines, *rates])]
    report.finish(sections, args.write)


if __name__ == "__main__":
    sys.exit(main())
