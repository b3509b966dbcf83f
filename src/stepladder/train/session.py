"""One attempt of a run, except for its steps: evaluation, snapshots, recovery and the result.

Only the first rank writes shared files; each rank writes its own ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from time import perf_counter

from stepladder.core.errors import STOPPED, InputError, PeerLost, StateLost
from stepladder.data.sources import BatchSource
from stepladder.rank.exit_record import write_end
from stepladder.storage.ledger import join_chains
from stepladder.storage.run_dir import RunDir
from stepladder.storage.run_files import RESULT_FILE, finite_or_none
from stepladder.storage.snapshot import hash_weights
from stepladder.train.attempt import RunAttempt
from stepladder.train.batch_reader import BatchReader
from stepladder.train.evaluation import Metrics, compute_first_batch, evaluate
from stepladder.train.fingerprints import HASH_BYTES, fingerprint
from stepladder.train.phases import ENDING, EVALUATING, SAVING
from stepladder.train.pretended_ranks import isolate_job
from stepladder.train.recorder import FLUSH_INTERVAL_S, Recorder
from stepladder.train.recovery import SessionRecovery, StepJournal
from stepladder.train.replica_check import validate_finite_weights
from stepladder.train.return_values import parse_derived, validate_best
from stepladder.train.snapshot_saver import SnapshotSaver
from stepladder.train.state import TrainState
from stepladder.train.train_result import TrainResult
from stepladder.train.weight_guard import validate_unchanged_weights

SNAPSHOT_INTERVAL_S = 60.0
MIN_SNAPSHOT_INTERVAL_S = 1.0  # at the ends of epochs, which may take milliseconds


class Session:
    """One attempt of a run: all but its steps, which are in TrainingLoop. See `open_session`.

    Args:
        attempt: The run and its ranks.
        state: The training state, as it is when the attempt begins.
        recorder: Records each step.
        snapshot_saver: Saves the state.
        number: The number of the attempt, from 1.
        run_dir: The run directory on the first rank, None on the others.
    """

    # Whether tensors have values; those of a dry run have none.
    has_values = True

    def __init__(
        self,
        attempt: RunAttempt,
        state: TrainState,
        recorder: Recorder,
        snapshot_saver: SnapshotSaver,
        number: int,
        run_dir: RunDir | None = None,
    ) -> None:
        self.attempt = attempt
        self.spec = attempt.spec
        self.job = attempt.spec.job
        self.comm = attempt.comm
        self.state = state
        self.recorder = recorder
        # Lets the end of a step in which ranks were lost be done once more.
        self.journal = StepJournal(recorder, state)
        self.snapshot_saver = snapshot_saver
        self.run_dir = run_dir
        self.recovery = SessionRecovery(attempt, self.journal, snapshot_saver, number)
        # Whether the attempt ends before the run is complete.
        self.is_stopped = False
        self.has_warned_of_counts = False
        self.resumed_from_step = state.step
        self.start_time = perf_counter()
        self.last_snapshot_time = self.start_time

    # -- while training ----------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether no step is left to take in this attempt."""
        return self.is_stopped or self.state.step >= self.spec.num_steps

    @property
    def has_work(self) -> bool:
        """Whether a step, or the end of an interrupted step, is left to do."""
        return self.journal.pending_actions is not None or not self.is_over

    @property
    def is_epoch_end(self) -> bool:
        """Whether an epoch, or the run, ends with the last step."""
        step = self.state.step
        return step % self.spec.plan.steps_per_epoch == 0 or step == self.spec.num_steps

    def is_snapshot_due(self, now: float) -> bool:
        """Return whether this rank votes for a snapshot after the step under way.

        Without --snapshot-every the time decides. Then only the first rank votes, since ranks
        measure different times.
        """
        step = self.state.step + 1
        snapshot_every = self.spec.settings.snapshot_every
        if snapshot_every is not None:
            return step % snapshot_every == 0
        age_s = now - self.last_snapshot_time
        ends_epoch = step % self.spec.plan.steps_per_epoch == 0
        is_due = age_s > SNAPSHOT_INTERVAL_S or (ends_epoch and age_s >= MIN_SNAPSHOT_INTERVAL_S)
        return is_due and self.comm.world.is_first

    def stop(self) -> None:
        """End the attempt after this step, before the run is complete."""
        self.is_stopped = True

    def flush(self, durable: bool = False) -> None:
        """Write the recorded steps. A collective.

        Args:
            durable: Whether the ledger must be on disk afterwards.
        """
        self.recorder.flush(durable)
        if self.run_dir is not None:
            self.run_dir.heartbeat(every=FLUSH_INTERVAL_S)

    def end_epoch(self) -> None:
        """Evaluate and record the metrics, after the last step of an epoch. A collective."""
        self.flush()
        source = self.spec.eval_source
        if self.job.metrics is not None and source is not None:
            with self._evaluating():
                metrics = self._evaluate(source, self.job.metrics)
            self.state.record_evaluation(metrics)
        self.recorder.end_epoch()

    def compute_first_metrics(self) -> dict[str, list[float]]:
        """Return the metrics of the first batch of an evaluation; {} if the job has none."""
        source = self.spec.eval_source
        if self.job.metrics is None or not source:
            return {}
        reader = BatchReader(self.spec, self.comm, source)
        with self._evaluating():
            return compute_first_batch(
                self.job.model, reader, self.job.metrics, self.job.eval_batch
            )

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        average = self.state.averaged_weights
        isolation = isolate_job(self.state.layout, self.spec.settings.sync)
        with self.comm.phases(EVALUATING), isolation, average, self._guarded_weights():
            yield

    def _guarded_weights(self) -> AbstractContextManager[None]:
        if self.spec.settings.sync != "exact":
            return nullcontext()
        return validate_unchanged_weights(self.job.model, "a metric")

    def _evaluate(self, source: BatchSource, function: Metrics) -> dict[str, float]:
        if not self.spec.by_microbatch:
            # Batch norm has seen only the samples of its own rank, so all ranks evaluate with the
            # buffers of rank 0.
            for buffer in self.job.model.buffers():
                self.comm.broadcast(buffer)
        is_exact = self.spec.settings.sync == "exact"
        metrics = evaluate(
            self.job.model,
            source,
            function,
            self.comm,
            self.job.eval_batch,
            equal_passes=self.state.layout.gathers_weights,
            repeats=is_exact and not self.has_warned_of_counts,
            compares=is_exact and self.state.step <= self.spec.plan.steps_per_epoch,
            warn=self._warn_of_counts,
        )
        if self.job.derived is not None:
            derived = parse_derived(self.job.derived(dict(metrics)))
            self._validate_derived(derived, metrics)
            metrics |= derived
        if self.job.best is not None:
            validate_best(self.job.best[0], metrics)
        return metrics

    def _validate_derived(self, derived: dict[str, float], metrics: dict[str, float]) -> None:
        """Raise InputError if `derived` keeps state between calls, or has others on each rank."""
        assert self.job.derived is not None
        if self.spec.settings.sync != "exact":
            return
        again = parse_derived(self.job.derived(dict(metrics)))
        answers = self.comm.gather_bytes(fingerprint(derived) + fingerprint(again))
        if len({answer[:HASH_BYTES] for answer in answers} | {fingerprint(again)}) > 1:
            raise InputError(
                "--sync exact: derived(metrics) returns other values for the same metrics, in"
                " another call or on another rank",
                "compute them from the metrics alone: a resume, and other ranks, lack what is kept"
                " between calls",
            )

    def snapshot(self) -> None:
        """Save the state after the last recorded step. A collective.

        The ledgers of all ranks are durable before the snapshot is: a snapshot never has steps
        that a ledger lacks.
        """
        with self.comm.phases(SAVING):
            self.flush(durable=True)
            validate_finite_weights(self.job.model, self.state.step)
            chains = self.comm.gather_bytes(self.recorder.ledger.chain.encode())
            ledger_chain = join_chains([chain.decode() for chain in chains])
            self.snapshot_saver.save({"ledger": ledger_chain, **self.state.manifest_entries})
        self.last_snapshot_time = perf_counter()

    def _warn_of_counts(self, lines: list[str]) -> None:
        """Print the warnings about the counts of metrics, in the first evaluation only."""
        if not self.has_warned_of_counts:
            self.attempt.report("\n".join(lines))
        self.has_warned_of_counts = True

    # -- in-place recovery -------------------------------------------------------------------------

    def recover(self, reason: Exception) -> None:
        """Continue in this process with the ranks that remain, or that have been added.

        Args:
            reason: Why the process group ends.
        """
        self.run_dir = self.recovery.run(reason, self.run_dir)

    def join(self) -> None:
        """Join ranks that train already, and copy the state from them."""
        self.recover(StateLost("the ranks that this rank was to join were lost"))
        self.resumed_from_step = self.state.step

    # -- the end -----------------------------------------------------------------------------------

    def finish(self, is_late: bool) -> TrainResult:
        """Return the result, and store it if the run is complete. A collective.

        Args:
            is_late: Whether the attempt stopped because of the batch job's time limit.
        """
        with self.comm.phases(ENDING):
            result = self._make_result()
            self.snapshot_saver.wait()
            if self.run_dir is not None:
                self.run_dir.heartbeat()  # writes to the lock file that there is a snapshot
                if self.is_stopped:
                    write_end(STOPPED, self.state.step, is_late)
                else:
                    self.run_dir.write_json(RESULT_FILE, result.as_json())
            if self.is_stopped:
                # Slurm kills all tasks as soon as one exits with code 75, so every rank waits until
                # the first one has written its files.
                with suppress(PeerLost):
                    self.comm.gather_bytes(b".")
        return result

    def _make_result(self) -> TrainResult:
        spec = self.spec
        state = self.state
        seconds = perf_counter() - self.start_time
        bounds = map(spec.plan.batch, range(self.resumed_from_step, state.step))
        num_samples = sum(end - first for first, end in bounds)
        return TrainResult(
            recipe=spec.recipe.name,
            world_size=self.comm.world.world_size,
            sync=spec.settings.sync,
            epochs=spec.epochs,
            steps=state.step,
            train_loss=finite_or_none(state.train_loss),
            metrics={name: finite_or_none(value) for name, value in state.metrics.items()},
            best=state.best,
            weights_sha256=hash_weights(self.job.model),
            samples_per_second=round(num_samples / max(seconds, 1e-9), 1),
            seconds=round(seconds, 3),
            resumed_from_step=self.resumed_from_step,
            run_dir=str(spec.settings.run_dir),
            stopped=self.is_stopped,
        )
