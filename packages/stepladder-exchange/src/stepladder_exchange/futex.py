"""Sleep until another process changes a word of shared memory, and wake sleepers.

futex(2), Linux only.
"""

from __future__ import annotations

import ctypes
import sys

FUTEX_WAIT = 0
FUTEX_WAKE = 1
ALL_WAITERS = 2**31 - 1
SYS_FUTEX = 202  # on x86-64


class _Timespec(ctypes.Structure):
    """The C type `struct timespec`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if sys.platform == "linux":
    _syscall = ctypes.CDLL(None).syscall  # releases the GIL during the call
    _syscall.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]
    _syscall.restype = ctypes.c_long


def wait_while_equal(address: int, value: int, timeout_s: float) -> None:
    """Sleep while the 32-bit word at an address has a value; a signal or the timeout wakes too."""
    seconds, fraction = divmod(max(0.0, timeout_s), 1.0)
    timeout = _Timespec(int(seconds), int(fraction * 1e9))
    _syscall(SYS_FUTEX, address, FUTEX_WAIT, value, ctypes.addressof(timeout), None, 0)


def wake_all(address: int) -> bool:
    """Wake all that sleep at an address; False if the kernel does not permit futex calls."""
    return bool(_syscall(SYS_FUTEX, address, FUTEX_WAKE, ALL_WAITERS, None, None, 0) >= 0)
