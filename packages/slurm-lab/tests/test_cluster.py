"""A real cluster, by the fixture `slurm_cluster`: its nodes, GPUs, partitions and faults."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lab_commands import wait_until
from slurm_lab import LAB_PARTITION, URGENT_PARTITION, Cluster


def read_job(cluster: Cluster, job_id: str) -> dict[str, str]:
    """Return what Slurm says about a job, such as JobState and Restarts."""
    text = cluster.run("scontrol", "show", "job", job_id, "--oneliner")
    return dict(field.split("=", 1) for field in text.split() if "=" in field)


def submit(cluster: Cluster, *flags: str) -> str:
    """Submit a job without output, and return its number."""
    return cluster.run("sbatch", "--parsable", "--output=/dev/null", *flags).strip()


def test_jobs_run_on_all_nodes_with_their_names_and_gpus(slurm_cluster: Cluster) -> None:
    command = "echo $SLURMD_NODENAME $(hostname) $CUDA_VISIBLE_DEVICES"
    output = slurm_cluster.run("srun", "-N2", "--gpus-per-node=2", "sh", "-c", command)
    names = {line.split()[0]: line.split()[1] for line in output.splitlines()}
    assert sorted(names) == slurm_cluster.nodes == ["n1", "n2"]
    assert output.count(" 0,1\n") == 2
    if not slurm_cluster.lab.layout.plain:
        assert names == {"n1": "n1", "n2": "n2"}


def test_the_tests_themselves_have_the_variables_of_the_cluster(slurm_cluster: Cluster) -> None:
    assert os.environ["SLURM_CONF"] == str(slurm_cluster.conf)
    assert slurm_cluster.run("sinfo", "--noheader", "--format=%R").split() == [
        LAB_PARTITION,
        URGENT_PARTITION,
    ]


def test_an_urgent_job_preempts_and_the_other_is_requeued(slurm_cluster: Cluster) -> None:
    # Without the 20 s that a preempted job of this partition has to save its state.
    slurm_cluster.run("scontrol", "update", f"PartitionName={LAB_PARTITION}", "GraceTime=0")
    job = submit(slurm_cluster, "-N2", "--exclusive", "--requeue", "--wrap", "sleep 300")
    wait_until(lambda: read_job(slurm_cluster, job)["JobState"] == "RUNNING")
    urgent = submit(
        slurm_cluster, "-N2", "--exclusive", f"--partition={URGENT_PARTITION}", "--wrap", "true"
    )
    wait_until(lambda: read_job(slurm_cluster, urgent)["JobState"] == "COMPLETED")
    assert read_job(slurm_cluster, job)["Restarts"] == "1"
    slurm_cluster.run("scancel", job)


def test_a_node_that_fails_comes_back(slurm_cluster: Cluster) -> None:
    lab = slurm_cluster.lab
    assert lab.fail("n2") >= 1
    assert lab.status()["nodes"][1]["processes"] == 0
    lab.heal("n2")
    wait_until(lambda: lab.read_states() == {"n1": "idle", "n2": "idle"})
    assert slurm_cluster.run("srun", "-w", "n2", "echo", "back") == "back\n"


def test_a_cut_cable_is_shown_and_mended(slurm_cluster: Cluster) -> None:
    lab = slurm_cluster.lab
    if lab.layout.plain:
        pytest.skip("nodes of a plain lab have no cables")
    lab.cut("n1")
    assert [node["cut"] for node in lab.status()["nodes"]] == [True, False]
    lab.heal("n1")
    assert lab.describe_nodes()[0].startswith("n1  idle")


def test_a_command_that_fails_raises_with_its_output(
    slurm_cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 1\n.*nonsense"):
        slurm_cluster.run("srun", "--partition=nonsense", tmp_path / "true")
