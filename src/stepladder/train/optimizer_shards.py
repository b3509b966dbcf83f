"""`--shard optimizer`: each rank holds the optimizer's state of its slices, and steps those.

Stage 1 of ZeRO (Rajbhandari et al., SC 2020, section 5.1). The gradient is whole on every rank, so
what is read from all of it, such as a norm to clip by, has the same bits as without shards; and
where an optimizer treats each element for itself, so has the step of a slice. The parameters' new
values are gathered after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from stepladder.core.errors import InputError
from stepladder.core.settings import Settings
from stepladder.storage.snapshot_slices import (
    OPTIMIZER_PREFIX,
    STATE_PREFIX,
    SliceReader,
    TensorSlice,
)
from stepladder.train.comm import Comm
from stepladder.train.job import Job
from stepladder.train.model_blocks import validate_fully_shardable
from stepladder.train.optimizers import list_optimizers
from stepladder.train.sync.ddp import make_fixed_buckets

# Of torch.optim. What a step does to an element depends on that element alone, or on those of its
# parameter.
ELEMENTWISE_OPTIMIZERS = [
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "Rprop",
]
ALIGNMENT = 64  # elements: more than any processor's vectors hold
PARAMETERWISE_OPTIMIZERS = ["Adafactor", "Muon"]


class ShardPiece(NamedTuple):
    """Elements [lo, hi) of a parameter, which is the `number`-th of the optimizer. values: they, in
    its memory.
    """

    number: int
    param: torch.nn.Parameter
    lo: int
    hi: int
    values: torch.Tensor

    @property
    def is_whole(self) -> bool:
        return self.hi - self.lo == self.param.numel()

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece's part of a tensor of the parameter's shape; a view where that can be."""
        return tensor if self.is_whole else tensor.reshape(-1)[self.lo : self.hi]


class ShardBucket:
    """Some parameters of one type: the pieces of them that each rank has, and how to gather these."""

    def __init__(self, pieces: list[list[ShardPiece]], rank: int) -> None:
        self.pieces, self.mine = pieces, pieces[rank]
        self.width = max(sum(piece.values.numel() for piece in own) for own in pieces)
        self.like = next(own[0].values for own in pieces if own)
        self.others = [(number, own) for number, own in enumerate(pieces) if number != rank]

    def gather(self, comm: Comm, sent: torch.Tensor, gathered: torch.Tensor) -> None:
        """Take the other ranks' values of their pieces. sent, gathered: room for it. A collective."""
        if (ranks := len(self.pieces)) == 1:
            return
        sent, gathered = sent[: self.width], gathered[: self.width * ranks]
        copy_pieces(sent, self.mine, take=False)
        comm.all_gather(gathered, sent).wait()
        rows = gathered.view(ranks, self.width)
        for number, pieces in self.others:
            copy_pieces(rows[number], pieces, take=True)


class OptimizerShards:
    """An optimizer whose state is spread over the ranks. It is the job's own, and its schedule goes
    on with it.

    Outside of `stepping` the optimizer has its whole parameters, and no state. Each rank has a
    slice of its own, and with copies=2 that of the rank before it too. own, pieces: without and
    with it. taken: what `take` reads of a snapshot.  about: for its manifest."""

    snapshot_prefix = STATE_PREFIX + OPTIMIZER_PREFIX

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Comm, copies: int = 1) -> None:
        self.optimizer, self.comm, self.manifest_entry = optimizer, comm, dict[str, Any]()
        self.rank, self.ranks = comm.world.rank, comm.world.world_size
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        numbers = {param: number for number, param in enumerate(self.params)}
        cuttable, load = find_elementwise_params(optimizer), [0] * comm.world.world_size
        moving = [param for param in self.params if param.requires_grad and param.numel()]
        self.buckets = [
            ShardBucket(partition(params, numbers, load, cuttable), comm.world.rank)
            for params in make_fixed_buckets(moving)
        ]
        self.room: dict[
            torch.dtype, tuple[torch.Tensor, torch.Tensor]
        ] = {}  # one for all, one after the other
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.width):
            sent = bucket.like.new_zeros(bucket.width)
            self.room[sent.dtype] = sent, sent.new_empty(bucket.width * comm.world.world_size)
        self.own = self.slice(self.rank)
        self.pieces = [
            piece
            for one in slices_of_rank(self.rank, self.ranks, copies)
            for piece in self.slice(one)
        ]
        self.of_param: dict[nn.Parameter, list[ShardPiece]] = defaultdict(list)
        for piece in self.pieces:
            self.of_param[piece.param].append(piece)
        self.groups = [
            [piece for param in group["params"] for piece in self.of_param.get(param, [])]
            for group in optimizer.param_groups
        ]
        self.state: Any = None
        self.adopt_state()

    def slice(self, number: int) -> list[ShardPiece]:
        """All pieces of a slice."""
        return [piece for bucket in self.buckets for piece in bucket.pieces[number]]

    def adopt_state(self) -> None:
        """Take this rank's slices of the state that the optimizer has for its whole parameters, and
        drop that.
        """
        whole, self.state = self.optimizer.state, defaultdict(dict)
        for piece in self.pieces:
            for name, value in whole.get(piece.param, {}).items():
                if isinstance(value, torch.Tensor):
                    value = (
                        piece.cut(value) if value.shape == piece.param.shape else value
                    ).clone()
                self.state[piece.values][name] = value
        frozen = [number for number, param in enumerate(self.params) if not param.requires_grad]
        self.frozen = {
            number: whole[self.params[number]] for number in frozen if self.params[number] in whole
        }
        self.optimizer.state = defaultdict(dict)

    @contextmanager
    def stepping(self) -> Iterator[Callable[[], object]]:
        """In the block the optimizer has this rank's slices, with their gradients and their state."""
        groups = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        if sum(map(len, whole)) != len(self.params):
            raise InputError(
                "--shard optimizer: the optimizer has got other parameters since the run began",
                "give it all of them in build, or leave --shard out",
            )
        for piece in self.pieces:
            grad = piece.param.grad
            piece.values.grad = None if grad is None else piece.cut(grad)
        for group, pieces in zip(groups, self.groups, strict=True):
            group["params"] = [piece.values for piece in pieces]
        nothing, self.optimizer.state = self.optimizer.state, self.state
        try:
            yield self.optimizer.step
        finally:
            self.optimizer.state = nothing
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
            for piece in self.pieces:
                piece.values.grad = None

    def gather(self) -> None:
        """Every rank's slices of the parameters, to all ranks. A collective."""
        for bucket in self.buckets:
            bucket.gather(self.comm, *self.room[bucket.like.dtype])

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, without what `slices` has."""
        return {**self.optimizer.state_dict(), "state": dict(self.frozen)}

    def slices(self) -> dict[str, TensorSlice]:
        """This rank's part of the state, by the names that it has in a snapshot."""
        found = {}
        for piece in self.own:
            for key, value in self.state.get(piece.values, {}).items():
                is_cut = value.shape == piece.values.shape
                if (
                    is_cut or piece.lo == 0
                ):  # what all pieces of a parameter have is written with the first
                    first, shape = (piece.lo, piece.param.shape) if is_cut else (0, value.shape)
                    name = f"{STATE_PREFIX}{OPTIMIZER_PREFIX}{piece.number}/{key}"
                    found[name] = TensorSlice(value.reshape(-1), first, list(shape), flat=True)
        return found

    def load_slices(self, reader: SliceReader) -> None:
        """This rank's part of the state that a snapshot has in slices."""
        keys: dict[int, list[str]] = defaultdict(list)
        for name in reader.names(self.snapshot_prefix):
            number, key = name.split("/")
            keys[int(number)].append(key)
        for piece in self.pieces:
            for key in keys[piece.number]:
                name = f"{self.snapshot_prefix}{piece.number}/{key}"
                shape = reader.shape(name)
                if shape == list(piece.param.shape):
                    values = reader.read_elements(name, piece.lo, piece.hi).view(piece.values.shape)
                    self.state[piece.values][key] = clone_with_strides(values, piece.values)
                elif shape:  # else a count of steps, which the optimizer has loaded
                    self.state[piece.values][key] = reader.read_tensor(name).to(piece.values.device)


def make_optimizer_shards(
    settings: Settings, optimizer: torch.optim.Optimizer, comm: Comm
) -> OptimizerShards | None:
    """Of --shard optimizer; on one process there is nothing to spread, unless others may join it."""
    if settings.shard != "optimizer" or (comm.alone and settings.shard_copies == 1):
        return None
    return OptimizerShards(optimizer, comm, settings.shard_copies)


def slices_of_rank(rank: int, ranks: int, copies: int) -> list[int]:
    """The slices that a rank holds: its own, and those of the ranks before it."""
    return [(rank - back) % ranks for back in range(min(copies, ranks))]


def validate_shard(job: Job, shard: str) -> None:
    """Raises InputError where --shard does not go with the job."""
    if shard != "none":
        validate_shardable(job.optimizer, shard)
    if shard == "full":
        validate_fully_shardable(job)


def validate_shardable(optimizer: torch.optim.Optimizer, shard: str = "optimizer") -> None:
    """Raises InputError for an optimizer of which nobody knows that its step can be cut."""
    known = ELEMENTWISE_OPTIMIZERS + (PARAMETERWISE_OPTIMIZERS if shard == "optimizer" else [])
    for kind in map(type, list_optimizers(optimizer)):
        if not (f"{kind.__module__}.".startswith("torch.optim.") and kind.__name__ in known):
            raise InputError(
                f"--shard {shard}: a step of {kind.__name__} on slices of its parameters may have another result",
                f"one of torch.optim's {', '.join(known)}, or leave --shard out",
            )


def find_elementwise_params(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    """The parameters that can be cut anywhere."""
    kinds = [
        one for one in list_optimizers(optimizer) if type(one).__name__ in ELEMENTWISE_OPTIMIZERS
    ]
    return {param for one in kinds for group in one.param_groups for param in group["params"]}


def partition(
    params: list[nn.Parameter],
    numbers: dict[nn.Parameter, int],
    load: list[int],
    by_element: set[nn.Parameter],
) -> list[list[ShardPiece]]:
    """Each rank's pieces of a bucket: equal slices of what can be cut, and the rest to whom has
    least.

    load: elements that each rank has in whole parameters so far.  by_element: what can be cut.
    """
    ranks = len(load)
    pieces: list[list[ShardPiece]] = [[] for _ in range(ranks)]
    cuttable = [param for param in params if param in by_element and param.is_contiguous()]
    size, at = sum(param.numel() for param in cuttable), 0
    edges = [size * rank // ranks for rank in range(ranks + 1)]
    for param in params:
        count, values = param.numel(), param.detach()
        if param in by_element and param.is_contiguous():
            for rank in range(ranks):
                lo, hi = (align_cut(edge - at, count) for edge in edges[rank : rank + 2])
                if lo < hi:
                    part = values if hi - lo == count else values.view(-1)[lo:hi]
                    pieces[rank].append(ShardPiece(numbers[param], param, lo, hi, part))
            at += count
        else:
            rank = min(range(ranks), key=load.__getitem__)
            load[rank] += count
            pieces[rank].append(ShardPiece(numbers[param], param, 0, count, values))
    return pieces


def align_cut(edge: int, count: int) -> int:
    """The nearest place at or below `edge` where a parameter of `count` elements is cut.

    Vectors begin there in the whole parameter too. What is left of a loop by vectors is computed
    one by one, and a fused AdamW rounds that differently: a slice must leave over what the whole
    parameter does."""
    return max(0, edge) // ALIGNMENT * ALIGNMENT if edge < count else count


def copy_pieces(flat: torch.Tensor, pieces: list[ShardPiece], take: bool) -> None:
    """Between a flat vector and the pieces that lie in it one after the other. take: to the pieces."""
    if not pieces:
        return
    sizes = [piece.values.numel() for piece in pieces]
    slices = flat[: sum(sizes)].split(sizes)
    parts = [part.view(piece.values.shape) for part, piece in zip(slices, pieces, strict=True)]
    values = [piece.values for piece in pieces]
    torch._foreach_copy_(values if take else parts, parts if take else values)


def restride_state(optimizer: torch.optim.Optimizer) -> None:
    """Give each state that lies in another order than its parameter the parameter's."""
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if (
                isinstance(value, torch.Tensor)
                and value.shape == param.shape
                and value.stride() != param.stride()
            ):
                state[key] = clone_with_strides(value, param)


def clone_with_strides(values: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """A copy where the parameter is, with its strides: a fused step goes through both as they lie
    in memory.
    """
    return torch.empty_like(param, dtype=values.dtype).copy_(values)
