"""How a rank waits for its peers in shared memory, and how it wakes peers that wait."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from time import perf_counter

from stepladder_exchange.futex import wait_while_equal, wake_all
from stepladder_exchange.process_watch import ProcessWatch
from stepladder_exchange.shared_segment import SLOT_BYTES

# To sleep and be woken costs both ranks more than 150 us on a virtual machine.
MAX_SPIN_S = 0.001
MAX_SPIN_ALONE_S = 20e-6  # a peer that takes longer may wait for the core of the rank that spins
MAX_SLEEP_S = 0.1
MAX_SKIPPED_SPINS = 64  # then a rank tries again whether the machine is still busy

# The 8-byte words at the beginning of a slot. The futex word is the low half of its word. A rank
# that knows of a lost rank writes that rank's name plus one into the lost word. There are two
# digests, one for each half of the slot. The bell word is the futex word of a rank's messages. A
# rank whose peer has come to an exchange with another collective writes the number of the exchange
# into the call word, and before that into the words behind it what it calls itself.
EXCHANGE_WORD, FUTEX_WORD, LEFT_WORD, SLEEPING_WORD, LOST_WORD, DIGEST_WORD = range(6)
BELL_WORD = DIGEST_WORD + 2
CALL_WORD = BELL_WORD + 1
SLOT_WORDS = SLOT_BYTES // 8
FUTEX_MASK = 2**32 - 1
OTHER_MACHINE = -2  # in place of the name of a lost rank, if the network tells no more


def make_loss_error(lost: int) -> RuntimeError:
    """Return the error of a collective for which a rank is lost, given the name of the rank."""
    if lost == OTHER_MACHINE:
        return RuntimeError("another machine does not answer")
    return RuntimeError(f"rank {lost} has gone")


class CallMismatch(RuntimeError):
    """A peer has come to an exchange with another collective.

    Args:
        peer: The peer.
        text: What both ranks call, as far as it is known.
    """

    def __init__(self, peer: int, text: str = "") -> None:
        super().__init__(text)
        self.peer = peer


class PeerWaiter:
    """Waits until the peers of one rank have published the number of an exchange."""

    def __init__(
        self,
        slots: memoryview,
        address: int,
        rank: int,
        pids: Sequence[int],
        timeout_seconds: float,
        names: Sequence[int] = (),
    ) -> None:
        """Watch the processes of the peers, and wait for them in calls of `wait`.

        Args:
            slots: The shared memory as 8-byte words.
            address: The address of the shared memory.
            rank: This rank.
            pids: The process of each rank.
            timeout_seconds: How long to wait for a peer.
            names: The number by which messages name each rank; without it, that of this group.

        Raises:
            RuntimeError: A rank has ended already.
        """
        ranks = range(len(pids))
        self.slots = slots
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.names = names or ranks
        self.peers = [peer for peer in ranks if peer != rank]
        self.futexes = [address + 8 * (SLOT_WORDS * slot + FUTEX_WORD) for slot in ranks]
        self._bells = [address + 8 * (SLOT_WORDS * slot + BELL_WORD) for slot in ranks]
        self.sleeping_words = [SLOT_WORDS * peer + SLEEPING_WORD for peer in self.peers]
        self.has_core_per_rank = len(pids) <= len(os.sched_getaffinity(0))
        self.skipped_spins = 0  # how many of the next waits sleep at once
        self.next_skipped_spins = 1
        self.has_left = False
        slots[SLOT_WORDS * rank + LOST_WORD] = 0
        try:
            self.process_watch = ProcessWatch(
                {peer: pids[peer] for peer in self.peers}, self.wake_all_ranks
            )
        except OSError as error:
            raise RuntimeError("a rank has ended while the group formed") from error

    def leave_group(self, lost: int | None = None) -> None:
        """Tell the peers that this rank has left, and stop watching them.

        Args:
            lost: The name of the rank whose loss is the reason, if one is.
        """
        if not self.has_left:
            self.has_left = True
            if lost is not None:
                self.slots[SLOT_WORDS * self.rank + LOST_WORD] = lost + 1
            self.slots[SLOT_WORDS * self.rank + LEFT_WORD] = 1
            self.wake_all_ranks()
            self.process_watch.stop()

    def wake_all_ranks(self) -> None:
        """Wake every rank that sleeps, so that it checks its peers."""
        for slot, futex in enumerate(self.futexes):
            self.slots[SLOT_WORDS * slot + FUTEX_WORD] = time.monotonic_ns() & FUTEX_MASK
            wake_all(futex)
            self.ring(slot)

    def ring(self, rank: int) -> None:
        """Wake the thread of a rank that sleeps in `sleep_at_bell`, so that it looks again."""
        self.slots[SLOT_WORDS * rank + BELL_WORD] = time.monotonic_ns() & FUTEX_MASK
        wake_all(self._bells[rank])

    def get_bell(self) -> int:
        """Return a number that changes when this rank's bell rings."""
        return self.slots[SLOT_WORDS * self.rank + BELL_WORD] & FUTEX_MASK

    def sleep_at_bell(self, bell: int) -> None:
        """Sleep until this rank's bell rings, for a while at most.

        Args:
            bell: What `get_bell` returned: if the bell has rung since then, nobody sleeps.
        """
        wait_while_equal(self._bells[self.rank], bell, MAX_SLEEP_S)

    def set_timeout(self, seconds: float) -> None:
        """Set how long to wait for a peer from now on."""
        self.timeout_seconds = seconds

    def wait(self, peer: int, count: int, until: float = math.inf) -> bool:
        """Wait until a peer has published an exchange number of at least `count`.

        Args:
            peer: The peer.
            count: The number.
            until: The time, by `perf_counter`, at which to stop waiting.

        Returns:
            False if the time has come before the number.

        Raises:
            RuntimeError: A peer has ended or left the group, did not arrive in time, or has come to
                this exchange with another collective (CallMismatch).
        """
        peer_word = SLOT_WORDS * peer + EXCHANGE_WORD
        began = perf_counter()
        if self.has_core_per_rank and not self.skipped_spins:
            self._spin(peer_word, count, began)
        elif self.skipped_spins:
            self.skipped_spins -= 1
        return self._sleep(peer, count, until, began)

    def _spin(self, peer_word: int, count: int, began: float) -> None:
        """Poll until a peer has published a number, for MAX_SPIN_S at most.

        On a busy machine a rank that spins keeps a core from the peer that it waits for. So it soon
        gives way between two polls. Where that takes longer than a spin may, or a spin has no
        success, the next waits sleep at once: one, two, four ... of them, until a spin succeeds.
        """
        elapsed = 0.0
        while elapsed < MAX_SPIN_S:
            if self.slots[peer_word] >= count:
                self.next_skipped_spins = 1
                return
            if elapsed >= MAX_SPIN_ALONE_S:
                os.sched_yield()
            elapsed = perf_counter() - began
        self.skipped_spins = self.next_skipped_spins
        self.next_skipped_spins = min(2 * self.next_skipped_spins, MAX_SKIPPED_SPINS)

    def _sleep(self, peer: int, count: int, until: float, began: float) -> bool:
        """Do what `wait` does, without spinning; the wait began at the time `began`."""
        slots = self.slots
        peer_slot = SLOT_WORDS * peer
        own_slot = SLOT_WORDS * self.rank
        deadline = began + self.timeout_seconds
        while True:
            slots[own_slot + SLEEPING_WORD] = 1
            futex_value = slots[peer_slot + FUTEX_WORD] & FUTEX_MASK
            if slots[peer_slot] >= count:
                break
            self._check_peers(count)
            now = perf_counter()
            if now >= deadline:
                self._raise_timeout(count)
            if now >= until:
                return False
            wait_while_equal(
                self.futexes[peer], futex_value, min(deadline - now, until - now, MAX_SLEEP_S)
            )
        slots[own_slot + SLEEPING_WORD] = 0
        return True

    def _raise_timeout(self, count: int) -> None:
        missing = [peer for peer in self.peers if self.slots[SLOT_WORDS * peer] < count]
        names = ", ".join(f"rank {self.names[peer]}" for peer in missing)
        raise RuntimeError(f"timed out: {names} did not arrive in {self.timeout_seconds:g} s")

    def _check_peers(self, count: int) -> None:
        """Raise RuntimeError if a peer has ended or left before this exchange, or does not fit."""
        if self.has_left:
            raise RuntimeError("this rank has left the process group")
        for peer in self.peers:
            if self.has_gone(peer) and self.slots[SLOT_WORDS * peer] < count:
                raise make_loss_error(self.record_lost(peer))
        # Two peers that do not fit go no further, so the rank that this one waits for is in vain.
        digest_word = DIGEST_WORD + (count & 1)
        own_digest = self.slots[SLOT_WORDS * self.rank + digest_word]
        for peer in self.peers:
            slot = SLOT_WORDS * peer
            has_come = self.slots[slot] >= count and not self.has_gone(peer)
            if has_come and self.slots[slot + digest_word] != own_digest:
                raise CallMismatch(peer)

    def find_lost(self) -> int | None:
        """Return the name of the rank that was lost first, None if all are in the group."""
        for peer in self.peers:
            if self.has_gone(peer):
                return self.record_lost(peer)
        return self.find_recorded_loss()

    def find_recorded_loss(self) -> int | None:
        """Return the name of a lost rank for which a call of a peer has failed, None without one.

        The peer may have gone on to its next call.
        """
        for peer in self.peers:
            reason = self.slots[SLOT_WORDS * peer + LOST_WORD] - 1
            if reason not in (-1, self.names[self.rank]):
                return reason
        return None

    def has_gone(self, peer: int) -> bool:
        """Return whether a peer has ended or left the group."""
        has_left = self.slots[SLOT_WORDS * peer + LEFT_WORD]
        return bool(has_left) or peer in self.process_watch.ended

    def record_lost(self, peer: int) -> int:
        """Tell the other ranks whose loss has made a peer leave the group or end.

        Returns:
            The name of the lost rank: the peer itself, or the rank that the peer has lost.
        """
        reason = self.slots[SLOT_WORDS * peer + LOST_WORD] - 1
        lost = self.names[peer] if reason in (-1, self.names[self.rank]) else reason
        self.slots[SLOT_WORDS * self.rank + LOST_WORD] = lost + 1
        return lost
