"""`--hosts a,b`: the same command on each host, over the OpenSSH client; the first host is where
nodes meet.

Each agent ends when its stdin does: when this launcher, its connection or its machine is gone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from stepladder.core.address import format_endpoint, validate_reachable
from stepladder.core.console import print_message
from stepladder.core.errors import BAD_INPUT, DONE, FAILED, STOPPED, InputError
from stepladder.core.process_count import parse_range
from stepladder.core.signing import make_secret
from stepladder.launcher.host import Host, environment
from stepladder.launcher.local.output import Output, Stream, poll_readable
from stepladder.launcher.probe import probe_all
from stepladder.launcher.stdin import AFTER_SECRET, ENDS_WITH_STDIN, SECONDS_TO_END
from stepladder.launcher.topology import Topology

SECONDS_FOR_OTHER_HOSTS = 15.0  # to end by themselves after one has failed
SSH_FAILED = 255
FILES_PER_HOST, FILES_OF_A_COMMAND = (
    3,
    100,
)  # its three streams; Python's own, and those of the probes


def run_on_hosts(arguments: Sequence[str], hosts: str, ssh: str, topology: Topology) -> int:
    """The command of `arguments` on each of `hosts`. Returns the exit code. Raises InputError
    before all starts.

    arguments: run or train, and what followed it; --hosts is taken out of it here.
    """
    found = Host.read_all(hosts, ssh)
    least, most = parse_range("--nodes", topology.nodes or str(len(found)))
    if not least <= len(found) <= most:
        raise InputError(
            f"--nodes {topology.nodes} with {len(found)} hosts",
            f"--nodes {len(found)}, or leave it out",
        )
    if shutil.which(found[0].ssh[0]) is None:
        raise InputError(
            f"--hosts needs {found[0].ssh[0]}, which is not here", "apt-get install openssh-client"
        )
    allow_open_files(FILES_PER_HOST * len(found))
    answers = probe_all(found)
    endpoint = topology.endpoint or format_endpoint(*answers[0])
    name, *rest = without(arguments, "--hosts")
    commands = []
    for host, (address, _) in zip(found, answers, strict=True):
        flags = [] if topology.nodes else ["--nodes", str(len(found))]
        if len(found) > 1:
            validate_reachable("--hosts:", address, "")
            flags += ["--rdzv-endpoint", endpoint, "--local-addr", topology.local_addr or address]
        commands.append((host, [name, *flags, *rest]))
    return Agents(commands, fixed=least == most, raw_stdout=name == "train").run()


def allow_open_files(count: int) -> None:
    """So many more than a command needs otherwise. Raises InputError where the limit does not let
    us.
    """
    import resource  # late: Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + FILES_OF_A_COMMAND
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise InputError(
                f"--hosts needs {wanted} open files, and the limit is {hard}", f"ulimit -n {wanted}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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

    fixed: when one fails, all end.  raw_stdout: stdout is shown as it is, for programs that read
    it."""

    def __init__(
        self, commands: list[tuple[Host, list[str]]], fixed: bool, raw_stdout: bool
    ) -> None:
        self.commands, self.fixed, self.raw_stdout = commands, fixed, raw_stdout
        self.output, self.secret = Output(prefixed=True), make_secret()
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
                if not self.stop_asked:
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
            stdin=subprocess.PIPE,
            stdout=pipes[1][1],
            stderr=pipes[2][1],
            start_new_session=True,
        )
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
            self.output.read(poll_readable(self.output.streams, 0.2))
        else:
            time.sleep(0.05)
        failed = [
            process
            for process in self.processes.values()
            if process.poll() not in (None, DONE, STOPPED)
        ]
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
        deadline = time.monotonic() + SECONDS_TO_END + 5
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self.output.drain()
        self.output.close()

    def _code(self) -> int:
        codes = {name: process.returncode for name, process in self.processes.items()}
        for name, code in codes.items():
            if code == SSH_FAILED:
                print_message(f"host {name.rpartition(' ')[0]}: the connection was lost")
        found = set(codes.values())
        if found <= {DONE, STOPPED}:
            return max(found)
        if not self.fixed and found & {
            DONE,
            STOPPED,
        }:  # others have gone on without those that failed
            return DONE if DONE in found else STOPPED
        return BAD_INPUT if BAD_INPUT in found else FAILED
