"""What the agents of one start tell each other, through the store of their rendezvous."""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from torch.distributed import DistError, PrefixStore, Store  # type: ignore[attr-defined]

from stepladder.core.signed import Forged, sign, verified
from stepladder.launcher.diagnose.together import Inquiry
from stepladder.launcher.nodes.own_node import Introduction
from stepladder.launcher.nodes.policy import SECONDS_OF_SILENCE

SECONDS_BETWEEN_BEATS = 1.0
SECONDS_FOR_THE_CAUSE = 8.0  # after ranks failed here because others did: until that node has said why
BROKEN, CAUSE, ENDED, FAILED = "broken", "cause", "ended", "failed"


class Peers:
    """The nodes of one start. number: of this one, below `count`.  secret: signs their words.  clock: in seconds.

    common: of all starts, by default `store`.  first_rank, of this node's ranks (None where they join others),
    world_size and inquiry, into why ranks wait, are there after `introduce`.
    """

    first_rank: int | None = None

    def __init__(
        self, store: Store, number: int, count: int, secret: str, clock: Callable[[], float] = time.monotonic,
        common: Store | None = None,
    ) -> None:  # fmt: skip
        self.store, self.number, self.count, self.secret, self.clock = store, number, count, secret, clock
        self.common = common or store
        self.beaten = clock() - SECONDS_BETWEEN_BEATS
        self.heard: dict[int, tuple[int, float]] = {}
        self.lifelines: dict[int, tuple[str, int]] = {}
        self.seats: dict[int, int] = {}
        self.gone: set[int] = set()  # nodes that the others go on without

    def introduce(self, own: Introduction) -> Introduction:
        """Waits for the word of all nodes, and gives what this one knows by it, this start's number included.

        Raises Forged where one is not of this launch.
        """
        self.tell(f"stepladder/node-{self.number}", json.dumps(asdict(own)))
        told = [json.loads(self.told(f"stepladder/node-{node}")) for node in range(self.count)]
        ranks = [word["nproc"] for word in told]
        self.first_rank, self.world_size = sum(ranks[: self.number]), sum(ranks)
        attempt, step = max(word["failed"] for word in told)
        known = Introduction(
            own.nproc, 1 + max(word["attempt"] for word in told), (attempt, step), tuple(told[0]["master"])
        )
        for node, word in enumerate(told):
            self.meet(node, word)
        self.enter(known.attempt)
        self.tell(f"node-{self.number}", json.dumps(asdict(own)))
        return known

    def meet(self, node: int, word: Mapping[str, Any]) -> None:
        """Keep what is to be known of a node after the start, of its `Introduction`."""
        self.lifelines[node], self.seats[node] = tuple(word["lifeline"]), word["seat"]

    def enter(self, attempt: int) -> None:
        """From now on the store is that of this start alone."""
        # A rendezvous by rank has one store for all starts.
        self.store = PrefixStore(f"stepladder/start-{attempt}", self.common)
        self.inquiry = Inquiry(self, self.number, self.count)

    def ranks_of(self, nproc: int) -> Sequence[int]:
        """The numbers of this node's."""
        if self.first_rank is None:
            return [self.next_rank() for _ in range(nproc)]
        return range(self.first_rank, self.first_rank + nproc)

    def next_rank(self) -> int:
        """A number beyond those of the start: all nodes draw from one sequence."""
        number: int = self.world_size + self.total("ranks", 1) - 1
        return number

    def look_for_newcomers(self) -> None:
        """Nodes that have come since the start: from now on they are as the others."""
        while self.has(key := f"node-{self.count}"):
            self.meet(self.count, json.loads(self.told(key)))
            self.count += 1
            self.inquiry.members = self.living

    def tell(self, key: str, text: str) -> None:
        self.store.set(key, b64encode(sign(self.secret, text.encode())).decode())

    def tell_first(self, key: str, text: str) -> str:
        """Unless another node has told it. Returns what is told there. Raises Forged."""
        self.store.compare_set(key, "", b64encode(sign(self.secret, text.encode())).decode())
        return self.told(key)

    def told(self, key: str) -> str:
        """Waits for it. Raises Forged."""
        try:
            return verified(self.secret, b64decode(self.store.get(key))).decode()
        except ValueError as error:  # no base64, no text
            raise Forged from error

    def has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def total(self, key: str, more: int = 0) -> int:
        return int(self.store.add(key, more))

    @property
    def living(self) -> list[int]:
        return [node for node in range(self.count) if node not in self.gone]

    def still_there(self) -> list[int]:
        """The living, whichever node has noticed the loss of the others."""
        self.gone |= {node for node in self.living if node != self.number and self.knows_lost(node)}
        return self.living

    def knows_lost(self, node: int) -> bool:
        return self.has(f"lost-{node}")

    def lose(self, node: int) -> None:
        """From now on the others go on without it."""
        self.gone.add(node)
        self.total(f"lost-{node}", 1)

    @property
    def listened_to(self) -> list[int]:
        """The first node that lives listens to all, the others to it."""
        first, *others = self.living
        return others if self.number == first else [first]

    def silent(self, limit: float = SECONDS_OF_SILENCE) -> int | None:
        """A node that is not heard of for so many seconds: not every loss closes connections."""
        now = self.clock()
        if now - self.beaten < SECONDS_BETWEEN_BEATS:
            return None
        self.beaten = now
        self.total(f"alive-{self.number}", 1)
        for node in self.listened_to:
            beats = self.total(f"alive-{node}")
            if node not in self.heard or beats != self.heard[node][0]:
                self.heard[node] = beats, now
            elif now - self.heard[node][1] > limit:
                return node
        return None

    def tell_broken(self) -> None:
        """Ranks here have failed, or are about to be started again."""
        with suppress(DistError):  # the store's node has gone, as everybody will see
            self.store.set(BROKEN, "")

    @property
    def is_broken(self) -> bool:
        return self.has(BROKEN)

    def tell_cause(self, text: str) -> None:
        """Why ranks here have failed, where that is not another node's doing."""
        with suppress(DistError):
            self.tell(CAUSE, f"node {self.number}: {text}")

    def cause(self, seconds: float = SECONDS_FOR_THE_CAUSE) -> str:
        """What another node has told, within so many seconds; else ""."""
        with suppress(DistError, Forged):
            if self._wait_for(lambda: self.has(CAUSE), lambda: seconds):
                return self.told(CAUSE)
        return ""

    def tell_failed(self) -> None:
        """The launch has ended badly here: nobody needs to wait for the ranks of this node."""
        with suppress(DistError):
            self.store.set(FAILED, "")

    def await_end(self, patience: Callable[[], float], meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Whether the ranks of all nodes have ended, or failed, within the seconds that `patience` gives."""

        def have_ended() -> bool:
            meanwhile()
            return self.has(FAILED) or self.total(ENDED) >= len(self.living)

        with suppress(DistError):  # the store's node has left: so it has seen all end
            self.total(ENDED, 1)
            return self._wait_for(have_ended, patience)
        return True

    def _wait_for(self, condition: Callable[[], bool], seconds: Callable[[], float]) -> bool:
        started = self.clock()
        while not condition():
            if self.clock() - started >= seconds():
                return False
            time.sleep(0.1)
        return True
