"""The collectives after which ranks have different results: one rank has it, or each has a part."""

from __future__ import annotations

from typing import Any

import torch

from stepladder.exchange.group_base import C10D, GroupBase, Tensors
from stepladder.exchange.reduction import Reduction
from stepladder.exchange.routing import FlatTensors, get_flat, have_length
from stepladder.exchange.shared_memory import SharedMemory
from stepladder.exchange.work import copy_all

# What torch takes when a collective is called without options.
REDUCE = C10D.ReduceOptions()
GATHER = C10D.GatherOptions()
SCATTER = C10D.ScatterOptions()
REDUCE_SCATTER = C10D.ReduceScatterOptions()


class ScatteringGroup(GroupBase):
    """A group with the collectives whose result is on one rank, or in parts on all."""

    def reduce(
        self,
        tensors: Tensors,
        opts: Any = REDUCE,
    ) -> Any:
        """Reduce a tensor over the ranks, with the result on one rank."""
        reduction = self._find_reduction(tensors, opts)
        if reduction is None:
            return self._carry("reduce", tensors[0].device, tensors, opts)
        kind = reduction
        flats = FlatTensors()
        [target] = [flats.add(tensor) for tensor in tensors]
        is_root = self.rank() == opts.rootRank

        def reduce_rows(rows: Tensors, lo: int, hi: int) -> None:
            if is_root:
                kind.reduce(rows, target[lo:hi])

        def enqueue(memory: SharedMemory) -> None:
            name = f"reduce to {opts.rootRank}: {kind.name}"
            memory.combine(target, memory.one_row_each, len(target), reduce_rows, name)

        return self._start(
            "reduce",
            enqueue,
            tensors,
            tensors,
            opts,
            flats.write_back,
        )

    def gather(
        self,
        output_tensors: list[Tensors],
        input_tensors: Tensors,
        opts: Any = GATHER,
    ) -> Any:
        """Collect a tensor of each rank on one rank."""
        [part] = input_tensors
        outputs = [output for tensors in output_tensors for output in tensors]
        is_shared = self._can_share([part, *outputs]) and have_length(outputs, part.numel())
        if not is_shared:
            return self._carry("gather", part.device, output_tensors, input_tensors, opts)
        flats = FlatTensors()
        targets = [flats.add(output) for output in outputs]
        source = get_flat(part)

        def copy_rows(rows: Tensors, lo: int, hi: int) -> None:
            if targets:
                copy_all(rows, [target[lo:hi] for target in targets])

        def enqueue(memory: SharedMemory) -> None:
            name = f"gather on {opts.rootRank}"
            memory.combine(source, memory.one_row_each, len(source), copy_rows, name)

        return self._start(
            "gather",
            enqueue,
            input_tensors,
            outputs,
            opts,
            flats.write_back,
        )

    def scatter(
        self,
        output_tensors: Tensors,
        input_tensors: list[Tensors],
        opts: Any = SCATTER,
    ) -> Any:
        """Send each rank its tensor of a list that one rank has."""
        [output] = output_tensors
        parts = [part for tensors in input_tensors for part in tensors]
        is_shared = self._can_share([output, *parts]) and have_length(parts, output.numel())
        if not is_shared:
            return self._carry("scatter", output.device, output_tensors, input_tensors, opts)
        flats = FlatTensors()
        target = flats.add(output)
        source = target[:0]
        if parts:
            source = torch.cat([get_flat(part) for part in parts])
        rank = self.rank()
        rows_per_rank = [0] * self.size()
        rows_per_rank[opts.rootRank] = self.size()

        def copy_row(rows: Tensors, lo: int, hi: int) -> None:
            target[lo:hi].copy_(rows[rank])

        def enqueue(memory: SharedMemory) -> None:
            memory.combine(source, tuple(rows_per_rank), len(target), copy_row, "scatter")

        return self._start(
            "scatter",
            enqueue,
            parts,
            output_tensors,
            opts,
            flats.write_back,
        )

    def reduce_scatter(
        self,
        output_tensors: Tensors,
        input_tensors: list[Tensors],
        opts: Any = REDUCE_SCATTER,
    ) -> Any:
        """Reduce each tensor of a list over the ranks, with one of the results on each rank."""
        [output] = output_tensors
        [parts] = input_tensors
        reduction = self._find_reduction([output, *parts], opts)
        if reduction is None or parts[self.rank()].numel() != output.numel():
            device = output.device
            return self._carry("reduce_scatter", device, output_tensors, input_tensors, opts)
        source = torch.cat([get_flat(part) for part in parts])
        first = sum(part.numel() for part in parts[: self.rank()])
        return self._reduce_scatter([output], [source], first, reduction, opts)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        opts: Any = REDUCE_SCATTER,
    ) -> Any:
        """Reduce a tensor over the ranks, with one slice of the result on each rank."""
        length = output.numel() * self.size()
        reduction = self._find_reduction([output, whole], opts)
        if reduction is None or whole.numel() != length:
            return self._carry("_reduce_scatter_base", output.device, output, whole, opts)
        return self._reduce_scatter([output], [get_flat(whole)], None, reduction, opts)

    _reduce_scatter_base = reduce_scatter_single  # its name before torch 2.13

    def reduce_scatter_single_coalesced(
        self,
        outputs: Tensors,
        wholes: Tensors,
        opts: Any = REDUCE_SCATTER,
    ) -> Any:
        """Reduce several tensors over the ranks, with a slice of each result on each rank."""
        reduction = self._find_reduction([*outputs, *wholes], opts)
        if reduction is None:
            return super().reduce_scatter_single_coalesced(outputs, wholes, opts)
        return self._reduce_scatter(
            outputs, [get_flat(whole) for whole in wholes], None, reduction, opts
        )

    def _reduce_scatter(
        self,
        outputs: Tensors,
        sources: Tensors,
        first: int | None,
        reduction: Reduction,
        opts: Any,
    ) -> Any:
        """Reduce flat tensors, of which this rank gets the elements from `first` on.

        Args:
            outputs: Where the slices of the results go.
            sources: What is reduced.
            first: The first element; None for slices of one length on all ranks.
            reduction: The reduction.
            opts: torch's options.

        Returns:
            The work.
        """
        flats = FlatTensors()
        targets = [flats.add(output) for output in outputs]

        def enqueue(memory: SharedMemory) -> None:
            for target, source in zip(targets, sources, strict=True):
                if first is None:
                    reduce_slices(memory, target, source, reduction)
                else:
                    memory.reduce_scatter(target, source, reduction=reduction, first=first)

        return self._start(
            "_reduce_scatter_base",
            enqueue,
            sources,
            outputs,
            opts,
            flats.write_back,
        )


def reduce_slices(
    memory: SharedMemory,
    target: torch.Tensor,
    source: torch.Tensor,
    reduction: Reduction,
) -> None:
    """Enqueue a reduction of which each rank gets a slice; all ranks compute at the same time.

    Args:
        memory: The memory of the group.
        target: Where this rank's slice of the result goes; it may be that slice of the source.
        source: What is reduced: a slice for each rank, all of one length.
        reduction: The reduction.
    """
    ranks = memory.ranks

    def reduce_rows(rows: Tensors, lo: int, hi: int) -> None:
        reduction.reduce(rows[memory.rank :: ranks], target[lo:hi])

    kind = f"reduce_scatter {reduction.name}"
    memory.combine(source, (ranks,) * ranks, len(target), reduce_rows, kind)
