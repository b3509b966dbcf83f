"""How a job's weights, gradients and optimizer state lie on the ranks.

This base class is the layout `whole`: every rank holds everything. A sharding variant is a subclass
in a file of its own, and a row of `LAYOUTS` in core/settings.py. The training loop, the snapshots
and the recovery call the methods below, and never ask which layout it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from stepladder.core.errors import InputError
from stepladder.core.plan import Span
from stepladder.core.settings import Settings
from stepladder.storage.snapshot_slices import SliceReader, TensorSlice
from stepladder.train.comm import Comm
from stepladder.train.job import Job
from stepladder.train.layout.pieces import clone_with_strides
from stepladder.train.optimizers import load_state
from stepladder.train.sync import make_sync
from stepladder.train.sync.base import Sync

HIDDEN_STATE = (
    "--shard: the optimizer's state is read outside of its step, where each rank has a part of it",
    "leave --shard out; or a loss and metrics of the weights alone",
)
Holders = tuple[int, list[int]]  # the number of an earlier group, and who sends each slice of it


class HiddenState:
    """Stands for an optimizer's state where a job must not read it: each use is refused."""

    def _refuse(self, *_: Any) -> Any:
        raise InputError(*HIDDEN_STATE)

    __getattr__ = __getitem__ = __iter__ = __len__ = __contains__ = _refuse


class StateLayout:
    """Every rank holds the whole weights, gradients and optimizer state.

    The constructor of a layout distributes the job over the ranks: all ranks call it together, with
    the same weights, before the optimizer has any state.
    """

    # Whether a pass gathers weights, so that all ranks must make equally many passes, and each rank
    # has rows of the weights only.
    gathers_weights = False
    # Whether each rank writes a part of a snapshot.
    has_parts = False
    # Whether a step can be completed by the remaining ranks, if some are lost after the update and
    # before `gather`.
    completes_steps = False
    # The names that `load_slices` reads from a snapshot begin with it; None if the whole state is
    # read.
    slice_prefix: str | None = None

    def __init__(self, job: Job, comm: Comm) -> None:
        self.model = job.model
        self.optimizer = job.optimizer
        self.comm = comm
        # Added to the manifest of a snapshot.
        self.manifest_entry: dict[str, Any] = {}

    # -- before the layout is made -----------------------------------------------------------------

    @classmethod
    def choose(cls, settings: Settings, job: Job, comm: Comm) -> type[StateLayout]:
        """Return the class to use on these ranks: this one, or a simpler one that suffices."""
        return cls

    @staticmethod
    def validate(job: Job) -> None:
        """Raise InputError if the job cannot be laid out so."""

    @staticmethod
    def move_model(job: Job, comm: Comm) -> None:
        """Move the model to its device."""
        job.model.to(comm.device)

    # -- in each step ------------------------------------------------------------------------------

    def microbatches(self, spans_by_rank: list[list[Span]]) -> list[Span]:
        """Return the passes that this rank makes in a step, from the share of each rank."""
        return spans_by_rank[self.comm.world.rank]

    def make_sync(self, mode: str, extra_size: int) -> Sync:
        """Return what adds the gradients, and `extra_size` other values, over the ranks."""
        return make_sync(mode, self.model, self.comm, extra_size)

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradient to a norm of at most `max_norm`; return its norm before, shape ()."""
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).detach()

    def step(self, scaler: torch.amp.GradScaler) -> bool:
        """Step the optimizer.

        Returns:
            False if the scaler skipped the step because the gradient is too large for fp16. All
            ranks have the same gradient, so all of them skip it.
        """
        with torch.no_grad(), self.stepping() as step:  # a hook may compute with the weights
            if not scaler.is_enabled():
                step()
                return True
            scale = scaler.get_scale()
            scaler.step(self.optimizer)
            scaler.update()
            return scaler.get_scale() >= scale

    @contextmanager
    def stepping(self) -> Iterator[Callable[[], object]]:
        """Give the optimizer what this rank steps, for the length of the block."""
        yield self.optimizer.step

    @contextmanager
    def hiding_state(self) -> Iterator[None]:
        """Refuse that a loss or a metric reads a part of the optimizer's state in the block."""
        state: Any = self.optimizer.state
        hidden: Any = HiddenState()
        if self.has_parts:
            self.optimizer.state = hidden
        try:
            yield
        finally:
            self.optimizer.state = state

    def gather(self) -> None:
        """Gather the weights that other ranks have stepped. All ranks must call this method."""

    def explain(self, error: Exception) -> None:
        """Raise InputError for an error in a step that is due to this layout."""

    def end_step(self) -> None:
        """Forget what the step under way needed: all weights are stepped and gathered."""

    def interrupt_step(self) -> None:
        """Keep what recovery needs of a step in which ranks were lost."""

    # -- snapshots ---------------------------------------------------------------------------------

    @property
    def optimizer_state(self) -> Any:
        """The part of the optimizer's state that this rank holds, by parameter."""
        return self.optimizer.state

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state without the part that `slices` returns."""
        return self.optimizer.state_dict()

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Load the optimizer's state, whole or without slices, from any layout."""
        load_state(self.optimizer, stored)
        for param, state in self.optimizer.state.items():
            for key, value in state.items():
                is_elementwise = isinstance(value, Tensor) and value.shape == param.shape
                if is_elementwise and value.stride() != param.stride():
                    state[key] = clone_with_strides(value, param)
        self.adopt_state()

    def adopt_state(self) -> None:
        """Lay out the optimizer's whole state, which was loaded."""

    def slices(self) -> dict[str, TensorSlice]:
        """Return this rank's slices of weights and state, by their names in a snapshot."""
        return {}

    def load_slices(self, reader: SliceReader) -> None:
        """Load this rank's slices of the state from a snapshot."""

    # -- recovery, by the ranks that remain after a loss, in this order ----------------------------

    def find_holders(self) -> Holders | None:
        """Find out who holds the state that is to be laid out again. A collective.

        Returns:
            The holders, for `redistribute`; None where every rank holds everything.

        Raises:
            StateLost: No remaining rank holds some slice.
        """
        return None

    def get_catch_up_state(self) -> tuple[dict[str, Tensor], list[Any] | None]:
        """Return what a rank that is a step behind needs for `catch_up`.

        Returns:
            The weights that it has to copy, and the step that it has to take itself.
        """
        return self.model.state_dict(), None

    def catch_up(
        self, weights: dict[str, Tensor], step: list[Any] | None, optimizer_state: dict[str, Any]
    ) -> None:
        """Bring this rank to the step of the rank whose state this is."""
        self.model.load_state_dict(weights)
        self.load_state_dict(optimizer_state)

    def redistribute(self, holders: Holders | None) -> None:
        """Lay out the state over the ranks of the new group. A collective."""

    def finish_recovery(self) -> bool:
        """Drop what recovery needed, and return whether a step's end is still to be done."""
        return False
