"""python benchmarks/shards.py --data-dir data/mnist [--write]

What does training from shards cost against training from memory? How fast is reading alone, in what
memory?

Training: the classic MNIST net on two processes; memory and shards are set up in the same ranks and
take turns, block by block. Reading: generated rows, small and large, each reader in a process of
its own, one after the other in each round, without workers. Memory: reading alone, with the data of
the small and of the large size."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from report import Report, bar, table
from shards_rivals import READERS, stand_in_for

BLOCK = 25  # steps of training
SHAPES = {"784 bytes": (28, 28), "12 KB": (64, 64, 3)}
WORKER = Path(__file__).with_name("shards_rivals.py")
MOST_MEGABYTES = 100
MOST_GROWTH = 10


# -- training --------------------------------------------------------------------------------------


def rank_work(folders: dict[str, str], folder: str, rounds: int) -> int:
    """Time each source's blocks of steps on this rank; rank 0 writes the seconds per step to a file."""
    import torch

    from stepladder import World, process_group
    from stepladder.core.settings import Settings
    from stepladder.rank.preemption import StopSignals
    from stepladder.recipes.mnist import Config, build
    from stepladder.train.job import Recipe
    from stepladder.train.opening import open_session
    from stepladder.train.run_spec import RunSpec
    from stepladder.train.trainer import TrainingLoop

    with process_group(World.detect(), torch.device("cpu")) as comm, ExitStack() as stack:
        loops = {}
        for name, data_dir in folders.items():
            job = build(Config(net="classic", data_dir=data_dir, global_batch=128))
            run_dir = Path(folder) / name
            settings = Settings(
                run_dir=run_dir,
                epochs=9,
                global_batch=128,
                threads=1,
                progress=False,
                snapshot_every=10**6,
            )
            session = stack.enter_context(
                open_session(RunSpec.make(job, settings, Recipe(name), comm), comm)
            )
            loops[name] = stack.enter_context(TrainingLoop(session, StopSignals()))
        seconds: dict[str, list[float]] = {name: [] for name in folders}
        for number in range(rounds + 1):  # the first block is a warm-up
            for name in list(folders)[:: 1 if number % 2 else -1]:
                comm.gather_bytes(b"x")
                start = time.perf_counter()
                for _ in range(BLOCK):
                    loops[name].step()
                comm.gather_bytes(b"x")
                seconds[name].append((time.perf_counter() - start) / BLOCK)
        if comm.world.is_first:
            Path(folder, "seconds.json").write_text(
                json.dumps({n: s[1:] for n, s in seconds.items()})
            )
    return 0


def training(data_dir: Path, work: Path, rounds: int) -> tuple[str, str]:
    from stepladder.data.shards.inputs import open_tables
    from stepladder.data.shards.writer import write_table
    from stepladder.launcher.local.local_group import LocalGroup
    from stepladder.launcher.local.supervisor import run_local

    for part, rows in open_tables(str(data_dir)).items():
        write_table(rows, work / "mnist" / part)
    folders = {"memory": str(data_dir), "shards": str(work / "mnist")}
    code = run_local(LocalGroup(partial(rank_work, folders, str(work), rounds), threads=1), 2)
    if code:
        sys.exit(code)
    seconds = json.loads((work / "seconds.json").read_text())
    ratio = median(m / s for m, s in zip(seconds["memory"], seconds["shards"], strict=True))
    rows = [[name, f"{1e3 * median(times):.1f}"] for name, times in seconds.items()]
    text = "## Training, classic net, 2 processes, global batch 128\n\n" + table(
        ["source", "ms/step"], rows
    )
    return text, bar(
        "training from shards, throughput to that from memory", ratio, 0.95, at_most=False
    )


# -- reading ---------------------------------------------------------------------------------------


def blocks(shape: tuple[int, ...], rows: int) -> Any:
    for first in range(0, rows, 4096):
        count = min(4096, rows - first)
        rng = np.random.default_rng(first)
        images = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        yield {"image": images, "label": rng.integers(0, 10, count, dtype=np.uint8)}


def write_ours(folder: Path, shape: tuple[int, ...], rows: int) -> None:
    from stepladder.data.shards.writer import write_table
    from stepladder.data.table import Column, Table

    columns = {"image": Column(np.dtype(np.uint8), shape), "label": Column(np.dtype(np.uint8))}
    write_table(
        Table("generated", columns, {"rows": rows}, lambda _: blocks(shape, rows)),
        folder / "stepladder",
    )


def write_all(folder: Path, shape: tuple[int, ...], rows: int) -> list[str]:
    """The same rows in every form. The readers that there are."""
    folder.mkdir(parents=True)
    (folder / "shape.json").write_text(json.dumps(shape))
    write_ours(folder, shape, rows)
    writers = ["stepladder", "h5py, per sample"]
    for name, write in (("mosaicml-streaming", write_mosaicml), ("webdataset", write_webdataset)):
        try:
            write(folder, shape, rows)
            writers.append(name)
        except ImportError as error:
            print(f"{name}: not installed ({error})", file=sys.stderr)
    return writers


def write_mosaicml(folder: Path, shape: tuple[int, ...], rows: int) -> None:
    stand_in_for("torchvision", "transformers")
    from streaming import MDSWriter

    kinds = {"image": f"ndarray:uint8:{','.join(map(str, shape))}", "label": "uint8"}
    with MDSWriter(out=str(folder / "mosaicml"), columns=kinds, size_limit=1 << 26) as out:
        for block in blocks(shape, rows):
            for image, label in zip(block["image"], block["label"], strict=True):
                out.write({"image": image, "label": label})


def write_webdataset(folder: Path, shape: tuple[int, ...], rows: int) -> None:
    import webdataset  # noqa: F401 - without it, nobody would read them

    (folder / "webdataset").mkdir()
    number = 0
    for part, block in enumerate(blocks(shape, rows)):
        with tarfile.open(folder / "webdataset" / f"{part:05d}.tar", "w") as out:
            for image, label in zip(block["image"], block["label"], strict=True):
                for name, data in (("x", image.tobytes()), ("y", bytes([label]))):
                    info = tarfile.TarInfo(f"{number:09d}.{name}")
                    info.size = len(data)
                    out.addfile(info, BytesIO(data))
                number += 1


def read(reader: str, folder: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(WORKER), reader, str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{reader}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def reading(work: Path, megabytes: int, rounds: int) -> tuple[list[str], list[str]]:
    sections = []
    bars = []
    for name, shape in SHAPES.items():
        folder = work / name.replace(" ", "")
        readers = write_all(folder, shape, megabytes * 10**6 // int(np.prod(shape)))
        results: dict[str, list[dict[str, float]]] = {reader: [] for reader in readers}
        for number in range(rounds + 1):  # the first brings the files into the page cache
            for reader in readers:
                result = read(reader, folder)
                if number:
                    results[reader].append(result)
        speeds = {
            reader: [measured["rows_per_second"] for measured in all_]
            for reader, all_ in results.items()
        }
        size = int(np.prod(shape)) + 1
        rows = [
            [reader, f"{median(s):,.0f}", f"{median(s) * size / 1e6:,.0f}",
             f"{median(measured['megabytes'] for measured in results[reader]):,.0f}"]
            for reader, s in speeds.items()
        ]  # fmt: skip
        head = ["reader", "rows/s", "MB/s", "memory, MB"]
        sections.append(f"## Reading rows of {name}, {megabytes:,} MB\n\n" + table(head, rows))
        for reader in readers[1:]:
            ratio = median(a / b for a, b in zip(speeds["stepladder"], speeds[reader], strict=True))
            max_seconds = 5.0 if reader.startswith("h5py") else 1.0
            bars.append(
                bar(f"reading rows of {name}, against {reader}", ratio, max_seconds, at_most=False)
            )
        for reader in set(READERS) - set(readers):
            bars.append(f"- FAIL: {reader} is not installed: nothing to compare with")
        shutil.rmtree(folder)
    return sections, bars


def memory(work: Path, sizes: list[int]) -> tuple[str, list[str]]:
    """Measure the memory of reading alone, above the same process before the stream is opened."""
    taken = []
    for megabytes in sizes:
        folder = work / f"memory{megabytes}"
        write_ours(folder, SHAPES["784 bytes"], megabytes * 10**6 // 784)
        taken.append(read("stepladder", folder)["megabytes"])
        shutil.rmtree(folder)
    rows = [[f"{size:,} MB", f"{used:.0f}"] for size, used in zip(sizes, taken, strict=True)]
    limit = max(taken)
    growth = max(taken) - taken[0]
    return "## Memory of reading alone\n\n" + table(["data", "memory, MB"], rows), [
        f"- {'PASS' if limit <= MOST_MEGABYTES else 'FAIL'}: memory of reading: {limit:.0f} MB"
        f" (bar: <= {MOST_MEGABYTES} MB)",
        f"- {'PASS' if growth <= MOST_GROWTH else 'FAIL'}: growth from {sizes[0]:,} to {sizes[-1]:,} MB of data:"
        f" {growth:.0f} MB (bar: <= {MOST_GROWTH} MB)",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True, type=lambda text: Path(text).resolve())
    parser.add_argument("--work-dir", type=Path, help="where 5 GB have room [a temporary folder]")
    parser.add_argument(
        "--megabytes", type=int, default=200, help="of the data that all readers read"
    )
    parser.add_argument(
        "--memory-megabytes", type=int, nargs=2, default=[1000, 4000], help="small and large data"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of reading")
    parser.add_argument("--blocks", type=int, default=12, help="of training, per source")
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    packages = ["torch", "h5py", "mosaicml-streaming", "webdataset", "stepladder"]
    report = Report("shards.py", "Streaming from shards", packages, cores_used="2")
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        work = Path(folder)
        trained, bars = training(args.data_dir, work, args.blocks)
        sections, read_bars = reading(work, args.megabytes, args.rounds)
        memory_rows, memory_bars = memory(work, args.memory_megabytes)
    report.finish(
        [trained, *sections, memory_rows, "\n".join([bars, *read_bars, *memory_bars])], args.write
    )


if __name__ == "__main__":
    main()
