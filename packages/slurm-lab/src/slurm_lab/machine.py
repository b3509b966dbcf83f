"""What a lab does to this machine: it starts daemons, creates networks, and removes all of it.

Each node of a lab, except for a plain lab, is a network namespace, connected by a virtual cable
(veth) to a bridge; this needs root. The node's processes are all processes in that namespace. The
node's host name and /etc/hosts need two more namespaces. These end with their last process, so
every command on a node creates them again. Daemons are found by a recorded process id, never by
name.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from slurm_lab.errors import LabError
from slurm_lab.layout import LAB_UP, Layout, Node

NAMESPACES_FOLDER = Path("/run/netns")
# Not `ip netns exec`, which mounts /sys again without the cgroups, so that slurmd does not start.
NODE_SETUP_SCRIPT = (
    'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
)
KILL_TIMEOUT_S = 60.0
SBIN_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")  # not on every user's PATH
DAEMON_VARIABLES = ("HOME", "LANG", "TMPDIR", "USER")
NO_NETWORKS_HINT = "slurm-lab up --plain, where this machine gives out no networks"


@dataclass(frozen=True)
class Daemon:
    """A process, identified by its id and its start time, because ids are reused.

    Args:
        pid: The process id.
        born: The start time in clock ticks since the machine's start. The time that psutil
            returns changes if the machine's clock is set.
    """

    pid: int
    born: float

    @staticmethod
    def from_pid(pid: int) -> Daemon:
        """Return the daemon of a running process."""
        return Daemon(pid, _read_start_time(pid))

    def find_process(self, program: str, conf: Path) -> psutil.Process | None:
        """Return the process, None if it has ended or is not this program.

        A recorded id may be wrong, so the program and its SLURM_CONF are compared too.

        Args:
            program: Name of the program.
            conf: The lab's slurm.conf.
        """
        try:
            process = psutil.Process(self.pid)
            if _read_start_time(self.pid) != self.born or not _is_alive(process):
                return None
            if program == LAB_UP:
                return process
            names = {Path(argument).name for argument in process.cmdline()}
            has_conf = process.environ().get("SLURM_CONF") == str(conf)
            return process if program in names and has_conf else None
        except (psutil.Error, OSError, ValueError, OverflowError):
            return None


def _read_start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks, from /proc/PID/stat."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[19])


def make_search_path() -> str:
    """Return a PATH on which Slurm's daemons are found."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN_FOLDERS])


def start_daemon(command: list[str], log: Path, env: dict[str, str]) -> Daemon:
    """Start a process that outlives this one.

    Args:
        command: The command.
        log: The file of its output.
        env: Environment variables. Besides them the daemon gets only DAEMON_VARIABLES: a job brings
            the variables that it needs.

    Returns:
        The daemon.
    """
    inherited = {name: os.environ[name] for name in DAEMON_VARIABLES if name in os.environ}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={"PATH": make_search_path(), **inherited, **env},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    # The kernel shows the arguments of the new program, by which it is found later, a moment after
    # Popen has returned.
    while process.poll() is None and not Path(f"/proc/{process.pid}/cmdline").read_bytes():
        time.sleep(0.001)
    return Daemon.from_pid(process.pid)


def find_plain_node_processes(name: str, folder: Path) -> list[psutil.Process]:
    """Return a plain node's slurmd and slurmstepds, and its tasks with all their children."""
    conf = str(folder / "slurm.conf")
    log = str(folder / f"{name}.log")
    processes = {
        process for process in psutil.process_iter() if _is_on_plain_node(process, name, conf, log)
    }
    for process in list(processes):
        with suppress(psutil.NoSuchProcess):
            # This also finds children that have cleared their environment.
            processes |= set(process.children(recursive=True))
    return list(processes)


def _is_on_plain_node(process: psutil.Process, name: str, conf: str, log: str) -> bool:
    try:
        # A slurmstepd overwrites its environment with its title; it has the node's log open.
        if process.name() == "slurmstepd":
            return any(file.path == log for file in process.open_files())
        env = process.environ()
    except (psutil.Error, OSError):
        return False
    return bool(env.get("SLURMD_NODENAME") == name and env.get("SLURM_CONF") == conf)


def kill_all(find_processes: Callable[[], Iterable[psutil.Process]]) -> None:
    """Kill processes until there are none: one may start another meanwhile.

    All are stopped first, so that none of them reports the end of another to Slurm. A machine
    without power reports nothing; with a report, Slurm would say that the job failed, not the node.

    Args:
        find_processes: Returns the processes to kill.

    Raises:
        RuntimeError: If some are still there after KILL_TIMEOUT_S.
    """
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while alive := [process for process in find_processes() if _is_alive(process)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"cannot be killed: {alive}")
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        psutil.wait_procs(alive, 1.0)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# -- networks --------------------------------------------------------------------------------------


def _run_ip(*arguments: str) -> None:
    """Run the command `ip`.

    Raises:
        LabError: If it fails, as it does without the necessary rights.
    """
    process = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if process.returncode != 0:
        raise LabError(
            f"`ip {' '.join(arguments)}` failed: {process.stderr.strip()}", NO_NETWORKS_HINT
        )


@contextmanager
def lock_networks() -> Iterator[None]:
    """Keep other labs of this machine from changing networks meanwhile."""
    folder = os.open("/run", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def find_free_subnet() -> int:
    """Return the number of a subnet that no other lab has."""
    devices = psutil.net_if_addrs()
    return next(number for number in range(1, 255) if f"sl{number}" not in devices)


def create_networks(layout: Layout) -> None:
    """Create the bridge, and each node's network on it."""
    bridge = layout.bridge
    _run_ip("link", "add", bridge, "type", "bridge")
    _run_ip("addr", "add", f"{layout.address}/24", "dev", bridge)
    _run_ip("link", "set", bridge, "up")
    with_ipv6 = _has_ipv6()
    if with_ipv6:
        _run_ip("addr", "add", f"{layout.address6}/64", "dev", bridge, "nodad")
    for node in layout.all_nodes:
        _create_node_network(node, bridge, with_ipv6)


def _create_node_network(node: Node, bridge: str, with_ipv6: bool) -> None:
    device = node.device
    inside = ["-n", device]
    _run_ip("netns", "add", device)
    _run_ip("link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", device)
    _run_ip("link", "set", device, "master", bridge, "up")
    _run_ip(*inside, "addr", "add", f"{node.address}/24", "dev", "eth0")
    if with_ipv6:
        _run_ip(*inside, "addr", "add", f"{node.address6}/64", "dev", "eth0", "nodad")
    for name in ("lo", "eth0"):
        _run_ip(*inside, "link", "set", name, "up")


def _has_ipv6() -> bool:
    """Return whether this machine has IPv6."""
    setting = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    return setting.exists() and setting.read_text(encoding="utf-8").strip() == "0"


def remove_networks(layout: Layout) -> None:
    """Remove the networks, as far as they exist; their processes must have ended."""
    for node in layout.all_nodes:
        if (NAMESPACES_FOLDER / node.device).exists():
            _run_ip("netns", "del", node.device)
    existing = psutil.net_if_addrs()
    # The kernel removes a namespace and its cable a moment after the last process has ended, so the
    # cable may be there or not, and an error is ignored.
    for device in [*(node.device for node in layout.all_nodes), layout.bridge]:
        if device in existing:
            subprocess.run(["ip", "link", "del", device], capture_output=True, check=False)
    # `ip netns add` has created this folder, as a mount.
    if NAMESPACES_FOLDER.exists() and not any(NAMESPACES_FOLDER.iterdir()):
        subprocess.run(["umount", NAMESPACES_FOLDER], capture_output=True, check=False)
        NAMESPACES_FOLDER.rmdir()


def set_cable(node: Node, up: bool) -> None:
    """Plug or pull a node's network cable.

    Without a cable the node keeps its addresses, and what it sends is lost without an error.
    """
    _run_ip("link", "set", node.device, "up" if up else "down")


def make_node_command(layout: Layout, node: Node, command: list[str]) -> list[str]:
    """Return the command that runs `command` on a node, with its network and its host name."""
    enter_network = ["nsenter", f"--net={NAMESPACES_FOLDER / node.device}"]
    new_namespaces = ["unshare", "--uts", "--mount", "--"]
    setup = ["sh", "-c", NODE_SETUP_SCRIPT, "sh", node.name, str(layout.hosts)]
    return [*enter_network, *new_namespaces, *setup, *command]


def find_node_processes(node: Node) -> list[psutil.Process]:
    """Return all processes in a node's network."""
    try:
        namespace = (NAMESPACES_FOLDER / node.device).stat().st_ino
    except FileNotFoundError:
        return []
    processes = []
    for process in psutil.process_iter():
        with suppress(OSError):  # it has ended
            if Path(f"/proc/{process.pid}/ns/net").stat().st_ino == namespace:
                processes.append(process)
    return processes
