"""Explains a hang of ranks that no single process can inspect: one member reports it for all.

A member whose ranks wait asks the question on a board that all members read. Each member answers
with the status of its own ranks. The first member that asked collects the answers and reports them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from stepladder.core.errors import make_readable
from stepladder.launcher.diagnose.explanation import Explanation
from stepladder.launcher.diagnose.hang import explain_hang
from stepladder.launcher.diagnose.rank_status import ProcessState, RankStatus
from stepladder.rank.progress import CallSite, RankProgress
from stepladder.rank.stacks import Frame

INQUIRY_INTERVAL_S = 1.0
INQUIRY_TIMEOUT_S = 10.0  # for a member to answer

Answers = Mapping[int, Sequence[RankStatus]]  # by member


class _Board(Protocol):
    """A store of texts that all members share."""

    def write(self, key: str, text: str) -> None:
        """Write a text."""

    def write_if_absent(self, key: str, text: str) -> str:
        """Write a text unless there is one, and return the text that is stored then."""

    def read(self, key: str) -> str:
        """Return a text.

        Raises:
            ValueError: The writer was not a member.
        """

    def has(self, key: str) -> bool:
        """Return whether there is a text."""


class Inquiry:
    """One member's part in the inquiries of a launch: a node's agent, or a rank without a launcher.

    Args:
        board: What the members share.
        member: The number of this member.
        member_count: The number of members.
    """

    def __init__(self, board: _Board, member: int, member_count: int) -> None:
        # The number of the current inquiry, from 1; 0 before the first poll.
        self.current = 0
        # The number of the last inquiry that this member has answered.
        self.answered = 0
        self._board = board
        self._member = member
        self._members: Sequence[int] = range(member_count)
        self._reports = False  # whether this member reports the current inquiry
        self._polled_at = -INQUIRY_INTERVAL_S
        self._answered_at = 0.0

    def set_members(self, members: Sequence[int]) -> None:
        """Ask these members from now on."""
        self._members = members

    def poll(
        self, is_asking: bool, inspect_ranks: Callable[[], Sequence[RankStatus]]
    ) -> Answers | None:
        """Ask the members, answer their question, and collect their answers. Call it often.

        Args:
            is_asking: Whether the ranks of this member wait, and it is not known why.
            inspect_ranks: Returns the status of this member's ranks.

        Returns:
            The answers, if they are complete or time is up and this member has to report them.
        """
        now = time.monotonic()
        if now - self._polled_at < INQUIRY_INTERVAL_S:
            return None
        self._polled_at = now
        self._find_current()
        question = f"asked-{self.current}"
        if self.answered < self.current and (is_asking or self._board.has(question)):
            name = str(self._member)
            self._reports = is_asking and self._board.write_if_absent(question, name) == name
            answer = json.dumps([asdict(status) for status in inspect_ranks()])
            self._board.write(self._answer_key(self._member), answer)
            self.answered = self.current
            self._answered_at = now
        return self._collect() if self._reports else None

    def _find_current(self) -> None:
        """Advance to the first inquiry that was not reported yet."""
        self.current = max(self.current, 1)
        while self._board.has(f"said-{self.current}"):
            self.current += 1

    def _answer_key(self, member: int) -> str:
        return f"seen-{self.current}-{member}"

    def _collect(self) -> Answers | None:
        answered = [m for m in self._members if self._board.has(self._answer_key(m))]
        is_complete = len(answered) == len(self._members)
        if not is_complete and time.monotonic() - self._answered_at < INQUIRY_TIMEOUT_S:
            return None
        answers = {
            member: _parse_answer(self._board.read(self._answer_key(member))) for member in answered
        }
        self._reports = False
        self._board.write(f"said-{self.current}", "")
        return answers


def explain_answers(answers: Answers) -> Explanation:
    """Return why ranks wait, from the answers of all members."""
    statuses = [status for member_statuses in answers.values() for status in member_statuses]
    return explain_hang(sorted(statuses, key=lambda status: status.rank))


def _parse_answer(text: str) -> list[RankStatus]:
    """Return the status of one member's ranks.

    Raises:
        ValueError: The text is not an answer.
    """
    try:
        records = json.loads(text, object_hook=_make_readable)
        return [_parse_status(record) for record in records]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no answer of a member: {error}") from error


def _make_readable(record: dict[str, Any]) -> dict[str, Any]:
    """Replace characters that a terminal would obey."""
    return {
        key: make_readable(value) if isinstance(value, str) else value
        for key, value in record.items()
    }


def _parse_status(record: dict[str, Any]) -> RankStatus:
    progress = record["progress"]
    recent = tuple(
        (number, (CallSite(**site), size)) for number, (site, size) in progress["recent"]
    )
    fields = {
        "state": ProcessState(record["state"]),
        "progress": RankProgress(**{**progress, "recent": recent}),
        "threads": [_parse_stack(stack) for stack in record["threads"]],
        "ended": [make_readable(name) for name in record["ended"]],
        "workers": {int(pid): _parse_stack(stack) for pid, stack in record["workers"].items()},
    }
    return RankStatus(**{**record, **fields})


def _parse_stack(frames: list[dict[str, Any]]) -> list[Frame]:
    return [Frame(**frame) for frame in frames]
