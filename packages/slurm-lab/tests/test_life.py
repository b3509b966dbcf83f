"""A cluster comes up with one command, and nothing of it is left after another one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from lab_commands import (
    COMMAND,
    StartedLab,
    expect_refusal,
    find_obstacle,
    find_processes_with,
    is_alive,
    list_network_parts,
    run,
    start_lab,
    wait_until,
)
from slurm_lab import machine

needs_networks = pytest.mark.skipif(bool(find_obstacle()), reason=find_obstacle())


@needs_networks
def test_a_second_lab_and_unknown_nodes_are_refused() -> None:
    with start_lab("--nodes", 2) as lab:
        expect_refusal(lab.run("up"), "a lab is up already, with 2 nodes", "slurm-lab down")
        expect_refusal(lab.run("fail", "n9"), "no node 'n9'; its nodes are n1, n2")
        refusal = expect_refusal(lab.run("exec", "--", "nonsense"), "nonsense: No such file")
        assert refusal.endswith("slurm-lab exec -- srun -N2 hostname")
        process = lab.run("exec", "--node", "n2", "--", "sh", "-c", "hostname; exit 7")
        assert (process.returncode, process.stdout) == (7, "n2\n")
        assert (
            lab.succeed("status").splitlines()[-1] == f"export SLURM_CONF={lab.folder}/slurm.conf"
        )


@needs_networks
def test_up_that_fails_half_way_takes_everything_down_again(tmp_path: Path) -> None:
    program = tmp_path / "slurmd"
    program.write_text(
        "#!/bin/sh\n"
        "echo fatal: nothing works on $(ip netns identify $$) at $(date +%s%N) >&2; exit 1\n"
    )
    program.chmod(0o755)
    with TemporaryDirectory(prefix="slurm-lab-", dir="/tmp") as state:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        line = expect_refusal(
            run("up", state=Path(state), env=env), "ended: fatal: nothing works on sl"
        )
        ((bridge, began_ns),) = re.findall(r" on (sl\d+)n\d+ at (\d+)", line)
        assert not list(Path(state).iterdir())
        # Another lab, which starts meanwhile, may take the names that are free again.
        parts = list_network_parts(bridge)
        assert not [
            name for name, number in parts if name.startswith("netns") and number < int(began_ns)
        ]
        assert not find_processes_with(state)


@needs_networks
def test_down_leaves_nothing_even_of_a_lab_whose_daemons_were_killed() -> None:
    with start_lab("--nodes", 2, "--gpus", 8) as lab:
        job = ("sbatch", "-N2", "--gpus-per-node=8", "--output=/dev/null")
        lab.succeed("exec", "--", *job, "--wrap", "srun sleep 300; sleep 300")
        wait_until(lambda: min(node["processes"] for node in lab.read_nodes().values()) >= 3)
        first = f"sl{lab.read_record()['layout']['number']}"
        parts = list_network_parts(first)
        assert len(parts) == 2 + 2 + 1, "two namespaces, two cables, a bridge"
        for daemon in lab.read_record()["daemons"].values():
            os.kill(daemon["pid"], signal.SIGKILL)
        lab.succeed("up", "--nodes", 1)
        assert list(lab.read_nodes()) == ["n1"]
        second = f"sl{lab.read_record()['layout']['number']}"
        new_parts = list_network_parts(second)
        assert len(new_parts) == 1 + 1 + 1
        lab.succeed("down")
        assert not lab.folder.parent.exists()
        assert not parts & list_network_parts(first)
        assert not new_parts & list_network_parts(second)
        assert not find_processes_with(str(lab.folder))


KILLED = """
import signal
from slurm_lab import LabSize, start_cluster
with start_cluster(LabSize(nodes=1)) as cluster:
    print(cluster.lab.layout.folder, flush=True)
    signal.pause()
"""


@needs_networks
def test_a_killed_test_session_leaves_no_daemon() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().decode().strip())
        lab = StartedLab(folder.parents[1], COMMAND)
        daemons = lab.read_record()["daemons"].values()
        processes = [psutil.Process(daemon["pid"]) for daemon in daemons]
        assert len(processes) == 3
        process.kill()
    wait_until(lambda: not any(map(is_alive, processes)))
    wait_until(lambda: not lab.state.exists())


# -- without root ----------------------------------------------------------------------------------

NOBODY = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
READS_ALL = (  # but writes nothing
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search",
)


@pytest.fixture
def nobody() -> tuple[str, ...]:
    """Return the command `slurm-lab` of an ordinary user who may read this environment."""
    if reason := find_obstacle():
        pytest.skip(reason)
    for prefix in (NOBODY, (*NOBODY, *READS_ALL)):
        command = (*prefix, *COMMAND)
        process = subprocess.run([*command, "--version"], cwd="/", capture_output=True, check=False)
        if process.returncode == 0:
            return command
    pytest.skip("an ordinary user may not read this environment, nor be given the right")


def list_names_on(node: str, lab: StartedLab) -> set[str]:
    """Return the names of a node's processes."""
    names = set()
    for process in machine.find_plain_node_processes(node, lab.folder):
        try:
            names.add(process.name())
        except psutil.NoSuchProcess:
            continue
    return names


def test_a_plain_lab_needs_no_root(nobody: tuple[str, ...]) -> None:
    with start_lab("--plain", "--nodes", 2, "--gpus", 2, command=nobody) as lab:
        assert {node["address"] for node in lab.read_nodes().values()} == {"127.0.0.1"}
        print_user = ("sh", "-c", "id -un; echo $CUDA_VISIBLE_DEVICES")
        output = lab.succeed("exec", "--", "srun", "-N2", "--gpus-per-node=2", *print_user)
        assert sorted(output.split()) == ["0,1", "0,1", "nobody", "nobody"]
        job = ("sbatch", "-N2", "--output=/dev/null")
        lab.succeed("exec", "--", *job, "--wrap", "srun env -i sleep 300; sleep 300")
        wait_until(lambda: {"slurmd", "slurmstepd", "sleep"} <= list_names_on("n2", lab))
        remaining = machine.find_plain_node_processes("n2", lab.folder)
        lab.succeed("fail", "n1")
        nodes = lab.read_nodes()
        assert nodes["n1"]["processes"] == 0 < nodes["n2"]["processes"]
        expect_refusal(lab.run("cut", "n2"), "needs a network per node", "as root")
        expect_refusal(lab.run("exec", "--node", "n2", "--", "ls"), "needs a network per node")
    assert not [process for process in remaining if is_alive(process)]
    assert not find_processes_with(str(lab.folder))


def test_networks_without_root_are_refused(nobody: tuple[str, ...], tmp_path: Path) -> None:
    process = run("up", state=tmp_path, command=nobody)
    expect_refusal(process, "a network per node needs root", "slurm-lab up --plain")
