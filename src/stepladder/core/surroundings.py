"""What a command needs of the machine around it: one line where it is not there."""

from __future__ import annotations

import errno
import mmap
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from stepladder.core.errors import (
    ASK_DISK,
    BROKEN,
    TRANSIENT,
    InputError,
    naming,
    one_line,
    reason_of,
    text_of,
)
from stepladder.core.traces import user_line

# The kernel's numbers, and others' words, for a limit that is reached.
LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
LIMIT = re.compile(
    r"too many open files|resource temporarily unavailable|can't start new thread|failed to init uv loop"
    r"|error return without exception set",
    re.I,
)
NO_MEMORY = re.compile(r"out of memory|can(no|')t allocate memory|failed to map segment", re.I)
NO_TENSOR = re.compile(
    r"Allocator: can't allocate memory|calculation overflowed|multiplication overflow"
)
BYTES_OF_TORCH = 640 << 20  # of addresses: its libraries, and the little that a small job takes
FEW_PROCESSES = 1000
# Open files, and how many more for each process: a launcher has 15, and 6 for each; a rank 31, and
# 2 for each.
OF_LAUNCHER, OF_RANK = (20, 6), (40, 4)
TENSOR_BYTES = re.compile(r"tried to allocate (\d+) bytes")
ASK = "ulimit -a; ulimit -n is for open files, -u for processes and threads, -v for memory"
MORE_MEMORY = (
    "a smaller model or batch; free -h shows this machine's memory, ulimit -v a limit on it"
)
MORE_FILES = "ulimit -n NUMBER, a larger one; ulimit -Hn shows the most"
MORE_THREADS = "ulimit -u NUMBER, a larger one; it is for processes and threads"


@contextmanager
def surroundings() -> Iterator[None]:
    """Errors in the block that are the machine's as InputError; a job's own, in training, stay as
    they are.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) or hasattr(error, "step"):
            raise
        if isinstance(error, FileNotFoundError) and "temporary directory" in str(error.strerror):
            raise InputError(one_line(str(error.strerror)), "TMPDIR=DIR, one with space") from error
        if (
            isinstance(error, OSError)
            and error.filename is not None
            and error.errno in (*BROKEN, *TRANSIENT)
        ):
            with naming(f"{os.fsdecode(error.filename)} cannot be used", ASK_DISK):
                raise
        if is_out_of_memory(error):
            raise InputError(memory_needed(error), MORE_MEMORY) from error
        if is_limit(error):
            raise InputError(
                f"a limit of this machine is reached: {reason_of(error)}", advice_for(error)
            ) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    text = text_of(error)
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    if isinstance(error, ImportError):
        return bool(NO_MEMORY.search(text))
    return isinstance(error, RuntimeError) and bool(NO_TENSOR.search(text))


def memory_needed(error: Exception) -> str:
    """Return a sentence that says where memory was wanted, and how much, as far as the error says
    it.
    """
    line = user_line(error)
    size = TENSOR_BYTES.search(text_of(error))
    needed = f"a tensor of {int(size[1]) / 1e9:,.1f} GB" if size else reason_of(error)
    return f"not enough memory{' in ' * bool(line)}{line}: {needed}"


def advice_for(error: BaseException) -> str:
    """Return what to type for a limit that is reached."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return MORE_FILES
    if isinstance(error, OSError) and error.errno == errno.EAGAIN:
        return MORE_THREADS
    return ASK


def is_limit(error: BaseException) -> bool:
    text = text_of(error)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in LIMITS):
        return True
    return bool(LIMIT.search(text)) or (
        isinstance(error, ImportError) and bool(NO_MEMORY.search(text))
    )


def refuse_too_little() -> None:
    """Raises InputError where a limit of this process would end it in the libraries that compute:
    they print pages about threads that they cannot start, or abort where they find no memory."""
    import resource  # late: Windows has none

    with surroundings():
        if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
            mmap.mmap(-1, BYTES_OF_TORCH).close()
        if 0 <= resource.getrlimit(resource.RLIMIT_NPROC)[0] < FEW_PROCESSES:
            _start_threads(os.cpu_count() or 1)


def _start_threads(count: int) -> None:
    """So many at a time, which end at once."""
    together, threads = threading.Event(), []
    try:
        for _ in range(count):
            threads.append(threading.Thread(target=together.wait))
            threads[-1].start()
    finally:
        together.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


def refuse_few_files(nproc: int) -> None:
    """Raises InputError where so many ranks cannot have the files that they open: some would wait
    for ever.
    """
    import resource  # late: Windows has none

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    needed = max(files + more * nproc for files, more in (OF_LAUNCHER, OF_RANK))
    if 0 <= limit < needed:
        raise InputError(
            f"a limit of this machine, {limit} open files, is too low for {nproc} processes",
            f"ulimit -n {needed}",
        )


def refuse_open_fork_server() -> None:
    """Raises InputError for the Python whose fork server runs what any user of the machine sends
    it.
    """
    if sys.version_info[:3] == (3, 11, 0):
        raise InputError(
            "Python 3.11.0 lets other users of this machine run code in the process that ranks are forked from"
            " (CVE-2022-42919)",
            "Python 3.11.1 or newer, or --nproc 1",
        )
