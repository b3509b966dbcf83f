"""`--shard optimizer`: each rank holds the optimizer's state of its slices, and steps those.

Stage 1 of ZeRO (Rajbhandari et al., SC 2020, section 5.1). Every rank has the complete gradient, so
the norm by which it is clipped has the same bits as without shards. An optimizer that computes each
element by itself also steps a slice to the same bits. After the step, every rank gathers the new
values of all parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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
from stepladder.train.layout.base import StateLayout
from stepladder.train.layout.flat import Flat
from stepladder.train.layout.pieces import (
    ShardBucket,
    ShardPiece,
    clone_with_strides,
    partition,
    slices_of_rank,
    substitute_params,
)
from stepladder.train.optimizers import (
    ELEMENTWISE_OPTIMIZERS,
    PARAMETERWISE_OPTIMIZERS,
    find_elementwise_params,
    validate_optimizer,
    validate_unobserved,
)
from stepladder.train.phases import WAITING_FOR_RANKS
from stepladder.train.sync.ddp import make_fixed_buckets

PREFIX = STATE_PREFIX + OPTIMIZER_PREFIX


class OptimizerSlices:
    """An optimizer whose state is cut into a slice for each rank of one group.

    Outside of `stepping` the optimizer has its complete parameters, and no state. Each rank has one
    slice, and with copies=2 also the slice of the rank before it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, comm: Comm, copies: int = 1) -> None:
        self.optimizer = optimizer
        self.comm = comm
        self.rank = comm.world.rank
        self.ranks = comm.world.world_size
        self.params = [param for group in optimizer.param_groups for param in group["params"]]
        self.buckets = self._make_buckets()
        self.buffers = self._make_buffers()
        # The pieces of this rank's own slice.
        self.own_pieces = self.pieces_of_slice(self.rank)
        # The pieces of all slices of this rank.
        self.pieces = [
            piece
            for index in slices_of_rank(self.rank, self.ranks, copies)
            for piece in self.pieces_of_slice(index)
        ]
        self.pieces_of_param: dict[nn.Parameter, list[ShardPiece]] = defaultdict(list)
        for piece in self.pieces:
            self.pieces_of_param[piece.param].append(piece)
        self.values_by_group = [
            [
                piece.values
                for param in group["params"]
                for piece in self.pieces_of_param.get(param, [])
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

    def _make_buffers(self) -> dict[torch.dtype, tuple[Tensor, Tensor]]:
        """Make the two buffers of `gather` for each dtype, which its buckets share."""
        buffers = {}
        # The widest bucket comes last, so that its buffers are the ones that stay.
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
                if isinstance(value, Tensor):
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
        """Put this rank's slices, with gradients and state, in place of the optimizer's parameters.

        Yields:
            The function that takes the step.

        Raises:
            InputError: The optimizer has got a hook, or a parameter another memory, since.
        """
        validate_unobserved(self.optimizer, "optimizer")
        if not all(piece.lies_in_param for piece in self.pieces):
            raise InputError(
                "--shard optimizer: the memory of a weight was replaced, as by weight.data = copy",
                "weight.data.copy_(copy), or leave --shard out",
            )
        for piece in self.pieces:
            grad = piece.param.grad
            piece.values.grad = None if grad is None else piece.cut(grad)
        try:
            with substitute_params(self.optimizer, self.values_by_group, self.state) as step:
                yield step
        finally:
            for piece in self.pieces:
                piece.values.grad = None

    def gather(self) -> None:
        """Gather all slices of the parameters on every rank. All ranks must call this method."""
        for bucket in self.buckets:
            sent, gathered = self.buffers[bucket.like.dtype]
            bucket.gather(self.comm, sent, gathered)

    def slices(self) -> dict[str, TensorSlice]:
        """Return this rank's part of the state, by its names in a snapshot."""
        slices = {}
        for piece in self.own_pieces:
            for key, value in self.state.get(piece.values, {}).items():
                name = f"{PREFIX}{piece.number}/{key}"
                if value.shape == piece.values.shape:
                    shape = list(piece.param.shape)
                    slices[name] = TensorSlice(value.reshape(-1), piece.lo, shape, flat=True)
                elif piece.lo == 0:  # a value that all pieces share is written once
                    slices[name] = TensorSlice(value.reshape(-1), 0, list(value.shape), flat=True)
        return slices

    def load_slices(self, reader: SliceReader) -> None:
        """Load this rank's part of the state that a snapshot has in slices."""
        keys: dict[int, list[str]] = defaultdict(list)
        for name in reader.names(PREFIX):
            number, key = name.split("/")
            keys[int(number)].append(key)
        for piece in self.pieces:
            for key in keys[piece.number]:
                name = f"{PREFIX}{piece.number}/{key}"
                shape = reader.shape(name)
                if shape == list(piece.param.shape):
                    values = reader.read_elements(name, piece.lo, piece.hi).view(piece.values.shape)
                    self.state[piece.values][key] = clone_with_strides(values, piece.values)
                elif shape:  # a value without shape is a count of steps, which is loaded already
                    self.state[piece.values][key] = reader.read_tensor(name).to(piece.values.device)


class Zero1(StateLayout):
    """Each rank holds the optimizer's state of its slice, and steps that slice."""

    has_parts = True
    slice_prefix = PREFIX
    copies = 1

    def __init__(self, job: Job, comm: Comm) -> None:
        super().__init__(job, comm)
        self.optimizer_slices = OptimizerSlices(job.optimizer, comm, self.copies)

    @classmethod
    def choose(cls, settings: Settings, job: Job, comm: Comm) -> type[StateLayout]:
        """Return this class, unless a single process needs no slices."""
        return Flat.choose(settings, job, comm) if comm.alone else cls

    @staticmethod
    def validate(job: Job) -> None:
        """Raise InputError for an optimizer whose step on slices may have another result."""
        validate_optimizer(
            job.optimizer, [*ELEMENTWISE_OPTIMIZERS, *PARAMETERWISE_OPTIMIZERS], "optimizer"
        )

    def replace_slices(self, optimizer_slices: OptimizerSlices) -> None:
        """Use the slices of another group."""
        self.optimizer_slices = optimizer_slices

    @contextmanager
    def stepping(self) -> Iterator[Callable[[], object]]:
        """Put this rank's slices in place of the optimizer's parameters, in the block."""
        with self.optimizer_slices.stepping() as step:
            yield step

    def gather(self) -> None:
        """Gather all slices of the parameters on every rank."""
        with self.comm.phases.timer(WAITING_FOR_RANKS):
            self.optimizer_slices.gather()

    @property
    def optimizer_state(self) -> Any:
        """The state of this rank's slices, by piece."""
        return self.optimizer_slices.state

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state without what is in slices."""
        return {**self.optimizer.state_dict(), "state": dict(self.optimizer_slices.frozen)}

    def adopt_state(self) -> None:
        """Keep this rank's slices of the optimizer's whole state."""
        self.optimizer_slices.adopt_state()

    def slices(self) -> dict[str, TensorSlice]:
        """Return this rank's own slice of the state."""
        return self.optimizer_slices.slices()

    def load_slices(self, reader: SliceReader) -> None:
        """Load this rank's slices of the state."""
        self.optimizer_slices.load_slices(reader)
