"""Commands for batch jobs: submit, status, logs, cancel; and after and note, for batch scripts."""

from __future__ import annotations

import sys
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import click

from stepladder.cli.explain import print_matches, read_lines
from stepladder.cli.flags import make_command, make_field_options
from stepladder.cli.rehearsal import Rehearsal
from stepladder.cli.submitted_command import SubmittedCommand, parse_submitted_command
from stepladder.cli.types import AsJson, Count, Natural, SbatchArgs, Seconds, WholeNumber, Words
from stepladder.core.console import echo, echo_json, make_log_printable
from stepladder.core.errors import InputError
from stepladder.core.masking import mask_command
from stepladder.core.numbers import format_count
from stepladder.core.output_file import validate_writable
from stepladder.core.process_count import parse_range
from stepladder.launcher.batch import jobs
from stepladder.launcher.batch.cluster import Cluster, open_cluster
from stepladder.rank.exit_record import write_end
from stepladder.slurm.batch_job import MAX_REQUEUES, BatchJob, make_batch_job, measure_margin
from stepladder.slurm.requeue import (
    FINAL_REASONS,
    RequeueMode,
    RequeuePolicy,
    describe_history,
    handle_end,
)
from stepladder.slurm.site_defaults import find_site_defaults
from stepladder.slurm.submitted_jobs import JobInfo

LINT_RECORD_KEYS = {
    "file": "location.file",
    "rule": "rule",
    "line": "location.line",
    "evidence": "evidence",
    "fix": "fix",
}
ExitCode = Annotated[int, WholeNumber(largest=255)]


class _SubmitFlags:
    """Flags of `submit` that describe the job, by the names of BatchJob's fields.

    Args:
        nproc (N|gpu|cpu|auto): Processes per node.  [default: the GPUs of a node, or 1]
        gpus_per_node ([TYPE:]N): For example 4, or a100:4.
        cpus_per_task (N): CPUs per node.  [default: --nproc]
        mem: Memory per node, for example 64G.
        time (T): Time limit: minutes, H:MM:SS or D-HH:MM:SS.
        partition (P): Slurm partition.  [default: from stepladder.toml, or the cluster's]
        account (A): Slurm account that pays for the job.
        qos (Q): Slurm quality of service.
        constraint (C): Features that the nodes must have.
        reservation (R): Reservation to run in.
        container (CMD): Command that starts the container, for example "apptainer exec --nv
            stepladder.sif".
        name (S): Name of the job.  [default: name of the recipe or script]
        output (FILE): File for what the job prints.
        per_rank: Start one Slurm task per process, without an agent on each node.
        join (JOB): Submit one node that replaces a node which JOB has lost. Type JOB's own command
            after it.
        max_requeues: How often to requeue the job.
        requeue: After which ends to requeue it: never; preempted: what the cluster has caused, such
            as a preemption, the time limit or a lost node; failed: a failure of the job too.
        resume_from (PATTERN): Files from which SCRIPT resumes, such as 'ckpt/**/*.pt'. If it has
            written one, the job is requeued even if SIGTERM has ended it.
    """

    nproc: str | None = None
    gpus_per_node: str | None = None
    cpus_per_task: Count | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    container: str | None = None
    name: str | None = None
    output: str = "slurm-%j.out"
    sbatch_args: SbatchArgs = ()
    per_rank: Annotated[bool, "--task-per-rank"] = False
    join: str | None = None
    max_requeues: Natural = MAX_REQUEUES
    requeue: RequeueMode = "preempted"
    resume_from: str | None = None


@make_command(
    click.Command,
    *make_field_options(_SubmitFlags),
    context_settings={"allow_interspersed_args": False},
)
def submit(
    words: Words = (),
    *,
    nodes: str = "1",
    rehearse: bool = False,
    writes: tuple[Path, ...] = (),
    dry_run: bool = False,
    lint: Path | None = None,
    as_json: AsJson = False,
    **flags: Any,
) -> int:
    """Submit a training job, or any script, to Slurm.

    The job is started on each node, stopped with a snapshot before its time limit, and requeued to
    continue from it, but not after a bug. First it is checked that the cluster can run it. Defaults
    for partition, account and set-up lines come from stepladder.toml in this folder or above.

    Args:
        words (-- train ...|SCRIPT ...): The command to submit.
        nodes (N|A:B): Number of nodes. A:B starts with B, and continues with as few as A.
        rehearse: First run SCRIPT here through `stepladder check`: 2 ranks, 3 steps per epoch,
            simulated GPUs if the job asks for GPUs. On an error, a warning or a failure nothing is
            submitted: exit code 1.
        writes (DIR): With --rehearse: let SCRIPT write this folder for real. Repeatable.
        dry_run: Print the batch script and submit nothing.
        lint (FILE): Check this batch script for mistakes and submit nothing.
    """
    if lint is not None:
        return _show_findings(lint, as_json)
    command = parse_submitted_command(words)
    if writes and not rehearse:
        raise InputError(
            "--writes without --rehearse: only a rehearsal keeps files as they are", "--rehearse"
        )
    job = _make_job(command, nodes, flags)
    rehearsal = _make_rehearsal(command, job, writes) if rehearse else None
    _validate_output(Path(job.output))
    cluster = open_cluster(job.cluster)
    if dry_run:
        echo(cluster.render(job), end="")
        return 0
    typed_flags = [name for name, value in flags.items() if value is not None]
    advice = cluster.validate(job, typed_flags)
    jobs.validate_joinable(cluster, job)
    if rehearsal and not rehearsal.passes_check(as_json):
        return 1
    for line in [*advice, *_find_shared_run_dir(cluster, command, job)]:
        echo(line, err=True)
    _show_submitted(jobs.submit(cluster, job), job.name, as_json)
    return 0


def _show_submitted(number: str, name: str, as_json: bool) -> None:
    """Print the number of a job that was submitted."""
    if as_json:
        job_id = int(number) if number.isdigit() else number
        echo_json({"job_id": job_id})
    else:
        echo(f"job {number}: {name}; its output: stepladder logs -f {number}")


def _make_rehearsal(
    command: SubmittedCommand, job: BatchJob, writes: tuple[Path, ...]
) -> Rehearsal:
    """Return the rehearsal of the job's script on this machine."""
    has_ranks = job.nodes[1] > 1 or job.nproc != "1"
    return Rehearsal.from_command(
        command.kind, command.arguments, bool(job.gpus_per_node), writes, has_ranks
    )


def _make_job(command: SubmittedCommand, nodes: str, flags: dict[str, Any]) -> BatchJob:
    """Return the batch job that runs the command."""
    return make_batch_job(
        flags,
        find_site_defaults(),
        command=(command.kind, *command.arguments),
        job_dir=str(command.job_dir),
        nodes=parse_range("--nodes", nodes),
        name=command.name,
        margin=measure_margin(command.job_dir, flags["time"]),
        made_by=mask_command(["stepladder", *sys.argv[1:]]),
    )


def _validate_output(output: Path) -> None:
    """Raise InputError where the log cannot be written: Slurm would end the job without a message.

    A folder with Slurm's patterns is not checked.
    """
    if "%" not in str(output.parent):
        validate_writable(output, "--output")


def _find_shared_run_dir(cluster: Cluster, command: SubmittedCommand, job: BatchJob) -> list[str]:
    """Return a warning if other jobs train in the same run directory."""
    if command.kind != "train" or job.join:
        return []
    run_dir = command.job_dir
    sharing = ", ".join(jobs.find_jobs_in(cluster, run_dir))
    if not sharing:
        return []
    return [f"warning: {run_dir} is also the run directory of job {sharing}: they take turns"]


def _show_findings(path: Path, as_json: bool) -> int:
    """Print the mistakes in a batch script, and return exit code 1 if there are any."""
    from stepladder.tools.findings.render import as_record
    from stepladder.tools.lint.lint import lint_script

    findings = lint_script(path)
    if as_json:
        records = [as_record(finding, LINT_RECORD_KEYS) for finding in findings]
        echo_json({"findings": records})
    else:
        for finding in findings:
            echo(f"{finding.location}: {finding.evidence}. HINT: {finding.fix}")
        echo(f"{len(findings)} found" if findings else "nothing found")
    return int(bool(findings))


@make_command()
def status(job: str | None = None, *, as_json: AsJson = False) -> None:
    """Show your jobs that wait or run, or the history of one job, also of a finished one.

    The history says where and why the job stopped or was requeued.
    """
    if job is None:
        _show_own_jobs(as_json)
        return
    known = jobs.find_job(open_cluster(), job)
    history = known.as_json() | describe_history(known)
    if as_json:
        echo_json(history)
        return
    echo(known.describe())
    for end in history["ends"]:
        echo(_format_end(end))
    if requeues := Counter(end["reason"] for end in history["ends"] if end["requeued"]):
        reasons = ", ".join(f"{reason} {count}" for reason, count in requeues.items())
        echo(f"  requeued {format_count(requeues.total(), 'time')}: {reasons}")
    if history["step"] is not None:
        echo(f"  newest snapshot: step {history['step']}, in {known.job_dir}")
    if known.output:
        echo(f"  output: {known.output}")
    _explain_failure(known)


def _show_own_jobs(as_json: bool) -> None:
    """Print the user's jobs that wait or run."""
    active_jobs = jobs.list_user_jobs(open_cluster())
    if as_json:
        echo_json({"jobs": [job.as_json() for job in active_jobs]})
        return
    for job in active_jobs:
        echo(job.describe())
    if not active_jobs:
        last = jobs.find_last_job()
        hint = f"stepladder status {last}" if last else "stepladder submit -- train mnist"
        echo(f"no job waits or runs. HINT: {hint}")


def _format_end(end: dict[str, Any]) -> str:
    """Return a line about the end of one start of a job."""
    line = f"  start {end['restart'] + 1} ended"
    if end["time"]:
        line += datetime.fromtimestamp(end["time"]).strftime(" %H:%M:%S")
    if end["step"] is not None:
        line += f" at step {end['step']}"
    line += f": {end['reason']}"
    text = end.get("text")  # an older version wrote none
    if text and not end["requeued"] and end["reason"] not in FINAL_REASONS:
        line += f"; {text}"
    if end["requeued"]:
        line += ", requeued" if end["code"] is not None else ", requeued by Slurm"
    return line


def _explain_failure(job: JobInfo, err: bool = False) -> None:
    """Print what `explain` says of the output of a failed job that could not record its end."""
    from stepladder.tools.explain.explain import explain

    has_failed = job.state in ("FAILED", "")
    ends = describe_history(job)["ends"]
    if has_failed and len(ends) <= job.restarts and Path(job.output).is_file():
        print_matches(explain(read_lines(job.output)), err)


@make_command()
def logs(job: str, *, follow: Annotated[bool, "-f", "--follow"] = False) -> None:
    """Show what batch job JOB has printed, all its starts one after the other.

    Args:
        follow: Follow the output, also after a requeue.
    """
    cluster = open_cluster()
    known = jobs.find_job(cluster, job)
    if not known.output:
        raise InputError(
            f"job {job} has no output file", "it is shown where `srun` or `salloc` was typed"
        )

    def is_over() -> bool:
        return jobs.find_job(cluster, job).is_over

    waits = follow or known.is_over
    for piece in jobs.read_output(Path(known.output), is_over if waits else None):
        sys.stdout.buffer.write(make_log_printable(piece) if sys.stdout.isatty() else piece)
        sys.stdout.buffer.flush()
    known = jobs.find_job(cluster, job)
    if not Path(known.output).exists():
        raise InputError(
            f"{known.describe()}; its output {known.output} is not there", "another --output"
        )
    _explain_failure(known, err=True)


@make_command()
def cancel(job_ids: tuple[str, ...]) -> None:
    """Cancel batch jobs.

    Slurm first sends SIGTERM, on which a training saves a snapshot. The job is not requeued.

    Args:
        job_ids (JOB...): Numbers of batch jobs.
    """
    cluster = open_cluster()
    known_jobs = [jobs.find_job(cluster, job_id) for job_id in job_ids]
    for known in known_jobs:
        if known.is_over:
            raise InputError(
                f"job {known.job} has ended already ({known.state or 'forgotten'})",
                "stepladder status",
            )
    for known in known_jobs:
        cluster.cancel([known.job])
        line = f"job {known.job}: cancelled"
        if known.job_dir:
            line += f"; submitted again, it continues from its snapshot in {known.job_dir}"
        echo(line)


@make_command()
def after(
    code: ExitCode,
    *,
    job_dir: Path,
    margin: Annotated[float, Seconds(0)] = 120,
    max_requeues: Natural,
    mode: Annotated[RequeueMode, "--requeue"] = "preempted",
    resume_from: str = "",
) -> int:
    """Decide what the end of a batch job's ranks means.

    Exit code 75: requeue the job; 0: it has finished; else CODE or 1. CODE is srun's exit code.
    stdin is the output of `scontrol show job` and `scontrol show node`.
    """
    policy = RequeuePolicy(max_requeues, mode, resume_from)
    decision = handle_end(job_dir, code, margin, sys.stdin.read(), policy)
    echo(f"stepladder: {decision.text}", err=True)
    return decision.exit_code(code)


@make_command()
def note(code: ExitCode) -> None:
    """Record the exit CODE of a script for the batch script, unless another rank ended earlier."""
    write_end(code)
