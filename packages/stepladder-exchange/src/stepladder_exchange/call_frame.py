"""The user's call that a collective belongs to, for errors and for the flight recorder."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import currentframe
from pathlib import Path

EXCHANGE_PREFIX = str(Path(__file__).parent) + os.sep
LIBRARY_PARTS = (
    sysconfig.get_path("stdlib"),
    "site-packages",
    "dist-packages",
    "<frozen",
    "<string>",
)
# Further files that are not the user's: those of packages which exchange tensors by this one.
_library_tests: list[Callable[[str], bool]] = []


@dataclass(frozen=True)
class CallFrame:
    """One call, as in a traceback."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function}(), {Path(self.file).name}:{self.line}"


def add_library(is_library: Callable[[str], bool]) -> None:
    """Let `find_caller` pass over the files of a package that makes collectives for the user.

    An installed package is passed over anyway; one in a checkout is not.

    Args:
        is_library: Tells of the path of a file whether it belongs to the package.
    """
    _library_tests.append(is_library)
    is_users_file.cache_clear()


def is_library_file(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    return any(part in file for part in LIBRARY_PARTS)


@cache
def is_users_file(file: str) -> bool:
    """Return whether a file belongs to neither this package nor a library."""
    if file.startswith(EXCHANGE_PREFIX) or is_library_file(file):
        return False
    return not any(is_library(file) for is_library in _library_tests)


def find_caller() -> CallFrame | None:
    """Return the innermost call of the user's code in this thread, None without one.

    It takes some microseconds.
    """
    frame = currentframe()
    while frame is not None:
        code = frame.f_code
        if is_users_file(code.co_filename):
            return CallFrame(code.co_name, code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None
