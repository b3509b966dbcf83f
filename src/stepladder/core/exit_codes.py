"""What a process of ours says by its exit code."""

from __future__ import annotations

DONE, FAILED, BAD_INPUT = 0, 1, 2
STOPPED = 75  # stopped with a snapshot, to be started again: sysexits' EX_TEMPFAIL
INTERRUPTED = 130  # Ctrl-C before there was anything to stop well
KILLED, TERMINATED = 137, 143  # a launcher's word for ranks that had none: SIGKILL, or they ended at SIGTERM


def is_failure(code: int) -> bool:
    """Whether it is that of a process that neither finished nor stopped well."""
    return code not in (DONE, STOPPED)
