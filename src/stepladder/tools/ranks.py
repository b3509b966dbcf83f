"""Ranks of a job on this machine, started by a tool to look at them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stepladder.core.errors import STOPPED, InputError
from stepladder.launcher.local.group import LocalGroup
from stepladder.launcher.local.ranks import run_local


def on_ranks(work: Callable[..., int], args: tuple[Any, ...], ranks: int, threads: int, job_file: Path) -> None:
    """`work(*args)` on each of so many ranks, to its end.

    Raises KeyboardInterrupt where they were stopped, InputError where they failed.
    """
    code = run_local(LocalGroup(partial(work, *args), threads), ranks)
    if code == STOPPED:
        raise KeyboardInterrupt
    if code:
        raise InputError(
            f"training on {ranks} process{'es' if ranks > 1 else ''} ended with exit code {code}",
            f"stepladder train {job_file.name} --nproc {ranks}",
        )
