"""The collectives that memory carries: a table from the name of a method to what it does.

A collective is a generator, with the arguments that torch passes. Up to its first `yield` it runs
in the caller's thread. It yields the tensors that a profiler shows and those that will hold the
result; if it returns without them, gloo carries the call. Then the queue of collectives runs it:
before each further `yield` it starts what the ranks exchange next, and after the last one it
completes the outputs.

Of ranks on several machines, the ranks of each machine exchange data in shared memory, the leaders
of the machines exchange it over the network, and each leader hands the result to the ranks of its
machine. So one copy of the data leaves and enters each machine. A reduction is first done in rank
order within each machine; gloo then reduces the results of the machines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import distributed_c10d

from stepladder_exchange.network import NodeNetwork
from stepladder_exchange.reduction import Reduction
from stepladder_exchange.routing import (
    FlatTensors,
    count_elements,
    find_reduction,
    get_flat,
    have_length,
    split_evenly,
)
from stepladder_exchange.shared_memory import SharedMemory
from stepladder_exchange.shared_segment import HALF_BYTES
from stepladder_exchange.work import NO_TENSOR, MessageFormat, Tensors, copy_all

C10D: Any = distributed_c10d  # torch's types of it name neither all classes nor all arguments
LEADER = 0  # the index of the leader among the ranks of its machine
Stages = Generator[Any, None, None]


class Call(NamedTuple):
    """A call of a collective on one rank.

    Args:
        memory: The memory of the ranks of this machine.
        network: The network between machines; None if the group is on one machine.
        rank: This rank.
        ranks: How many ranks the group has.
        opts: torch's options.
        timeout: How long a rank waits for others.
    """

    memory: SharedMemory
    network: NodeNetwork | None
    rank: int
    ranks: int
    opts: Any
    timeout: timedelta

    @property
    def own_ranks(self) -> Sequence[int]:
        """The ranks of this machine."""
        if self.network is None:
            return range(self.ranks)
        return self.network.own_ranks

    @property
    def has_even_nodes(self) -> bool:
        """Whether all machines have equally many ranks."""
        return self.network is None or len(set(map(len, self.network.nodes))) == 1

    def await_leader(self) -> NodeNetwork:
        """Wait for the leader of this machine from now on, twice as long as it does for others.

        If another machine does not answer, the leader then fails first, and tells the ranks of its
        machine why.

        Returns:
            The network.
        """
        assert self.network is not None
        self.memory.waiter.set_timeout(2 * self.timeout.total_seconds())
        return self.network


class MemoryCollective(NamedTuple):
    """A collective that memory carries.

    Args:
        run: The generator function, which gets the call and torch's arguments without the options.
        title: The name that a profiler shows.
        gloo_method: The method of torch's that carries it otherwise.
        options: What torch takes when it is called without options.
        crosses_nodes: Whether memory also carries it for ranks on several machines.
    """

    run: Callable[..., Stages]
    title: str
    gloo_method: str
    options: Any
    crosses_nodes: bool

    @property
    def argument_count(self) -> int:
        """How many arguments come before the options."""
        return len(inspect.signature(self.run).parameters) - 1


COLLECTIVES: dict[str, MemoryCollective] = {}


def _carried_by_memory(
    title: str, options: Any, *methods: str, crosses_nodes: bool = True
) -> Callable[[Callable[..., Stages]], Callable[..., Stages]]:
    """Return a decorator that enters a generator function into the table.

    Args:
        title: The name that a profiler shows.
        options: What torch takes when it is called without options.
        *methods: The names by which torch calls it: first that of gloo's method, last the newest.
        crosses_nodes: Whether memory also carries it for ranks on several machines.
    """

    def enter(run: Callable[..., Stages]) -> Callable[..., Stages]:
        collective = MemoryCollective(run, title, methods[0], options, crosses_nodes)
        COLLECTIVES.update(dict.fromkeys(methods, collective))
        return run

    return enter


# -- the same result on all ranks ------------------------------------------------------------------


@_carried_by_memory("all_reduce", C10D.AllreduceCoalescedOptions(), "allreduce_coalesced")
@_carried_by_memory("all_reduce", C10D.AllreduceOptions(), "allreduce")
def all_reduce(call: Call, tensors: Tensors) -> Stages:
    """Reduce each tensor over the ranks, in place."""
    reduction = find_reduction(call.opts.reduceOp, tensors[0].dtype)
    if reduction is None:
        return
    flats = FlatTensors()
    targets = list(map(flats.add, tensors))
    yield tensors, tensors
    yield from _reduce_to_all(call, targets, reduction)
    flats.write_back()


def _reduce_to_all(call: Call, flats: Tensors, reduction: Reduction) -> Stages:
    memory = call.memory
    if call.network is None:
        large = [flat for flat in flats if flat.nbytes > HALF_BYTES]
        for flat in flats:
            if flat.nbytes <= HALF_BYTES:
                memory.all_reduce(flat, reduction)
        yield
        for flat in large:  # each rank reduces a slice for all
            memory.all_reduce_slices(flat, reduction)
            yield
        return
    # The leaders divide, by the number of ranks on all machines.
    sum_or_other = reduction._replace(is_mean=False)
    for flat in flats:
        kind = f"all_reduce {reduction.name}"
        _reduce_to_one(memory, flat, sum_or_other, call.network.is_leader, kind)
    yield
    network = call.await_leader()
    operation = C10D.ReduceOp.SUM if reduction.is_mean else call.opts.reduceOp
    network.all_reduce(flats, operation, call.timeout)
    for flat in flats:
        if reduction.is_mean and network.is_leader:
            flat.div_(call.ranks)
        memory.broadcast(flat, LEADER)
    yield


def _reduce_to_one(
    memory: SharedMemory, flat: torch.Tensor, reduction: Reduction, has_result: bool, kind: str
) -> None:
    def reduce_rows(rows: Tensors, lo: int, hi: int) -> None:
        if has_result:
            reduction.reduce(rows, flat[lo:hi])

    memory.combine(flat, memory.one_row_each, len(flat), reduce_rows, kind)


@_carried_by_memory("broadcast", C10D.BroadcastOptions(), "broadcast")
def broadcast(call: Call, tensors: Tensors) -> Stages:
    """Send each tensor of one rank to all."""
    flats = FlatTensors()
    targets = list(map(flats.add, tensors))
    yield tensors, tensors
    root = call.opts.rootRank
    has_root = root in call.own_ranks
    source = LEADER
    if has_root:
        source = call.own_ranks.index(root)
    else:  # where the root is, the leader may have to get the tensors first
        call.await_leader().broadcast(targets, root, call.timeout)
    for target in targets:
        call.memory.broadcast(target, source)
    yield
    if has_root and call.network is not None:
        call.network.broadcast(targets, root, call.timeout)
    flats.write_back()


@_carried_by_memory("all_gather", C10D.AllgatherOptions(), "allgather")
def all_gather(call: Call, output_lists: list[Tensors], parts: Tensors) -> Stages:
    """Collect each part of all ranks into the list of outputs with the same index."""
    for outputs, part in zip(output_lists, parts, strict=True):
        if not have_length(outputs, part.numel()):
            return
    flats = FlatTensors()
    targets = [list(map(flats.add, outputs)) for outputs in output_lists]
    all_outputs = [output for outputs in output_lists for output in outputs]
    yield from _gather_to_all(call, all_outputs, parts, targets, flats)


@_carried_by_memory("all_gather", C10D.AllgatherOptions(), "allgather_coalesced")
def all_gather_coalesced(call: Call, output_lists: list[Tensors], parts: Tensors) -> Stages:
    """Collect several tensors of each rank, with a list of tensors for each rank."""
    yield from all_gather(call, list(map(list, zip(*output_lists, strict=True))), parts)


@_carried_by_memory(
    "_all_gather_base", C10D.AllgatherOptions(), "_allgather_base", "all_gather_single"
)
def all_gather_single(call: Call, output: torch.Tensor, part: torch.Tensor) -> Stages:
    """Collect a tensor of each rank into one tensor."""
    if output.numel() == part.numel() * call.ranks and output.dtype == part.dtype:
        yield from all_gather_single_coalesced(call, [output], [part])


@_carried_by_memory("_all_gather_base", C10D.AllgatherOptions(), "all_gather_single_coalesced")
def all_gather_single_coalesced(call: Call, outputs: Tensors, parts: Tensors) -> Stages:
    """Collect several tensors of each rank, each into one tensor."""
    flats = FlatTensors()
    targets = [split_evenly(flats.add(output), call.ranks) for output in outputs]
    yield from _gather_to_all(call, outputs, parts, targets, flats)


def _gather_to_all(
    call: Call, outputs: Tensors, parts: Tensors, targets: list[Tensors], flats: FlatTensors
) -> Stages:
    """Collect each part of all ranks into its list of targets, which has one for each rank."""
    if not call.has_even_nodes:
        return
    pairs = list(zip(targets, map(get_flat, parts), strict=True))
    yield parts, outputs
    memory = call.memory
    own_ranks = call.own_ranks
    for by_rank, source in pairs:
        memory.all_gather([by_rank[rank] for rank in own_ranks], source)
    yield
    if call.network is not None:
        network = call.await_leader()
        for by_rank, _ in pairs:
            gathered = network.all_gather([by_rank[rank] for rank in own_ranks], call.timeout)
            for ranks, rows in zip(network.nodes, gathered, strict=False):  # a leader's alone
                copy_all(rows, [by_rank[rank] for rank in ranks])
            for rank, target in enumerate(by_rank):
                if rank not in own_ranks:
                    memory.broadcast(target, LEADER)
        yield
    flats.write_back()


@_carried_by_memory("barrier", C10D.BarrierOptions(), "barrier")
def barrier(call: Call) -> Stages:
    """Wait until all ranks have come here."""
    if call.opts.device is not None and call.opts.device.type != "cpu":
        return
    yield [], []
    call.memory.barrier()
    yield
    if call.network is not None:
        call.await_leader().barrier(call.timeout)
        call.memory.barrier()
        yield


# -- a result on one rank, or in parts on all ------------------------------------------------------


@_carried_by_memory("reduce", C10D.ReduceOptions(), "reduce", crosses_nodes=False)
def reduce(call: Call, tensors: Tensors) -> Stages:
    """Reduce a tensor over the ranks, with the result on one rank."""
    reduction = find_reduction(call.opts.reduceOp, tensors[0].dtype)
    if reduction is None:
        return
    flats = FlatTensors()
    [target] = map(flats.add, tensors)
    yield tensors, tensors
    root = call.opts.rootRank
    kind = f"reduce {reduction.name} to rank {call.memory.names[root]}"
    _reduce_to_one(call.memory, target, reduction, call.rank == root, kind)
    yield
    flats.write_back()


@_carried_by_memory("gather", C10D.GatherOptions(), "gather", crosses_nodes=False)
def gather(call: Call, output_lists: list[Tensors], parts: Tensors) -> Stages:
    """Collect a tensor of each rank on one rank."""
    [part] = parts
    outputs = [output for tensors in output_lists for output in tensors]
    if not have_length(outputs, part.numel()):
        return
    flats = FlatTensors()
    targets = list(map(flats.add, outputs))
    source = get_flat(part)
    yield parts, outputs

    def copy_rows(rows: Tensors, lo: int, hi: int) -> None:
        if targets:
            copy_all(rows, [target[lo:hi] for target in targets])

    memory = call.memory
    kind = f"gather on rank {memory.names[call.opts.rootRank]}"
    memory.combine(source, memory.one_row_each, len(source), copy_rows, kind)
    yield
    flats.write_back()


@_carried_by_memory("scatter", C10D.ScatterOptions(), "scatter", crosses_nodes=False)
def scatter(call: Call, outputs: Tensors, input_lists: list[Tensors]) -> Stages:
    """Send each rank its tensor of a list that one rank has."""
    [output] = outputs
    parts = [part for tensors in input_lists for part in tensors]
    if not have_length(parts, output.numel()):
        return
    flats = FlatTensors()
    target = flats.add(output)
    sources = list(map(get_flat, parts))
    yield parts, outputs

    def copy_row(rows: Tensors, lo: int, hi: int) -> None:
        target[lo:hi].copy_(rows[call.rank])

    root = call.opts.rootRank
    rows_per_rank = tuple(call.ranks * (rank == root) for rank in range(call.ranks))
    kind = f"scatter from rank {call.memory.names[root]}"
    message_format = MessageFormat(kind, target.dtype, rows_per_rank, len(target))
    call.memory.combine_rows(sources, message_format, copy_row)
    yield
    flats.write_back()


REDUCE_SCATTER = C10D.ReduceScatterOptions()


@_carried_by_memory("_reduce_scatter_base", REDUCE_SCATTER, "reduce_scatter")
def reduce_scatter(call: Call, outputs: Tensors, input_lists: list[Tensors]) -> Stages:
    """Reduce each tensor of a list over the ranks, with one of the results on each rank."""
    [output] = outputs
    [parts] = input_lists
    if parts[call.rank].numel() == output.numel():
        yield from _reduce_to_each(call, outputs, [list(map(get_flat, parts))])


@_carried_by_memory(
    "_reduce_scatter_base", REDUCE_SCATTER, "_reduce_scatter_base", "reduce_scatter_single"
)
def reduce_scatter_single(call: Call, output: torch.Tensor, tensor: torch.Tensor) -> Stages:
    """Reduce a tensor over the ranks, with one slice of the result on each rank."""
    if tensor.numel() == output.numel() * call.ranks and tensor.dtype == output.dtype:
        yield from reduce_scatter_single_coalesced(call, [output], [tensor])


@_carried_by_memory("_reduce_scatter_base", REDUCE_SCATTER, "reduce_scatter_single_coalesced")
def reduce_scatter_single_coalesced(call: Call, outputs: Tensors, tensors: Tensors) -> Stages:
    """Reduce several tensors over the ranks, with a slice of each result on each rank."""
    sources = [split_evenly(get_flat(tensor), call.ranks) for tensor in tensors]
    yield from _reduce_to_each(call, outputs, sources)


def _reduce_to_each(call: Call, outputs: Tensors, sources: list[Tensors]) -> Stages:
    """Reduce flat tensors, given as the slices of all ranks, of which this rank gets one."""
    reduction = find_reduction(call.opts.reduceOp, outputs[0].dtype)
    if reduction is None:
        return
    flats = FlatTensors()
    pairs = list(zip(map(flats.add, outputs), sources, strict=True))
    yield [row for slices in sources for row in slices], outputs
    if call.network is None:
        for target, slices in pairs:
            call.memory.reduce_scatter(target, slices, reduction)
        yield
    else:
        totals = [torch.cat(slices) for slices in sources]
        yield from _reduce_to_all(call, totals, reduction)
        for (target, slices), total in zip(pairs, totals, strict=True):
            target.copy_(total.split(list(map(len, slices)))[call.rank])
    flats.write_back()


# -- a part of every rank for every rank -----------------------------------------------------------


@_carried_by_memory(
    "all_to_all", C10D.AllToAllOptions(), "alltoall_base", "all_to_all_single", crosses_nodes=False
)
def all_to_all_single(
    call: Call,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> Stages:
    """Send each rank its slice of a tensor."""
    sent = count_elements(tensor, input_splits, call.ranks)
    received = count_elements(output, output_splits, call.ranks)
    if sent is None or received is None:
        return
    flats = FlatTensors()
    targets = list(flats.add(output).split(received))
    parts = list(get_flat(tensor).split(sent))
    yield [tensor], [output]
    yield from _send_to_each(call.memory, call.rank, parts, targets)
    flats.write_back()


@_carried_by_memory("all_to_all", C10D.AllToAllOptions(), "alltoall", crosses_nodes=False)
def all_to_all(call: Call, outputs: Tensors, parts: Tensors) -> Stages:
    """Send each rank its tensor of a list."""
    flats = FlatTensors()
    targets = list(map(flats.add, outputs))
    sources = list(map(get_flat, parts))
    yield parts, outputs
    yield from _send_to_each(call.memory, call.rank, sources, targets)
    flats.write_back()


def _send_to_each(memory: SharedMemory, rank: int, parts: Tensors, targets: Tensors) -> Stages:
    """Send each rank its part; first all ranks learn how much each sends and expects."""
    ranks = memory.ranks
    own_lengths = torch.tensor([len(part) for part in (*parts, *targets)])
    lengths = NO_TENSOR  # then a row for each rank

    def store_lengths(rows: Tensors, *_: object) -> None:
        nonlocal lengths
        lengths = torch.stack(rows)

    kind = f"all_to_all of {str(parts[0].dtype).removeprefix('torch.')}"
    memory.combine(own_lengths, memory.one_row_each, len(own_lengths), store_lengths, kind)
    yield
    sent = lengths[:, :ranks]
    expected = lengths[:, ranks:].t()
    if not torch.equal(sent, expected):
        source, target = (sent != expected).nonzero()[0].tolist()
        raise RuntimeError(
            f"rank {memory.names[source]} sends {sent[source, target]} numbers to rank"
            f" {memory.names[target]}, which expects {expected[source, target]}"
        )
    targets[rank].copy_(parts.pop(rank))  # copied directly
    sent.fill_diagonal_(0)

    def copy_rows(rows: Tensors, lo: int, hi: int) -> None:
        for peer, target in enumerate(targets):
            end = min(hi, len(target))
            if peer != rank and lo < end:
                # A rank has no row for itself.
                row = rows[peer * (ranks - 1) + rank - (rank > peer)]
                target[lo:end].copy_(row[: end - lo])

    message_format = MessageFormat(
        "all_to_all", parts[0].dtype, (ranks - 1,) * ranks, int(sent.max())
    )
    memory.combine_rows(parts, message_format, copy_rows)
    yield


def find_tensors(arguments: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments of a collective, also those in lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from find_tensors(argument)
