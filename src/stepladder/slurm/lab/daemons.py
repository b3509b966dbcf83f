"""Starting the lab's daemons, and finding and ending processes: by recorded id, never by name."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SECONDS_TO_END = 60.0
SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")  # not on every user's PATH


@dataclass(frozen=True)
class Daemon:
    """A process by its id and time of birth: ids are used again.

    born: clock ticks since the machine's start. psutil's time of birth moves when the machine's clock is set.
    """

    pid: int
    born: float

    @staticmethod
    def of(pid: int) -> Daemon:
        return Daemon(pid, _born(pid))

    def process(self) -> psutil.Process | None:
        """The process, while it lives."""
        try:
            process = psutil.Process(self.pid)
            return process if _born(self.pid) == self.born and _is_alive(process) else None
        except (psutil.NoSuchProcess, OSError):
            return None


def _born(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *SBIN])


def start(command: list[str], log: Path, env: dict[str, str]) -> Daemon:
    """A process that outlives this one. It gets a small environment: jobs bring their own."""
    kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR", "USER") if name in os.environ}
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env={"PATH": search_path(), **kept, **env}, cwd="/", stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
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

    Stopped first: the first to be killed must not be reported by the next, for a machine without power reports
    nothing, and Slurm would call the job failed and not its node.
    """
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
