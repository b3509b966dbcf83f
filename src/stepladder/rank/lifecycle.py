"""What a rank does before and after its work: it dies with its launcher, and reports its error."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from stepladder.core.console import print_message
from stepladder.core.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    InputError,
    PeerLost,
    RanksDiffer,
    StorageFault,
    get_reason,
    is_failure,
)
from stepladder.core.signals import die_with_parent, mute_signal_handlers
from stepladder.core.tracebacks import fold_traceback, skip_launcher_frames
from stepladder.rank.error_record import RankError
from stepladder.rank.exit_record import choose_end_code, write_end
from stepladder.rank.failed_worker import name_failed_worker
from stepladder.rank.fd_store import FdStore, set_fd_store
from stepladder.rank.membership import get_joining_rank, open_control_channel
from stepladder.rank.open_file import OpenFile
from stepladder.rank.progress import RankFiles
from stepladder.rank.stacks import answer_stack_signal
from stepladder.rank.streams import redirect_output
from stepladder.rank.torch_fixes import wait_for_gloo_before_destroy
from stepladder.rank.torch_fixes_store import bind_store_to_loopback
from stepladder_exchange.torch_fixes_gloo import keep_backward_context_from_gloo

# Signals that a rank must receive. The fork server blocks them, and each rank unblocks them; Ctrl-C
# last, where its KeyboardInterrupt is recorded.
RANK_SIGNALS = {
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGINT,
}
ERROR_FILE_VARIABLE = "STEPLADDER_ERRORS"  # where a rank records its error for its launcher
EXIT_TIMEOUT_S = 5.0  # how long the interpreter may take to end after an exception
EXIT_CALLBACKS: list[Callable[[], None]] = []  # called after the work, when its error is written
_failure_codes: list[int] = []  # one exit code if a job has failed in this process, else empty


def _die_with_rank(_: object) -> None:
    """Ask Linux to kill this process, such as a data loader's worker, when its rank ends.

    A worker that sleeps never notices that its rank has ended. Linux kills it when the thread ends
    that forked it, so only workers of the rank's main thread may ask for this: another thread may
    end while the rank still needs the worker.

    The rank says why it ends. Its workers, from which it may be receiving a tensor, say nothing.
    """
    if threading.current_thread().name == "MainThread":
        die_with_parent()
    sys.excepthook = partial(_show_worker_error, sys.excepthook)


def _show_worker_error(
    show: Callable[..., object], kind: type[BaseException], error: BaseException, trace: object
) -> None:
    """Show the error of a worker, but not that its rank has closed a connection.

    multiprocessing's resource_sharer calls `sys.excepthook` in its thread for those.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main or not isinstance(error, OSError | EOFError):
        show(kind, error, trace)


class SharedResources(NamedTuple):
    """The resources that a launcher hands to one of its ranks.

    Args:
        fd_store: Keeps file descriptors that outlive a rank.
        control: The rank's end of the control channel, if it continues when others are lost.
    """

    fd_store: FdStore
    control: socket.socket | None


def run_rank(
    work: Callable[[], Any],
    env: dict[str, str],
    error_file: Path,
    outputs: Sequence[OpenFile],
    shared: SharedResources,
    is_script: bool,
) -> None:
    """Do the work of one rank, and end this process.

    The exit code is what `work` returns, 2 for bad input, or 1 for another error.

    Args:
        work: The training or the user's script; it may return an exit code.
        env: The environment variables of the rank.
        error_file: The file for the error of a rank that fails.
        outputs: The new stdout and stderr, or nothing to keep the launcher's.
        shared: What the launcher gives the rank.
        is_script: Whether the work is a user's script, whose errors keep all their frames, as
            Python itself shows them.
    """
    _become_rank({**env, ERROR_FILE_VARIABLE: str(error_file)})
    set_fd_store(shared.fd_store)
    open_control_channel(shared.control)
    redirect_output(outputs)
    # A rank that joins a running group is started with RANK=0; its number is in another variable.
    rank = get_joining_rank() or int(env["RANK"])
    # A job's launcher hands Ctrl-C on as SIGTERM: a rank that does not train yet just ends.
    signal.signal(signal.SIGINT, signal.default_int_handler if is_script else signal.SIG_IGN)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        code = work()
    except BaseException as raised:
        code = _record_error(rank, mute_signal_handlers(raised), error_file, is_script)
    for callback in EXIT_CALLBACKS:
        callback()
    exit_now(code if isinstance(code, int) else DONE)


def _record_error(rank: int, error: BaseException, error_file: Path, is_script: bool) -> int:
    """Write the error that has ended the work of a rank, and return the exit code."""
    code = BAD_INPUT if isinstance(error, InputError) else FAILED
    if isinstance(error, SystemExit):
        code = _get_exit_code(error)
    elif not is_script:
        error = name_failed_worker(error)  # which reads frames that folding drops
        fold_traceback(error)
    if is_failure(code):
        RankError.from_error(rank, error).write(error_file)
    return code


def _become_rank(env: dict[str, str]) -> None:
    """Prepare a process that was just forked from the fork server."""
    die_with_parent()
    # A garbage collection writes to every object. Without freeze() it would give each rank its own
    # copy of the memory pages of all imported modules, which ranks share with the fork server.
    gc.freeze()
    gc.enable()  # the fork server has disabled it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RANK_SIGNALS - {signal.SIGINT})
    # The rank inherits the launcher's start method, "forkserver". DataLoader workers would then be
    # children of the fork server instead of children of the rank.
    multiprocessing.set_start_method(None, force=True)
    register_after_fork(die_with_parent, _die_with_rank)
    sys.excepthook = sys.__excepthook__
    os.environ.update(env)
    files = RankFiles.of_this_process()
    if files is not None:
        answer_stack_signal(Path(files.stacks_file))
    keep_backward_context_from_gloo()
    wait_for_gloo_before_destroy()
    bind_store_to_loopback()


def run_and_exit(work: Callable[..., int], *args: Any) -> NoReturn:
    """Do the work of a rank that torchrun or Slurm has started, and end this process.

    Args:
        work: The work. It returns the exit code.
        *args: The arguments of `work`.

    Raises:
        InputError: The input is bad. The command line shows the error.
        KeyboardInterrupt: The user has interrupted the work.
    """
    try:
        code = work(*args)
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as raised:
        error = name_failed_worker(mute_signal_handlers(raised))
        if isinstance(error, SystemExit):
            exit_now(_report_exit_call(error))
        if isinstance(error, (RanksDiffer, StorageFault)):  # a traceback would explain nothing more
            print_message(str(error))
        else:
            fold_traceback(error)
            trace = skip_launcher_frames(error.__traceback__)
            traceback.print_exception(error.with_traceback(trace))
        # The rank that failed first records why: Slurm's exit code may be the one of another rank,
        # which Slurm killed because of this failure. After PeerLost the cause is in another rank.
        if not isinstance(error, PeerLost):
            write_end(choose_end_code(error))
        code = FAILED
    exit_now(code)


@contextmanager
def record_failure() -> Iterator[None]:
    """Note the exit code of an exception that leaves the block, for `limit_exit_time`."""
    try:
        yield
    except BaseException as error:
        _failure_codes[:] = [_choose_failure_code(error)]
        if isinstance(error, SystemExit):
            sys.exit(_report_exit_call(error))
        if isinstance(error, BrokenPipeError):
            # click would assume that the reader of stdout has ended, and would print nothing.
            reason = get_reason(error)
            raise RuntimeError(f"the job has raised BrokenPipeError: {reason}") from error
        raise


def _choose_failure_code(error: BaseException) -> int:
    if isinstance(error, InputError):
        return BAD_INPUT
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return FAILED


def limit_exit_time() -> None:
    """Limit the time that the interpreter takes to end, if a job has failed in this process.

    Without this limit the interpreter waits forever for a thread that is no daemon, for a child
    process or for a function of atexit.
    """
    if _failure_codes:
        [code] = _failure_codes
        threading.Thread(
            target=_exit_late, args=(code,), name="stepladder-end", daemon=True
        ).start()


def _exit_late(code: int) -> None:
    """End this process if it is still alive EXIT_TIMEOUT_S after its main thread has ended."""
    main_thread = threading.main_thread()
    main_thread.join()
    time.sleep(EXIT_TIMEOUT_S)
    reason = "for a child process, or for a function of atexit"
    for thread in threading.enumerate():
        if not thread.daemon and thread is not main_thread:
            reason = f"for the thread {thread.name}"
            break
    print_message(
        f"{EXIT_TIMEOUT_S:g} s after this error the job still waits {reason}: it is ended"
    )
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End this process without the interpreter's shutdown.

    During the shutdown the threads of gloo or NCCL may wait forever for a lost peer. They may also
    abort the process (exit code 134) when its peers have ended a moment earlier.
    """
    for stream in (sys.stdout, sys.stderr):
        # Flushing fails if the terminal is gone, or if the job has closed the stream.
        with suppress(OSError, ValueError, AttributeError):
            if stream is not None:
                stream.flush()
    os._exit(code)


def _report_exit_call(error: SystemExit) -> int:
    """Report that the job has called sys.exit(), which is a failure, and return the exit code."""
    write_end(FAILED)
    print_message(f"the job has ended itself, by sys.exit({error.code!r:.200})")
    return FAILED


def _get_exit_code(error: SystemExit) -> int:
    """Return the exit code that Python itself would choose for a call of sys.exit().

    The argument may be a number, None, or a text, which is printed and means failure.
    """
    if isinstance(error.code, int) or error.code is None:
        return error.code or 0
    print(error.code, file=sys.stderr)
    return FAILED
