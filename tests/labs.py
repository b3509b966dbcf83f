"""A lab for the tests: started once, healed and emptied after each test, and gone at the end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pages import expect_documented
from processes import COMMAND, SECONDS, run, wait_until

SBIN = ":/usr/sbin:/sbin"
LAB_POLL_INTERVAL_S = 0.25  # seconds between two questions to Slurm, each of which is a process


class TestLab:
    """A lab that is up. env: what a user's shell has, who typed `export SLURM_CONF=...`."""

    __test__ = False

    def __init__(self, state: Path, command: tuple[str, ...] = COMMAND) -> None:
        self.folder = state / "stepladder" / "lab"
        self.command = command
        self.env = {
            "XDG_STATE_HOME": str(state),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            # stepladder, in jobs too
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}{SBIN}",
        }

    def lab(
        self, *arguments: object, code: int = 0, timeout: float = SECONDS
    ) -> subprocess.CompletedProcess[str]:
        """`stepladder lab WORDS`."""
        done = run(
            "lab", *arguments, cwd=Path("/"), env=self.env, timeout=timeout, command=self.command
        )
        assert done.returncode == code, (
            f"lab {arguments}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def slurm(self, *arguments: object, cwd: Path = Path("/"), timeout: float = SECONDS) -> str:
        """The output of one of Slurm's commands, or of `stepladder`, as typed on the login node."""
        before = self.command[: -len(COMMAND)]  # what makes it another user's
        done = run(*arguments, cwd=cwd, env=self.env, timeout=timeout, command=before)
        assert done.returncode == 0, (
            f"{arguments}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done.stdout

    def nodes(self) -> dict[str, dict[str, Any]]:
        status = json.loads(self.lab("status", "--json").stdout)
        expect_documented(status, "lab status")
        return {node["name"]: node for node in status["nodes"]}

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says, such as JobState, Restarts, BatchHost."""
        shown = self.slurm("scontrol", "show", "job", job_id, "--oneliner")
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def await_job(self, job_id: str, *states: str) -> dict[str, str]:
        """Wait until the job is in one of these states."""
        wait_until(
            lambda: self.job(job_id)["JobState"] in states,
            lambda: f"job {job_id} is {self.job(job_id)}, not {states}",
            every=LAB_POLL_INTERVAL_S,
        )
        return self.job(job_id)

    def states(self) -> dict[str, str]:
        """Slurm's word for each node; a * behind it means no answer."""
        shown = self.slurm("sinfo", "--noheader", "--Node", "--partition=lab", "--format=%N %T")
        return dict(line.split() for line in shown.splitlines())

    def await_down(self, name: str) -> None:
        """Wait until Slurm has noticed by itself that the node does not answer."""
        wait_until(
            lambda: self.states()[name] == "down*",
            lambda: f"{self.states()}",
            every=LAB_POLL_INTERVAL_S,
        )

    def is_idle(self) -> bool:
        return set(self.states().values()) == {"idle"}

    def restore(self) -> None:
        """No job, no cut cable, no failed node: as after `lab up`."""
        # SIGKILL first: what has to end is no longer looked at, and a SIGTERM would give it ten
        # seconds.
        self.slurm("scancel", "--full", "--signal=KILL", "--user", "root")
        self.slurm("scancel", "--user", "root")
        for name, node in self.nodes().items():
            if node["cut"] or not node["processes"]:
                self.lab("heal", name)
        wait_until(
            self.is_idle,
            lambda: f"not idle: {self.nodes()}\n{self.slurm('squeue')}",
            every=LAB_POLL_INTERVAL_S,
        )


def why_not() -> str:
    """Why no lab can be up on this machine, or ""."""
    if os.geteuid() != 0:
        return "a lab with a network per node needs root"
    path = os.environ["PATH"] + SBIN
    missing = [
        name
        for name in ("slurmctld", "slurmd", "munged", "ip", "unshare")
        if not shutil.which(name, path=path)
    ]
    if missing:
        return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge iproute2)"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False
    )
    return "" if tried.returncode == 0 else "this machine gives root no network namespaces"


@contextmanager
def lab_up(
    *flags: object, command: tuple[str, ...] = COMMAND, user: str | None = None
) -> Iterator[TestLab]:
    """A lab of its own for the length of the block. command, user: to be another user's."""
    if reason := why_not():
        pytest.skip(reason)
    state = Path(
        tempfile.mkdtemp(prefix="lab-", dir="/tmp")
    )  # tmp_path is too long for Slurm's sockets
    if user is not None:
        shutil.chown(state, user)
    lab = TestLab(state, command)
    with guarding(lab, state):
        try:
            lab.lab("up", *flags)
            yield lab
        finally:
            if lab.folder.exists():
                lab.lab("down")


# It waits for the end of its input, which this process has, or for the end of this process: one that
# it forked may hold the input open for longer.
GUARD = """
exec 3<&0
(
  cat <&3 > /dev/null & tail -s 0.5 --pid "$2" -f /dev/null & wait -n; kill $(jobs -p)
  if [ -e "$1/stepladder/lab" ]; then shift 2; "$@" lab down; fi; rm -rf "$XDG_STATE_HOME"
) &
"""


@contextmanager
def guarding(lab: TestLab, state: Path) -> Iterator[None]:
    """A process takes the lab down if this one does not, because it was killed."""
    guard = subprocess.Popen(
        ["bash", "-c", GUARD, "guard", state, str(os.getpid()), *lab.command],
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        cwd="/",
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    guard.wait()
    assert guard.stdin is not None
    with guard.stdin:
        yield
    wait_until(lambda: not state.exists())
