"""`stepladder logs JOB`: what a batch job has printed."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stepladder.slurm.query import look_up, pieces


@click.command(short_help="What a batch job has printed.")
@click.argument("job")
@click.option("-f", "--follow", is_flag=True, help="And what it prints from now on, also after a requeue.")
def command(job: str, follow: bool) -> None:
    """What batch job JOB has printed, all its starts one after the other."""
    output = Path(look_up(job).output)
    for piece in pieces(output, (lambda: look_up(job).is_over) if follow else None):
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
