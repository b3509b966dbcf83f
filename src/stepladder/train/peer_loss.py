"""Errors of collectives, reported as a consequence of another rank's end."""

from __future__ import annotations

from contextlib import AbstractContextManager

from stepladder.core.errors import PeerLost


class RaisePeerLost(AbstractContextManager[None]):
    """Turns a RuntimeError into PeerLost, so that the launcher shows the cause first.

    gloo and NCCL say only `Connection closed`. A class is faster than a generator, and a step
    enters it several times.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self,
        _type: object,
        error: BaseException | None,
        _trace: object,
    ) -> None:
        """Raise PeerLost in place of a RuntimeError."""
        if isinstance(error, RuntimeError):
            raise PeerLost(
                f"a collective failed, most likely because another rank ended: {error}"
            ) from error


raising_peer_lost = RaisePeerLost()
