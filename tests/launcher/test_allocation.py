"""The `srun` that `run` and `train` become inside a Slurm allocation, as text."""

from __future__ import annotations

import sys

import pytest

from stepladder.core.errors import InputError
from stepladder.launcher import allocation
from stepladder.launcher.allocation import Allocation
from stepladder.launcher.topology import Topology

SALLOC = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "gpu[7],gpu[9-10]",
    "SLURM_JOB_CPUS_PER_NODE": "16(x2),8", "SLURM_GPUS_ON_NODE": "4",
}  # fmt: skip
ON_A_NODE = {**SALLOC, "SLURMD_NODENAME": "gpu7"}
COMMAND = [sys.executable, "-m", "stepladder"]


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is drawn at random."""
    monkeypatch.setattr(allocation.secrets, "randbelow", lambda below: 4711 % below)


def srun(env: dict[str, str], topology: Topology, *arguments: str) -> list[str] | None:
    detected = Allocation.detect(env)
    nodes = detected.nodes_to_start(topology) if detected else None
    return (
        detected.srun_command(arguments, topology, nodes, "10.0.0.7")
        if detected and nodes
        else None
    )


def test_on_several_nodes_one_agent_each_meets_at_the_first() -> None:
    assert srun(SALLOC, Topology(), "run", "train.py", "--lr", "1") == [
        "srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=8",
        *COMMAND, "run", "--nodes", "2", "--rdzv-endpoint", "10.0.0.7:24711", "--nproc", "4",
        "train.py", "--lr", "1",
    ]  # fmt: skip


def test_a_range_of_nodes_outlives_the_loss_of_one() -> None:
    command = srun(SALLOC, Topology("1:4", "2"), "train", "mnist", "--nodes", "1:4", "--nproc", "2")
    assert command is not None
    assert command[1:6] == [
        "--nodes=2",
        "--ntasks=2",
        "--ntasks-per-node=1",
        "--no-kill",
        "--kill-on-bad-exit=0",
    ]
    assert command[-9:-5] == ["--nodes", "1:2", "--rdzv-endpoint", "10.0.0.7:24711"]


def test_one_node_is_reached_from_where_salloc_was_typed_and_only_from_there() -> None:
    single_node = {**SALLOC, "SLURM_JOB_NUM_NODES": "1"}
    command = srun(single_node, Topology("", "2"), "run", "--nproc", "2", "x.py")
    assert command is not None and command[-6:] == ["run", "--nodes", "1", "--nproc", "2", "x.py"]
    assert srun({**single_node, "SLURMD_NODENAME": "gpu7"}, Topology(), "run", "x.py") is None
    assert srun(ON_A_NODE, Topology("1"), "run", "--nodes", "1", "x.py") is None


def test_an_ipv6_address_stands_in_brackets() -> None:
    detected = Allocation(3, 2, "n[1-2]")
    assert "[fd00::1]:24711" in detected.srun_command(
        ["run", "x.py"], Topology(), (2, 2), "fd00::1"
    )


@pytest.mark.parametrize(
    ("env", "inside"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": ""}, False),
        (SALLOC, True),
        ({**ON_A_NODE, "SLURM_STEP_NUM_TASKS": "2"}, False),  # srun has started us
        ({**ON_A_NODE, "SLURM_STEP_NUM_TASKS": "1"}, True),  # srun --pty bash
        ({**SALLOC, "RANK": "0"}, False),
        ({**ON_A_NODE, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, False),
    ],
)
def test_an_allocation_is_seen_outside_its_steps_only(env: dict[str, str], inside: bool) -> None:
    assert (Allocation.detect(env) is not None) == inside


def test_a_step_within_an_interactive_step_shares_its_cores() -> None:
    command = srun({**ON_A_NODE, "SLURM_STEP_NUM_TASKS": "1"}, Topology(), "run", "x.py")
    assert command is not None and "--overlap" in command
    assert "--overlap" not in (srun(ON_A_NODE, Topology(), "run", "x.py") or ["--overlap"])


@pytest.mark.parametrize(
    ("changed", "gpus"),
    [
        ({}, 4),
        ({"SLURM_GPUS_ON_NODE": ""}, 0),
        ({"SLURM_GPUS_ON_NODE": "", "SLURM_GPUS_PER_NODE": "a100:2"}, 2),
        ({"SLURM_GPUS_ON_NODE": "gpu:a100:8"}, 8),
    ],
)
def test_processes_per_node_follow_the_gpus(changed: dict[str, str], gpus: int) -> None:
    detected = Allocation.detect({**SALLOC, **changed})
    assert detected is not None and detected.gpus == gpus


def test_more_nodes_than_the_job_has_is_one_line() -> None:
    with pytest.raises(
        InputError, match=r"--nodes 3 in Slurm job 4711, which has 2\. HINT: --nodes 2"
    ):
        srun(SALLOC, Topology("3"), "run", "x.py")
