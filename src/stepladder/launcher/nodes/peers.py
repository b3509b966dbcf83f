"""What the agents of one start tell each other, through the store of their rendezvous."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]

from stepladder.core.signing import ForgedError
from stepladder.launcher.diagnose.inquiry import Inquiry
from stepladder.launcher.nodes.board import SignedBoard
from stepladder.launcher.nodes.own_node import Introduction
from stepladder.launcher.nodes.policy import SECONDS_OF_SILENCE

SCOPE = "stepladder"  # of what is not told for one start alone
SECONDS_BETWEEN_WORDS = 0.05
SECONDS_BETWEEN_BEATS = 1.0
SECONDS_FOR_THE_CAUSE = (
    8.0  # after ranks failed here because others did: until that node has said why
)
BROKEN, CAUSE, ENDED, FAILED = "broken", "cause", "ended", "failed"


def board_of_start(common: Store, attempt: int, secret: str) -> SignedBoard:
    """Return what the nodes of one start tell each other."""
    return SignedBoard(common, f"{SCOPE}/start-{attempt}", secret)


class Peers:
    """The nodes of one start. number: of this one, below `count`.  secret: signs their words.
    clock: in seconds.

    common: of all starts, by default `store`.  first_rank, of this node's ranks (None where they
    join others), world_size, board and inquiry, into why ranks wait, are there after `introduce`.
    """

    first_rank: int | None = None
    world_size: int
    next_free: int  # the least number that a new rank may have

    def __init__(
        self,
        store: Store,
        number: int,
        count: int,
        secret: str,
        clock: Callable[[], float] = time.monotonic,
        common: Store | None = None,
    ) -> None:
        self.store, self.number, self.count, self.secret, self.clock = (
            store,
            number,
            count,
            secret,
            clock,
        )
        self.common = common or store
        self.beaten = clock() - SECONDS_BETWEEN_BEATS
        self.beats = 0  # of this node
        self.heard: dict[
            int, tuple[int, float]
        ] = {}  # of others: their last beat, and when it was news
        self.lifelines: dict[int, tuple[str, int]] = {}
        self.seats: dict[int, int] = {}
        self.gone: set[int] = set()  # nodes that the others go on without

    def introduce(self, own: Introduction) -> Introduction:
        """Waits for the word of all nodes, and gives what this one knows by it, this start's number
        included.

        Raises Forged where one is not of this launch.
        """
        told = self._exchange(json.dumps(asdict(own)))
        ranks = [word["nproc"] for word in told]
        self.first_rank, self.world_size = sum(ranks[: self.number]), sum(ranks)
        attempt, step = max(word["failed"] for word in told)
        known = Introduction(
            own.nproc,
            1 + max(word["attempt"] for word in told),
            (attempt, step),
            tuple(told[0]["master"]),
        )
        for node, word in enumerate(told):
            self.meet(node, word)
        self.enter(known.attempt)
        self.board.write(f"node-{self.number}", json.dumps(asdict(own)))
        return known

    def _exchange(self, own: str) -> list[Any]:
        """Return the introduction of each node of this start, and of no earlier one.

        A store may hold signed words of earlier starts, where the rendezvous has one store for all,
        or where somebody puts them back. So each node draws a number, and its introduction repeats
        the numbers of all: one that repeats this node's number was written after it was drawn.
        Raises DistError where it does not come."""
        deadline = self.clock() + self.store.timeout.total_seconds()  # type: ignore[attr-defined]
        board, nodes = SignedBoard(self.store, SCOPE, self.secret), range(self.count)
        drawn = secrets.token_hex(16)
        board.write(f"drawn-{self.number}", drawn)
        sent: list[str] = []
        while True:
            numbers = board.read_all([f"drawn-{node}" for node in nodes])
            if numbers != sent:
                board.write(f"node-{self.number}", json.dumps({"drawn": numbers, "own": own}))
                sent = numbers
            words = [
                json.loads(text) for text in board.read_all([f"node-{node}" for node in nodes])
            ]
            are_new = all(word["drawn"][self.number : self.number + 1] == [drawn] for word in words)
            if are_new and board.read_all([f"drawn-{node}" for node in nodes]) == sent:
                return [json.loads(word["own"]) for word in words]
            if self.clock() > deadline:
                raise DistError("a node of this start does not introduce itself")
            time.sleep(SECONDS_BETWEEN_WORDS)

    def meet(self, node: int, word: Mapping[str, Any]) -> None:
        """Keep what is to be known of a node after the start, of its `Introduction`."""
        self.lifelines[node], self.seats[node] = tuple(word["lifeline"]), word["seat"]

    def enter(self, attempt: int) -> None:
        """From now on the store is that of this start alone."""
        self.board = board_of_start(self.common, attempt, self.secret)
        self.next_free = self.world_size
        self.inquiry = Inquiry(self.board, self.number, self.count)

    def ranks_of(self, nproc: int) -> Sequence[int]:
        """The numbers of this node's."""
        if self.first_rank is None:
            return [self.next_rank() for _ in range(nproc)]
        return range(self.first_rank, self.first_rank + nproc)

    def next_rank(self) -> int:
        """Return a number beyond those of the start, which no other node has."""
        name = f"{self.number} {secrets.token_hex(8)}"
        while self.board.write_if_absent(f"rank-{self.next_free}", name) != name:
            self.next_free += 1
        return self.next_free

    def look_for_newcomers(self) -> None:
        """Nodes that have come since the start: from now on they are as the others."""
        while self.board.has(key := f"node-{self.count}"):
            self.meet(self.count, json.loads(self.board.read(key)))
            self.count += 1
            self.inquiry.set_members(self.living)

    @property
    def living(self) -> list[int]:
        return [node for node in range(self.count) if node not in self.gone]

    def still_there(self) -> list[int]:
        """The living, whichever node has noticed the loss of the others."""
        self.gone |= {node for node in self.living if node != self.number and self.knows_lost(node)}
        return self.living

    def knows_lost(self, node: int) -> bool:
        return self.board.has(f"lost-{node}")

    def lose(self, node: int) -> None:
        """From now on the others go on without it."""
        self.gone.add(node)
        self.board.write(f"lost-{node}")

    @property
    def listened_to(self) -> list[int]:
        """The first node that lives listens to all, the others to it."""
        first, *others = self.living
        return others if self.number == first else [first]

    def silent(self, limit: float = SECONDS_OF_SILENCE) -> int | None:
        """Return a node that is not heard of for so many seconds: not every loss closes
        connections.

        Raises Forged where somebody has put a beat of earlier back, of this node or another one.
        """
        now = self.clock()
        if now - self.beaten < SECONDS_BETWEEN_BEATS:
            return None
        self.beaten = now
        self._beat()
        for node, beats in self._beats_of(self.listened_to).items():
            last, since = self.heard.get(node, (-1, now))
            if beats < last:
                raise ForgedError
            if beats > last:
                self.heard[node] = beats, now
            elif now - since > limit:
                return node
        return None

    def _beat(self) -> None:
        key = f"alive-{self.number}"
        if self.beats and self.board.read(key) != str(self.beats):
            raise ForgedError
        self.beats += 1
        self.board.write(key, str(self.beats))

    def _beats_of(self, nodes: Sequence[int]) -> dict[int, int]:
        """Return how often each node has beaten; a node without a beat counts from now on."""
        beating = [
            n for n in nodes if self.heard.get(n, (0, 0.0))[0] > 0 or self.board.has(f"alive-{n}")
        ]
        texts = self.board.read_all([f"alive-{node}" for node in beating]) if beating else []
        return {**dict.fromkeys(nodes, 0), **dict(zip(beating, map(int, texts), strict=True))}

    def tell_broken(self) -> None:
        """Ranks here have failed, or are about to be started again."""
        with suppress(DistError):  # the store's node has gone, as everybody will see
            self.board.write(BROKEN)

    @property
    def is_broken(self) -> bool:
        return self.board.has(BROKEN)

    def tell_cause(self, text: str) -> None:
        """Why ranks here have failed, where that is not another node's doing."""
        with suppress(DistError):
            self.board.write(CAUSE, f"node {self.number}: {text}")

    def cause(self, seconds: float = SECONDS_FOR_THE_CAUSE) -> str:
        """What another node has told, within so many seconds; else ""."""
        with suppress(DistError, ForgedError):
            if self._wait_for(lambda: self.board.has(CAUSE), lambda: seconds):
                return self.board.read(CAUSE)
        return ""

    def tell_failed(self) -> None:
        """The launch has ended badly here: nobody needs to wait for the ranks of this node."""
        with suppress(DistError):
            self.board.write(FAILED)

    def await_end(
        self, patience: Callable[[], float], meanwhile: Callable[[], object] = lambda: None
    ) -> bool:
        """Whether the ranks of all nodes have ended, or failed, within the seconds that `patience`
        gives.
        """

        def have_ended() -> bool:
            meanwhile()
            return self.board.has(FAILED) or self.board.has(
                *(f"{ENDED}-{node}" for node in self.living)
            )

        with suppress(DistError):  # the store's node has left: so it has seen all end
            self.board.write(ENDED)
            self.board.write(f"{ENDED}-{self.number}")
            return self._wait_for(have_ended, patience)
        return True

    def _wait_for(self, condition: Callable[[], bool], seconds: Callable[[], float]) -> bool:
        started = self.clock()
        while not condition():
            if self.clock() - started >= seconds():
                return False
            time.sleep(0.1)
        return True
