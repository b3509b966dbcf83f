"""The batch script of a job, as a pure function of the job.

The template `job.sbatch` starts one agent per node (or one task per rank), and afterwards runs
`stepladder after`, which decides whether the job is requeued. The script contains the number of
nodes once; everything else reads it from Slurm. The files in slurm/ are examples of its output.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from stepladder.core.extras import import_extra
from stepladder.core.masking import split_secrets
from stepladder.rank.exit_record import END_FILE_NAME
from stepladder.slurm.batch_job import CONTROL_CHARACTER, BatchJob

# Random, so that nobody can listen there before the job; below the range that Linux assigns itself.
RANDOM_PORT = "$((20000 + RANDOM % 12000))"
RANK_VARIABLES = (
    "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE="
)


def render_batch_script(job: BatchJob) -> str:
    """Return the batch script of a job.

    Raises:
        InputError: jinja2 is not installed, which torch brings.
    """
    jinja2 = import_extra("jinja2", "a batch script needs jinja2", "report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = {"quote": shlex.quote, "one_line": partial(CONTROL_CHARACTER.sub, "?")}
    environment.filters.update(filters)
    kind, *arguments = job.command
    script: str = environment.get_template("job.sbatch").render(
        job=job,
        kind=kind,
        arguments=" ".join(argument for argument, _ in _quote_arguments(arguments)),
        options=[_quote_option(option) for option in list_options(job)],
        container=f"{job.container} " if job.container else "",
        end_file=_format_end_file(job),
        port=RANDOM_PORT,
        nodes=_format_nodes(job),
        rank_variables=f"{RANK_VARIABLES}{job.nproc}",
    )
    return script


def _format_nodes(job: BatchJob) -> str:
    """Return the value of the agents' flag --nodes, as shell code."""
    min_nodes, max_nodes = job.nodes
    if job.join:
        return f"{min_nodes}:{max_nodes}"
    if job.is_elastic:
        return f'{min_nodes}:"$SLURM_JOB_NUM_NODES"'
    return '"$SLURM_JOB_NUM_NODES"'


def _quote_arguments(arguments: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each argument as shell code, with the environment variable that it needs.

    A secret is in no script: the script reads it from a variable.
    """
    for number, argument in enumerate(split_secrets(arguments)):
        if argument.secret:
            name = re.sub(r"[^A-Z0-9]+", "_", argument.name.upper()).strip("_")
            variable = f"STEPLADDER_ARG_{number}_{name}"
            visible = shlex.quote(argument.prefix) if argument.prefix else ""
            yield f'{visible}"${{{variable}:?is not set}}"', {variable: argument.secret}
        else:
            yield shlex.quote(argument.prefix), {}


def collect_secrets(job: BatchJob) -> dict[str, str]:
    """Return the variables that sbatch must have, and hands on to the job."""
    secrets: dict[str, str] = {}
    for _, variables in _quote_arguments(job.command[1:]):
        secrets |= variables
    return secrets


def _format_end_file(job: BatchJob) -> str:
    """Return the path, as shell code, of the file in which the ranks record how they ended.

    A training's run directory is used by one job at a time; a script's folder may be by several.
    """
    if job.command[0] == "train":
        return shlex.quote(f"{job.job_dir}/{END_FILE_NAME}")
    return f"{shlex.quote(job.job_dir)}/ended-$SLURM_JOB_ID.json"


def list_options(job: BatchJob) -> list[str]:
    """Return the options of the #SBATCH lines."""
    min_nodes, max_nodes = job.requested_nodes
    is_range = min_nodes < max_nodes
    tasks_per_node = "1"
    if job.per_rank:
        tasks_per_node = job.nproc
    elif is_range:
        tasks_per_node = ""  # Slurm would take the minimum
    options = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "constraint": job.constraint,
        "reservation": job.reservation,
        "nodes": f"{min_nodes}-{max_nodes}" if is_range else str(min_nodes),
        "ntasks-per-node": tasks_per_node,
        "cpus-per-task": str(job.cpus_per_task),
        "gpus-per-node": job.gpus_per_node,
        "mem": job.mem,
        "time": job.time,
        "output": job.output,
        "open-mode": "append",
        "signal": f"TERM@{job.margin}",
    }
    texts = [f"--{name}={value}" for name, value in options.items() if value]
    is_requeued = job.requeue != "never" and not job.join
    texts.append("--requeue" if is_requeued else "--no-requeue")
    if is_range:
        texts.append("--no-kill")
    return [*texts, *job.sbatch_args]


def _quote_option(option: str) -> str:
    """Return an option as an #SBATCH line has it: quoted as in a shell, backslashes doubled."""
    return shlex.quote(option.replace("\\", "\\\\"))
