"""Ranks that no one process sees: why they wait is said once, by one member for all.

Whoever sees its own wait asks on a board that all members read; each answers with what it sees of
its own ranks. The first that asked waits for the answers, and says it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from stepladder.core.errors import readable
from stepladder.launcher.diagnose.hang import Explanation, explain
from stepladder.launcher.diagnose.seen import Rank, State
from stepladder.rank.progress import CallSite, Standing
from stepladder.rank.stacks import Frame

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_ANSWER = 10.0


class Board(Protocol):
    """What the members share. told: raises ValueError where something else has written it."""

    def tell(self, key: str, text: str) -> None: ...

    def told(self, key: str) -> str: ...

    def has(self, key: str) -> bool: ...

    def tell_first(self, key: str, text: str) -> str:
        """Write a text unless there is one. Returns what is there then."""


class Inquiry:
    """One of `count` members: a node's agent, or a rank without a launcher."""

    def __init__(
        self, board: Board, member: int, count: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.board, self.member, self.clock = board, member, clock
        self.members: Sequence[int] = range(count)
        self.round = self.answered = 0
        self.speaks, self.looked, self.asked_at = False, -1.0, 0.0

    def look(
        self, asks: bool, own: Callable[[], Sequence[Rank]]
    ) -> dict[int, Sequence[Rank]] | None:
        """Call it often. asks: this member's ranks wait.  own: its ranks, as it sees them now.

        Returns, to the member that is to say it, what all have answered, by member; without those
        that did not."""
        now = self.clock()
        if now - self.looked < SECONDS_BETWEEN_LOOKS:
            return None
        self.looked = now
        self._find_round()
        name = str(self.member)
        if self.answered < self.round and (asks or self.board.has(f"asked-{self.round}")):
            self.speaks = asks and self.board.tell_first(f"asked-{self.round}", name) == name
            self.board.tell(self._key(self.member), json.dumps([asdict(one) for one in own()]))
            self.answered, self.asked_at = self.round, now
        return self._answers() if self.speaks else None

    def _find_round(self) -> None:
        """Go to the first round of questions that has had no answer yet."""
        self.round = max(self.round, 1)
        while self.board.has(f"said-{self.round}"):
            self.round += 1

    def _key(self, member: int) -> str:
        return f"seen-{self.round}-{member}"

    def _answers(self) -> dict[int, Sequence[Rank]] | None:
        there = [member for member in self.members if self.board.has(self._key(member))]
        if len(there) < len(self.members) and self.clock() - self.asked_at < SECONDS_TO_ANSWER:
            return None
        answers: dict[int, Sequence[Rank]] = {
            member: _ranks(self.board.told(self._key(member))) for member in there
        }
        self.speaks = False
        self.board.tell(f"said-{self.round}", "")
        return answers


def explain_all(answers: dict[int, Sequence[Rank]]) -> Explanation:
    """Why ranks wait, from what all members have said."""
    return explain(
        sorted((one for ranks in answers.values() for one in ranks), key=lambda one: one.rank)
    )


def _ranks(text: str) -> list[Rank]:
    """Raises ValueError for what is no answer."""
    try:
        return [_rank(about) for about in json.loads(text, object_hook=_readable)]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no answer of a member: {error}") from error


def _readable(about: dict[str, Any]) -> dict[str, Any]:
    """It is going to be shown on a terminal."""
    return {
        key: readable(value) if isinstance(value, str) else value for key, value in about.items()
    }


def _rank(about: dict[str, Any]) -> Rank:
    words = about["standing"]
    recent = tuple((number, (CallSite(**site), size)) for number, (site, size) in words["recent"])
    return Rank(
        **about
        | {
            "state": State(about["state"]),
            "standing": Standing(**words | {"recent": recent}),
            "threads": [[Frame(**frame) for frame in stack] for stack in about["threads"]],
            "workers": {
                int(pid): [Frame(**f) for f in stack] for pid, stack in about["workers"].items()
            },
        }
    )
