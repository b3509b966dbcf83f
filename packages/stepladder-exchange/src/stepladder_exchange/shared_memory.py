"""Collectives of the CPU ranks of one machine through memory that they share.

They take the place of torch.distributed's collectives. A collective that is started is queued until
one of them is waited for; then all queued collectives run in one exchange. In an exchange each rank
copies its data into its own slot, publishes the number of the exchange, and reads the slots of its
peers once they have published the same number. Data that do not fit into a slot go in chunks, with
one exchange for each.

What orders what. A rank writes data, then its exchange number; a peer reads the number, then the
data. x86-64 keeps stores in order, and loads (and memcpy fences its streaming stores), so no more
is needed. Other processors do not get here, see shared_segment.py. A slot has two halves that
are used in turn: a rank that has reached exchange n + 1 has read all of exchange n, so a rank that
sees n + 1 from every peer may overwrite the half of n. A rank sleeps on a futex word, which changes
after the number: futex(2) compares the word under the kernel's own lock, so a change between the
last look at the number and the sleep is not missed. Only a rank that has marked itself as sleeping
is woken. To read that mark after writing the futex word takes a fence, which x86-64 has in each
lock; if a fence were missing, a sleep would still end by itself after MAX_SLEEP_S.

A rank that waits spins for at most MAX_SPIN_S, if every rank can have a core of its own, and then
sleeps. While it spins it gives way to others that want its core, and after a spin in vain the next
waits sleep at once. When the process of another rank ends, a thread (process_watch.py) wakes
the ranks that wait for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from stepladder_exchange.plan import round_up_to_cache_line
from stepladder_exchange.reduction import SUM, Reduction
from stepladder_exchange.runner import ExchangeRunner
from stepladder_exchange.shared_segment import ARENA_BYTES, ARENA_OFFSET, HALF_BYTES
from stepladder_exchange.work import (
    NO_TENSOR,
    CombineFunction,
    InPlaceWork,
    MessageFormat,
    RowsWork,
    ScalarSumWork,
    SlicedReduceWork,
    Tensors,
    Work,
    combine_nothing,
    copy_all,
)


class SharedMemory(ExchangeRunner):
    """The collectives of one group of ranks, with names and arguments as in torch.distributed.

    A method only starts its collective. The result is there after `wait` of the returned `Work`.
    """

    def allocate_vector(self, length: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a vector of zeros in this rank's arena, the part of its slot for such vectors.

        `all_reduce` adds these vectors where they are, without a copy to the slot's halves. All
        ranks must call this method, in the same order.

        Returns:
            The vector, or None if it fits into one exchange anyway or the arena is full.
        """
        size = length * dtype.itemsize
        if size <= HALF_BYTES or self.arena_used_bytes + size > ARENA_BYTES:
            return None
        begin = self.arena_used_bytes
        self.arena_used_bytes += round_up_to_cache_line(size)
        vectors = self.planner.make_arena_views(begin, dtype, length)
        vector = vectors[self.rank].zero_()
        self.vectors[vector.data_ptr()] = ARENA_OFFSET + begin, vectors
        return vector

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction = SUM, **_: Any) -> Work:
        """Start adding `tensor` over the ranks, in place and in rank order.

        Args:
            tensor: This rank's addend, which is replaced by the sum.
            reduction: What to do instead of adding.

        Returns:
            The work that was started.
        """
        offset, vectors = self.vectors.get(tensor.data_ptr(), (0, []))
        if vectors and tensor.shape == vectors[0].shape and reduction is SUM:
            message_format = MessageFormat(
                "all_reduce", tensor.dtype, self.one_row_each, tensor.numel(), offset
            )
            work = InPlaceWork(self.exchange, message_format, vectors, self.rank)
            self.queue.append(work)
            return work
        flat = tensor if tensor.ndim == 1 else tensor.reshape(-1)
        is_copy = flat.data_ptr() != tensor.data_ptr()
        length = flat.numel()

        def add_rows(rows: Tensors, lo: int, hi: int) -> None:
            out = flat if hi - lo == length else flat[lo:hi]
            reduction.reduce(rows, out)
            if is_copy:
                tensor.copy_(flat.view(tensor.shape))

        message_format = MessageFormat(
            f"all_reduce {reduction.name}", flat.dtype, self.one_row_each, length
        )
        return self._enqueue(message_format, flat, add_rows)

    def all_reduce_slices(self, flat: torch.Tensor, reduction: Reduction) -> Work:
        """Start an all-reduce of a large flat tensor, of which each rank reduces one slice for all.

        No other collective may be in the queue.

        Returns:
            The work that was started.
        """
        slices = list(flat.tensor_split(self.ranks))
        work = SlicedReduceWork(
            self.exchange, reduction, slices, self.rank, self.planner.large_halves.size
        )
        self.queue.append(work)
        return work

    def broadcast(self, tensor: torch.Tensor, src: int, **_: Any) -> Work:
        """Start overwriting `tensor` with the tensor of rank `src`."""
        flat = tensor.view(-1)

        def copy_row(rows: Tensors, lo: int, hi: int) -> None:
            if self.rank != src:
                flat[lo:hi].copy_(rows[0])

        rows_per_rank = tuple(int(rank == src) for rank in range(self.ranks))
        message_format = MessageFormat(
            f"broadcast from rank {self.names[src]}", flat.dtype, rows_per_rank, len(flat)
        )
        return self._enqueue(message_format, flat, copy_row)

    def barrier(self) -> Work:
        """Start waiting until all ranks have come here."""
        message_format = MessageFormat("barrier", torch.uint8, self.one_row_each, 0)
        return self._enqueue(message_format, NO_TENSOR, combine_nothing)

    def all_gather(
        self, gathered: Sequence[torch.Tensor], part: torch.Tensor, block: str = "", **_: Any
    ) -> Work:
        """Start collecting every rank's flat `part` into `gathered`.

        Args:
            gathered: A flat tensor for each rank, as long as `part`.
            part: This rank's part.
            block: The model block that is gathered; must be the same on all ranks.

        Returns:
            The work that was started.
        """

        def copy_rows(rows: Tensors, lo: int, hi: int) -> None:
            copy_all(rows, [target[lo:hi] for target in gathered])

        message_format = MessageFormat("all_gather", part.dtype, self.one_row_each, len(part))
        return self._enqueue(message_format, part, copy_rows, zlib.crc32(block.encode()))

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, *_: Any, **_options: Any
    ) -> Work:
        """Start sending each rank its part of the flat tensor `sent`, in parts of equal length."""
        ranks = self.ranks
        targets = received.view(ranks, -1)

        def copy_rows(rows: Tensors, lo: int, hi: int) -> None:
            copy_all(rows[self.rank :: ranks], targets[:, lo:hi])

        message_format = MessageFormat("all_to_all", sent.dtype, (ranks,) * ranks, targets.shape[1])
        return self._enqueue(message_format, sent, copy_rows)

    def reduce_scatter(
        self,
        result: torch.Tensor,
        slices: Sequence[torch.Tensor],
        reduction: Reduction = SUM,
        block: str = "",
        **_: Any,
    ) -> Work:
        """Start reducing slices over the ranks, of which each gets one; all compute at once.

        Args:
            result: A flat tensor, which gets the result; it may be this rank's slice.
            slices: A flat tensor for each rank, also of several lengths.
            reduction: What to do with the numbers of the ranks.
            block: The model block that is reduced; must be the same on all ranks.

        Returns:
            The work that was started.
        """
        ranks = self.ranks

        def reduce_rows(rows: Tensors, lo: int, hi: int) -> None:
            end = min(hi, len(result))
            if lo < end:
                columns = [row[: end - lo] for row in rows[self.rank :: ranks]]
                reduction.reduce(columns, result[lo:end])

        message_format = MessageFormat(
            f"reduce_scatter {reduction.name}",
            result.dtype,
            (ranks,) * ranks,
            max(map(len, slices)),
        )
        return self.combine_rows(slices, message_format, reduce_rows, block)

    def combine(
        self,
        rows: torch.Tensor,
        rows_per_rank: tuple[int, ...],
        length: int,
        combine: CombineFunction,
        kind: str = "combine",
        **_: Any,
    ) -> Work:
        """Start combining the rows of all ranks by a function.

        Args:
            rows: This rank's rows, as one flat tensor.
            rows_per_rank: The number of rows of each rank.
            length: The length of a row.
            combine: Called with the rows of all ranks, for a range of columns at a time.
            kind: The name of the collective.

        Returns:
            The work that was started.
        """
        message_format = MessageFormat(kind, rows.dtype, rows_per_rank, length)
        return self._enqueue(message_format, rows, combine)

    def combine_rows(
        self,
        rows: Sequence[torch.Tensor],
        message_format: MessageFormat,
        combine: CombineFunction,
        block: str = "",
    ) -> Work:
        """Start combining the rows of all ranks by a function; the rows need not be contiguous.

        Args:
            rows: This rank's rows, as flat tensors. Some may be shorter than the format says.
            message_format: The format, in which the type is that of the rows.
            combine: As for `combine`.
            block: As for `all_gather`.

        Returns:
            The work that was started.
        """
        tag = zlib.crc32(block.encode())
        work = RowsWork(self.exchange, message_format, rows, combine, tag)
        self.queue.append(work)
        return work

    def start_sum(self, values: list[float]) -> ScalarSumWork:
        """Start adding a few float64 numbers over the ranks; they must fit into one slot."""
        work = ScalarSumWork(self.exchange, values, self.memory, self.rank, self.one_row_each)
        self.queue.append(work)
        return work

    def _enqueue(
        self,
        message_format: MessageFormat,
        tensor: torch.Tensor,
        combine: CombineFunction,
        tag: int = 0,
    ) -> Work:
        work = Work(self.exchange, message_format, tensor, combine, tag)
        self.queue.append(work)
        return work
