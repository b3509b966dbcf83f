"""All-to-all: each rank has a part for every rank, and the parts may have any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from stepladder.exchange.group_base import C10D, Tensors
from stepladder.exchange.routing import FlatTensors, get_flat
from stepladder.exchange.scattering import ScatteringGroup
from stepladder.exchange.shared_memory import SharedMemory
from stepladder.exchange.work import NO_TENSOR, MessageFormat

ALL_TO_ALL = C10D.AllToAllOptions()  # what torch takes when it is called without options


class TransposingGroup(ScatteringGroup):
    """A group with all-to-all. The first of its two stages tells all ranks the lengths."""

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = ALL_TO_ALL,
    ) -> Any:
        """Send each rank its slice of a tensor."""
        sent = count_elements(tensor, input_splits, self.size())
        received = count_elements(output, output_splits, self.size())
        if not self._can_share([output, tensor]) or sent is None or received is None:
            splits = output_splits, input_splits
            return self._carry("alltoall_base", tensor.device, output, tensor, *splits, opts)
        flats = FlatTensors()
        targets = list(flats.add(output).split(received))
        parts = list(get_flat(tensor).split(sent))
        send = SendLengths(self.rank(), parts, targets)
        return self._start("all_to_all", send, [tensor], [output], opts, flats.write_back)

    alltoall_base = all_to_all_single  # its name before torch 2.13

    def alltoall(self, outputs: Tensors, parts: Tensors, opts: Any = ALL_TO_ALL) -> Any:
        """Send each rank its tensor of a list."""
        if not self._can_share([*outputs, *parts]):
            return self._carry("alltoall", parts[0].device, outputs, parts, opts)
        flats = FlatTensors()
        targets = [flats.add(output) for output in outputs]
        send = SendLengths(self.rank(), [get_flat(part) for part in parts], targets)
        return self._start("all_to_all", send, parts, outputs, opts, flats.write_back)


def count_elements(tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[int] | None:
    """Return how many elements of a tensor are each rank's; None if the splits do not fit."""
    rows = tensor.size(0) if tensor.ndim else 0
    if splits:
        if sum(splits) != rows or len(splits) != ranks:
            return None
        row_length = tensor.numel() // max(rows, 1)
        return [split * row_length for split in splits]
    if rows % ranks or not tensor.ndim:
        return None
    return [tensor.numel() // ranks] * ranks


class SendLengths:
    """The first stage of an all-to-all: all ranks learn how much each sends and expects."""

    def __init__(self, rank: int, parts: Tensors, targets: Tensors) -> None:
        """Create the stage.

        Args:
            rank: This rank.
            parts: The part for each rank.
            targets: Where the part of each rank goes.
        """
        self.rank = rank
        self.parts = parts
        self.targets = targets
        self._own_lengths = torch.tensor([len(part) for part in (*parts, *targets)])
        self._lengths = NO_TENSOR  # then a row for each rank

    def __call__(self, memory: SharedMemory) -> Any:
        """Enqueue the stage; return the one that sends the parts."""
        memory.combine(
            self._own_lengths,
            memory.one_row_each,
            len(self._own_lengths),
            self._store_lengths,
            f"all_to_all of {str(self.parts[0].dtype).removeprefix('torch.')}",
        )
        return partial(self._send_parts, memory)

    def _store_lengths(self, rows: Tensors, *_: object) -> None:
        self._lengths = torch.stack(rows)

    def _send_parts(self, memory: SharedMemory) -> None:
        ranks = memory.ranks
        sent = self._lengths[:, :ranks]
        expected = self._lengths[:, ranks:].t()
        if not torch.equal(sent, expected):
            source, target = (sent != expected).nonzero()[0].tolist()
            raise RuntimeError(
                f"rank {memory.names[source]} sends {sent[source, target]} numbers to rank"
                f" {memory.names[target]}, which expects {expected[source, target]}"
            )
        parts = list(self.parts)
        self.targets[self.rank].copy_(parts.pop(self.rank))  # copied directly
        sent.fill_diagonal_(0)
        message_format = MessageFormat(
            "all_to_all", parts[0].dtype, (ranks - 1,) * ranks, int(sent.max())
        )
        memory.combine_rows(parts, message_format, self._copy_rows)

    def _copy_rows(self, rows: Tensors, lo: int, hi: int) -> None:
        peers = len(self.parts) - 1
        for peer, target in enumerate(self.targets):
            end = min(hi, len(target))
            if peer != self.rank and lo < end:
                # A rank has no row for itself.
                row = rows[peer * peers + self.rank - (self.rank > peer)]
                target[lo:end].copy_(row[: end - lo])
