"""How torch's profiler shows a collective of a group that is a class of Python.

It uses private names of torch. Seen with torch 2.11 to 2.15.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

NO_RECORD = nullcontext()


class _CollectiveRecord:
    """A block that a running profiler of torch shows as it shows a collective of gloo.

    gloo's events are asynchronous: the profiler takes an event for asynchronous if another thread
    ends it. So each collective starts a thread, but only while a profiler runs.
    """

    def __init__(self, name: str, tensors: Sequence[Any]) -> None:
        self.name = name
        self.tensors = tensors
        self.record: Any = None

    def __enter__(self) -> None:
        self.record = _get_autograd()._record_function_with_args_enter(self.name, *self.tensors)

    def __exit__(self, *error: object) -> None:
        end_record = _get_autograd()._record_function_with_args_exit
        thread = threading.Thread(target=end_record, args=(self.record,), name="stepladder-record")
        thread.start()
        thread.join()


def _get_autograd() -> Any:
    from torch import autograd

    return autograd


def record_collective(name: str, tensors: Sequence[Any]) -> AbstractContextManager[object]:
    """Return a block that a running profiler of torch shows as a collective with these inputs."""
    from torch.autograd import profiler

    if profiler._is_profiler_enabled:
        return _CollectiveRecord(name, tensors)
    return NO_RECORD
