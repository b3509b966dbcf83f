"""`--shard optimizer`: each rank holds the optimizer's state of its slices, and steps those.

Stage 1 of ZeRO (Rajbhandari et al., SC 2020, section 5.1). The gradient is complete on every rank,
so what is read from all of it, such as a norm to clip by, has the same bits as without shards; and
where an optimizer treats each element for itself, so has the step of a slice. The parameters' new
values are gathered after it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
from stepladder.train.shard_pieces import (
    ShardBucket,
    ShardPiece,
    partition,
    slices_of_rank,
)
from stepladder.train.sync.ddp import make_fixed_buckets

# Optimizers of torch.optim. What a step of them does to an element depends on that element alone.
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
# What a step of these does to an element depends on all elements of its parameter.
PARAMETERWISE_OPTIMIZERS = ["Adafactor", "Muon"]


class OptimizerShards:
    """The job's optimizer, whose state is spread over the ranks.

    Outside of `stepping` the optimizer has its complete parameters, and no state. Each rank has one
    slice, and with copies=2 also the slice of the rank before it.

    Attributes:
        own_pieces: The pieces of this rank's own slice.
        pieces: The pieces of all slices of this rank.
        snapshot_prefix: The names that `load_slices` reads from a snapshot begin with it.
        manifest_entry: Added to the manifest of a snapshot.
    """

    snapshot_prefix = STATE_PREFIX + OPTIMIZER_PREFIX

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        comm: Comm,
        copies: int = 1,
    ) -> None:
        self.optimizer = optimizer
        self.comm = comm
        self.manifest_entry: dict[str, Any] = {}
        self.rank = comm.world.rank
        self.ranks = comm.world.world_size
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        self.buckets = self._make_buckets()
        self.buffers = self._make_buffers()
        self.own_pieces = self.pieces_of_slice(self.rank)
        self.pieces = [
            piece
            for index in slices_of_rank(self.rank, self.ranks, copies)
            for piece in self.pieces_of_slice(index)
        ]
        self.pieces_of_param: dict[nn.Parameter, list[ShardPiece]] = defaultdict(list)
        for piece in self.pieces:
            self.pieces_of_param[piece.param].append(piece)
        self.pieces_by_group = [
            [
                piece
                for param in group["params"]
                for piece in self.pieces_of_param.get(
                    param,
                    [],
                )
            ]
            for group in optimizer.param_groups
        ]
        self.state: Any = defaultdict(dict)
        self.frozen: dict[int, Any] = {}  # state of parameters that are not trained, by number
        self.adopt_state()

    def _make_buckets(self) -> list[ShardBucket]:
        numbers = {param: number for number, param in enumerate(self.params)}
        elementwise = find_elementwise_params(self.optimizer)
        load = [0] * self.ranks
        trained = [param for param in self.params if param.requires_grad and param.numel()]
        return [
            ShardBucket(partition(params, numbers, load, elementwise), self.rank)
            for params in make_fixed_buckets(trained)
        ]

    def _make_buffers(self) -> dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]]:
        """Make buffers for the largest bucket of each type, which all buckets share."""
        buffers = {}
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.width):
            sent = bucket.like.new_zeros(bucket.width)
            buffers[sent.dtype] = sent, sent.new_empty(bucket.width * self.ranks)
        return buffers

    def pieces_of_slice(self, index: int) -> list[ShardPiece]:
        return [piece for bucket in self.buckets for piece in bucket.pieces_by_rank[index]]

    def adopt_state(self) -> None:
        """Copy this rank's slices of the optimizer's complete state, and drop that state."""
        full_state = self.optimizer.state
        self.state = defaultdict(dict)
        for piece in self.pieces:
            for name, value in full_state.get(piece.param, {}).items():
                if isinstance(value, torch.Tensor):
                    is_elementwise = value.shape == piece.param.shape
                    value = (piece.cut(value) if is_elementwise else value).clone()
                self.state[piece.values][name] = value
        self.frozen = {
            number: full_state[param]
            for number, param in enumerate(self.params)
            if not param.requires_grad and param in full_state
        }
        self.optimizer.state = defaultdict(dict)

    def adopt_frozen(self, frozen: dict[int, Any]) -> None:
        """Take the state of parameters that are not trained, by number."""
        self.frozen = frozen

    @contextmanager
    def stepping(self) -> Iterator[Callable[[], object]]:
        """Give the optimizer this rank's slices in the block, with their gradients and state."""
        groups = self.optimizer.param_groups
        full_params = [group["params"] for group in groups]
        if sum(map(len, full_params)) != len(self.params):
            raise InputError(
                "--shard optimizer: the optimizer has got other parameters since the run began",
                "give it all of them in build, or leave --shard out",
            )
        for piece in self.pieces:
            grad = piece.param.grad
            piece.values.grad = None if grad is None else piece.cut(grad)
        for group, pieces in zip(groups, self.pieces_by_group, strict=True):
            group["params"] = [piece.values for piece in pieces]
        empty_state = self.optimizer.state
        self.optimizer.state = self.state
        try:
            yield self.optimizer.step
        finally:
            self.optimizer.state = empty_state
            for group, params in zip(groups, full_params, strict=True):
                group["params"] = params
            for piece in self.pieces:
                piece.values.grad = None

    def gather(self) -> None:
        """Gather all slices of the parameters on every rank. All ranks must call this method."""
        for bucket in self.buckets:
            sent, gathered = self.buffers[bucket.like.dtype]
            bucket.gather(self.comm, sent, gathered)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state without the part that `slices` returns."""
        return {**self.optimizer.state_dict(), "state": dict(self.frozen)}

    def slices(self) -> dict[str, TensorSlice]:
        """Return this rank's part of the state, by its names in a snapshot."""
        slices = {}
        for piece in self.own_pieces:
            for key, value in self.state.get(piece.values, {}).items():
                name = f"{STATE_PREFIX}{OPTIMIZER_PREFIX}{piece.number}/{key}"
                if value.shape == piece.values.shape:
                    shape = list(piece.param.shape)
                    slices[name] = TensorSlice(value.reshape(-1), piece.lo, shape, flat=True)
                elif piece.lo == 0:  # what all pieces of a parameter have is written once
                    slices[name] = TensorSlice(
                        value.reshape(-1),
                        0,
                        list(value.shape),
                        flat=True,
                    )
        return slices

    def load_slices(self, reader: SliceReader) -> None:
        """Load this rank's part of the state that a snapshot has in slices."""
        keys: dict[int, list[str]] = defaultdict(list)
        for name in reader.names(self.snapshot_prefix):
            number, key = name.split("/")
            keys[int(number)].append(key)
        for piece in self.pieces:
            for key in keys[piece.number]:
                name = f"{self.snapshot_prefix}{piece.number}/{key}"
                shape = reader.shape(name)
                if shape == list(piece.param.shape):
                    values = reader.read_elements(
                        name,
                        piece.lo,
                        piece.hi,
                    ).view(piece.values.shape)
                    self.state[piece.values][key] = clone_with_strides(values, piece.values)
                elif shape:  # else a count of steps, which the optimizer has loaded
                    self.state[piece.values][key] = reader.read_tensor(name).to(piece.values.device)


def make_optimizer_shards(
    settings: Settings,
    optimizer: torch.optim.Optimizer,
    comm: Comm,
) -> OptimizerShards | None:
    """Make the shards of --shard optimizer; None for a single process that no other may join."""
    if settings.shard != "optimizer" or (comm.alone and settings.shard_copies == 1):
        return None
    return OptimizerShards(optimizer, comm, settings.shard_copies)


def validate_shard(job: Job, shard: str) -> None:
    """Raise InputError if --shard cannot be used with the job."""
    if shard != "none":
        validate_shardable(job.optimizer, shard)
    if shard == "full":
        validate_fully_shardable(job)


def validate_shardable(
    optimizer: torch.optim.Optimizer,
    shard: str = "optimizer",
) -> None:
    """Raise InputError for an optimizer whose step might change when its parameters are cut."""
    known = list(ELEMENTWISE_OPTIMIZERS)
    if shard == "optimizer":
        known += PARAMETERWISE_OPTIMIZERS
    for kind in map(type, list_optimizers(optimizer)):
        is_from_torch = f"{kind.__module__}.".startswith("torch.optim.")
        if not is_from_torch or kind.__name__ not in known:
            raise InputError(
                f"--shard {shard}: a step of {kind.__name__} on slices of its parameters may have"
                " another result",
                f"one of torch.optim's {', '.join(known)}, or leave --shard out",
            )


def find_elementwise_params(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    """Return the parameters that can be cut anywhere."""
    return {
        param
        for member in list_optimizers(optimizer)
        if type(member).__name__ in ELEMENTWISE_OPTIMIZERS
        for group in member.param_groups
        for param in group["params"]
    }


def restride_state(optimizer: torch.optim.Optimizer) -> None:
    """Give each state tensor the strides of its parameter."""
    for param, state in optimizer.state.items():
        for key, value in state.items():
            is_elementwise = isinstance(value, torch.Tensor) and value.shape == param.shape
            if is_elementwise and value.stride() != param.stride():
                state[key] = clone_with_strides(value, param)


def clone_with_strides(
    values: torch.Tensor,
    param: torch.Tensor,
) -> torch.Tensor:
    """Return a copy on the parameter's device, with the parameter's strides.

    A fused step goes through the parameter and its state in the order of their memory.
    """
    return torch.empty_like(param, dtype=values.dtype).copy_(values)
