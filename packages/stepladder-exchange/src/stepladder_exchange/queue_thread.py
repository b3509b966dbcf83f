"""The threads of queues of collectives and of messages, and how they end with the interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stepladder_exchange.torch_fixes_gloo import wait_for_gloo

EXIT_TIMEOUT_S = 5.0


class QueueThread(threading.Thread):
    """The thread of a queue; `end_threads` ends it before the interpreter does."""

    def __init__(self, run: Callable[[], None], leave: Callable[[], None], name: str) -> None:
        """Create the thread.

        Args:
            run: The work.
            leave: Makes the work end soon.
            name: The thread's name.
        """
        super().__init__(target=run, name=name, daemon=True)
        self.leave = leave

    def run(self) -> None:
        """Do the work."""
        super().run()
        self.leave = lambda: None  # the queue would keep the memory alive


def end_threads() -> None:
    """End the threads that may be inside of torch.

    A thread that returns from torch's C++ while the interpreter ends aborts the process.
    """
    threads = [thread for thread in threading.enumerate() if isinstance(thread, QueueThread)]
    for thread in threads:
        thread.leave()
    for thread in threads:
        thread.join(EXIT_TIMEOUT_S)
    wait_for_gloo()
