"""Commands as forks of a process that has imported torch, in place of new interpreters: two seconds
less each.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PROCESS = Path(__file__).with_name("warm_process.py")
PROGRAMS = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run"),
    "stepladder": ("-m", "stepladder"),
}
LARGEST = 1 << 17  # bytes of a request: one message
NUMBER = struct.Struct("q")
# Read when Python or a library is loaded: where one differs, a fork is no new interpreter.
AT_START = (
    "PYTHON",
    "ATEN_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "TORCH",
    "PYTORCH_",
    "CUDA_",
    "NCCL_",
    "MALLOC_",
    "LD_",
    "LC_",
    "LANG",
)


# But for how long idle threads spin, since what they compute is the same; what torch itself sets in
# the tests' own process at its first optimizer; and what torchrun reads and tells its ranks.
NOT_READ = (
    "OMP_WAIT_POLICY",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTHON_EXEC",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
)
THREADS = "OMP_NUM_THREADS"


def at_start(env: Mapping[str, str]) -> dict[str, str]:
    start_env = {name: value for name, value in env.items() if name.startswith(AT_START)}
    return {
        name: value
        for name, value in start_env.items()
        if not name.startswith(NOT_READ) and not (name == THREADS and threads(env))
    }


def threads(env: Mapping[str, str]) -> int:
    """The number of threads that is asked for, which torch can be told later as well; 0: none, or
    an odd one.
    """
    value = env.get(THREADS, "")
    return int(value) if value in ("1", "2", "3", "4") else 0


def can_run(args: Sequence[str]) -> bool:
    """Whether these arguments of `python` name a module or a file of ours."""
    args = args[args[:1] == ["-u"] :]
    return len(args) > 0 and (
        args[0] == "-m" or args[0].endswith(".py") or Path(args[0]).name in PROGRAMS
    )


class Server:
    """The process that forks, as its client sees it; started at the first command.

    before: words before its own command, as `setpriv` and its flags.  given: variables besides
    ours."""

    def __init__(self, before: Sequence[str] = (), given: Mapping[str, str] | None = None) -> None:
        self.before = before
        self.given = given or {}
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self.process and self.process.pid

    def _start(self) -> None:
        SERVERS.append(self)
        ours = {name: value for name, value in os.environ.items() if name != THREADS}
        full_env = {**ours, **self.given}
        self.env = at_start(full_env)
        self.folder = Path(tempfile.mkdtemp(prefix="warm-"))
        self.address = self.folder / "socket"
        self._write_commands()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.address))
            listener.listen(64)
            theirs, self.alive = os.pipe()
            # No terminal: how the streams are written to, the forked processes take over.
            self.process = subprocess.Popen(
                [*self.before, sys.executable, PROCESS, str(listener.fileno()), str(theirs)],
                pass_fds=(listener.fileno(), theirs),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**full_env, "PYTHONHASHSEED": "0"},  # else a rank of `train` starts anew
            )
            os.close(theirs)

    def start_once(self) -> None:
        with self.lock:
            if self.process is None:
                self._start()

    def can_run(self, arguments: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a fork is the same as a new interpreter: for a module or a file, in an
        environment like ours.
        """
        self.start_once()
        return (
            arguments[0] == sys.executable and can_run(arguments[1:]) and at_start(env) == self.env
        )

    def ranks(self) -> dict[str, str]:
        """A variable by which torchrun's ranks are forked as well: its name for another Python."""
        return {"PYTHON_EXEC": str(self.commands() / "python")}

    def commands(self) -> Path:
        """A folder for the front of PATH: what a shell starts by these names is forked as well."""
        self.start_once()
        return self.folder

    def _write_commands(self) -> None:
        lines = [
            f"#!{sys.executable} -IS",  # I and S: nothing is imported that is not needed
            f"import sys; sys.path.append({str(PROCESS.parent)!r})",
            f"from warm_command import main; main({str(self.address)!r}, {self.env!r}, {sys.executable!r})",
        ]
        for name in PROGRAMS:
            (self.folder / name).write_text("\n".join(lines))
            (self.folder / name).chmod(0o755)

    def start(
        self,
        arguments: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        streams: tuple[int, int],
        new_session: bool,
    ) -> Forked:
        """`words` in `cwd`, with nothing to read. streams: file descriptors that it writes to."""
        try:
            with Path(os.devnull).open() as nothing:
                request = [list(arguments[1:]), str(cwd), dict(env), new_session], False
                return Forked(arguments, ask(self.address, request, [nothing.fileno(), *streams]))
        except OSError as error:
            assert self.process is not None
            output = self.process.communicate()[1].decode()
            raise AssertionError(
                f"the process that forks has ended with {self.process.returncode}\n{output}"
            ) from error

    def stop(self) -> None:
        if self.process is not None:
            os.close(self.alive)
            _, output = self.process.communicate()
            sys.stderr.buffer.write(output)
            shutil.rmtree(self.folder)
            self.process = None
            SERVERS.remove(self)


def ask(address: Path, request: object, streams: Sequence[int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(address))
    socket.send_fds(connection, [json.dumps(request).encode()], streams)
    return connection


SERVERS: list[Server] = []  # that were started
SERVER = Server()


class Forked:
    """A command that was forked, with as much of `subprocess.Popen` as tests need."""

    def __init__(self, args: Sequence[str], connection: socket.socket) -> None:
        self.args = args
        self.connection = connection
        self.returncode: int | None = None
        self.pid = self._number()

    def _number(self) -> int:
        message = self.connection.recv(NUMBER.size)
        if not message:
            raise ConnectionResetError
        return int(NUMBER.unpack(message)[0])

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._number()
            self.connection.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
