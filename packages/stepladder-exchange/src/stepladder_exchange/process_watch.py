"""Watch whether other processes end: a thread sleeps until the kernel reports it. Linux only."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterable, Mapping


class ProcessWatch:
    """Watches processes by pidfd until `stop`.

    Args:
        pids: The process ids, each by a name for the process.
        on_end: Called by the thread when `ended` has grown.

    Raises:
        OSError: A process has ended already, and its parent has waited for it.
    """

    def __init__(self, pids: Mapping[int, int], on_end: Callable[[], None]) -> None:
        # The names of the processes that have ended.
        self.ended: set[int] = set()
        self._names: dict[int, int] = {}  # by pidfd
        try:
            for name, pid in pids.items():
                self._names[os.pidfd_open(pid)] = name
        except OSError:
            _close_all(self._names)
            raise
        self._stop_event = os.eventfd(0)
        threading.Thread(
            target=self._watch,
            args=[on_end],  # the thread alone holds it, and so its caller, until `stop`
            name="process-watch",
            daemon=True,
        ).start()

    def stop(self) -> None:
        """End the thread, which then closes its files. To be called once."""
        os.eventfd_write(self._stop_event, 1)

    def _watch(self, on_end: Callable[[], None]) -> None:
        poll = select.poll()
        for file in [*self._names, self._stop_event]:
            poll.register(file, select.POLLIN)
        while True:
            ready = [file for file, _ in poll.poll()]
            if self._stop_event in ready:
                break
            for file in ready:
                self.ended.add(self._names[file])
                poll.unregister(file)
            on_end()
        _close_all([*self._names, self._stop_event])


def _close_all(files: Iterable[int]) -> None:
    for file in files:
        os.close(file)
