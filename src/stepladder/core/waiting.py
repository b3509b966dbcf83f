"""Waiting until something is the case, and calling again what fails for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from stepladder.core.console import print_message

T = TypeVar("T")
LONG_WAIT_S = 10.0  # after which a person who watches is told why


def wait_until(
    predicate: Callable[[], T], timeout_s: float, why: str = "", poll_s: float = 0.05
) -> T:
    """Call a function until it returns something true, for some seconds at most.

    Args:
        predicate: The function; it is called once at least.
        timeout_s: The seconds.
        why: The sentence to print if it takes longer than LONG_WAIT_S; "" for none.
        poll_s: Seconds between two calls.

    Returns:
        What it returned last: something true, unless the time is over.
    """
    began = time.monotonic()
    while True:
        value = predicate()
        waited = time.monotonic() - began
        if value or waited >= timeout_s:
            return value
        if why and waited > LONG_WAIT_S:
            print_message(why)
            why = ""
        time.sleep(poll_s)


def retry(
    function: Callable[[], T],
    errors: type[Exception] | tuple[type[Exception], ...],
    timeout_s: float,
    poll_s: float,
) -> T:
    """Call a function until it raises none of these errors.

    Args:
        function: The function; it is called once at least.
        errors: The errors after which it is called again. After `timeout_s` they are raised.
        timeout_s: How long to go on, in seconds.
        poll_s: Seconds between two calls.

    Returns:
        The function's value.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return function()
        except errors:
            if time.monotonic() > deadline:
                raise
        time.sleep(poll_s)
