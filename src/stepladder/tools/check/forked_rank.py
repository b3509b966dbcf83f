"""The process from which ranks are forked, and how a fork becomes a rank.

It has imported torch, which takes most of the time of a short start. It attaches nothing: a fork
attaches the probe by the environment of its own start, before the script runs.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import select
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from stepladder.tools.check.isolation.enter import Entry, enter
from stepladder.tools.check.isolation.kernel import adopt_orphans
from stepladder.tools.probe.startup import sitecustomize

PRELOADED = (
    "stepladder.tools.check.probe.at_start",
    "stepladder.tools.check.probe.attach",
    "stepladder.tools.check.simulated_gpu.patches",
)
MAX_DESCRIPTORS = 3  # the output, and two namespaces
REAP_INTERVAL_S = 0.05
BYTE_COUNT = struct.Struct("!Q")


@dataclass(frozen=True)
class ForkRequest:
    """What a fork becomes.

    Args:
        env: Its environment variables.
        entry: How it enters the sandbox.
        arguments: The script, or `-m` and a module, and the arguments of the script.
        libraries: The modules that the server imports before it forks.
    """

    env: dict[str, str]
    entry: Entry
    arguments: list[str]
    libraries: tuple[str, ...] = ()

    def send(self, connection: socket.socket, output: int) -> None:
        """Send the request, with its output and the descriptors of its namespaces."""
        message = json.dumps(asdict(self)).encode()
        socket.send_fds(
            connection, [BYTE_COUNT.pack(len(message))], [output, *self.entry.descriptors]
        )
        connection.sendall(message)

    @staticmethod
    def receive(connection: socket.socket) -> tuple[ForkRequest, int]:
        """Return a request, and the descriptor of its output."""
        size, (output, *namespaces), *_ = socket.recv_fds(
            connection, BYTE_COUNT.size, MAX_DESCRIPTORS
        )
        (length,) = BYTE_COUNT.unpack(size)
        message = connection.recv(length, socket.MSG_WAITALL)
        fields = json.loads(message)
        entry = replace(Entry(**fields.pop("entry")), descriptors=namespaces, parent=os.getpid())
        return ForkRequest(entry=entry, **fields), output


def main(descriptor: int) -> None:
    """Fork a rank for each request that comes from a socket, and run the script in the fork."""
    if sys.platform == "linux":
        adopt_orphans()  # the checker finds and kills them in the end
    gc.disable()  # saves a fifth of the time that torch's import takes
    for name in PRELOADED:
        importlib.import_module(name)
    gc.enable()
    gc.freeze()
    with socket.socket(fileno=descriptor) as connection:
        request = fork_for_requests(connection)
    run(request)


def fork_for_requests(connection: socket.socket) -> ForkRequest:
    """Return the request of this process, in each fork; the server itself never returns.

    The server writes the process id of each fork, and later its id and its exit code.
    """
    while True:
        if connection in select.select([connection], [], [], REAP_INTERVAL_S)[0]:
            if not connection.recv(1, socket.MSG_PEEK):
                os._exit(0)
            request, output = ForkRequest.receive(connection)
            import_libraries(request.libraries)
            pid = os.fork()
            if not pid:
                os.setsid()
                for descriptor in (1, 2):
                    os.dup2(output, descriptor)
                os.close(output)
                return request
            for descriptor in (output, *request.entry.descriptors):
                os.close(descriptor)
            connection.sendall(b"%d\n" % pid)
        for pid, code in reap_children():
            connection.sendall(b"%d %d\n" % (pid, code))


def import_libraries(names: Sequence[str]) -> None:
    """Import what is not imported yet; what fails is left to the script."""
    if new := [name for name in names if name not in sys.modules]:
        for name in new:
            with suppress(Exception, SystemExit):
                importlib.import_module(name)
        gc.freeze()


def reap_children() -> list[tuple[int, int]]:
    """Return the process ids and exit codes of the forks that have ended."""
    ended = []
    try:
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((result[0], os.waitstatus_to_exitcode(result[1])))
    except ChildProcessError:
        pass
    return ended


def run(request: ForkRequest) -> None:
    """Become what was asked for: enter the sandbox, attach the probe, and run the script."""
    os.environ.clear()
    os.environ.update(request.env)
    enter(request.entry)
    script = request.arguments[0]
    folder = Path.cwd() if script == "-m" else Path(script).resolve().parent
    if hides_imported_module(folder):
        os.execv(request.entry.command[0], request.entry.command)
    forget_server()
    if "PYTHONSAFEPATH" not in os.environ:
        sys.path.insert(0, str(folder))
    sitecustomize.attach(sitecustomize.ATTACHED_AT_START)
    sitecustomize.attach(sitecustomize.ATTACHED_AFTER_TORCH)
    sys.excepthook = show_error
    if script == "-m":
        sys.argv = request.arguments[1:]
        runpy.run_module(request.arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = request.arguments
        run_file(Path.cwd() / script)


def hides_imported_module(folder: Path) -> bool:
    """Return whether a module of the script has the name of one that is imported already.

    A new interpreter would import the script's.
    """
    names = {path.stem for path in folder.glob("*.py")}
    names |= {path.parent.name for path in folder.glob("*/__init__.py")}
    return not names.isdisjoint(sys.modules)


def forget_server() -> None:
    """Forget what the standard library remembers of the server's start."""
    multiprocessing.process.ORIGINAL_DIR = str(Path.cwd())  # type: ignore[attr-defined]
    tempfile.tempdir = None


def run_file(path: Path) -> None:
    """Run a file as `python FILE` does."""
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", str(path))
    vars(module).update(__file__=str(path), __loader__=loader)
    sys.modules["__main__"] = module
    exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))


def show_error(kind: type[BaseException], error: Any, trace: TracebackType | None) -> None:
    """Print an error as Python does, without the frames of this module."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<string>"):
        trace = trace.tb_next
    sys.__excepthook__(kind, error.with_traceback(trace), trace)
