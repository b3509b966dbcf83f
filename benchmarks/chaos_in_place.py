"""Kills that a run survives in place: how long until the next step, and is it still the unbroken run?

A part of chaos.py. Each run loses one rank after the other, any of them, while `--on-loss continue` holds.
"""

from __future__ import annotations

import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil
from chaos_runs import Command, Trial, examine, started

from stepladder.storage.audit import audit

EPOCHS = 30
SECONDS_TO_GO_ON, SECONDS_TO_JOIN = 20.0, 20.0


@dataclass
class Survived:
    """One run. waits: seconds from each kill until a step after it was done; inf where none came."""

    trial: Trial
    kills: int
    waits: list[float] = field(default_factory=list)
    superseded: int = 0
    attempts: int = 1

    @property
    def is_whole(self) -> bool:
        return self.trial.same and self.trial.exact and not self.superseded and self.attempts == 1


def killed_in_turn(folder: Path, reference: str, nproc: int, kills: int) -> Survived:
    """A run that loses `kills` ranks, each when the one before has been replaced."""
    began, waits = time.monotonic(), []
    flags = "--nproc", nproc, "--on-loss", "continue"
    with started(folder, *flags, epochs=EPOCHS) as command:
        for number in range(kills):
            joined = lambda: command.err.read_text().count("has joined")  # noqa: E731
            deadline = time.monotonic() + SECONDS_TO_JOIN
            command.wait_for(lambda: joined() >= number or time.monotonic() > deadline)  # noqa: B023
            step = command.step() + random.randrange(1, 12)
            command.wait_for(lambda: len(command.ranks()) == nproc and command.step() >= step)  # noqa: B023
            if not command.running:
                break
            waits.append(seconds_to_next_step(command))
        trial = examine(command, reference, began)
        found = audit(command.run_dir)
        return Survived(trial, len(waits), waits, found.superseded, found.attempts)


def seconds_to_next_step(command: Command) -> float:
    """Kill a random rank; until some other rank has done a whole step with the others that are left.

    Each rank's ledger has a line for the new group, one when it has computed its share of the next step, and one
    for the step after, which it comes to when that next step is done.
    """
    ends = {path: path.stat().st_size for path in command.run_dir.glob("ledger/*.jsonl")}
    ranks = command.ranks()
    at = time.monotonic()
    with suppress(psutil.NoSuchProcess):
        random.choice(ranks).kill()
    while command.running and time.monotonic() - at < SECONDS_TO_GO_ON:
        for path, end in ends.items():
            with path.open() as file:
                file.seek(end)
                _, changed, after = file.read().partition('"group"')
            if changed and after.count("\n") >= 3:
                return time.monotonic() - at
        time.sleep(0.001)
    return float("inf")


def row(nproc: int, runs: list[Survived]) -> list[str]:
    waits = [wait for run in runs for wait in run.waits]
    whole = sum(run.is_whole for run in runs)
    return [
        str(nproc), str(len(waits)), f"{median(waits):.3f}", f"{max(waits):.3f}", f"{whole} of {len(runs)}",
        str(sum(run.superseded for run in runs)),
    ]  # fmt: skip


HEADER = [
    "processes", "ranks killed", "seconds to the next step (median)", "(most)",
    "runs with the unbroken run's weights, nothing lost or repeated, one attempt", "steps rolled back",
]  # fmt: skip
