"""Commands about batch jobs that were submitted: status, logs and cancel; after and note are for batch scripts."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import click

from stepladder.core.errors import InputError
from stepladder.rank.exit_record import note_end
from stepladder.slurm import requeue
from stepladder.slurm.query import ask, look_up, own_jobs, pieces


@click.command()
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
def status(job: str | None, as_json: bool) -> None:
    """Your jobs that wait or run; or one job with its story: where it stopped, why, and if it was requeued."""
    if job is None:
        jobs = own_jobs()
        if as_json:
            click.echo(json.dumps({"schema": 1, "jobs": [known.as_json() for known in jobs]}))
        for known in jobs if not as_json else []:
            click.echo(known.describe())
        if not jobs and not as_json:
            click.echo("no job waits or runs. HINT: stepladder submit -- train mnist")
        return
    known = look_up(job)
    told = known.as_json() | requeue.story(known)
    if as_json:
        click.echo(json.dumps({"schema": 1, **told}))
        return
    click.echo(known.describe())
    for end in told["ends"]:
        at = f" at step {end['step']}" if end["step"] is not None else ""
        when = datetime.fromtimestamp(end["time"]).strftime(" %H:%M:%S") if end["time"] else ""
        by = ", requeued" if end["code"] is not None else ", requeued by Slurm"
        click.echo(f"  start {end['restart'] + 1} ended{when}{at}: {end['reason']}" + by * end["requeued"])
    if told["step"] is not None:
        click.echo(f"  newest snapshot: step {told['step']}, in {known.job_dir}")
    if known.output:
        click.echo(f"  output: {known.output}")


@click.command()
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="And what it prints from now on, also after a requeue.")
def logs(job: str, follow: bool) -> None:
    """What batch job JOB has printed, all its starts one after the other."""
    output = Path(look_up(job).output)
    for piece in pieces(output, (lambda: look_up(job).is_over) if follow else None):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
def cancel(jobs: tuple[str, ...]) -> None:
    """End batch jobs. Slurm sends SIGTERM first, on which a training saves a snapshot; it is not requeued."""
    found = [look_up(job) for job in jobs]
    for known in found:
        if known.is_over:
            raise InputError(
                f"job {known.job} has ended already ({known.state or 'forgotten'})", "stepladder status"
            )
    for known in found:
        ask("scancel", known.job)
        go_on = f"; submitted again, it goes on from its snapshot in {known.job_dir}" if known.job_dir else ""
        click.echo(f"job {known.job}: cancelled{go_on}")


@click.command()
@click.argument("code", type=int)
@click.option("--job-dir", type=click.Path(path_type=Path), required=True)
@click.option("--margin", type=float, default=120.0)
@click.option("--max-requeues", type=int, required=True)
def after(code: int, job_dir: Path, margin: float, max_requeues: int) -> int:
    """Say what the end of a batch job's ranks means: exit code 75 to be requeued, 0 finished, else CODE or 1.

    CODE is srun's exit code; on stdin, what `scontrol show job` and `scontrol show node` say.
    """
    decision = requeue.after(job_dir, code, margin, sys.stdin.read(), max_requeues)
    click.echo(f"stepladder: {decision.text}", err=True)
    return decision.exit_code(code)


@click.command()
@click.argument("code", type=int)
def note(code: int) -> None:
    """Leave a script's own CODE for the batch script, unless another rank has ended before."""
    note_end(code)
