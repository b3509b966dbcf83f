"""`stepladder check SCRIPT`: find silent mistakes of distributed training in any script."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import click

from stepladder.cli.findings import show_finding
from stepladder.cli.options import json_flag
from stepladder.cli.types import COUNT, PATH, Seconds
from stepladder.core.console import echo
from stepladder.core.errors import InputError
from stepladder.core.output_file import validate_writable, write_output
from stepladder.tools.check.check import Report, Request, check
from stepladder.tools.check.formats import json_of_report, sarif_of_report
from stepladder.tools.check.rules.evidence import CHECK_TEXTS
from stepladder.tools.findings.render import count_severities
from stepladder.train.job_source import validate_not_job


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc",
    type=COUNT,
    default=2,
    show_default=True,
    help="Ranks. Half of them simulate a second node.",
)
@click.option(
    "--epochs",
    type=COUNT,
    help="Training passes to watch.  [default: 2, and more within 20 s]",
)
@click.option(
    "--steps",
    type=COUNT,
    help="Optimizer steps per epoch; the epoch ends after them.  [default: all]",
)
@click.option(
    "--resume",
    is_flag=True,
    help="End SCRIPT after its first snapshot, start it again, and compare.",
)
@click.option(
    "--static",
    is_flag=True,
    help="Read the source only, and run nothing.",
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=600.0,
    show_default=True,
    help="Seconds for one run of SCRIPT.",
)
@click.option(
    "--patience",
    type=Seconds(),
    default=25.0,
    show_default=True,
    help="Seconds without progress that count as a hang.",
)
@click.option(
    "--sarif", type=PATH, metavar="FILE", help="Write the findings to FILE too, for code hosts."
)
@click.option(
    "--writes",
    type=PATH,
    multiple=True,
    metavar="DIR",
    help="Let SCRIPT write this folder for real. Repeatable.",
)
@json_flag
@click.argument("script", type=PATH)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    script: Path,
    args: tuple[str, ...],
    nproc: int,
    epochs: int | None,
    steps: int | None,
    resume: bool,
    static: bool,
    timeout: float,
    patience: float,
    sarif: Path | None,
    writes: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Run SCRIPT with ARGS, unmodified, and find its silent mistakes.

    Each finding has its evidence, its line and what to type. SCRIPT runs on CPU ranks, even if it
    is for CUDA and NCCL, in a copy of the working folder; no file outside the copy changes. Exit
    code 1 on an error or a warning; else 3 if SCRIPT failed by itself, if this check cannot run it,
    or if it did not train; else 0. A comment suppresses a finding: # stepladder: ignore[rule]
    reason
    """
    if not script.is_file():
        raise InputError(f"script {script} is not a file", f"ls {script.absolute().parent}")
    validate_not_job(script)
    if sarif:
        validate_writable(sarif, "--sarif")
    request = Request(
        script, args, nproc, steps or 0, epochs or 0, resume, static, timeout, patience
    )
    request = replace(request, writable_folders=writable_folders(writes))
    report = check(request, (lambda _: None) if as_json else show_finding)
    if sarif:
        write_output(
            sarif,
            sarif_of_report(report, version("stepladder")),
            "--sarif",
        )
    if as_json:
        echo(json_of_report(report))
    else:
        show_summary(report)
    return report.exit_code


def writable_folders(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the real paths of the folders of --writes.

    Raises:
        InputError: One is not a folder, or is the root of the file system.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"--writes {folder}: there is no such folder", f"mkdir -p {folder}")
        if folder.resolve() == Path("/"):
            raise InputError("--writes /: that is every file of this machine", "--writes FOLDER")
    return tuple(folder.resolve() for folder in folders)


def show_summary(report: Report) -> None:
    """Print what was not checked, where SCRIPT could write, and the number of findings."""
    if report.not_checked:
        echo(report.not_checked.output)
        echo(report.not_checked.line)
    for note in report.notes:
        echo(note)
    for line in report.isolation.lines() if report.isolation else []:
        echo(line)
    line = f"{count_severities(report.findings)}; {len(CHECK_TEXTS.rules)} rules"
    if report.run_summary:
        line += f"; {report.run_summary}"
    echo(line)
