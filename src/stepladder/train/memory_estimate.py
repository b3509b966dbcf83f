"""How much memory a step needs, computed before a run starts: `--dry-run`.

The job is built with weights that have a shape and no storage (torch's FakeTensor). One rank then
takes two steps with the code that trains, while the bytes of all tensors are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stepladder.core.plan import fuse_spans
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.data.sources import Batches, BatchSource, Request, TensorSource
from stepladder.rank.preemption import StopSignals
from stepladder.rank.torch_fixes import tree_map_only
from stepladder.train.checkpoint_blocks import checkpoint_blocks
from stepladder.train.comm import Comm
from stepladder.train.determinism import deterministic
from stepladder.train.fake_tensors import FakeModelBuilder, StorageTally, to_local
from stepladder.train.layout import find_layout
from stepladder.train.layout.base import StateLayout
from stepladder.train.layout.flat import Flat
from stepladder.train.pending import Pending
from stepladder.train.run_spec import RunSpec
from stepladder.train.state import TrainState
from stepladder.train.step_listener import LoopListener
from stepladder.train.trainer import TrainingLoop

ESTIMATED_STEPS = 2  # the optimizer makes its state in the first one


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that a process needs: of all processes, the one that needs most.

    Args:
        weights: Parameters and buffers.
        optimizer: The optimizer's state.
        data: The job's data, if they are tensors.
        peak: The most at any moment of training and evaluation, with all of the above.
    """

    weights: int
    optimizer: int
    data: int
    peak: int

    @property
    def transient(self) -> int:
        """Gradients, activations and partial sums, at the peak."""
        return self.peak - self.weights - self.optimizer - self.data


class FakeComm(Comm):
    """One rank of a world whose other ranks do not exist: its collectives move nothing."""

    def __init__(self, world: World, shares_memory: bool) -> None:
        super().__init__(world, torch.device("cpu"))
        self.shared_memory: Any = self if shares_memory and not self.alone else None

    def all_reduce(self, tensor: Tensor) -> Pending:
        return Pending(None)

    def all_to_all(self, *_: Any) -> Pending:
        return Pending(None)

    def all_gather(self, *_: Any) -> Pending:
        return Pending(None)

    def reduce_scatter(self, *_: Any) -> Pending:
        return Pending(None)

    def combine(self, *_: Any) -> Pending:
        return Pending(None)

    def allocate_vector(self, *_: Any) -> None:
        """Let the caller allocate a vector of its own, which takes as much memory."""

    def start_sum(self, values: list[float]) -> tuple[Pending, Callable[[], list[float]]]:
        return Pending(None), lambda: values

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.world.world_size

    def make_subgroup(self, labels: Sequence[Hashable]) -> Comm:
        return FakeComm(self.world.within_subgroup(labels), shares_memory=False)


class _RepeatedBatches:
    """The batches of one step, which are read once and then repeated without their values."""

    def __init__(self, source: BatchSource, requests: Iterable[Request]) -> None:
        with _open_batches(source, requests) as batches:
            self.batches_of_step = [(indices, batch) for indices, batch in batches]

    def __len__(self) -> int:
        return len(self.batches_of_step)

    def batches(self, requests: Iterable[Request]) -> Batches:
        """Yield fake batches for ever."""
        while True:
            for indices, batch in self.batches_of_step:
                yield indices, _without_values(batch)


@contextmanager
def _open_batches(source: BatchSource, requests: Iterable[Request]) -> Iterator[Batches]:
    """Read batches in a block, and close the reader at its end."""
    batches = source.batches(requests)
    try:
        yield batches
    finally:
        batches.close()


def _without_values(batch: Any) -> Any:
    """Return a batch of empty tensors: fake ones in the block of a FakeTensorMode."""

    def make_empty(tensor: Tensor) -> Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )

    return tree_map_only(Tensor, make_empty, batch)


class FakeSession(LoopListener):
    """The parts of a Session that a TrainingLoop uses; it writes nothing."""

    has_values = False
    stopped = False
    is_epoch_end = False
    is_full = False

    def __init__(self, spec: RunSpec, comm: Comm) -> None:
        self.job = spec.job
        self.spec = spec
        self.comm = comm
        self.recorder = self
        self.journal = self
        scaler = torch.amp.GradScaler("cpu", enabled=spec.settings.precision == "fp16")
        if spec.settings.checkpoint_blocks:
            checkpoint_blocks(spec.job)
        layout = find_layout(spec.settings).choose(spec.settings, spec.job, comm)
        if layout is Flat:  # its vectors are views, whose addresses fake tensors do not have
            layout = StateLayout
        self.state = TrainState(spec.job, layout(spec.job, comm), scaler)

    def record_samples(self, indices: Any) -> None: ...

    def record_step(self, loss: Any, counted: float, lr: float, norm: Any = None) -> None: ...

    def open(self, votes: list[bool]) -> None: ...

    def commit(self) -> None: ...

    def is_flush_due(self, now: float) -> bool:
        return False

    def is_snapshot_due(self, now: float) -> bool:
        return False


def estimate_memory(builder: FakeModelBuilder, spec: RunSpec, comm: Comm) -> MemoryEstimate:
    """Return the memory that a rank needs in a run.

    Args:
        builder: Has built the job of `spec`.
        spec: The run.
        comm: The rank.

    Returns:
        The rank's memory.

    Raises:
        Exception: Whatever the job raises when it reads a number of a tensor that has none.
    """
    data_tensors = _find_data_tensors(spec)
    storage_bytes = {t.data_ptr(): t.untyped_storage().nbytes() for t in data_tensors}
    data_bytes = sum(storage_bytes.values())
    spec = _make_dry_spec(spec, comm.world)
    model = spec.job.model
    eval_batch = _read_first_eval_batch(spec)
    full_bytes = 0  # of weights that are not cut into rows yet
    if spec.settings.shard == "full":
        full_bytes = sum(weight.nbytes for weight in model.parameters())
    tally = StorageTally()
    with _fake_process_group(spec.settings, comm), tally, ExitStack() as stack:
        session: Any = FakeSession(spec, comm)
        stack.enter_context(builder.mode)
        stack.enter_context(deterministic(spec.settings.sync == "exact", comm.device))
        tensors = (*model.parameters(), *model.buffers())
        weights = [to_local(tensor) for tensor in tensors]
        tally.add(weights)
        weight_bytes = _count_storage_bytes(weights)
        tally.reset_peak()  # fully_shard cuts weights into rows in main memory
        with TrainingLoop(session, StopSignals()) as loop:
            for _ in range(ESTIMATED_STEPS):
                loop.step()
        state = session.state.layout.optimizer_state
        state_bytes = _count_state_bytes(state)
        if eval_batch is not None and spec.job.metrics is not None:
            model.eval()
            with torch.no_grad():
                spec.job.metrics(model, _without_values(eval_batch))
            model.train()
    state.clear()
    peak = max(tally.peak, full_bytes) + data_bytes
    return MemoryEstimate(weight_bytes, state_bytes, data_bytes, peak)


def _make_dry_spec(spec: RunSpec, world: World) -> RunSpec:
    """Return the run with the batches of its first step, and without run-time checks."""
    settings = replace(spec.settings, fail_at=(), guard_every=None, replay_every=None)
    spans = spec.plan.share(0, world.rank, world.world_size)
    if not spec.by_microbatch:
        spans = fuse_spans(spans)
    batches = _RepeatedBatches(spec.train_source, spec.plan.requests(0, spans))
    return replace(spec, settings=settings, train_source=batches)


@contextmanager
def _fake_process_group(settings: Settings, comm: Comm) -> Iterator[None]:
    """For --shard full, provide a process group whose other ranks do not exist.

    fully_shard accepts no Comm. This rank is the first of the group, which has the most rows of
    each weight, whatever its share of the batches. A rank with fewer rows pads them; the padding
    would count twice, since fake tensors have no address.
    """
    if settings.shard != "full":
        yield
        return
    from stepladder.rank.torch_fixes import FakeStore  # late: torch's DTensor takes a second

    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=comm.world.world_size
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _count_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each storage once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def _count_state_bytes(states: Any) -> int:
    """Return the bytes of the tensors in an optimizer's state."""
    total = 0
    for state in states.values():
        for value in state.values():
            if isinstance(value, Tensor):
                total += to_local(value).nbytes
    return total


def _read_first_eval_batch(spec: RunSpec) -> Any:
    """Return the first batch of an evaluation, or None if there is no evaluation."""
    source = spec.eval_source
    if source is None or not len(source):
        return None
    size = min(len(source), spec.job.eval_batch)
    with _open_batches(source, [(0, np.arange(size))]) as batches:
        return next(batches)[1]


def _find_data_tensors(spec: RunSpec) -> list[Tensor]:
    """Return the tensors of the job's data, which each process holds completely."""
    tensors: list[Tensor] = []
    for source in (spec.train_source, spec.eval_source):
        if isinstance(source, TensorSource):
            tensors += source.tensors
    return tensors
