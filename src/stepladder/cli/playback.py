"""`stepladder playback SCRIPT`: a page that plays back what each rank did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from stepladder.cli.check import validate_script
from stepladder.cli.flags import make_command
from stepladder.cli.types import Count, Wait, Words
from stepladder.core.console import echo
from stepladder.core.output_file import validate_writable, write_output
from stepladder.tools.check.check import Request, check
from stepladder.tools.pages.page import GENERATOR
from stepladder.tools.playback.page import render_playback


@make_command(context_settings={"allow_interspersed_args": False})
def command(
    script: Path,
    args: Words = (),
    *,
    output: Annotated[Path, "-o", "--output"] = Path("playback.html"),
    nproc: Count = 2,
    steps: Count = 3,
    epochs: Count = 2,
    timeout: Wait = 600,
) -> int:
    """Run SCRIPT with ARGS, and write a page that plays back what each rank did.

    The page shows one moment after the other: which samples a rank has, its loss, its gradients
    before and after the exchange, its weights, and what it prints. A mistake that `check` finds is
    shown at its moment. SCRIPT runs unmodified on CPU ranks, in a copy of the working folder. The
    exit code is that of `check`.

    Args:
        output (FILE): Where to write the page.
        nproc: Ranks.
        steps: Steps of each epoch to show. SCRIPT makes all of them.
        epochs: Epochs to run and to show.
        timeout: Seconds for one run of SCRIPT.
    """
    validate_script(script, args)
    validate_writable(output, "-o", GENERATOR)
    report = check(Request(script, args, nproc, epochs=epochs, timeout=timeout, leaves=True))
    if report.not_checked:
        echo(report.not_checked.output)
        echo(report.not_checked.line)
    page = render_playback(report, script.name, steps, epochs)
    if page:
        write_output(output, page, "-o")
        echo(f"written: {output}")
    return report.exit_code
