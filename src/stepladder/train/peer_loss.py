"""Errors of collectives, reported as a consequence of another rank's end."""

from __future__ import annotations

from contextlib import AbstractContextManager

from stepladder.core.errors import PeerLost

WORKER_ENDED = "DataLoader worker (pid"  # how torch begins the message


class _RaisePeerLost(AbstractContextManager[None]):
    """Turns a RuntimeError into PeerLost, so that the launcher shows the cause first.

    gloo and NCCL say only `Connection closed`. A class is faster than a generator, and a step
    enters it several times.

    A DataLoader raises from its signal handler when a worker ends, and so in whatever the rank does
    at that moment: in a wait for the others as well. This rank is the cause then.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        """Raise PeerLost in place of a collective's RuntimeError."""
        if isinstance(error, RuntimeError) and not str(error).startswith(WORKER_ENDED):
            raise PeerLost(
                f"a collective failed, most likely because another rank ended: {error}"
            ) from error


raising_peer_lost = _RaisePeerLost()
