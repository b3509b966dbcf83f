"""`stepladder cancel JOB`: end a batch job, with a snapshot if there is time."""

from __future__ import annotations

import click

from stepladder.core.errors import InputError
from stepladder.slurm.query import ask, look_up


@click.command(short_help="End a batch job.")
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
def command(jobs: tuple[str, ...]) -> None:
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
