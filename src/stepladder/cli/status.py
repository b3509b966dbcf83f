"""`stepladder status [JOB]`: what becomes of batch jobs."""

from __future__ import annotations

import json
from datetime import datetime

import click

from stepladder.slurm.query import look_up, own_jobs
from stepladder.slurm.requeue import story


@click.command(short_help="What becomes of batch jobs.")
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
def command(job: str | None, as_json: bool) -> None:
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
    told = known.as_json() | story(known)
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
