"""The collectives after which ranks have different results: one rank has it, or each has a part."""

from __future__ import annotations

from typing import Any

import torch

from stepladder.exchange.across_nodes import AllReduceAcross
from stepladder.exchange.carrying import CarryingGroup
from stepladder.exchange.group_base import C10D, Tensors
from stepladder.exchange.network import NodeNetwork
from stepladder.exchange.reduction import Reduction
from stepladder.exchange.routing import FlatTensors, get_flat, have_length, split_evenly
from stepladder.exchange.shared_memory import SharedMemory
from stepladder.exchange.work import MessageFormat, copy_all

# What torch takes when a collective is called without options.
REDUCE = C10D.ReduceOptions()
GATHER = C10D.GatherOptions()
SCATTER = C10D.ScatterOptions()
REDUCE_SCATTER = C10D.ReduceScatterOptions()


class ScatteringGroup(CarryingGroup):
    """A group with the collectives whose result is on one rank, or in parts on all."""

    def reduce(self, tensors: Tensors, opts: Any = REDUCE) -> Any:
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
            name = f"reduce {kind.name} to rank {memory.names[opts.rootRank]}"
            memory.combine(target, memory.one_row_each, len(target), reduce_rows, name)

        return self._start("reduce", enqueue, tensors, tensors, opts, flats.write_back)

    def gather(
        self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = GATHER
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
            name = f"gather on rank {memory.names[opts.rootRank]}"
            memory.combine(source, memory.one_row_each, len(source), copy_rows, name)

        return self._start("gather", enqueue, input_tensors, outputs, opts, flats.write_back)

    def scatter(
        self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any = SCATTER
    ) -> Any:
        """Send each rank its tensor of a list that one rank has."""
        [output] = output_tensors
        parts = [part for tensors in input_tensors for part in tensors]
        is_shared = self._can_share([output, *parts]) and have_length(parts, output.numel())
        if not is_shared:
            return self._carry("scatter", output.device, output_tensors, input_tensors, opts)
        flats = FlatTensors()
        target = flats.add(output)
        sources = [get_flat(part) for part in parts]
        rank = self.rank()
        rows_per_rank = [0] * self.size()
        rows_per_rank[opts.rootRank] = self.size()

        def copy_row(rows: Tensors, lo: int, hi: int) -> None:
            target[lo:hi].copy_(rows[rank])

        def enqueue(memory: SharedMemory) -> None:
            message_format = MessageFormat(
                f"scatter from rank {memory.names[opts.rootRank]}",
                target.dtype,
                tuple(rows_per_rank),
                len(target),
            )
            memory.combine_rows(sources, message_format, copy_row)

        return self._start("scatter", enqueue, parts, output_tensors, opts, flats.write_back)

    def reduce_scatter(
        self, output_tensors: Tensors, input_tensors: list[Tensors], opts: Any = REDUCE_SCATTER
    ) -> Any:
        """Reduce each tensor of a list over the ranks, with one of the results on each rank."""
        [output] = output_tensors
        [parts] = input_tensors
        reduction = self._find_reduction([output, *parts], opts, across_nodes=True)
        if reduction is None or parts[self.rank()].numel() != output.numel():
            device = output.device
            return self._carry("reduce_scatter", device, output_tensors, input_tensors, opts)
        return self._reduce_scatter([output], [[get_flat(part) for part in parts]], reduction, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = REDUCE_SCATTER
    ) -> Any:
        """Reduce a tensor over the ranks, with one slice of the result on each rank."""
        fits = tensor.numel() == output.numel() * self.size() and tensor.dtype == output.dtype
        reduction = self._find_reduction([output, tensor], opts, across_nodes=True)
        if reduction is None or not fits:
            return self._carry("_reduce_scatter_base", output.device, output, tensor, opts)
        slices = split_evenly(get_flat(tensor), self.size())
        return self._reduce_scatter([output], [slices], reduction, opts)

    _reduce_scatter_base = reduce_scatter_single  # its name before torch 2.13

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: Any = REDUCE_SCATTER
    ) -> Any:
        """Reduce several tensors over the ranks, with a slice of each result on each rank."""
        reduction = self._find_reduction([*outputs, *tensors], opts, across_nodes=True)
        if reduction is None:
            return self._torch_group.reduce_scatter_single_coalesced(outputs, tensors, opts)
        sources = [split_evenly(get_flat(tensor), self.size()) for tensor in tensors]
        return self._reduce_scatter(outputs, sources, reduction, opts)

    def _reduce_scatter(
        self, outputs: Tensors, sources: list[Tensors], reduction: Reduction, opts: Any
    ) -> Any:
        """Reduce flat tensors, of each of which this rank gets one slice.

        Args:
            outputs: Where the slices of the results go.
            sources: What is reduced: the slices of all ranks.
            reduction: The reduction.
            opts: torch's options.

        Returns:
            The work.
        """
        flats = FlatTensors()
        targets = [flats.add(output) for output in outputs]
        rows = [row for slices in sources for row in slices]

        def enqueue(memory: SharedMemory) -> None:
            for target, slices in zip(targets, sources, strict=True):
                reduce_slices(memory, target, slices, reduction)

        if self._network is None:
            return self._start(
                "_reduce_scatter_base", enqueue, rows, outputs, opts, flats.write_back
            )
        totals = [torch.cat(slices) for slices in sources]

        def take_slices() -> None:
            for target, slices, total in zip(targets, sources, totals, strict=True):
                target.copy_(total.split(list(map(len, slices)))[self.rank()])
            flats.write_back()

        return self._start(
            "_reduce_scatter_base",
            self._reduce_across(self._network, totals, reduction, opts),
            rows,
            outputs,
            opts,
            take_slices,
        )

    def _reduce_across(
        self, network: NodeNetwork, flats: Tensors, reduction: Reduction, opts: Any
    ) -> AllReduceAcross:
        """Return the first stage that reduces flat tensors over several machines, in place."""
        operation = C10D.ReduceOp.SUM if reduction.is_mean else opts.reduceOp
        return AllReduceAcross(network, self._get_timeout(opts), flats, reduction, operation)


def reduce_slices(
    memory: SharedMemory, target: torch.Tensor, slices: Tensors, reduction: Reduction
) -> None:
    """Enqueue a reduction of which each rank gets a slice; all ranks compute at the same time.

    Args:
        memory: The memory of the group.
        target: Where this rank's slice of the result goes; it may be that slice of the source.
        slices: What is reduced: a slice for each rank, also of several lengths.
        reduction: The reduction.
    """
    ranks = memory.ranks

    def reduce_rows(rows: Tensors, lo: int, hi: int) -> None:
        end = min(hi, len(target))
        if lo < end:
            columns = [row[: end - lo] for row in rows[memory.rank :: ranks]]
            reduction.reduce(columns, target[lo:end])

    message_format = MessageFormat(
        f"reduce_scatter {reduction.name}", target.dtype, (ranks,) * ranks, max(map(len, slices))
    )
    memory.combine_rows(slices, message_format, reduce_rows)
