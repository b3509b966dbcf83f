"""The process that `warm.py` starts: it has imported torch and run none of it, and forks what is
asked for.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import json
import multiprocessing.process
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from warm import LARGEST, NUMBER, at_start, threads

PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.utils.tensorboard",
    "sklearn.datasets",
    "stepladder.cli.run",
    "stepladder.cli.train",
    "stepladder.cli.run_dirs",
    "stepladder.cli.recipe",
    "stepladder.cli.profile",
    "stepladder.cli.scale",
    "stepladder.cli.verify",
    "stepladder.train.trainer",
)
UNBUFFERED = "PYTHONUNBUFFERED"
# Set by `stepladder`, and by us; what they change is changed in a fork as well.
GIVEN = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "PYTHONHASHSEED", UNBUFFERED)
BEGUN_WITH = {name: value for name, value in at_start(os.environ).items() if name not in GIVEN}
SPAWN = util.spawnv_passfds  # type: ignore[attr-defined]
FORK_SERVER = "from multiprocessing.forkserver import main; "
SPAWNED = "from multiprocessing.spawn import spawn_main; "
HUGE_PAGE_BYTES = 1 << 21
MADV_COLLAPSE = 25  # since Linux 6.1


class Forks:
    """Forks a process for each request, and says its number and then how it ended."""

    def __init__(self, listener: socket.socket, alive: int) -> None:
        self.listener = listener
        self.alive = alive
        self.clients: dict[int, socket.socket] = {}
        self.bound: dict[socket.socket, int] = {}  # with whom a process ends
        self.selector = selectors.DefaultSelector()
        self.woken, self.wake = os.pipe()
        os.set_blocking(self.wake, False)
        signal.set_wakeup_fd(self.wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the commands

    def serve(self) -> list[Any]:
        """Until the tests have ended. Returns in a process that was forked: its request."""
        for source in (self.listener, self.alive, self.woken):
            self.selector.register(source, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in self.selector.select()}
            if self.alive in ready:
                exit_now(0)
            for client in ready & self.bound.keys():  # which says nothing, so it has ended
                self.selector.unregister(client)
                os.kill(self.bound.pop(client), signal.SIGKILL)
            if self.woken in ready:
                os.read(self.woken, 1 << 16)
                self.tell_of_ends()
            if self.listener in ready and (request := self.fork()):
                return request

    def fork(self) -> list[Any]:
        """The request in the new process, nothing in this one."""
        client, _ = self.listener.accept()
        message, fds, _, _ = socket.recv_fds(client, LARGEST, 3)
        request, is_bound = json.loads(message)
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            self.clients[pid] = client
            if is_bound:
                self.bound[client] = pid
                self.selector.register(client, selectors.EVENT_READ)
            send_pid(client, pid)
            return []
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for tracker in (client, self.listener, self.selector, *self.clients.values()):
            tracker.close()
        for fd in (self.alive, self.woken, self.wake):
            os.close(fd)
        for stream, fd in enumerate(fds):
            os.dup2(fd, stream)
            os.close(fd)
        return request

    def tell_of_ends(self) -> None:
        while self.clients:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self.clients.pop(pid) as client:
                if self.bound.pop(client, None):
                    self.selector.unregister(client)
                send_pid(client, os.waitstatus_to_exitcode(status))


def send_pid(client: socket.socket, number: int) -> None:
    # The test has not waited for the end, or has not read all that it was told.
    with suppress(BrokenPipeError, ConnectionResetError):
        client.send(NUMBER.pack(number))


def become(arguments: list[str], cwd: str, env: dict[str, str], new_session: bool) -> None:
    """Run `python WORDS...` in this process."""
    if new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    multiprocessing.process.ORIGINAL_DIR = cwd  # type: ignore[attr-defined]
    tempfile.tempdir = None
    util.spawnv_passfds = fork_interpreter  # type: ignore[attr-defined]
    if thread_settings := threads(env):
        sys.modules["torch"].set_num_threads(thread_settings)
    main = sys.modules["__main__"] = ModuleType("__main__")
    if arguments[0] == "-u":
        arguments = arguments[1:]
        unbuffer()
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = ["-m", *arguments[2:]], cwd
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    else:
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
        main.__file__ = str(Path(arguments[0]).absolute())
        exec(compile(Path(arguments[0]).read_bytes(), main.__file__, "exec"), main.__dict__)


def unbuffer() -> None:
    """Write what is printed at once, as an interpreter does that is started with -u."""
    for name in ("stdout", "stderr"):
        old: Any = getattr(sys, name)
        raw: Any = io.FileIO(old.fileno(), "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, old.encoding, old.errors, write_through=True))


def fork_interpreter(path: str, args: list[str], passed: Sequence[int]) -> int:
    """What `multiprocessing` starts processes by. Its fork server, or a process of the method
    spawn, is forked.

    They would import torch anew. From a process with threads nothing can be forked that has some as
    well."""
    arguments = [os.fsdecode(arg) for arg in args]
    code, *remaining = arguments[arguments.index("-c") + 1 :]
    env = {name: value for name, value in at_start(os.environ).items() if name not in GIVEN}
    can_be_forked = code.startswith(FORK_SERVER) or (code.startswith(SPAWNED) and is_quiet())
    if not can_be_forked or env != BEGUN_WITH:
        return int(SPAWN(path, args, passed))
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    end = 1
    try:
        begin_anew(passed)
        sys.argv = ["-c", *remaining]
        exec(code, sys.modules["__main__"].__dict__)
        end = 0
    except SystemExit as error:
        end = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    exit_now(end)


def begin_anew(passed: Sequence[int]) -> None:
    """Forget what the command has done: a new interpreter would know nothing of it, but for its
    environment.
    """
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    low = 3
    for fd in [*sorted(passed), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(low, fd)
        low = fd + 1
    atexit._clear()
    util._finalizer_registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # they would close files again
    util._run_after_forkers()  # type: ignore[attr-defined]
    for tracker in (
        forkserver._forkserver,
        resource_tracker._resource_tracker,
    ):  # their locks are held
        tracker.__init__()  # type: ignore[misc]
    sys.modules["__main__"] = ModuleType("__main__")
    if os.environ.get(UNBUFFERED):
        unbuffer()
    sys.modules["torch"].seed()
    random.seed()
    if thread_settings := threads(os.environ):
        sys.modules["torch"].set_num_threads(thread_settings)


def is_quiet(daemons: int = 0) -> bool:
    """Whether nothing goes on here that an interpreter would wait for at its end, or that could
    disturb it.

    daemons: Python's threads besides the main one that may run, which no interpreter waits for.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if (
        len(others) > daemons
        or not all(thread.daemon for thread in others)
        or sys.modules["torch"].distributed.is_initialized()
    ):
        return False
    with suppress(OSError):  # a thread that has ended meanwhile
        return len({name.read_text() for name in Path("/proc/self/task").glob("*/comm")}) == 1
    return False


def end_interpreter(end: SystemExit) -> NoReturn:
    """As an interpreter ends, but for the taking down of all that is imported, which takes a
    quarter second.
    """
    if end.code is not None and not isinstance(end.code, int):
        print(end.code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    exit_now(end.code if isinstance(end.code, int) else int(end.code is not None))


def exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def use_huge_pages() -> None:
    """A fork copies the tables of all pages: half of what is left of its cost, with small ones."""
    madvise = ctypes.CDLL(None).madvise
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        if (access, inode) == ("rw-p", "0"):
            begin, end = (int(address, 16) for address in addresses.split("-"))
            begin = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            size = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - begin
            if size > 0:  # an older kernel refuses, which changes no more than the time
                madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), MADV_COLLAPSE)


def main() -> None:
    gc.disable()  # saves a fifth of the time that the imports take
    for name in PRELOADED:
        __import__(name)
    gc.enable()
    gc.collect()
    gc.freeze()  # to look through it again would copy its pages into each process
    # Of torch's operators: half of what a command costs, to tidy up what ends with its process.
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False
    use_huge_pages()
    request = Forks(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])).serve()
    end = SystemExit(0)
    try:
        become(*request)
    except SystemExit as error:
        end = error
    except BaseException:
        gc.unfreeze()
        raise
    # The thread that limits the time of an end after a failure is one such: without it each refused
    # command would take more than a second to end.
    if is_quiet(daemons=1):
        end_interpreter(end)
    # else Triton's library complains on stderr of what the interpreter's end has not freed
    gc.unfreeze()
    raise end


if __name__ == "__main__":
    main()
