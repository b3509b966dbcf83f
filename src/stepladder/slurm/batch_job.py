"""A batch job as a frozen value, made of the flags of `submit` and the defaults of the site."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError, as_input_error
from stepladder.core.jsonl import read_last_lines
from stepladder.core.numbers import parse_whole_number
from stepladder.core.process_count import parse_range
from stepladder.rank.progress import STEP_KEYS
from stepladder.rank.timing import get_timing_rows, is_timing_line
from stepladder.slurm.requeue import RequeueMode
from stepladder.slurm.site_defaults import SiteDefaults

DEFAULT_MARGIN_S = 120
MIN_MARGIN_S = 30
STOP_NOTICE_S = 30  # until all ranks have noticed that they are to stop
MAX_REQUEUES = 50
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
# Fields that the batch script has in quotes, or without control characters in a comment.
QUOTED_FIELDS = ("job_dir", "made_by", "setup")
# Options of sbatch that `submit` sets itself; those with a letter begin with it.
OWN_OPTIONS = (
    "a array, J job-name, p partition, A account, q qos, C constraint, N nodes, n ntasks, t time,"
    " c cpus-per-task, o output, k no-kill, reservation, ntasks-per-node, gpus-per-node,"
    " gpus-per-task, mem, open-mode, signal, requeue, no-requeue"
)
OWN_OPTIONS_HINT = (
    "leave it out; submit has --nodes, --nproc, --gpus-per-node, --time, --max-requeues and more"
    " for it, sends SIGTERM in time, and is typed once for each job of an array"
)
# --name=value or --name value; -Nvalue, after letters that take no value.
SBATCH_SPELLING = re.compile(r"--([^=\s]+)|-[HOQWhsuv]*(\w)")
TIME_LIMIT = re.compile(r"([0-9]{1,9}-)?[0-9]{1,9}(:[0-9]{1,9}){0,2}")


@dataclass(frozen=True)
class BatchJob(SiteDefaults):
    """A job for Slurm: the defaults of the site, and the fields of this job.

    Args:
        command: Arguments of `stepladder`, `train ...` or `run ...`, without the number of nodes
            and processes.
        job_dir: Folder of the stop file; of `train`, the run directory.
        name: Name of the job.
        nodes: Minimum and maximum number of nodes.
        nproc: Ranks per node, as --nproc has it.
        cpus_per_task: Processors of an agent, or of a rank with `per_rank`.
        gpus_per_node: As of sbatch, like the next four.
        mem: As of sbatch.
        time: As of sbatch.
        output: As of sbatch.
        sbatch_args: Further options of sbatch.
        margin: Seconds before the time limit at which Slurm sends SIGTERM to the ranks.
        max_requeues: How often the job is requeued at most.
        requeue: After which ends it is: see `RequeuePolicy`, like the next one.
        resume_from: A pattern of the files from which a script resumes.
        per_rank: Whether each rank is a task of Slurm, without agents.
        made_by: The command that has made this job.
        join: Number of the job whose lost node this job replaces.
    """

    command: tuple[str, ...]
    job_dir: str
    name: str
    nodes: tuple[int, int] = (1, 1)
    nproc: str = "1"
    cpus_per_task: int = 1
    gpus_per_node: str = ""
    mem: str = ""
    time: str = ""
    output: str = "slurm-%j.out"
    sbatch_args: tuple[str, ...] = ()
    margin: int = DEFAULT_MARGIN_S
    max_requeues: int = MAX_REQUEUES
    requeue: RequeueMode = "preempted"
    resume_from: str = ""
    per_rank: bool = False
    made_by: str = ""
    join: str | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in QUOTED_FIELDS:
                _validate_one_line(field.name, getattr(self, field.name))
        quotes_message = f"--container {self.container} is not a command"
        with as_input_error(quotes_message, "quotes in pairs", (ValueError,)):
            shlex.split(self.container)
        for option in self.sbatch_args:
            _validate_sbatch_option(option)
        if self.per_rank:
            self._validate_per_rank()
        if self.resume_from and self.command[0] == "train":
            raise InputError(
                f"--resume-from {self.resume_from!r} with `train`, which knows its snapshots",
                "submit without --resume-from",
            )
        if self.join is not None:
            self._validate_join(self.join)

    def _validate_per_rank(self) -> None:
        if self.command[:1] == ("run",) and self.command[1].startswith("-"):
            raise InputError(
                f"{self.command[1]} with --task-per-rank: each task is the script itself",
                "submit without --task-per-rank",
            )
        if self.is_elastic or not self.nproc.isdigit():
            raise InputError(
                "--task-per-rank with a number of tasks that may change", "--nodes N --nproc N"
            )

    def _validate_join(self, job: str) -> None:
        if not re.fullmatch("[0-9]{1,10}", job):
            raise InputError(
                f"--join {job!r} is not a job's number", "stepladder status lists them"
            )
        if not (self.is_elastic and self.command[0] == "train"):
            raise InputError(
                f"--join {job} without --nodes A:B and `train`: only these go on without a node",
                f"the command that submitted job {job}, with --join {job}",
            )

    @property
    def is_elastic(self) -> bool:
        """Whether the job may go on with fewer nodes."""
        return self.nodes[0] < self.nodes[1]

    @property
    def requested_nodes(self) -> tuple[int, int]:
        """The minimum and the maximum number of nodes that Slurm gives to this job."""
        return (1, 1) if self.join else self.nodes


def _validate_one_line(name: str, value: Any) -> None:
    """Raise InputError if a field's text has a line break: it would be a line of the script."""
    flag = f"--{name.replace('_', '-')}"
    texts = (value,)
    if name == "sbatch_args":
        flag = "--sbatch-arg"
        texts = value
    if any(isinstance(text, str) and CONTROL_CHARACTER.search(text) for text in texts):
        raise InputError(
            f"{flag} {value!r} holds a line break or a control character", f"{flag} in one line"
        )


def _validate_sbatch_option(option: str) -> None:
    if not re.match(r"-\w|--\w", option):
        raise InputError(
            f"--sbatch-arg {option!r} is not an option of sbatch", "--sbatch-arg=--exclusive"
        )


def _validate_free_option(option: str) -> None:
    """Raise InputError for an option of sbatch that `submit` sets itself, in any spelling."""
    match = SBATCH_SPELLING.match(option)
    if match is None:
        return
    typed = match[1] or match[2]
    for spellings in OWN_OPTIONS.split(", "):
        letter, _, name = spellings.rpartition(" ")
        # sbatch accepts the beginning of a name.
        if typed == letter or (len(typed) > 1 and name.startswith(typed)):
            raise InputError(
                f"--sbatch-arg {option}: submit sets --{name} itself", OWN_OPTIONS_HINT
            )


def make_batch_job(flags: Mapping[str, Any], site: SiteDefaults, **computed: Any) -> BatchJob:
    """Return the job that the flags of `submit` describe.

    Args:
        flags: Values by field, None for flags that were not given.
        site: The site's defaults, for these.
        **computed: Values that follow from elsewhere; a flag replaces them.

    Returns:
        The job.

    Raises:
        InputError: If a flag's value is not valid.
    """
    typed_values = {name: value for name, value in flags.items() if value is not None}
    for option in typed_values.get("sbatch_args", ()):
        _validate_free_option(option)
    for name, value in typed_values.items():
        if value == "":
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} is empty", f"{flag} VALUE, or no {flag}")
    gpus = typed_values.get("gpus_per_node", "")
    if gpus and not re.fullmatch(r"([\w.-]+:)?[1-9][0-9]{0,8}", gpus):
        raise InputError(f"--gpus-per-node {gpus} is not [TYPE:]N", "--gpus-per-node 4, or a100:4")
    memory = typed_values.get("mem", "")
    if not re.fullmatch(r"([0-9]{1,15}([KMGT]B?)?)?", memory, re.IGNORECASE | re.ASCII):
        raise InputError(f"--mem {memory!r} is not an amount of memory", "--mem 64G")
    gpu_count = gpus.rpartition(":")[2]
    nproc = typed_values.pop("nproc", None) or gpu_count or "1"
    if nproc not in ("gpu", "cpu", "auto"):
        parse_range("--nproc", nproc)
    if typed_values.get("time"):
        parse_time_limit(typed_values["time"])
    cpus_per_task = 1 if typed_values.get("per_rank") else parse_whole_number(nproc) or 1
    defaults = {"nproc": nproc, "cpus_per_task": cpus_per_task}
    return BatchJob(**{**defaults, **computed, **asdict(site), **typed_values})


def measure_margin(run_dir: Path, limit: str = "") -> int:
    """Return how many seconds before the time limit a run must be told to stop.

    Enough for two of the longest steps and snapshots near the end of an earlier run there, but at
    most a quarter of the time limit, because Slurm may send the signal a minute early.

    Args:
        run_dir: The run directory; there may be none.
        limit: The time limit, as sbatch has it.
    """
    margin = DEFAULT_MARGIN_S
    lines = [line for line in read_last_lines(run_dir / "timing.jsonl") if is_timing_line(line)]
    if lines:
        step_times = []
        snapshot_times = []
        for line in lines:
            for row in get_timing_rows(line).values():
                step_times.append(sum(row[: len(STEP_KEYS)]) / line["steps"])
                snapshot_times.append(row[-1])
        margin = math.ceil(STOP_NOTICE_S + 2 * max(step_times) + 2 * max(snapshot_times))
    if limit:
        margin = int(min(margin, parse_time_limit(limit) / 4))
    return max(MIN_MARGIN_S, margin)


def parse_time_limit(text: str) -> float:
    """Return the seconds of a time limit, math.inf for none.

    Args:
        text: As Slurm has it: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.

    Returns:
        The seconds.

    Raises:
        InputError: If it is not a time limit.
    """
    if text.lower() in ("infinite", "unlimited", "n/a"):
        return math.inf
    if not TIME_LIMIT.fullmatch(text):
        raise InputError(
            f"--time {text!r} is not a time limit", "--time 30 (minutes), 2:00:00, 1-12:00:00"
        )
    days, _, clock = text.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    if days:  # D-HH:MM:SS
        numbers = [*numbers, 0, 0][:3]
    elif len(numbers) == 1:  # MM
        numbers = [0, *numbers, 0]
    elif len(numbers) == 2:  # MM:SS
        numbers = [0, *numbers]
    hours, minutes, seconds = numbers
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
