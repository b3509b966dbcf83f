"""The loop that everyone reads first: `fit` takes steps, `step` takes microbatches.

What is computed comes from the plan, who computes it from the world; the trainer's own state is the
number of steps done. Everything random is keyed, so a snapshot holds no per-rank state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch

from stepladder.core.errors import PeerLost, RanksDiffer
from stepladder.core.order import key
from stepladder.core.plan import Span, fuse, pass_key, with_idle
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.data.source import Request
from stepladder.rank import progress
from stepladder.rank.error_record import note_step
from stepladder.rank.preemption import StopSignals, kill_once
from stepladder.rank.progress import PASS, STEP
from stepladder.storage.rundir import naming_storage
from stepladder.train.comm import Comm
from stepladder.train.cuda_graphs import make_loss_programs
from stepladder.train.determinism import (
    ForwardBuffers,
    RunningStatistics,
    deterministic,
    find_batch_norms,
)
from stepladder.train.group_setup import pick_device
from stepladder.train.job import Job, Recipe
from stepladder.train.metrics.loggers import Logger
from stepladder.train.phases import (
    BACKWARD_PASS,
    BETWEEN_STEPS,
    FORWARD_PASS,
    READING,
    STEPPING,
    UPDATING,
    WAITING,
)
from stepladder.train.process_group import process_group
from stepladder.train.recompute_check import RecomputeCheck
from stepladder.train.recovery import MembershipChange
from stepladder.train.replica_check import ReplicaCheck, fingerprint_order
from stepladder.train.return_values import parse_loss
from stepladder.train.run_spec import RunSpec
from stepladder.train.session import Session
from stepladder.train.state import TrainResult
from stepladder.train.sync import make_sync
from stepladder.train.sync.base import Backward, StepResult
from stepladder.train.sync.exact import ExactSync
from stepladder.train.weight_update import WeightUpdate

STOP, SNAPSHOT, FLUSH, REGROUP = range(4)  # what ranks vote on at each step's end
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains a job. `fit()` resumes from the run directory by itself and returns the result.

    recipe: the job's name and the Config it was built with; a resumed run must have the same. comm:
    the ranks to train with; by default those that this process finds itself in (torchrun, Slurm,
    the script's own process group, or alone).  loggers: get the curves besides TensorBoard, on rank
    0."""

    def __init__(
        self,
        job: Job,
        settings: Settings,
        recipe: Recipe | None = None,
        comm: Comm | None = None,
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.job, self.settings, self.recipe = job, settings, recipe or Recipe()
        self.comm, self.loggers = comm, loggers

    def fit(self) -> TrainResult:
        """Train to the end, or to a stop signal.

        Raises InputError for bad settings, before anything is written.
        """
        with self._ranks() as comm, naming_storage(self.settings.run_dir), StopSignals() as stop:
            spec = RunSpec.make(self.job, self.settings, self.recipe, comm)
            with Session(spec, comm, self.loggers) as session:
                if session.stored_result is not None:
                    return session.stored_result
                with deterministic(self.settings.sync == "exact", comm.device):
                    while session.journal.pending_actions is not None or not session.is_over:
                        try:
                            with TrainingLoop(session, stop) as loop:
                                loop.end_interrupted_step()
                                while not session.is_over:
                                    loop.step()
                        except (PeerLost, MembershipChange) as reason:
                            session.regroup(reason)
                return session.finish(stop.late)

    def _ranks(self) -> AbstractContextManager[Comm]:
        if self.comm is not None:
            return nullcontext(self.comm)
        world = World.detect()
        return process_group(world, pick_device(self.settings.device, world), self.settings.timeout)


class TrainingLoop:
    """The steps of one attempt. `step()` takes the next; what it would decide anew each time is
    decided here.
    """

    def __init__(self, session: Session, stop: StopSignals) -> None:
        self.session, self.stop = session, stop
        self.job, self.spec, self.comm, self.state = (
            session.job,
            session.spec,
            session.comm,
            session.state,
        )
        self.model, self.optimizer = self.job.model, self.job.optimizer
        self.plan, self.settings, self.by_microbatch = (
            self.spec.plan,
            self.spec.settings,
            self.spec.by_microbatch,
        )
        self.phase, self.words = self.comm.phases.of, self.comm.progress.words
        self.scales = self.state.scaler.is_enabled()
        self.on_host = self.comm.device.type == "cpu"  # where it costs nothing to read a number
        if not self.model.training:  # else layers that the user froze with eval() stay so
            self.model.train()
        norms = find_batch_norms(self.model)
        own = () if self.by_microbatch else [b for layer in norms for b in layer.buffers()]
        self.replicas = ReplicaCheck(self.model, self.optimizer, self.comm, own)
        self.statistics = RunningStatistics(self.model) if self.by_microbatch and norms else None
        # With microbatches, each one's loss and batch statistics are added in the way of its
        # gradient.
        extra = (1 + (self.statistics.size if self.statistics else 0)) if self.by_microbatch else 0
        self.sync = make_sync(
            self.settings.sync, self.model, self.comm, extra, self.state.full_shards is not None
        )
        self.update = WeightUpdate(self.spec, self.state, self.sync)
        self.full_spans, self.last_spans = map(self._share, (0, -1))
        self.fail_steps = {
            step for rank, step in self.settings.fail_at if rank == self.comm.world.rank
        }
        self.base_key = key(self.plan.seed, "pass")
        self.generator = torch.default_generator
        if self.comm.device.type == "cuda":
            self.generator = torch.cuda.default_generators[torch.cuda.current_device()]
        dtype = PRECISIONS.get(self.settings.precision)
        self.autocast = (
            torch.autocast(self.comm.device.type, dtype) if dtype is not None else nullcontext()
        )
        passes = self.plan.microbatches(0) if self.by_microbatch else self.full_spans
        self.losses = make_loss_programs(self.job.loss, self.settings, passes)
        self.buffers = ForwardBuffers(self.model) if self.settings.sync == "exact" else None
        self.replay: RecomputeCheck | None = None
        if self.settings.replay_every is not None and isinstance(self.sync, ExactSync):
            self.replay = RecomputeCheck(self.spec, self.comm, self.sync, self._pass)
        self.batches = self.spec.train_source.batches(self._requests(self.state.step))

    def __enter__(self) -> TrainingLoop:
        if self._replicas_due:
            self._check_replicas(self.state.step)
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        note_step(error, self.state.step + 1)
        self.sync.close()
        self.batches.close()  # ends the workers of a map-style Dataset
        if isinstance(error, (PeerLost, RanksDiffer)):  # others may take the step again
            if self.statistics:
                self.statistics.cancel()
            if self.state.shard_replicas is not None:
                self.state.shard_replicas.copy_gradients()
            for param in self.model.parameters():
                param.grad = None

    def _share(self, step: int) -> list[Span]:
        world, cut = self.comm.world, (list if self.by_microbatch else fuse)
        size, in_rounds = world.world_size, self.settings.deals_in_rounds
        shares = [cut(self.plan.share(step, rank, size, in_rounds)) for rank in range(size)]
        return (
            shares[world.rank]
            if self.state.full_shards is None
            else with_idle(shares[world.rank], shares)
        )

    def _spans(self, step: int) -> list[Span]:
        """This rank's passes of one step; an epoch's last batch may be cut differently from the
        others.
        """
        return self.last_spans if (step + 1) % self.plan.steps_per_epoch == 0 else self.full_spans

    def _requests(self, first: int) -> Iterator[Request]:
        """What this rank reads, from step `first` to the end of the run."""
        for step in range(first, self.spec.num_steps):
            for span in self._spans(step):
                yield self.plan.epoch_of_step(step), self.plan.indices(step, span)

    def end_interrupted_step(self) -> None:
        """What is left to do of a step that ranks were lost in."""
        if self.session.journal.pending_actions is not None:
            self._end_step(self.session.journal.pending_actions)

    def step(self) -> None:
        """One optimizer step over one global batch, and what ranks agree to do after it."""
        with self.phase(STEPPING):
            spans = self._spans(self.state.step)
            self.words[STEP] = self.state.step + 1
            passes = len(self.plan.microbatches(self.state.step)) if self.by_microbatch else 1
            self.sync.begin(spans[0].number if spans else 0, len(spans), passes)
            if self.statistics:
                self.statistics.begin()
            loss_sum, count, read = None, 0.0, []
            replay = (
                self.replay
                if self.replay is not None and self.replay.is_due(self.state.step)
                else None
            )
            backward = replay.watching_backward(self.state.step) if replay else self.sync.backward
            for span in spans:
                with self.phase(READING):
                    indices, batch = next(self.batches)
                read += [indices] if len(span) else []
                loss, counted = self._pass(span, batch, backward)
                loss_sum = loss if loss_sum is None else loss_sum + loss
                count += counted
            self.session.recorder.record_samples(read)
            with self.phase(WAITING):
                agreed = self._meet(count, loss_sum)
            if replay:  # before this gradient moves any weight
                replay.compare(self.state.step)
            with self.phase(UPDATING):
                lr, norm = self._update(agreed)
            whole = agreed.loss
            if agreed.extra is not None:
                whole = agreed.extra[0].item() if self.on_host else agreed.extra[0].clone()
            self.session.recorder.step(whole, agreed.total_count, lr, norm)
            if (
                self.state.shard_replicas is not None
            ):  # from here on it can be ended without ranks that are lost
                self.session.journal.open(agreed.votes)
            if self.state.shards is not None:
                with self.phase(WAITING):
                    self.state.shards.gather()
            self.state.finish_step()
        self._end_step(agreed.votes)

    def _end_step(self, votes: list[bool]) -> None:
        """A step is done: what comes before the next one."""
        if (
            True in votes
            or self.session.recorder.is_full
            or self.session.is_epoch_end
            or self._replicas_due
        ):
            self.session.journal.open(votes)
            with self.phase(BETWEEN_STEPS):
                self._between_steps(votes)
        self.session.journal.close()
        if votes[REGROUP] and not self.session.is_over:
            raise MembershipChange

    def _pass(self, span: Span, batch: Any, backward: Backward) -> tuple[torch.Tensor, float]:
        """Forward and backward of one microbatch (or one share): its loss sum, and what it counts."""
        self.words[PASS] += 1
        samples = len(span)
        with self.phase(FORWARD_PASS):
            self.generator.manual_seed(pass_key(self.base_key, self.state.step, span.number))
            with self.autocast:
                result = self.losses.get(samples, self.job.loss)(self.model, batch)
            if self.buffers is not None:
                self.buffers.validate_unwritten()
        with self.phase(BACKWARD_PASS):
            loss, count = parse_loss(result, samples)
            loss, count = (loss, count) if samples else (loss * 0, 0.0)  # an idle one
            extra = None
            if self.by_microbatch:
                extra = loss.detach()
                if self.statistics:
                    extra = torch.cat(
                        [extra.reshape(1).float(), self.statistics.capture() * samples]
                    )
            backward(self.state.scaler.scale(loss) if self.scales else loss, count, extra)
        return loss.detach(), count

    def _meet(self, count: float, loss: torch.Tensor | None) -> StepResult:
        """Add the gradients over ranks, and vote. A signal is anybody's; the time limit is the
        first rank's, whose word all launchers read."""
        if self.state.step + 1 in self.fail_steps:
            kill_once(self.settings.run_dir, self.comm.world.rank, self.state.step + 1)
        now = perf_counter()
        stop = (self.comm.world.is_first and self.stop.is_late(now)) or self.stop.asked
        asked = bool(self.words[progress.REGROUP])
        votes = [
            stop,
            self.session.is_snapshot_due(now),
            self.session.recorder.is_flush_due(now),
            asked,
        ]
        return self.sync.finish(count, votes, loss)

    def _update(self, agreed: StepResult) -> tuple[float, torch.Tensor | None]:
        """The optimizer step on the gradient that all ranks now share. Returns its learning rate,
        and a norm.
        """
        if self.statistics and agreed.extra is not None:
            lo, hi = self.plan.batch(self.state.step)
            self.statistics.finish(agreed.extra[1:] / (hi - lo))
        return self.update.apply()

    @property
    def _replicas_due(self) -> bool:
        every = self.settings.guard_every
        return every is not None and self.state.step % every == 0

    def _check_replicas(self, next_step: int) -> None:
        self.replicas.check(
            self.state.step, fingerprint_order(self.plan, self.plan.epoch_of_step(next_step))
        )

    def _between_steps(self, votes: list[bool]) -> None:
        """What ranks agreed to do before the next step: write, evaluate, save, stop."""
        session = self.session
        if self._replicas_due:  # before a snapshot could keep what differs
            self._check_replicas(self.state.step - 1)
        done = self.state.step == self.spec.num_steps
        if session.is_epoch_end:
            session.end_epoch()
        elif session.recorder.is_full or votes[FLUSH]:
            session.flush()
        session.stopped = votes[STOP] and not done
        if votes[SNAPSHOT] or session.stopped or done:
            if self.buffers is not None:  # also those written past torch's count of writes
                self.buffers.validate_unchanged()
            session.snapshot()
