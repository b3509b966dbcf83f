"""`stepladder verify RECIPE|FILE.py|RUN_DIR`: the same bits on any number of processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from stepladder.cli.options import (
    JobCommand,
    announce_job_file,
    json_flag,
    parse_counts,
    traceback_flag,
    train_flags,
    trust_flag,
)
from stepladder.cli.types import ANY_INTEGER, JOB
from stepladder.core.console import echo
from stepladder.core.settings import Settings
from stepladder.storage.run_files import CONFIG_FILE
from stepladder.train.job_file import load_stored_job


class VerifyCommand(JobCommand):
    """`verify`, with the flags of a job that the arguments or a run directory name.

    Attributes:
        stored_config: The Config that a run directory stores.
        stored_settings: The settings that it stores.
    """

    stored_config: Mapping[str, Any] = MappingProxyType({})
    stored_settings: Mapping[str, Any] = MappingProxyType({})

    def find(self, name: str) -> Path:
        """Return the path of a job, or of the job that a run directory names."""
        self.stored_config = {}
        self.stored_settings = {}
        if not (Path(name) / CONFIG_FILE).exists():
            return super().find(name)
        path, self.stored_config, self.stored_settings = load_stored_job(Path(name))
        return path


@click.command(cls=VerifyCommand)
@click.argument("job", metavar="RECIPE|FILE.py|RUN_DIR", type=JOB)
@click.option(
    "--nproc",
    callback=parse_counts,
    metavar="N,N,...",
    help="Numbers of processes to compare.  [default: 1,2,3]",
)
@click.option(
    "--steps",
    type=ANY_INTEGER,
    help="Optimizer steps to compare, at most as many as the job has.  [default: about 12]",
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
@click.option(
    "--threads", type=ANY_INTEGER, help="Intra-op threads of torch per process.  [default: 1]"
)
@traceback_flag
@json_flag
def command(
    job: str, nproc: list[int] | None, steps: int | None, trust_job_file: bool, **flags: Any
) -> int:
    """Prove that a job gives the same losses and weights on any number of processes.

    It trains some steps on each number of processes, with a stop and a resume, in temporary run
    directories with a snapshot per step, and compares every bit (with --sync ddp losses to 1e-5,
    weights to 1e-3). Exit code 1 if something differs: it prints the first step and tensor, and the
    likely cause.
    """
    config, job_settings = command.sort_flags(flags)
    if trust_job_file or (Path(job) / CONFIG_FILE).exists():
        announce_job_file(command.job, Path(job), trust_job_file, f"verify {job}")
    defaults = {"run_dir": Path("runs"), "sync": "exact"}
    settings = Settings(**{**defaults, **command.stored_settings, **job_settings})
    from stepladder.tools.verify.proof import describe_proof, prove

    as_json = flags["as_json"]
    report = (lambda _: None) if as_json else echo
    full_config = {**command.stored_config, **config}
    proof = prove(
        command.job,
        full_config,
        settings,
        nproc,
        steps,
        report,
    )
    if as_json:
        echo(json.dumps(proof.as_json()))
    else:
        echo(describe_proof(proof, settings.sync == "exact"))
    return int(proof.difference is not None)
