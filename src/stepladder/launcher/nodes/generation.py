"""The contents of rendezvous.json, and the reasons for which an agent leaves its rendezvous."""

from __future__ import annotations

from dataclasses import dataclass

from stepladder.core.numbers import MAX_PORT
from stepladder.launcher.nodes.policy import End


@dataclass(frozen=True)
class Generation:
    """One store at which agents meet, from its start until its node is lost or the launch ends.

    The names of the fields are the keys of rendezvous.json.

    Args:
        number: Counted from 1.
        host: Address of the node that serves the store.
        port: Port of the store.
        asked: A digest of what the launch computes.
        code: Exit code of the launch, once it has ended.
        text: Why the launch has ended.
        given_up: Ids of the nodes that the other nodes continue without.
    """

    number: int
    host: str
    port: int
    asked: str = ""
    code: int | None = None
    text: str = ""
    given_up: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= MAX_PORT:
            raise ValueError(f"port {self.port} is none")

    @property
    def end(self) -> End | None:
        """How the launch has ended, or None."""
        return None if self.code is None else End(self.code, self.text)


class RendezvousMoved(Exception):
    """A newer generation is published, so this agent's store counts as lost."""


class NodeExcluded(Exception):
    """The other nodes continue without this one."""


class WaitAbandoned(Exception):
    """A wait for other nodes was abandoned, because the launch ends.

    Args:
        end: How the launch ends.
    """

    def __init__(self, end: End) -> None:
        super().__init__(end)
        self.end = end
