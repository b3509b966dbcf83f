"""Traces for tests: by the real profiler on real ranks, and by hand in its format."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from stepladder.tools.profiler.advice import Profile
from stepladder.tools.profiler.breakdown import PARTS, Operator, RankProfile
from stepladder.tools.profiler.trace import Trace

# seconds: far more than another process may keep a rank from its core
SLEEP = 0.25
STEPS = 2


def train_under_the_profiler(comm: Any, folder: Path) -> None:
    """Two recorded steps with everything that a script leaves in a trace; rank 1 reads slowly."""
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from stepladder.tools.profiler.capture import Capture

    class Slow(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            if comm.world.rank == 1:
                time.sleep(SLEEP)
            return torch.ones(300)

    layers = torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 1)
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    capture = Capture(folder, comm.world.rank, warmup=1, steps=STEPS)
    for x in DataLoader(Slow(), batch_size=2):
        capture.before_step()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        if capture.after_step():
            break


def event(
    name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "pid": 7,
        "tid": tid,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def note(name: str, begin: float, end: float, tid: int = 1) -> dict[str, Any]:
    return event(name, begin, end, "user_annotation", tid)


def arrow(begin: float) -> dict[str, Any]:
    return {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "id": 1, "pid": 7, "tid": 1, "ts": begin}


def trace(
    folder: Path, *events: dict[str, Any], rank: int = 0, host: str = "here", base: int = 0
) -> Trace:
    """A trace of one step from 0 to 100 microseconds, with these events in it."""
    content = {
        "traceEvents": [note("ProfilerStep#1", 0, 100), *events], "baseTimeNanoseconds": base, "host_name": host,
        "stepladder": describe_rank(rank),
    }  # fmt: skip
    return write_trace(folder, rank, content)


def describe_rank(rank: int, queued_s: list[float] | None = None) -> dict[str, Any]:
    return {
        "rank": rank,
        "peak_bytes": 1000,
        "peak_gpu_bytes": None,
        "cores": 2,
        "threads": 1,
        "queued_s": queued_s,
    }


def trace_of_steps(
    folder: Path,
    rank: int,
    enters: list[float],
    ends: list[float],
    queued_s: list[float] | None = None,
) -> Trace:
    """A trace of steps of which each has one collective, entered and ended so many us after its
    begin, and 20 us of optimizer after that.
    """
    events: list[dict[str, Any]] = []
    begin = 0.0
    for number, (entered, ended) in enumerate(zip(enters, ends, strict=True), start=1):
        parts = {"forward": (0, entered / 2), "backward": (entered / 2, entered)}
        parts["optimizer"] = (ended, ended + 20)
        events += [
            note(f"ProfilerStep#{number}", begin, begin + ended + 20),
            note("gloo:all_reduce", begin + entered, begin + ended, tid=2),
            *(note(f"stepladder:{p}", begin + lo, begin + hi) for p, (lo, hi) in parts.items()),
        ]
        begin += ended + 20
    content = {
        "traceEvents": events, "baseTimeNanoseconds": 0, "host_name": "here",
        "stepladder": describe_rank(rank, queued_s),
    }  # fmt: skip
    return write_trace(folder, rank, content)


def write_trace(folder: Path, rank: int, content: dict[str, Any]) -> Trace:
    path = folder / f"rank-{rank}.pt.trace.json"
    path.write_text(json.dumps(content))
    return Trace(path)


def rank_profile(
    rank: int = 0,
    *,
    python: float = 0.0,
    on_gpu: bool = False,
    early: bool = False,
    overlapped: float = 0.0,
    held_up: float = 0.0,
    **parts: float,
) -> RankProfile:
    """A step of a second, of these parts; the rest of it is forward."""
    seconds = {name: parts.get(name, 0.0) for name in PARTS}
    seconds["forward"] += 1 - sum(seconds.values())
    return RankProfile(
        rank=rank,
        host="here",
        steps=3,
        seconds=1.0,
        parts=dict(seconds),
        overlapped=overlapped,
        python=python,
        held_up=held_up,
        early=early,
        on_gpu=on_gpu,
        peak_bytes=1000,
        peak_gpu_bytes=None,
    )


def profile(*ranks: RankProfile, **operators: float) -> Profile:
    """operators: seconds per step, by name; __ stands for ::."""
    lines = [
        Operator(name.replace("__", "::"), seconds, 1.0) for name, seconds in operators.items()
    ]
    return Profile(ranks or (rank_profile(),), lines)
