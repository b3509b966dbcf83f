"""`submit --rehearse`: run a script here before it waits in a queue."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.console import print_message
from stepladder.core.errors import INTERRUPTED, InputError

REHEARSAL_NPROC = 2
REHEARSAL_STEPS = 3
REHEARSAL_EPOCHS = 2


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal of a script.

    Args:
        script: The script.
        args: Its arguments.
        gpus: The job asks for GPUs.
        writes: Folders that the script writes for real.
        trains_together: The job has several ranks, which train one model.
    """

    script: Path
    args: tuple[str, ...]
    gpus: bool
    writes: tuple[Path, ...] = ()
    trains_together: bool = False

    @staticmethod
    def from_command(
        kind: str,
        arguments: Sequence[str],
        gpus: bool,
        writes: tuple[Path, ...] = (),
        has_ranks: bool = False,
    ) -> Rehearsal:
        """Return the rehearsal of a submitted command.

        Args:
            kind: "train" or "run".
            arguments: The arguments after it.
            gpus: The job asks for GPUs.
            writes: Folders that the script writes for real.
            has_ranks: The job has several ranks.

        Raises:
            InputError: It is not a Python script.
        """
        from stepladder.cli.check import writable_folders

        if kind == "train":
            raise InputError(
                "--rehearse with train: a rehearsal is for scripts",
                "leave --rehearse out; or submit -- SCRIPT.py",
            )
        command = importlib.import_module("stepladder.cli.run").command
        params = command.make_context("stepladder run", list(arguments)).params
        if params["module"] or params["no_python"]:
            raise InputError(
                "--rehearse with -m or --no-python: a rehearsal is for scripts", "-- SCRIPT.py"
            )
        script = Path(params["script"])
        together = has_ranks and not params["independent"]
        return Rehearsal(script, tuple(params["args"]), gpus, writable_folders(writes), together)

    def passes_check(self, as_json: bool) -> bool:
        """Check the script, and print the findings.

        Returns:
            Whether the script ran, without an error or a warning.

        Raises:
            InputError: Each rank of the job would train the same.
        """
        from stepladder.cli.check import show_report
        from stepladder.cli.findings import tell_finding
        from stepladder.tools.check.check import Request, check

        request = Request(
            self.script,
            self.args,
            REHEARSAL_NPROC,
            REHEARSAL_STEPS,
            REHEARSAL_EPOCHS,
            simulate_gpus=self.gpus,
            writable_folders=self.writes,
        )
        report = check(request, (lambda _: None) if as_json else tell_finding)
        if report.exit_code or not as_json:
            show_report(report, as_json)
        if report.exit_code == INTERRUPTED:
            raise KeyboardInterrupt
        if report.not_checked and report.exit_code != 1:
            print_message(
                "the rehearsal could not check the script, see above: nothing is submitted;"
                " without --rehearse it is submitted"
            )
        elif report.exit_code:
            print_message("the rehearsal has found the problems above: nothing is submitted")
        elif self.trains_together and report.trains_alone:
            raise InputError(
                f"{self.script} forms no process group: each rank of the job would train the same",
                "init_process_group and DistributedDataParallel, or one rank; or"
                f" -- run --independent {self.script} if each rank is to train alone",
            )
        return report.exit_code == 0
