"""stepladder check SCRIPT: silent mistakes of distributed training, found in anybody's script."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import click

from stepladder.cli.doctor import COLOURS
from stepladder.cli.options import json_flag
from stepladder.cli.types import COUNT, PATH, Seconds
from stepladder.core.console import echo
from stepladder.core.errors import InputError
from stepladder.core.output_file import validate_writable, write_output
from stepladder.tools.check.check import Report, Request, check
from stepladder.tools.check.finding import Fault, texts
from stepladder.tools.check.output import as_json as json_text
from stepladder.tools.check.output import as_sarif, lines_of
from stepladder.train.job_source import validate_not_job


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nproc",
    type=COUNT,
    default=2,
    show_default=True,
    help="Ranks. Half of them play a second node.",
)
@click.option(
    "--epochs",
    type=COUNT,
    help="Training passes to watch.  [default: 2, and more while within 20 s]",
)
@click.option(
    "--steps",
    type=COUNT,
    help="Optimizer steps per epoch; the epoch is then cut short.  [default: all]",
)
@click.option(
    "--resume", is_flag=True, help="End it after its first snapshot, start it again, and compare."
)
@click.option("--static", is_flag=True, help="Read the source only, and run nothing.")
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
    help="Seconds in which nothing moves: a hang.",
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
    """Run SCRIPT with ARGS, unmodified, and find its silent mistakes: evidence, line, and what to
    type.

    It runs on CPU ranks, also a script for CUDA and NCCL, in a copy of the working folder; no file
    outside the copy changes. Exit code 1 on an error or a warning; else 3 if the script failed by
    itself, if this check cannot run it, or if no training was seen; else 0. A comment takes a
    finding back: # stepladder: ignore[rule] reason"""
    if not script.is_file():
        raise InputError(f"script {script} is not a file", f"ls {script.absolute().parent}")
    validate_not_job(script)
    if sarif:
        validate_writable(sarif, "--sarif")
    request = Request(
        script, args, nproc, steps or 0, epochs or 0, resume, static, timeout, patience
    )
    request = replace(request, writes=writable_folders(writes))
    report = check(request, (lambda _: None) if as_json else show)
    if sarif:
        write_output(sarif, as_sarif(report, version("stepladder")), "--sarif")
    if as_json:
        echo(json_text(report))
    else:
        summarise(report)
    return report.code


def writable_folders(folders: tuple[Path, ...]) -> tuple[Path, ...]:
    """Return the real paths of --writes. Raises InputError where one is no folder, or is
    everything.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"--writes {folder}: there is no such folder", f"mkdir -p {folder}")
        if folder.resolve() == Path("/"):
            raise InputError("--writes /: that is every file of this machine", "--writes FOLDER")
    return tuple(folder.resolve() for folder in folders)


def show(fault: Fault) -> None:
    head, below = lines_of(fault)
    click.secho(fault.severity, fg=COLOURS[fault.severity], nl=False)
    echo(head)
    echo(below)


def summarise(report: Report) -> None:
    if report.not_checked:
        echo(report.not_checked.output)
        echo(report.not_checked.line)
    for note in report.notes:
        echo(note)
    for line in report.isolation.lines() if report.isolation else []:
        echo(line)
    counts = ", ".join(
        f"{sum(f.severity == kind for f in report.faults)} {kind}s" for kind in COLOURS
    )
    echo(f"{counts}; {len(texts())} rules" + f"; {report.ran}" * bool(report.ran))
