"""What happens after the ranks of a batch job have ended: the job is requeued, or it is over.

The batch script runs `stepladder after`, which calls `handle_end`. What the ranks have recorded
themselves (ended.json) counts first, then what Slurm knows of the job and its nodes, and last the
exit code. Every end is a line in requeues.jsonl.
"""

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
from stepladder.slurm.client import parse_field
from stepladder.slurm.submitted_jobs import JobInfo, add_record, read_job_records

REQUEUES_FILE = "requeues.jsonl"
SLURMD_PORT = 6818
SIGNAL_EARLY_S = 60  # Slurm may send its signal that much too early
SIGKILL_CODES = (KILLED, 9)  # as a shell and as srun report it
SIGTERM_CODES = (TERMINATED, 15)
MAX_STARTS_WITHOUT_PROGRESS = 2
START_LINE_PREFIX = "stepladder: start "  # then the number, from 1: a line of the batch script
ENDED_BY_SLURM = re.compile(r"\S+ error: \*\*\* JOB \d+ ON \S+ CANCELLED AT \S+ DUE TO ([A-Z ]+)")


@dataclass(frozen=True)
class RequeueRecord:
    """The entries of a line of requeues.jsonl that are read; `time` is a Unix time."""

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


class _EndReason(StrEnum):
    """Why the ranks have ended."""

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


FINAL_REASONS = (_EndReason.FINISHED, _EndReason.CANCELLED, _EndReason.BAD_INPUT, _EndReason.BUG)


@dataclass(frozen=True)
class StartEnd:
    """What is known of the end of one start of the job.

    Args:
        code: srun's exit code.
        ranks_code: The code that the ranks or their launcher have recorded (0, 1, 2, 74, 75, 143),
            None if they have not.
        restart: How often Slurm has restarted the job.
        step: Step of the newest snapshot, None if the job is no training.
        state: The job's state in Slurm.
        seconds_left: Seconds to the time limit at the end, None if unknown.
        margin: Seconds before the time limit at which Slurm sends its signal.
        preempted: Whether Slurm gives the nodes to another job.
        lost_nodes: Nodes that do not answer.
    """

    code: int
    ranks_code: int | None = None
    restart: int = 0
    step: int | None = None
    state: str = "RUNNING"
    seconds_left: float | None = None
    margin: float = 0.0
    preempted: bool = False
    lost_nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Decision:
    """What to do after an end.

    Args:
        reason: Why the ranks have ended.
        requeue: Whether the job continues from its snapshot.
        text: The decision in words, for the job's log.
    """

    reason: _EndReason
    requeue: bool
    text: str

    def exit_code(self, code: int) -> int:
        """Return the exit code of the batch script.

        Args:
            code: srun's exit code. If it is 75, it may be that of an agent which srun has ended,
                and must not requeue the job.
        """
        if self.requeue:
            return STOPPED
        if self.reason is _EndReason.FINISHED:
            return DONE
        return FAILED if code in (DONE, STOPPED) else code


def find_end_reason(end: StartEnd) -> _EndReason:
    """Return why the ranks have ended."""
    code = end.ranks_code
    if code is None:
        code = end.code
    if code == DONE:
        return _EndReason.FINISHED
    if end.state.startswith("CANCELLED"):
        return _EndReason.CANCELLED
    if end.ranks_code == STOPPED:
        return _find_stop_reason(end)
    if end.lost_nodes:
        return _EndReason.NODE_FAILURE
    if end.ranks_code == TERMINATED:
        return _find_stop_reason(end)
    if end.ranks_code == STORAGE_FAILED:
        return _EndReason.STORAGE
    return _find_failure(end, code)


def _find_failure(end: StartEnd, code: int) -> _EndReason:
    """Return why ranks have failed whose nodes and storage are well."""
    is_out_of_memory = end.ranks_code is None and end.state.startswith("OUT_OF_ME")
    if code in SIGKILL_CODES or is_out_of_memory:
        return _EndReason.OUT_OF_MEMORY
    if code in SIGTERM_CODES:
        return _EndReason.SIGNAL  # before there were ranks that could have recorded their end
    if code == BAD_INPUT:
        return _EndReason.BAD_INPUT
    return _EndReason.BUG


def _find_stop_reason(end: StartEnd) -> _EndReason:
    """Return why Slurm has sent SIGTERM."""
    if end.preempted:
        return _EndReason.PREEMPTION
    if end.seconds_left is not None and end.seconds_left < end.margin + SIGNAL_EARLY_S:
        return _EndReason.TIME_LIMIT
    return _EndReason.SIGNAL


def decide(end: StartEnd, steps_before: Sequence[int | None], max_requeues: int) -> _Decision:
    """Decide whether the job continues.

    Args:
        end: How this start has ended.
        steps_before: Step of the newest snapshot after each earlier start of the job.
        max_requeues: How often the job is requeued at most.

    Returns:
        The decision.
    """
    reason = find_end_reason(end)
    at_step = f" at step {end.step}" if end.step is not None else ""
    if reason in FINAL_REASONS:
        return _Decision(reason, False, _describe_final(reason, end, at_step))
    if end.ranks_code == TERMINATED and reason is not _EndReason.NODE_FAILURE:
        hint = "a script that saves, and then ends with exit code 75, goes on"
        return _Decision(reason, False, f"ended by SIGTERM ({reason}): not requeued. HINT: {hint}")
    descriptions = {
        _EndReason.NODE_FAILURE: f"lost {', '.join(end.lost_nodes)}{at_step}",
        _EndReason.OUT_OF_MEMORY: f"killed{at_step}, often: out of memory",
        _EndReason.STORAGE: f"a file of the run directory could not be used{at_step}, see above",
    }
    description = descriptions.get(reason, f"stopped{at_step} ({reason})")
    if end.restart >= max_requeues:
        text = (
            f"{description}: requeued {max_requeues} times already, and not again."
            " HINT: submit --max-requeues"
        )
        return _Decision(reason, False, text)
    max_starts = MAX_STARTS_WITHOUT_PROGRESS
    hint = "a longer --time, or --snapshot-every"
    if reason is _EndReason.OUT_OF_MEMORY:
        max_starts = 1
        hint = "more --mem"
    if _count_without_progress(end, steps_before, reason) >= max_starts:
        text = f"{description}: not requeued, because no step was gained. HINT: {hint}"
        return _Decision(reason, False, text)
    text = f"{description}: requeued ({end.restart + 1} of at most {max_requeues})"
    return _Decision(reason, True, text)


def _describe_final(reason: _EndReason, end: StartEnd, at_step: str) -> str:
    texts = {
        _EndReason.FINISHED: "finished",
        _EndReason.CANCELLED: f"cancelled{at_step}: not requeued",
        _EndReason.BAD_INPUT: "bad input, see above: not requeued",
        _EndReason.BUG: f"failed{at_step} with exit code {end.code}, and not by the cluster's"
        " fault, see above: not requeued",
    }
    return texts[reason]


def _count_without_progress(
    end: StartEnd, steps_before: Sequence[int | None], reason: _EndReason
) -> int:
    """Return how many starts in a row, this one last, have not got beyond the start before them."""
    if reason is _EndReason.OUT_OF_MEMORY and not end.step:
        return 1
    if end.step is None:
        return 0
    return len(list(takewhile(lambda step: step == end.step, reversed(steps_before))))


# -- what Slurm and the run directory show ---------------------------------------------------------


def _find_newest_step(job_dir: Path) -> int | None:
    """Return the step of the newest snapshot, None if the folder has no training."""
    if not (job_dir / "config.json").exists():
        return None
    steps = [0]
    for path in (job_dir / "snapshots").glob("step_*"):
        if match := re.fullmatch(r"step_([0-9]{1,16})", path.name):
            steps.append(int(match[1]))
    return max(steps)


def _parse_seconds_left(text: str) -> float | None:
    """Return the seconds to the job's time limit, None if `scontrol show job` does not name it."""
    try:
        end = datetime.fromisoformat(parse_field(text, "EndTime"))
    except ValueError:
        return None
    return (end - datetime.now()).total_seconds()


def find_lost_nodes(text: str) -> tuple[str, ...]:
    """Return the nodes that Slurm has given up, or whose daemon does not answer.

    Slurm itself may need minutes to notice a lost node.

    Args:
        text: What `scontrol show node` has printed.
    """
    names = []
    for node in re.split(r"^(?=NodeName=)", text, flags=re.MULTILINE)[1:]:
        is_down = re.search(r"DOWN|FAIL|NOT_RESPONDING|\*", parse_field(node, "State"))
        port = parse_whole_number(parse_field(node, "Port"), maximum=MAX_PORT) or SLURMD_PORT
        if is_down or not is_listening(parse_field(node, "NodeAddr"), port):
            names.append(parse_field(node, "NodeName"))
    return tuple(names)


# -- earlier ends of a job -------------------------------------------------------------------------


def find_ends_by_slurm(output: Path) -> dict[int, str]:
    """Return the reason of each start that Slurm ended and requeued itself, by its number.

    Slurm then ended the batch script too, so it wrote no record. The reasons are read from what
    the job has printed: a line of the batch script at each start, and one of Slurm at its end.
    """
    reasons: dict[int, str] = {}
    number = 0
    with suppress(OSError), output.open(errors="replace", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith(START_LINE_PREFIX):
                text = line.removeprefix(START_LINE_PREFIX).partition(" ")[0]
                number = (parse_whole_number(text) or 0) - 1
            elif match := ENDED_BY_SLURM.match(line):
                reason = match[1].strip().lower()
                if reason not in list(_EndReason):
                    reason = "requeue"
                reasons[number] = reason
    return reasons


def describe_history(job: JobInfo) -> dict[str, Any]:
    """Return what the run directory shows of a job, as `status --json` prints it."""
    history: dict[str, Any] = {
        "restarts": job.restarts,
        "output": job.output,
        "run_dir": job.job_dir,
        "step": None,
        "ends": [],
    }
    if job.job_dir:
        folder = Path(job.job_dir)
        history["step"] = _find_newest_step(folder)
        history["ends"] = _list_ends(job, folder)
    return history


def _list_ends(job: JobInfo, folder: Path) -> list[dict[str, Any]]:
    """Return a record of each start that has ended, also of those that Slurm ended itself."""
    records = read_job_records(folder / REQUEUES_FILE, job.job, RequeueRecord)
    ends = {record["restart"]: record for record in records}
    missing = set(range(max([job.restarts, *ends]))) - ends.keys()
    if missing:
        reasons = find_ends_by_slurm(Path(job.output))
        for number in missing:
            ends[number] = {
                "job": job.job,
                "restart": number,
                # Slurm prints nothing if the node of the batch script has lost power.
                "reason": reasons.get(number, "node failure, or requeue"),
                "requeued": True,
                "step": None,
                "code": None,
                "lost": [],
                "time": None,
            }
    return [ends[number] for number in sorted(ends)]


def handle_end(job_dir: Path, code: int, margin: float, text: str, max_requeues: int) -> _Decision:
    """Decide whether a job is requeued, and add a record of its end.

    Args:
        job_dir: The run directory.
        code: srun's exit code.
        margin: Seconds before the time limit at which Slurm sends its signal.
        text: What `scontrol show job` and `scontrol show node` have printed.
        max_requeues: How often the job is requeued at most.

    Returns:
        The decision.
    """
    start = identify_start()
    recorded = read_end() or read_end(job_dir / END_FILE_NAME) or {}
    end = StartEnd(
        code,
        ranks_code=recorded.get("code"),
        restart=start["restart"],
        step=_find_newest_step(job_dir),
        state=parse_field(text, "JobState") or "RUNNING",
        seconds_left=_parse_seconds_left(text),
        margin=margin,
        preempted=bool(parse_field(text, "PreemptTime")),
        lost_nodes=find_lost_nodes(text),
    )
    earlier = read_job_records(job_dir / REQUEUES_FILE, start["job"], RequeueRecord)
    decision = decide(end, [record["step"] for record in earlier], max_requeues)
    record: dict[str, Any] = {
        **start,
        "reason": decision.reason,
        "requeued": decision.requeue,
        "step": end.step,
        "code": end.code,
        "lost": end.lost_nodes,
        "time": round(time.time(), 1),
    }
    add_record(job_dir / REQUEUES_FILE, record)
    return decision
