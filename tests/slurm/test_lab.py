"""`stepladder lab`, the front of slurm_lab: its errors and output, and ranks on its nodes.

The tests of the cluster itself are in packages/slurm-lab/tests.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import slurm_lab
from labs import TestLab, why_not
from processes import is_alive, refused, run, train, wait_until
from stepladder.core.address import validate_reachable
from stepladder.core.errors import InputError

pytestmark = pytest.mark.ranks
needs_lab = pytest.mark.skipif(bool(why_not()), reason=why_not())


MOVED = "export XDG_STATE_HOME=$(mktemp -d); stepladder lab up"


def test_every_node_has_its_own_name_address_and_gpus(lab: TestLab) -> None:
    assert sorted(lab.slurm("srun", "-N4", "hostname").split()) == ["n1", "n2", "n3", "n4"]
    command = "hostname -I; echo $CUDA_VISIBLE_DEVICES"
    observed = lab.slurm(
        "srun", "-N1", "-w", "n3", "--gpus-per-node=2", "sh", "-c", command
    ).split()
    node = lab.nodes()["n3"]
    assert {node["address"], node["address6"]} >= set(observed) - {"0,1"}
    assert (observed[0], observed[-1]) == (node["address"], "0,1")


def test_ranks_of_a_plain_srun_find_each_other_and_give_the_bits_of_one_process(
    lab: TestLab, tmp_path: Path
) -> None:
    command = "mlp", "--sync", "exact", "--steps", 20, "--run-dir"
    lab.slurm(
        "srun", "-N2", "--ntasks-per-node=1", "stepladder", "train", *command, "two", cwd=tmp_path
    )
    alone = train(*command, "one", cwd=tmp_path)
    stored = json.loads((tmp_path / "two/result.json").read_text())
    assert (stored["world_size"], stored["weights_sha256"]) == (2, alone["weights_sha256"])


DEBIAN = 'sed "/ $(hostname)$/s/.*/127.0.1.1 $(hostname)/" /etc/hosts > $0.$(hostname)\n'
DEBIAN += 'mount --bind $0.$(hostname) /etc/hosts; getent hosts $(hostname); exec "$@"'


@pytest.mark.slow
def test_a_host_name_that_is_a_loopback_address_keeps_no_ranks_apart(
    lab: TestLab, tmp_path: Path
) -> None:
    """Debian sets machines up so; gloo by itself would make other nodes connect to 127.0.1.1."""
    command = "stepladder", "train", "mlp", "--steps", 2, "--run-dir", "run"
    on_debian = "unshare", "--mount", "sh", "-c", DEBIAN, tmp_path / "hosts", *command
    message = lab.slurm("srun", "-N2", "--ntasks-per-node=1", *on_debian, cwd=tmp_path)
    assert message.count("127.0.1.1") == 2
    assert json.loads((tmp_path / "run/result.json").read_text())["world_size"] == 2


def test_exec_is_the_command_itself_on_a_node_or_outside(lab: TestLab) -> None:
    assert (
        lab.lab("exec", "--node", "n2", "--", "sh", "-c", "hostname; exit 7", code=7).stdout
        == "n2\n"
    )
    assert lab.lab("exec", "--", "sinfo", "--noheader", "--format=%D").stdout.split() == ["4"]


@needs_lab
@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("up",), ("a lab is up already, with 4 nodes", "stepladder lab down")),
        (("fail", "n9"), ("no node 'n9'; its nodes are n1, n2, n3, n4", "stepladder lab status")),
        (("exec", "--", "nonsense"), ("nonsense: No such file", "stepladder lab exec -- srun")),
    ],
)
def test_what_a_lab_cannot_do_is_refused(
    lab: TestLab, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    refused(lab.lab(*arguments, code=2), *parts)


@pytest.mark.parametrize(
    "arguments", [("status",), ("exec", "--", "sinfo"), ("cut", "n1"), ("down",)]
)
def test_without_a_lab_every_command_says_so(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run("lab", *arguments, cwd=tmp_path, env={"XDG_STATE_HOME": str(tmp_path)})
    refused(done, "no lab is up", "stepladder lab up --nodes 2")


@pytest.mark.parametrize("flags", [("--nodes", 0), ("--nodes", 65), ("--cpus", 0), ("--gpus", 17)])
def test_impossible_sizes_are_refused(tmp_path: Path, flags: tuple[object, ...]) -> None:
    refused(
        run("lab", "up", *flags, cwd=tmp_path, env={"XDG_STATE_HOME": str(tmp_path)}),
        f"{flags[0]} {flags[1]}",
    )
    assert not list(tmp_path.iterdir())


@needs_lab
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    done = run("lab", "up", "--plain", cwd=tmp_path, env={"XDG_STATE_HOME": "/proc/none"})
    refused(done, "/proc/none/stepladder/lab cannot be made", MOVED)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from labs import lab_up
with lab_up("--nodes", 1) as lab:
    if os.fork() == 0:
        signal.pause()
    print(lab.folder, flush=True)
    signal.pause()
"""


@needs_lab
@pytest.mark.slow
def test_a_killed_test_run_leaves_no_daemon() -> None:
    """Nor does one that has forked processes which live longer."""
    tests = Path(__file__).parents[1]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tests], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().decode().strip())
        daemons = json.loads((folder / "lab.json").read_text())["daemons"]
        processes = [psutil.Process(daemon["pid"]) for daemon in daemons.values()]
        assert len(processes) == 3
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_alive, processes)))
        wait_until(lambda: not folder.parents[1].exists())
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # and what it has forked
        process.wait()


def test_nodes_of_a_plain_lab_may_meet_on_the_loopback_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1 of many")
    validate_reachable("--rdzv-endpoint", "127.0.0.1", "")
    monkeypatch.setenv("SLURMD_NODENAME", socket.gethostname().partition(".")[0])
    with pytest.raises(InputError, match="loopback"):
        validate_reachable("--rdzv-endpoint", "127.0.0.1", "")


def test_the_command_is_quick_to_explain_itself() -> None:
    code = (
        "import sys, stepladder.cli.lab; "
        "sys.exit('torch' in sys.modules or 'psutil' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FORMER_IMPORTS = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from stepladder.slurm.lab import machine, prepare
    from stepladder.slurm.lab.lab import Lab
    from stepladder.slurm.lab.layout import Layout
import slurm_lab
assert (Lab, Layout) == (slurm_lab.Lab, slurm_lab.Layout)
print(*(f"{w.category.__name__}: {w.message}" for w in caught), sep="\\n")
"""


def test_the_former_import_path_works_and_names_its_successor() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORMER_IMPORTS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("DeprecationWarning: stepladder.slurm.lab is the package slurm_lab now")
    assert slurm_lab.__name__ in line
