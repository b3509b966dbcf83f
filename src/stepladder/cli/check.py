"""`stepladder check SCRIPT`: find silent mistakes of distributed training in any script."""

from __future__ import annotations

import shlex
import signal
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import click

from stepladder.cli.findings import show_finding, tell_finding
from stepladder.cli.flags import make_command, make_field_options
from stepladder.cli.suggest import tell_misplaced_flags
from stepladder.cli.types import AsJson, Count, Wait, Words
from stepladder.core.console import echo
from stepladder.core.errors import InputError
from stepladder.core.output_file import validate_writable, write_output
from stepladder.tools.check.check import Report, Request, check
from stepladder.tools.check.formats import json_of_report, sarif_of_report
from stepladder.tools.check.rules.evidence import CHECK_TEXTS
from stepladder.tools.findings.render import count_severities
from stepladder.tools.lint.lint import find_warning_signal
from stepladder.train.job_source import validate_is_script

MAX_SHOWN_FINDINGS = 12


@dataclass(frozen=True)
class CheckFlags:
    """The flags of `stepladder check`.

    Args:
        nproc: Ranks. Half of them simulate a second node.
        epochs: Training passes to watch.  [default: 2, and more within 20 s]
        steps: Optimizer steps per epoch; the epoch ends after them.  [default: all]
        resume: End SCRIPT after its first snapshot, start it again, and compare.
        resume_args (ARGS): Do --resume, with more arguments for the start that resumes.
        preempt (N): Interrupt SCRIPT at N moments as a cluster does it, and start it again twice.
        signal: The warning signal of --preempt, 20 s before SIGKILL.  [default: that of a batch
            script beside SCRIPT that names it, else TERM]
        gpus: Simulate GPUs from the first start on: torch.cuda.is_available() is True.
        root (DIR): Copy this folder, which holds the working folder.  [default: the working folder,
            or the Git repository if the script needs more]
        static: Read the source only, and run nothing.
        timeout: Seconds for one run of SCRIPT.
        patience: Seconds without progress that count as a hang. A rank that sleeps or computes is
            waited for, up to --timeout.
        notes: Also show notes that many sound scripts get.
        sarif (FILE): Write the findings to FILE too, for code hosts.
        writes (DIR): Let SCRIPT write this folder for real. Repeatable.
        unsafe: Run SCRIPT also where no kernel keeps files outside the copy as they are.
    """

    nproc: Count = 2
    epochs: Count | None = None
    steps: Count | None = None
    resume: bool = False
    resume_args: str = ""
    preempt: Count | None = None
    signal: Literal["TERM", "USR1"] | None = None
    gpus: bool = False
    root: Path | None = None
    static: bool = False
    timeout: Wait = 600
    patience: Wait = 25
    notes: bool = False
    sarif: Path | None = None
    writes: tuple[Path, ...] = ()
    unsafe: bool = False
    as_json: AsJson = False


@make_command(
    click.Command,
    *make_field_options(CheckFlags),
    context_settings={"allow_interspersed_args": False},
)
def command(script: Path, args: Words = (), **values: Any) -> int:
    """Run SCRIPT with ARGS, unmodified, and find its silent mistakes.

    Each finding has its evidence, its line and what to type. SCRIPT runs on CPU ranks, even if it
    is for CUDA and NCCL, in a copy of the working folder; no file outside the copy changes. Exit
    code 1 on an error or a warning; else 3 if SCRIPT failed by itself, if this check cannot run it,
    if it did not train, or if --resume saw no resume; else 0. A comment suppresses a finding:
    # stepladder: ignore[rule] reason
    """
    flags = CheckFlags(**values)
    validate_script(script, args)
    if flags.sarif:
        validate_writable(flags.sarif, "--sarif", b"sarif")
    request = make_request(script, args, flags)
    report = check(request, (lambda _: None) if flags.as_json else tell_finding)
    if flags.sarif:
        write_output(flags.sarif, sarif_of_report(report, version("stepladder")), "--sarif")
    show_report(report, flags.as_json)
    return report.exit_code


def validate_script(script: Path, args: tuple[str, ...]) -> None:
    """Raise InputError if there is no such script, or it is a job file."""
    if not script.is_file():
        raise InputError(f"script {script} is not a file", f"ls {script.absolute().parent}")
    validate_is_script(script)
    tell_misplaced_flags(script, args)


def make_request(script: Path, args: tuple[str, ...], flags: CheckFlags) -> Request:
    """Return what the flags ask for.

    Raises:
        InputError: --static, which runs nothing, is asked to compare a resumed run.
    """
    resumes = flags.resume or bool(flags.resume_args and not flags.preempt)
    if flags.static and (resumes or flags.preempt):
        name = "--resume" if resumes else "--preempt"
        raise InputError(f"{name} with --static, which runs nothing", "leave out --static")
    return Request(
        script,
        args,
        flags.nproc,
        flags.steps or 0,
        flags.epochs or 0,
        resume=resumes,
        static=flags.static,
        timeout=flags.timeout,
        patience=flags.patience,
        simulate_gpus=flags.gpus,
        writable_folders=writable_folders(flags.writes),
        root=flags.root.resolve() if flags.root else None,
        resume_args=split_arguments(flags.resume_args),
        preempt=flags.preempt or 0,
        preempt_signal=_find_signal(script, flags),
        shows_notes=flags.notes,
        unsafe=flags.unsafe,
    )


def _find_signal(script: Path, flags: CheckFlags) -> signal.Signals:
    """Return the warning signal: of the flag, of a batch script, or SIGTERM."""
    name = flags.signal or (flags.preempt and find_warning_signal(script)) or "TERM"
    return getattr(signal.Signals, f"SIG{name}", signal.SIGTERM)


def split_arguments(text: str) -> tuple[str, ...]:
    """Return the arguments of --resume-args, split as a shell does.

    Raises:
        InputError: A quote is not closed.
    """
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise InputError(
            f"--resume-args {text}: {error}", "--resume-args '--resume s.pt'"
        ) from None


def show_report(report: Report, as_json: bool) -> None:
    """Print a report, the most serious findings first, or all of it as JSON."""
    if as_json:
        echo(f"{json_of_report(report)}\n", end="")
        return
    for finding in report.findings[:MAX_SHOWN_FINDINGS]:
        show_finding(finding)
    if more := report.findings[MAX_SHOWN_FINDINGS:]:
        echo(f"{count_severities(more)} more: --json has all")
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
    for line in (*report.held, *report.notes):
        echo(line)
    for line in report.isolation.lines() if report.isolation else []:
        echo(line)
    line = f"{count_severities(report.findings)}; {len(CHECK_TEXTS.rules)} rules"
    if report.run_summary:
        line += f"; {report.run_summary}"
    echo(line)
