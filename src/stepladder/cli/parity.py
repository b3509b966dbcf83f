"""`stepladder parity SCRIPT`: does a script compute the same on one process and on several?"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import click

from stepladder.cli.check import validate_script, writable_folders
from stepladder.cli.findings import show_finding
from stepladder.cli.flags import make_command
from stepladder.cli.types import AsJson, Count, Wait, Words
from stepladder.core.console import echo, echo_json
from stepladder.core.errors import InputError
from stepladder.core.process_count import validate_process_count
from stepladder.tools.check.check import Request
from stepladder.tools.parity.formats import as_json_object, summary_lines
from stepladder.tools.parity.parity import ParityReport, ParityRequest, Size, compare_sizes

SIZES_BY_DEFAULT = ((1, ""), (2, ""))
AT_HINT = '--at 1 "--batch 64" --at 2 "--batch 32"'
AtSizes = Annotated[tuple[tuple[int, str], ...], click.Tuple([click.INT, click.STRING])]


@make_command(context_settings={"allow_interspersed_args": False})
def command(
    script: Path,
    args: Words = (),
    *,
    at: AtSizes = (),
    epochs: Count = 2,
    steps: Count | None = None,
    timeout: Wait = 600,
    patience: Wait = 25,
    writes: tuple[Path, ...] = (),
    as_json: AsJson = False,
) -> int:
    """Run SCRIPT with ARGS on one process and on several, and say where they differ first.

    It compares samples, learning rates, losses, gradients and weights of each step, and says which
    differences are more than rounding, and why. SCRIPT runs unmodified on CPU ranks, in a copy of
    the working folder. Exit code 0 if it computes the same, or if only dropout, batch norm or
    augmentation differ by rank; 1 if it does not; 3 if this could not be judged.

    Args:
        at (N ARGS): Further arguments of SCRIPT on N processes, for example 2 "--batch 32".
            Twice.  [default: 1 "" and 2 ""]
        epochs: Training passes to compare.
        steps: Optimizer steps per epoch; the epoch ends after them.  [default: all]
        timeout: Seconds for one run of SCRIPT.
        patience: Seconds without progress that count as a hang.
        writes (DIR): Let SCRIPT write this folder for real. Repeatable.
    """
    validate_script(script, args)
    sizes = [_parse_size(nproc, text, args) for nproc, text in at or SIZES_BY_DEFAULT]
    if len(sizes) != 2 or sizes[0].nproc == sizes[1].nproc:
        numbers = ", ".join(str(size.nproc) for size in sizes)
        raise InputError(f"--at names two numbers of processes, not {numbers}", AT_HINT)
    request = Request(
        script,
        args,
        steps=steps or 0,
        epochs=epochs,
        timeout=timeout,
        patience=patience,
        writable_folders=writable_folders(writes),
    )
    report = compare_sizes(ParityRequest(request, sizes[0], sizes[1]))
    if as_json:
        echo_json(as_json_object(report))
    else:
        _show_report(report)
    return report.exit_code


def _parse_size(nproc: int, text: str, args: tuple[Any, ...]) -> Size:
    """Return a number of processes with all arguments of the script.

    Raises:
        InputError: It is no such number, or the arguments have an open quotation mark.
    """
    if nproc < 1:
        raise InputError(f"--at {nproc}: a number of processes is 1 or more", AT_HINT)
    validate_process_count(nproc)
    try:
        further = shlex.split(text)
    except ValueError as error:
        raise InputError(f"--at {nproc} {text!r}: {error}", AT_HINT) from error
    return Size(nproc, (*args, *further))


def _show_report(report: ParityReport) -> None:
    """Print the difference, what is legal, and one sentence at the end."""
    for finding in report.findings:
        show_finding(finding)
    if report.not_judged:
        echo(report.not_judged.output)
        echo(report.not_judged.line)
    for line in summary_lines(report):
        echo(line)
