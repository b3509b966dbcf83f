"""The lessons that need several nodes, on a real Slurm: the job scripts as they are shipped, and
IPv6.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pages import REPOSITORY

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LESSONS = REPOSITORY / "lessons"


@pytest.mark.parametrize("tasks", [(2, 2), (4, 1)])
def test_slurm_starts_it(lab: Any, tmp_path: Path, tasks: tuple[int, int]) -> None:
    """2 nodes x 2 ranks, and 4 x 1."""
    nodes, per_node = tasks
    flags = "--nodes", nodes, "--ntasks-per-node", per_node
    output = output_of(lab, "lessons/14-slurm/job.sbatch", tmp_path, *flags)
    assert f"claim holds: 4 ranks on {nodes} nodes, 16 steps each, one writer" in output


@pytest.mark.parametrize("script", ["14-slurm/job_torchrun.sbatch", "16-evaluation/job.sbatch"])
def test_slurm_starts_torchruns(lab: Any, tmp_path: Path, script: str) -> None:
    output = output_of(lab, f"lessons/{script}", tmp_path)
    assert "claim holds: " in output
    assert "4 ranks on 2 nodes" in output


def output_of(lab: Any, script: str, cwd: Path, *flags: object) -> str:
    """What a batch job printed that ended well."""
    (cwd / "lessons").symlink_to(LESSONS)
    (cwd / "runs" / "lessons").mkdir(parents=True)
    job = lab.slurm("sbatch", "--parsable", *flags, script, cwd=cwd).strip()
    state = lab.await_job(job, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
    (file,) = (cwd / "runs" / "lessons").glob(f"*-{job}.out")
    assert state["JobState"] == "COMPLETED", f"{state}\n{file.read_text()}"
    return file.read_text()


# Where a node's name stands for an IPv6 address alone, torchrun, its store and gloo have no other
# way to meet.
ON_IPV6 = "mount --bind hosts /etc/hosts; getent ahosts $(hostname); exec "


def test_sixteen_ranks_on_two_nodes_over_ipv6(lab: Any, tmp_path: Path) -> None:
    """Guide B's own case: 2 nodes x 8 ranks, which meet and train over IPv6."""
    (tmp_path / "lessons").symlink_to(LESSONS)
    nodes = {name: node["address6"] for name, node in lab.nodes().items()}
    (tmp_path / "hosts").write_text(
        "::1 localhost\n" + "".join(f"{ip} {name}\n" for name, ip in nodes.items())
    )
    flags = (
        f"--nnodes=2 --nproc_per_node=8 --rdzv-backend=c10d --rdzv-endpoint=[{nodes['n1']}]:29603"
    )
    training = "lessons/13-multinode/lesson.py --total_epochs 4 --save_every 2 --batch_size 32"
    command = "unshare", "--mount", "sh", "-c", f"{ON_IPV6} torchrun {flags} {training}"
    output = lab.slurm("srun", "-N2", "-w", "n1,n2", "--ntasks-per-node=1", *command, cwd=tmp_path)
    assert re.findall(r"^([\w:.]+) +STREAM", output, re.MULTILINE).count(nodes["n1"]) == 1
    assert not re.search(r"^\d+\.\d+\.\d+\.\d+ ", output, re.MULTILINE), (
        "a node's name stands for an IPv4 address"
    )
    assert "claim holds: 16 ranks on 2 nodes, 4 steps each" in output
    assert {
        int(rank)
        for rank in re.findall(r"\[GPU(\d+)\] Epoch 3 \| Batchsize: 32 \| Steps: 4", output)
    } == set(range(16))
