"""Runs exchanges: each rank writes into its slot, waits for its peers, and reads their slots."""

from __future__ import annotations

import math
import mmap
import threading
from collections import deque
from collections.abc import Sequence

import torch

from stepladder_exchange.call_frame import CallFrame, find_caller
from stepladder_exchange.futex import wake_all
from stepladder_exchange.mismatch import compare_calls, describe_call, has_told_call
from stepladder_exchange.plan import SMALL_HALVES, Exchange, ExchangePlanner, Halves
from stepladder_exchange.wait import (
    DIGEST_WORD,
    EXCHANGE_WORD,
    FUTEX_MASK,
    FUTEX_WORD,
    SLOT_WORDS,
    CallMismatch,
    PeerWaiter,
    make_loss_error,
)
from stepladder_exchange.work import Chunk, MessageFormat, Tensors, Work

MAX_PLANS = 64


class ExchangeRunner:
    """Runs the collectives of one group of ranks that are queued, several in one exchange."""

    def __init__(
        self,
        memory: mmap.mmap,
        rank: int,
        pids: Sequence[int],
        timeout_seconds: float,
        names: Sequence[int] = (),
        large_halves: Halves = SMALL_HALVES,
    ) -> None:
        """Join a group.

        Args:
            memory: The memory that the ranks of this group share.
            rank: This rank.
            pids: The process id of each rank.
            timeout_seconds: How long an exchange waits for a peer.
            names: The number by which messages name each rank; without it, that of this group.
            large_halves: The halves for messages that do not fit into one exchange.

        Raises:
            RuntimeError: If the process of a rank has ended already.
        """
        self.rank = rank
        self.ranks = len(pids)
        self.one_row_each = (1,) * len(pids)
        self.memory = memory
        self.slots = memoryview(memory).cast("q")
        memory_bytes = torch.frombuffer(memory, dtype=torch.uint8)
        address = memory_bytes.data_ptr()
        self.waiter = PeerWaiter(self.slots, address, rank, pids, timeout_seconds, names)
        self.names = self.waiter.names
        self.peers = self.waiter.peers
        self.sleeping_words = self.waiter.sleeping_words
        self.fence = threading.Lock()  # acquiring it is a memory fence, see shared_memory.py
        self.exchange_count = 0
        self.queue: list[Work] = []
        self.batch: list[Work] = []  # the collectives that run now, in the exchanges of `remaining`
        self.remaining: deque[Exchange] = deque()
        self.is_published = False  # whether this rank has written its data of remaining[0]
        self.planner = ExchangePlanner(memory_bytes, rank, self.ranks, large_halves)
        self.plans: dict[tuple[MessageFormat, ...], list[Exchange]] = {}
        self.arena_used_bytes = 0
        # For the address of each vector of this rank in the arena: the vector's offset within a
        # slot, and the same vector of every rank.
        self.vectors: dict[int, tuple[int, Tensors]] = {}

    def leave_group(self) -> None:
        """Leave the group: no peer needs to wait for this rank any more."""
        self.waiter.leave_group()

    def exchange(self) -> None:
        """Run all collectives that are queued."""
        self.begin()
        self.advance()

    def begin(self) -> None:
        """Make the queued collectives the ones that run now. None may be running."""
        works = self.queue
        self.queue = []
        for work in works:
            work.is_finished = True
        formats = tuple([work.format for work in works])
        plan = self.plans.get(formats)
        if plan is None:
            if len(self.plans) == MAX_PLANS:
                self.plans.clear()
            plan = self.plans[formats] = self.planner.plan(formats)
        self.batch = works
        self.remaining = deque(plan)
        self.is_published = False

    def advance(self, until: float = math.inf, caller: CallFrame | None = None) -> bool:
        """Run the exchanges of the collectives that run now.

        Args:
            until: The time, by `perf_counter`, at which to stop waiting for peers. The next call
                runs the exchanges that remain.
            caller: The user's call of the collective, for an error; None if it is in this thread.

        Returns:
            Whether they are finished.

        Raises:
            RuntimeError: As for `Work.wait`. No further collective can run in this group.
        """
        works = self.batch
        tag = 0
        for work in works:
            tag ^= work.tag
        while self.remaining:
            digest, chunks = self.remaining[0]
            if not self.is_published:
                self._publish(digest ^ tag, chunks)
            try:
                if not self._has_all_peers(digest ^ tag, until):
                    return False
            except CallMismatch as mismatch:
                raise self._explain_mismatch(mismatch.peer, caller) from None
            half = self.exchange_count & 1
            for chunk in chunks:
                works[chunk.message].read(chunk, half)
            self.remaining.popleft()
            self.is_published = False
        for work in works:
            work.has_result = True
        self.drop_batch()
        return True

    def drop_batch(self) -> None:
        """Drop the last collectives, which keep this object and its memory alive."""
        self.batch = []

    def _publish(self, digest: int, chunks: list[Chunk]) -> None:
        """Write this rank's data of an exchange, and wake the peers that wait for them."""
        slots = self.slots
        own_slot = SLOT_WORDS * self.rank
        self.exchange_count = count = self.exchange_count + 1
        half = count & 1
        for chunk in chunks:
            self.batch[chunk.message].write(chunk, half)
        slots[own_slot + DIGEST_WORD + half] = digest
        slots[own_slot + EXCHANGE_WORD] = count
        slots[own_slot + FUTEX_WORD] = count & FUTEX_MASK
        self.is_published = True
        self.fence.acquire()
        self.fence.release()
        for sleeping_word in self.sleeping_words:
            if slots[sleeping_word]:
                wake_all(self.waiter.futexes[self.rank])
                break

    def _has_all_peers(self, digest: int, until: float) -> bool:
        """Return whether all peers have published the exchange that this rank has published."""
        slots = self.slots
        count = self.exchange_count
        half = count & 1
        for peer in self.peers:
            slot = SLOT_WORDS * peer
            has_arrived = slots[slot + EXCHANGE_WORD] >= count or self.waiter.wait(
                peer, count, until
            )
            if not has_arrived:
                return False
            if slots[slot + DIGEST_WORD + half] != digest:
                raise CallMismatch(peer)
        return True

    def _explain_mismatch(self, peer: int, caller: CallFrame | None) -> RuntimeError:
        """Return the error that names a peer's call and this rank's, or a rank that was lost."""
        count = self.exchange_count
        lost_rank = None
        if not has_told_call(self.waiter, peer, count):
            lost_rank = self.waiter.find_lost()
        if lost_rank is not None:
            return make_loss_error(lost_rank)
        formats = [work.format for work in self.batch]
        call = describe_call(formats, caller or find_caller())
        return compare_calls(self.waiter, peer, count, call)
