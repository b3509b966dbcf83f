"""Start the ranks of a trial on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from stepladder.core.errors import STOPPED, InputError
from stepladder.core.masking import mask_command
from stepladder.core.numbers import format_count
from stepladder.core.settings import Settings, TrainRequest
from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.supervisor import run_local
from stepladder.train.job_file import RECIPES_FOLDER
from stepladder.train.job_source import relative_to_cwd

# The flags of `train` that tools also have; the flags of the job's Config come on top.
JOB_SETTINGS = (
    "global_batch",
    "microbatch",
    "sync",
    "shard",
    "shard_copies",
    "device",
    "precision",
    "compile",
    "capture",
    "checkpoint_blocks",
    "warmup_steps",
    "seed",
)


def make_trial_request(request: TrainRequest, run_dir: Path, **settings: Any) -> TrainRequest:
    """Return the request that trains in a run directory, without a progress bar.

    There is one snapshot, at the end, unless the settings say otherwise.
    """
    quiet: dict[str, Any] = {"run_dir": run_dir, "snapshot_every": 10**9, "progress": False}
    return replace(request, settings=replace(request.settings, **quiet | settings))


def run_on_ranks(work: Callable[[], int], ranks: int, request: TrainRequest) -> None:
    """Run `work()` on each of so many ranks until it returns.

    Args:
        work: The function of each rank; it returns the rank's exit code.
        ranks: The number of ranks.
        request: The job, with the intra-op threads of a rank. The hint of an error has the command
            that trains it alone.

    Raises:
        KeyboardInterrupt: A signal stopped the ranks.
        InputError: A rank failed.
    """
    group = LocalGroup(work, request.settings.threads or 1)
    code = run_local(group, ranks)
    if code == STOPPED or group.stop_signal:  # also while the ranks were ending by themselves
        raise KeyboardInterrupt
    if code:
        processes = format_count(ranks, "process")
        raise InputError(
            f"training on {processes} ended with exit code {code}",
            make_train_command(request, ranks),
        )


def make_train_command(request: TrainRequest, ranks: int) -> str:
    """Return the command that trains the same job, with the flags that were given."""
    defaults = Settings(run_dir=request.settings.run_dir)
    flags: dict[str, Any] = {}
    for name in JOB_SETTINGS:
        value = getattr(request.settings, name)
        if value != getattr(defaults, name):
            flags[name] = value
    flags |= request.config
    is_recipe = request.job.parent == RECIPES_FOLDER
    job = request.job.stem if is_recipe else relative_to_cwd(request.job)
    command = ["stepladder", "train", job]
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            command += [f"--{flag}", str(value)]
    return mask_command([*command, "--nproc", str(ranks)])
