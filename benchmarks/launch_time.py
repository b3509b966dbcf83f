"""python benchmarks/launch_time.py [--write]

How much sooner than under torchrun does a script make its first optimizer step under `stepladder
run`? And its next one, after a process was killed?

The script is the same, and so are the flags: two processes on this machine, a small net in
DistributedDataParallel, gloo, SGD, `--max-restarts 1`. It writes the time of its first step, and
goes on until it is killed; then it writes the time of the first step after that. Clocks are
CLOCK_MONOTONIC, one for all processes of a machine. Every round starts all launchers, in an order
that turns round each time, and ratios are taken within a round.

torchrun's agent (torch 2.13) makes one store and keeps it over restarts
(`DynamicRendezvousHandler.next_rendezvous`). Ranks that are started again look for each other under
the same keys, so one that is a little ahead finds the address of the dead rank there: "Connection
refused", and the last restart is spent. Such restarts are counted, and have no time. torchrun is
therefore measured a second time with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, by which the ranks of
each start have a store of their own."""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
from report import Report, bar, table

TRIED = "one import of torch for all ranks, no tracer in a trainer's ranks, a thread that loads torch's libraries"
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder = sys.argv[1]
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
step = 0
while True:
    optimizer.zero_grad()
    model(torch.ones(32, 20)).mean().backward()
    optimizer.step()
    step += 1
    if step == 1:
        path = os.path.join(folder, f"{attempt}.{dist.get_rank()}")
        with open(path + ".tmp", "w") as file:
            file.write(f"{time.monotonic()} {os.getpid()}")
        os.rename(path + ".tmp", path)
        if attempt == "1":
            dist.barrier()
            time.sleep(0.2)
            os._exit(0)
    time.sleep(0.01)
"""
FLAGS = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", *FLAGS]
PLAIN = "torchrun"
OWN_STORE = "torchrun, a store for each start"
OURS = "stepladder run"
LAUNCHERS = {
    PLAIN: TORCHRUN,
    OWN_STORE: ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", *TORCHRUN],
    OURS: [sys.executable, "-m", "stepladder", "run", *FLAGS],
}
SECONDS_AT_MOST = 60
NEVER = math.nan  # the time of a step that was not made


def last_step(paths: list[Path], process: subprocess.Popen) -> tuple[float, list[int]] | None:
    """When the last of the ranks made its step, and their pids; None where the launcher ended
    before, or hung.
    """
    deadline = time.monotonic() + SECONDS_AT_MOST
    while not all(path.exists() for path in paths):
        if process.poll() is not None or time.monotonic() > deadline:
            return None
        time.sleep(0.005)
    reports = [path.read_text().split() for path in paths]
    return max(float(at) for at, _ in reports), [int(pid) for _, pid in reports]


def measure(launcher: list[str], script: Path) -> tuple[float, float]:
    """Seconds from the command to the last rank's first step, and from a kill to the next one, or
    NEVER.
    """
    folder = Path(tempfile.mkdtemp())
    start = time.monotonic()
    with (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [*launcher, str(script), str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
    try:
        first = last_step([folder / f"0.{rank}" for rank in (0, 1)], process)
        if first is None:
            raise SystemExit(f"{launcher} made no step:\n{(folder / 'stderr').read_text()}")
        time.sleep(1.0)  # the start is over on all processes
        killed = time.monotonic()
        os.kill(first[1][1], signal.SIGKILL)
        resumed = last_step([folder / f"1.{rank}" for rank in (0, 1)], process)
        if resumed is None:
            errors = [
                line for line in (folder / "stderr").read_text().splitlines() if "Error: " in line
            ]
            print(f"{launcher} made no step after the kill: {errors[-1:]}", file=sys.stderr)
        else:
            process.wait(SECONDS_AT_MOST)
    finally:
        family = (
            psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        )
        for member in (process, *family):  # torchrun's ranks would outlive it
            with suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    return first[0] - start, resumed[0] - killed if resumed else NEVER


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error("at least one round is needed")
    report = Report(
        "launch_time.py",
        "Time to the first step, and to the next after a kill",
        ["torch", "stepladder"],
        "all",
    )
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in LAUNCHERS}
    imports: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "script.py"
        script.write_text(SCRIPT)
        for launcher in LAUNCHERS.values():  # warm-up: files in the page cache, compiled modules
            measure(launcher, script)
        for number in range(args.rounds):
            for name in list(LAUNCHERS)[:: 1 if number % 2 == 0 else -1]:
                seconds[name].append(measure(LAUNCHERS[name], script))
            start = time.monotonic()
            subprocess.run([sys.executable, "-c", "import torch, torch.distributed"], check=True)
            imports.append(time.monotonic() - start)
    report.finish(
        [
            table(
                ["", *LAUNCHERS, *(f"ratio to {name}" for name in (PLAIN, OWN_STORE))],
                rows(seconds),
            ),
            f"Seconds, medians of {args.rounds} interleaved rounds; ratios are medians (and extremes) of ratios "
            "within a round. A time ends when the last of the two ranks has made its step.",
            "Restarts that made a step: "
            + "; ".join(came_back(name, seconds[name]) for name in LAUNCHERS)
            + f". A launcher that ended first, or took more than {SECONDS_AT_MOST} s, has no time.",
            "\n".join(bars(seconds, imports)),
        ],
        args.write,
    )


def came_back(name: str, times: list[tuple[float, float]]) -> str:
    return f"{name} {sum(not math.isnan(resumed) for _, resumed in times)} of {len(times)}"


def ratios(seconds: dict[str, list[tuple[float, float]]], name: str, column: int) -> list[float]:
    """Ours to that launcher's, within each round where both made the step."""
    pairs = zip(seconds[OURS], seconds[name], strict=True)
    return [
        ours[column] / theirs[column]
        for ours, theirs in pairs
        if not math.isnan(ours[column] + theirs[column])
    ]


def rows(seconds: dict[str, list[tuple[float, float]]]) -> list[list[str]]:
    shown = []
    for column, label in enumerate(("command to first step", "kill -9 of a rank to next step")):
        made = [
            [pair[column] for pair in pairs if not math.isnan(pair[column])]
            for pairs in seconds.values()
        ]
        middle = [f"{median(times):.2f}" if times else "never" for times in made]
        pairs = [ratios(seconds, name, column) for name in (PLAIN, OWN_STORE)]
        shown.append([label, *middle, *(spread(values) for values in pairs)])
    return shown


def spread(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "none"


def bars(seconds: dict[str, list[tuple[float, float]]], imports: list[float]) -> list[str]:
    """A bar holds against both of torchrun's ways; where one never came back, it cannot be missed
    there.

    imports: seconds of an interpreter that imports torch, in each round.
    """
    lines = []
    for column, (label, limit) in enumerate(
        (("first step", 0.45), ("next step after a kill", 0.8))
    ):
        for name in (PLAIN, OWN_STORE):
            if values := ratios(seconds, name, column):
                lines.append(bar(f"{label}, against {name}", median(values), limit, True, TRIED))
            if not column:
                lowest = median(
                    import_s / first
                    for import_s, (first, _) in zip(imports, seconds[name], strict=True)
                )
                lines.append(
                    f"- one interpreter that imports torch, and does nothing else: {lowest:.2f}x"
                )
    return lines


if __name__ == "__main__":
    main()
