"""python benchmarks/bookkeeping.py [--write]

What do audit, report, watch, submit and resume need on the run directory of a large run?

Two runs, made by the product's own writers around the first step of a real training: many ranks,
and many steps of one rank. Every command runs in a process that may have 64 open files; its memory
is what the kernel says. A day of timing.jsonl follows from the length of its lines, of which there
is one a second. Resume is torch's memory too, so a row says what torch needs for one step of SGD
without us."""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import Report, table

from stepladder.core.plan import Plan, split_evenly
from stepladder.rank.timing import make_timing_line
from stepladder.storage.ledger import Ledger, LedgerHeader, join_chains
from stepladder.storage.ledger_plan import iterate_indices
from stepladder.storage.run_files import (
    CONFIG_FILE,
    LEDGER_FOLDER,
    MANIFEST_FILE,
    METRICS_FILE,
    SNAPSHOTS_FOLDER,
    TIMING_FILE,
)
from stepladder.storage.snapshot import MODEL_FILE, STATE_FILE, _seal_manifest, read_snapshot

OPEN_FILES = 64
MEGABYTES = 300
GIGABYTE = 10**9
SECONDS = {"audit": 60.0, "report": 10.0, "watch": 10.0, "submit": 10.0, "resume": 10.0}
SMALL = f"""import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({OPEN_FILES}, {OPEN_FILES}))
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss, flush=True)
sys.exit(code)"""
TORCH_ALONE = """import torch
model = torch.nn.Linear(20, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(64, 20)).sum().backward()
optimizer.step()"""
PER_EPOCH = 250  # steps
AT_ONCE = 1000  # steps that are flushed together


@dataclass(frozen=True)
class Size:
    """flags: of the training. each: steps of a line of timing.jsonl."""

    ranks: int
    steps: int
    each: int

    @property
    def flags(self) -> list[str]:
        batch = self.ranks if self.ranks > 1 else 64
        microbatch = 1 if self.ranks > 1 else 8
        epochs = -(-(self.steps + 1) // PER_EPOCH)
        return [
            "mlp", "--samples", str(batch * PER_EPOCH), "--global-batch", str(batch),
            "--microbatch", str(microbatch), "--epochs", str(epochs), "--threads", "1",
        ]  # fmt: skip


def python(*args: str) -> tuple[float, float, float]:
    """Seconds of Python with these arguments, those of computing, and the most megabytes a process
    of it had.

    Started by a small process: one that this one starts itself would be counted with this one's
    memory."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-S", "-c", SMALL, sys.executable, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"python {' '.join(args)} ended with {done.returncode}\n{done.stdout}")
    computed, kilobytes = map(float, done.stdout.splitlines()[-1].split())
    return time.perf_counter() - started, computed, kilobytes * 1024 / 1e6


def stepladder(*args: str) -> tuple[float, float, float]:
    return python("-m", "stepladder", *args)


def make(run_dir: Path, size: Size) -> None:
    """A run that was stopped after `size.steps` steps, as if it had made them; its first step is
    real.
    """
    stepladder("train", *size.flags, "--steps", "1", "--run-dir", str(run_dir))
    plan = Plan.from_json(json.loads((run_dir / CONFIG_FILE).read_text())["plan"])
    (run_dir / "result.json").unlink()
    for name in (LEDGER_FOLDER, "tensorboard"):
        shutil.rmtree(run_dir / name)
    chains = [make_ledger(run_dir, plan, size, rank) for rank in range(size.ranks)]
    first = read_snapshot(run_dir / SNAPSHOTS_FOLDER / "step_00000001")
    folder = run_dir / SNAPSHOTS_FOLDER / f"step_{size.steps:08d}"
    folder.mkdir()
    for name in (MODEL_FILE, STATE_FILE):
        (folder / name).write_bytes(first.files[name])
    (folder / MANIFEST_FILE).write_bytes(
        _seal_manifest(first.manifest | {"step": size.steps, "ledger": join_chains(chains)})
    )
    shutil.rmtree(run_dir / SNAPSHOTS_FOLDER / first.name)
    make_lines(run_dir, plan, size)


def make_ledger(run_dir: Path, plan: Plan, size: Size, rank: int) -> str:
    ledger = Ledger(run_dir, LedgerHeader(1, rank, size.ranks, 0, ""))
    lo, hi = split_evenly(plan.num_microbatches, rank, size.ranks)
    lo, hi = lo * plan.microbatch, hi * plan.microbatch  # of every step, for all are whole
    for begin in range(0, size.steps, AT_ONCE):
        end = min(size.steps, begin + AT_ONCE)
        rows = np.concatenate(list(iterate_indices(plan, begin, end))).reshape(
            -1, plan.global_batch
        )
        for step in range(begin, end):
            ledger.record_step(step + 1, plan.epoch_of_step(step), [rows[step - begin, lo:hi]])
        ledger.flush()
    ledger.close()
    return ledger.chain


def make_lines(run_dir: Path, plan: Plan, size: Size) -> None:
    random = np.random.default_rng(0)
    with (run_dir / METRICS_FILE).open("w") as metrics, (run_dir / TIMING_FILE).open("w") as timing:
        for step in range(1, size.steps + 1):
            epoch = plan.epoch_of_step(step - 1)
            metrics.write(
                f'{{"step": {step}, "epoch": {epoch}, "loss": {1 / step!r}, "lr": 0.2}}\n'
            )
            if step % PER_EPOCH == 0:
                line = {"step": step, "epoch": epoch, "train_loss": 1 / step, "test_mse": 2 / step}
                metrics.write(f"{json.dumps(line)}\n")
            if step % size.each == 0:
                seconds = random.gamma(100.0, 0.001, (size.ranks, 5))
                timing.write(f"{json.dumps(make_timing_line(step, size.each, seconds))}\n")


def measure(size: Size, folder: Path) -> tuple[list[list[str]], list[str]]:
    """Rows of the table, and what each was to hold."""
    run_dir = folder / f"{size.ranks}x{size.steps}"
    make(run_dir, size)
    where = str(run_dir)
    commands = {
        "audit": ["audit", where],
        "report": ["report", where, "-o", str(folder / "report.html")],
        "watch": ["watch", where, "--once"],
        "submit": ["submit", "--dry-run", "--", "train", *size.flags, "--run-dir", where],
        "resume": ["train", *size.flags, "--steps", str(size.steps + 1), "--run-dir", where],
    }
    name = f"{size.ranks:,} x {size.steps:,}"
    rows = []
    bars = []
    for command, args in commands.items():
        seconds, computed, megabytes = stepladder(*args)
        rows.append([name, command, f"{seconds:.1f}", f"{computed:.1f}", f"{megabytes:.0f}"])
        verdict = "PASS" if seconds < SECONDS[command] and megabytes < MEGABYTES else "FAIL"
        bars.append(
            f"- {verdict}: {name}, {command}: less than {SECONDS[command]:.0f} s and {MEGABYTES} MB"
        )
    line = (run_dir / TIMING_FILE).read_text().splitlines()[-2]
    day = 24 * 3600 * (len(line) + 1)
    verdict = "PASS" if day < GIGABYTE else "FAIL"
    bars.append(
        f"- {verdict}: {name}, a day of timing.jsonl: {day / 1e6:.0f} MB (bar: less than 1,000 MB)"
    )
    shutil.rmtree(run_dir)
    return rows, bars


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=1000, help="of the run on many ranks")
    parser.add_argument("--long", type=int, default=1_000_000, help="steps of the run on one")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    report = Report(
        "bookkeeping.py", "Run directories of large runs", ["torch", "numpy", "stepladder"], "all"
    )
    rows = []
    bars = []
    with tempfile.TemporaryDirectory(prefix="bookkeeping-") as folder:
        for size in (Size(args.ranks, args.steps, 1), Size(1, args.long, 10)):
            more_rows, more_bars = measure(size, Path(folder))
            rows += more_rows
            bars += more_bars
    seconds, computed, torch_alone = python("-c", TORCH_ALONE)
    rows.append(
        ["none", "torch alone, one step", f"{seconds:.1f}", f"{computed:.1f}", f"{torch_alone:.0f}"]
    )
    text = (
        f"Each command may have {OPEN_FILES} open files. Memory is the most that a process of it had. torch alone"
        f" takes {torch_alone:.0f} MB for one step, with torch.compile's tracer; a job that compiles nothing is"
        " spared that."
    )
    head = ["ranks x steps", "command", "seconds", "of computing", "MB"]
    report.finish([table(head, rows), text, "\n".join(bars)], args.write)


if __name__ == "__main__":
    main()
