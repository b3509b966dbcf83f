"""python benchmarks/growth.py [--part drift|parameters|processes|snapshot|nodes] [--steps 1000000] [--write]

Does a step's cost stay what it is, as a run gets longer, its model larger and its processes more?

drift: one long run of a model of five weights on one process; its time per step and its memory, in
ten parts. parameters: an MLP of two square layers with 10^4 to 10^8 weights, SGD, batches of 8, one
thread: `--sync ddp` on one process beside a hand-written loop, and on two beside torch's
DistributedDataParallel; in turn, several rounds. processes: the recipe mlp on 1 to 8 processes of
this machine, which share its cores. snapshot: how long training waits for a snapshot of 100 million
weights with Adam's state, beside torch.save and the asynchronous save of
torch.distributed.checkpoint; every file is on disk before the next one is measured. nodes: a model,
not a measurement: what a ring all-reduce of the gradients would cost on up to 1,024 nodes that have
the latency and the bandwidth that gloo shows between two processes of this machine, over its
loopback interface. The time to the first step is launch_time.py's question."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from commands import result_of
from report import RESULTS, Report, bar, table

PARTS = 10
WIDTHS = {10**4: 70, 10**5: 223, 10**6: 707, 10**7: 2236, 10**8: 7071}
BATCH = 8
WARM_UP = 2
TITLES = {
    "drift": "## A long run",
    "parameters": "## Larger models",
    "processes": "## More processes",
    "snapshot": "## Snapshots of a large model",
    "nodes": "## A model of many nodes",
}
TRIED = {
    "parameters": "malloc told to keep memory, fused steps, the bucket itself as gradient, less bookkeeping",
    "snapshot": "several threads, pieces of other sizes, huge pages, copies past the caches",
}
EARLIER = "The command and the load above are those of the part that was measured last."


def resident() -> int:
    """VmRSS of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


# -- one long run ----------------------------------------------------------------------------------


def drift(steps: int) -> list[str]:
    import torch

    from stepladder import Job, Settings, Trainer

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    steps_done = [0]
    every = steps // PARTS
    marks: list[tuple[float, int]] = []

    def loss(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        if steps_done[0] % every == 0 or steps_done[0] == steps - 1:
            marks.append((time.perf_counter(), resident()))
        steps_done[0] += 1
        return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])

    x = torch.randn(8 * 1000, 4)
    job = Job(
        model, torch.optim.SGD(model.parameters(), lr=0.01), loss, (x, x.sum(1, keepdim=True))
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(
            Path(folder, "run"), epochs=steps // 1000, global_batch=8, threads=1, progress=False
        )
        Trainer(job, settings).fit()
    parts = [1e6 * (b - a) / every for (a, _), (b, _) in pairwise(marks)]
    memory = [(memory_bytes - marks[1][1]) / 1e6 for _, memory_bytes in marks[1:]]
    rows = [
        [f"{every * number:,} to {every * (number + 1):,}", f"{us:.1f}", f"{more:+.1f}"]
        for number, (us, more) in enumerate(zip(parts, memory, strict=True))
    ]
    return [
        TITLES["drift"],
        table(["steps", "us/step", "MB of memory since the first part's end"], rows),
        "\n".join(
            [
                bar(
                    f"the last tenth of {steps:,} steps against the second",
                    parts[-1] / parts[1],
                    1.10,
                    at_most=True,
                ),
                f"- {'PASS' if memory[-1] <= 10 else 'FAIL'}: memory, more at the end than after a tenth:"
                f" {memory[-1]:.1f} MB (bar: <= 10 MB)",
            ]
        ),
    ]


# -- larger models ---------------------------------------------------------------------------------


def square(width: int) -> tuple[Any, Any, Callable[..., Any]]:
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    return model, optimizer, lambda model, x: (model(x).square().sum(), x.numel())


def by_hand(width: int, steps: int) -> float:
    """Return the seconds per step of a loop by hand on this rank, after a warm-up."""
    import torch
    import torch.distributed as dist

    from stepladder import World

    model, optimizer, loss = square(width)
    world = World.detect()
    replica = model
    if world.world_size > 1:
        dist.init_process_group("gloo")
        replica = torch.nn.parallel.DistributedDataParallel(model)
    x = torch.randn(BATCH // world.world_size, width)
    took = []
    for _ in range(steps + WARM_UP):
        start = time.perf_counter()
        total, count = loss(replica, x)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - start)
    if world.world_size > 1:
        dist.destroy_process_group()
    return median(took[WARM_UP:])


def by_trainer(width: int, steps: int, folder: str) -> float:
    """Return the seconds per step of the trainer on this rank, after a warm-up."""
    import torch

    from stepladder import Job, Settings, Trainer

    model, optimizer, loss = square(width)
    marks: list[float] = []

    def marked(model: Any, x: torch.Tensor) -> Any:
        marks.append(time.perf_counter())
        return loss(model, x)

    job = Job(model, optimizer, marked, torch.randn(BATCH * (steps + WARM_UP + 1), width))
    options: dict[str, Any] = {
        "global_batch": BATCH,
        "threads": 1,
        "progress": False,
        "snapshot_every": 10**6,
    }
    Trainer(job, Settings(Path(folder), **options)).fit()
    return median(b - a for a, b in list(pairwise(marks))[WARM_UP:])


def measured(way: str, width: int, nproc: int, steps: int) -> float:
    """Seconds per step of the slowest rank, in processes of their own."""
    from stepladder import launch

    with tempfile.TemporaryDirectory() as folder:
        if way == "hand":
            return max(launch(by_hand, width, steps, nproc=nproc))
        return max(launch(by_trainer, width, steps, folder, nproc=nproc))


def parameters(rounds: int) -> list[str]:
    rows = []
    worst = 0.0
    for count, width in WIDTHS.items():
        steps = max(5, min(300, 10**8 // count))
        row = [f"{count:,}"]
        for nproc in (1, 2):
            times: dict[str, list[float]] = {"hand": [], "ours": []}
            for number in range(rounds):
                for way in ("hand", "ours")[:: 1 if number % 2 == 0 else -1]:
                    times[way].append(measured(way, width, nproc, steps))
            ratio = median(a / b for a, b in zip(times["ours"], times["hand"], strict=True))
            worst = max(worst, ratio)
            row += [
                f"{1e3 * median(times['hand']):.2f}",
                f"{1e3 * median(times['ours']):.2f}",
                f"{ratio:.2f}",
            ]
        rows.append(row)
    head = [
        "weights",
        "ms/step by hand",
        "ours",
        "ratio",
        "DDP on 2, by hand",
        "ours on 2",
        "ratio on 2",
    ]
    text = f"Medians of {rounds} interleaved rounds, each of the median step in processes of their own."
    line = bar(
        "any size, against the loop by hand on as many processes",
        worst,
        1.10,
        True,
        TRIED["parameters"],
    )
    return [TITLES["parameters"], table(head, rows), text, line]


# -- more processes --------------------------------------------------------------------------------


def processes(rounds: int) -> list[str]:
    modes = {"ddp": ["--sync", "ddp"], "exact": ["--sync", "exact", "--microbatch", 16]}
    sizes = range(1, 9)
    times: dict[tuple[str, int], list[float]] = {
        (mode, size): [] for mode in modes for size in sizes
    }
    for _ in range(rounds):
        for (mode, size), values in times.items():
            flags = ["--epochs", 8, "--nproc", size, "--threads", 1, *modes[mode]]
            result, _ = result_of("train", "mlp", *flags)
            values.append(1e6 * float(result["seconds"]) / result["steps"])
    rows = [[str(size), *(f"{median(times[mode, size]):.0f}" for mode in modes)] for size in sizes]
    head = ["processes", "us/step, ddp", "us/step, exact, 8 microbatches"]
    text = f"{rounds} run(s) of 512 steps each, the median, with evaluations, snapshots and the first step."
    return [TITLES["processes"], table(head, rows), text]


# -- many nodes, by a model ------------------------------------------------------------------------


def all_reduce_times(length: int, tries: int) -> float:
    """Return the median seconds of an all-reduce of `length` float32 through gloo on this rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    numbers = torch.zeros(length)
    took = []
    for _ in range(tries):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(numbers)
        took.append(time.perf_counter() - start)
    dist.destroy_process_group()
    return median(took[1:])


def nodes() -> list[str]:
    from stepladder import launch

    length = 25 * 10**6
    short, long = (
        max(launch(all_reduce_times, *arguments, nproc=2)) for arguments in ((1, 500), (length, 9))
    )
    # of two nodes, a ring takes two messages
    latency = short / 2
    bandwidth = 4 * length / (long - short)
    rows = []
    for count, width in ((10**6, 707), (10**8, 7071)):
        compute = measured("hand", width, 1, max(5, 10**8 // count))
        for size in (2, 8, 64, 1024):
            exchange = 2 * (size - 1) * latency + 2 * (size - 1) / size * 4 * count / bandwidth
            share = compute / (compute + exchange)
            rows.append(
                [
                    f"{count:,}",
                    f"{size:,}",
                    f"{1e3 * compute:.1f}",
                    f"{1e3 * exchange:.1f}",
                    f"{share:.2f}",
                ]
            )
    text = (
        f"A model: 2 (N - 1) messages of {1e6 * latency:.0f} us each, and 2 (N - 1) / N of the gradient's bytes at"
        f" {bandwidth / 1e9:.2f} GB/s, both measured between two processes; the same work per node as on one."
        " Nothing overlaps in it, and switches cost nothing."
    )
    head = [
        "weights",
        "nodes",
        "ms/step alone, measured",
        "ms of all-reduce, modelled",
        "speed per node, of one alone",
    ]
    return [TITLES["nodes"], table(head, rows), text]


# -- snapshots -------------------------------------------------------------------------------------


def snapshot(rounds: int) -> list[str]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from stepladder.storage.snapshot_store import Snapshots

    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(5000, 5000) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    variants = (
        "torch.save, with fsync",
        "async save of DCP",
        "stepladder",
        "the limit: the same bytes, copied",
    )
    times: dict[str, list[float]] = {name: [] for name in variants}
    tensors = [t for name in state for t in tensors_in(state[name])]
    lasting = [torch.zeros_like(tensor) for tensor in tensors]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        snapshots = Snapshots(Path(folder, "snapshots"), keep=1)
        for number in range(rounds + 1):
            let_disk_settle()
            times["torch.save, with fsync"].append(
                timed(partial(saved, state, Path(folder, "whole.pt")))
            )
            pending: list[Any] = []
            let_disk_settle()
            start = partial(
                dcp.async_save, state, checkpoint_id=Path(folder, "dcp"), process_group=None
            )
            times["async save of DCP"].append(
                timed(lambda call=start, out=pending: out.append(call()))
            )
            pending[0].result()
            let_disk_settle()
            save = partial(snapshots.save, number, model, {"optimizer": optimizer.state_dict()})
            times["stepladder"].append(timed(save))
            snapshots.wait()
            let_disk_settle()
            times[variants[3]].append(timed(partial(torch._foreach_copy_, lasting, tensors)))
        dist.destroy_process_group()
    synced = median(times["torch.save, with fsync"][1:])
    rows = [
        [
            name,
            f"{1e3 * seconds[0]:.0f}",
            f"{1e3 * median(seconds[1:]):.0f}",
            f"{median(seconds[1:]) / synced:.3f}",
        ]
        for name, seconds in times.items()
    ]
    head = ["way", "ms the first time", "ms afterwards", "share of torch.save"]
    weights = sum(param.numel() for param in model.parameters())
    text = f"{weights:,} weights with Adam's state, {12 * weights / 1e9:.1f} GB; medians of {rounds} saves in turn."
    ours, theirs, copied = (
        median(times[name][1:]) for name in (variants[2], variants[1], variants[3])
    )
    return [
        TITLES["snapshot"],
        table(head, rows),
        text,
        "\n".join(
            [
                bar(
                    "training waits for a snapshot, share of torch.save's time",
                    ours / synced,
                    0.05,
                    at_most=True,
                    tried=TRIED["snapshot"],
                ),
                f"- one thread's copy of the same bytes in memory, share of torch.save's: {copied / synced:.2f}x",
                bar(
                    "training waits, against DCP's asynchronous save",
                    ours / theirs,
                    1.0,
                    at_most=True,
                ),
            ]
        ),
    ]


def tensors_in(tree: Any) -> list[Any]:
    """All that a state dict holds, at any depth."""
    if isinstance(tree, dict):
        return [tensor for part in tree.values() for tensor in tensors_in(part)]
    return [tree] if hasattr(tree, "numel") else []


def saved(state: Any, path: Path) -> None:
    import torch

    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def let_disk_settle() -> None:
    """Wait until the save before has left nothing to do.

    DCP's threads and the disk went on for half a second.
    """
    os.sync()
    while True:
        used = time.process_time()
        time.sleep(0.1)
        if time.process_time() - used < 0.01:
            return


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def kept_sections(path: Path) -> dict[str, str]:
    """Return the sections of an earlier report by their titles."""
    if not path.exists():
        return {}
    _, *parts = ("\n" + path.read_text(encoding="utf-8")).split("\n## ")
    return {
        "## " + text.partition("\n")[0]: "## " + text.strip().removesuffix(EARLIER).strip()
        for text in parts
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--part", choices=list(TITLES), help="only this one; the sections of the others stay"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10**6, help="of the long run")
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    report = Report("growth.py", "Longer, larger, more", ["torch", "stepladder"], cores_used="all")
    parts: dict[str, Callable[[], list[str]]] = {
        "drift": partial(drift, args.steps),
        "parameters": partial(parameters, args.rounds),
        "processes": partial(processes, args.rounds),
        "snapshot": partial(snapshot, args.rounds),
        "nodes": nodes,
    }
    earlier = kept_sections(RESULTS / "growth.md") if args.part else {}
    texts = [
        "\n\n".join(part()) if args.part in (None, name) else earlier.get(TITLES[name], "")
        for name, part in parts.items()
    ]
    report.finish([text for text in texts if text] + ([EARLIER] if earlier else []), args.write)


if __name__ == "__main__":
    main()
