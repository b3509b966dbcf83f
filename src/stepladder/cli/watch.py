"""stepladder watch RUN_DIR|JOB: a run's progress, live."""

from __future__ import annotations

import click


@click.command(short_help="Follow a run, or a batch job, in the terminal.")
@click.argument("target", metavar="RUN_DIR|JOB")
@click.option("--once", is_flag=True, help="One look, instead of following.")
def command(target: str, once: bool) -> int:
    """Show position, loss, throughput and slow ranks of the run of RUN_DIR until it has finished.

    JOB: the number of a batch job; also whether it waits, and until it is over. Of a
    script the last line that it printed, and under `stepladder run --run-dir` its optimizer steps.
    """
    from rich.console import Console

    from stepladder.tools.report.live import watch

    watch(target, once, Console())
    return 0
