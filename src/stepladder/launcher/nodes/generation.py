"""What rendezvous.json holds, and what an agent may find there that makes it leave."""

from __future__ import annotations

from dataclasses import dataclass

from stepladder.core.numbers import MAX_PORT
from stepladder.launcher.nodes.policy import End


@dataclass(frozen=True)
class Generation:
    """A store that agents meet at. asked: what the launch computes.  code, text: how it ended, once
    it has.

    given_up: the seats of nodes that the others have gone on without.
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
        return None if self.code is None else End(self.code, self.text)


class Moved(Exception):
    """A newer generation is published: this one is lost, whatever it looks like from here."""


class Excluded(Exception):
    """The other nodes have gone on without this one."""
