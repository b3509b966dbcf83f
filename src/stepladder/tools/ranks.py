"""Ranks of a job on this machine, started by a tool to look at them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stepladder.core.errors import STOPPED, InputError
from stepladder.launcher.local.group import LocalGroup
from stepladder.launcher.local.ranks import run_local


def on_ranks(work: Callable[[], int], ranks: int, threads: int, job_file: Path) -> None:
    """`work()` on each of so many ranks, to its end.

    Raises KeyboardInterrupt where they were stopped, InputError where they failed.
    """
    group = LocalGroup(work, threads)
    code = run_local(group, ranks)
    if code == STOPPED or group.stop_asked:  # also while the ranks were ending by themselves
        raise KeyboardInterrupt
    if code:
        raise InputError(
            f"training on {ranks} process{'es' if ranks > 1 else ''} ended with exit code {code}",
            f"stepladder train {job_file.name} --nproc {ranks}",
        )
