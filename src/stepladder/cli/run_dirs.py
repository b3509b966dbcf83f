"""`audit`, `diff`, `watch` and `report`: commands that inspect a run directory."""

from __future__ import annotations

import json
from pathlib import Path

import click

from stepladder.cli.options import (
    json_flag,
    name_job_file,
    print_tables,
    traceback_flag,
    trust_flag,
)
from stepladder.cli.types import NAME, PATH
from stepladder.core.console import echo, print_message
from stepladder.core.terminal import make_console

MOST_SHOWN = 20  # changes of processes, of which a run on a bad machine may have thousands


@click.command()
@click.argument("run_dir", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def audit(run_dir: Path, as_json: bool) -> int:
    """Prove from the ledger of RUN_DIR that every sample was trained exactly once per epoch.

    Exit code 1 if samples were lost or repeated, or if the ledger was altered.
    """
    from stepladder.storage import audit as audits

    found = audits.audit(run_dir)
    if as_json:
        echo(json.dumps(found.as_json()))
        return int(not found.ok)
    for epoch in found.epochs:
        echo(
            f"epoch {epoch.epoch + 1}: lost {epoch.lost}, repeated {epoch.repeated}, never seen {epoch.never_seen}"
        )
    for problem in found.problems:
        echo(f"problem: {problem}")
    for change in found.history[:MOST_SHOWN]:
        echo(f"attempt {change.attempt}, {change.sentence}")
    changes = (
        f", {found.changes} change{'s' * (found.changes != 1)} of processes"
        if found.changes
        else ""
    )
    echo(
        f"{'ok' if found.ok else 'NOT ok'}: lost {found.lost}, repeated {found.repeated}"
        f" ({found.attempts} attempt{'s' * (found.attempts != 1)}{changes}, {found.superseded} steps superseded)"
    )
    return int(not found.ok)


@click.command()
@click.argument("first", metavar="RUN_DIR", type=PATH)
@click.argument("second", metavar="RUN_DIR", type=PATH)
@trust_flag
@traceback_flag
@json_flag
def diff(first: Path, second: Path, trust_job_file: bool, as_json: bool) -> int:
    """Find the first step at which two runs differ, and why.

    Compares settings, versions, losses, learning rates, samples and snapshots. Where these do not
    say why, it trains both runs again up to that step, on one process, and names what differs
    first: data, an operation, a gradient, the optimizer. Of runs with --sync exact every bit
    counts, of others losses to 1e-5. Exit code 1 if something differs."""
    from stepladder.tools.diff.compare import compare
    from stepladder.tools.diff.verdict import table_of
    from stepladder.train.job_file import load_stored_job

    def may_run(run_dir: Path) -> None:
        name_job_file(
            load_stored_job(run_dir)[0], run_dir, trust_job_file, f"diff {first} {second}"
        )

    found = compare(first, second, may_run, print_message)
    if as_json:
        echo(json.dumps(found.as_json()))
    else:
        if found.records:
            print_tables([table_of(found)], 115)
        echo(found.sentence)
    return int(found.step is not None)


@click.command()
@click.argument("target", metavar="RUN_DIR|JOB", type=NAME)
@click.option("--once", is_flag=True, help="Print once and end, instead of following the run.")
def watch(target: str, once: bool) -> None:
    """Show position, loss, throughput and slow ranks of the run of RUN_DIR until it has finished.

    JOB: the number of a batch job; also whether it waits, and until it is over. Of a
    script the last line that it printed, and under `stepladder run --run-dir` its optimizer steps.
    """
    from stepladder.tools.report import live

    live.watch(target, once, make_console())


@click.command()
@click.argument("run_dir", type=PATH)
@click.option("-o", "--output", type=PATH, default=Path("report.html"), show_default=True)
def report(run_dir: Path, output: Path) -> None:
    """Write one self-contained page about the run of RUN_DIR, finished or not: open it in any
    browser.

    A script has one under `stepladder run --run-dir`; its curves and samples are its own.
    """
    from stepladder.tools.report.report import write_report

    write_report(run_dir, output)
    echo(f"written: {output}")
