"""`stepladder note CODE`: a script's own exit code as its word, where no launcher stands between it and Slurm."""

from __future__ import annotations

import click

from stepladder.rank.exit_record import note_end


@click.command(hidden=True)
@click.argument("code", type=int)
def command(code: int) -> None:
    """Leave CODE for the batch script, unless another rank has ended before."""
    note_end(code)
