"""python benchmarks/exchange.py [--nproc 2 3 4] [--rounds N] [--write]

What does a step of a small model cost on several processes of one machine, compared with torch's
DDP?

The recipe mlp: an MLP 20-64-1 (tanh), SGD with momentum, a global batch of 128 out of 8192 samples
in memory, one thread per process. stepladder's time is that which `train --json` prints, divided by
the steps (3840 with two processes): evaluations, snapshots, ledger, metrics and the import of
TensorBoard are in it. DDP's is a bare loop over slices of a permutation on gloo, after a warm-up,
with nothing else in it. The limit is that loop without DDP, on as many processes, which never
communicate: forward, backward and a step of torch's optimizer. All take turns in every round, and
ratios are taken within a round.

Then an all-reduce of 100 MB that lie where a bucket of gradients does: through shared memory, and
through gloo."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from commands import result_of
from report import Report, bar, table

STEPS_PER_EPOCH = 64
BATCH = 128
WARM_UP = 64
EPOCHS = (
    120  # by the number of processes: of one of 0.6 s, the first import of TensorBoard was a tenth
)
TWO = "--sync exact, two microbatches"
MODES = {
    "--sync ddp": ["--sync", "ddp"],
    TWO: ["--sync", "exact", "--microbatch", BATCH // 2],
    "--sync exact, eight microbatches": ["--sync", "exact", "--microbatch", BATCH // 8],
    "--sync manual": ["--sync", "manual"],
}
BARE = "bare DDP on gloo"
LIMIT = "the limit: the same loop, no communication"
BARS = {"--sync ddp": 4.0, TWO: 4.0}  # times faster than bare DDP, on two processes
TRIED = "one meeting a step, longer spinning, less bookkeeping, files mapped into memory, a core for each rank"
MEGABYTES = 100
TRIES = 9


def steps_with(nproc: int) -> int:
    """How many are timed; the more processes, the slower they are."""
    return EPOCHS // nproc * STEPS_PER_EPOCH


def bare(way: str) -> None:
    """Time the loop of a tutorial on this rank, with DDP or without. Rank 0 prints its seconds."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from stepladder.recipes.mlp import Config, build, squared_error

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    job = build(Config())
    steps = steps_with(world_size)
    model, (x, y) = DistributedDataParallel(job.model) if way == BARE else job.model, job.train_data
    share = slice(BATCH * rank // world_size, BATCH * (rank + 1) // world_size)
    done = 0
    while done < WARM_UP + steps:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(done))
        for lo in range(0, len(x), BATCH):
            if done == WARM_UP:
                start = time.perf_counter()
            rows = order[lo : lo + BATCH][share]
            loss, count = squared_error(model, [x[rows], y[rows]])
            (loss / count).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            done += 1
    seconds = time.perf_counter() - start
    dist.barrier()  # else one has the machine for itself at the end
    if rank == 0:
        print(json.dumps({"seconds": seconds}))
    dist.destroy_process_group()


def of_bare(nproc: int, way: str) -> float:
    """Seconds per step."""
    command = [
        sys.executable,
        "-m",
        "stepladder",
        "run",
        "--nproc",
        str(nproc),
        "--exchange",
        "gloo",
        __file__,
        "--bare",
        way,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        sys.exit(done.stderr)
    line = next(line for line in done.stdout.splitlines() if "seconds" in line)
    return float(json.loads(line[line.index("{") :])["seconds"]) / steps_with(nproc)


def of_stepladder(nproc: int, flags: list[Any]) -> float:
    result, _ = result_of(
        "train", "mlp", "--epochs", EPOCHS // nproc, "--nproc", nproc, "--threads", 1, *flags
    )
    return float(result["seconds"]) / int(result["steps"])


def rank_work(folder: str) -> int:
    """Time an all-reduce on this rank, through shared memory and through gloo in turn."""
    import torch
    import torch.distributed as dist

    from stepladder import process_group
    from stepladder.train.sync.ddp import allocate_shared_zeros

    with process_group() as comm:
        numbers = allocate_shared_zeros(
            comm, MEGABYTES * 10**6 // 4, torch.float32
        )  # as a bucket of gradients
        exchanges: dict[str, Callable[[], Any]] = {
            "shared memory": lambda: comm.all_reduce(numbers).wait(),
            "gloo": lambda: dist.all_reduce(numbers),
        }
        seconds: dict[str, list[float]] = {name: [] for name in exchanges}
        for _ in range(TRIES + 1):  # the first one touches the memory
            for name, reduce in exchanges.items():
                comm.gather_bytes(b"x")
                start = time.perf_counter()
                reduce()
                seconds[name].append(time.perf_counter() - start)
        if comm.world.is_first:
            Path(folder, "seconds.json").write_text(
                json.dumps({name: s[1:] for name, s in seconds.items()})
            )
    return 0


def all_reduces(nproc: int) -> dict[str, list[float]]:
    """Seconds by way."""
    from stepladder.launcher.local.local_group import LocalGroup
    from stepladder.launcher.local.supervisor import run_local

    with tempfile.TemporaryDirectory() as folder:
        if code := run_local(LocalGroup(partial(rank_work, folder), threads=1), nproc):
            sys.exit(code)
        return dict(json.loads(Path(folder, "seconds.json").read_text()))


def steps_of(nproc: int, rounds: int) -> tuple[str, list[str]]:
    """The table for so many processes, and its bars."""
    exchanges: dict[str, Callable[[int], float]] = {
        name: partial(of_bare, way=name) for name in (BARE, LIMIT)
    }
    modes = MODES if nproc == 2 else {name: flags for name, flags in MODES.items() if name != TWO}
    exchanges |= {name: partial(of_stepladder, flags=flags) for name, flags in modes.items()}
    times: dict[str, list[float]] = {name: [] for name in exchanges}
    for number in range(rounds):
        for name in list(exchanges)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(1e6 * exchanges[name](nproc))
    gains = {
        name: [b / t for b, t in zip(times[BARE], times[name], strict=True)] for name in exchanges
    }
    rows = [
        [name, f"{median(times[name]):.0f}", f"{min(times[name]):.0f} to {max(times[name]):.0f}",
         f"{median(gains[name]):.2f}"]
        for name in exchanges
    ]  # fmt: skip
    bars = [
        bar(
            f"{nproc} processes, {name}: times faster than bare DDP",
            median(gains[name]),
            limit,
            False,
            TRIED,
        )
        for name, limit in BARS.items()
        if nproc == 2
    ]
    if bars:
        bars.append(f"- the same loop without any communication: {median(gains[LIMIT]):.2f}x")
    return table(["way", "us/step", "lowest to highest", "times faster than bare DDP"], rows), bars


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bare", choices=[BARE, LIMIT], help=argparse.SUPPRESS)
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    if args.bare:
        bare(args.bare)
        return
    report = Report(
        "exchange.py", "A step on several processes", ["torch", "stepladder"], cores_used="all"
    )
    sections = []
    bars = []
    rows = []
    for nproc in args.nproc:
        steps, all_met = steps_of(nproc, args.rounds)
        sections.append(f"## {nproc} processes\n\n{steps}")
        bars += all_met
        seconds = all_reduces(nproc)
        memory, gloo = (median(seconds[name]) for name in ("shared memory", "gloo"))
        rows.append(
            [str(nproc), f"{1e3 * memory:.1f}", f"{1e3 * gloo:.1f}", f"{gloo / memory:.2f}"]
        )
        if nproc == 2:
            bars.append(
                bar("all-reduce of 100 MB: gloo's time to ours", gloo / memory, 3.0, at_most=False)
            )
    head = ["processes", "ms, shared memory", "ms, gloo", "times faster"]
    sections.append(f"## An all-reduce of {MEGABYTES} MB\n\n{table(head, rows)}")
    text = f"Medians of {args.rounds} rounds of {steps_with(4)} steps or more, and of {TRIES} all-reduces each."
    report.finish([*sections, text, "\n".join(bars)], args.write)


if __name__ == "__main__":
    main()
