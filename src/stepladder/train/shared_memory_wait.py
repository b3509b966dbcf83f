"""How a rank waits for its peers in shared memory, and how it wakes peers that wait."""

from __future__ import annotations

import time
from time import perf_counter

from stepladder.core.process_count import count_cores
from stepladder.rank.futex import wait_while_equal, wake_all
from stepladder.rank.process_watch import ProcessWatch
from stepladder.rank.shared_segment import SLOT_BYTES

# To sleep and be woken costs both ranks more than 150 us on a virtual machine.
MAX_SPIN_S = 0.001
MAX_SLEEP_S = 0.1

# The 8-byte words at the beginning of a slot. The futex word is the low half of its word. There are
# two digests, one for each half of the slot.
EXCHANGE_WORD, FUTEX_WORD, LEFT_WORD, SLEEPING_WORD, DIGEST_WORD = range(5)
SLOT_WORDS = SLOT_BYTES // 8
FUTEX_MASK = 2**32 - 1


class PeerWaiter:
    """Waits until the peers of one rank have published the number of an exchange."""

    def __init__(
        self,
        slots: memoryview,
        address: int,
        rank: int,
        pids: list[int],
        group_id: int,
        timeout_seconds: float,
    ) -> None:
        """Watch the processes of the peers, and wait for them in calls of `wait`.

        Args:
            slots: The shared memory as 8-byte words.
            address: The address of the shared memory.
            rank: This rank.
            pids: The process of each rank.
            group_id: The number of the group.
            timeout_seconds: How long to wait for a peer.

        Raises:
            RuntimeError: A rank has ended already.
        """
        ranks = range(len(pids))
        self.slots = slots
        self.rank = rank
        self.group_id = group_id
        self.timeout_seconds = timeout_seconds
        self.peers = [peer for peer in ranks if peer != rank]
        self.futexes = [address + 8 * (SLOT_WORDS * slot + FUTEX_WORD) for slot in ranks]
        self.sleeping_words = [SLOT_WORDS * peer + SLEEPING_WORD for peer in self.peers]
        self.has_core_per_rank = len(pids) <= count_cores()
        self.should_spin = self.has_core_per_rank
        self.has_left = False
        try:
            self.process_watch = ProcessWatch(
                {peer: pids[peer] for peer in self.peers},
                self._wake_all_ranks,
            )
        except OSError as error:
            raise RuntimeError("a rank has ended while the group formed") from error

    def leave_group(self) -> None:
        """Tell the peers that this rank has left, and stop watching them."""
        if not self.has_left:
            self.has_left = True
            self.slots[SLOT_WORDS * self.rank + LEFT_WORD] = self.group_id
            self._wake_all_ranks()
            self.process_watch.stop()

    def _wake_all_ranks(self) -> None:
        """Wake every rank that sleeps, so that it checks its peers."""
        for slot, futex in enumerate(self.futexes):
            self.slots[SLOT_WORDS * slot + FUTEX_WORD] = time.monotonic_ns() & FUTEX_MASK
            wake_all(futex)

    def wait(self, peer: int, count: int) -> None:
        """Wait until a peer has published an exchange number of at least `count`.

        Raises:
            RuntimeError: A peer has ended or left the group, or did not arrive in time.
        """
        slots = self.slots
        peer_slot = SLOT_WORDS * peer
        own_slot = SLOT_WORDS * self.rank
        began = perf_counter()
        spin_end = began + MAX_SPIN_S
        while self.should_spin and slots[peer_slot] < count and perf_counter() < spin_end:
            pass
        while True:
            slots[own_slot + SLEEPING_WORD] = 1
            futex_value = slots[peer_slot + FUTEX_WORD] & FUTEX_MASK
            if slots[peer_slot] >= count:
                break
            self._check_peers(count)
            remaining = began + self.timeout_seconds - perf_counter()
            if remaining <= 0:
                raise RuntimeError(
                    f"timed out: rank {peer} did not arrive in {self.timeout_seconds:g} s"
                )
            wait_while_equal(
                self.futexes[peer],
                futex_value,
                min(remaining, MAX_SLEEP_S),
            )
        slots[own_slot + SLEEPING_WORD] = 0
        self.should_spin = self.has_core_per_rank and perf_counter() < spin_end

    def _check_peers(self, count: int) -> None:
        """Raise RuntimeError if a peer has ended or left before this exchange."""
        for peer in self.peers:
            slot = SLOT_WORDS * peer
            has_left = (
                peer in self.process_watch.ended or self.slots[slot + LEFT_WORD] == self.group_id
            )
            if has_left and self.slots[slot] < count:
                raise RuntimeError(f"rank {peer} has gone")
