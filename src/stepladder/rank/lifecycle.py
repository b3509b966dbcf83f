"""What a rank does before and after its work: dies with its launcher, reports its error once."""

from __future__ import annotations

import ctypes
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
from multiprocessing import parent_process
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from stepladder.core.console import say
from stepladder.core.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    InputError,
    PeerLost,
    RanksDiffer,
    StorageFault,
    is_failure,
    reason_of,
)
from stepladder.core.traces import fold, own_frames
from stepladder.rank.error_record import RankError
from stepladder.rank.exit_record import note_end, word_of
from stepladder.rank.keepsake import Mailbox, inherit
from stepladder.rank.membership import attach, joins
from stepladder.rank.open_file import OpenFile
from stepladder.rank.progress import RankFiles
from stepladder.rank.segment import map_segment
from stepladder.rank.stacks import answer_with_stack
from stepladder.rank.streams import print_to
from stepladder.rank.torch_fixes import (
    bind_store_to_loopback,
    keep_backward_context_from_gloo,
    wait_for_gloo_before_destroy,
)

PR_SET_PDEATHSIG = 1
FOR_RANKS = {signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
SECONDS_TO_END = 5.0  # that the interpreter may take after an exception
FAILURE: list[int] = []  # the exit code of the job that has failed in this process, if one has
AT_END: list[Callable[[], None]] = []  # called when the work has ended and its error is written


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends; checked again, for it may have ended
    before.

    `kill -9` of a launcher must leave no rank: an orphan would go on writing to the run directory.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    launcher = parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)


def _die_with_rank(_: object) -> None:
    """In a process of multiprocessing's, as a data loader's worker: one that sleeps never sees that
    its rank has gone. The kernel looks at the thread that forked it, so this is for those of the
    main thread only."""
    if threading.current_thread().name == "MainThread":
        die_with_parent()


class Shared(NamedTuple):
    """What a launcher and its ranks have together. mailbox: for what outlives a rank.  wire: to the
    launcher, where this rank is to go on when others are lost.  segment: to exchange tensors in,
    where that is possible."""

    mailbox: Mailbox
    wire: socket.socket | None
    segment: OpenFile | None


def rank_main(
    work: Callable[[], Any],
    env: dict[str, str],
    errors: Path,
    outputs: Sequence[OpenFile],
    shared: Shared,
    is_script: bool,
) -> None:
    """Do `work()` as one rank; never returns. Exit code: what `work` returns, 2 for bad input, else
    1.

    errors: the file for the error of a rank that fails.  outputs: where stdout and stderr go, or
    nothing to keep the launcher's.  is_script: an error is shown with all its frames, as by Python
    itself."""
    _become_rank(env)
    inherit(shared.mailbox)
    attach(shared.wire)
    map_segment(shared.segment)
    print_to(outputs)
    rank = joins() or int(env["RANK"])
    try:
        code = work()
    except SystemExit as error:
        code = exit_code(error)
        if is_failure(code):
            RankError.of(rank, error).write(errors)
    except BaseException as error:
        if not is_script:
            fold(error)
        RankError.of(rank, error).write(errors)
        code = BAD_INPUT if isinstance(error, InputError) else FAILED
    for function in AT_END:
        function()
    leave(code if isinstance(code, int) else DONE)


def _become_rank(env: dict[str, str]) -> None:
    """What a process that was just forked from the server is made. env: of all that is set for a
    rank.
    """
    die_with_parent()
    # what is imported stays: to look through it again would copy its pages into each rank
    gc.freeze()
    gc.enable()  # disabled in the server it was forked from
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, FOR_RANKS
    )  # blocked in the server it was forked from
    # Python would hand its own start method on, and DataLoader workers then be children of the
    # server.
    multiprocessing.set_start_method(None, force=True)
    register_after_fork(die_with_parent, _die_with_rank)
    sys.excepthook = sys.__excepthook__
    os.environ.update(env)
    if (files := RankFiles.of_this_process()) is not None:
        answer_with_stack(Path(files.stacks))
    keep_backward_context_from_gloo()
    wait_for_gloo_before_destroy()
    bind_store_to_loopback()


def work_and_leave(work: Callable[..., int], *args: Any) -> NoReturn:
    """A whole process as a rank that another launcher has started. Raises only what is wrong with
    the input.
    """
    try:
        code = work(*args)
    except (InputError, KeyboardInterrupt):
        raise
    except SystemExit as error:
        code = ended_itself(error)
    except BaseException as error:
        if isinstance(error, (RanksDiffer, StorageFault)):  # its text says it all
            say(str(error))
        else:
            fold(error)
            traceback.print_exception(error.with_traceback(own_frames(error.__traceback__)))
        if not isinstance(error, PeerLost):
            note_end(
                word_of(error)
            )  # Slurm's exit code may be that of a rank which it ended for this
        code = FAILED
    leave(code)


@contextmanager
def noting_failure() -> Iterator[None]:
    """Note the exit code of an exception that leaves the block, for `limit_end`."""
    try:
        yield
    except BaseException as error:
        codes = {InputError: BAD_INPUT, KeyboardInterrupt: INTERRUPTED}
        FAILURE[:] = [
            next((code for kind, code in codes.items() if isinstance(error, kind)), FAILED)
        ]
        if isinstance(error, SystemExit):
            sys.exit(ended_itself(error))
        if isinstance(error, BrokenPipeError):
            # click would take it for a reader of stdout that has gone, and be silent.
            raise RuntimeError(f"the job has raised BrokenPipeError: {reason_of(error)}") from error
        raise


def limit_end() -> None:
    """Limit the time that the interpreter takes for its end, where a job has failed in this
    process.

    It waits without limit for threads that are no daemons, child processes and functions of atexit.
    """
    if FAILURE:
        threading.Thread(
            target=_leave_late, args=FAILURE, name="stepladder-end", daemon=True
        ).start()


def _leave_late(code: int) -> None:
    threading.main_thread().join()
    time.sleep(SECONDS_TO_END)
    threads = [thread for thread in threading.enumerate() if not thread.daemon]
    names = [thread.name for thread in threads if thread is not threading.main_thread()]
    waits = (
        f"for the thread {names[0]}"
        if names
        else "for a child process, or for a function of atexit"
    )
    say(f"{SECONDS_TO_END:g} s after this error the job still waits {waits}: it is ended")
    leave(code)


def leave(code: int) -> NoReturn:
    """End without the interpreter's shutdown: communication threads may never end after a lost
    peer, and abort a rank (exit code 134) whose peers were a moment faster."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(
            OSError, ValueError, AttributeError
        ):  # the terminal has gone, or a job has closed it
            if stream is not None:
                stream.flush()
    os._exit(code)


def ended_itself(error: SystemExit) -> int:
    """Return the exit code of a rank whose job has called sys.exit(), and say so."""
    note_end(FAILED)
    say(f"the job has ended itself, by sys.exit({error.code!r:.200})")
    return FAILED


def exit_code(error: SystemExit) -> int:
    """As the interpreter has it: a text is shown, and counts as a failure."""
    if isinstance(error.code, int) or error.code is None:
        return error.code or 0
    print(error.code, file=sys.stderr)
    return FAILED
