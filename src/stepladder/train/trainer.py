"""The training loop: `Trainer.fit` takes steps, `TrainingLoop.step` takes microbatches.

The plan says what is computed, the world says which ranks compute it. The only state of the trainer
itself is the number of steps done. All randomness is keyed by step and microbatch, so a snapshot
holds no state that belongs to a single rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from stepladder.core.arguments import validate_arguments
from stepladder.core.errors import PeerLost, RanksDiffer
from stepladder.core.order import derive_pass_seed, derive_seed
from stepladder.core.plan import Span
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.rank import progress
from stepladder.rank.error_record import record_step
from stepladder.rank.preemption import StopSignals, kill_once
from stepladder.rank.progress import PASS, STEP
from stepladder.rank.torch_fixes import BareStep
from stepladder.storage.run_dir_access import translate_storage_errors
from stepladder.train.batch_norm import RunningStatistics, find_batch_norms
from stepladder.train.batch_reader import BatchReader
from stepladder.train.comm import Comm
from stepladder.train.cuda_graphs import make_loss_programs
from stepladder.train.determinism import deterministic
from stepladder.train.fingerprints import fingerprint_order
from stepladder.train.forward_buffers import ForwardBuffers
from stepladder.train.generators import PassGenerators, seed_generators
from stepladder.train.group_setup import pick_device
from stepladder.train.job import Job, Recipe
from stepladder.train.kept_state import KeptState
from stepladder.train.metrics.loggers import Logger
from stepladder.train.opening import open_session
from stepladder.train.optimizers import is_from_torch, list_optimizers
from stepladder.train.phases import (
    BACKWARD_PASS,
    BETWEEN_STEPS,
    FORWARD_PASS,
    READING,
    STEPPING,
    UPDATING,
    WAITING_FOR_RANKS,
)
from stepladder.train.precision import make_autocast
from stepladder.train.pretended_ranks import isolate_job
from stepladder.train.process_group import process_group
from stepladder.train.rank_share import RankShare
from stepladder.train.recompute_check import RecomputeCheck
from stepladder.train.recovery import Action, MembershipChange
from stepladder.train.repeat_check import (
    RepeatCheck,
    validate_next_values,
    validate_next_values_on_all_ranks,
    validate_on_all_ranks,
)
from stepladder.train.replica_check import ReplicaCheck
from stepladder.train.return_values import parse_loss
from stepladder.train.run_spec import RunSpec
from stepladder.train.session import Session
from stepladder.train.step_listener import LoopListener
from stepladder.train.sync.base import Backward, StepResult
from stepladder.train.sync.exact import ExactSync
from stepladder.train.train_result import TrainResult
from stepladder.train.unsaved_state import UnsavedState
from stepladder.train.weight_guard import PassGuard
from stepladder.train.weight_update import WeightUpdate


class Trainer:
    """Trains a job. `fit` resumes from the run directory by itself and returns the result.

    Args:
        job: The model, its optimizer, the loss and the data.
        settings: How to train, and in which run directory.
        recipe: The name of the job and the Config that it was built with. When a run is resumed,
            both must be the same as before.
        comm: The ranks to train with. By default the ranks that torchrun, Slurm or the script's own
            process group has started with this process; without any, this process trains alone.
        loggers: Objects that get the metrics of every step on rank 0, besides TensorBoard.
        repeats_pass: Whether `exact` computes microbatches twice now and then, and refuses a
            job whose two losses differ. `stepladder verify` finds out why they do.
    """

    @validate_arguments
    def __init__(
        self,
        job: Job,
        settings: Settings,
        recipe: Recipe | None = None,
        comm: Comm | None = None,
        loggers: Sequence[Logger] = (),
        repeats_pass: bool = True,
    ) -> None:
        self.repeats_pass = repeats_pass
        self.job = job
        self.settings = settings
        self.recipe = recipe or Recipe()
        self.comm = comm
        self.loggers = loggers

    def fit(self) -> TrainResult:
        """Train to the end of the run, or to a stop signal.

        Returns:
            The result of this attempt, or the stored result if the run was complete already.

        Raises:
            InputError: If the settings do not fit the job, before anything is written.
        """
        with (
            self._open_comm() as comm,
            translate_storage_errors(self.settings.run_dir),
            StopSignals() as stop,
        ):
            spec = RunSpec.make(self.job, self.settings, self.recipe, comm)
            with open_session(spec, comm, self.loggers) as session:
                if isinstance(session, TrainResult):
                    return session
                with deterministic(self.settings.sync == "exact", comm.device):
                    while session.has_work:
                        try:
                            with TrainingLoop(session, stop, self.repeats_pass) as loop:
                                loop.complete_interrupted_step()
                                while not session.is_over:
                                    loop.step()
                        except (PeerLost, MembershipChange) as reason:
                            session.recover(reason)
                return session.finish(stop.late)

    def _open_comm(self) -> AbstractContextManager[Comm]:
        if self.comm is not None:
            return nullcontext(self.comm)
        world = World.detect()
        device = pick_device(self.settings.device, world)
        return process_group(world, device, self.settings.timeout)


class TrainingLoop:
    """The steps of one attempt: each call of `step` trains on one global batch.

    What is the same in every step is decided in `__init__`. When the process group changes, the
    trainer makes a new loop for the new group.
    """

    def __init__(self, session: Session, stop: StopSignals, repeats_pass: bool = False) -> None:
        self.session = session
        self.stop = stop
        self.spec = session.spec
        self.job = session.job
        self.comm = session.comm
        self.state = session.state
        self.recorder = session.recorder
        self.model = self.job.model
        self.plan = self.spec.plan
        self.settings = self.spec.settings
        self.by_microbatch = self.spec.by_microbatch
        self.phase = self.comm.phases.timer
        self.slots = self.comm.progress.slots
        if not self.model.training:  # train() also unfreezes layers that the user froze with eval()
            self.model.train()

        self.layout = self.state.layout
        self.statistics = RunningStatistics(self.model if self.by_microbatch else None)
        self.replica_check = ReplicaCheck(
            self.model, self.job.optimizer, self.comm, self._list_unshared_buffers()
        )
        extra_size = 1 + self.statistics.size if self.by_microbatch else 0
        self.sync = self.layout.make_sync(self.settings.sync, extra_size)
        self.weight_update = WeightUpdate(self.spec, self.state, self.sync)
        self.share = RankShare(self.spec, self.comm.world, self.layout)
        self.base_key = derive_seed(self.plan.seed, "pass")
        self.update_key = derive_seed(self.plan.seed, "update")
        # Those of torch draw no random numbers; a hook may.
        optimizers = list_optimizers(self.job.optimizer)
        are_from_torch = all(map(is_from_torch, (*optimizers, *self.job.schedules)))
        are_observed = any(BareStep(each).is_observed for each in optimizers)
        self.draws_in_update = are_observed or not are_from_torch
        self.generators = PassGenerators(self.comm.device)
        self.autocast = make_autocast(self.settings.precision, self.comm.device)
        self.scales_loss = self.state.scaler.is_enabled()
        passes = self.plan.microbatches(0) if self.by_microbatch else self.share.full_batch
        self.loss_programs = make_loss_programs(self.job.loss, self.settings, passes)
        self.buffers: ForwardBuffers | None = None
        self.weight_guard: PassGuard | None = None
        if self.settings.sync == "exact":
            self.buffers = ForwardBuffers(self.model)
            self.weight_guard = PassGuard(self.model)
        self.is_first_step = True  # of the attempt
        self.listeners = self._make_listeners()
        this_rank = self.comm.world.rank
        self.repeat_check: RepeatCheck | None = None
        self.reader = BatchReader(self.spec, self.comm, self.spec.train_source)
        if self.settings.sync == "exact" and repeats_pass:
            self.repeat_check = RepeatCheck(
                self.reader,
                self._recompute,
                list(self.model.parameters()),
                self.statistics,
                self.sync.hash_gradients,
                KeptState(self.job),
            )
        self.is_repetition = False  # the passes of this step are computed once more
        self.failing_steps = {step for rank, step in self.settings.fail_at if rank == this_rank}
        self.batches = self.spec.train_source.batches(self.share.requests(self.state.step))

    def _list_unshared_buffers(self) -> list[Tensor]:
        """Return the buffers that may differ between ranks.

        Where a rank computes its share in one pass, batch norm sees only the rank's own samples.
        """
        if self.by_microbatch:
            return []
        layers = find_batch_norms(self.model)
        return [buffer for layer in layers for buffer in layer.buffers()]

    def _make_listeners(self) -> list[LoopListener]:
        """Return what takes part in each step, in the order of the calls."""
        listeners: list[LoopListener] = []
        if self.settings.replay_every is not None and isinstance(self.sync, ExactSync):
            listeners.append(RecomputeCheck(self.spec, self.comm, self.sync, self._rerun_pass))
        if self.statistics.size:
            listeners.append(self.statistics)
        if self.layout.completes_steps:
            listeners.append(self.session.journal)
        if self.state.average is not None:
            listeners.append(self.state.average)
        if (unsaved := UnsavedState(self.job, self.settings.sync == "exact")).can_exist:
            listeners.append(unsaved)
        return listeners

    def __enter__(self) -> TrainingLoop:
        is_known = bool(self.state.expected_values)
        is_needed = self.comm.world.is_first or self.layout.gathers_weights
        if self.repeat_check is not None and is_known and is_needed:
            self._validate_resumed()
        if self._is_replica_check_due:
            self._check_replicas(self.state.step)
        return self

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        record_step(error, self.state.step + 1)
        self.sync.close()
        if self.weight_guard is not None:
            self.weight_guard.close()
        if isinstance(error, Exception):
            self.layout.explain(error)
        self.batches.close()  # ends the workers of a map-style Dataset
        if isinstance(error, (PeerLost, RanksDiffer)):
            self._undo_interrupted_step()

    def _undo_interrupted_step(self) -> None:
        """Leave the model as it was before the step, which the remaining ranks may rerun."""
        for listener in self.listeners:
            listener.cancel()
        self.layout.interrupt_step()
        for param in self.model.parameters():
            param.grad = None

    def complete_interrupted_step(self) -> None:
        """Do what the ranks agreed to do after the step in which some of them were then lost."""
        votes = self.session.journal.pending_actions
        if votes is not None:
            self._end_step(votes)

    def step(self) -> None:
        """Take one optimizer step over one global batch, then do what the ranks agreed on."""
        with self.phase(STEPPING):
            step = self.state.step
            result = self._compute_gradient(step)
            if result is None:
                self._prepare_repetition()
                result = self._compute_gradient(step)
                assert result is not None
            for listener in self.listeners:
                listener.after_reduce(step, result)
            # After the recompute check, which tells a fault of the machine.
            self._validate_unchanged()
            with self.phase(UPDATING):
                if self.draws_in_update:
                    self.generators.begin_update(derive_pass_seed(self.update_key, step, 0))
                if self.buffers is not None:
                    self.buffers.validate_unwritten()
                learning_rate, norm = self.weight_update.apply()
                if self.buffers is not None:
                    self.buffers.accept_update()
            self.recorder.record_step(
                self._loss_over_ranks(result), result.total_count, learning_rate, norm
            )
            for listener in self.listeners:
                listener.after_update(result.votes)
            self.layout.gather()
            for listener in self.listeners:
                listener.after_gather()
            self.layout.end_step()
        self._end_step(result.votes)

    def _compute_gradient(self, step: int) -> StepResult | None:
        """Compute the gradient of one global batch, added over all ranks.

        Returns:
            What all ranks know after the step; None if a pass of some rank has drawn from a
            generator that was not seeded for it, so that all ranks must repeat the passes.
        """
        spans = self._begin_step(step)
        backward: Backward = self.sync.backward
        for listener in self.listeners:
            backward = listener.begin_step(step, backward)
        with isolate_job(self.layout, self.settings.sync):
            loss_sum, count, indices_read = self._run_passes(spans, backward)
        if not self.is_repetition:
            self.recorder.record_samples(indices_read)
        with self.phase(WAITING_FOR_RANKS):
            result = self._reduce(count, loss_sum)
        *votes, was_drawn = result.votes
        if was_drawn and not self.generators.seeds_host:
            return None
        self.is_repetition = False
        if self.repeat_check is not None and self._is_compared(step):
            self._validate_unchanged()
            self.repeat_check.validate(step)
            if not self.comm.alone:
                first = self.plan.microbatches(step)[0]
                validate_on_all_ranks(
                    self.reader, self._recompute, step, first, self.sync.hash_gradients
                )
        self.is_first_step = False
        return result._replace(votes=votes)

    def _is_compared(self, step: int) -> bool:
        """Tell whether the passes of a step are compared with what is computed once more."""
        # Ever rarer, since what a job keeps may act after a while: steps 1, 2, 4, 8, ...
        is_power_of_two = not step & (step + 1)
        return self.is_first_step or is_power_of_two or step % self.plan.steps_per_epoch == 0

    def _validate_unchanged(self) -> None:
        """Raise InputError if the passes of this step have changed a weight or a buffer."""
        if self.weight_guard is not None and self.buffers is not None:
            self.weight_guard.validate()
            if self.weight_guard.guard.compares_values:
                self.buffers.validate_unchanged()

    def _run_passes(
        self, spans: list[Span], backward: Backward
    ) -> tuple[Tensor | None, float, list[Any]]:
        """Run this rank's passes of a step.

        Returns:
            The sum of their losses, the sum of their counts, and the indices of their samples.
        """
        loss_sum: Tensor | None = None
        count = 0.0
        indices_read = []
        for span in spans:
            with self.phase(READING):
                indices, batch = next(self.batches)
            if len(span):
                indices_read.append(indices)
            is_compared = loss_sum is None and self._is_compared(self.state.step)
            repeat_check = self.repeat_check if is_compared else None
            if repeat_check is not None:
                repeat_check.note_batch(span, batch)
            loss, pass_count = self._run_pass(span, batch, backward)
            if repeat_check is not None:
                repeat_check.note_loss(loss)
            loss_sum = loss if loss_sum is None else loss_sum + loss
            count += pass_count
        return loss_sum, count, indices_read

    def _prepare_repetition(self) -> None:
        """Leave everything as it was before the step, for passes that seed all generators."""
        for listener in self.listeners:
            listener.cancel()
        for param in self.model.parameters():
            param.grad = None
        self.generators.seed_host_generators()
        self.is_repetition = True
        self.batches.close()
        self.batches = self.spec.train_source.batches(self.share.requests(self.state.step))

    def _begin_step(self, step: int) -> list[Span]:
        """Prepare one step, and return the passes that this rank makes in it."""
        spans = self.share.spans(step)
        self.slots[STEP] = step + 1
        num_passes = len(self.plan.microbatches(step)) if self.by_microbatch else 1
        self.sync.begin(spans[0].number if spans else 0, len(spans), num_passes)
        if self.weight_guard is not None:
            self.weight_guard.begin(self._is_compared(step) and self.session.has_values)
        return spans

    def _run_pass(self, span: Span, batch: Any, backward: Backward) -> tuple[Tensor, float]:
        """Compute forward and backward of one microbatch, or of the rank's whole share.

        Args:
            span: Which samples of the global batch the pass computes; none in an idle pass.
            batch: The samples.
            backward: Adds the gradient of the pass. It takes the loss, the count, and the result of
                `_make_extra`.

        Returns:
            The loss summed over the samples, shape (), and the number that the job's loss counts.
        """
        self.slots[PASS] += 1
        samples = len(span)
        with self.phase(FORWARD_PASS):
            self.generators.begin_pass(
                derive_pass_seed(self.base_key, self.state.step, span.number)
            )
            loss_function = self.loss_programs.get(samples, self.job.loss)
            with self.autocast:
                result = loss_function(self.model, batch)
            if self.repeat_check is not None:
                self.repeat_check.note_draws()
            if self.buffers is not None:
                self.buffers.validate_unwritten()
        with self.phase(BACKWARD_PASS):
            loss, count = parse_loss(result, samples)
            if not samples:
                loss = loss * 0
                count = 0.0
            extra = self._make_extra(loss, samples) if self.by_microbatch else None
            loss_sum = loss.detach()
            if self.scales_loss:
                loss = self.state.scaler.scale(loss)
            backward(loss, count, extra)
        self.generators.end_pass()
        return loss_sum, count

    def _rerun_pass(self, span: Span, batch: Any, backward: Backward) -> tuple[Tensor, float]:
        """Compute a pass of another rank; the caller restores the generators."""
        with self.generators.forgetting():
            return self._run_pass(span, batch, backward)

    def _recompute(self, span: Span, batch: Any) -> Tensor:
        """Return the loss of a microbatch once more, shape ()."""
        seed = derive_pass_seed(self.base_key, self.state.step, span.number)
        self.generators.begin_pass(seed)
        loss_function = self.loss_programs.get(len(span), self.job.loss)
        isolation = isolate_job(self.layout, self.settings.sync)
        with self.phase(FORWARD_PASS), self.autocast, isolation:
            result: Any = loss_function(self.model, batch)
        if self.statistics.size:
            self.statistics.capture(len(span))
        self.generators.end_pass()
        self._validate_unchanged()
        total: Tensor = result[0] if isinstance(result, tuple) else result * len(span)
        return total

    def _compute_next_values(self) -> dict[str, Any]:
        """Return the next microbatch's loss and gradients, and metrics, by what they are.

        They are functions of what a snapshot has: the weights, the data and the seed.
        """
        assert self.weight_guard is not None
        span = self.plan.microbatches(self.state.step)[0]
        seed_generators(self.state.step, self.comm.device)  # so that the pass is seeded in any case
        self.weight_guard.begin(compares_values=False)
        self.statistics.begin()
        try:
            with self.generators.forgetting():
                loss = self._recompute(span, self.reader.read(self.state.step, span))
                # A pass that gathers weights has them in other shapes.
                is_comparable = not self.layout.gathers_weights
                gradients = self.sync.hash_gradients(loss).hex() if is_comparable else ""
        finally:
            self.statistics.cancel()
        metrics = self.session.compute_first_metrics()
        values = {f"metric {name}, sum and count": value for name, value in metrics.items()}
        return {"loss": loss.item(), "hash of gradients": gradients, **values}

    def _validate_resumed(self) -> None:
        """Compare the next loss, gradients and metrics with what the snapshot says of them.

        Raises:
            InputError: One is another one, so the job keeps something that no snapshot has.
        """
        values = self._compute_next_values()
        expected_values = self.state.pop_expected_values()
        validate_next_values(values, expected_values, "when the snapshot was saved")

    def _note_next_values(self) -> None:
        """Note for a snapshot what the next loss, gradients and metrics are. A collective.

        Raises:
            InputError: They are others when they are computed again, or on some rank, by what the
                job keeps: it may act only after the first microbatches.
        """
        if self.repeat_check is not None:
            self.repeat_check.validate_first()
        values = self._compute_next_values()
        if not self.session.is_stopped:  # by a cluster, which gives a job little time for this
            validate_next_values(self._compute_next_values(), values, "when it was computed before")
        validate_next_values_on_all_ranks(values, self.comm)
        self.state.note_next_values(values)

    def _make_extra(self, loss: Tensor, samples: int) -> Tensor:
        """Return the values of one microbatch that are added over microbatches as gradients are.

        It is the loss, shape (). With batch norm the statistics of the batch follow, shape
        (extra_size,).
        """
        loss = loss.detach()
        if not self.statistics.size:
            return loss
        statistics = self.statistics.capture(samples)
        return torch.cat([loss.reshape(1).float(), statistics])

    def _reduce(self, count: float, loss: Tensor | None) -> StepResult:
        """Add the gradients over ranks, vote on what follows, and return the result of the step."""
        if self.state.step + 1 in self.failing_steps:
            kill_once(self.settings.run_dir, self.comm.world.rank, self.state.step + 1)
        now = perf_counter()
        # The first rank alone votes for the time limit, since all launchers read its exit record.
        is_late = self.comm.world.is_first and self.stop.is_late(now)
        votes = [  # in the order of Action, and whether to repeat the passes
            is_late or self.stop.stop_requested,
            self.session.is_snapshot_due(now),
            self.recorder.is_flush_due(now),
            bool(self.slots[progress.REGROUP]),
            self.generators.was_drawn,
        ]
        return self.sync.finish(count, votes, loss)

    def _loss_over_ranks(self, result: StepResult) -> Tensor | float | None:
        """Return the step's loss; a tensor on a GPU, where reading it would wait for the GPU."""
        if result.extra is None:
            return result.loss
        if self.comm.device.type == "cpu":
            return result.extra[0].item()
        return result.extra[0].clone()

    def _end_step(self, votes: list[bool]) -> None:
        """Complete a step whose weights are updated."""
        session = self.session
        is_anything_due = (
            True in votes
            or self.recorder.is_full
            or session.is_epoch_end
            or self._is_replica_check_due
        )
        if not is_anything_due:
            session.journal.commit()
            return
        session.journal.open(votes)
        with self.phase(BETWEEN_STEPS):
            self._act_between_steps(votes)
        session.journal.commit()
        if votes[Action.REGROUP] and not session.is_over:
            raise MembershipChange

    def _act_between_steps(self, votes: list[bool]) -> None:
        """Write, evaluate, save and stop, as the ranks agreed."""
        session = self.session
        if self._is_replica_check_due:  # before a snapshot could keep weights that differ
            self._check_replicas(self.state.step - 1)
        is_run_complete = self.state.step == self.spec.num_steps
        if session.is_epoch_end:
            session.end_epoch()
        elif self.recorder.is_full or votes[Action.FLUSH]:
            session.flush()
        if votes[Action.STOP] and not is_run_complete:
            session.stop()
        if votes[Action.SNAPSHOT] or session.is_stopped or is_run_complete:
            if self.buffers is not None:  # also detects writes that torch's version counter misses
                self.buffers.validate_unchanged()
            if self.repeat_check is not None:
                self._note_next_values()
            session.snapshot()

    @property
    def _is_replica_check_due(self) -> bool:
        every = self.settings.guard_every
        return every is not None and self.state.step % every == 0

    def _check_replicas(self, step: int) -> None:
        """Compare the state of all ranks, and the sample order of the epoch that has this step."""
        order = fingerprint_order(self.plan, self.plan.epoch_of_step(step))
        self.replica_check.check(self.state.step, order)
