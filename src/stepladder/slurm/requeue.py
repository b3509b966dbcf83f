"""What the end of a batch job's ranks means: done, to be requeued, or not. Called by the batch
script.

The word of the ranks counts (ended.json), then what Slurm says of the job and its nodes; an exit
code comes last. Every end is a line in requeues.jsonl."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any

from stepladder.core.address import is_listening
from stepladder.core.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    KILLED,
    STOPPED,
    STORAGE_FAILED,
    TERMINATED,
)
from stepladder.core.jsonl import is_unix_time
from stepladder.core.numbers import MAX_PORT, parse_whole_number
from stepladder.rank.exit_record import END_FILE_NAME, identify_start, read_end
from stepladder.slurm.query import Known, append_line, field, lines_of_job

HISTORY = "requeues.jsonl"
SLURMD_PORT = 6818
SECONDS_EARLY = 60  # Slurm's warning may come that much before its time
BY_SIGKILL, BY_SIGTERM = (KILLED, 9), (TERMINATED, 15)  # as a shell and as srun say it
STARTS_WITHOUT_PROGRESS = 2
START = "stepladder: start "  # and its number, from 1: a line of the batch script


@dataclass(frozen=True)
class PastEnd:
    """What is read of a line of requeues.jsonl. time: Unix time."""

    restart: int
    reason: str
    requeued: bool
    step: int | None
    code: int | None
    lost: list[str]
    time: float | None

    def __post_init__(self) -> None:
        if self.restart < 0 or not is_unix_time(self.time or 0.0):
            raise ValueError


class Reason(StrEnum):
    """Why the ranks ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time limit"
    PREEMPTION = "preemption"
    SIGNAL = "signal"
    NODE_FAILURE = "node failure"
    OUT_OF_MEMORY = "out of memory"
    STORAGE = "storage fault"
    BAD_INPUT = "bad input"
    BUG = "bug"


@dataclass(frozen=True)
class Ending:
    """What is known of one start of the job.

    code: srun's exit code.  word: the ranks' own (0, 1, 2, 74, 75) or their launcher's, or None.
    restart: how often Slurm has restarted the job.  step: of the newest snapshot, None if it is not
    a training. seconds_left: to the job's time limit at the end, None if unknown.  lost: nodes that
    do not answer."""

    code: int
    word: int | None = None
    restart: int = 0
    step: int | None = None
    state: str = "RUNNING"
    seconds_left: float | None = None
    margin: float = 0.0
    preempted: bool = False
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """requeue: go on from the snapshot.  text: for the job's log."""

    reason: Reason
    requeue: bool
    text: str

    def exit_code(self, code: int) -> int:
        """Of the batch script. code: srun's; where that is 75, it may be an agent's that srun
        ended: no wish.
        """
        if self.requeue:
            return STOPPED
        if self.reason is Reason.FINISHED:
            return DONE
        return FAILED if code in (DONE, STOPPED) else code


def reason_of(end: Ending) -> Reason:
    said = end.code if end.word is None else end.word
    if said == DONE:
        return Reason.FINISHED
    if end.state.startswith("CANCELLED"):
        return Reason.CANCELLED
    near = end.seconds_left is not None and end.seconds_left < end.margin + SECONDS_EARLY
    asked = Reason.PREEMPTION if end.preempted else Reason.TIME_LIMIT if near else Reason.SIGNAL
    if end.word == STOPPED:
        return asked
    if end.lost:
        return Reason.NODE_FAILURE
    if end.word == TERMINATED:
        return asked
    if end.word == STORAGE_FAILED:
        return Reason.STORAGE
    if said in BY_SIGKILL or (end.word is None and end.state.startswith("OUT_OF_ME")):
        return Reason.OUT_OF_MEMORY
    if said in BY_SIGTERM:
        return Reason.SIGNAL  # before there were ranks that could have said so
    return Reason.BAD_INPUT if said == BAD_INPUT else Reason.BUG


def decide(end: Ending, steps_before: Sequence[int | None], most: int) -> Decision:
    """Whether the job goes on. steps_before: the newest snapshot's step after each earlier start of
    this job.
    """
    reason = reason_of(end)
    at = f" at step {end.step}" if end.step is not None else ""
    final = {
        Reason.FINISHED: "finished",
        Reason.CANCELLED: f"cancelled{at}: not requeued",
        Reason.BAD_INPUT: "bad input, see above: not requeued",
        Reason.BUG: f"failed{at} with exit code {end.code}, and not by the cluster's fault, see above:"
        " not requeued",
    }
    if reason in final:
        return Decision(reason, False, final[reason])
    if end.word == TERMINATED and reason is not Reason.NODE_FAILURE:
        hint = "a script that saves, and then ends with exit code 75, goes on"
        return Decision(reason, False, f"ended by SIGTERM ({reason}): not requeued. HINT: {hint}")
    story = {
        Reason.NODE_FAILURE: f"lost {', '.join(end.lost)}{at}",
        Reason.OUT_OF_MEMORY: f"killed{at}, often: out of memory",
        Reason.STORAGE: f"a file of the run directory could not be used{at}, see above",
    }
    told = story.get(reason, f"stopped{at} ({reason})")
    if end.restart >= most:
        return Decision(
            reason,
            False,
            f"{told}: requeued {most} times already, and not again. HINT: submit --max-requeues",
        )
    fruitless = 1 if reason is Reason.OUT_OF_MEMORY else STARTS_WITHOUT_PROGRESS
    if _without_progress(end, steps_before, reason) >= fruitless:
        longer = "a longer --time, or --snapshot-every"
        hint = "more --mem" if reason is Reason.OUT_OF_MEMORY else longer
        return Decision(
            reason, False, f"{told}: not requeued, because no step was gained. HINT: {hint}"
        )
    return Decision(reason, True, f"{told}: requeued ({end.restart + 1} of at most {most})")


def _without_progress(end: Ending, steps_before: Sequence[int | None], reason: Reason) -> int:
    """How many starts, this one last, have ended at the step where the one before had ended."""
    if reason is Reason.OUT_OF_MEMORY and not end.step:
        return 1
    if end.step is None:
        return 0
    return len(list(takewhile(lambda step: step == end.step, reversed(steps_before))))


# -- what is known ---------------------------------------------------------------------------------


def newest_step(job_dir: Path) -> int | None:
    """Optimizer steps in the newest snapshot; None where there never was a training."""
    if not (job_dir / "config.json").exists():
        return None
    names = [path.name for path in (job_dir / "snapshots").glob("step_*")]
    return max(
        (
            int(found.group(1))
            for name in names
            if (found := re.fullmatch(r"step_([0-9]{1,16})", name))
        ),
        default=0,
    )


def seconds_left(facts: str) -> float | None:
    try:
        return (datetime.fromisoformat(field(facts, "EndTime")) - datetime.now()).total_seconds()
    except ValueError:
        return None


def lost_nodes(facts: str) -> tuple[str, ...]:
    """Nodes of the job that Slurm has given up, or whose daemon does not answer (Slurm may need
    minutes).
    """
    lost = []
    for shown in re.split(r"^(?=NodeName=)", facts, flags=re.MULTILINE)[1:]:
        state, port = (
            field(shown, "State"),
            parse_whole_number(field(shown, "Port"), maximum=MAX_PORT) or SLURMD_PORT,
        )
        bad = re.search(r"DOWN|FAIL|NOT_RESPONDING|\*", state)
        if bad or not is_listening(field(shown, "NodeAddr"), port):
            lost.append(field(shown, "NodeName"))
    return tuple(lost)


# -- what was before -------------------------------------------------------------------------------


def ended_by_slurm(output: Path) -> dict[int, str]:
    """Starts that Slurm itself ended and requeued, by number, with its reason: the batch script
    ended too.

    Read from what the job has printed: a line of the batch script at each start, and Slurm's own on
    its end."""
    found: dict[int, str] = {}
    number = 0
    with suppress(OSError), output.open(errors="replace", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(START):
                number = (parse_whole_number(line.removeprefix(START).partition(" ")[0]) or 0) - 1
            elif asked := re.match(
                r"\S+ error: \*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ DUE TO ([A-Z ]+)", line
            ):
                reason = asked.group(1).strip().lower()
                found[number] = reason if reason in list(Reason) else "requeue"
    return found


def story(known: Known) -> dict[str, Any]:
    """What the run directory tells of this job, as `status --json` has it."""
    folder = Path(known.job_dir) if known.job_dir else None
    return {
        "restarts": known.restarts,
        "output": known.output,
        "run_dir": known.job_dir,
        "step": newest_step(folder) if folder else None,
        "ends": ends_of(known, folder) if folder else [],
    }


def ends_of(known: Known, folder: Path) -> list[dict[str, Any]]:
    """One per start that has ended; those without a line, for Slurm ended the batch script with
    them, included.
    """
    told = {end["restart"]: end for end in lines_of_job(folder / HISTORY, known.job, PastEnd)}
    if missing := set(range(max([known.restarts, *told]))) - told.keys():
        reasons = ended_by_slurm(Path(known.output))
        for number in missing:  # no word from a node without power, on which the batch script was
            told[number] = {
                "job": known.job,
                "restart": number,
                "reason": reasons.get(number, "node failure, or requeue"),
                "requeued": True,
                "step": None,
                "code": None,
                "lost": [],
                "time": None,
            }
    return [told[number] for number in sorted(told)]


def after(job_dir: Path, code: int, margin: float, facts: str, most: int) -> Decision:
    """Look, decide and remember. facts: `scontrol show job` and `show node`."""
    said = read_end() or read_end(job_dir / END_FILE_NAME)
    end = Ending(
        code,
        said["code"] if said else None,
        identify_start()["restart"],
        newest_step(job_dir),
        field(facts, "JobState") or "RUNNING",
        seconds_left(facts),
        margin,
        bool(field(facts, "PreemptTime")),
        lost_nodes(facts),
    )
    before = [
        line["step"] for line in lines_of_job(job_dir / HISTORY, identify_start()["job"], PastEnd)
    ]
    decision = decide(end, before, most)
    line: dict[str, Any] = {
        **identify_start(),
        "reason": decision.reason,
        "requeued": decision.requeue,
        "step": end.step,
        "code": end.code,
        "lost": end.lost,
        "time": round(time.time(), 1),
    }
    append_line(job_dir / HISTORY, line)
    return decision
