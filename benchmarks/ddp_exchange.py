"""python benchmarks/ddp_exchange.py [--starts N] [--mnist DIR] [--shakespeare DIR] [--short] [--write]

What do unmodified scripts gain from shared memory, beside gloo?

Each figure is of fresh processes, started by `stepladder run`, with and without `--exchange gloo`
in turn, one thread a process. First a step of DistributedDataParallel on an MLP 20-64-1, a small
conv net and a small character GPT, and a step of FSDP2 on that GPT. On two processes there are ten
starts, each alone and with a neighbour that keeps one core busy for a third of the time; beside
them the trainer's `--sync ddp` and `--sync exact`. Then each collective from 8 bytes to 100 MB. Last,
where there are data, a net for MNIST and a character GPT under plain DDP with a DataLoader, from the
command to its end. Ratios are taken within a round."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

from report import Report, bar, table

from exchange import MODES, TWO, of_stepladder

SCRIPT = Path(__file__).parent / "ddp_exchange_rank.py"
TRAININGS = Path(__file__).parent / "ddp_exchange_scripts.py"
MEMORY = "shared memory"
GLOO = "gloo"
FLAGS: dict[str, list[str]] = {MEMORY: [], GLOO: ["--exchange", "gloo"]}
ALONE = "alone"
BUSY = "busy neighbour"
NEIGHBOUR = """
import time
while True:
    end = time.perf_counter() + 0.01
    while time.perf_counter() < end:
        pass
    time.sleep(0.02)
"""
MLP = "MLP 20-64-1"
CONV = "small conv net"
DDP = "--sync ddp"
LEAST_GAIN = 0.95  # of any collective and size
MOST_IDLE = 0.05  # of a core
STEPS_HEADER = [
    "processes, neighbour, case",
    "us/step on gloo (median)",
    "in shared memory (median)",
    "(most)",
    "times faster (median)",
    "(least)",
]
TRAININGS_HEADER = [
    "processes, training",
    "seconds of the command on gloo (median)",
    "in shared memory (median)",
    "times faster (median)",
    "(least)",
    "of its steps alone",
    "last losses",
]
CALLS_HEADER = ["collective", "bytes", "us on gloo", "us", "GB/s on gloo", "GB/s", "times faster"]
STARTS_NOTE = "Three and more processes are started a fifth as often as `--starts` says."
# Median and least of how much faster the steps of two processes have to be than on gloo.
STEP_BARS = {
    (MLP, ALONE): (3.5, 3.0),
    (CONV, ALONE): (1.5, None),
    (DDP, ALONE): (4.0, 3.5),
    (TWO, ALONE): (4.0, 3.5),
    (DDP, BUSY): (3.0, None),
    (TWO, BUSY): (3.0, None),
}

TRIED = """\
A slow start is one beside another program: each rank has half a core then. What was tried against it is in [the log](../../docs/log.md), under *The slowest of ten starts*.
On another machine of two cores, over 800 steps, it was 4.65x for the MLP (worst start 2.78x), 6.00x for `--sync ddp` (4.72x) and 5.75x for `--sync exact` (4.27x)."""

# What was measured in each start, by the way.
Starts = dict[str, list[float]]


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """Keep one core busy for a third of the time."""
    with subprocess.Popen([sys.executable, "-c", NEIGHBOUR]) as process:
        try:
            yield
        finally:
            process.kill()


def run_script(way: str, nproc: int, script: Path, *arguments: object) -> dict[str, float]:
    """Start the ranks of a script; return what the first one has measured."""
    command = [sys.executable, "-m", "stepladder", "run", "--nproc", str(nproc), *FLAGS[way]]
    command += [str(script), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    lines = [line for line in done.stdout.splitlines() if "{" in line]
    if done.returncode or not lines:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(lines[-1][lines[-1].index("{") :])
    return found


def run_both(nproc: int, what: str, number: int, is_short: bool) -> dict[str, dict[str, float]]:
    """Run the script both ways."""
    flags = ["--short"] if is_short else []
    return {way: run_script(way, nproc, SCRIPT, what, *flags) for way in ways_of(number)}


def ways_of(number: int) -> list[str]:
    """Return both ways, the other one first in every second round."""
    return list(FLAGS)[:: 1 if number % 2 else -1]


def measure_steps(nproc: int, starts: int, neighbour: str, is_short: bool) -> dict[str, Starts]:
    """Return the microseconds of a step in each start, by the model."""
    times: dict[str, Starts] = {}
    for number in range(starts):
        with busy_neighbour() if neighbour == BUSY else nullcontext():
            found = run_both(nproc, "steps", number, is_short)
            trainer = trainer_steps() if nproc == 2 else {}
        for mode, value in trainer.items():
            found[MEMORY][mode] = value
            found[GLOO][mode] = found[GLOO][MLP]  # it trains the same model on the same batches
        for way, values in found.items():
            for case, value in values.items():
                times.setdefault(case, {MEMORY: [], GLOO: []})[way].append(value)
    return times


def trainer_steps() -> dict[str, float]:
    """Return microseconds a step of `stepladder train mlp --nproc 2`, by the mode."""
    return {mode: 1e6 * of_stepladder(2, MODES[mode]) for mode in (DDP, TWO)}


def gains_of(starts: Starts) -> list[float]:
    """Return how much faster each start was than the one on gloo in its round."""
    return [gloo / memory for gloo, memory in zip(starts[GLOO], starts[MEMORY], strict=True)]


def step_row(name: str, starts: Starts) -> list[str]:
    """Return a row of the table of steps."""
    gains = gains_of(starts)
    memory = starts[MEMORY]
    numbers = [
        *(f"{value:.0f}" for value in (median(starts[GLOO]), median(memory), max(memory))),
        *(f"{value:.2f}" for value in (median(gains), min(gains))),
    ]
    return [name, *numbers]


def step_bars(neighbour: str, times: dict[str, Starts]) -> list[str]:
    """Return the lines that say whether steps of two processes meet their bars."""
    lines = []
    for (case, where), (limit, least) in STEP_BARS.items():
        if where != neighbour:
            continue
        gains = gains_of(times[case])
        name = f"{case}, {where}: gloo's time to ours"
        lines.append(bar(f"{name}, median of {len(gains)} starts", median(gains), limit, False))
        if least is not None:
            lines.append(bar(f"{name}, worst start", min(gains), least, False))
    return lines


def measure_calls(nproc: int, starts: int, is_short: bool) -> dict[str, Starts]:
    """Return the microseconds of a call in each start, by the collective and its bytes."""
    times: dict[str, Starts] = {}
    for number in range(starts):
        for way, values in run_both(nproc, "collectives", number, is_short).items():
            for case, value in values.items():
                times.setdefault(case, {MEMORY: [], GLOO: []})[way].append(value)
    return times


def call_rows(times: dict[str, Starts]) -> list[list[str]]:
    """Return the rows of the table of collectives."""
    rows = []
    for case, starts in times.items():
        name, size = case.split()
        gloo = median(starts[GLOO])
        memory = median(starts[MEMORY])
        speeds = [
            f"{int(size) / time / 1e3:.2f}" if int(size) >= 1e6 else "" for time in (gloo, memory)
        ]
        rows.append(
            [
                name,
                f"{int(size):,}",
                f"{gloo:.0f}",
                f"{memory:.0f}",
                *speeds,
                f"{gloo / memory:.2f}",
            ]
        )
    return rows


def call_bars(nproc: int, times: dict[str, Starts], idle: Starts) -> list[str]:
    """Return the lines that say whether the collectives of some processes meet their bars."""
    gains = {case: median(starts[GLOO]) / median(starts[MEMORY]) for case, starts in times.items()}
    slowest = min(gains, key=gains.__getitem__)
    lines = [
        bar(
            f"{nproc} processes, the least gain of any collective and size ({slowest} bytes)",
            gains[slowest],
            LEAST_GAIN,
            False,
        )
    ]
    if gain := gains.get("all_reduce 100000000"):
        lines.append(bar(f"{nproc} processes, all_reduce of 100 MB", gain, 3.0, False))
    share = max(idle[MEMORY])
    met = "PASS" if share < MOST_IDLE else "FAIL"
    lines.append(
        f"- {met}: {nproc} processes, a rank that waits: {share:.1%} of a core (bar: < 5 %)"
    )
    return lines


def measure_training(nproc: int, name: str, folder: Path, starts: int, is_short: bool) -> list[str]:
    """Return a row of the table of whole trainings."""
    found: dict[str, dict[str, list[float]]] = {way: {} for way in FLAGS}
    steps = 20 if is_short else 400
    for number in range(starts):
        for way in ways_of(number):
            began = time.perf_counter()
            values = run_script(way, nproc, TRAININGS, name, folder, "--steps", steps)
            values["command"] = time.perf_counter() - began
            for key, value in values.items():
                found[way].setdefault(key, []).append(value)
    gains = gains_of({way: found[way]["command"] for way in FLAGS})
    steps_gains = gains_of({way: found[way]["seconds"] for way in FLAGS})
    losses = [found[way]["loss"][0] for way in FLAGS]
    return [
        f"{nproc}, {name}, {steps} steps",
        *(f"{median(found[way]['command']):.1f}" for way in (GLOO, MEMORY)),
        *(f"{value:.2f}" for value in (median(gains), min(gains), median(steps_gains))),
        "the same bits" if losses[0] == losses[1] else " and ".join(map(repr, losses)),
    ]


def measure_trainings(
    starts: int, sizes: list[int], folders: dict[str, Path | None], is_short: bool
) -> list[str]:
    """Return the section of the whole trainings; none without data."""
    rows = [
        measure_training(nproc, name, folder, starts, is_short)
        for nproc in sizes
        for name, folder in folders.items()
        if folder is not None
    ]
    return [f"## Whole trainings\n\n{table(TRAININGS_HEADER, rows)}"] if rows else []


def measure(starts: int, sizes: list[int], is_short: bool) -> list[str]:
    """Measure everything; return the sections of the report."""
    rows = []
    bars = []
    sections = []
    for nproc in sizes:
        for neighbour in (ALONE, BUSY) if nproc == 2 else (ALONE,):
            count = starts if nproc == 2 else -(-starts // 5)
            times = measure_steps(nproc, count, neighbour, is_short)
            rows += [step_row(f"{nproc}, {neighbour}, {case}", times[case]) for case in times]
            bars += step_bars(neighbour, times) if nproc == 2 else []
    for nproc in sizes:
        calls = measure_calls(nproc, 2 if nproc == 2 and not is_short else 1, is_short)
        idle = calls.pop("idle")
        bars += call_bars(nproc, calls, idle)
        sections.append(
            f"## Collectives of {nproc} processes\n\n{table(CALLS_HEADER, call_rows(calls))}"
        )
    steps = f"## Steps\n\n{STARTS_NOTE}\n\n{table(STEPS_HEADER, rows)}"
    return [steps, *sections, "\n".join(bars)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--starts", type=int, default=10, help="with two processes; a fifth with more"
    )
    parser.add_argument("--nproc", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument(
        "--mnist", type=Path, help="the folder of MNIST; without it, it is left out"
    )
    parser.add_argument("--shakespeare", type=Path, help="the folder of the text input.txt")
    parser.add_argument("--short", action="store_true", help="one start, few steps, up to 1 MB")
    parser.add_argument("--write", action="store_true", help="save the report")
    args = parser.parse_args()
    report = Report(
        "ddp_exchange.py", "Unmodified scripts in shared memory", ["torch", "stepladder"], "all"
    )
    starts = 1 if args.short else args.starts
    *sections, bars = measure(starts, args.nproc, args.short)
    folders = {"mnist": args.mnist, "gpt": args.shakespeare}
    trainings = measure_trainings(min(starts, 3), args.nproc, folders, args.short)
    report.finish([*sections, *trainings, bars, TRIED], args.write)


if __name__ == "__main__":
    main()
