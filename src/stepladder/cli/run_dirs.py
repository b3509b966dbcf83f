"""`audit`, `diff`, `watch` and `report`: commands that inspect a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import click

from stepladder.cli.flags import make_command
from stepladder.cli.options import TRACEBACK_FLAG, announce_job_file, print_tables
from stepladder.cli.types import AsJson, PathName, TrustJobFile
from stepladder.core.console import echo, echo_json, print_message
from stepladder.core.errors import InputError
from stepladder.core.numbers import format_count
from stepladder.core.terminal import make_console

MAX_CHANGES_SHOWN = 20  # a run on a bad machine may have lost processes thousands of times
DIFF_TABLE_WIDTH = 115


@make_command()
def audit(run_dir: Path, *, as_json: AsJson = False) -> int:
    """Prove from the ledger of RUN_DIR that every sample was trained exactly once per epoch.

    Exit code 1 if samples were lost or repeated, or if the ledger was altered.
    """
    from stepladder.storage import audit as audits

    result = audits.audit(run_dir)
    if as_json:
        echo_json(result.as_json())
        return int(not result.ok)
    for epoch in result.epochs:
        echo(
            f"epoch {epoch.epoch + 1}: lost {epoch.lost}, repeated {epoch.repeated},"
            f" never seen {epoch.never_seen}"
        )
    for problem in result.problems:
        echo(f"problem: {problem}")
    for change in result.history[:MAX_CHANGES_SHOWN]:
        echo(f"attempt {change.attempt}, {change.sentence}")
    counts = [format_count(result.attempts, "attempt")]
    if result.changes:
        counts.append(f"{format_count(result.changes, 'change')} of processes")
    counts.append(f"{format_count(result.superseded, 'step')} superseded")
    verdict = "ok" if result.ok else "NOT ok"
    echo(f"{verdict}: lost {result.lost}, repeated {result.repeated} ({', '.join(counts)})")
    return int(not result.ok)


@make_command(click.Command, TRACEBACK_FLAG)
def diff(
    first: Path, second: Path, *, trust_job_file: TrustJobFile = False, as_json: AsJson = False
) -> int:
    """Find the first step at which two runs differ, and why.

    It compares settings, versions, losses, learning rates, samples and snapshots, in all steps that
    both have. If these do not explain the difference, it retrains both runs up to that step on one
    process, and prints what differs first: data, an operation, a gradient or the optimizer. Runs
    with --sync exact are compared bit by bit, losses of others to 1e-5. Exit code 1 if something
    differs.

    Args:
        first (RUN_DIR): A run directory.
        second (RUN_DIR): A run directory.
    """
    from stepladder.tools.diff.compare import compare
    from stepladder.tools.diff.verdict import make_table
    from stepladder.train.job_file import load_stored_job

    def validate_job_file(run_dir: Path) -> None:
        announce_job_file(
            load_stored_job(run_dir)[0], run_dir, trust_job_file, f"diff {first} {second}"
        )

    verdict = compare(first, second, validate_job_file, print_message)
    if as_json:
        echo_json(verdict.to_json())
    else:
        if verdict.values:
            print_tables([make_table(verdict)], DIFF_TABLE_WIDTH)
        echo(verdict.sentence)
    return int(verdict.step is not None)


@make_command()
def watch(target: PathName, *, once: bool = False) -> None:
    """Show position, loss, throughput and slow ranks of the run in RUN_DIR until it has finished.

    JOB is the number of a batch job; its state in the queue is shown, too. For a script it shows
    the last line of the output and, with `stepladder run --run-dir`, the optimizer steps.

    Args:
        target (RUN_DIR|JOB): A run directory, or the number of a batch job.
        once: Print once and end, instead of following the run.
    """
    from stepladder.tools.report import live

    live.watch(target, once, make_console())


@make_command()
def report(
    run_dirs: tuple[Path, ...], *, output: Annotated[Path | None, "-o", "--output"] = None
) -> None:
    """Write one self-contained page about the run in RUN_DIR, which any browser opens.

    The run may still be training. RUN_DIR may also be a folder of `stepladder run --run-dir`; the
    page of a script has no curves and no samples. With several RUN_DIR, the page compares them:
    their curves, what differs in settings and versions, and the first step that differs.

    Args:
        run_dirs (RUN_DIR...): Run directories; the others are compared with the first.
        output: Where to write; without it report.html in this folder, in place of an earlier page.
    """
    if output is None:
        output = Path("report.html")
        if output.exists() and not output.is_file():  # a FIFO would be waited for
            raise InputError(f"{output} is there already, and is no file", "-o FILE")
    if len(run_dirs) == 1:
        from stepladder.tools.report.report import write_report

        write_report(run_dirs[0], output)
    else:
        from stepladder.tools.diff.comparison_page import write_comparison

        write_comparison(run_dirs, output)
    echo(f"written: {output}")
