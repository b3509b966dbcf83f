"""Ranks of a job on this machine, started by a tool to look at them."""

from __future__ import annotations

from collections.abc import Callable

from stepladder.core.errors import STOPPED, InputError
from stepladder.core.masking import mask_command
from stepladder.core.settings import Settings, TrainRequest
from stepladder.launcher.local.local_group import LocalGroup
from stepladder.launcher.local.supervisor import run_local
from stepladder.train.job_file import RECIPES_FOLDER
from stepladder.train.job_source import relative_to_cwd

# Flags of `train` that a tool may have been given for the job, beside those of its Config.
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


def run_on_ranks(work: Callable[[], int], ranks: int, threads: int, request: TrainRequest) -> None:
    """Do `work()` on each of so many ranks, to its end.

    Args:
        work: What each rank does. It returns the rank's exit code.
        ranks: Their number.
        threads: Intra-op threads of each.
        request: The job, for the HINT with the command that shows the failure alone.

    Raises:
        KeyboardInterrupt: They were stopped.
        InputError: They failed.
    """
    group = LocalGroup(work, threads)
    code = run_local(group, ranks)
    if code == STOPPED or group.stop_signal:  # also while the ranks were ending by themselves
        raise KeyboardInterrupt
    if code:
        raise InputError(
            f"training on {ranks} process{'es' if ranks > 1 else ''} ended with exit code {code}",
            make_train_command(request, ranks),
        )


def make_train_command(request: TrainRequest, ranks: int) -> str:
    """Return the command that trains the same job, with the flags that were given."""
    defaults = Settings(run_dir=request.settings.run_dir)
    given = {name: getattr(request.settings, name) for name in JOB_SETTINGS}
    changed = {name: value for name, value in given.items() if value != getattr(defaults, name)}
    job = request.job.stem if request.job.parent == RECIPES_FOLDER else relative_to_cwd(request.job)
    words = ["stepladder", "train", job]
    for name, value in (changed | request.config).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return mask_command([*words, "--nproc", str(ranks)])
