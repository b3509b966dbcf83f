"""`--hosts a,b`: the same command on each host, over the OpenSSH client.

Nodes meet on the first host. Each agent ends when its stdin does: when this launcher, its
connection or its machine is gone.
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
from multiprocessing.connection import wait
from pathlib import Path

from stepladder.core.address import format_endpoint, validate_reachable
from stepladder.core.console import print_message
from stepladder.core.errors import BAD_INPUT, DONE, FAILED, STOPPED, InputError
from stepladder.core.process_count import parse_range
from stepladder.core.signals import handle_signals
from stepladder.core.signing import make_secret
from stepladder.launcher.host import Host, make_environment_script
from stepladder.launcher.local.output import Output, Stream
from stepladder.launcher.probe import probe_all
from stepladder.launcher.stdin import AFTER_SECRET, END_WITH_STDIN_VARIABLE, STDIN_END_TIMEOUT_S
from stepladder.launcher.topology import Topology

OTHER_HOSTS_GRACE_S = 15.0  # for the other hosts to end by themselves after one has failed
KILL_MARGIN_S = 5.0
OUTPUT_POLL_TIMEOUT_S = 0.2
IDLE_POLL_INTERVAL_S = 0.05
SSH_FAILED_CODE = 255
FILES_PER_HOST = 3  # the streams of its ssh
BASE_OPEN_FILES = 100  # of Python, and of the probes


def run_on_hosts(arguments: Sequence[str], hosts: str, ssh: str, topology: Topology) -> int:
    """Run the same command on each host.

    Args:
        arguments: `run` or `train`, and its arguments, --hosts among them.
        hosts: The value of --hosts.
        ssh: The command of the SSH client.
        topology: The nodes and processes that the flags name.

    Returns:
        The exit code.

    Raises:
        InputError: A host cannot run the command; nothing has been started then.
    """
    all_hosts = Host.parse_list(hosts, ssh)
    count = len(all_hosts)
    min_nodes, max_nodes = parse_range("--nodes", topology.nodes or str(count))
    if not min_nodes <= count <= max_nodes:
        raise InputError(
            f"--nodes {topology.nodes} with {count} hosts", f"--nodes {count}, or leave it out"
        )
    client = all_hosts[0].ssh[0]
    if shutil.which(client) is None:
        raise InputError(
            f"--hosts needs {client}, which is not here", "apt-get install openssh-client"
        )
    raise_file_limit(FILES_PER_HOST * count)
    endpoints = probe_all(all_hosts)
    rendezvous_endpoint = topology.endpoint or format_endpoint(*endpoints[0])
    name, *command_arguments = remove_flag(arguments, "--hosts")
    commands = []
    for host, (address, _) in zip(all_hosts, endpoints, strict=True):
        flags = [] if topology.nodes else ["--nodes", str(count)]
        if count > 1:
            validate_reachable("--hosts:", address, topology.local_addr)
            flags += ["--rdzv-endpoint", rendezvous_endpoint]
            flags += ["--local-addr", topology.local_addr or address]
        commands.append((host, [name, *flags, *command_arguments]))
    is_fixed = min_nodes == max_nodes
    return RemoteAgents(commands, is_fixed, raw_stdout=name == "train").run()


def raise_file_limit(count: int) -> None:
    """Let this process open so many files more than it has open, and some for other purposes.

    Raises:
        InputError: The hard limit is too low.
    """
    import resource  # late: Windows has none

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + BASE_OPEN_FILES + len(list(Path("/proc/self/fd").iterdir()))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise InputError(
            f"--hosts needs {needed} open files, and the limit is {hard}", f"ulimit -n {needed}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def remove_flag(arguments: Sequence[str], flag: str) -> list[str]:
    """Return the arguments without the first `flag VALUE` or `flag=VALUE`."""
    remaining = list(arguments)
    for index, argument in enumerate(remaining):
        if argument == flag:
            del remaining[index : index + 2]
            break
        if argument.startswith(f"{flag}="):
            del remaining[index]
            break
    return remaining


class RemoteAgents:
    """The agents on all hosts, each behind an ssh process of this launcher.

    Args:
        commands: The hosts, and the command of each.
        is_fixed: Whether all agents are ended when one fails.
        raw_stdout: Whether stdout is shown without prefixes, for programs that read it.
    """

    def __init__(
        self, commands: list[tuple[Host, list[str]]], is_fixed: bool, raw_stdout: bool
    ) -> None:
        self.commands = commands
        self.is_fixed = is_fixed
        self.raw_stdout = raw_stdout
        # Shows what the agents print.
        self.output = Output(prefixed=True)
        # The secret with which the agents of this launch sign what they publish.
        self.secret = make_secret()
        # The ssh processes, by the name of their host.
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        # The signal that asked this launcher to stop, or 0.
        self.stop_signal = 0
        # The time at which all agents are ended, or None.
        self.deadline: float | None = None

    def run(self) -> int:
        """Run all agents until they have ended, and return the exit code."""
        with ExitStack() as cleanup:
            cleanup.callback(self._end_agents)
            stop_signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            cleanup.enter_context(handle_signals(stop_signals, self._handle_stop_signal))
            for host, command in self.commands:
                if not self.stop_signal:
                    self._start_agent(host, command)
            while any(process.poll() is None for process in self.processes.values()):
                self._poll()
            return self._find_exit_code()

    def _start_agent(self, host: Host, command: list[str]) -> None:
        folder = shlex.quote(str(Path.cwd()))
        program = shlex.join([sys.executable, "-m", "stepladder", *command])
        variables = f"{make_environment_script()} {END_WITH_STDIN_VARIABLE}={AFTER_SECRET}"
        script = f"cd {folder} && {variables} && exec {program}"
        pipes = {number: os.pipe() for number in (1, 2)}
        process = subprocess.Popen(
            [*host.command(), f"sh -c {shlex.quote(script)}"],
            stdin=subprocess.PIPE,
            stdout=pipes[1][1],
            stderr=pipes[2][1],
            start_new_session=True,
        )
        self.processes[f"{host.name} ({len(self.processes)})"] = process
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # ssh has ended: its exit code says why
            process.stdin.write(f"{self.secret}\n".encode())
            process.stdin.flush()
        for number, (reader, writer) in pipes.items():
            os.close(writer)
            is_raw = number == 1 and self.raw_stdout
            prefix = b"" if is_raw else f"[{host.name}] ".encode()
            self.output.streams[reader] = Stream(prefix, number)

    def _handle_stop_signal(self, number: int, *_: object) -> None:
        if self.stop_signal:  # the second signal ends the agents now
            self.deadline = 0.0
        self.stop_signal = number

    def _poll(self) -> None:
        """Show what the agents have printed, and end them after a failure or a stop signal."""
        if self.output.streams:
            self.output.read(wait([*self.output.streams], OUTPUT_POLL_TIMEOUT_S))
        else:
            time.sleep(IDLE_POLL_INTERVAL_S)
        codes = [process.poll() for process in self.processes.values()]
        has_failed = any(code not in (None, DONE, STOPPED) for code in codes)
        if self.deadline is None and self.is_fixed and has_failed:
            self.deadline = time.monotonic() + OTHER_HOSTS_GRACE_S
        overtime = -1.0 if self.deadline is None else time.monotonic() - self.deadline
        if self.stop_signal or overtime > 0:
            self._close_stdin()
        if overtime > STDIN_END_TIMEOUT_S + KILL_MARGIN_S:
            for process in self.processes.values():
                process.kill()

    def _close_stdin(self) -> None:
        """Let the agents end by themselves."""
        for process in self.processes.values():
            if process.stdin is not None and not process.stdin.closed:
                with suppress(BrokenPipeError):
                    process.stdin.close()

    def _end_agents(self) -> None:
        self._close_stdin()
        deadline = time.monotonic() + STDIN_END_TIMEOUT_S + KILL_MARGIN_S
        for process in self.processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
        self.output.drain()
        self.output.close()

    def _find_exit_code(self) -> int:
        for name, process in self.processes.items():
            if process.returncode == SSH_FAILED_CODE:
                print_message(f"host {name.rpartition(' ')[0]}: the connection was lost")
        codes = {process.returncode for process in self.processes.values()}
        if codes <= {DONE, STOPPED}:
            return max(codes)
        if not self.is_fixed:  # the others have continued without those that failed
            for code in (DONE, STOPPED):
                if code in codes:
                    return code
        return BAD_INPUT if BAD_INPUT in codes else FAILED
