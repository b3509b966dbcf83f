"""What a step needs of memory, found out before anything starts: a run's own step on tensors
without storage.

The job is built with weights that have a shape and nothing else (torch's FakeTensor). Then one rank
takes two steps, by the very code that trains. Each tensor that comes and goes is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from stepladder.core.plan import fuse_spans
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.data.sources import Batches, Request, Source, TensorSource
from stepladder.rank.preemption import StopSignals
from stepladder.rank.torch_fixes import tree_map_only
from stepladder.train.checkpoint_blocks import checkpoint_blocks
from stepladder.train.comm import Comm, Pending
from stepladder.train.determinism import deterministic
from stepladder.train.fake_tensors import FakeModelBuilder, StorageTally, to_local
from stepladder.train.run_spec import RunSpec
from stepladder.train.state import TrainState
from stepladder.train.trainer import TrainingLoop
from stepladder.train.weight_average import WeightAverage

STEPS = 2  # the optimizer makes its state in the first
MAX_RANKS_SHARING_MEMORY = 8  # ranks that share memory on one machine


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that one process needs, of the one that needs most.

    weights: parameters and buffers.  optimizer: its state.  data: of the job's, where they are
    tensors. peak: the most at any moment of training and evaluation; with all of these."""

    weights: int
    optimizer: int
    data: int
    peak: int

    @property
    def transient(self) -> int:
        """Gradients, activations, and what is added up, at the peak."""
        return self.peak - self.weights - self.optimizer - self.data


class FakeComm(Comm):
    """One rank of a world whose other ranks are not there: its collectives move nothing."""

    def __init__(self, world: World, shares_memory: bool) -> None:
        super().__init__(world, torch.device("cpu"))
        self.shared_memory: Any = self if shares_memory and not self.alone else None

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
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
        """Shared or not, it takes as much."""

    def start_sum(self, values: list[float]) -> tuple[Pending, Callable[[], list[float]]]:
        return Pending(None), lambda: values

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data] * self.world.world_size


class RepeatedBatches:
    """The passes of one step, which are read once, again and again: their forms, without what they
    hold.
    """

    def __init__(self, source: Source, requests: Iterable[Request]) -> None:
        with closing_batches(source, requests) as batches:
            self.passes = [(indices, batch) for indices, batch in batches]

    def __len__(self) -> int:
        return len(self.passes)

    def batches(self, requests: Iterable[Request]) -> Batches:
        while True:
            yield from ((indices, without_values(batch)) for indices, batch in self.passes)


@contextmanager
def closing_batches(source: Source, requests: Iterable[Request]) -> Iterator[Batches]:
    batches = source.batches(requests)
    try:
        yield batches
    finally:
        batches.close()


def without_values(batch: Any) -> Any:
    """The same tensors, where a FakeTensorMode is on: of their shapes and types."""
    return tree_map_only(
        torch.Tensor,
        lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device),
        batch,
    )


class FakeSession:
    """A session that keeps nothing, and never ends a step with more than the step: what a TrainingLoop asks
    of one.
    """

    stopped = is_epoch_end = is_full = False

    def __init__(self, spec: RunSpec, comm: Comm) -> None:
        self.job, self.spec, self.comm, self.recorder, self.journal = (
            spec.job,
            spec,
            comm,
            self,
            self,
        )
        self.state = TrainState(
            spec.job, torch.amp.GradScaler("cpu", enabled=spec.settings.precision == "fp16")
        )
        if spec.settings.checkpoint_blocks:
            checkpoint_blocks(spec.job)
        if spec.settings.shard != "none":
            self.state.shard(spec.settings, comm)
        elif spec.job.ema_decay is not None:
            self.state.average = WeightAverage(spec.job.model, spec.job.ema_decay)

    def record_samples(self, indices: Any) -> None: ...

    def record_step(self, loss: Any, counted: float, lr: float, norm: Any = None) -> None: ...

    def open(self, votes: list[bool]) -> None: ...

    def commit(self) -> None: ...

    def is_flush_due(self, now: float) -> bool:
        return False

    def is_snapshot_due(self, now: float) -> bool:
        return False


def estimate_memory(weightless: FakeModelBuilder, spec: RunSpec, comm: Comm) -> MemoryEstimate:
    """What the rank of `comm` needs in a run of this spec, whose job `weightless` has built.

    Raises whatever the job raises where it reads a number of a tensor that has none.
    """
    data = sum(
        {t.data_ptr(): t.untyped_storage().nbytes() for t in find_data_tensors(spec)}.values()
    )
    spans = spec.plan.share(0, comm.world.rank, comm.world.world_size)
    requests = [
        (0, spec.plan.indices(0, span))
        for span in (spans if spec.by_microbatch else fuse_spans(spans))
    ]
    passes = RepeatedBatches(spec.train_source, requests)
    quiet = replace(spec.settings, fail_at=(), guard_every=None, replay_every=None)
    spec, optimizer, tally = (
        replace(spec, settings=quiet, train_source=passes),
        spec.job.optimizer,
        StorageTally(),
    )
    first, model = read_first_eval_batch(spec), spec.job.model
    whole = sum(weight.nbytes for weight in model.parameters()) if quiet.shard == "full" else 0
    with fake_process_group(quiet, comm), tally, ExitStack() as stack:
        session: Any = FakeSession(spec, comm)
        stack.enter_context(weightless.fake)
        stack.enter_context(deterministic(quiet.sync == "exact", comm.device))
        weights = [to_local(weight) for weight in (*model.parameters(), *model.buffers())]
        tally.add(weights)
        size = sum(
            {id(one): one.nbytes() for one in map(torch.Tensor.untyped_storage, weights)}.values()
        )
        tally.peak = tally.now  # from here on; what fully_shard cuts is in main memory
        with TrainingLoop(session, StopSignals()) as loop:
            for _ in range(STEPS):
                loop.step()
            shards = None if session.state.full_shards else session.state.shards
            states = optimizer.state if shards is None else shards.state
            state = count_state_bytes(states)
        if first is not None and spec.job.metrics is not None:
            model.eval()
            with torch.no_grad():
                spec.job.metrics(model, without_values(first))
            model.train()
    states.clear()
    return MemoryEstimate(size, state, data, max(tally.peak, whole) + data)


@contextmanager
def fake_process_group(settings: Settings, comm: Comm) -> Iterator[None]:
    """For --shard full a process group whose other ranks are not there: fully_shard takes no other
    Comm.

    In it this rank is the first, which has the most rows of each weight, whatever its share of the
    batches. Where a rank has fewer, fully_shard fills them up, and twice where tensors have no
    address."""
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


def count_state_bytes(states: Any) -> int:
    """Of the tensors in an optimizer's state, by parameter."""
    values = [
        value
        for state in states.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return sum(to_local(value).nbytes for value in values)


def read_first_eval_batch(spec: RunSpec) -> Any:
    """The first batch that an evaluation takes; None where there is none."""
    source = spec.eval_source
    if source is None or not len(source):
        return None
    with closing_batches(
        source, [(0, np.arange(min(len(source), spec.job.eval_batch)))]
    ) as batches:
        return next(batches)[1]


def find_data_tensors(spec: RunSpec) -> list[torch.Tensor]:
    """The job's data, where each process holds all of it."""
    sources = [
        source
        for source in (spec.train_source, spec.eval_source)
        if isinstance(source, TensorSource)
    ]
    return [tensor for source in sources for tensor in source.tensors]
