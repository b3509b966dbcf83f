"""Which errors of a collective tell of another rank's end."""

from __future__ import annotations

import os
import threading

import pytest
from torch.utils.data import DataLoader, IterableDataset

from stepladder.core.errors import PeerLost
from stepladder.train.peer_loss import raising_peer_lost

SECONDS_AT_MOST = 60


class Leaves(IterableDataset):  # type: ignore[type-arg]
    """A worker of it ends as soon as a byte comes through a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def __iter__(self) -> None:  # type: ignore[override]
        os.read(self.pipe, 1)
        os._exit(5)


def test_a_worker_that_ends_while_its_rank_waits_for_others_is_no_lost_peer() -> None:
    reader, writer = os.pipe()
    loader = iter(DataLoader(Leaves(reader), num_workers=1))
    try:
        with pytest.raises(RuntimeError, match="exit code 5") as raised, raising_peer_lost:
            os.write(writer, b".")
            threading.Event().wait(SECONDS_AT_MOST)
    finally:
        del loader
        os.close(reader)
        os.close(writer)
    assert not isinstance(raised.value, PeerLost)


def test_what_a_collective_raises_is_a_lost_peer() -> None:
    with pytest.raises(PeerLost, match="closed by peer"), raising_peer_lost:
        raise RuntimeError("Connection closed by peer")
