"""stepladder verify RECIPE|FILE.py|RUN_DIR: the same bits on any number of processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from stepladder.cli.options import (
    JobCommand,
    json_flag,
    name_job_file,
    numbers,
    traceback_flag,
    train_flags,
    trust_flag,
)
from stepladder.cli.types import ANY, JOB
from stepladder.core.console import echo
from stepladder.core.settings import Settings
from stepladder.storage.run_files import CONFIG_FILE
from stepladder.train.job_file import load_stored_job


class VerifyCommand(JobCommand):
    """`verify`, with the flags of the job that the arguments, or a run directory, name."""

    stored: Sequence[dict[str, Any]] = ({}, {})  # the Config and the settings of a run directory

    def find(self, name: str) -> Path:
        self.stored = {}, {}
        if not (Path(name) / CONFIG_FILE).exists():
            return super().find(name)
        path, *self.stored = load_stored_job(Path(name))
        return path


@click.command(cls=VerifyCommand)
@click.argument("job", metavar="RECIPE|FILE.py|RUN_DIR", type=JOB)
@click.option(
    "--nproc",
    callback=numbers,
    metavar="N,N,...",
    help="Numbers of processes to compare.  [default: 1,2,3]",
)
@click.option(
    "--steps",
    type=ANY,
    help="Optimizer steps to compare, at most the job's own.  [default: about 12]",
)
@click.option(
    "--sync", type=click.Choice(["exact", "ddp"]), help="[default: exact, or as in RUN_DIR]"
)
@train_flags(
    "epochs",
    "global-batch",
    "microbatch",
    "device",
    "precision",
    "compile",
    "capture",
    "data-dir",
    "lr",
    "warmup-steps",
    "seed",
)
@trust_flag
@click.option("--threads", type=ANY, help="Intra-op threads of torch per process.  [default: 1]")
@traceback_flag
@json_flag
def command(
    job: str, nproc: list[int] | None, steps: int | None, trust_job_file: bool, **flags: Any
) -> int:
    """Prove that a job gives the same losses and weights on any number of processes, through a stop
    and resume.

    Trains some steps on each number of processes, in temporary run directories that hold a snapshot
    per step, and compares every bit (with --sync ddp losses to 1e-5, weights to 1e-3). Exit code 1
    if something differs: the first step and tensor are named, and the likely cause."""
    config, own = command.sort(flags)
    if trust_job_file or (Path(job) / CONFIG_FILE).exists():
        name_job_file(command.job, Path(job), trust_job_file, f"verify {job}")
    stored_config, stored_settings = command.stored
    settings = Settings(**{"run_dir": Path("runs"), "sync": "exact", **stored_settings, **own})
    from stepladder.tools.verify.proof import prove, verdict

    as_json = flags["as_json"]
    say = (lambda _: None) if as_json else echo
    proof = prove(command.job, stored_config | config, settings, nproc, steps, say)
    echo(json.dumps(proof.as_json()) if as_json else verdict(proof, settings.sync == "exact"))
    return int(proof.difference is not None)
