"""A batch job as a frozen value: how it follows from `submit`'s flags and the site's defaults, and
its script.

The files in slurm/ are what `render` makes, a pure function of that value.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from stepladder.core import typed_file
from stepladder.core.errors import InputError, as_input_error
from stepladder.core.folders import find_file_above, get_config_folder, validate_ownership
from stepladder.core.jsonl import read_last_lines
from stepladder.core.masking import split_secrets
from stepladder.core.numbers import parse_whole_number
from stepladder.core.process_count import parse_range
from stepladder.rank.exit_record import END_FILE_NAME
from stepladder.rank.progress import STEP_KEYS
from stepladder.rank.timing import get_timing_rows, is_timing_line

SITE = "stepladder.toml"
DEFAULT_MARGIN = 120
LEAST_MARGIN, SECONDS_TO_NOTICE = 30, 30
MAX_REQUEUES = 50
# nobody can wait there; below the range that Linux gives away itself
PORT = "$((20000 + RANDOM % 12000))"
OF_A_RANK = (
    "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE="
)
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
QUOTED = ("job_dir", "made_by", "setup")


@dataclass(frozen=True, kw_only=True)
class SiteDefaults:
    """What is the same for all jobs of a site or a person, as `stepladder.toml` has it:

        [submit]
        partition = "gpu"
        account = "physics"
        setup = ["module load cuda", "source ~/venv/bin/activate"]
        container = "apptainer exec --nv stepladder.sif"

    setup: lines of the batch script before anything starts.  container: the command that runs
    another inside an image, on each node."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    container: str = ""
    setup: tuple[str, ...] = ()


@dataclass(frozen=True)
class BatchJob(SiteDefaults):
    """A job for Slurm: what the site says of all its jobs, and what is this one's own.

    command: words after `stepladder`, `train ...` or `run ...`, without the number of nodes and
    processes. job_dir: where its stop file is: the run directory of `train`.  nodes: the least and
    the most. nproc: ranks per node, as --nproc has it.  cpus_per_task: of an agent, or of a rank if
    per_rank. margin: seconds before the time limit at which Slurm sends SIGTERM to the ranks.
    per_rank: one task of Slurm per rank, and no agent.  made_by: the command that rendered it.
    join: the number of the job whose lost node it replaces, with one of its own."""

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
    margin: int = DEFAULT_MARGIN
    max_requeues: int = MAX_REQUEUES
    per_rank: bool = False
    made_by: str = ""
    join: str | None = None

    def __post_init__(self) -> None:
        for field in fields(
            self
        ):  # but those that a shell has in quotes, or a comment without them
            value = getattr(self, field.name)
            texts = value if field.name == "sbatch_args" else (value,)
            if field.name not in QUOTED and any(
                isinstance(text, str) and CONTROL.search(text) for text in texts
            ):
                flag = (
                    "--sbatch-arg"
                    if field.name == "sbatch_args"
                    else f"--{field.name.replace('_', '-')}"
                )
                raise InputError(
                    f"{flag} {value!r} holds a line break or a control character",
                    f"{flag} in one line",
                )
        with as_input_error(
            f"--container {self.container} is not a command", "quotes in pairs", (ValueError,)
        ):
            shlex.split(self.container)
        for word in self.sbatch_args:
            if not re.match(r"-\w|--\w", word):
                raise InputError(
                    f"--sbatch-arg {word!r} is not an option of sbatch", "--sbatch-arg=--exclusive"
                )
            if re.match(r"--array\b|-a", word):
                raise InputError(
                    f"--sbatch-arg {word}: an array would have one run directory", "submit each"
                )
        if self.per_rank and self.command[:1] == ("run",) and self.command[1].startswith("-"):
            raise InputError(
                f"{self.command[1]} with --task-per-rank: each task is the script itself",
                "submit without --task-per-rank",
            )
        if self.per_rank and (self.elastic or not self.nproc.isdigit()):
            raise InputError(
                "--task-per-rank with a number of tasks that may change", "--nodes N --nproc N"
            )
        if self.join is not None and not re.fullmatch("[0-9]{1,10}", self.join):
            raise InputError(
                f"--join {self.join!r} is not a job's number", "stepladder status lists them"
            )
        if self.join and not (self.elastic and self.command[0] == "train"):
            raise InputError(
                f"--join {self.join} without --nodes A:B and `train`: only these go on without a node",
                f"the command that submitted job {self.join}, with --join {self.join}",
            )

    @property
    def elastic(self) -> bool:
        return self.nodes[0] < self.nodes[1]

    @property
    def own_nodes(self) -> tuple[int, int]:
        """The least and the most that Slurm gives it."""
        return (1, 1) if self.join else self.nodes


def batch_job(flags: Mapping[str, Any], site: SiteDefaults, **own: Any) -> BatchJob:
    """The job that the flags of `submit` describe. own: fields that follow from elsewhere.

    flags: by field; where one is None the site's default counts, then `own`. Raises InputError.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    gpus = given.get("gpus_per_node", "")
    if gpus and not re.fullmatch(r"([\w.-]+:)?[1-9][0-9]{0,8}", gpus):
        raise InputError(f"--gpus-per-node {gpus} is not [TYPE:]N", "--gpus-per-node 4, or a100:4")
    if not re.fullmatch(
        r"([0-9]{1,15}([KMGT]B?)?)?", mem := given.get("mem", ""), re.IGNORECASE | re.ASCII
    ):
        raise InputError(f"--mem {mem!r} is not an amount of memory", "--mem 64G")
    nproc = given.pop("nproc", None) or gpus.rpartition(":")[2] or "1"
    if nproc not in ("gpu", "cpu", "auto"):
        parse_range("--nproc", nproc)
    if given.get("time"):
        seconds_of(given["time"])
    per_task = 1 if given.get("per_rank") else parse_whole_number(nproc) or 1
    return BatchJob(**{"nproc": nproc, "cpus_per_task": per_task, **own, **asdict(site), **given})


def measured_margin(run_dir: Path, limit: str = "") -> int:
    """Seconds to stop well: twice the longest step and snapshot of an earlier run here, near its
    end, and some to notice. At most a quarter of the time limit, for Slurm sends the signal up to a
    minute early."""
    margin = DEFAULT_MARGIN
    lines = [line for line in read_last_lines(run_dir / "timing.jsonl") if is_timing_line(line)]
    if lines:
        rows = [(row, line["steps"]) for line in lines for row in get_timing_rows(line).values()]
        step = max(sum(row[: len(STEP_KEYS)]) / steps for row, steps in rows)
        margin = math.ceil(SECONDS_TO_NOTICE + 2 * step + 2 * max(row[-1] for row, _ in rows))
    most = seconds_of(limit) / 4 if limit else math.inf
    return max(LEAST_MARGIN, int(min(margin, most)))


def seconds_of(text: str) -> float:
    """Slurm's way to write a time: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS. Raises
    InputError.
    """
    if text.lower() in ("infinite", "unlimited", "n/a"):
        return math.inf
    if not re.fullmatch(r"([0-9]{1,9}-)?[0-9]{1,9}(:[0-9]{1,9}){0,2}", text):
        raise InputError(
            f"--time {text!r} is not a time limit", "--time 30 (minutes), 2:00:00, 1-12:00:00"
        )
    days, _, rest = text.rpartition("-")
    numbers = list(map(int, rest.split(":")))
    if days:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *numbers, 0], 2: [0, *numbers]}.get(len(numbers), numbers)
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds


# -- its batch script ------------------------------------------------------------------------------
#
# `job.sbatch` starts one agent per node (or one task per rank), and afterwards asks `stepladder after` what the
# end of the ranks means. It writes the number of nodes once; everything else reads it from Slurm.


def render(job: BatchJob) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # late: 50 ms

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"quote": shlex.quote, "one_line": partial(CONTROL.sub, "?")}
    kind, *rest = job.command
    return environment.get_template("job.sbatch").render(
        job=job,
        kind=kind,
        words=" ".join(word for word, _ in words_and_secrets(rest)),
        directives=[quote(word) for word in directives(job)],
        container=f"{job.container} " if job.container else "",
        end_file=end_file(job),
        port=PORT,
        nodes=nodes_flag(job),
        who=f"{OF_A_RANK}{job.nproc}",
    )


def nodes_flag(job: BatchJob) -> str:
    """The value of --nodes for the agents, as the shell has it."""
    if job.join:
        return f"{job.nodes[0]}:{job.nodes[1]}"
    return f'{job.nodes[0]}:"$SLURM_JOB_NUM_NODES"' if job.elastic else '"$SLURM_JOB_NUM_NODES"'


def words_and_secrets(words: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Each word as the script has it, and the environment that it needs: secrets stand in no
    script.
    """
    for number, word in enumerate(split_secrets(words)):
        if word.secret:
            variable = f"STEPLADDER_ARG_{number}_{re.sub(r'[^A-Z0-9]+', '_', word.name.upper()).strip('_')}"
            shown = shlex.quote(word.prefix) if word.prefix else ""
            yield f'{shown}"${{{variable}:?is not set}}"', {variable: word.secret}
        else:
            yield shlex.quote(word.prefix), {}


def secrets_of(job: BatchJob) -> dict[str, str]:
    """What the environment of `sbatch` must hold, which hands it on to the job."""
    return {
        name: value for _, env in words_and_secrets(job.command[1:]) for name, value in env.items()
    }


def end_file(job: BatchJob) -> str:
    """Where the ranks leave their word. A run directory is one job's; of a script, several may run
    at once.
    """
    if job.command[0] == "train":
        return shlex.quote(f"{job.job_dir}/{END_FILE_NAME}")
    return f"{shlex.quote(job.job_dir)}/ended-$SLURM_JOB_ID.json"


def directives(job: BatchJob) -> list[str]:
    """The options that sbatch reads."""
    least, most = job.own_nodes
    tasks = (
        job.nproc if job.per_rank else "" if least < most else "1"
    )  # with a range, Slurm would take the least
    options = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "reservation": job.reservation,
        "nodes": f"{least}-{most}" if least < most else str(least),
        "ntasks-per-node": tasks,
        "cpus-per-task": str(job.cpus_per_task),
        "gpus-per-node": job.gpus_per_node,
        "mem": job.mem,
        "time": job.time,
        "output": job.output,
        "open-mode": "append",
        "signal": f"TERM@{job.margin}",
    }
    words = [f"--{name}={value}" for name, value in options.items() if value]
    requeue = "--no-requeue" if job.join else "--requeue"
    return [*words, requeue, *(["--no-kill"] if least < most else []), *job.sbatch_args]


def quote(word: str) -> str:
    """One word of an #SBATCH line: quoted as a shell has it, but for backslashes, which escape
    there too.
    """
    return shlex.quote(word.replace("\\", "\\\\"))


# -- what is the same for all jobs of a site or a person: stepladder.toml --------------------------


def find_site() -> SiteDefaults:
    """From the first file found in the current folder, those above it, or the user's own
    configuration.
    """
    own = get_config_folder() / "config.toml"
    found = find_file_above(SITE)
    if found is None and own.is_file():
        validate_ownership(own)
        found = own
    return read_site(found) if found else SiteDefaults()


def read_site(path: Path) -> SiteDefaults:
    """Raises InputError on an unknown key or a value of the wrong kind."""
    hint = 'a table [submit] with lines like partition = "gpu"; setup = ["module load cuda"]'
    with as_input_error(f"{path} cannot be used", hint, (OSError, ValueError)):
        whole = typed_file.read_toml(path)
        table = typed_file.convert(whole.pop("submit", {}), dict[str, Any], "submit")
        known = {field.name for field in fields(SiteDefaults)}
        if unknown := [*whole, *(table.keys() - known)]:
            raise InputError(
                f"{path}: {unknown[0]} is unknown", f"under [submit]: {', '.join(sorted(known))}"
            )
        site: SiteDefaults = typed_file.convert(table, SiteDefaults, "submit")
    return site
