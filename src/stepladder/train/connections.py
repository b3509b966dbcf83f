"""Errors of collectives, marked as a consequence of another rank's end."""

from __future__ import annotations

from contextlib import AbstractContextManager

from stepladder.core.errors import PeerLost


class RaisePeerLost(AbstractContextManager[None]):
    """gloo and NCCL say only `Connection closed`: mark it as a consequence, so the cause is shown
    first.
    """

    def __enter__(self) -> None:
        """Several times in each step."""

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise PeerLost(
                f"a collective failed, most likely because another rank ended: {error}"
            ) from error


raising_peer_lost = RaisePeerLost()
