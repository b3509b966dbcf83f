"""What an agent is given: an open rendezvous, and where the launch's end is published."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.elastic.rendezvous import RendezvousHandler

from stepladder.launcher.nodes.policy import End


class Unpublished:
    """In place of a `Rendezvous`, where nodes share no folder: what the store says is all they know."""

    number = 0

    def look(self) -> End | None:
        return None

    read_end = look

    def end(self, code: int, _text: str = "") -> int:
        return code


@dataclass(frozen=True)
class Meeting:
    """An open rendezvous. secret: of the launch.  address: this node's for the others, "" where torch knows it.

    least: so many nodes are enough.
    """

    handler: RendezvousHandler
    secret: str
    address: str = ""
    least: int = 1
