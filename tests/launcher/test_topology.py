"""The nodes and processes that the variables of a cluster describe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from processes import refused, run
from stepladder.core.errors import InputError
from stepladder.launcher import allocation
from stepladder.launcher.allocation import start_elsewhere
from stepladder.launcher.topology import Topology

RUNPOD: dict[str, Any] = {
    "PRIMARY_ADDR": "10.65.0.2", "PRIMARY_PORT": "29400", "NODE_ADDR": "10.65.0.3", "NODE_RANK": "1",
    "NUM_NODES": "2", "NUM_TRAINERS": "8", "WORLD_SIZE": "16",
}  # fmt: skip


def test_a_rented_cluster_s_variables_are_taken_where_no_flag_names_nodes() -> None:
    topology = Topology().with_cluster_variables(RUNPOD)
    assert (topology.nodes, topology.nproc, topology.endpoint) == ("2", "8", "10.65.0.2:29400")
    assert topology.local_addr == "10.65.0.3" and "--nodes 1" in topology.note
    assert Topology("1").with_cluster_variables(RUNPOD) == Topology("1")
    assert Topology("", "4").with_cluster_variables(RUNPOD).nproc == "4"
    for single in (
        {},
        {"RUNPOD_POD_ID": "x"},
        {**RUNPOD, "NUM_NODES": "1"},
        {**RUNPOD, "RANK": "0"},
    ):
        assert Topology().with_cluster_variables(single) == Topology()
    with pytest.raises(InputError, match="PRIMARY_PORT is not a number"):
        Topology().with_cluster_variables({**RUNPOD, "PRIMARY_PORT": "auto"})


SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-2026-11-25-19-00-00-000000_train_7-1",
}  # fmt: skip


def test_a_skypilot_task_is_its_nodes_and_gpus() -> None:
    topology = Topology().with_cluster_variables(SKYPILOT)
    assert (topology.nodes, topology.nproc, topology.local_addr) == ("2", "8", "10.0.0.5")
    host, _, port = topology.endpoint.partition(":")
    assert host == "10.0.0.4" and 20000 <= int(port) < 32000
    assert "SKYPILOT_NODE_IPS" in topology.note
    on_first = {**SKYPILOT, "SKYPILOT_NODE_RANK": "0"}
    assert Topology().with_cluster_variables(on_first).endpoint == topology.endpoint
    without_gpus = {**SKYPILOT, "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    assert Topology().with_cluster_variables(without_gpus).nproc == ""
    single = {**SKYPILOT, "SKYPILOT_NODE_IPS": "10.0.0.4", "SKYPILOT_NUM_NODES": "1"}
    assert Topology().with_cluster_variables(single) == Topology()
    for typed in (Topology("1"), Topology(hosts="a,b")):
        assert typed.with_cluster_variables(SKYPILOT) == typed


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"SKYPILOT_NUM_NODES": "3"}, "SKYPILOT_NUM_NODES=3 .* names 2 nodes"),
        ({"SKYPILOT_NUM_NODES": "1"}, "SKYPILOT_NUM_NODES=1 .* names 2 nodes"),
        ({"SKYPILOT_NODE_IPS": ""}, r"names 0 nodes \(\)"),
        ({"SKYPILOT_NODE_RANK": "2"}, "SKYPILOT_NODE_RANK=2"),
        ({"SKYPILOT_NODE_RANK": "first"}, "SKYPILOT_NODE_RANK is not a number: 'first'"),
        ({"SKYPILOT_NUM_GPUS_PER_NODE": "all"}, "SKYPILOT_NUM_GPUS_PER_NODE is not a number"),
    ],
)
def test_contradicting_variables_of_skypilot_are_one_line(
    changed: dict[str, str], problem: str
) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        Topology().with_cluster_variables({**SKYPILOT, **changed})
    assert "\n" not in str(caught.value)


# As Grid Engine writes it: a line for each queue in which the job has slots of a host.
HOSTFILE = """node07 2 all.q@node07 UNDEFINED
node08 4 all.q@node08 UNDEFINED
node07 2 long.q@node07 <NULL>
"""


def grid_engine(path: Path, text: str = HOSTFILE, hosts: str = "2") -> dict[str, str]:
    path.write_text(text)
    return {"PE_HOSTFILE": str(path), "NHOSTS": hosts, "NSLOTS": "8", "JOB_ID": "7"}


def test_a_parallel_job_of_grid_engine_is_its_hosts_and_slots(tmp_path: Path) -> None:
    topology = Topology().with_cluster_variables(grid_engine(tmp_path / "pe_hostfile"))
    assert (topology.nodes, topology.nproc, topology.hosts) == ("2", "4", "node07,node08")
    assert "node07: 4, node08: 4" in topology.note
    uneven = grid_engine(tmp_path / "pe_hostfile", "a 4 q@a UNDEFINED\nb 2 q@b UNDEFINED\n")
    assert Topology().with_cluster_variables(uneven).nproc == "2"
    assert Topology("", "1").with_cluster_variables(uneven).nproc == "1"
    on_one_host = grid_engine(tmp_path / "pe_hostfile", "a 8 q@a UNDEFINED\n", "1")
    assert Topology().with_cluster_variables(on_one_host) == Topology()


def test_the_command_is_started_on_the_hosts_of_grid_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(allocation, "end_with_stdin", lambda: None)
    monkeypatch.setattr(
        "stepladder.launcher.ssh.run_on_hosts",
        lambda arguments, hosts, *_: started.append((arguments, hosts)) or 0,
    )
    topology = Topology().with_cluster_variables(grid_engine(tmp_path / "pe_hostfile"))
    assert start_elsewhere(["train", "mlp"], "", "ssh", topology) == 0
    assert started == [(["train", "--nodes", "2", "--nproc", "4", "mlp"], "node07,node08")]


@pytest.mark.parametrize(
    ("text", "hosts", "problem"),
    [
        (HOSTFILE, "3", "NHOSTS=3, but PE_HOSTFILE="),
        ("node07 all.q\n", "1", "has the line 'node07 all.q', not: host slots queue"),
        ("node07\n", "1", "has the line 'node07'"),
    ],
)
def test_a_bad_file_of_grid_engine_is_one_line(
    text: str, hosts: str, problem: str, tmp_path: Path
) -> None:
    env = grid_engine(tmp_path / "pe_hostfile", text, hosts)
    refused(run("train", "mlp", cwd=tmp_path, env=env), problem, "--nodes 1")


def test_a_file_of_grid_engine_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run("train", "mlp", cwd=tmp_path, env={"PE_HOSTFILE": str(tmp_path / "none")})
    refused(done, "cannot be read", "--nodes 1")


STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2",
}  # fmt: skip
ON_NODES = {**STEP, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_LOCALID": "0"}  # fmt: skip
MPI = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29400",
}  # fmt: skip


@pytest.mark.parametrize(
    ("topology", "env", "expected"),
    [
        (Topology(), STEP, Topology()),  # each task is a rank
        (Topology("", "1"), STEP, Topology()),
        (Topology("", "2"), STEP, Topology()),
        (Topology("", "1"), ON_NODES, Topology()),
        (Topology("", "2"), ON_NODES, ("2", "2", "10.0.0.1:20007")),
        (Topology("2"), ON_NODES, ("2", "", "10.0.0.1:20007")),
        (Topology("", "2", "b:1"), ON_NODES, ("2", "2", "b:1")),
        (Topology("2", "2", "b:1"), ON_NODES, Topology("2", "2", "b:1")),
        (Topology("1:2", "2", "b:1"), ON_NODES, Topology("1:2", "2", "b:1")),
        (Topology("", "2"), MPI, ("2", "2", "a:29400")),
        (Topology("", "2"), {**STEP, "RANK": "0"}, Topology("", "2")),
        (Topology("", "2"), {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, Topology("", "2")),
        (Topology("", "3"), STEP, None),
        (Topology("1", "2"), ON_NODES, None),
        (Topology("1"), STEP, None),
    ],
)
def test_the_tasks_of_a_step_start_one_job_or_none(
    monkeypatch: pytest.MonkeyPatch,
    topology: Topology,
    env: dict[str, str],
    expected: Topology | tuple[str, str, str] | None,
) -> None:
    monkeypatch.setattr("stepladder.core.world.find_first_node_address", lambda nodes: "10.0.0.1")
    if expected is None:
        with pytest.raises(InputError, match=r"2 tasks .* none of which knows the others") as error:
            topology.in_step(env)
        assert "--independent" in error.value.hint
        return
    joined = topology.in_step(env)
    if isinstance(expected, tuple):
        assert (joined.nodes, joined.nproc, joined.endpoint) == expected
        assert bool(joined.note)
    else:
        assert joined == expected
