"""A failure on purpose, to see a recovery: `train --fail-at RANK:STEP`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from stepladder.core.errors import InputError


def parse_place(text: str) -> tuple[int, int]:
    """RANK:STEP as numbers; steps count from 1. Raises InputError."""
    rank, _, step = text.partition(":")
    if not (rank.isdigit() and step.isdigit() and int(step) > 0):
        raise InputError(f"--fail-at {text!r} is not RANK:STEP", "--fail-at 1:20; steps count from 1")
    return int(rank), int(step)


def kill_once(run_dir: Path, rank: int, step: int) -> None:
    """SIGKILL for this process, once per run directory: a marker is left, and the step is passed next time."""
    try:
        (run_dir / f"failed-at-{rank}-{step}").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
