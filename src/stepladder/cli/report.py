"""stepladder report RUN_DIR: one page that tells a run's story."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(short_help="A page with a run's curves, ranks, restarts and ledger.")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True)
def command(run_dir: Path, output: Path) -> int:
    """Write one self-contained page about the run of RUN_DIR, finished or not: open it in any browser.

    A script has one under `stepladder run --run-dir`; its curves and samples are its own.
    """
    from stepladder.tools.report.report import write_report

    write_report(run_dir, output)
    click.echo(f"written: {output}")
    return 0
