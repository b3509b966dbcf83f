"""One attempt of a run: what surrounds the loop. Opens the run directory, resumes, evaluates,
saves, ends.

Only rank 0 touches shared files; each rank writes its own ledger. What rank 0 reads, it hands to
all."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from stepladder.core import durable
from stepladder.core.console import show
from stepladder.core.errors import STOPPED, PeerLost, StateLost, naming
from stepladder.core.heap import keep_freed_memory
from stepladder.rank.error_record import note_step
from stepladder.rank.exit_record import forget_end, note_end
from stepladder.rank.keepsake import has_keeper
from stepladder.rank.membership import BROKEN, LEFT, joins
from stepladder.rank.streams import print_to_launcher
from stepladder.storage.ledger import Ledger, LedgerHeader, join
from stepladder.storage.lock import owner_of
from stepladder.storage.run_config import environment, refuse_other_definition, shuffle_of
from stepladder.storage.rundir import (
    CONFIG,
    RESULT,
    SCHEMA,
    SNAPSHOTS,
    RunDir,
    finite,
    snapshot_paths,
    stored_in,
)
from stepladder.storage.snapshot import Snapshot, Snapshots, newest_snapshot, weights_sha256
from stepladder.train.comm import Comm
from stepladder.train.determinism import validate_equal_machines
from stepladder.train.evaluation import evaluate
from stepladder.train.job_edits import describe_edits, is_edited, read_optimizer_settings
from stepladder.train.metrics.loggers import Logger, open_loggers, validate_wandb_login
from stepladder.train.phases import ENDING, EVALUATING, REGROUPING, SAVING, STARTING
from stepladder.train.recorder import FLUSH_INTERVAL_S, Recorder
from stepladder.train.recovery import StepJournal
from stepladder.train.replica_check import (
    validate_equal_data,
    validate_equal_models,
    validate_finite_weights,
)
from stepladder.train.return_values import parse_derived, validate_best
from stepladder.train.run_spec import (
    RunSpec,
    describe_missed_failures,
    describe_start,
    validate_step,
)
from stepladder.train.snapshot_saver import SnapshotSaver
from stepladder.train.state import TrainResult, TrainState

SNAPSHOT_INTERVAL_S = 60.0
MIN_SNAPSHOT_INTERVAL_S = 1.0  # an epoch of milliseconds needs no snapshot of its own


class Session:
    """One attempt, open from `with` to its end.

    state: where the run stands.  recorder: takes each step.  stopped: whether the attempt ends
    before the run. finished: the stored result of a run that was complete already.  loggers: the
    user's own, called on rank 0."""

    def __init__(self, spec: RunSpec, comm: Comm, loggers: Sequence[Logger] = ()) -> None:
        self.job, self.spec, self.comm, self.loggers = spec.job, spec, comm, loggers
        scaler = torch.amp.GradScaler(comm.device.type, enabled=spec.settings.precision == "fp16")
        self.state = TrainState(spec.job, scaler)
        self.snapshot_saver = SnapshotSaver(self.state, comm)
        self.stopped = False
        self.stored_result: TrainResult | None = None
        self.run_dir: RunDir | None = None  # on rank 0
        self.has_doubted = False
        self.is_edited = False  # the job file, since the run was started; known on rank 0

    # -- opening -----------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        with ExitStack() as at_end:
            at_end.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(self.spec.threads)
            keep_freed_memory()
            self._at_end = at_end
            with self.comm.phases(STARTING):
                self._open()
            self._at_end = at_end.pop_all()
        return self

    def _open(self) -> None:
        spec, comm = self.spec, self.comm
        self.state.prepare_model(spec.settings, comm)
        if (number := joins()) is not None:
            self.state.shard(spec.settings, comm)
            self._join(number)
            return
        if spec.settings.sync == "exact":
            validate_equal_machines(comm, spec.settings.compile)
        # Nothing is written before every rank has its job.
        validate_equal_models(comm, spec.job.model)
        validate_equal_data(comm, {"training": spec.train_source, "evaluation": spec.eval_source})
        attempt, stored, snapshot, shuffle = comm.on_first(self._open_directory)
        self._at_end.callback(self.snapshot_saver.end)
        self.spec = spec = spec.with_order(shuffle)
        if stored is not None:
            self.stored_result = TrainResult.from_json(stored)
            self.say("\n".join(describe_missed_failures(spec.settings, spec.num_steps)))
            return
        if snapshot is None:
            comm.broadcast_model(
                self.job.model
            )  # rank 0's; a build that draws unseeded numbers differs by rank
        built = read_optimizer_settings(self.job.optimizer)
        self.state.restore(spec.settings, comm, snapshot)
        self.resumed_from = self.state.step
        told = open_loggers(self.run_dir, self.loggers, spec.settings.log_to, spec.definition)
        world, chain = comm.world, snapshot.manifest["ledger"] if snapshot else ""
        in_rounds = spec.settings.deals_in_rounds
        header = LedgerHeader(
            attempt, world.rank, world.world_size, self.state.step, chain, in_rounds
        )
        self.recorder = Recorder(
            spec, comm, self.state, Ledger(spec.settings.run_dir, header), told
        )
        self.attempt, self.journal = attempt, StepJournal(self.recorder, self.state)
        self._at_end.callback(self.recorder.close)
        edited = (
            describe_edits(spec.recipe.job_file, self.job, built)
            if self.is_edited and self.state.step
            else []
        )
        self.say("\n".join([*describe_start(spec, world, self.state.step), *edited]))
        self.began = self.last_snapshot = perf_counter()

    def _open_directory(self) -> tuple[int, dict[str, Any] | None, Snapshot | None, str]:
        """On rank 0: the attempt, the stored result of a complete run, the newest good snapshot,
        the order.
        """
        spec, settings, path = self.spec, self.spec.settings, self.spec.settings.run_dir
        validate_wandb_login(settings.log_to)
        fresh = settings.fresh and (has_keeper() or self.comm.world.restart_count == 0)
        if settings.init_from is not None and (fresh or not snapshot_paths(path / SNAPSHOTS)):
            source = newest_snapshot(Path(settings.init_from))
            source.restore_model(self.job.model, "--init-from a run of this very model")
            self.say(f"  begins with the weights of {settings.init_from}, {source.name}")
        self.run_dir = RunDir(path, settings.lock_wait, fresh, of_nodes=settings.most_ranks > 0)
        self._at_end.push(self._close_directory)
        forget_end()
        self.snapshot_saver.store = Snapshots(path / SNAPSHOTS, settings.keep, self.run_dir.guard)
        stored = self.run_dir.stored(CONFIG)
        if stored is not None:
            refuse_other_definition(stored["definition"], spec.definition, path)
            self.is_edited = is_edited(stored, spec.recipe.job_file)
        shuffle = shuffle_of(stored, path)
        result = self.run_dir.stored(RESULT)
        if result is not None and result["steps"] == spec.num_steps:
            with naming(
                f"{path / RESULT} is damaged",
                f"rm {path / RESULT}: it is written anew",
                (ValueError,),
            ):
                TrainResult.from_json(result)
            return 0, result, None, ""
        snapshot = self.snapshot_saver.store.latest(self.say)
        if snapshot is None:
            self.run_dir.refuse_lost_snapshots()
        step = snapshot.step if snapshot else 0
        validate_step(spec, step)
        self.run_dir.cut_metrics(step, spec.plan.steps_per_epoch)
        if stored is None:
            about = environment(spec.recipe.job_file, spec.threads)
            self.run_dir.store(CONFIG, {"schema": SCHEMA, **spec.as_json(), "environment": about})
        return self.run_dir.attempt, None, snapshot, shuffle

    def regroup(self, reason: Exception) -> None:
        """Go on in place, with the ranks that are there. Raises `reason` where nobody says who they
        are.
        """
        left = BROKEN if isinstance(reason, PeerLost) and self.state.step >= 0 else LEFT
        self.snapshot_saver.give_up()
        with self.comm.phases(REGROUPING):
            while self.comm.regroup(left):
                try:
                    return self._level()
                except StateLost:
                    raise
                except PeerLost:  # one more
                    left = BROKEN
        raise reason

    def _level(self) -> None:
        """All stand where those stand that are ahead. A collective."""
        comm = self.comm
        written = self.journal.synchronize(comm, self.job.model)
        if comm.world.is_first:
            run_dir = self.run_dir or self._take_over()
            self.recorder.close_files()
            run_dir.cut_last_metrics(written, self.spec.plan.steps_per_epoch)
            self.recorder.open_files()
        comm.gather_bytes(b".")
        self.state.level()

    def _join(self, number: int) -> None:
        """Ranks that train already. This one's state comes from them."""
        run_dir = self.spec.settings.run_dir
        self.spec = self.spec.with_order(shuffle_of(stored_in(run_dir, CONFIG), run_dir))
        header = LedgerHeader(owner_of(run_dir).get("attempt") or 0, number, 0, 0, "")
        self.comm.world = replace(
            self.comm.world, rank=1, world_size=2
        )  # not the first, whoever is there
        self.comm.members = [-1, number]
        self.recorder = Recorder(self.spec, self.comm, self.state, Ledger(run_dir, header))
        self.attempt, self.journal = header.attempt, StepJournal(self.recorder, self.state)
        self._at_end.callback(self.recorder.close)
        self._at_end.callback(self.snapshot_saver.end)
        self.state.step = -1
        self.began = self.last_snapshot = perf_counter()
        self.regroup(StateLost("the ranks that this one was to join have gone"))
        self.resumed_from = self.state.step

    def _take_over(self) -> RunDir:
        """The run directory, from a first rank that was lost, and the word."""
        print_to_launcher()
        settings, of_nodes = self.spec.settings, self.spec.settings.most_ranks > 0
        self.run_dir = RunDir(
            settings.run_dir, settings.lock_wait, of_nodes=of_nodes, attempt=self.attempt
        )
        self._at_end.push(self._close_directory)
        self.snapshot_saver.store = Snapshots(
            settings.run_dir / SNAPSHOTS, settings.keep, self.run_dir.guard
        )
        self._at_end.callback(self.snapshot_saver.end)
        durable.clear(settings.run_dir / SNAPSHOTS, "step_")
        told = open_loggers(self.run_dir, self.loggers, settings.log_to, self.spec.definition)
        self.recorder.take_over(told)
        return self.run_dir

    def say(self, text: str) -> None:
        """A line for the person who started the run."""
        if text and self.spec.settings.progress and self.comm.world.is_first:
            show(text, sys.stderr)

    def _doubt(self, lines: list[str]) -> None:
        """Say what may be wrong with the metrics, once."""
        self.say("\n".join(lines if not self.has_doubted else []))
        self.has_doubted = True

    # -- while training ----------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether no step is left to do; the end of the last one may be."""
        return self.stopped or self.state.step >= self.spec.num_steps

    @property
    def is_epoch_end(self) -> bool:
        """Whether an epoch, or the run, ends with the steps done so far."""
        return (
            self.state.step % self.spec.plan.steps_per_epoch == 0
            or self.state.step == self.spec.num_steps
        )

    def is_snapshot_due(self, now: float) -> bool:
        """Whether a snapshot is due after the step under way. By the clock, only rank 0 is asked."""
        done = self.state.step + 1
        if self.spec.settings.snapshot_every is not None:
            return done % self.spec.settings.snapshot_every == 0
        age, ends_epoch = now - self.last_snapshot, done % self.spec.plan.steps_per_epoch == 0
        due = age > SNAPSHOT_INTERVAL_S or (ends_epoch and age >= MIN_SNAPSHOT_INTERVAL_S)
        return due and self.comm.world.is_first

    def flush(self, durable: bool = False) -> None:
        """Write what was recorded. A collective."""
        self.recorder.flush(durable)
        if self.run_dir is not None:
            self.run_dir.heartbeat(every=FLUSH_INTERVAL_S)

    def end_epoch(self) -> None:
        """Mean loss and evaluation, after the epoch's last step (or the run's). A collective."""
        self.flush()
        job, source, together = self.job, self.spec.eval_source, self.state.gathers_weights
        if job.metrics is not None and source is not None:
            with self.comm.phases(EVALUATING), self.state.averaged_weights:
                if (
                    not self.spec.by_microbatch
                ):  # each rank's batch norm saw its own share: rank 0's counts
                    for buffer in job.model.buffers():
                        self.comm.broadcast(buffer)
                batch = job.eval_batch
                metrics = evaluate(
                    job.model, source, job.metrics, self.comm, batch, together, self._doubt
                )
                metrics |= parse_derived(job.derived(metrics)) if job.derived is not None else {}
                if job.best is not None:
                    validate_best(job.best[0], metrics)
                self.state.record_evaluation(metrics)
        self.recorder.end_epoch()

    def snapshot(self) -> None:
        """Save the state after the last recorded step. A collective: all ledgers are durable first."""
        with self.comm.phases(SAVING):
            self.flush(durable=True)
            validate_finite_weights(self.job.model, self.state.step)
            chains = [
                one.decode() for one in self.comm.gather_bytes(self.recorder.ledger.chain.encode())
            ]
            self.snapshot_saver.save({"ledger": join(chains), **self.state.about})
        self.last_snapshot = perf_counter()

    # -- ending ------------------------------------------------------------------------------------

    def finish(self, late: bool) -> TrainResult:
        """The result; stored if the run is complete. A collective. late: stopped for the job's time
        limit.
        """
        with self.comm.phases(ENDING):
            result = self._result()
            self.snapshot_saver.finish()
            if self.run_dir is not None:
                self.run_dir.heartbeat()  # which notes that there is a snapshot
                if self.stopped:
                    note_end(STOPPED, self.state.step, late)
                else:
                    self.run_dir.store(RESULT, result.as_json())
            if (
                self.stopped
            ):  # Slurm ends all tasks with the first that leaves with 75: not before all is written
                with suppress(PeerLost):
                    self.comm.gather_bytes(b".")
        return result

    def _result(self) -> TrainResult:
        spec, state, seconds = self.spec, self.state, perf_counter() - self.began
        trained = sum(
            hi - lo for lo, hi in map(spec.plan.batch, range(self.resumed_from, state.step))
        )
        return TrainResult(
            recipe=spec.recipe.name,
            world_size=self.comm.world.world_size,
            sync=spec.settings.sync,
            epochs=spec.epochs,
            steps=state.step,
            train_loss=finite(state.train_loss),
            metrics={name: finite(value) for name, value in state.metrics.items()},
            best=state.best,
            weights_sha256=weights_sha256(self.job.model),
            samples_per_second=round(trained / max(seconds, 1e-9), 1),
            seconds=round(seconds, 3),
            resumed_from_step=self.resumed_from,
            run_dir=str(spec.settings.run_dir),
            stopped=self.stopped,
        )

    def __exit__(self, *raised: Any) -> None:
        note_step(raised[1], self.state.step)
        try:
            self._at_end.__exit__(*raised)
        except Exception as error:  # a file that could not be written cannot be closed either
            note_step(error, self.state.step)
            raise

    def _close_directory(self, _type: object, error: BaseException | None, _trace: object) -> None:
        assert self.run_dir is not None
        self.run_dir.close(failed=error is not None)
