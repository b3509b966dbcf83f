"""Commands about batch jobs: submit, status, logs and cancel; after and note are for batch scripts."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from stepladder.cli.rehearsal import Rehearsal
from stepladder.cli.types import COUNT, PATH, Seconds, Whole
from stepladder.core.console import echo, make_log_printable
from stepladder.core.errors import InputError
from stepladder.core.masking import mask_command
from stepladder.core.output_file import validate_writable
from stepladder.core.paths import parse_path
from stepladder.core.process_count import parse_range
from stepladder.rank.exit_record import write_end
from stepladder.slurm import client, requeue, submitted_jobs
from stepladder.slurm.batch_job import MAX_REQUEUES, make_batch_job, measure_margin
from stepladder.slurm.batch_script import render_batch_script
from stepladder.slurm.partitions import (
    describe_cluster_defaults,
    find_job_warnings,
    list_partitions,
    validate_job_fits,
    validate_joinable,
    validate_node_names,
)
from stepladder.slurm.site_defaults import find_site_defaults
from stepladder.train.job_source import validate_not_job

OURS = (
    "--nodes",
    "--nproc",
    "--rdzv-endpoint",
)  # flags of `train` and `run` that follow from submit's own


@click.command(context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- train ...|SCRIPT ...")
@click.option(
    "--nodes",
    default="1",
    metavar="N|A:B",
    help="Number of nodes. A:B starts with B, and continues with as few as A.  [default: 1]",
)
@click.option(
    "--nproc", metavar="N|gpu|cpu|auto", help="Processes per node.  [default: its GPUs, or 1]"
)
@click.option("--gpus-per-node", default="", metavar="[TYPE:]N", help="For example 4, or a100:4.")
@click.option("--cpus-per-task", type=COUNT, metavar="N", help="CPUs per node.  [default: --nproc]")
@click.option("--mem", default="", help="Memory per node, for example 64G.")
@click.option(
    "--time", "time", default="", metavar="T", help="Time limit: minutes, H:MM:SS or D-HH:MM:SS."
)
@click.option(
    "--partition",
    metavar="P",
    help="Slurm partition.  [default: stepladder.toml's, or the cluster's]",
)
@click.option("--account", metavar="A", help="Slurm account that pays for the job.")
@click.option("--qos", metavar="Q", help="Slurm quality of service.")
@click.option("--constraint", metavar="C", help="Features that the nodes must have.")
@click.option("--reservation", metavar="R", help="Reservation to run in.")
@click.option(
    "--container",
    metavar="CMD",
    help='Command that starts the container, for example "apptainer exec --nv stepladder.sif".',
)
@click.option("--name", metavar="S", help="Name of the job.  [default: of the recipe or script]")
@click.option(
    "--output",
    default="slurm-%j.out",
    metavar="FILE",
    show_default=True,
    help="File for what the job prints.",
)
@click.option(
    "--sbatch-arg", "sbatch_args", multiple=True, metavar="STR", help="Any other option of sbatch."
)
@click.option(
    "--task-per-rank",
    "per_rank",
    is_flag=True,
    help="Start one Slurm task per process, without our agent on each node.",
)
@click.option(
    "--join",
    metavar="JOB",
    help="Submit one node that takes the place of a node which JOB has lost. The rest is JOB's own command.",
)
@click.option(
    "--max-requeues",
    type=Whole(),
    default=MAX_REQUEUES,
    show_default=True,
    help="How often to requeue the job.",
)
@click.option(
    "--rehearse",
    is_flag=True,
    help="Run SCRIPT here first through `stepladder check`: 2 ranks, 3 steps an epoch, pretended GPUs if the job "
    "asks for some. On an error, a warning or a failure nothing is submitted: exit code 1.",
)
@click.option(
    "--writes",
    type=PATH,
    multiple=True,
    metavar="DIR",
    help="With --rehearse: let SCRIPT write this folder for real. Repeatable.",
)
@click.option("--dry-run", is_flag=True, help="Print the batch script and submit nothing.")
@click.option(
    "--lint",
    type=PATH,
    metavar="FILE",
    help="Check this batch script for mistakes and submit nothing.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on the last line of stdout."
)
def submit(
    words: tuple[str, ...],
    rehearse: bool,
    writes: tuple[Path, ...],
    dry_run: bool,
    lint: Path | None,
    as_json: bool,
    **flags: Any,
) -> int:
    """Submit a training job, or any script, to Slurm: it is started on each node, warned before its
    time limit, requeued from its snapshot, and not requeued for a bug.

    Checks before that the cluster has a place for it. Defaults for partition, account and set-up
    lines are read from stepladder.toml, in this folder or above."""
    if lint is not None:
        return show_findings(lint, as_json)
    kind, rest, job_dir, name = what_to_run(words)
    if writes and not rehearse:
        raise InputError(
            "--writes without --rehearse: only a rehearsal keeps files as they are", "--rehearse"
        )
    rehearsal = Rehearsal.of(kind, rest, bool(flags["gpus_per_node"]), writes) if rehearse else None
    nodes = parse_range("--nodes", flags.pop("nodes"))
    job = make_batch_job(
        flags,
        find_site_defaults(),
        command=(kind, *rest),
        job_dir=str(job_dir),
        nodes=nodes,
        name=name,
        margin=measure_margin(job_dir, flags["time"]),
        made_by=mask_command(["stepladder", *sys.argv[1:]]),
    )
    output = Path(job.output)
    if not output.is_absolute() and "%" not in str(
        output.parent
    ):  # without a log Slurm ends the job, in silence
        validate_writable(output, "--output")
    if dry_run:
        echo(render_batch_script(job), end="")
        return 0
    cluster = list_partitions()
    validate_job_fits(job, cluster)
    validate_node_names(job)
    validate_joinable(job)
    if rehearsal and not rehearsal.passes(as_json):
        return 1
    others = submitted_jobs.find_jobs_in(job_dir) if kind == "train" and not job.join else []
    taken = (
        [f"{job_dir} is also the run directory of job {', '.join(others)}: they take turns"]
        if others
        else []
    )
    asked = [name for name, value in flags.items() if value is not None]
    for sentence in describe_cluster_defaults(job, cluster, asked):
        echo(f"stepladder: {sentence}", err=True)
    for doubt in [*find_job_warnings(job), *taken]:
        echo(f"warning: {doubt}", err=True)
    number = submitted_jobs.submit(job)
    if as_json:
        echo(json.dumps({"schema": 1, "job_id": int(number)}))
    else:
        echo(f"job {number}: {job.name}; its output: stepladder logs -f {number}")
    return 0


def what_to_run(words: Sequence[str]) -> tuple[str, list[str], Path, str]:
    """`train` or `run`, its words, the folder of the job's state, and its name."""
    if not words:
        raise InputError("there is nothing to run", "stepladder submit --nodes 2 -- train mnist")
    if words[0] not in ("train", "run"):
        if not parse_path("script", words[0]).is_file() or words[0].startswith("-"):
            raise InputError(
                f"script {words[0]!r} does not exist", "-- SCRIPT.py, or -- train mnist"
            )
        words = ("run", *words)
    kind, *rest = words
    # Read as it will be read, so that a mistake is found before the job waits.
    command = importlib.import_module(f"stepladder.cli.{kind}").command
    context = command.make_context(f"stepladder {kind}", list(rest))
    refuse_ours(context)
    given = context.params
    what: Path = command.job if kind == "train" else Path(given["script"])
    if kind == "run" and not what.is_file() and not given["module"] and not given["no_python"]:
        raise InputError(f"script {given['script']!r} does not exist", "-- run [FLAGS] SCRIPT.py")
    if kind == "run" and what.is_file() and not given["no_python"]:
        validate_not_job(what, "stepladder submit -- train")
    return kind, rest, given["run_dir"] or Path("runs") / what.stem, what.stem


def refuse_ours(context: click.Context) -> None:
    for parameter in context.command.params:
        flag = next((name for name in parameter.opts if name in OURS), None)
        if (
            flag
            and context.get_parameter_source(parameter.name or "") == ParameterSource.COMMANDLINE
        ):
            own = f"submit {flag} N -- {(context.info_name or '').split()[-1]}"
            hint = "the port follows from the job's number" if flag == "--rdzv-endpoint" else own
            raise InputError(f"{flag} stands after `--`, and is a flag of submit", hint)


def show_findings(path: Path, as_json: bool) -> int:
    """Exit code 1 where there is any."""
    from stepladder.slurm.lint import lint_script

    findings = lint_script(path)
    if as_json:
        found = [{"file": str(path), **asdict(finding)} for finding in findings]
        echo(json.dumps({"schema": 1, "findings": found}))
    else:
        for finding in findings:
            echo(f"{path}:{finding.line}: {finding.evidence}. HINT: {finding.fix}")
        echo(f"{len(findings)} found" if findings else "nothing found")
    return int(bool(findings))


@click.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def status(job: str | None, as_json: bool) -> None:
    """Show your jobs that wait or run, or one job with its story: where and why it stopped or was
    requeued.
    """
    if job is None:
        jobs = submitted_jobs.list_user_jobs()
        if as_json:
            echo(json.dumps({"schema": 1, "jobs": [known.as_json() for known in jobs]}))
        for known in jobs if not as_json else []:
            echo(known.describe())
        if not jobs and not as_json:
            echo("no job waits or runs. HINT: stepladder submit -- train mnist")
        return
    known = submitted_jobs.find_job(job)
    told = known.as_json() | requeue.describe_history(known)
    if as_json:
        echo(json.dumps({"schema": 1, **told}))
        return
    echo(known.describe())
    for end in told["ends"]:
        at = f" at step {end['step']}" if end["step"] is not None else ""
        when = datetime.fromtimestamp(end["time"]).strftime(" %H:%M:%S") if end["time"] else ""
        by = ", requeued" if end["code"] is not None else ", requeued by Slurm"
        echo(
            f"  start {end['restart'] + 1} ended{when}{at}: {end['reason']}" + by * end["requeued"]
        )
    if told["step"] is not None:
        echo(f"  newest snapshot: step {told['step']}, in {known.job_dir}")
    if known.output:
        echo(f"  output: {known.output}")


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="Follow the output, also after a requeue.")
def logs(job: str, follow: bool) -> None:
    """Show what batch job JOB has printed, all its starts one after the other."""
    known = submitted_jobs.find_job(job)
    if not known.output:
        raise InputError(
            f"job {job} has no output file", "it is shown where `srun` or `salloc` was typed"
        )
    for piece in submitted_jobs.read_output(
        Path(known.output), (lambda: submitted_jobs.find_job(job).is_over) if follow else None
    ):
        sys.stdout.buffer.write(make_log_printable(piece) if sys.stdout.isatty() else piece)
        sys.stdout.buffer.flush()


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
def cancel(jobs: tuple[str, ...]) -> None:
    """Cancel batch jobs. Slurm sends SIGTERM first, on which a training saves a snapshot; it is not
    requeued.
    """
    found = [submitted_jobs.find_job(job) for job in jobs]
    for known in found:
        if known.is_over:
            raise InputError(
                f"job {known.job} has ended already ({known.state or 'forgotten'})",
                "stepladder status",
            )
    for known in found:
        client.run_slurm("scancel", known.job)
        go_on = (
            f"; submitted again, it goes on from its snapshot in {known.job_dir}"
            if known.job_dir
            else ""
        )
        echo(f"job {known.job}: cancelled{go_on}")


@click.command()
@click.argument("code", type=Whole(most=255))
@click.option("--job-dir", type=PATH, required=True)
@click.option("--margin", type=Seconds(0), default=120.0)
@click.option("--max-requeues", type=Whole(), required=True)
def after(code: int, job_dir: Path, margin: float, max_requeues: int) -> int:
    """Say what the end of a batch job's ranks means: exit code 75 to be requeued, 0 finished, else
    CODE or 1.

    CODE is srun's exit code; on stdin, what `scontrol show job` and `scontrol show node` say.
    """
    decision = requeue.handle_end(job_dir, code, margin, sys.stdin.read(), max_requeues)
    echo(f"stepladder: {decision.text}", err=True)
    return decision.exit_code(code)


@click.command()
@click.argument("code", type=Whole(most=255))
def note(code: int) -> None:
    """Leave a script's own CODE for the batch script, unless another rank has ended before."""
    write_end(code)
