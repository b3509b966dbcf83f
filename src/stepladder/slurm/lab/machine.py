"""What a lab does to this machine: it starts daemons, gives each node a network, and ends all of it
again.

A node with a network has a namespace with a cable (veth) to a bridge, which needs root. Its
processes are those in that namespace. Its host name and /etc/hosts are in namespaces that live as
long as a process does, so every command that runs on a node makes them anew. Processes are found by
recorded id, never by name."""

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

from stepladder.core.errors import InputError
from stepladder.slurm.lab.layout import UP, Layout, Node

NAMESPACES = Path("/run/netns")
# Not `ip netns exec`: it mounts /sys anew without the cgroups, and slurmd refuses to start.
ON_A_NODE = (
    'echo "$1" > /proc/sys/kernel/hostname && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
)
SECONDS_TO_END = 60.0
SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")  # not on every user's PATH


@dataclass(frozen=True)
class Daemon:
    """A process by its id and time of birth: ids are used again.

    born: clock ticks since the machine's start. psutil's time of birth moves when the machine's
    clock is set."""

    pid: int
    born: float

    @staticmethod
    def of(pid: int) -> Daemon:
        return Daemon(pid, _born(pid))

    def process(self, program: str, conf: Path) -> psutil.Process | None:
        """The process, while it lives and is that program of that lab: a record may be wrong."""
        try:
            process = psutil.Process(self.pid)
            if _born(self.pid) != self.born or not _is_alive(process):
                return None
            if program == UP:
                return process
            words = {Path(word).name for word in process.cmdline()}
            ours = program in words and process.environ().get("SLURM_CONF") == str(conf)
            return process if ours else None
        except (psutil.Error, OSError, ValueError, OverflowError):
            return None


def _born(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN])


def start(command: list[str], log: Path, env: dict[str, str]) -> Daemon:
    """A process that outlives this one. It gets a small environment: jobs bring their own."""
    kept = {
        name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR", "USER") if name in os.environ
    }
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={"PATH": search_path(), **kept, **env},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return Daemon.of(process.pid)


def of_plain_node(name: str, folder: Path) -> list[psutil.Process]:
    """A plain node's slurmd, the tasks of its jobs with what they started, and its slurmstepds."""
    conf, log = str(folder / "slurm.conf"), str(folder / f"{name}.log")
    found = {process for process in psutil.process_iter() if _is_of(process, name, conf, log)}
    for process in list(found):
        with suppress(psutil.NoSuchProcess):
            found |= set(process.children(recursive=True))  # those that cleared their environment
    return list(found)


def _is_of(process: psutil.Process, name: str, conf: str, log: str) -> bool:
    try:
        if process.name() == "slurmstepd":  # it writes its title over its environment
            return any(file.path == log for file in process.open_files())
        env = process.environ()
    except (psutil.Error, OSError):
        return False
    return bool(env.get("SLURMD_NODENAME") == name and env.get("SLURM_CONF") == conf)


def end_all(find: Callable[[], Iterable[psutil.Process]]) -> None:
    """Kill what `find` finds until it finds nothing: a process may start another meanwhile.

    Stopped first: the first to be killed must not be reported by the next, for a machine without
    power reports nothing, and Slurm would call the job failed and not its node."""
    deadline = time.monotonic() + SECONDS_TO_END
    while left := [process for process in find() if _is_alive(process)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"cannot be killed: {left}")
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        psutil.wait_procs(left, 1.0)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


# -- networks --------------------------------------------------------------------------------------


def ip(*words: str) -> None:
    """One `ip` command. Raises InputError with its own words: it fails where rights are missing."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InputError(
            f"`ip {' '.join(words)}` failed: {done.stderr.strip()}",
            "stepladder lab up --plain, where this machine gives out no networks",
        )


@contextmanager
def alone() -> Iterator[None]:
    """No other lab of this machine makes or removes its network meanwhile."""
    folder = os.open("/run", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def free_number() -> int:
    """A subnet's number that no other lab has."""
    taken = psutil.net_if_addrs()
    return next(number for number in range(1, 255) if f"sl{number}" not in taken)


def connect(layout: Layout) -> None:
    """The bridge, and every node on it."""
    bridge = layout.bridge
    ip("link", "add", bridge, "type", "bridge")
    ip("addr", "add", f"{layout.address}/24", "dev", bridge)
    ip("link", "set", bridge, "up")
    with_ipv6 = has_ipv6()
    if with_ipv6:
        ip("addr", "add", f"{layout.address6}/64", "dev", bridge, "nodad")
    for node in layout.all_nodes:
        inside = ["-n", node.device]
        ip("netns", "add", node.device)
        ip("link", "add", node.device, "type", "veth", "peer", "name", "eth0", "netns", node.device)
        ip("link", "set", node.device, "master", bridge, "up")
        ip(*inside, "addr", "add", f"{node.address}/24", "dev", "eth0")
        if with_ipv6:
            ip(*inside, "addr", "add", f"{node.address6}/64", "dev", "eth0", "nodad")
        for device in ("lo", "eth0"):
            ip(*inside, "link", "set", device, "up")


def has_ipv6() -> bool:
    switch = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    return switch.exists() and switch.read_text(encoding="utf-8").strip() == "0"


def disconnect(layout: Layout) -> None:
    """Remove what is there of the networks, after the processes in them."""
    for node in layout.all_nodes:
        if (NAMESPACES / node.device).exists():
            ip("netns", "del", node.device)
    existing = psutil.net_if_addrs()
    # A namespace goes with its last process and takes its cable along, but a moment later.
    for device in [*(node.device for node in layout.all_nodes), layout.bridge]:
        if device in existing:
            subprocess.run(["ip", "link", "del", device], capture_output=True, check=False)
    if NAMESPACES.exists() and not any(
        NAMESPACES.iterdir()
    ):  # `ip netns add` made it, as a mount of its own
        subprocess.run(["umount", NAMESPACES], capture_output=True, check=False)
        NAMESPACES.rmdir()


def set_cable(node: Node, up: bool) -> None:
    """As a cable that is pulled: the node keeps its addresses, and what it sends is lost without an
    error.
    """
    ip("link", "set", node.device, "up" if up else "down")


def on_node(layout: Layout, node: Node, command: list[str]) -> list[str]:
    """The command as it runs on the node: with its network, its host name and its view of the
    others.
    """
    namespaces = [
        "nsenter",
        f"--net={NAMESPACES / node.device}",
        "unshare",
        "--uts",
        "--mount",
        "--",
    ]
    return [*namespaces, "sh", "-c", ON_A_NODE, "sh", node.name, str(layout.hosts), *command]


def processes_on(node: Node) -> list[psutil.Process]:
    """All processes in the node's network."""
    try:
        namespace = (NAMESPACES / node.device).stat().st_ino
    except FileNotFoundError:
        return []
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):  # it is gone
            if Path(f"/proc/{process.pid}/ns/net").stat().st_ino == namespace:
                found.append(process)
    return found
