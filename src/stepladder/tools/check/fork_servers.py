"""The processes from which the ranks of all starts of one check are forked, seen by the checker."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import psutil

from stepladder.tools.check.events import LoadedLibraries
from stepladder.tools.check.forked_rank import ForkRequest
from stepladder.tools.check.isolation.sandbox import Sandbox
from stepladder.tools.check.isolation.summary import summarize
from stepladder.tools.check.recording import Recording
from stepladder.tools.probe.startup.sitecustomize import ATTACHED_AFTER_TORCH

# -P: the user's working folder is not searched for modules.
SERVER_CODE = (
    "import sys; from stepladder.tools.check import forked_rank; forked_rank.main(int(sys.argv[1]))"
)
MAX_REPLY_BYTES = 1 << 16


class ForkServers:
    """One server for each rank, since sets of texts have another order on each."""

    def __init__(self) -> None:
        self.servers: dict[int, ForkServer] = {}
        self.libraries: tuple[str, ...] = ()

    def preload(self, recording: Recording, sandbox: Sandbox) -> None:
        """Let the servers import what a run has imported, if that changed no file of the user's.

        Args:
            recording: A run.
            sandbox: Where it ran.
        """
        isolation = summarize(sandbox)
        if not isolation.written and not isolation.refused:
            names = [name for _, event in recording.select(LoadedLibraries) for name in event.names]
            self.libraries = tuple(dict.fromkeys(names))

    def fork(self, rank: int, request: ForkRequest, output: int) -> ForkedProcess:
        """Start the process of one rank.

        Args:
            rank: The number of the rank.
            request: What the process does.
            output: The descriptor of the file for what it prints.
        """
        server = self.servers.get(rank)
        if server is None or server.is_over:
            env = {k: v for k, v in request.env.items() if k not in ATTACHED_AFTER_TORCH}
            server = self.servers[rank] = ForkServer(env, output)
        return server.fork(replace(request, libraries=self.libraries), output)

    def close(self) -> None:
        for server in self.servers.values():
            server.close()


class ForkServer:
    """A process that has imported torch, and forks a process for each request.

    Args:
        env: Its environment variables.
        output: The descriptor of the file for what its imports print.
    """

    def __init__(self, env: dict[str, str], output: int) -> None:
        self.connection, other = socket.socketpair()
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-c", SERVER_CODE, str(other.fileno())],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )
        self.is_over = False
        self.requests = 0
        self.pids: list[int] = []  # in the order of the requests
        self.codes: dict[int, int] = {}
        self.unread = b""

    def fork(self, request: ForkRequest, output: int) -> ForkedProcess:
        with suppress(BrokenPipeError, ConnectionResetError):  # then `receive` sees the end
            request.send(self.connection, output)
        self.requests += 1
        return ForkedProcess(self, self.requests - 1)

    def receive(self, wait: bool) -> None:
        """Learn which forks were made, and which have ended."""
        if self.is_over or not select.select([self.connection], [], [], None if wait else 0)[0]:
            return
        reply = b""
        with suppress(ConnectionResetError):
            reply = self.connection.recv(MAX_REPLY_BYTES)
        self.is_over = not reply
        self.unread += reply
        *lines, self.unread = self.unread.split(b"\n")
        for line in lines:
            pid, *code = map(int, line.split())
            if code:
                self.codes[pid] = code[0]
            else:
                self.pids.append(pid)

    def close(self) -> None:
        """End the server, its forks, and what they have left behind."""
        left = find_descendants(self.process.pid)
        self.process.kill()
        kill_all(left)
        self.connection.close()
        self.process.wait()


class ForkedProcess:
    """The process of a rank.

    Args:
        server: The process that makes it.
        number: The number of the request to the server.
    """

    def __init__(self, server: ForkServer, number: int) -> None:
        self.server = server
        self.number = number

    def poll(self) -> int | None:
        """Return the exit code; None as long as the process runs."""
        self.server.receive(wait=False)
        return self.code

    @property
    def code(self) -> int | None:
        server = self.server
        is_known = self.number < len(server.pids)
        code = server.codes.get(server.pids[self.number]) if is_known else None
        if code is None and server.is_over:
            return server.process.wait() or -signal.SIGKILL
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to all processes of the session that this process leads, if it runs."""
        if self.number < len(self.server.pids) and self.code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.server.pids[self.number], number)

    def kill_with_children(self) -> None:
        """Kill all processes of the session that this process leads or has led, and its children.

        The ranks of a torchrun that the script has started lead sessions of their own.
        """
        while self.number >= len(self.server.pids) and not self.server.is_over:
            self.server.receive(wait=True)
        if self.number >= len(self.server.pids):
            return
        pid = self.server.pids[self.number]
        children = find_descendants(pid)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            if self.code is None:  # it does not lead its session yet, or has ended just now
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        kill_all(children)
        while self.code is None:
            self.server.receive(wait=True)


def find_descendants(pid: int) -> list[psutil.Process]:
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(pid).children(recursive=True)
    return descendants


def kill_all(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
