"""Whether other processes have ended, known at once: a thread sleeps until the kernel says so.
Linux only.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping


class Ends:
    """Processes that are watched until `stop`. gone: the names of those that have ended.

    pids: by their names, numbers.  on_end: called by the thread, when `gone` has grown.
    Raises OSError where one has ended already, and was not waited for by its parent.
    """

    def __init__(self, pids: Mapping[int, int], on_end: Callable[[], None]) -> None:
        self.gone: set[int] = set()
        files: dict[int, int] = {}
        try:
            for name, pid in pids.items():
                files[os.pidfd_open(pid)] = name
        except OSError:
            _close(files)
            raise
        self._stop = os.eventfd(0)
        threading.Thread(
            target=self._watch, args=(files, self._stop, on_end), name="ends", daemon=True
        ).start()

    def _watch(self, files: Mapping[int, int], stop: int, on_end: Callable[[], None]) -> None:
        ends = select.poll()
        for file in [*files, stop]:
            ends.register(file, select.POLLIN)
        while stop not in (ready := [file for file, _ in ends.poll()]):
            for file in ready:
                self.gone.add(files[file])
                ends.unregister(file)
            on_end()
        _close([*files, stop])

    def stop(self) -> None:
        """Once; the thread closes its files."""
        os.eventfd_write(self._stop, 1)


def _close(files: Mapping[int, int] | list[int]) -> None:
    for file in files:
        os.close(file)
