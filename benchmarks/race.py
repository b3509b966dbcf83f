"""python benchmarks/race.py [--rounds N] [--write]

Does one run write a run directory, whoever comes at the same time and whoever is killed?

In each round several commands want the same directory, with one process or two: three `--fresh`
runs of different seeds and one that resumes, beside nothing, a run that was killed or one that
lives. Some of their processes are killed with SIGKILL at random moments. The run that has the
directory stands still in the middle until all others have ended. Then one must have ended with 0,
each other one with one line and exit code 2, and the directory, as those that were moved aside,
must hold what an unbroken run of one seed leaves there."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from report import Report, table

from stepladder.storage.audit import audit
from stepladder.storage.run_files import MANIFEST_FILE, SNAPSHOTS_FOLDER, list_snapshots

JOB = Path(__file__).parents[1] / "tests" / "jobs" / "gates.py"
GATE = 7  # the step that the directory's owner stands still in, of 20
FLAGS = [
    "--sync",
    "exact",
    "--microbatch",
    "8",
    "--snapshot-every",
    "2",
    "--keep",
    "99",
    "--lock-wait",
    "3",
]
SEEDS = range(4)
SECONDS = 300.0  # no round takes so long, unless it hangs
BEFORE = ["nothing", "a killed run", "a live run"]


@dataclass
class Contender:
    """A command that wants the directory."""

    seed: int
    flags: list[str]
    popen: Any
    err: Path
    killed: bool = False

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def stderr(self) -> str:
        return self.err.read_text()

    def kill(self, choose: random.Random) -> None:
        """One of its processes: the command itself, or one that it has started."""
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.popen.pid)
            victim = choose.choice([first, first, *first.children(recursive=True)])
            self.killed |= victim is first
            victim.kill()


def begin(command: list[str], env: dict[str, str], err: IO[str]) -> Any:
    none = subprocess.DEVNULL
    return subprocess.Popen(
        command, env=env, stdin=none, stdout=none, stderr=err, start_new_session=True
    )


class Round:
    """Commands in one folder."""

    def __init__(self, folder: Path, nproc: int, choose: random.Random) -> None:
        self.folder = folder
        self.nproc = nproc
        self.choose = choose
        self.run_dir = folder / "run"
        self.contenders = list[Contender]()

    def start(self, seed: int, *flags: str) -> Contender:
        err = self.folder / f"{len(self.contenders)}.err"
        command = [
            sys.executable,
            "-m",
            "stepladder",
            "train",
            str(JOB),
            *FLAGS,
            "--run-dir",
            str(self.run_dir),
        ]
        command += ["--seed", str(seed), "--nproc", str(self.nproc), *flags]
        with err.open("w") as stream:
            popen = begin(command, {**os.environ, "GATES": f"{self.folder} {GATE}"}, stream)
        self.contenders.append(Contender(seed, list(flags), popen, err))
        return self.contenders[-1]

    def open_gate(self) -> None:
        (self.folder / f"open-{GATE}").touch()

    def prepare(self, before: str) -> None:
        if before == "nothing":
            return
        first = self.start(0)
        wait_until((self.folder / f"at-{GATE}").exists)
        if before == "a killed run":
            first.popen.kill()
            first.killed = True
            first.popen.wait()

    def race(self, kills: int) -> None:
        """All of them, killed at random moments; then the one that is left goes on to its end."""
        starts = [(seed, ["--fresh"]) for seed in SEEDS[1:]] + [(0, [])]
        self.choose.shuffle(starts)
        for seed, flags in starts:
            self.start(seed, *flags)
            time.sleep(self.choose.uniform(0, 0.3))
        for _ in range(kills):
            time.sleep(self.choose.uniform(0, 3.0))
            if running := [contender for contender in self.contenders if contender.running]:
                self.choose.choice(running).kill(self.choose)
        wait_until(lambda: sum(contender.running for contender in self.contenders) <= 1)
        self.open_gate()
        wait_until(lambda: not any(contender.running for contender in self.contenders))

    def finish(self) -> None:
        """Where nobody is left, the next one goes on from what is there."""
        if not any(contender.popen.poll() == 0 for contender in self.contenders):
            config = stored(self.run_dir, "config.json")
            self.start(config["definition"]["seed"] if config else 0).popen.wait(SECONDS)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def stored(run_dir: Path, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads((run_dir / name).read_text()))
    except FileNotFoundError:
        return {}


def models(run_dir: Path) -> dict[str, str]:
    """What each snapshot holds, by its name."""
    hashes = {
        path.name: json.loads((path / MANIFEST_FILE).read_text())
        for path in list_snapshots(run_dir / SNAPSHOTS_FOLDER)
    }
    return {name: str(manifest["files"]["model.safetensors"]) for name, manifest in hashes.items()}


@dataclass(frozen=True)
class Reference:
    """What an unbroken run of a seed leaves."""

    weights: str
    models: dict[str, str]


def faults(round_: Round, references: dict[int, Reference]) -> Iterator[str]:
    """What is wrong after a round: nothing, where one run has written the directory."""
    yield from faults_of_commands(round_)
    for run_dir in round_.folder.glob("run*"):
        if config := stored(run_dir, "config.json"):
            yield from faults_of_run(run_dir, references[config["definition"]["seed"]])
    if not stored(round_.run_dir, "result.json"):
        yield "no result"


def faults_of_commands(round_: Round) -> Iterator[str]:
    """One ends with 0, the others with one line; and the directory is that of the one."""
    ended = [contender for contender in round_.contenders if contender.popen.poll() == 0]
    if len(ended) != 1:
        yield f"{len(ended)} commands have ended with 0"
    for contender in round_.contenders:
        code = contender.popen.poll()
        if code not in (0, 2) and not (code == -signal.SIGKILL and contender.killed):
            yield f"exit code {code}: {contender.stderr}"
        if code == 2 and [line[:7] for line in contender.stderr.splitlines()].count("error: ") != 1:
            yield f"not one line: {contender.stderr}"
        if "Traceback" in contender.stderr:
            yield contender.stderr
    if ended and ended[0].seed != stored(round_.run_dir, "config.json")["definition"]["seed"]:
        yield "the directory is not that of the command that ended with 0"


def faults_of_run(run_dir: Path, reference: Reference) -> Iterator[str]:
    """Its snapshots and its result are those of an unbroken run."""
    strange = {
        name for name, model in models(run_dir).items() if reference.models.get(name) != model
    }
    if strange:
        yield f"{run_dir.name}: {strange} are none of its seed"
    result = stored(run_dir, "result.json")
    if not result:
        return
    if result["weights_sha256"] != reference.weights:
        yield f"{run_dir.name}: other weights than those of its seed"
    if not (proof := audit(run_dir)).ok:
        yield f"{run_dir.name}: {proof}"


@contextmanager
def opened(folder: Path, nproc: int, choose: random.Random) -> Iterator[Round]:
    """A round; nothing of it is left at the end of the block."""
    round_ = Round(folder, nproc, choose)
    try:
        yield round_
    finally:
        for contender in round_.contenders:
            contender.popen.kill()  # its ranks die with it
            contender.popen.wait()


def reference(folder: Path, seed: int) -> Reference:
    with opened(folder, 1, random.Random()) as round_:
        round_.open_gate()
        round_.start(seed).popen.wait(SECONDS)
    return Reference(
        stored(round_.run_dir, "result.json")["weights_sha256"], models(round_.run_dir)
    )


def play(
    folder: Path, kind: tuple[str, int], choose: random.Random, references: dict[int, Reference]
) -> list[str]:
    """One round. What was wrong in it."""
    before, nproc = kind
    with opened(folder, nproc, choose) as round_:
        try:
            round_.prepare(before)
            round_.race(choose.randrange(4))
            round_.finish()
        except (TimeoutError, subprocess.TimeoutExpired):
            return ["no end", *(contender.stderr for contender in round_.contenders)]
        return list(faults(round_, references))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--write", action="store_true", help="save the report under benchmarks/results/"
    )
    args = parser.parse_args()
    report = Report(
        "race.py", "Runs that want one directory", ["torch", "stepladder"], cores_used="all"
    )
    kinds = [(before, nproc) for before in BEFORE for nproc in (1, 2)]
    counts = {kind: [0, 0] for kind in kinds}
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)

        def fresh(name: str) -> Path:
            (root / name).mkdir()
            return root / name

        references = {seed: reference(fresh(f"seed-{seed}"), seed) for seed in SEEDS}
        for number in range(args.rounds):
            kind = kinds[number % len(kinds)]
            choose = random.Random(f"{args.seed} {number}")
            faults_of_round = play(fresh(f"round-{number}"), kind, choose, references)
            for fault in faults_of_round:
                print(f"round {number} ({kind}): {fault}", file=sys.stderr)
            counts[kind][0] += 1
            counts[kind][1] += not faults_of_round
    rows = [[before, str(nproc), *map(str, counts[before, nproc])] for before, nproc in kinds]
    good = sum(count for _, count in counts.values())
    verdict = "PASS" if good == args.rounds else "FAIL"
    bar = f"- {verdict}: one run writes, the others end with one line and exit code 2: {good} of {args.rounds}"
    report.finish(
        [table(["there was before", "--nproc", "rounds", "one writer"], rows), bar], args.write
    )


if __name__ == "__main__":
    main()
