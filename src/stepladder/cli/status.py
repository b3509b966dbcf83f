"""`stepladder status [JOB]`: what becomes of batch jobs."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from stepladder.slurm.requeue import ended_by_slurm, history, newest_step
from stepladder.slurm.submit import Known, look_up, own_jobs


@click.command(short_help="What becomes of batch jobs.")
@click.argument("job", required=False)
@click.option("--json", "as_json", is_flag=True, help="One object on stdout.")
def command(job: str | None, as_json: bool) -> None:
    """Your jobs that wait or run; or one job with its story: where it stopped, why, and if it was requeued."""
    if job is None:
        jobs = own_jobs()
        if as_json:
            click.echo(json.dumps({"schema": 1, "jobs": [facts(known) for known in jobs]}))
        for known in jobs if not as_json else []:
            click.echo(known.describe())
        if not jobs and not as_json:
            click.echo("no job waits or runs. HINT: stepladder submit -- train mnist")
        return
    known = look_up(job)
    told = facts(known) | story(known)
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


def facts(known: Known) -> dict[str, Any]:
    return {
        "job_id": int(known.job) if known.job.isdigit() else known.job, "name": known.name, "state": known.state,
        "reason": known.reason, "nodes": known.nodes,
    }  # fmt: skip


def story(known: Known) -> dict[str, Any]:
    """What the run directory tells of this job."""
    folder = Path(known.job_dir) if known.job_dir else None
    ends = history(folder, known.job) if folder else []
    return {
        "restarts": known.restarts, "output": known.output, "run_dir": known.job_dir,
        "step": newest_step(folder) if folder else None, "ends": with_slurms(ends, known) if folder else [],
    }  # fmt: skip


def with_slurms(ends: list[dict[str, Any]], known: Known) -> list[dict[str, Any]]:
    """And the starts that have no line, for Slurm ended the batch script with them."""
    told = {end["restart"]: end for end in ends}
    if missing := set(range(max([known.restarts, *told]))) - told.keys():
        reasons = ended_by_slurm(Path(known.output))
        for number in missing:  # no word from a node without power, on which the batch script was
            told[number] = {
                "job": known.job, "restart": number, "reason": reasons.get(number, "node failure, or requeue"),
                "requeued": True, "step": None, "code": None, "lost": [], "time": None,
            }  # fmt: skip
    return [told[number] for number in sorted(told)]
