"""submit --rehearse: a script is tried here before it waits in a queue."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.console import echo, print_message
from stepladder.core.errors import InputError

RANKS, STEPS, EPOCHS = 2, 3, 2


@dataclass(frozen=True)
class Rehearsal:
    """Of a script with its arguments. gpus: whether the job asks for some.  writes: folders written
    for real.
    """

    script: Path
    args: tuple[str, ...]
    gpus: bool
    writes: tuple[Path, ...] = ()

    @staticmethod
    def of(kind: str, words: Sequence[str], gpus: bool, writes: tuple[Path, ...] = ()) -> Rehearsal:
        """words: what comes after `run`. Raises InputError where that is no Python script."""
        from stepladder.cli.check import writable_folders

        if kind == "train":
            raise InputError(
                "--rehearse with train: a rehearsal is for scripts",
                "leave --rehearse out; or submit -- SCRIPT.py",
            )
        command = importlib.import_module("stepladder.cli.run").command
        given = command.make_context("stepladder run", list(words)).params
        if given["module"] or given["no_python"]:
            raise InputError(
                "--rehearse with -m or --no-python: a rehearsal is for scripts", "-- SCRIPT.py"
            )
        return Rehearsal(
            Path(given["script"]), tuple(given["args"]), gpus, writable_folders(writes)
        )

    def passes(self, as_json: bool) -> bool:
        """Whether the check of it has neither an error nor a warning, and the script ran. Shows
        what it finds.
        """
        from stepladder.cli.check import show, summarise
        from stepladder.tools.check.check import Request, check
        from stepladder.tools.check.output import as_json as json_text

        request = Request(
            self.script, self.args, RANKS, STEPS, EPOCHS, gpus=self.gpus, writes=self.writes
        )
        report = check(request, (lambda _: None) if as_json else show)
        if as_json and report.code:
            echo(json_text(report))
        elif not as_json:
            summarise(report)
        if report.not_checked and report.code != 1:
            print_message(
                "the rehearsal proves nothing, as above: nothing is submitted; without --rehearse it is"
            )
        elif report.code:
            print_message("the rehearsal has found what stands above: nothing is submitted")
        return report.code == 0
