"""`stepladder check SCRIPT`: find silent mistakes of distributed training in any script."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from stepladder.cli.findings import show_finding
from stepladder.cli.flags import make_command
from stepladder.cli.types import AsJson, Count, Wait, Words
from stepladder.core.console import echo
from stepladder.core.errors import InputError
from stepladder.core.output_file import validate_writable, write_output
from stepladder.tools.check.check import Report, Request, check
from stepladder.tools.check.formats import json_of_report, sarif_of_report
from stepladder.tools.check.rules.evidence import CHECK_TEXTS
from stepladder.tools.findings.render import count_severities
from stepladder.train.job_source import validate_not_job


@make_command(context_settings={"allow_interspersed_args": False})
def command(
    script: Path,
    args: Words = (),
    *,
    nproc: Count = 2,
    epochs: Count | None = None,
    steps: Count | None = None,
    resume: bool = False,
    static: bool = False,
    timeout: Wait = 600,
    patience: Wait = 25,
    notes: bool = False,
    sarif: Path | None = None,
    writes: tuple[Path, ...] = (),
    as_json: AsJson = False,
) -> int:
    """Run SCRIPT with ARGS, unmodified, and find its silent mistakes.

    Each finding has its evidence, its line and what to type. SCRIPT runs on CPU ranks, even if it
    is for CUDA and NCCL, in a copy of the working folder; no file outside the copy changes. Exit
    code 1 on an error or a warning; else 3 if SCRIPT failed by itself, if this check cannot run it,
    or if it did not train; else 0. A comment suppresses a finding: # stepladder: ignore[rule]
    reason

    Args:
        nproc: Ranks. Half of them simulate a second node.
        epochs: Training passes to watch.  [default: 2, and more within 20 s]
        steps: Optimizer steps per epoch; the epoch ends after them.  [default: all]
        resume: End SCRIPT after its first snapshot, start it again, and compare.
        static: Read the source only, and run nothing.
        timeout: Seconds for one run of SCRIPT.
        patience: Seconds without progress that count as a hang.
        notes: Also show notes that many sound scripts get, such as a batch that is fixed per rank.
        sarif (FILE): Write the findings to FILE too, for code hosts.
        writes (DIR): Let SCRIPT write this folder for real. Repeatable.
    """
    if not script.is_file():
        raise InputError(f"script {script} is not a file", f"ls {script.absolute().parent}")
    validate_not_job(script)
    if sarif:
        validate_writable(sarif, "--sarif")
    request = Request(
        script, args, nproc, steps or 0, epochs or 0, resume, static, timeout, patience
    )
    request = replace(request, writable_folders=writable_folders(writes), shows_notes=notes)
    report = check(request, (lambda _: None) if as_json else show_finding)
    if sarif:
        write_output(sarif, sarif_of_report(report, version("stepladder")), "--sarif")
    show_report(report, as_json)
    return report.exit_code


def show_report(report: Report, as_json: bool) -> None:
    """Print all of a report as JSON, or its summary."""
    if as_json:
        echo(json_of_report(report))
    else:
        show_summary(report)


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
