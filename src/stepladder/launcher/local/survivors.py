"""Ranks that go on in place when others are lost: none of them is started again, and no snapshot is
read.

The launcher sees who has ended, and tells the others. They leave the broken group and say so; when
all of them have, they are told who they are and where they meet. A process in a lost one's place
says the same when it is ready; then the others are asked to leave their group after the step that
they are in. On several nodes each launcher does so for its ranks, and a council of them says who
meets."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Collection
from contextlib import suppress

from stepladder.core.console import say
from stepladder.launcher.local.council import Agreement, Council, NodeWord, OneNode
from stepladder.launcher.local.judge import Judge
from stepladder.launcher.local.outcome import Raised
from stepladder.launcher.local.rank_process import RankProcess
from stepladder.rank.error_record import ErrorKind
from stepladder.rank.membership import MET, Membership, new_wire, tell, tell_loss
from stepladder.rank.open_file import MemoryFile

LONGEST_WORD = 64
MOST_TRIES = 3  # to start a process in a lost one's place


class Survivors:
    """A group's ranks while some are lost, by the numbers they were started with.

    judge: tells a bug from a fault.  replace: starts a process in a lost one's place, with a number
    of its own.  ask_to_leave: after its step.  council: of all nodes.

    least: so many ranks may go on without one whose place fails again; None where all are wanted.
    let_go: of the run directory, which a rank of another node writes from now on."""

    least: int | None = None

    def __init__(
        self,
        judge: Judge,
        replace: Callable[[RankProcess, int], RankProcess],
        ask_to_leave: Callable[[int], None],
        council: Council | None = None,
    ) -> None:
        self.judge, self.council = judge, council or OneNode()
        self.meetings = MemoryFile("meetings")  # where ranks of this node alone form new groups
        self.replace, self.ask_to_leave = replace, ask_to_leave
        self.let_go: Callable[[], None] = lambda: (
            None
        )  # of the run directory, which another node writes now
        self.tries = 0  # to start a process that joins, since the last one did
        self.told_of = self.asked_for = (
            0  # the number of the group to come when ranks here were told, or asked
        )
        self.wires: dict[int, socket.socket] = {}
        self.known: set[int] = set()
        self.met: set[int] = set()  # that have been in a group
        self.said: dict[int, bytes] = {}  # by ranks that are in no group now, and wait to be told
        self.joining: dict[int, RankProcess] = {}  # that are not in a group with the others yet
        self.fallen: list[RankProcess] = []  # since the last group was formed
        self.lost: set[int] = set()  # whom the others go on without
        self.refused = False  # that there be a next group
        self.waits = False  # for the word of other nodes

    def wire(self, rank: int) -> socket.socket:
        """A new one, for a rank that is about to start: the rank's end, to be closed here once it
        has it.
        """
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
                if said == MET:
                    self.met.add(rank)
                elif said:
                    self.said[rank] = said
                else:  # its rank has ended
                    self._drop(rank)

    def _drop(self, rank: int) -> None:
        self.said.pop(rank, None)
        if wire := self.wires.pop(rank, None):
            wire.close()

    def go_on_without(self, member: RankProcess, others: set[int]) -> bool:
        """Whether the others may go on, now that this rank has failed. others: that are alive here.

        Not before all have met: a rank that waits for its first group is deaf until the timeout.
        """
        if member.rank in self.lost:
            return True
        if member.rank in self.joining and not self.refused:
            self._give_up(member)
            return True
        error, some_train = (
            member.error,
            self.council.others_train or not others <= self.joining.keys(),
        )
        self.refused = self.refused or (error is not None and error.kind is ErrorKind.STATE_LOST)
        all_have_met = self.met >= {member.rank, *others} - self.joining.keys()
        if (
            self.refused
            or not some_train
            or not all_have_met
            or (error is not None and error.is_of_all)
        ):
            return False
        self._drop(member.rank)
        self.fallen.append(member)
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
        number = self.council.next_number(max(self.known))
        self.tries += 1
        self.joining[number] = self.replace(member, number)

    def look(self, alive: set[int]) -> bool:
        """Let ranks that have left a broken group, or wait to join, meet in the next one.

        False where they had better not: the failure is one that would come back.
        """
        trained, council = alive - self.joining.keys(), self.council
        council.look()
        if self.refused:
            self._answer(None, list(self.said))
            return bool(trained)
        if not (trained or self.fallen) and council.are_done:
            self._dismiss_joining()
            return True
        if self.fallen or (not council.asked and not trained.isdisjoint(self.said)):
            council.call()
        if not self.joining.keys().isdisjoint(self.said):
            council.ask()
        if council.called and self.told_of < council.number:
            self.told_of = council.number
            for wire in self.wires.values():
                tell_loss(wire)
        if council.asked and self.asked_for < council.number:
            self.asked_for = council.number
            for rank in trained - self.said.keys():
                self.ask_to_leave(rank)
        if (council.called or council.asked) and self.said.keys() >= trained:
            return self._agree(trained)
        return True

    def _dismiss_joining(self) -> None:
        """There is nobody left to join."""
        for rank, member in self.joining.items():
            member.process.kill()
            self.lost.add(rank)
        self.joining.clear()

    def _agree(self, trained: set[int]) -> bool:
        council, failures = self.council, [member.failure for member in self.fallen]
        steps = [
            one.error.step
            for one in failures
            if isinstance(one, Raised) and one.error.step is not None
        ]
        word = NodeWord(
            sorted(self.said),
            len(trained),
            sorted({said.decode() for said in self.said.values()}),
            len(failures),
            any(map(self.judge.why_in_vain, failures)),
            f"file://{self.meetings.path}?group={council.number}",
            council.address,
            max(steps, default=None),
            [failure.in_short for failure in failures],
        )
        answer = council.agree(word)
        self.waits = answer is None
        if answer is None:
            return True
        if answer.found is None:
            self.refused = True
            self._answer(None, list(self.said))
            return bool(trained) and not failures
        self._go_on(answer, self.fallen[: word.lost], trained)
        return True

    def _go_on(self, answer: Agreement, fallen: list[RankProcess], trained: set[int]) -> None:
        found, council = answer.found, self.council
        assert found is not None
        for member in fallen:
            self.judge.is_bug(member.failure)  # shows it
        if answer.lost:
            self.judge.step = answer.step  # the same step may fail on another node
        size = len(found.members)
        if found.nodes[0] == council.node or fallen:
            how = "going on in place" if answer.lost else "another process has joined: going on"
            say(f"{how} with {size} {'process' if size == 1 else 'processes'}")
        if found.nodes[0] != council.node:
            self.let_go()
        met = [rank for rank in found.members if rank in self.said]
        self.met.update(met)
        for rank in met:
            if self.joining.pop(rank, None):
                self.tries = 0
        del self.fallen[: len(fallen)]
        self._answer(found, met)
        for member in fallen:
            self.lost.add(member.rank)
            if not self._is_left_out(member, len(trained)):
                self._start_for(member)

    def _answer(self, found: Membership | None, ranks: list[int]) -> None:
        for rank in ranks:
            tell(self.wires[rank], found)
            del self.said[rank]

    def _is_left_out(self, member: RankProcess, others: int) -> bool:
        if (
            self.least is None
            or others < self.least
            or not self.judge.failed_again(member.local_rank)
        ):
            return False
        say(
            f"rank {member.rank} failed within a minute of the one before it: no process is started for it"
        )
        return True

    def close(self) -> None:
        for rank in list(self.wires):
            self._drop(rank)
