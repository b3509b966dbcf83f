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

from stepladder.core.plan import Span, fuse, key, pass_key
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.data.source import Request
from stepladder.rank.preemption import StopSignals
from stepladder.rank.progress import COMPUTING, PASS, PHASE, READING, STEP, UPDATING
from stepladder.storage.rundir import naming_full_disk
from stepladder.train.batchnorm import RunningStatistics, batch_norms
from stepladder.train.comm import Comm, pick_device, process_group
from stepladder.train.determinism import ForwardBuffers, deterministic
from stepladder.train.job import Job
from stepladder.train.metrics.loggers import Logger
from stepladder.train.replica_check import Guard, order_digest
from stepladder.train.session import Run
from stepladder.train.sync import make_sync
from stepladder.train.sync.manual import Agreed

STOP, SNAPSHOT, FLUSH = range(3)  # the words that ranks vote with at each step's end
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """Trains a job. `fit()` resumes from the run directory by itself and returns the result.

    about: {"recipe": name, "config": the job's own settings}; a resumed run must have the same.
    comm: the ranks to train with; by default those that this process finds itself in (torchrun, Slurm,
    the script's own process group, or alone).  loggers: get the curves besides TensorBoard, on rank 0.
    """

    def __init__(
        self, job: Job, settings: Settings, about: dict[str, Any] | None = None, comm: Comm | None = None,
        loggers: Sequence[Logger] = (),
    ) -> None:  # fmt: skip
        self.job, self.settings, self.given_comm, self.loggers = job, settings, comm, loggers
        self.about = about or {"recipe": "job", "config": {}}

    def fit(self) -> dict[str, Any]:
        """Train to the end, or to a stop signal. Returns the keys of `train --json`.

        Raises InputError for bad settings, before anything is written.
        """
        if self.given_comm is not None:
            return self._fit(self.given_comm)
        world = World.detect()
        with process_group(world, pick_device(self.settings.device, world), self.settings.timeout) as comm:
            return self._fit(comm)

    def _fit(self, comm: Comm) -> dict[str, Any]:
        run = Run(self.job, self.settings, comm, self.about, self.loggers)
        with naming_full_disk(self.settings.run_dir), StopSignals() as stop, run:
            if run.finished is not None:
                return run.finished
            self._prepare(run, stop)
            try:
                with deterministic(self.settings.sync == "exact", comm.device):
                    while run.step < run.num_steps and not run.stopped:
                        self.step()
            except Exception as error:
                error.step = run.step + 1  # type: ignore[attr-defined]
                raise
            finally:
                self.sync.close()
                self.batches.close()  # ends the workers of a map-style Dataset
            return run.finish(stop.late)

    def _prepare(self, run: Run, stop: StopSignals) -> None:
        """Everything that a step would otherwise decide anew."""
        self.run, self.stop, self.comm, self.plan = run, stop, run.comm, run.plan
        self.words = run.comm.progress.words  # says where this rank is, should the others wait for it
        self.model, self.optimizer = self.job.model, self.job.optimizer
        if not self.model.training:  # else layers that the user froze with eval() stay so
            self.model.train()
        self.guarded = range(0)
        if self.settings.guard_every is not None:
            own = () if run.by_microbatch else [b for layer in batch_norms(self.model) for b in layer.buffers()]
            self.guard = Guard(self.model, self.optimizer, self.comm, own)
            self.guarded = range(0, run.num_steps + 1, self.settings.guard_every)
            self._check_replicas(run.step)
        self.statistics = RunningStatistics(self.model) if run.by_microbatch and batch_norms(self.model) else None
        # With microbatches, each one's loss and batch statistics are added in the way of its gradient.
        extra = (1 + (self.statistics.size if self.statistics else 0)) if run.by_microbatch else 0
        self.sync = make_sync(self.settings.sync, self.model, self.comm, extra)
        shares = [self.plan.share(step, self.comm.world.rank, self.comm.world.world_size) for step in (0, -1)]
        self.full_spans, self.last_spans = shares if run.by_microbatch else map(fuse, shares)
        self.base_key = key(self.plan.seed, "pass")
        self.generator = torch.default_generator
        if self.comm.device.type == "cuda":
            self.generator = torch.cuda.default_generators[torch.cuda.current_device()]
        self.autocast: AbstractContextManager[Any] = nullcontext()
        if self.settings.precision in PRECISIONS:
            self.autocast = torch.autocast(self.comm.device.type, PRECISIONS[self.settings.precision])
        self.buffers = ForwardBuffers(self.model) if self.settings.sync == "exact" else None
        self.batches = run.train_source.batches(self._requests(run.step))

    def _check_replicas(self, next_step: int) -> None:
        self.guard.check(self.run.step, order_digest(self.plan, self.plan.epoch_of_step(next_step)))

    def _spans(self, step: int) -> list[Span]:
        """This rank's passes of one step; an epoch's last batch may be cut differently from the others."""
        return self.last_spans if (step + 1) % self.plan.steps_per_epoch == 0 else self.full_spans

    def _requests(self, first: int) -> Iterator[Request]:
        """What this rank reads, from step `first` to the end of the run."""
        for step in range(first, self.run.num_steps):
            for span in self._spans(step):
                yield self.plan.epoch_of_step(step), self.plan.indices(step, span)

    def step(self) -> None:
        """One optimizer step over one global batch."""
        run, sync, times, spans = self.run, self.sync, self.run.log.times, self._spans(self.run.step)
        sync.begin(spans[0].number if spans else 0, len(spans), self._passes() if run.by_microbatch else 1)
        if self.statistics:
            self.statistics.begin()
        loss_sum, count, read = None, 0.0, []
        words = self.words
        words[STEP] = run.step + 1
        clock = perf_counter()
        for span in spans:
            words[PHASE] = READING
            indices, batch = next(self.batches)
            now = perf_counter()
            times[0] += now - clock
            words[PHASE] = COMPUTING
            words[PASS] += 1
            read.append(indices)
            loss, counted = self._pass(span, batch)
            loss_sum = loss if loss_sum is None else loss_sum + loss
            count += counted
            clock = perf_counter()
            times[1] += clock - now
        run.share_done()
        agreed = sync.finish(count, [self._must_stop(clock), run.wants_snapshot(clock), run.log.is_due(clock)])
        now = perf_counter()
        times[2] += now - clock
        words[PHASE] = UPDATING
        lr = self._update(agreed)
        times[3] += perf_counter() - now
        run.record(loss_sum if agreed.extra is None else agreed.extra[0].clone(), agreed.counted, lr, read)
        if True in agreed.wishes or run.log.full or run.at_end or run.step in self.guarded:
            self._between_steps(agreed)

    def _must_stop(self, now: float) -> bool:
        """A signal is anybody's; the time limit is the first rank's, whose word all launchers read."""
        return (self.comm.world.is_first and self.stop.is_late(now)) or self.stop.asked

    def _passes(self) -> int:
        return len(self.plan.microbatches(self.run.step))

    def _pass(self, span: Span, batch: Any) -> tuple[torch.Tensor, float]:
        """Forward and backward of one microbatch (or one share): its loss sum, and what it counts."""
        self.generator.manual_seed(pass_key(self.base_key, self.run.step, span.number))
        with self.autocast:
            result = self.job.loss(self.model, batch)
        if self.buffers is not None:  # once: a model that changes none in its first pass changes none
            self.buffers.refuse_changed()
            self.buffers = None
        loss, count = result if isinstance(result, tuple) else (result * len(span), len(span))
        extra = None
        if self.run.by_microbatch:
            extra = loss.detach().reshape(1).float()
            if self.statistics:
                extra = torch.cat([extra, self.statistics.capture() * len(span)])
        scaled = loss if self.run.scaler is None else self.run.scaler.scale(loss)
        self.sync.backward(scaled, float(count), extra)
        return loss.detach(), float(count)

    def _update(self, agreed: Agreed) -> float:
        """The optimizer step on the gradient that all ranks now share. Returns its learning rate."""
        run, groups = self.run, self.optimizer.param_groups
        if self.statistics and agreed.extra is not None:
            lo, hi = self.plan.batch(run.step)
            self.statistics.finish(agreed.extra[1:] / (hi - lo))
        if run.scaler is not None:
            run.scaler.unscale_(self.optimizer)
        if self.job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.clip_norm)
        warming = run.step < self.settings.warmup_steps
        if warming:
            rates = [group["lr"] for group in groups]
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate * (run.step + 1) / self.settings.warmup_steps
        lr = groups[0]["lr"]
        stepped = self._optimizer_step()
        if warming:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
        for param in self.sync.params:
            param.grad = None
        if self.job.schedule is not None:
            per_step = self.job.schedule_per == "step"
            if stepped if per_step else (run.step + 1) % self.plan.steps_per_epoch == 0:
                self.job.schedule.step()
        return lr

    def _optimizer_step(self) -> bool:
        """False where fp16's scaler found the gradient too large for its scale, and skipped the step.

        It decides on the reduced gradient, so all ranks decide alike.
        """
        scaler = self.run.scaler
        if scaler is None:
            self.optimizer.step()
            return True
        scale = scaler.get_scale()
        scaler.step(self.optimizer)
        scaler.update()
        return scaler.get_scale() >= scale

    def _between_steps(self, agreed: Agreed) -> None:
        """What ranks agreed to do before the next step: write, evaluate, save, stop."""
        run = self.run
        if run.step in self.guarded:  # before a snapshot could keep what differs
            self._check_replicas(run.step - 1)
        done = run.step == run.num_steps
        if run.at_end:
            run.end_epoch()
        elif run.log.full or agreed.wishes[FLUSH]:
            run.flush()
        run.stopped = agreed.wishes[STOP] and not done
        if agreed.wishes[SNAPSHOT] or run.stopped or done:
            run.snapshot()
