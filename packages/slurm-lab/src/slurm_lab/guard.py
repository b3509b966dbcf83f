"""Take a cluster down when the process that started it has ended without doing so.

`python -m slurm_lab.guard PID STATE_FOLDER`: cluster.py starts it before a cluster, and kills it
after the end of the cluster.
"""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from slurm_lab.lab import Lab


def _guard_cluster(pid: int, state: Path) -> None:
    """Wait for the end of a process, then remove its cluster.

    Args:
        pid: The process.
        state: The folder of the cluster's state.
    """
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait()
    lab = Lab.load(state / "slurm-lab" / "lab")
    if lab is not None:
        lab.down()
    shutil.rmtree(state, ignore_errors=True)


if __name__ == "__main__":
    _guard_cluster(int(sys.argv[1]), Path(sys.argv[2]))
