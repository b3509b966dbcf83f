"""python benchmarks/exchange_kills.py [--kills N] [--seed N] [--write]

Does every other rank learn that a rank was killed, and which one, whatever it exchanges just then?

Three ranks exchange tensors through shared memory in a loop: collectives of random kinds and sizes,
the same on all ranks. At a random moment one rank gets SIGKILL. Each of the others then has to
raise an exception that names the lost rank, to raise it again in the next call, and to leave
nothing: no thread, no memory, no process, no file in /dev/shm."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from report import Report, table

RANKS = 3
SIZES = (1, 1000, 100_000, 2_000_000)  # numbers of 4 bytes; the last takes several exchanges
WARM_UP = 10  # collectives before the moment may come
LONGEST_RUN_S = 0.3
TIME_TO_END_S = 60.0
BAR_S = 0.05
HOST_MEMORY = "/dev/shm/"  # other processes of the machine have files there too
OWN_MEMORY = "memfd:stepladder"


@dataclass(frozen=True)
class Survivor:
    """What a rank that was not killed tells. kind: the collective that failed, or was called first
    after the kill.  at: when, by the machine's clock of time.monotonic.  left: what it had left
    after the end of its process group.
    """

    kind: str
    at: float
    message: str
    next_message: str
    left: list[str]


@dataclass(frozen=True)
class Kill:
    """One kill. seconds: from the signal to the exception of each other rank.  faults: what should
    not have been.
    """

    kinds: list[str]
    seconds: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def collectives(size: int) -> dict[str, Callable[[], object]]:
    """Each kind of collective by its name, on tensors of about `size` numbers."""
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    own = torch.ones(size)
    wide = torch.ones(RANKS * size)
    parts = list(wide.split(size))
    at_root = lambda tensors: tensors if rank == 1 else None  # noqa: E731

    def overlapped() -> None:
        works = [dist.all_reduce(part, async_op=True) for part in parts]
        for work in reversed(works):
            work.wait()

    def messages() -> None:
        for source in range(1, RANKS):
            if rank == source:
                dist.send(own, 0)
            elif rank == 0:
                dist.recv(own, source)

    return {
        "all_reduce": lambda: dist.all_reduce(own),
        "all_reduce, three at once": overlapped,
        "broadcast": lambda: dist.broadcast(own, 1),
        "all_gather": lambda: dist.all_gather(parts, own),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(wide, own),
        "all_gather_object": lambda: dist.all_gather_object([None] * RANKS, "word" * 100),
        "reduce": lambda: dist.reduce(own, 1),
        "gather": lambda: dist.gather(own, at_root(parts), 1),
        "scatter": lambda: dist.scatter(own, at_root(parts), 1),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(own, wide),
        "all_to_all_single": lambda: dist.all_to_all_single(wide, wide.clone()),
        "barrier": dist.barrier,
        "send and recv": messages,
        # gloo carries this one
        "all_reduce, sparse": lambda: dist.all_reduce(own[:1000].to_sparse()),
    }


def exchange_until_killed(rank: int, store: str, seed: int, parent: Connection) -> None:
    """Be one rank: exchange until a rank is gone, then tell the parent about it."""
    import torch
    import torch.distributed as dist

    import stepladder_exchange

    assert stepladder_exchange  # registers the back end
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names beside the old ones
    torch.set_num_threads(1)
    dist.init_process_group(
        "stepladder", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    kinds = {size: collectives(size) for size in SIZES}
    draw = random.Random(seed)
    kind = ""
    message = ""
    for number in range(10**9):
        if number == WARM_UP:
            parent.send(None)
        size = draw.choice(SIZES)
        kind = draw.choice(list(kinds[1]))
        try:
            kinds[size][kind]()
        except Exception as error:
            message = str(error)
            break
    at = time.monotonic()
    next_message = ""
    try:
        dist.barrier()
    except Exception as error:
        next_message = str(error)
    del kinds
    parent.send(Survivor(kind, at, message, next_message, left_after_end()))


def left_after_end() -> list[str]:
    """End this rank's process group; return the threads and the memory that it leaves."""
    import torch.distributed as dist

    used = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # a thread may close one at any time
            used.append(str(path.readlink()))
    left = [f"a file {name}" for name in used if HOST_MEMORY in name]  # which would stay
    dist.destroy_process_group()
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    for thread in others:
        thread.join(TIME_TO_END_S)
    left += [f"thread {thread.name}" for thread in others if thread.is_alive()]
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    return [*left, *(["the memory"] if OWN_MEMORY in mapped else [])]


def kill_one(context: Any, seed: int, root: Path) -> Kill:
    """Kill one of three ranks at a random moment, and examine the others."""
    draw = random.Random(seed)
    pipes = []
    processes = []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        words = rank, str(root / f"store-{seed}"), seed, theirs
        process = context.Process(target=exchange_until_killed, args=words)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.recv()
        time.sleep(draw.uniform(0, LONGEST_RUN_S))  # the random moment
        victim = draw.randrange(RANKS)
        at = time.monotonic()
        processes[victim].kill()
        others = [rank for rank in range(RANKS) if rank != victim]
        told = {rank: received(pipes[rank]) for rank in others}
        for process in processes:
            process.join(TIME_TO_END_S)
        ended = {rank: processes[rank].exitcode for rank in others}
    finally:
        for process in processes:
            process.kill()
            process.join()
    faults = []
    for rank, survivor in told.items():
        faults += [f"rank {rank}: {fault}" for fault in faults_of(survivor, victim)]
        if ended[rank] != 0:
            faults.append(f"rank {rank}: ended with {ended[rank]}")
    heard = [survivor for survivor in told.values() if survivor is not None]
    return Kill([one.kind for one in heard], [one.at - at for one in heard], faults)


def received(pipe: Connection) -> Survivor | None:
    """What a rank tells after the kill; None if it tells nothing."""
    try:
        return pipe.recv() if pipe.poll(TIME_TO_END_S) else None
    except EOFError:
        return None


def faults_of(survivor: Survivor | None, victim: int) -> list[str]:
    """What is wrong with a rank after another was killed."""
    if survivor is None:
        return ["no exception"]
    faults = [f"left {thing}" for thing in survivor.left]
    for message in (survivor.message, survivor.next_message):
        if f"rank {victim} has gone" not in message:
            faults.append(f"{survivor.kind} does not name rank {victim}: {message or 'nothing'}")
    return faults


def kill_often(kills: int, seed: int) -> list[Kill]:
    """Kill a rank of three so often, each time of new ones."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        return [kill_one(context, seed + number, root) for number in range(kills)]


def verdict(what: str, count: int, total: int) -> str:
    """A line that says whether it held each time."""
    return f"- {'PASS' if count == total else 'FAIL'}: {what}: {count} of {total}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first kill; the next has one more"
    )
    parser.add_argument("--write", action="store_true", help="save the report")
    args = parser.parse_args()
    report = Report(
        "exchange_kills.py", "A killed rank, and the others", ["torch", "stepladder"], "all"
    )
    kills = kill_often(args.kills, args.seed)
    seconds = [one for kill in kills for one in kill.seconds]
    sound = sum(not kill.faults for kill in kills)
    counts = {
        kind: sum(kind in kill.kinds for kill in kills) for kill in kills for kind in kill.kinds
    }
    rows = [[kind, str(counts[kind])] for kind in sorted(counts)]
    times = [
        f"Milliseconds from the kill to an exception, of {len(seconds)} ranks: median"
        f" {1000 * median(seconds):.1f}, most {1000 * max(seconds):.1f}."
    ]
    bars = [
        verdict("killed, all others name the rank and leave nothing", sound, len(kills)),
        verdict(
            "exceptions within 50 ms of the kill",
            sum(one <= BAR_S for one in seconds),
            len(seconds),
        ),
        *(
            f"- seed {args.seed + number}: {'; '.join(kill.faults)}"
            for number, kill in enumerate(kills)
            if kill.faults
        ),
    ]
    report.finish([table(["in which call", "kills"], rows), *times, "\n".join(bars)], args.write)
    return sound != len(kills)


if __name__ == "__main__":
    raise SystemExit(main())
