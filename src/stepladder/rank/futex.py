"""To sleep until another process changes a word of shared memory, and to wake who does: futex(2),
Linux only.
"""

from __future__ import annotations

import ctypes
import sys

FUTEX_WAIT, FUTEX_WAKE, ALL = 0, 1, 2**31 - 1
SYS_FUTEX = 202  # on x86-64


class Timespec(ctypes.Structure):
    """struct timespec"""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


if sys.platform == "linux":
    _call = ctypes.CDLL(None).syscall  # which lets go of the GIL meanwhile
    _call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]
    _call.restype = ctypes.c_long


def sleep_while(address: int, value: int, seconds: float) -> None:
    """Until the 32-bit word there is no longer `value`, a signal comes, or so many seconds are
    over.
    """
    whole, rest = divmod(max(0.0, seconds), 1.0)
    limit = Timespec(int(whole), int(rest * 1e9))
    _call(SYS_FUTEX, address, FUTEX_WAIT, value, ctypes.addressof(limit), None, 0)


def wake_all(address: int) -> bool:
    """Who sleeps at the word there. False where the kernel does not let this process."""
    return bool(_call(SYS_FUTEX, address, FUTEX_WAKE, ALL, None, None, 0) >= 0)
