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
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from glob import iglob
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

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
from stepladder.core.paths import LOADER_RECIPE
from stepladder.core.typed_file import parse_json, read_file
from stepladder.rank.exit_record import END_FILE_NAME, identify_start, read_end
from stepladder.slurm.client import parse_field
from stepladder.slurm.submitted_jobs import JobInfo, add_record, read_job_records

REQUEUES_FILE = "requeues.jsonl"
SLURMD_PORT = 6818
SIGNAL_EARLY_S = 60  # Slurm may send its signal that much too early
SIGKILL_CODES = (KILLED, 9)  # as a shell and as srun report it
SIGTERM_CODES = (TERMINATED, 15)
MAX_STARTS_WITHOUT_PROGRESS = 2
SAVE_HINT = (
    "a script that saves, and then ends with exit code 75 (stepladder.StopSignals); or submit"
    " --resume-from 'PATTERN' of its files"
)
START_LINE_PREFIX = "stepladder: start "  # then the number, from 1: a line of the batch script
RequeueMode = Literal["never", "preempted", "failed"]
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
    saves: int | None = None
    text: str = ""

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
class RequeuePolicy:
    """Which ends of a start are followed by another start.

    Args:
        max_requeues: How often the job is requeued at most.
        mode: "never"; "preempted": after what the cluster caused; "failed": after a failure too.
        resume_from: A pattern of the files from which a script resumes, "" if it is not known.
    """

    max_requeues: int
    mode: RequeueMode = "preempted"
    resume_from: str = ""


@dataclass(frozen=True)
class StartEnd:
    """What is known of the end of one start of the job.

    Args:
        code: srun's exit code.
        ranks_code: The code that the ranks or their launcher have recorded (0, 1, 2, 74, 75, 143),
            None if they have not.
        restart: How often Slurm has restarted the job.
        step: Step of the newest snapshot, None if the job is no training.
        saves: For a script whose files are known: how many of its starts, up to this one, have
            written one.
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
    saves: int | None = None
    state: str = "RUNNING"
    seconds_left: float | None = None
    margin: float = 0.0
    preempted: bool = False
    lost_nodes: tuple[str, ...] = ()

    @property
    def progress(self) -> int | None:
        """A number that grows with each start which has saved something, None if unknown."""
        return self.saves if self.step is None else self.step

    @property
    def at_step(self) -> str:
        """Where the training was, for a sentence."""
        return "" if self.step is None else f" at step {self.step}"

    @property
    def was_terminated(self) -> bool:
        """Whether SIGTERM has ended ranks, which did not say that they can go on."""
        return self.ranks_code == TERMINATED


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


def decide(
    end: StartEnd, progress_before: Sequence[int | None], policy: RequeuePolicy
) -> _Decision:
    """Decide whether the job continues.

    Args:
        end: How this start has ended.
        progress_before: The progress after each earlier start of the job.
        policy: Which ends are followed by another start.

    Returns:
        The decision.
    """
    reason = find_end_reason(end)
    is_final = reason in FINAL_REASONS
    if reason is _EndReason.BUG and policy.mode == "failed":
        is_final = False
    if is_final:
        return _Decision(reason, False, _describe_final(reason, end))
    refusal = _find_refusal(end, reason, progress_before, policy)
    outcome = refusal or f"requeued ({end.restart + 1} of at most {policy.max_requeues})"
    return _Decision(reason, refusal is None, f"{_describe(reason, end)}: {outcome}")


def _describe_final(reason: _EndReason, end: StartEnd) -> str:
    texts = {
        _EndReason.FINISHED: "finished",
        _EndReason.CANCELLED: f"cancelled{end.at_step}: not requeued",
        _EndReason.BAD_INPUT: "bad input, see above: not requeued",
        _EndReason.BUG: f"failed{end.at_step} with exit code {end.code}, and not by the cluster's"
        " fault, see above: not requeued",
    }
    return texts[reason]


def _describe(reason: _EndReason, end: StartEnd) -> str:
    """Return what has happened to a job that may go on."""
    how = "ended by SIGTERM" if end.was_terminated else f"stopped{end.at_step}"
    texts = {
        _EndReason.BUG: f"failed{end.at_step} with exit code {end.code}",
        _EndReason.NODE_FAILURE: f"lost {', '.join(end.lost_nodes)}{end.at_step}",
        _EndReason.OUT_OF_MEMORY: f"killed{end.at_step}, often: out of memory",
        _EndReason.STORAGE: "a file of the run directory could not be used"
        f"{end.at_step}, see above",
    }
    return texts.get(reason, f"{how} ({reason})")


def _find_refusal(
    end: StartEnd, reason: _EndReason, progress_before: Sequence[int | None], policy: RequeuePolicy
) -> str | None:
    """Return why a job whose end is not final is not requeued all the same, None if it is."""
    if policy.mode == "never":
        return "not requeued, because of --requeue never"
    can_resume = end.progress or policy.mode == "failed" or reason is _EndReason.NODE_FAILURE
    if end.was_terminated and not can_resume:
        return f"not requeued, since no file to resume from is known. HINT: {SAVE_HINT}"
    if end.restart >= policy.max_requeues:
        return (
            f"requeued {policy.max_requeues} times already, and not again."
            " HINT: submit --max-requeues"
        )
    max_starts = MAX_STARTS_WITHOUT_PROGRESS
    hint = "a longer --time, or --snapshot-every"
    if reason is _EndReason.OUT_OF_MEMORY:
        max_starts = 1
        hint = "more --mem"
    if _count_without_progress(end, progress_before, reason) >= max_starts:
        return f"not requeued, because nothing new was saved. HINT: {hint}"
    return None


def _count_without_progress(
    end: StartEnd, progress_before: Sequence[int | None], reason: _EndReason
) -> int:
    """Return how many starts in a row, this one last, have not got beyond the start before them."""
    if reason is _EndReason.OUT_OF_MEMORY and not end.progress:
        return 1
    if end.progress is None:
        return 0
    return len(list(takewhile(lambda count: count == end.progress, reversed(progress_before))))


# -- what Slurm and the run directory show ---------------------------------------------------------


def _find_newest_step(job_dir: Path) -> int | None:
    """Return the step of the newest snapshot, None if the folder has no training.

    A script with a Loader has a run directory too, and saves its snapshots elsewhere.
    """
    if not (job_dir / "config.json").exists() or _is_run_of_loader(job_dir):
        return None
    steps = [0]
    for path in (job_dir / "snapshots").glob("step_*"):
        if match := re.fullmatch(r"step_([0-9]{1,16})", path.name):
            steps.append(int(match[1]))
    return max(steps)


def _is_run_of_loader(job_dir: Path) -> bool:
    with suppress(OSError, ValueError, KeyError, TypeError):
        config = parse_json(read_file(job_dir / "config.json"), dict)
        return bool(config["definition"]["recipe"] == LOADER_RECIPE)
    return False


def _count_saves(pattern: str, text: str, before: Sequence[int | None]) -> int | None:
    """Return how many starts of a script, up to this one, have written a file of the pattern.

    Args:
        pattern: As glob has it, with ** for folders below; "" if the files are not known.
        text: What `scontrol show job` has printed.
        before: The count after each earlier start.

    Returns:
        The count, None if the files are not known.
    """
    if not pattern:
        return None
    count = before[-1] or 0 if before else 0
    start = _parse_time(text, "StartTime")
    if start is None:
        return count
    has_saved = False
    for path in iglob(pattern, recursive=True):  # noqa: PTH207 - it takes any text as a pattern
        with suppress(OSError):  # a script may remove old files meanwhile
            has_saved |= Path(path).stat().st_mtime >= start.timestamp()
    return count + has_saved


def _parse_time(text: str, field: str) -> datetime | None:
    """Return a time that `scontrol show job` names, None if it does not."""
    try:
        return datetime.fromisoformat(parse_field(text, field))
    except ValueError:
        return None


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
            # Slurm prints nothing if the node of the batch script has lost power.
            reason = reasons.get(number, "node failure, or requeue")
            end = RequeueRecord(number, reason, True, step=None, code=None, lost=[], time=None)
            ends[number] = {"job": job.job, **asdict(end)}
    return [ends[number] for number in sorted(ends)]


def handle_end(
    job_dir: Path, code: int, margin: float, text: str, policy: RequeuePolicy
) -> _Decision:
    """Decide whether a job is requeued, and add a record of its end.

    Args:
        job_dir: The run directory.
        code: srun's exit code.
        margin: Seconds before the time limit at which Slurm sends its signal.
        text: What `scontrol show job` and `scontrol show node` have printed.
        policy: Which ends are followed by another start.

    Returns:
        The decision.
    """
    start = identify_start()
    recorded = read_end() or read_end(job_dir / END_FILE_NAME) or {}
    earlier = read_job_records(job_dir / REQUEUES_FILE, start["job"], RequeueRecord)
    end_time = _parse_time(text, "EndTime")
    end = StartEnd(
        code,
        ranks_code=recorded.get("code"),
        restart=start["restart"],
        step=_find_newest_step(job_dir),
        saves=_count_saves(policy.resume_from, text, [record.get("saves") for record in earlier]),
        state=parse_field(text, "JobState") or "RUNNING",
        seconds_left=(end_time - datetime.now()).total_seconds() if end_time else None,
        margin=margin,
        preempted=bool(parse_field(text, "PreemptTime")),
        lost_nodes=find_lost_nodes(text),
    )
    progress = "saves" if end.step is None else "step"
    decision = decide(end, [record.get(progress) for record in earlier], policy)
    record: dict[str, Any] = {
        **start,
        "reason": decision.reason,
        "requeued": decision.requeue,
        "step": end.step,
        "saves": end.saves,
        "code": end.code,
        "lost": end.lost_nodes,
        "time": round(time.time(), 1),
        "text": decision.text,
    }
    add_record(job_dir / REQUEUES_FILE, record)
    return decision
