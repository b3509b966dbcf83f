"""The collectives of a process group of torch.distributed that shares memory.

Its gloo group carries what shared memory does not: tensors on other devices, sparse tensors, and
every collective that is not defined here. The caller sees one group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from stepladder.exchange.across_nodes import AllGatherAcross, BarrierAcross, BroadcastAcross
from stepladder.exchange.group_base import C10D, Tensors
from stepladder.exchange.group_work import Stage
from stepladder.exchange.reduction import Reduction
from stepladder.exchange.routing import FlatTensors, get_flat, have_length, split_evenly
from stepladder.exchange.shared_memory import SharedMemory
from stepladder.exchange.transposing import TransposingGroup
from stepladder.rank.shared_segment import HALF_BYTES

# What torch takes when a collective is called without options.
ALL_REDUCE = C10D.AllreduceOptions()
ALL_REDUCE_COALESCED = C10D.AllreduceCoalescedOptions()
BROADCAST = C10D.BroadcastOptions()
ALL_GATHER = C10D.AllgatherOptions()
BARRIER = C10D.BarrierOptions()
Enqueue = Callable[[SharedMemory], Stage | None]


class ReduceToAll:
    """The first stage of an all-reduce; then each large tensor has a stage of its own.

    Each rank reduces a slice of a large tensor for all. It reduces the others for itself.
    """

    def __init__(self, flats: Tensors, reduction: Reduction) -> None:
        self._flats = flats
        self._reduction = reduction
        self._large: list[torch.Tensor] = []

    def __call__(self, memory: SharedMemory) -> Stage | None:
        """Enqueue the stage; return the next one, if there is one."""
        for flat in self._flats:
            if flat.nbytes <= HALF_BYTES:
                memory.all_reduce(flat, self._reduction)
            else:
                self._large.append(flat)
        return partial(self._reduce_large, memory) if self._large else None

    def _reduce_large(self, memory: SharedMemory) -> Stage | None:
        memory.all_reduce_slices(self._large.pop(), self._reduction)
        return partial(self._reduce_large, memory) if self._large else None


class SharedMemoryGroup(TransposingGroup):
    """A process group with the methods of torch's own, which `torch.distributed` calls.

    Each method starts its collective and returns its work. Reductions are done in rank order.
    """

    def allreduce(self, tensors: Tensors, opts: Any = ALL_REDUCE) -> Any:
        """Reduce each tensor over the ranks, in place."""
        return self._all_reduce("allreduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = ALL_REDUCE_COALESCED) -> Any:
        """Reduce each tensor over the ranks, in place and in one exchange."""
        return self._all_reduce("allreduce_coalesced", tensors, opts)

    def _all_reduce(self, method: str, tensors: Tensors, opts: Any) -> Any:
        reduction = self._find_reduction(tensors, opts, across_nodes=True)
        if reduction is None:
            return self._carry(method, tensors[0].device, tensors, opts)
        flats = FlatTensors()
        targets = [flats.add(tensor) for tensor in tensors]
        reduce: Enqueue = ReduceToAll(targets, reduction)
        if self._network is not None:
            reduce = self._reduce_across(self._network, targets, reduction, opts)
        return self._start("all_reduce", reduce, tensors, tensors, opts, flats.write_back)

    def broadcast(self, tensors: Tensors, opts: Any = BROADCAST) -> Any:
        """Send each tensor of one rank to all."""
        if not self._can_share(tensors, across_nodes=True):
            return self._carry("broadcast", tensors[0].device, tensors, opts)
        flats = FlatTensors()
        targets = [flats.add(tensor) for tensor in tensors]
        root = opts.rootRank

        def broadcast(memory: SharedMemory) -> None:
            for target in targets:
                memory.broadcast(target, root)

        enqueue: Enqueue = broadcast
        if self._network is not None:
            timeout = self._get_timeout(opts)
            enqueue = BroadcastAcross(self._network, timeout, targets, root)

        return self._start("broadcast", enqueue, tensors, tensors, opts, flats.write_back)

    def allgather(
        self, output_tensors: list[Tensors], input_tensors: Tensors, opts: Any = ALL_GATHER
    ) -> Any:
        """Collect a tensor of each rank into a list."""
        return self._all_gather("allgather", output_tensors, input_tensors, opts)

    def allgather_coalesced(
        self, output_lists: list[Tensors], input_list: Tensors, opts: Any = ALL_GATHER
    ) -> Any:
        """Collect several tensors of each rank, with a list of tensors for each rank."""
        if not self._can_gather(input_list):
            device = input_list[0].device
            return self._carry("allgather_coalesced", device, output_lists, input_list, opts)
        outputs = [list(tensors) for tensors in zip(*output_lists, strict=True)]
        return self._all_gather("allgather", outputs, input_list, opts)

    def _all_gather(self, method: str, outputs: list[Tensors], parts: Tensors, opts: Any) -> Any:
        """Collect each part of all ranks into the list of outputs with the same index."""
        all_outputs = [output for tensors in outputs for output in tensors]
        is_shared = self._can_gather([*parts, *all_outputs]) and all(
            have_length(tensors, part.numel()) for tensors, part in zip(outputs, parts, strict=True)
        )
        if not is_shared:
            return self._carry(method, parts[0].device, outputs, parts, opts)
        flats = FlatTensors()
        targets = [[flats.add(output) for output in tensors] for tensors in outputs]
        return self._start(
            "all_gather",
            self._make_gather(targets, parts, opts),
            parts,
            all_outputs,
            opts,
            flats.write_back,
        )

    def _can_gather(self, tensors: Tensors) -> bool:
        is_even = self._network is None or len(set(map(len, self._network.nodes))) == 1
        return is_even and self._can_share(tensors, across_nodes=True)

    def _make_gather(self, targets: list[Tensors], parts: Tensors, opts: Any) -> Enqueue:
        """Return the first stage that collects each part of all ranks into its list of targets."""
        sources = [get_flat(part) for part in parts]
        if self._network is not None:
            return AllGatherAcross(self._network, self._get_timeout(opts), targets, sources)

        def gather(memory: SharedMemory) -> None:
            for target, source in zip(targets, sources, strict=True):
                memory.all_gather(target, source)

        return gather

    def all_gather_single(
        self, output: torch.Tensor, part: torch.Tensor, opts: Any = ALL_GATHER
    ) -> Any:
        """Collect a tensor of each rank into one tensor."""
        fits = output.numel() == part.numel() * self.size() and output.dtype == part.dtype
        if not fits or not self._can_gather([output, part]):
            return self._carry("_allgather_base", part.device, output, part, opts)
        return self._all_gather_into([output], [part], opts)

    _allgather_base = all_gather_single  # its name before torch 2.13

    def all_gather_single_coalesced(
        self, outputs: Tensors, parts: Tensors, opts: Any = ALL_GATHER
    ) -> Any:
        """Collect several tensors of each rank, each into one tensor."""
        if not self._can_gather([*outputs, *parts]):
            return self._torch_group.all_gather_single_coalesced(outputs, parts, opts)
        return self._all_gather_into(outputs, parts, opts)

    def _all_gather_into(self, outputs: Tensors, parts: Tensors, opts: Any) -> Any:
        flats = FlatTensors()
        targets = [split_evenly(flats.add(output), self.size()) for output in outputs]
        return self._start(
            "_all_gather_base",
            self._make_gather(targets, parts, opts),
            parts,
            outputs,
            opts,
            flats.write_back,
        )

    def barrier(self, opts: Any = BARRIER) -> Any:
        """Wait until all ranks have come here."""
        is_on_host = opts.device is None or opts.device.type == "cpu"
        if not self.is_shared or not is_on_host:
            return self._torch_group.barrier(opts)

        def wait_for_all(memory: SharedMemory) -> None:
            memory.barrier()

        enqueue: Enqueue = wait_for_all
        if self._network is not None:
            enqueue = BarrierAcross(self._network, self._get_timeout(opts))
        return self._start("barrier", enqueue, [], [], opts)
