"""`--hosts a,b`: the same command on each host, over the OpenSSH client; the first host is where nodes meet.

Each agent ends when its stdin does: when this launcher, its connection or its machine is gone.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from stepladder.core.address import refuse_unreachable, show_endpoint
from stepladder.core.console import say
from stepladder.core.cores import read_range
from stepladder.core.errors import BAD_INPUT, DONE, FAILED, STOPPED, InputError
from stepladder.core.signed import new_secret
from stepladder.launcher.local.output import Output, Stream
from stepladder.launcher.stdin import AFTER_SECRET, ENDS_WITH_STDIN, SECONDS_TO_END
from stepladder.launcher.topology import Topology

SECONDS_TO_CONNECT = 10
SECONDS_FOR_OTHER_HOSTS = 15.0  # to end by themselves after one has failed
SSH_FAILED = 255
# Of this machine's environment, what decides how a job computes; nothing that may be a secret.
SENT = re.compile(
    r"PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_(PREFIX|DEFAULT_ENV)"
    r"|(OMP|MKL|NCCL|GLOO|TORCH|PYTORCH|CUDA|CUBLAS)_\w+"
)
HOST = re.compile(
    r"(?P<user>\w[\w.-]*@)?(?:\[(?P<six>[\da-fA-F:.]+)\]|(?P<bare>[\da-fA-F]*:[\da-fA-F:.]*:[\da-fA-F:.]*)"
    r"|(?P<name>\w[\w.-]*))(?::(?P<port>\d+))?"
)
FREE_PORT = "from stepladder.core.address import free_port; print('PORT=%d' % free_port())"
# A rented machine's own address: sshd's sessions need not have the container's environment.
OWN_ADDRESS = "{ env; tr '\\0' '\\n' < /proc/1/environ; } 2>/dev/null | grep -E '^(NODE_ADDR|RUNPOD_POD_ID)='"
NO_FOLDER, NO_PYTHON = 41, 42


@dataclass(frozen=True)
class Host:
    """One entry of --hosts. target: [user@]host, as ssh has it.  ssh: the client's command."""

    target: str
    port: str
    ssh: tuple[str, ...] = ("ssh",)

    @staticmethod
    def read_all(text: str, ssh: str) -> list[Host]:
        """[user@]host[:port], ... ; an IPv6 address with a port stands in brackets. Raises InputError.

        ssh: --ssh, as a shell takes it.
        """
        hosts = []
        try:
            client = tuple(shlex.split(ssh))
        except ValueError as error:
            raise InputError(f"--ssh {ssh!r} is no command: {error}", "--ssh 'ssh -i KEY'") from error
        if not client:
            raise InputError("--ssh names no command", "--ssh 'ssh -i KEY', or leave it out")
        for entry in text.split(","):
            found = HOST.fullmatch(entry)
            if found is None:
                raise InputError(f"--hosts: {entry!r} is no host", "--hosts node1,user@node2,user@node3:2222")
            name = found["six"] or found["bare"] or found["name"]
            hosts.append(Host((found["user"] or "") + name, found["port"] or "", client))
        return hosts

    @property
    def name(self) -> str:
        host = self.target.rpartition("@")[2]
        return f"{host}:{self.port}" if self.port else host

    def command(self, *options: str) -> list[str]:
        port = ["-p", self.port] if self.port else []
        keep = ["-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"]
        wait = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={SECONDS_TO_CONNECT}"]
        return [*self.ssh, "-T", *wait, *keep, *port, *options, self.target]

    def known_as(self) -> str:
        """Its address, as ssh's configuration resolves the name."""
        shown = subprocess.run(self.command("-G"), capture_output=True, text=True, timeout=20, check=False)
        found = re.search(r"^hostname (\S+)$", shown.stdout, re.MULTILINE)
        return found.group(1) if found else self.target.rpartition("@")[2]

    def refused(self, code: int, error: str) -> InputError:
        """What a probe's failure means, with the command to try."""
        tried = shlex.join([*self.ssh, *(["-p", self.port] if self.port else []), self.target, "true"])
        if code == NO_FOLDER:
            return InputError(
                f"host {self.name} has no folder {Path.cwd()}", "the same path on all hosts: rsync, NFS"
            )
        if code == NO_PYTHON:
            return InputError(
                f"host {self.name} has no stepladder for {sys.executable}", "install it there at the same path"
            )
        last = (error.strip().splitlines() or [f"ssh ended with {code}"])[-1].strip()
        if "Permission denied" in error:
            return InputError(
                f"host {self.name} refuses the SSH key ({last})", f"ssh-copy-id {self.target}, then {tried}"
            )
        if "Host key verification failed" in error or "host key" in error.lower():
            why = "has changed" if "CHANGED" in error else "is not known here"
            return InputError(f"host {self.name}: its SSH host key {why}", f"{tried}, and compare the fingerprint")
        return InputError(f"host {self.name} cannot be reached ({last})", tried)


def run_on_hosts(arguments: Sequence[str], hosts: str, ssh: str, topology: Topology) -> int:
    """The command of `arguments` on each of `hosts`. Returns the exit code. Raises InputError before all starts.

    arguments: run or train, and what followed it; --hosts is taken out of it here.
    """
    found = Host.read_all(hosts, ssh)
    least, most = read_range("--nodes", topology.nodes or str(len(found)))
    if not least <= len(found) <= most:
        raise InputError(
            f"--nodes {topology.nodes} with {len(found)} hosts", f"--nodes {len(found)}, or leave it out"
        )
    if shutil.which(found[0].ssh[0]) is None:
        raise InputError(f"--hosts needs {found[0].ssh[0]}, which is not here", "apt-get install openssh-client")
    told = probe_all(found)
    addresses = [own_address(answers) or host.known_as() for host, answers in zip(found, told, strict=True)]
    endpoint = topology.endpoint or show_endpoint(addresses[0], int(told[0]["PORT"]))
    name, *rest = without(arguments, "--hosts")
    commands = []
    for host, address in zip(found, addresses, strict=True):
        flags = [] if topology.nodes else ["--nodes", str(len(found))]
        if len(found) > 1:
            refuse_unreachable("--hosts:", address, "")
            flags += ["--rdzv-endpoint", endpoint, "--local-addr", topology.local_addr or address]
        commands.append((host, [name, *flags, *rest]))
    return Agents(commands, fixed=least == most, raw_stdout=name == "train").run()


def probe_all(hosts: list[Host]) -> list[dict[str, str]]:
    """What each host says of itself. Raises InputError for the first that cannot run the command."""
    steps = [
        f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null || exit {NO_FOLDER}", environment(),
        f"{shlex.quote(sys.executable)} -c 'import stepladder' 2>/dev/null || exit {NO_PYTHON}",
        f"{shlex.quote(sys.executable)} -c {shlex.quote(FREE_PORT)}", f"{OWN_ADDRESS} || true",
    ]  # fmt: skip
    script = shlex.quote("; ".join(steps))
    probes = [
        subprocess.Popen(
            [*host.command(), f"sh -c {script}"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )
        for host in hosts
    ]  # fmt: skip
    told = [probe.communicate() for probe in probes]
    for host, probe, (_, error) in zip(hosts, probes, told, strict=True):
        if probe.returncode:
            raise host.refused(probe.returncode, error)
    return [dict(line.partition("=")[::2] for line in text.splitlines()) for text, _ in told]


def own_address(told: dict[str, str]) -> str:
    """A RunPod machine's address in its cluster, or its name in the account's private network; "" elsewhere."""
    pod = told.get("RUNPOD_POD_ID")
    return told.get("NODE_ADDR", "") or (f"{pod}.runpod.internal" if pod else "")


def environment() -> str:
    """Shell text that sets there what decides here how a job computes; the same Python first in PATH."""
    sent = {name: value for name, value in os.environ.items() if SENT.fullmatch(name)}
    folder = shlex.quote(str(Path(sys.executable).parent))
    return f'export PATH={folder}:"$PATH" ' + " ".join(
        f"{name}={shlex.quote(value)}" for name, value in sent.items()
    )


def without(arguments: Sequence[str], flag: str) -> list[str]:
    """The arguments but for the first `flag VALUE` or `flag=VALUE`."""
    kept = list(arguments)
    for place, argument in enumerate(kept):
        if argument == flag or argument.startswith(f"{flag}="):
            del kept[place : place + (2 if argument == flag else 1)]
            break
    return kept


class Agents:
    """The agents on all hosts, each at the other end of an ssh of ours.

    fixed: when one fails, all end.  raw_stdout: stdout is shown as it is, for programs that read it.
    """

    def __init__(self, commands: list[tuple[Host, list[str]]], fixed: bool, raw_stdout: bool) -> None:
        self.commands, self.fixed, self.raw_stdout = commands, fixed, raw_stdout
        self.output, self.secret = Output(prefixed=True), new_secret()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stop_asked = 0
        self.deadline: float | None = None

    def run(self) -> int:
        """All agents to their end. Returns the exit code."""
        with ExitStack() as at_end:
            at_end.callback(self._end)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                at_end.callback(signal.signal, number, signal.signal(number, self._ask_to_stop))
            for host, command in self.commands:
                self._start(host, command)
            while any(process.poll() is None for process in self.processes.values()):
                self._look()
            return self._code()

    def _start(self, host: Host, command: list[str]) -> None:
        folder = shlex.quote(str(Path.cwd()))
        words = shlex.join([sys.executable, "-m", "stepladder", *command])
        script = f"cd {folder} && {environment()} {ENDS_WITH_STDIN}={AFTER_SECRET} && exec {words}"
        pipes = {number: os.pipe() for number in (1, 2)}
        name = f"{host.name} ({len(self.processes)})"
        self.processes[name] = subprocess.Popen(
            [*host.command(), f"sh -c {shlex.quote(script)}"],
            stdin=subprocess.PIPE, stdout=pipes[1][1], stderr=pipes[2][1], start_new_session=True,
        )  # fmt: skip
        stdin = self.processes[name].stdin
        assert stdin is not None
        with suppress(BrokenPipeError):  # ssh has ended: its exit code says why
            stdin.write(f"{self.secret}\n".encode())
            stdin.flush()
        for number, (reader, writer) in pipes.items():
            os.close(writer)
            prefix = b"" if number == 1 and self.raw_stdout else f"[{host.name}] ".encode()
            self.output.streams[reader] = Stream(prefix, number, None)

    def _ask_to_stop(self, number: int, *_: object) -> None:
        if self.stop_asked:
            self.deadline = 0.0
        self.stop_asked = number

    def _look(self) -> None:
        """Show what has come; end the others where one has failed, or all where we are asked to."""
        if self.output.streams:
            self.output.read(select.select(list(self.output.streams), [], [], 0.2)[0])
        else:
            time.sleep(0.05)
        failed = [process for process in self.processes.values() if process.poll() not in (None, DONE, STOPPED)]
        if self.deadline is None and self.fixed and failed:
            self.deadline = time.monotonic() + SECONDS_FOR_OTHER_HOSTS
        if self.stop_asked or (self.deadline is not None and time.monotonic() > self.deadline):
            self._close_stdin()
        if self.deadline is not None and time.monotonic() > self.deadline + SECONDS_TO_END + 5:
            for process in self.processes.values():
                process.kill()

    def _close_stdin(self) -> None:
        for process in self.processes.values():
            if process.stdin is not None and not process.stdin.closed:
                with suppress(BrokenPipeError):
                    process.stdin.close()

    def _end(self) -> None:
        self._close_stdin()
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_END + 5)
            process.kill()
            process.wait()
        self.output.drain()
        self.output.close()

    def _code(self) -> int:
        codes = {name: process.returncode for name, process in self.processes.items()}
        for name, code in codes.items():
            if code == SSH_FAILED:
                say(f"host {name.rpartition(' ')[0]}: the connection was lost")
        found = set(codes.values())
        if found <= {DONE, STOPPED}:
            return max(found)
        if not self.fixed and found & {DONE, STOPPED}:  # others have gone on without those that failed
            return DONE if DONE in found else STOPPED
        return BAD_INPUT if BAD_INPUT in found else FAILED
