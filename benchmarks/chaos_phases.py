"""python benchmarks/chaos_phases.py [--rounds N] [--write]

Does a run go on as if unbroken, wherever in a step its ranks are killed, on 2 to 5 processes?

The job is tests/jobs/killed.py in exact mode, twenty steps: a rank kills itself with SIGKILL in the
named phase of one of them. Then a rank is stopped and continued, and, as root, a disk is full: a
tmpfs, which is enlarged before the same command is typed again."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from chaos_in_place import EPOCHS
from chaos_runs import Command, examine, started, unbroken, verdict
from report import Report, table

from stepladder.storage.audit import audit

JOB = Path(__file__).parents[1] / "tests" / "jobs" / "killed.py"
FLAGS = (
    "--sync",
    "exact",
    "--microbatch",
    "4",
    "--global-batch",
    "32",
    "--epochs",
    "3",
    "--steps",
    "20",
    "--snapshot-every",
    "6",
    "--run-dir",
    "run",
)
SIZES = [2, 3, 4, 5]
# ranks; the first one owns the run directory, and serves the store at which all meet
ANY = "any"
FIRST = "first"
PHASES = {  # whom it kills, where, in which step
    "reading": (ANY, "reading", 7),
    "forward": (ANY, "forward", 7),
    "backward": (ANY, "backward", 7),
    "its share is in the ledger": (ANY, "ledger", 7),
    "before the exchange": (ANY, "exchange-1", 7),
    "in the exchange": (ANY, "in-exchange-1", 7),
    "waiting for the others": (ANY, "wait", 7),
    "after the vote": (ANY, "vote", 7),
    "optimizer": (ANY, "optimizer", 7),
    "after the optimizer": (ANY, "stepped", 7),
    "evaluation": (FIRST, "evaluating", 8),  # the others have nothing to evaluate
    "after an evaluation": (ANY, "evaluation", 8),
    "before a snapshot": (ANY, "snapshot-begins", 6),
    "in a snapshot": (FIRST, "snapshot", 6),
    "first rank, forward": (FIRST, "forward", 7),
    "first rank, optimizer": (FIRST, "optimizer", 7),
}
TWO = "two at once"
FIRST_AND_NEXT = "one, and the first while the others meet"
DISK_KB = [24, 40, 52, 64]
SECONDS = 120
SECONDS_STOPPED = 1.0
FULL = """
mkdir run; mount -t tmpfs -o size="$1"k none run || exit 77
shift; "$@"; first=$?
mount -o remount,size=64m run; "$@" || exit 1
cp -r run kept; exit $first
"""


@dataclass(frozen=True)
class End:
    """How one run ended.

    Args:
        killed: The number of ranks that were killed.
        whole: Whether the run was as if unbroken, with nothing lost or rolled back.
    """

    killed: int
    whole: bool
    stderr: str


def train(folder: Path, nproc: int, kills: str) -> End:
    command = [sys.executable, "-m", "stepladder", "train", JOB, *FLAGS, "--nproc", str(nproc)]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"KILL": kills, "KILLED": str(folder)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return End(
        len(list(folder.glob("killed-*"))),
        done.returncode == 0 and is_whole(folder / "run"),
        done.stderr,
    )


def is_whole(run_dir: Path) -> bool:
    audited = audit(run_dir)
    return audited.ok and audited.attempts == 1 and not audited.superseded


def weights(run_dir: Path) -> str:
    return json.loads((run_dir / "result.json").read_text())["weights_sha256"]


class Bench:
    """Runs in folders of their own, compared with the one that nothing happens to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.number = 0
        self.reference = self.fresh()
        assert train(self.reference, 1, "").whole
        self.expected = weights(self.reference / "run")

    def fresh(self) -> Path:
        self.number += 1
        folder = self.root / str(self.number)
        folder.mkdir()
        return folder

    def killed(self, nproc: int, kills: list[str]) -> End:
        folder = self.fresh()
        end = train(folder, nproc, " ".join(kills))
        same = end.whole and end.killed == len(kills) and weights(folder / "run") == self.expected
        if not same:
            print(
                f"{nproc} processes, {kills}, {end.killed} killed:\n{end.stderr}", file=sys.stderr
            )
        return End(end.killed, same, end.stderr)

    def row(self, name: str, kills_of: Iterable[tuple[int, list[str]]]) -> list[str]:
        ends = {nproc: list[End]() for nproc in SIZES}
        for nproc, kills in kills_of:
            ends[nproc].append(self.killed(nproc, kills))
        cells = [
            f"{sum(one.whole for one in some)} of {len(some)}" if some else ""
            for some in ends.values()
        ]
        return [name, *cells, str(sum(one.killed for some in ends.values() for one in some))]


def kills_in(nproc: int, victims: str, where: str, step: int) -> list[str]:
    return [f"{0 if victims is FIRST else random.randrange(nproc)}:{where}:{step}"]


def two_at_once(nproc: int) -> list[str]:
    """Each anywhere in the same step."""
    places = [
        (where, step) for victims, where, step in PHASES.values() if victims is ANY and step == 7
    ]
    ranks = random.sample(range(nproc), 2)
    return [
        f"{rank}:{where}:{step}"
        for rank, (where, step) in zip(ranks, random.sample(places, 2), strict=True)
    ]


def one_and_the_first(nproc: int) -> list[str]:
    return [f"{random.randrange(1, nproc)}:forward:7", "0:group-1:7"]


def phases(root: Path, rounds: int) -> list[list[str]]:
    bench = Bench(root)
    rows = [
        bench.row(name, [(n, kills_in(n, *phase)) for n in SIZES for _ in range(rounds)])
        for name, phase in PHASES.items()
    ]
    for name, kills in ((TWO, two_at_once), (FIRST_AND_NEXT, one_and_the_first)):
        rows.append(bench.row(name, [(n, kills(n)) for n in SIZES if n > 2 for _ in range(rounds)]))
    return rows


def stopped_and_continued(root: Path, rounds: int) -> tuple[int, int]:
    """Runs that were as if unbroken, with no rank lost; and all."""
    root.mkdir()
    reference = unbroken(root, EPOCHS)
    complete = 0
    for number in range(rounds):
        folder = root / str(number)
        folder.mkdir()
        with started(folder, "--nproc", 3, epochs=EPOCHS) as command:
            began = time.monotonic()
            step = random.randrange(5, 50)
            command.wait_for(partial(reached, command, step))
            chosen: psutil.Process = random.choice(command.ranks())
            chosen.suspend()
            time.sleep(SECONDS_STOPPED)
            chosen.resume()
            trial = examine(command, reference, began)
            complete += trial.same and trial.exact and not audit(command.run_dir).changes
    return complete, rounds


def reached(command: Command, step: int) -> bool:
    return len(command.ranks()) == 3 and command.step() >= step


def full_disks(root: Path) -> list[tuple[int, bool, str]]:
    """Size of the disk, whether the run ended with one line and then went on as if unbroken, and
    that line.
    """
    root.mkdir()
    bench = Bench(root)
    ends = []
    for size in DISK_KB:
        folder = bench.fresh()
        command = [sys.executable, "-m", "stepladder", "train", str(JOB), *FLAGS, "--nproc", "2"]
        shell = ["unshare", "--mount", "bash", "-c", FULL, "bash", str(size), *command]
        done = subprocess.run(
            shell, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode == 77:
            return []
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        well = done.returncode == 2 and len(errors) == 1 and "Traceback" not in done.stderr
        proof = audit(folder / "kept") if well else None
        complete = proof is not None and proof.ok and weights(folder / "kept") == bench.expected
        if not complete:
            print(f"{size} kB: exit code {done.returncode}\n{done.stderr}", file=sys.stderr)
        ends.append((size, complete, errors[0] if errors else ""))
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, help="runs of each cell")
    parser.add_argument(
        "--stops", type=int, default=10, help="runs with a rank that is stopped and continued"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    random.seed(args.seed)
    report = Report(
        "chaos_phases.py",
        "Killed in every phase of a step",
        ["torch", "stepladder"],
        cores_used="all",
    )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "phases").mkdir()
        rows = phases(root / "phases", args.rounds)
        continued = stopped_and_continued(root / "stops", args.stops) if args.stops else None
        disks = full_disks(root / "disks") if os.geteuid() == 0 else []
    cells = [cell.split(" of ") for row in rows for cell in row[1:-1] if cell]
    bars = [
        verdict(
            "runs as if unbroken",
            sum(int(one) for one, _ in cells),
            sum(int(of) for _, of in cells),
        )
    ]
    if continued:
        bars.append(
            verdict(
                "a rank stopped for a second and continued: as if unbroken, none lost", *continued
            )
        )
    if disks:
        case = f"a disk of {', '.join(str(size) for size, _, _ in disks)} kB is full: exit code 2, one line, and then"
        bars.append(
            verdict(f"{case} as if unbroken", sum(complete for _, complete, _ in disks), len(disks))
        )
    header = ["killed in", *(f"{nproc} processes" for nproc in SIZES), "ranks killed"]
    report.finish([table(header, rows), "\n".join(bars)], args.write)


if __name__ == "__main__":
    main()
