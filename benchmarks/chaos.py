"""python benchmarks/chaos.py [--trials N] [--write]

Does a run that is killed at random moments end with the weights of the unbroken run, each sample trained once?

The job is the mlp recipe in exact mode on three ranks. Each trial is a run of its own, in which ranks are killed
with SIGKILL: at a random step, inside a snapshot, or twice, the second time while the ranks come up again. Then
one run directory is continued on several world sizes, ranks are stopped with SIGSTOP, and of three nodes (three
agents on this machine) each is killed in turn and replaced, the one that serves the rendezvous among them.
"""

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
from statistics import median

import psutil
from report import Report, table

from stepladder.storage.audit import audit

STEPS, NPROC, SNAPSHOT_EVERY, TIMEOUT = 96, 3, 3, 3
JOB = ["mlp", "--sync", "exact", "--samples", "1024", "--global-batch", "32", "--microbatch", "4", "--lr", "0.02"]
SIZES = [1, 2, 4, 3, 8, 1]
SECONDS = 120.0  # no trial takes so long, unless it hangs


@dataclass(frozen=True)
class Trial:
    """What one trial showed.

    same: its weights are those of the unbroken run.  exact: no sample lost or repeated.  said: on stderr.
    """

    same: bool
    exact: bool
    seconds: float
    said: str

    @property
    def kills(self) -> int:
        return self.said.count("was killed by SIGKILL")


class Command:
    """`stepladder train` in a session of its own. Its temporary files are ours, the ranks' progress among them."""

    def __init__(self, folder: Path, *flags: object, epochs: int = 3) -> None:
        self.temporary = Path(tempfile.mkdtemp(dir=folder))
        self.run_dir, self.err = folder / "run", self.temporary / "err"
        steps = ["--epochs", str(epochs), "--snapshot-every", str(SNAPSHOT_EVERY)]
        command = [sys.executable, "-m", "stepladder", "train", *JOB, *steps, "--run-dir", str(self.run_dir)]
        with self.err.open("w") as err:
            self.popen = subprocess.Popen(
                [*command, *map(str, flags)],
                env={**os.environ, "TMPDIR": str(self.temporary)}, stdout=err, stderr=err, start_new_session=True,
            )  # fmt: skip
        self.process = psutil.Process(self.popen.pid)

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    def ranks(self) -> list[psutil.Process]:
        """In rank order: those that the fork server has forked."""
        with suppress(psutil.NoSuchProcess):
            below = self.process.children(recursive=True)
            return sorted((p for p in below if p.ppid() != self.popen.pid), key=lambda p: p.pid)
        return []

    def step(self) -> int:
        """The furthest step that a rank has computed its share of, as the launcher sees it."""
        for file in self.temporary.glob("stepladder-*/progress"):
            with suppress(OSError):
                return max(memoryview(file.read_bytes()).cast("q"), default=0)
        return 0

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Until it is true, or the command has ended."""
        deadline = time.monotonic() + SECONDS
        while self.running and not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(self.err.read_text())
            time.sleep(0.001)


@contextmanager
def started(folder: Path, *flags: object, epochs: int = 3) -> Iterator[Command]:
    """A command in a folder of its own; nothing of it is left at the end of the block."""
    command = Command(folder, *flags, epochs=epochs)
    try:
        yield command
    finally:
        command.popen.kill()  # its ranks die with it
        command.popen.wait()


def kill(command: Command, rank: int | None = None) -> None:
    """SIGKILL for that rank, or for a random one."""
    with suppress(IndexError, psutil.NoSuchProcess):
        ranks = command.ranks()
        (random.choice(ranks) if rank is None else ranks[rank]).kill()


def at_a_random_step(command: Command) -> None:
    step = random.randrange(STEPS - 8)  # near the end it could be over before the kill
    command.wait_for(lambda: len(command.ranks()) == NPROC and command.step() >= step)
    time.sleep(random.uniform(0, 0.01) if step else random.uniform(0, 1))
    kill(command)


def in_a_snapshot(command: Command) -> None:
    """While a file of a snapshot is being written; rank 0 writes it."""
    step = random.randrange(SNAPSHOT_EVERY, STEPS - SNAPSHOT_EVERY)
    command.wait_for(lambda: command.step() >= step)
    command.wait_for(lambda: any(command.run_dir.glob("snapshots/*.tmp")))
    kill(command, random.choice([0, None]))


def in_a_restart(command: Command) -> None:
    """A second kill while the ranks come up again."""
    at_a_random_step(command)
    before = {p.pid for p in command.ranks()}
    command.wait_for(lambda: not before & {p.pid for p in command.ranks()} and command.ranks())
    time.sleep(random.uniform(0, 0.5))
    kill(command)


def examine(command: Command, reference: str, began: float) -> Trial:
    """Wait for the end, and compare."""
    try:
        command.popen.wait(SECONDS)
        result = json.loads((command.run_dir / "result.json").read_text())
        proof = audit(command.run_dir)
        same, exact = result["weights_sha256"] == reference, proof.ok
    except (OSError, subprocess.TimeoutExpired):
        same, exact = False, False
    return Trial(same, exact, time.monotonic() - began, command.err.read_text())


def trial(folder: Path, reference: str, break_it: Callable[[Command], None], *flags: object) -> Trial:
    began = time.monotonic()
    with started(folder, "--nproc", NPROC, *flags) as command:
        break_it(command)
        return examine(command, reference, began)


def stop_a_rank(command: Command) -> None:
    step = random.randrange(1, STEPS)
    command.wait_for(lambda: command.step() >= step)
    with suppress(IndexError, psutil.NoSuchProcess):
        random.choice(command.ranks()).suspend()


def world_sizes(folder: Path, reference: str) -> Trial:
    """One run directory, a part of the steps on each size."""
    began = time.monotonic()
    for leg, size in enumerate(SIZES, 1):
        with started(folder, "--nproc", size, "--steps", STEPS * leg // len(SIZES)) as command:
            command.popen.wait(SECONDS)
    return examine(command, reference, began)


def nodes_in_turn(folder: Path, reference: str, epochs: int) -> Trial:
    """Three agents; after each quarter of the steps one is killed and replaced, so the store's is among them."""
    began = time.monotonic()
    flags = ["--nodes", "1:3", "--local-addr", "127.0.0.1", "--max-restarts", "20", "--timeout", "60"]
    agents = [Command(folder, *flags, epochs=epochs) for _ in range(3)]
    try:
        for number in range(3):
            target = (number + 1) * epochs * STEPS // 3 // 4
            agents[number].wait_for(lambda: max(agent.step() for agent in agents) >= target)  # noqa: B023
            agents[number].popen.kill()
            agents.append(Command(folder, *flags, epochs=epochs))
        trials = [examine(agent, reference, began) for agent in agents]
        lost = all(agent.popen.returncode == -signal.SIGKILL for agent in agents[:3])
        return Trial(trials[-1].same and lost, trials[-1].exact, trials[-1].seconds, joined(trials))
    finally:
        for agent in agents:
            agent.popen.kill()
            agent.popen.wait()


def joined(trials: list[Trial]) -> str:
    return "\n".join(trial.said for trial in trials)


def unbroken(folder: Path, epochs: int = 3) -> str:
    """The hash of the weights of one process that nothing happens to."""
    with started(folder, epochs=epochs) as command:
        command.popen.wait(SECONDS)
    return json.loads((command.run_dir / "result.json").read_text())["weights_sha256"]


def row(name: str, trials: list[Trial]) -> list[str]:
    same, exact = sum(t.same for t in trials), sum(t.exact for t in trials)
    kills = sum(t.kills for t in trials)
    return [name, str(len(trials)), str(kills), str(same), str(exact), f"{median(t.seconds for t in trials):.1f}"]


def verdict(what: str, count: int, of: int) -> str:
    return f"- {'PASS' if count == of else 'FAIL'}: {what}: {count} of {of}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=50, help="runs with killed ranks")
    parser.add_argument("--stopped", type=int, default=3, help="runs with a stopped rank")
    parser.add_argument("--nodes", type=int, default=1, help="runs on three nodes, each killed in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="save the report under benchmarks/results/")
    args = parser.parse_args()
    random.seed(args.seed)
    report = Report("chaos.py", "Killed at random moments", ["torch", "stepladder"], cores_used="all")
    with tempfile.TemporaryDirectory() as temporary:
        rows, bars = measure(args, Path(temporary))
    header = ["what happens to the run", "runs", "ranks killed", "weights of the unbroken run"]
    report.finish(
        [table([*header, "nothing lost or repeated", "seconds (median)"], rows), "\n".join(bars)], args.write
    )


def measure(args: argparse.Namespace, root: Path) -> tuple[list[list[str]], list[str]]:
    folders = (root / str(number) for number in range(10**6))

    def fresh() -> Path:
        folder = next(folders)
        folder.mkdir()
        return folder

    reference = unbroken(fresh())
    kinds = [at_a_random_step, at_a_random_step, in_a_snapshot, in_a_restart]  # half of them at any moment
    killed: dict[Callable[[Command], None], list[Trial]] = {kind: [] for kind in kinds}
    for number in range(args.trials):
        kind = kinds[number % len(kinds)]
        killed[kind].append(keep_if_bad(trial(fresh(), reference, kind)))
    names = [
        "a rank killed at a random step",
        "a rank killed inside a snapshot",
        "killed, and again in the restart",
    ]
    rows = [row(name, trials) for name, trials in zip(names, killed.values(), strict=True) if trials]
    every = [t for trials in killed.values() for t in trials]
    bars = [
        verdict("killed, with the weights of the unbroken run", sum(t.same for t in every), len(every)),
        verdict("killed, with no sample lost or repeated", sum(t.exact for t in every), len(every)),
    ]
    sizes = [keep_if_bad(world_sizes(fresh(), reference))]
    rows.append(row(f"world sizes {'-'.join(map(str, SIZES))}", sizes))
    stopped = [
        keep_if_bad(trial(fresh(), reference, stop_a_rank, "--timeout", TIMEOUT)) for _ in range(args.stopped)
    ]
    named = sum("is stopped (SIGSTOP)" in t.said and t.same and t.exact for t in stopped)
    rows += [row(f"a rank stopped, --timeout {TIMEOUT}", stopped)] if stopped else []
    bars += [
        verdict("same weights on changing world sizes", sum(t.same and t.exact for t in sizes), 1),
        verdict("a stopped rank named, and recovered from", named, len(stopped)),
    ]
    if args.nodes:
        longer = unbroken(fresh(), epochs=30)
        nodes = [keep_if_bad(nodes_in_turn(fresh(), longer, epochs=30)) for _ in range(args.nodes)]
        rows.append(row("three nodes, each killed in turn", nodes))
        bars.append(verdict("three nodes killed in turn", sum(t.same and t.exact for t in nodes), len(nodes)))
    return rows, bars


def keep_if_bad(result: Trial) -> Trial:
    """Say what a run said that did not end well."""
    if not (result.same and result.exact):
        print(result.said, file=sys.stderr)
    return result


if __name__ == "__main__":
    main()
