"""The ids of a launch's nodes, which also limit how many agents can take part.

An id is the index of a byte of the file rendezvous.seats, which its agent locks: the kernel
releases it with the process. An id is never used twice: when the other nodes continue without a
node, they give its id up, and an agent that replaces the node gets a new one. All methods are
called by one agent at a time, which holds rendezvous.lock.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection
from pathlib import Path

from stepladder.storage.lock import open_lock_file

NO_ID = -1


class NodeIds:
    """The ids as one agent sees them.

    Args:
        path: The file whose bytes are locked.
        max_nodes: The number of agents that can take part; 0 for no limit, and no ids.
    """

    def __init__(self, path: Path, max_nodes: int = 0) -> None:
        self.path = path
        self.max_nodes = max_nodes
        # The id of this agent, or NO_ID.
        self.own_id = NO_ID
        self._file: int | None = None

    def reset(self) -> None:
        """Forget the ids of an earlier launch."""
        if self.max_nodes:
            file = open_lock_file(self.path)
            os.ftruncate(file, 0)
            os.close(file)

    def claim(self, given_up: Collection[int]) -> bool:
        """Return whether this agent has an id, after an attempt to get one.

        Args:
            given_up: Ids of nodes that the others continue without.

        Raises:
            OSError: The file cannot be locked.
        """
        if not self.max_nodes:
            return True
        if self.own_id != NO_ID and self.own_id not in given_up:
            return True
        if self._file is None:
            self._file = open_lock_file(self.path)
        next_id = os.fstat(self._file).st_size
        candidates = [node_id for node_id in range(next_id) if node_id not in given_up]
        if sum(_is_locked(self._file, node_id) for node_id in candidates) >= self.max_nodes:
            return False
        os.ftruncate(self._file, next_id + 1)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, next_id)
        self.own_id = next_id
        return True

    def release(self) -> None:
        """Give up this agent's id."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        self.own_id = NO_ID


def _is_locked(file: int, index: int) -> bool:
    """Return whether another process has locked this byte of an open file."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, index)
    except (BlockingIOError, PermissionError):
        return True
    fcntl.lockf(file, fcntl.LOCK_UN, 1, index)
    return False
