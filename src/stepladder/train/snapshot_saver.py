"""The snapshots of a run while it trains: training waits for a copy in memory, threads write it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from stepladder.core.errors import InputError
from stepladder.storage.parts import PartWriter
from stepladder.storage.snapshot import HINT, Snapshots
from stepladder.train.comm import Comm
from stepladder.train.state import TrainState

MAX_REASON_BYTES = 200  # bytes of a reason
PARTS_TIMEOUT_S = 0.3  # that a first rank waits which ends early; a launcher gives it half a second


class SnapshotSaver:
    """Saves a run's state. With --shard each rank writes its slices, and the first one makes a
    snapshot of them.

    place: where the snapshots are; None but on the first rank.
    """

    def __init__(self, state: TrainState, comm: Comm) -> None:
        self.state, self.comm = state, comm
        self.store: Snapshots | None = None
        self.part = PartWriter()

    def save(self, about: dict[str, Any]) -> None:
        """Of the last step. A collective. about: for the manifest."""
        state, comm, parts = self.state, self.comm, 0
        if state.shards is not None:
            self._settle()
            aside = comm.on_first(self._begin)
            self.part.save(Path(aside), comm.world.rank, state.shards.slices())
            parts, about = comm.world.world_size, {**about, **state.shards.manifest_entry}
        if self.store is not None:
            self.store.save(state.step, state.job.model, state.state_dict(), about, parts)

    def finish(self) -> None:
        """Until the snapshot under way is on disk. A collective. Raises InputError where it cannot
        be written.
        """
        if self.state.shards is not None:
            self._settle()
        if self.store is not None:
            self.store.wait()

    def give_up(self) -> None:
        """Of the snapshot under way, where a rank that was lost had a part of it."""
        with suppress(Exception):  # the first rank may have removed what this one writes to
            self.part.failure()
        if self.store is not None:
            self.store.give_up()

    def end(self) -> None:
        """The last thing, whatever came before."""
        with suppress(Exception):  # another error is the cause
            self.part.failure()
        if self.store is not None:
            self.store.end(PARTS_TIMEOUT_S)

    def _begin(self) -> str:
        assert self.store is not None
        return self.store.begin(self.state.step)

    def _settle(self) -> None:
        """Until all parts of the snapshot under way are on disk. Raises InputError on all ranks if
        one is not.
        """
        reason = self.part.failure().encode()[:MAX_REASON_BYTES].ljust(MAX_REASON_BYTES)
        for rank, found in enumerate(self.comm.gather_bytes(reason)):
            if said := found.decode(errors="replace").strip():
                self.give_up()
                raise InputError(
                    f"rank {rank} could not write its part of a snapshot: {said}", HINT
                )
