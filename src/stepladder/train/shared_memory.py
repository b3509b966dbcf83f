"""Collectives of the CPU ranks of one machine through memory that they share, in place of
torch.distributed's.

A collective that is begun is put off until one is waited for; then all of them go in one meeting.
There each rank copies what it brings into its own place, says how many meetings it has come to, and
reads the places of the others once they have said as much. What does not fit into a place goes in
pieces, one meeting each.

What orders what. A rank writes data, then its number; another one reads the number, then the data.
x86-64 keeps stores in order, and loads (and memcpy fences its streaming stores): no more is needed.
Other processors do not get here, see rank/shared_segment.py. A place has two halves, used in turn: to come
to meeting n + 1 is to have read all of meeting n, so whoever sees everybody's n + 1 may write over
the half of n. A rank's number never falls, also from one group to the next. Who sleeps does it on a
bell, a word that changes after the number: futex(2) compares it under the kernel's own lock, so a
bell that rings between the look at the number and the sleep is not missed. Only who says so before
is woken. To read that after the own bell is written takes a fence, which x86-64 has in each lock;
should one be none, a sleep ends by itself after SECONDS_TO_SLEEP.

To wait is to spin for SECONDS_TO_SPIN at most, where each rank can have a core and the last wait
was as short, and then to sleep. When another rank's process ends, a thread (rank/process_watch.py) wakes who
waits for it."""

from __future__ import annotations

import mmap
import threading
import time
import zlib
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from stepladder.core.process_count import count_cores
from stepladder.rank.futex import wait_while_equal, wake_all
from stepladder.rank.process_watch import ProcessWatch
from stepladder.rank.shared_segment import (
    ARENA_BYTES,
    ARENA_OFFSET,
    HALF_BYTES,
    SLOT_BYTES,
    WORDS_PER_SLOT,
)
from stepladder.train.shared_memory_work import (
    CACHE_LINE_BYTES,
    Chunk,
    CombineFunction,
    InPlaceWork,
    MessageFormat,
    ScalarSumWork,
    Tensors,
    Work,
    copy_all,
)

SECONDS_TO_SPIN = (
    0.001  # to sleep and be woken costs both ranks more than 150 us on a virtual machine
)
SECONDS_TO_SLEEP = 0.1
NUMBER, BELL, LEFT, SLEEPS, DIGEST = range(5)  # words of a place; DIGEST: of both halves
SLOT_WORDS = SLOT_BYTES // 8
MOST_PLANS = 64
MASK = 2**32 - 1  # a bell is the low half of its word


class SharedMemory:
    """The collectives of one group, by torch.distributed's names; all are begun only. `join` comes
    first.

    memory: rank/shared_segment.py's, in which one group comes after another.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory, self.words = memory, memoryview(memory).cast("q")
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.begun: list[Work] = []
        self.fence = threading.Lock()
        self.ends: ProcessWatch | None = None  # of the others' processes

    @property
    def last_exchange(self) -> int:
        """Of the last meeting that anybody has come to, in any group."""
        return max(self.words[NUMBER::SLOT_WORDS])

    def join_group(self, rank: int, pids: list[int], number: int, timeout_seconds: float) -> None:
        """A new group, once the one before was left. pids: of its ranks.  number: before its first
        meeting, larger than any rank's `number`.

        Raises RuntimeError where one has ended already.
        """
        self.leave_group()
        self.rank, self.first, self.count = rank, number, number
        self.timeout_seconds = timeout_seconds
        self.spins = self.have_cores = len(pids) <= count_cores()
        self.others = [other for other in range(len(pids)) if other != rank]
        self.sleeps = [SLOT_WORDS * other + SLEEPS for other in self.others]
        self.one_each = (1,) * len(pids)
        self.bells = [
            self.bytes.data_ptr() + 8 * (SLOT_WORDS * place + BELL) for place in range(len(pids))
        ]
        self.plans: dict[tuple[MessageFormat, ...], list[tuple[int, list[Chunk]]]] = {}
        self.vectors: dict[
            int, tuple[int, Tensors]
        ] = {}  # by address: where they begin, of all ranks
        self.arena_used_bytes = 0  # bytes of the place's room
        self.begun.clear()
        try:
            self.ends = ProcessWatch({other: pids[other] for other in self.others}, self._ring)
        except OSError as error:
            raise RuntimeError("a rank has ended while the group formed") from error

    def leave_group(self) -> None:
        """The group: nobody need wait for this rank any more."""
        if self.ends is not None:
            self.words[SLOT_WORDS * self.rank + LEFT] = self.first
            self._ring()
            self.ends.stop()
            self.ends = None

    def _ring(self) -> None:
        """All bells: whoever sleeps is to look again."""
        for place, bell in enumerate(self.bells):
            self.words[SLOT_WORDS * place + BELL] = time.monotonic_ns() & MASK
            wake_all(bell)

    def allocate_vector(self, length: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Zeros that are reduced where they are. None for what goes in one piece as well, or has no
        room.

        All ranks call it, in the same order.
        """
        size = length * dtype.itemsize
        if size <= HALF_BYTES or self.arena_used_bytes + size > ARENA_BYTES:
            return None
        begin = ARENA_OFFSET + self.arena_used_bytes
        self.arena_used_bytes += -(-size // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        starts = [SLOT_BYTES * place + begin for place in range(len(self.bells))]
        parts = self._views(starts, dtype, [length] * len(starts))
        mine = parts[self.rank].zero_()
        self.vectors[mine.data_ptr()] = begin, parts
        return mine

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, **_: Any) -> Work:
        """In place; added in the order of the ranks."""
        begin, vectors = self.vectors.get(tensor.data_ptr(), (0, []))
        if vectors and tensor.shape == vectors[0].shape:
            shape = MessageFormat("all_reduce", tensor.dtype, self.one_each, tensor.numel(), begin)
            work = InPlaceWork(self.meet, shape, vectors, self.rank)
            self.begun.append(work)
            return work
        flat = tensor if tensor.ndim == 1 else tensor.reshape(-1)
        is_copy, length = flat.data_ptr() != tensor.data_ptr(), flat.numel()

        def add(parts: Tensors, lo: int, hi: int) -> None:
            out = flat if hi - lo == length else flat[lo:hi]
            torch.add(parts[0], parts[1], out=out)
            for part in parts[2:]:
                out.add_(part)
            if is_copy:
                tensor.copy_(flat.view(tensor.shape))

        return self._begin(
            MessageFormat("all_reduce", flat.dtype, self.one_each, length), flat, add
        )

    def broadcast(self, tensor: torch.Tensor, src: int, **_: Any) -> Work:
        flat = tensor.view(-1)

        def take(parts: Tensors, lo: int, hi: int) -> None:
            if self.rank != src:
                flat[lo:hi].copy_(parts[0])

        rows = tuple(int(place == src) for place in range(len(self.bells)))
        return self._begin(MessageFormat("broadcast", flat.dtype, rows, len(flat)), flat, take)

    def all_gather(
        self, gathered: Sequence[torch.Tensor], mine: torch.Tensor, block: str = "", **_: Any
    ) -> Work:
        """gathered: a flat tensor for each rank, as long as `mine`.  block: of the model, as on all
        ranks.
        """
        shape = MessageFormat("all_gather", mine.dtype, self.one_each, len(mine))
        take = lambda parts, lo, hi: copy_all(parts, [row[lo:hi] for row in gathered])  # noqa: E731
        return self._begin(shape, mine, take, zlib.crc32(block.encode()))

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, *_: Any, **_named: Any
    ) -> Work:
        """Of equal parts. Both are flat: this rank's part of each rank's `sent`, in the order of
        the ranks.
        """
        ranks = len(self.bells)
        rows = received.view(ranks, -1)
        shape = MessageFormat("all_to_all", sent.dtype, (ranks,) * ranks, rows.shape[1])
        return self._begin(
            shape, sent, lambda parts, lo, hi: copy_all(parts[self.rank :: ranks], rows[:, lo:hi])
        )

    def reduce_scatter(
        self, mine: torch.Tensor, whole: torch.Tensor, block: str = "", **_: Any
    ) -> Work:
        """mine: flat, gets this rank's slice of the sum.  whole: all ranks' slices, one after the
        other.

        block: of the model, the same on all ranks.
        """
        size = len(mine)
        first = size * self.rank

        def add(parts: Tensors, lo: int, hi: int) -> None:
            begin, end = max(lo, first), min(hi, first + size)
            if begin < end:
                out = mine[begin - first : end - first]
                slices = [part[begin - lo : end - lo] for part in parts]
                torch.add(slices[0], slices[1], out=out)
                for part in slices[2:]:
                    out.add_(part)

        shape = MessageFormat("reduce_scatter", whole.dtype, self.one_each, len(whole))
        return self._begin(shape, whole, add, zlib.crc32(block.encode()))

    def combine(
        self,
        mine: torch.Tensor,
        rows: tuple[int, ...],
        length: int,
        fold: CombineFunction,
        **_: Any,
    ) -> Work:
        """Rows that `fold` is to make one of. rows: how many each rank brings.  mine: flat, this
        rank's.
        """
        return self._begin(MessageFormat("combine", mine.dtype, rows, length), mine, fold)

    def start_sum(self, values: list[float]) -> ScalarSumWork:
        """Numbers that fit into a place."""
        work = ScalarSumWork(self.meet, values, self.memory, self.rank, self.one_each)
        self.begun.append(work)
        return work

    def _begin(
        self, shape: MessageFormat, mine: torch.Tensor, fold: CombineFunction, of: int = 0
    ) -> Work:
        work = Work(self.meet, shape, mine, fold, of)
        self.begun.append(work)
        return work

    # -- meetings ----------------------------------------------------------------------------------

    def meet(self) -> None:
        """Make all collectives that were begun."""
        begun, self.begun = self.begun, []
        of = 0
        for work in begun:
            work.is_finished = True
            of ^= work.of
        key = tuple([work.shape for work in begun])
        plan = self.plans.get(key)
        if plan is None:
            if len(self.plans) == MOST_PLANS:
                self.plans.clear()
            plan = self.plans[key] = self._plan(key)
        for digest, pieces in plan:
            self._meet(digest ^ of, pieces, begun)
        for work in begun:
            work.is_met = True

    def _meet(self, digest: int, pieces: list[Chunk], begun: list[Work]) -> None:
        words, own = self.words, SLOT_WORDS * self.rank
        self.count = count = self.count + 1
        half = count & 1
        for piece in pieces:
            begun[piece.message].bring(piece, half)
        words[own + DIGEST + half] = digest
        words[own + NUMBER] = count
        words[own + BELL] = count & MASK
        self.fence.acquire()
        self.fence.release()
        for sleeps in self.sleeps:
            if words[sleeps]:
                wake_all(self.bells[self.rank])
                break
        for other in self.others:
            place = SLOT_WORDS * other
            if words[place] < count:
                self._await(other, count)
            if words[place + DIGEST + half] != digest:
                raise RuntimeError(
                    f"rank {other} brings something else to this collective than rank {self.rank}"
                )
        for piece in pieces:
            begun[piece.message].take(piece, half)

    def _await(self, other: int, count: int) -> None:
        words, place, own, began = (
            self.words,
            SLOT_WORDS * other,
            SLOT_WORDS * self.rank,
            perf_counter(),
        )
        end = began + SECONDS_TO_SPIN
        while self.spins and words[place] < count and perf_counter() < end:
            pass
        while True:
            words[own + SLEEPS] = 1
            bell = words[place + BELL] & MASK
            if words[place] >= count:
                break
            self._refuse_lost(count)
            if (left := began + self.timeout_seconds - perf_counter()) <= 0:
                raise RuntimeError(
                    f"timed out: rank {other} has not come in {self.timeout_seconds:g} s"
                )
            wait_while_equal(self.bells[other], bell, min(left, SECONDS_TO_SLEEP))
        words[own + SLEEPS] = 0
        self.spins = self.have_cores and perf_counter() < end

    def _refuse_lost(self, count: int) -> None:
        """Raises RuntimeError where a rank will not come to this meeting."""
        assert self.ends is not None
        for other in self.others:
            place = SLOT_WORDS * other
            gone = other in self.ends.ended or self.words[place + LEFT] == self.first
            if gone and self.words[place] < count:
                raise RuntimeError(f"rank {other} has gone")

    def _plan(self, shapes: tuple[MessageFormat, ...]) -> list[tuple[int, list[Chunk]]]:
        """The meetings that such messages take: a digest of what is brought, and its pieces."""
        meetings: list[list[Chunk]] = [[]]
        begin = 0  # bytes
        in_place = [number for number, shape in enumerate(shapes) if shape.at]
        meetings[0] += [Chunk(number, 0, 0, True, 0, (), (), ()) for number in in_place]
        for number, (_, dtype, rows, length, _) in enumerate(shapes):
            if number in in_place:
                continue
            column, lo = max(rows) * dtype.itemsize, 0
            while lo < length:
                width = min(length - lo, (HALF_BYTES - begin) // column)
                if width < length - lo and begin:
                    meetings.append([])
                    begin = 0
                    continue
                starts = tuple(self._starts(half, begin) for half in range(2))
                flat = [self._views(places, dtype, [n * width for n in rows]) for places in starts]
                mine = tuple(views[self.rank] for views in flat)
                parts = tuple(
                    [row for view in views if len(view) for row in view.split(width)]
                    for views in flat
                )
                is_whole = width == length
                meetings[-1].append(
                    Chunk(number, lo, lo + width, is_whole, rows[self.rank], mine, parts, starts)
                )
                lo, begin = (
                    lo + width,
                    begin + -(-width * column // CACHE_LINE_BYTES) * CACHE_LINE_BYTES,
                )
        if in_place and len(meetings) == 1:
            meetings.append([])
        digest = zlib.crc32(repr(shapes).encode())
        return [(digest, pieces) for pieces in meetings]

    def _starts(self, half: int, begin: int) -> list[int]:
        first = 8 * WORDS_PER_SLOT + HALF_BYTES * half + begin
        return [SLOT_BYTES * place + first for place in range(len(self.bells))]

    def _views(self, starts: list[int], dtype: torch.dtype, lengths: list[int]) -> Tensors:
        return [
            self.bytes[start : start + length * dtype.itemsize].view(dtype)
            for start, length in zip(starts, lengths, strict=True)
        ]
