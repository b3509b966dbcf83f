"""One attempt of a run: what surrounds the loop. Opens the run directory, resumes, records, saves, ends.

Only rank 0 touches shared files; each rank writes its own ledger. What rank 0 reads, it hands to all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from time import perf_counter
from typing import Any

import torch

from stepladder.core.cores import threads_per_rank
from stepladder.core.errors import InputError
from stepladder.core.exit_codes import STOPPED
from stepladder.core.settings import Settings
from stepladder.data.source import Source, open_source
from stepladder.rank.exit_record import forget_end, note_end
from stepladder.rank.fault_injection import kill_once
from stepladder.rank.progress import ENDING, EVALUATING, PHASE, SAVING, STARTING, WAITING
from stepladder.storage import rundir
from stepladder.storage.ledger import Ledger, attempt_file, join
from stepladder.storage.rundir import CONFIG, RESULT, RunDir, finite
from stepladder.storage.snapshot import Snapshot, Snapshots, weights_sha256
from stepladder.train.comm import Comm
from stepladder.train.determinism import refuse_unequal_machines
from stepladder.train.evaluate import evaluate
from stepladder.train.job import Job
from stepladder.train.metrics.log import StepLog
from stepladder.train.metrics.loggers import Logger, open_loggers, refuse_strangers
from stepladder.train.metrics.progress import Progress
from stepladder.train.metrics.startup import start_text
from stepladder.train.replica_check import refuse_broken_weights, refuse_unequal_data
from stepladder.train.spec import definition, make_plan, number_of_steps, refuse_foreign_parameters

SECONDS_BETWEEN_SNAPSHOTS = 60.0
SECONDS_AFTER_SNAPSHOT = 1.0  # an epoch of milliseconds needs no snapshot of its own


class Run:
    """The state of a run beside the model: its plan, its position, its files.

    about: {"recipe": name, "config": the job file's settings}, part of the run's definition.
    step: optimizer steps done.  finished: the stored result of a run that is complete already.
    by_microbatch: go microbatch by microbatch with keyed randomness, or take a share in one pass.
    loggers: of the user's own, called on rank 0.
    """

    def __init__(
        self, job: Job, settings: Settings, comm: Comm, about: dict[str, Any], loggers: Sequence[Logger] = ()
    ) -> None:
        self.job, self.settings, self.comm, self.about, self.loggers = job, settings, comm, about, loggers
        self.by_microbatch = settings.microbatch is not None or settings.sync == "exact"
        refuse_foreign_parameters(job)
        self.train_source = self._source(job.train_data)
        self.eval_source = None if job.eval_data is None or job.metrics is None else self._source(job.eval_data)
        self.plan = make_plan(job, settings, comm.world.world_size, len(self.train_source))
        self.num_steps = number_of_steps(settings, self.plan)
        self.scaler = torch.amp.GradScaler(comm.device.type) if settings.precision == "fp16" else None
        self.threads = threads_per_rank(settings, comm.world.ranks_per_node)
        self.step = self.resumed_from = 0
        self.words = comm.progress.words
        self.words[PHASE] = STARTING
        self.fail_steps = {step for rank, step in settings.fail_at if rank == comm.world.rank}
        self.stopped = False
        self.finished: dict[str, Any] | None = None
        self.metrics: dict[str, float] = {}
        self.evaluated = -1  # the step they are of
        self.train_loss = float("nan")

    def _source(self, data: Any) -> Source:
        return open_source(data, self.comm.device, self.settings.seed, self.job.num_workers, self.job.collate)

    def definition(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that it continues."""
        return definition(self.settings, self.about, self.plan, self.job, self.comm.device, self.threads)

    # -- opening ------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        self.threads_before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        self.job.model.to(self.comm.device)
        self.run_dir: RunDir | None = None
        self.files: list[StepLog | Ledger] = []
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        if self.settings.sync == "exact":
            refuse_unequal_machines(self.comm)
        # Nothing is written before every rank has its job.
        refuse_unequal_data(self.comm, {"training": self.train_source, "evaluation": self.eval_source})
        attempt, self.finished, snapshot = self.comm.on_first(self._open_directory)
        if self.finished is not None:
            return
        if snapshot is None:
            self.comm.broadcast_model(self.job.model)  # a build that draws unseeded numbers differs by rank
        sums = self._restore(snapshot) if snapshot else (0.0, 0.0)
        told = open_loggers(self.run_dir, self.loggers, self.settings.log_to, self.definition())
        shown = self.settings.progress and self.comm.world.is_first
        progress = Progress(shown, self.num_steps, self.step, self.plan.global_batch)
        self.log = StepLog(self.settings.run_dir, self.comm, progress, self.by_microbatch, told)
        self.log.epoch_loss, self.log.epoch_count = sums
        rank, world_size = self.comm.world.rank, self.comm.world.world_size
        header: dict[str, Any] = {
            "attempt": attempt,
            "rank": rank,
            "world_size": world_size,
            "resumed_from_step": self.step,
        }
        header["chain"] = snapshot.manifest["ledger"] if snapshot else ""
        self.ledger = Ledger(attempt_file(self.settings.run_dir, attempt, rank), header)
        self.files = [self.log, self.ledger]
        for line in start_text(self):
            self.say(line)
        self.began = self.last_snapshot = perf_counter()

    def _open_directory(self) -> tuple[int, dict[str, Any] | None, Snapshot | None]:
        """On rank 0: attempt number, the stored result if the run is complete, the newest good snapshot."""
        refuse_strangers(self.settings.log_to)
        if self.settings.fresh and self.comm.world.restart_count == 0:
            rundir.move_aside(self.settings.run_dir, self.settings.lock_wait)
        self.run_dir = RunDir(self.settings.run_dir, self.settings.lock_wait)
        forget_end()
        self.snapshots = Snapshots(self.settings.run_dir / "snapshots", self.settings.keep, self.run_dir.guard)
        stored = self.run_dir.stored(CONFIG)
        if stored is not None:
            rundir.compare(stored["definition"], self.definition(), self.settings.run_dir)
        result = self.run_dir.stored(RESULT)
        if result is not None and result["steps"] == self.num_steps:
            return 0, result, None
        snapshot = self.snapshots.latest(self.say)
        step = snapshot.step if snapshot else 0
        if step > self.num_steps:
            raise InputError(
                f"run directory {self.settings.run_dir} is at step {step}, past the {self.num_steps} asked for",
                "--fresh to begin again, or more --epochs or --steps",
            )
        self.run_dir.cut_metrics(step, self.plan.steps_per_epoch)
        if stored is None:
            self._store_config(self.run_dir)
        return self.run_dir.attempt, None, snapshot

    def _store_config(self, run_dir: RunDir) -> None:
        derived = {"steps_per_epoch": self.plan.steps_per_epoch, "by_microbatch": self.by_microbatch}
        run_dir.store(
            CONFIG,
            {
                "schema": 1, "definition": self.definition(), "plan": self.plan.as_json(), "derived": derived,
                "config": self.about["config"], "job_file": self.about.get("job_file"),
                "environment": rundir.environment(),
            },
        )  # fmt: skip

    def _restore(self, snapshot: Snapshot) -> tuple[float, float]:
        snapshot.restore_model(self.job.model)
        state = snapshot.state()
        self.job.optimizer.load_state_dict(state["optimizer"])
        if self.job.schedule is not None:
            self.job.schedule.load_state_dict(state["schedule"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.step = self.resumed_from = snapshot.step
        self.metrics, self.train_loss = state["metrics"], state["train_loss"]
        return state["epoch_sums"]

    def say(self, text: str) -> None:
        """A line for the person who started the run."""
        if self.settings.progress and self.comm.world.is_first:
            print(text, file=sys.stderr, flush=True)

    # -- while training -----------------------------------------------------------------------------------

    @property
    def at_end(self) -> bool:
        """Whether an epoch, or the run, ends with the steps done so far."""
        return self.step % self.plan.steps_per_epoch == 0 or self.step == self.num_steps

    def wants_snapshot(self, now: float) -> bool:
        """Whether a snapshot is due after the step under way. By the clock, only rank 0 is asked."""
        done = self.step + 1
        if self.settings.snapshot_every is not None:
            return done % self.settings.snapshot_every == 0
        age = now - self.last_snapshot
        if age < SECONDS_AFTER_SNAPSHOT or not self.comm.world.is_first:
            return False
        return age > SECONDS_BETWEEN_SNAPSHOTS or done % self.plan.steps_per_epoch == 0

    def share_done(self) -> None:
        """This rank has computed its share of the step under way, and will wait for the others."""
        self.words[PHASE] = WAITING
        if self.step + 1 in self.fail_steps:
            kill_once(self.settings.run_dir, self.comm.world.rank, self.step + 1)

    def record(self, loss: torch.Tensor | None, count: float, lr: float, indices: list[Any]) -> None:
        """The step is done: its loss sum (this rank's, or everybody's if by_microbatch) and what it read."""
        epoch = self.plan.epoch_of_step(self.step)
        self.step += 1
        self.log.rows.append((self.step, epoch, loss, count, lr))
        self.ledger.record(self.step, epoch, indices)

    def flush(self, durable: bool = False) -> None:
        """Write what was recorded. A collective."""
        self.log.flush()
        self.ledger.flush(durable)
        if self.run_dir is not None:
            self.run_dir.heartbeat()

    def end_epoch(self) -> None:
        """Mean loss and evaluation, after the epoch's last step (or the run's). A collective."""
        self.flush()
        epoch = self.plan.epoch_of_step(self.step - 1)
        self.train_loss = self.log.mean_loss()
        if self.eval_source is not None:
            self.words[PHASE] = EVALUATING
            assert self.job.metrics is not None
            if not self.by_microbatch:  # each rank's batch norm saw its own share: rank 0's counts
                for buffer in self.job.model.buffers():
                    self.comm.broadcast(buffer)
            self.metrics = evaluate(
                self.job.model, self.eval_source, self.job.metrics, self.comm, self.job.eval_batch
            )
            if self.job.derived is not None:
                self.metrics |= self.job.derived(self.metrics)
            self.evaluated = self.step
        self.log.evaluation(self.step, epoch, {"train_loss": self.train_loss, **self.metrics})
        if self.step % self.plan.steps_per_epoch == 0:
            self.log.next_epoch()

    def snapshot(self) -> None:
        """Save the state after the last recorded step. A collective: all ledgers are durable first."""
        self.words[PHASE] = SAVING
        started = perf_counter()
        self.flush(durable=True)
        refuse_broken_weights(self.job.model, self.step)
        chains = self.comm.gather_bytes(self.ledger.chain.encode())
        if self.run_dir is not None:
            state = {
                "optimizer": self.job.optimizer.state_dict(),
                "schedule": self.job.schedule.state_dict() if self.job.schedule is not None else None,
                "scaler": self.scaler.state_dict() if self.scaler is not None else None,
                "epoch_sums": (self.log.epoch_loss, self.log.epoch_count),
                "metrics": self.metrics,
                "train_loss": self.train_loss,
            }
            about: dict[str, Any] = {
                "ledger": join([chain.decode() for chain in chains]),
                "metrics": self.metrics,
            }
            if self.job.best is not None and self.evaluated == self.step and self.job.best[0] in self.metrics:
                sign = 1 if self.job.best[1] == "max" else -1
                about["score"] = sign * self.metrics[self.job.best[0]]
            self.snapshots.save(self.step, self.job.model, state, about)
        self.last_snapshot = perf_counter()
        self.log.times[4] += self.last_snapshot - started

    # -- ending -------------------------------------------------------------------------------------------

    def finish(self, late: bool) -> dict[str, Any]:
        """The result; stored if the run is complete. A collective. late: stopped for the job's time limit."""
        self.words[PHASE] = ENDING
        seconds = perf_counter() - self.began
        first, last = self.resumed_from, self.step
        trained = sum(hi - lo for lo, hi in map(self.plan.batch, range(first, last)))
        result = {
            "schema": 1,
            "recipe": self.about["recipe"],
            "world_size": self.comm.world.world_size,
            "sync": self.settings.sync,
            "epochs": self.settings.epochs,
            "steps": self.step,
            "train_loss": finite(self.train_loss),
            "metrics": {name: finite(value) for name, value in self.metrics.items()},
            "weights_sha256": weights_sha256(self.job.model),
            "samples_per_second": round(trained / max(seconds, 1e-9), 1),
            "seconds": round(seconds, 3),
            "resumed_from_step": self.resumed_from,
            "run_dir": str(self.settings.run_dir),
            "stopped": self.stopped,
        }
        if self.run_dir is not None:
            self.snapshots.wait()
            if self.stopped:
                note_end(STOPPED, self.step, late)
            else:
                self.run_dir.store(RESULT, result)
        if self.stopped:  # Slurm ends all tasks with the first that leaves with 75: not before all is written
            self.comm.gather_bytes(b".")
        return result

    def __exit__(self, _type: object = None, error: BaseException | None = None, _trace: object = None) -> None:
        if error is not None and not hasattr(error, "step"):
            error.step = self.step  # type: ignore[attr-defined]  # the launcher tells a bug from a fault by it
        torch.set_num_threads(self.threads_before)
        with ExitStack() as at_end:  # each of them, though one before has failed
            if self.run_dir is not None:
                at_end.callback(self.run_dir.close)
                at_end.callback(self._end_snapshots)
            for file in self.files:
                at_end.callback(file.close)

    def _end_snapshots(self) -> None:
        with suppress(Exception):  # raised by `finish` already, or another error is the cause
            self.snapshots.wait()
