"""`stepladder after CODE`: called by a batch script when its ranks have ended. Not in the list of commands."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stepladder.slurm.requeue import after


@click.command(hidden=True)
@click.argument("code", type=int)
@click.option("--job-dir", type=click.Path(path_type=Path), required=True)
@click.option("--margin", type=float, default=120.0)
@click.option("--max-requeues", type=int, required=True)
def command(code: int, job_dir: Path, margin: float, max_requeues: int) -> int:
    """Say what the end of a batch job's ranks means: exit code 75 to be requeued, 0 finished, else CODE or 1.

    CODE is srun's exit code; on stdin, what `scontrol show job` and `scontrol show node` say.
    """
    decision = after(job_dir, code, margin, sys.stdin.read(), max_requeues)
    click.echo(f"stepladder: {decision.text}", err=True)
    return decision.exit_code(code)
