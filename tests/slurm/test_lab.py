"""A real Slurm cluster on this machine: it comes up, can be broken and mended, and leaves nothing
behind.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from labs import TestLab, lab_up, why_not
from processes import COMMAND, is_alive, refused, run, train, wait_until
from stepladder.core.address import validate_reachable
from stepladder.core.errors import InputError
from stepladder.slurm.lab import machine, prepare

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


def test_a_daemon_is_known_though_the_machine_s_clock_was_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    daemon = machine.Daemon.from_pid(os.getpid())
    program = Path(sys.executable).name
    conf = Path("slurm.conf")
    monkeypatch.setattr(psutil.Process, "environ", lambda _: {"SLURM_CONF": "slurm.conf"})
    later_process = machine.Daemon(daemon.pid, daemon.born - 1)
    assert later_process.find_process(program, conf) is None, "another one's number, used again"
    before = psutil.Process.create_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: before(process) + 1)
    assert daemon.find_process(program, conf) is not None


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SBIN_FOLDERS", ())
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(InputError) as caught:
        prepare.validate_programs(plain=False)
    assert caught.value.hint == "apt-get install slurm-wlm munge iproute2 util-linux"
    with pytest.raises(InputError) as caught:
        prepare.validate_programs(plain=True)
    assert caught.value.hint == "apt-get install slurm-wlm munge"


@needs_lab
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    done = run("lab", "up", "--plain", cwd=tmp_path, env={"XDG_STATE_HOME": "/proc/none"})
    refused(done, "/proc/none/stepladder/lab cannot be made", MOVED)


@needs_lab
def test_a_folder_that_slurm_cannot_have_is_refused(tmp_path: Path) -> None:
    for name in ("with space", "x" * 80):
        done = run("lab", "up", cwd=tmp_path, env={"XDG_STATE_HOME": str(tmp_path / name)})
        refused(done, name, MOVED)
        assert not (tmp_path / name).exists()


@needs_lab
def test_up_that_fails_half_way_takes_everything_down_again(tmp_path: Path) -> None:
    program = tmp_path / "slurmd"
    program.write_text(
        "#!/bin/sh\n"
        "echo fatal: nothing works on $(ip netns identify $$) at $(date +%s%N) >&2; exit 1\n"
    )
    program.chmod(0o755)
    with TemporaryDirectory(prefix="lab-") as state:
        env = {"XDG_STATE_HOME": state, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        line = refused(run("lab", "up", cwd=tmp_path, env=env), "ended: fatal: nothing works on sl")
        ((bridge, began_ns),) = re.findall(r" on (sl\d+)n\d+ at (\d+)", line)
        assert not list(Path(state).iterdir())
        # The lab of other tests, which starts meanwhile, may take the names that are free again.
        namespaces = [part for part in network_parts(bridge) if part[0].startswith("netns")]
        assert not [name for name, made_ns in namespaces if made_ns < int(began_ns)]
        assert not processes_with(state)


@pytest.mark.slow
@needs_lab
def test_down_leaves_nothing_even_of_a_lab_whose_daemons_were_killed(tmp_path: Path) -> None:
    """The lab of the other tests is up too: a machine can have several."""
    with lab_up("--nodes", 2, "--gpus", 8) as lab:
        lab.slurm(
            "sbatch",
            "-N2",
            "--gpus-per-node=8",
            "--wrap",
            "srun sleep 300; sleep 300",
            cwd=tmp_path,
        )
        wait_until(lambda: min(node["processes"] for node in lab.nodes().values()) >= 3)
        stored = json.loads((lab.folder / "lab.json").read_text())
        first = f"sl{stored['layout']['number']}"
        parts = network_parts(first)
        assert len(parts) == 2 + 2 + 1, "two namespaces, two cables, a bridge"
        for daemon in stored["daemons"].values():
            os.kill(daemon["pid"], signal.SIGKILL)
        lab.lab("up", "--nodes", 1)
        assert list(lab.nodes()) == ["n1"]
        second = f"sl{json.loads((lab.folder / 'lab.json').read_text())['layout']['number']}"
        new_parts = network_parts(second)
        assert len(new_parts) == 1 + 1 + 1
        lab.lab("down")
        assert not lab.folder.parent.exists()
        assert not parts & network_parts(first) and not new_parts & network_parts(second)
        assert not processes_with(str(lab.folder))


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


def network_parts(bridge: str) -> set[tuple[str, int]]:
    """A lab's namespaces and devices, with what tells them from another lab's, which may take the
    names.

    A namespace's number may be given out again at once, so it is the time at which it was made.
    """
    parts = {
        (f"netns {path.name}", path.stat().st_ctime_ns) for path in Path("/run/netns").glob("*")
    }
    parts |= {(name, number) for number, name in socket.if_nameindex()}
    return {part for part in parts if re.fullmatch(rf"(netns )?{bridge}(n\d+)?", part[0])}


def processes_with(text: str) -> list[psutil.Process]:
    """Processes in whose command or environment the text stands, other than this one's."""
    result = []
    for process in psutil.process_iter():
        try:
            arguments = [*process.cmdline(), *process.environ().values()]
        except (psutil.Error, OSError):
            continue
        if process.pid != os.getpid() and any(text in word for word in arguments):
            result.append(process)
    return result


# -- without root ----------------------------------------------------------------------------------

NOBODY = "setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"
READS_ALL = (
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search",
)  # but writes nothing


@pytest.fixture
def nobody() -> tuple[str, ...]:
    """Words before a command that run it as an ordinary user who may read this checkout."""
    if reason := why_not():
        pytest.skip(reason)
    for arguments in (NOBODY, (*NOBODY, *READS_ALL)):
        tried = subprocess.run(
            [*arguments, *COMMAND, "--version"], cwd="/", capture_output=True, check=False
        )
        if tried.returncode == 0:
            return arguments
    pytest.skip("an ordinary user may not read this checkout, nor be given the right")


@pytest.mark.slow
def test_a_plain_lab_needs_no_root(nobody: tuple[str, ...]) -> None:
    with lab_up(
        "--plain", "--nodes", 2, "--gpus", 2, command=(*nobody, *COMMAND), user="nobody"
    ) as lab:
        assert {node["address"] for node in lab.nodes().values()} == {"127.0.0.1"}
        observed = lab.slurm(
            "srun", "-N2", "--gpus-per-node=2", "sh", "-c", "id -un; echo $CUDA_VISIBLE_DEVICES"
        )
        assert sorted(observed.split()) == ["0,1", "0,1", "nobody", "nobody"]
        lab.slurm("sbatch", "-N2", "-o/dev/null", "--wrap", "srun env -i sleep 300; sleep 300")
        wait_until(lambda: {"slurmd", "slurmstepd", "sleep"} <= names_on("n2", lab))
        remaining = machine.find_plain_node_processes("n2", lab.folder)
        lab.lab("fail", "n1")
        assert lab.nodes()["n1"]["processes"] == 0 < lab.nodes()["n2"]["processes"]
        refused(lab.lab("cut", "n2", code=2), "needs a network per node", "as root")
        refused(lab.lab("exec", "--node", "n2", "--", "ls", code=2), "needs a network per node")
    assert not [process for process in remaining if is_alive(process)]
    assert not processes_with(str(lab.folder))


def names_on(node: str, lab: TestLab) -> set[str]:
    names = set()
    for process in machine.find_plain_node_processes(node, lab.folder):
        with suppress(psutil.NoSuchProcess):
            names.add(process.name())
    return names


def test_networks_without_root_are_refused(nobody: tuple[str, ...], tmp_path: Path) -> None:
    done = run(
        "lab",
        "up",
        cwd=Path("/"),
        env={"XDG_STATE_HOME": str(tmp_path)},
        command=(*nobody, *COMMAND),
    )
    refused(done, "a network per node needs root", "stepladder lab up --plain")


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
