"""The start of an attempt: from a run's definition to a `Session` that can take steps.

Only the first rank reads the run directory; it sends what it has read to all ranks, so they cannot
disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from stepladder.core.errors import as_input_error
from stepladder.core.heap import keep_freed_memory
from stepladder.data.source import describe_missing_keys, validate_same_files
from stepladder.rank.error_record import record_step
from stepladder.rank.exit_record import remove_end
from stepladder.rank.fd_store import has_fd_store
from stepladder.rank.membership import get_joining_rank
from stepladder.storage.ledger import Ledger, LedgerHeader
from stepladder.storage.lock import read_owner
from stepladder.storage.run_config import (
    describe_environment,
    find_shuffle,
    validate_same_definition,
)
from stepladder.storage.run_dir import RunDir
from stepladder.storage.run_files import (
    CONFIG_FILE,
    RESULT_FILE,
    RUN_SCHEMA,
    SNAPSHOTS_FOLDER,
    list_snapshots,
    read_stored_json,
)
from stepladder.storage.snapshot import Snapshot, read_newest_snapshot
from stepladder.storage.snapshot_store import Snapshots
from stepladder.train.attempt import RunAttempt
from stepladder.train.comm import Comm
from stepladder.train.determinism import validate_equal_machines
from stepladder.train.job_edits import describe_edits, is_edited, read_optimizer_settings
from stepladder.train.layout import find_layout
from stepladder.train.metrics.loggers import Logger, validate_loggers
from stepladder.train.phases import STARTING_UP
from stepladder.train.precision import make_scaler
from stepladder.train.rank_consistency import validate_equal_data, validate_equal_models
from stepladder.train.recorder import Recorder
from stepladder.train.run_description import describe_missed_failures, describe_start
from stepladder.train.run_spec import RunSpec, validate_step
from stepladder.train.session import Session
from stepladder.train.snapshot_saver import SnapshotSaver
from stepladder.train.state import TrainState
from stepladder.train.train_result import TrainResult


class _StoredRun(NamedTuple):
    """What the run directory holds of the run as an attempt begins.

    Args:
        attempt: The number of this attempt, 0 if the run is complete.
        result: The contents of result.json if the run is complete, else None.
        snapshot: The newest intact snapshot, None if the run is new.
        shuffle: The order of samples that the run began with, "" if the run is new.
        is_edited: Whether the job file has changed since.
    """

    attempt: int
    result: dict[str, Any] | None
    snapshot: Snapshot | None
    shuffle: str
    is_edited: bool = False


@contextmanager
def open_session(
    spec: RunSpec, comm: Comm, loggers: Sequence[Logger] = ()
) -> Iterator[Session | TrainResult]:
    """Open an attempt of a run for the length of the block. A collective.

    Args:
        spec: The run.
        comm: The ranks that train it.
        loggers: The user's own loggers, called on the first rank.

    Yields:
        The session, or the stored result of a run that is complete already.
    """
    session: Session | TrainResult | None = None
    try:
        with ExitStack() as exit_stack:
            exit_stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(spec.threads)
            keep_freed_memory()
            with comm.phases(STARTING_UP):
                session = _Opening(RunAttempt(spec, comm, loggers, exit_stack)).open()
            yield session
    except BaseException as error:  # also an error of closing
        if isinstance(session, Session):
            record_step(error, session.state.step)
        raise


class _Opening:
    """Opens one attempt of a run: reads the run directory, restores the state, opens records."""

    def __init__(self, attempt: RunAttempt) -> None:
        self.attempt = attempt
        self.spec = attempt.spec
        self.comm = attempt.comm
        settings = self.spec.settings
        self.layout_class = find_layout(settings).choose(settings, self.spec.job, self.comm)
        # The run directory on the first rank, once it is open.
        self.run_dir: RunDir | None = None
        # The snapshots of the run directory, likewise.
        self.store: Snapshots | None = None

    def open(self) -> Session | TrainResult:
        """Return the session, or the stored result of a run that is complete already."""
        if self.spec.settings.checkpoint_blocks:
            # Late: few jobs ask for it.
            from stepladder.train.checkpoint_blocks import checkpoint_blocks

            checkpoint_blocks(self.spec.job)
        self.layout_class.move_model(self.spec.job, self.comm)
        number = get_joining_rank()
        if number is not None:
            return self._join(number)
        self._validate_ranks()  # before anything is written
        stored = _StoredRun(*self.comm.on_first(self._read_run_dir))
        if stored.result is not None:
            missed = describe_missed_failures(self.spec.settings, self.spec.num_steps)
            self.attempt.report("\n".join(missed))
            return TrainResult.from_json(stored.result)
        return self._start(stored)

    def _validate_ranks(self) -> None:
        """Raise InputError unless all ranks compute the same thing. A collective."""
        spec = self.spec
        is_exact = spec.settings.sync == "exact"
        if is_exact:
            validate_equal_machines(self.comm, spec.settings.compile)
        validate_equal_models(self.comm, spec.job.model, spec.job.optimizer, is_exact)
        sources = {"training": spec.train_source, "evaluation": spec.eval_source}
        validate_equal_data(self.comm, sources)

    # -- on the first rank -------------------------------------------------------------------------

    def _read_run_dir(self) -> _StoredRun:
        """Open the run directory and read it. For a new run, write its config.json."""
        spec = self.spec
        settings = spec.settings
        validate_loggers(settings.log_to)
        is_fresh = settings.fresh and (has_fd_store() or self.comm.world.restart_count == 0)
        self._load_initial_weights(is_fresh)
        run_dir = self.attempt.open_run_dir(is_fresh)
        store = self.attempt.open_snapshots(run_dir)
        self.run_dir = run_dir
        self.store = store
        remove_end()
        config = run_dir.read_json(CONFIG_FILE)
        if config is not None:
            validate_same_definition(config["definition"], spec.definition, run_dir.path)
            for name, files in spec.files.items():
                stored_files = config.get("files", {}).get(name)
                validate_same_files(stored_files, files, f"run directory {run_dir.path}")
        shuffle = find_shuffle(config, run_dir.path)
        result = self._read_result(run_dir)
        if result is not None:
            return _StoredRun(0, result, None, shuffle)
        snapshot = store.latest(self.attempt.report)
        if snapshot is None:
            run_dir.validate_snapshots_exist()
        step = snapshot.step if snapshot is not None else 0
        validate_step(spec, step)
        run_dir.truncate_metrics(step, spec.plan.steps_per_epoch)
        if config is None:
            self.attempt.report(describe_missing_keys(spec.files.values()))
            facts = describe_environment(spec.recipe.job_file, spec.threads)
            run_dir.write_json(
                CONFIG_FILE, {"schema": RUN_SCHEMA, **spec.as_json(), "environment": facts}
            )
        self.attempt.record_start(run_dir)
        edited = is_edited(config, spec.recipe.job_file)
        return _StoredRun(run_dir.attempt, None, snapshot, shuffle, edited)

    def _load_initial_weights(self, is_fresh: bool) -> None:
        """Load the weights of --init-from into the model of a run that begins."""
        settings = self.spec.settings
        if settings.init_from is None:
            return
        if not is_fresh and list_snapshots(settings.run_dir / SNAPSHOTS_FOLDER):
            return
        source = read_newest_snapshot(Path(settings.init_from))
        source.restore_model(self.spec.job.model, "--init-from a run of this very model")
        self.attempt.report(f"  begins with the weights of {source.folder}")

    def _read_result(self, run_dir: RunDir) -> dict[str, Any] | None:
        """Return the contents of result.json if the run is complete, else None."""
        result = run_dir.read_json(RESULT_FILE)
        if result is None or result["steps"] != self.spec.num_steps:
            return None
        path = run_dir.path / RESULT_FILE
        with as_input_error(f"{path} is damaged", f"rm {path}: it is written anew", (ValueError,)):
            TrainResult.from_json(result)
        return result

    # -- on all ranks ------------------------------------------------------------------------------

    def _start(self, stored: _StoredRun) -> Session:
        """Restore the state and start the records. A collective."""
        spec = self.spec.with_order(stored.shuffle)
        comm = self.comm
        attempt = replace(self.attempt, spec=spec)
        snapshot = stored.snapshot
        if snapshot is None:  # a build that draws unseeded random numbers differs between ranks
            comm.broadcast_model(spec.job.model)
        built_settings = read_optimizer_settings(spec.job.optimizer)
        state = self._make_state()
        if snapshot is not None:
            state.restore(snapshot)
        saver = self._make_saver(state)
        loggers = attempt.open_loggers(self.run_dir)
        header = LedgerHeader(
            stored.attempt,
            comm.world.rank,
            comm.world.world_size,
            state.step,
            snapshot.manifest["ledger"] if snapshot is not None else "",
            spec.settings.is_round_robin,
        )
        recorder = self._make_recorder(attempt, state, header, loggers)
        has_snapshot = snapshot is not None
        lines = describe_start(spec, comm.world, state.step, has_snapshot, stored.attempt)
        if stored.is_edited and state.step:
            state.pop_expected_values()
            lines += describe_edits(spec.recipe.job_file, spec.job, built_settings)
        attempt.report("\n".join(lines))
        return Session(attempt, state, recorder, saver, stored.attempt, self.run_dir)

    def _join(self, number: int) -> Session:
        """Join ranks that train already, which send their state to this rank.

        Args:
            number: The number of this rank in the launch.

        Returns:
            The session of this rank, with the state that the others have sent.
        """
        state = self._make_state()
        run_dir = self.spec.settings.run_dir
        config = read_stored_json(run_dir, CONFIG_FILE)
        attempt = replace(self.attempt, spec=self.spec.with_order(find_shuffle(config, run_dir)))
        attempt_number = read_owner(run_dir).get("attempt") or 0
        self.comm.prepare_to_join(number)
        header = LedgerHeader(attempt_number, number, 0, 0, "")
        recorder = self._make_recorder(attempt, state, header)
        saver = self._make_saver(state)
        state.mark_as_missing()
        session = Session(attempt, state, recorder, saver, attempt_number)
        session.join()
        return session

    def _make_state(self) -> TrainState:
        """Distribute the job over the ranks. A collective."""
        job = self.spec.job
        scaler = make_scaler(self.spec.settings.precision, self.comm.device)
        return TrainState(job, self.layout_class(job, self.comm), scaler)

    def _make_saver(self, state: TrainState) -> SnapshotSaver:
        saver = SnapshotSaver(state, self.comm, self.store)
        self.attempt.exit_stack.callback(saver.close)
        return saver

    def _make_recorder(
        self,
        attempt: RunAttempt,
        state: TrainState,
        header: LedgerHeader,
        loggers: Sequence[Logger] = (),
    ) -> Recorder:
        ledger = Ledger(attempt.spec.settings.run_dir, header)
        recorder = Recorder(attempt.spec, self.comm, state, ledger, loggers)
        attempt.exit_stack.callback(recorder.close)
        return recorder
