"""Saving snapshots while a run trains: training waits for a copy in memory, threads write it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepladder.core.errors import TRANSIENT_ERRNOS, InputError, StorageFault
from stepladder.storage.run_dir_access import FREE_SPACE_HINT
from stepladder.storage.snapshot_parts import PartWriter
from stepladder.storage.snapshot_store import Snapshots
from stepladder.train.comm import Comm
from stepladder.train.state import TrainState

ERRNO_BYTES = 4
# The first rank waits so long for the other ranks' parts if it ends early. Its launcher gives it
# half a second.
PARTS_TIMEOUT_S = 0.3


class SnapshotSaver:
    """Saves the state of a run.

    With --shard, each rank writes the slices that it holds, and the first rank makes a snapshot of
    all of them.

    Args:
        state: The state to save.
        comm: The ranks that train.
        store: The snapshots of the run directory, on the first rank.
    """

    def __init__(self, state: TrainState, comm: Comm, store: Snapshots | None = None) -> None:
        self.state = state
        self.comm = comm
        self.store = store
        self.part_writer = PartWriter()

    def open(self, store: Snapshots) -> None:
        """Save into these snapshots from now on."""
        self.store = store

    def save(self, manifest: dict[str, Any]) -> None:
        """Save the state after the last step. A collective.

        Args:
            manifest: What the manifest says about the run.
        """
        state = self.state
        num_parts = 0
        if state.layout.has_parts:
            self._wait_for_parts()
            folder = self.comm.on_first(self._begin)
            self.part_writer.save(Path(folder), self.comm.world.rank, state.slices())
            num_parts = self.comm.world.world_size
            manifest = {**manifest, **state.layout.manifest_entry}
        if self.store is not None:
            self.store.save(state.step, state.job.model, state.state_dict(), manifest, num_parts)

    def wait(self) -> None:
        """Wait until the snapshot under way is on disk. A collective.

        Raises:
            InputError: If it cannot be written.
        """
        if self.state.layout.has_parts:
            self._wait_for_parts()
        if self.store is not None:
            self.store.wait()

    def abandon(self) -> None:
        """Drop the snapshot under way: a rank that was lost may have had a part of it."""
        with suppress(Exception):  # the first rank may have removed the folder of this part
            self.part_writer.wait_for_errno()
        if self.store is not None:
            self.store.abandon_parts()

    def close(self) -> None:
        """End the writing, whatever has happened before."""
        with suppress(Exception):  # an earlier error is the cause
            self.part_writer.wait_for_errno()
        if self.store is not None:
            self.store.end(PARTS_TIMEOUT_S)

    def _begin(self) -> str:
        assert self.store is not None
        return self.store.begin(self.state.step)

    def _wait_for_parts(self) -> None:
        """Wait until all ranks' parts of the snapshot under way are on disk. A collective.

        Raises:
            InputError: A rank could not write its part. The error is raised on all ranks, so that
                none waits for another one.
            StorageFault: The same, where the reason of that rank is transient.
        """
        # 0 if this rank's part is on disk: ranks gather equal lengths.
        number = self.part_writer.wait_for_errno().to_bytes(ERRNO_BYTES, "little")
        for rank, data in enumerate(self.comm.gather_bytes(number)):
            failure = int.from_bytes(data, "little")
            if failure:
                self.abandon()
                reason = os.strerror(failure)
                problem = f"rank {rank} could not write its part of a snapshot: {reason}"
                if failure in TRANSIENT_ERRNOS:
                    raise StorageFault(problem)
                raise InputError(problem, FREE_SPACE_HINT)
