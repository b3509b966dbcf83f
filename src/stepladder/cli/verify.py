"""stepladder verify RECIPE|FILE.py|RUN_DIR: the same bits on any number of processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from stepladder.cli.options import JobCommand, json_flag, numbers, train_flags
from stepladder.cli.types import ANY, JOB
from stepladder.core.console import echo, say
from stepladder.core.errors import InputError
from stepladder.core.settings import Settings
from stepladder.storage.rundir import CONFIG
from stepladder.train.job_file import RECIPES, stored_job


class VerifyCommand(JobCommand):
    """`verify`, with the flags of the job that the arguments, or a run directory, name."""

    stored: Sequence[dict[str, Any]] = ({}, {})  # the Config and the settings of a run directory

    def find(self, name: str) -> Path:
        self.stored = {}, {}
        if not (Path(name) / CONFIG).exists():
            return super().find(name)
        path, *self.stored = stored_job(Path(name))
        return path


@click.command(cls=VerifyCommand)
@click.argument("job", metavar="RECIPE|FILE.py|RUN_DIR", type=JOB)
@click.option(
    "--nproc", callback=numbers, metavar="N,N,...", help="Numbers of processes to compare.  [default: 1,2,3]"
)
@click.option("--steps", type=ANY, help="Optimizer steps to compare, at most the job's own.  [default: about 12]")
@click.option("--sync", type=click.Choice(["exact", "ddp"]), help="[default: exact, or as in RUN_DIR]")
@train_flags(
    "epochs", "global-batch", "microbatch", "device", "precision", "data-dir", "lr", "warmup-steps", "seed"
)
@click.option(
    "--trust-job-file",
    is_flag=True,
    help="Run the job file that RUN_DIR names, wherever it lies. It is code: do so only if you trust it.",
)
@click.option("--threads", type=ANY, help="Intra-op threads of torch per process.  [default: 1]")
@json_flag
def command(job: str, nproc: list[int] | None, steps: int | None, trust_job_file: bool, **flags: Any) -> int:
    """Prove that a job gives the same losses and weights on any number of processes, through a stop and resume.

    Trains some steps on each number of processes, in temporary run directories that hold a snapshot per
    step, and compares every bit (with --sync ddp losses to 1e-5, weights to 1e-3). Exit code 1 if something
    differs: the first step and tensor are named, and the likely cause.
    """
    config, own = command.sort(flags)
    if trust_job_file or (Path(job) / CONFIG).exists():
        name_job_file(Path(job), trust_job_file)
    stored_config, stored_settings = command.stored
    settings = Settings(**{"run_dir": Path("runs"), "sync": "exact", **stored_settings, **own})
    from stepladder.tools.verify.proof import prove, verdict

    as_json = flags["as_json"]
    say = (lambda _: None) if as_json else echo
    proof = prove(command.job, stored_config | config, settings, nproc, steps, say)
    echo(json.dumps(proof.as_json()) if as_json else verdict(proof, settings.sync == "exact"))
    return int(proof.difference is not None)


def name_job_file(run_dir: Path, trusted: bool) -> None:
    """Raises InputError where whoever wrote the run directory may have chosen code that is not the user's own."""
    path, here = command.job, Path.cwd().resolve()
    if trusted and not (run_dir / CONFIG).exists():
        raise InputError(f"--trust-job-file, but {run_dir} is not a run directory", f"stepladder verify {run_dir}")
    own = path.is_relative_to(here) and not path.is_relative_to(run_dir.resolve())
    if not (own or trusted or path.parent == RECIPES):
        where = "inside the run directory" if path.is_relative_to(run_dir.resolve()) else f"outside {here}"
        raise InputError(
            f"{run_dir} names a job file {where}, which verify would run: {path}",
            f"read it; then stepladder verify {run_dir} --trust-job-file",
        )
    say(f"runs {path}, as {run_dir / CONFIG} has it")
