"""A cluster for the length of a block, as tests need it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_lab.lab import Lab
from slurm_lab.machine import make_search_path
from slurm_lab.prepare import LabSize, can_have_networks, prepare_lab, validate_system

COMMAND_TIMEOUT_S = 60.0  # Slurm's commands wait for ever on a cluster that does not answer


@dataclass(frozen=True)
class Cluster:
    """A cluster that is up.

    Args:
        lab: Its lab, which can also break it: `fail`, `cut` and `heal` a node.
    """

    lab: Lab

    @property
    def conf(self) -> Path:
        """The path of slurm.conf."""
        return self.lab.layout.conf

    @property
    def env(self) -> dict[str, str]:
        """The variables that Slurm's commands need."""
        return {"SLURM_CONF": str(self.conf), "PATH": make_search_path()}

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes."""
        return [node.name for node in self.lab.layout.all_nodes]

    def run(self, *command: str | Path, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Run a command as on the cluster's login node.

        Args:
            *command: The command, as in `run("srun", "-N2", "hostname")`.
            timeout_s: Seconds after which it is killed.

        Returns:
            What it printed to stdout.

        Raises:
            RuntimeError: It ended with another exit code than 0; the message has its output.
        """
        env = {**os.environ, **self.env}
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False
        )
        if process.returncode != 0:
            raise RuntimeError(
                f"{' '.join(map(str, command))}: exit code {process.returncode}\n"
                f"{process.stdout}{process.stderr}"
            )
        return process.stdout


@contextmanager
def start_cluster(size: LabSize) -> Iterator[Cluster]:
    """Start a cluster of its own for the length of the block.

    If this process is killed, a guard takes the cluster down.

    Args:
        size: What it shall have. Where this user can have no network per node, it is plain.

    Yields:
        The cluster, whose nodes are idle.

    Raises:
        LabError: If this machine cannot have it.
    """
    validate_system()
    if not can_have_networks():
        size = replace(size, plain=True)
    # A test's own folder has too long a path for Slurm's sockets.
    state = Path(tempfile.mkdtemp(prefix="slurm-lab-", dir="/tmp"))
    guard = subprocess.Popen(
        [sys.executable, "-m", "slurm_lab.guard", str(os.getpid()), str(state)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        lab = prepare_lab(size, state / "slurm-lab" / "lab")
        lab.up()
        try:
            yield Cluster(lab)
        finally:
            lab.down()
    finally:
        guard.kill()
        guard.wait()
        shutil.rmtree(state, ignore_errors=True)
