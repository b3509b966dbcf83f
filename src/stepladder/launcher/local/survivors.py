"""Ranks that go on in place when others are lost: none of them is started again, and no snapshot is read.

The launcher sees who has ended, and tells the others. They leave the broken group and say so; when all of them
have, they are told who they are and where they meet. A process in a lost one's place says the same when it is
ready; then the others are asked to leave their group after the step that they are in.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from stepladder.core.console import say
from stepladder.launcher.local.outcome import Judge
from stepladder.launcher.local.rank_process import RankProcess
from stepladder.rank.membership import BROKEN, Membership, new_wire, tell, tell_loss

LONGEST_WORD = 64
MOST_TRIES = 3  # to start a process in a lost one's place


class Survivors:
    """A group's ranks while some are lost, by the numbers they were started with.

    folder: for the files where new groups meet.  judge: tells a bug from a fault.  replace: starts a process in
    a lost one's place, with a number of its own.  ask_to_leave: after its step.  least: so many ranks may go on
    without one whose place fails again; None where all are wanted.
    """

    def __init__(
        self, folder: Path, judge: Judge, replace: Callable[[RankProcess, int], RankProcess],
        ask_to_leave: Callable[[int], None], least: int | None,
    ) -> None:  # fmt: skip
        self.folder, self.judge, self.least = folder, judge, least
        self.replace, self.ask_to_leave = replace, ask_to_leave
        self.meetings = self.tries = 0  # tries: to start a process that joins, since the last one did
        self.wires: dict[int, socket.socket] = {}
        self.known: set[int] = set()
        self.said: dict[int, bytes] = {}  # by ranks that are in no group now, and wait to be told
        self.joining: dict[int, RankProcess] = {}  # that are not in a group with the others yet
        self.fallen: list[RankProcess] = []  # since the last group was formed
        self.lost: set[int] = set()  # whom the others go on without
        self.ready = False  # whether a rank that is to join waits, and the others have not been asked

    def wire(self, rank: int) -> socket.socket:
        """A new one, for a rank that is about to start: the rank's end, to be closed here once it has it."""
        self.wires[rank], theirs = new_wire()
        self.known.add(rank)
        return theirs

    @property
    def heard(self) -> list[socket.socket]:
        """What to listen to."""
        return list(self.wires.values())

    def hear(self, ready: Collection[object]) -> None:
        """What is to be read of the wires that are ready."""
        for rank, wire in list(self.wires.items()):
            if wire in ready:
                said = b""
                with suppress(OSError):
                    said = wire.recv(LONGEST_WORD)
                if not said:  # its rank has ended
                    self._drop(rank)
                    continue
                self.said[rank] = said
                self.ready |= rank in self.joining

    def _drop(self, rank: int) -> None:
        self.said.pop(rank, None)
        if wire := self.wires.pop(rank, None):
            wire.close()

    def go_on_without(self, member: RankProcess, others: set[int]) -> bool:
        """Whether the others may go on, now that this rank has failed. others: that are alive."""
        if member.rank in self.lost:
            return True
        if member.rank in self.joining:
            self._give_up(member)
            return True
        error = member.error
        if others <= self.joining.keys() or (error is not None and error.is_of_all):
            return False
        self._drop(member.rank)
        self.fallen.append(member)
        for wire in self.wires.values():
            tell_loss(wire)
        return True

    def _give_up(self, member: RankProcess) -> None:
        """It was to join the others."""
        self.judge.show(member.failure)
        say("it was to join the others, which go on without it")
        self._drop(member.rank)
        del self.joining[member.rank]
        self.lost.add(member.rank)
        if member.process.exitcode == -signal.SIGKILL and self.tries < MOST_TRIES:
            self._start_for(member)

    def _start_for(self, member: RankProcess) -> None:
        number = 1 + max(self.known)
        self.tries += 1
        self.joining[number] = self.replace(member, number)

    def look(self, alive: set[int]) -> bool:
        """Let ranks that have left a broken group, or wait to join, meet in the next one.

        False where they had better not: the failure is one that would come back.
        """
        trained = alive - self.joining.keys()
        if self.ready and not self.joining.keys().isdisjoint(self.said):
            for rank in trained:
                self.ask_to_leave(rank)
        self.ready = False
        if not trained:  # the others are done
            for rank, member in self.joining.items():
                member.process.kill()
                self.lost.add(rank)
            self.joining.clear()
        elif self.said.keys() >= trained:
            return self._meet(len(trained))
        return True

    def _meet(self, others: int) -> bool:
        failures, words = [member.failure for member in self.fallen], self.said.values()
        if not failures and set(words) == {BROKEN}:  # without a loss, it may break again
            self._answer(None)
            return True
        if any(map(self.judge.why_in_vain, failures)):
            return False
        for failure in failures:
            self.judge.is_bug(failure)  # shows it
        self.meetings += 1
        found = Membership(self.meetings, sorted(self.said), str(self.folder / f"meeting-{self.meetings}"))
        how = "going on in place" if failures else "another process has joined: going on"
        size = len(found.members)
        say(f"{how} with {size} {'process' if size == 1 else 'processes'}")
        fallen = list(self.fallen)
        for rank in self.joining.keys() & self.said.keys():
            del self.joining[rank]
            self.tries = 0
        self._answer(found)
        for member in fallen:
            self.lost.add(member.rank)
            if not self._is_left_out(member, others):
                self._start_for(member)
        return True

    def _answer(self, found: Membership | None) -> None:
        for rank in self.said:
            tell(self.wires[rank], found)
        self.said.clear()
        self.fallen.clear()

    def _is_left_out(self, member: RankProcess, others: int) -> bool:
        if self.least is None or others < self.least or not self.judge.failed_again(member.local_rank):
            return False
        say(f"rank {member.rank} failed within a minute of the one before it: no process is started for it")
        return True

    def close(self) -> None:
        for rank in list(self.wires):
            self._drop(rank)
