"""A batch script for Slurm, as a pure function of a frozen value. The files in slurm/ are its output.

The script, `job.sbatch`, starts one agent per node (or one task per rank), and afterwards asks `stepladder after`
what the end of the ranks means. It writes the number of nodes once; everything else reads it from Slurm.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from stepladder.rank.exit_record import NAME
from stepladder.slurm.job import CONTROL, BatchJob

PORT = "$((20000 + SLURM_JOB_ID % 12000))"  # per job, below the range that Linux gives away itself
OF_A_RANK = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE="


def render(job: BatchJob) -> str:
    """The batch script."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # late: 50 ms

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"quote": shlex.quote, "one_line": one_line}
    kind, *rest = job.command
    return environment.get_template("job.sbatch").render(
        job=job, kind=kind, words=shlex.join(rest), directives=[quote(word) for word in directives(job)],
        container=f"{job.container} " if job.container else "", end_file=end_file(job), port=PORT,
        nodes=f'{job.nodes[0]}:"$SLURM_JOB_NUM_NODES"' if job.elastic else '"$SLURM_JOB_NUM_NODES"',
        who=f"{OF_A_RANK}{job.nproc}",
    )  # fmt: skip


def end_file(job: BatchJob) -> str:
    """Where the ranks leave their word. A run directory is one job's; of a script, several may run at once."""
    if job.command[0] == "train":
        return shlex.quote(f"{job.job_dir}/{NAME}")
    return f"{shlex.quote(job.job_dir)}/ended-$SLURM_JOB_ID.json"


def directives(job: BatchJob) -> list[str]:
    """The options that sbatch reads."""
    least, most = job.nodes
    tasks = job.nproc if job.per_rank else "" if job.elastic else "1"  # with a range, Slurm would take the least
    options = {
        "job-name": job.name, "partition": job.partition, "account": job.account, "qos": job.qos,
        "constraint": job.constraint, "reservation": job.reservation,
        "nodes": f"{least}-{most}" if job.elastic else str(least),
        "ntasks-per-node": tasks, "cpus-per-task": str(job.cpus_per_task),
        "gpus-per-node": job.gpus_per_node, "mem": job.mem, "time": job.time, "output": job.output,
        "open-mode": "append", "signal": f"TERM@{job.margin}",
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items() if value]
    return [*words, "--requeue", *(["--no-kill"] if job.elastic else []), *job.sbatch_args]


def quote(word: str) -> str:
    """One word of an #SBATCH line: quoted as a shell has it, but for backslashes, which escape there too."""
    return shlex.quote(word.replace("\\", "\\\\"))


def one_line(text: str) -> str:
    """Harmless in a comment."""
    return CONTROL.sub("?", text)
