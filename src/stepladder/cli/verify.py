"""`stepladder verify RECIPE|FILE.py|RUN_DIR`: the same bits on any number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from stepladder.cli.flags import make_command, make_field_options
from stepladder.cli.options import TRACEBACK_FLAG, JobCommand, TrainFlags, announce_job_file
from stepladder.cli.types import AsJson, Counts, JobPath, TrustJobFile
from stepladder.core.console import echo, echo_json
from stepladder.core.settings import Settings
from stepladder.storage.run_files import CONFIG_FILE
from stepladder.train.job_file import load_stored_job


class _VerifyCommand(JobCommand):
    """`verify`, with the flags of a job that the arguments or a run directory name."""

    # The Config that a run directory stores.
    stored_config: Mapping[str, Any] = MappingProxyType({})
    # The settings that it stores.
    stored_settings: Mapping[str, Any] = MappingProxyType({})

    def find(self, name: str) -> Path:
        """Return the path of a job, or of the job that a run directory names."""
        self.stored_config = {}
        self.stored_settings = {}
        if not (Path(name) / CONFIG_FILE).exists():
            return super().find(name)
        path, self.stored_config, self.stored_settings = load_stored_job(Path(name))
        return path


@make_command(
    _VerifyCommand,
    *make_field_options(
        TrainFlags,
        "epochs",
        "global_batch",
        "microbatch",
        "device",
        "precision",
        "compile",
        "capture",
        "data_dir",
        "lr",
        "warmup_steps",
        "seed",
    ),
    TRACEBACK_FLAG,
)
def command(
    job: JobPath,
    *,
    nproc: Counts | None = None,
    steps: int | None = None,
    sync: Literal["exact", "ddp"] | None = None,
    threads: int | None = None,
    trust_job_file: TrustJobFile = False,
    as_json: AsJson = False,
    **flags: Any,
) -> int:
    """Prove that a job gives the same losses and weights on any number of processes.

    It trains some steps on each number of processes, with a stop and a resume, in temporary run
    directories with a snapshot per step, and compares every bit (with --sync ddp losses to 1e-5,
    weights to 1e-3). Exit code 1 if something differs: it prints the first step and tensor, and the
    likely cause.

    Args:
        job (RECIPE|FILE.py|RUN_DIR): Name of a recipe, a job file, or a run directory.
        nproc: Numbers of processes to compare.  [default: 1,2,3]
        steps: Optimizer steps to compare, at most as many as the job has.  [default: about 12]
        sync: [default: exact, or as in RUN_DIR]
        threads: Intra-op threads of torch per process.  [default: 1]
    """
    config, job_settings = command.sort_flags(flags, sync=sync, threads=threads)
    if trust_job_file or (Path(job) / CONFIG_FILE).exists():
        announce_job_file(command.job, Path(job), trust_job_file, f"verify {job}")
    defaults = {"run_dir": Path("runs"), "sync": "exact"}
    settings = Settings(**{**defaults, **command.stored_settings, **job_settings})
    from stepladder.tools.verify.proof import describe_proof, prove

    report = (lambda _: None) if as_json else echo
    full_config = {**command.stored_config, **config}
    proof = prove(command.job, full_config, settings, nproc, steps, report)
    if as_json:
        echo_json(proof.as_json())
    else:
        echo(describe_proof(proof, settings.sync == "exact"))
    return int(proof.difference is not None)
