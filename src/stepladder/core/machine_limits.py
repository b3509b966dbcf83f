"""Limits of the machine that a command may reach, reported in one line instead of a traceback."""

from __future__ import annotations

import errno
import mmap
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

from stepladder.core.errors import (
    DEVICE_ERRNOS,
    DISK_HINT,
    TRANSIENT_ERRNOS,
    InputError,
    as_input_error,
    get_reason,
    get_text,
    to_one_line,
)
from stepladder.core.tracebacks import find_user_line

# How the kernel and libraries report that a limit is reached.
LIMIT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
LIMIT_TEXT = re.compile(
    r"too many open files|resource temporarily unavailable|can't start new thread"
    r"|failed to init uv loop|error return without exception set",
    re.I,
)
NO_MEMORY_TEXT = re.compile(r"out of memory|can(no|')t allocate memory|failed to map segment", re.I)
NO_TENSOR_MEMORY = re.compile(
    r"Allocator: can't allocate memory|calculation overflowed|multiplication overflow"
)
TENSOR_BYTES = re.compile(r"tried to allocate (\d+) bytes")

TORCH_ADDRESS_BYTES = 640 << 20  # torch's libraries, and what a small job takes
FEW_PROCESSES = 1000  # a limit below this is tried out
# (open files, more for each process): a launcher has 15 and 6, a rank 31 and 2, and some to spare.
LAUNCHER_FILES = (20, 6)
RANK_FILES = (40, 4)
UNSAFE_PYTHON = (3, 11, 0)

LIMITS_HINT = "ulimit -a; ulimit -n is for open files, -u for processes and threads, -v for memory"
MEMORY_HINT = (
    "a smaller model or batch; free -h shows this machine's memory, ulimit -v a limit on it"
)
FILES_HINT = "ulimit -n NUMBER, a larger one; ulimit -Hn shows the most"
THREADS_HINT = "ulimit -u NUMBER, a larger one; it is for processes and threads"


@contextmanager
def name_machine_errors() -> Iterator[None]:
    """Turn errors in the block that the machine causes into InputError.

    Errors of a training step, which have the attribute `step`, are raised unchanged, as are all
    errors that the machine has not caused.

    Raises:
        InputError: The disk cannot be used, memory has run out, or a limit of the machine is
            reached.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) or hasattr(error, "step"):
            raise
        if isinstance(error, FileNotFoundError) and "temporary directory" in str(error.strerror):
            raise InputError(
                to_one_line(str(error.strerror)), "TMPDIR=DIR, one with space"
            ) from error
        if _is_disk_error(error):
            with as_input_error(f"{os.fsdecode(error.filename)} cannot be used", DISK_HINT):
                raise
        if _is_out_of_memory(error):
            raise InputError(_describe_memory_need(error), MEMORY_HINT) from error
        if is_limit_error(error):
            raise InputError(
                f"a limit of this machine is reached: {get_reason(error)}", _find_hint(error)
            ) from error
        raise


def _is_disk_error(error: Exception) -> TypeGuard[OSError]:
    """Tell whether a disk or a network file system failed on a known file."""
    if not isinstance(error, OSError) or error.filename is None:
        return False
    return error.errno in (*DEVICE_ERRNOS, *TRANSIENT_ERRNOS)


def _is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that there is not enough memory."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = get_text(error)
    if isinstance(error, ImportError):
        return bool(NO_MEMORY_TEXT.search(text))
    return isinstance(error, RuntimeError) and bool(NO_TENSOR_MEMORY.search(text))


def is_limit_error(error: BaseException) -> bool:
    """Tell whether an error means that a limit of the machine is reached."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno in LIMIT_ERRNOS:
        return True
    text = get_text(error)
    if LIMIT_TEXT.search(text):
        return True
    return isinstance(error, ImportError) and bool(NO_MEMORY_TEXT.search(text))


def _describe_memory_need(error: Exception) -> str:
    """Return a sentence that says which line needed memory, and how much, if the error tells."""
    line = find_user_line(error)
    location = f" in {line}" if line else ""
    need = get_reason(error)
    size = TENSOR_BYTES.search(get_text(error))
    if size:
        need = f"a tensor of {int(size[1]) / 1e9:,.1f} GB"
    return f"not enough memory{location}: {need}"


def _find_hint(error: BaseException) -> str:
    """Return what to type for a limit that is reached."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return FILES_HINT
    if isinstance(error, OSError) and error.errno == errno.EAGAIN:
        return THREADS_HINT
    return LIMITS_HINT


def validate_limits() -> None:
    """Raise InputError if a limit of this process would end it in the libraries that compute.

    They print pages about threads that they cannot start, or abort if they find no memory.
    """
    import resource  # late: Windows has none

    with name_machine_errors():
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            mmap.mmap(-1, TORCH_ADDRESS_BYTES).close()
        if 0 <= resource.getrlimit(resource.RLIMIT_NPROC)[0] < FEW_PROCESSES:
            _start_threads(os.cpu_count() or 1)


def _start_threads(count: int) -> None:
    """Start so many threads at the same time, and end them."""
    may_end = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=may_end.wait)
            threads.append(thread)
            thread.start()
    finally:
        may_end.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def validate_open_files(nproc: int) -> None:
    """Raise InputError if so many ranks cannot open their files: some would wait for ever."""
    import resource  # late: Windows has none

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = max(files + per_process * nproc for files, per_process in (LAUNCHER_FILES, RANK_FILES))
    if 0 <= limit < needed:
        raise InputError(
            f"a limit of this machine, {limit} open files, is too low for {nproc} processes",
            f"ulimit -n {needed}",
        )


def validate_fork_server() -> None:
    """Raise InputError for the Python whose fork server runs what any user of the machine sends."""
    if sys.version_info[:3] == UNSAFE_PYTHON:
        raise InputError(
            "Python 3.11.0 lets other users of this machine run code in the process that ranks are"
            " forked from (CVE-2022-42919)",
            "Python 3.11.1 or newer, or --nproc 1",
        )
