"""What a run is: its plan, its length, its data, and what a resumed one must have in common with
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import nn

from stepladder.core.cores import threads_per_rank
from stepladder.core.errors import InputError
from stepladder.core.order import key, largest_divisor
from stepladder.core.plan import Plan, default_microbatch
from stepladder.core.settings import FREE_ON_RESUME, Settings
from stepladder.core.world import World
from stepladder.data.shards.dataset import Shards
from stepladder.data.source import Source, open_source
from stepladder.rank.preemption import has_failed
from stepladder.rank.progress import PROGRESS
from stepladder.train.checkpoint_blocks import validate_checkpointable
from stepladder.train.comm import Comm
from stepladder.train.compile_loss import prepare_compiler
from stepladder.train.cuda_graphs import validate_capturable
from stepladder.train.determinism import describe_machine, find_batch_norms
from stepladder.train.job import Job, Recipe
from stepladder.train.job_validation import (
    validate_adafactor,
    validate_parameters,
    validate_parts,
)
from stepladder.train.optimizer_shards import validate_shard
from stepladder.train.replica_check import validate_equal_settings


class Sizes(NamedTuple):
    """What both the settings and a job's Config may say; the run has one of each."""

    epochs: int
    global_batch: int
    seed: int


def resolve_sizes(settings: Settings, recipe: Recipe) -> Sizes:
    """The Config's, else the settings', else the defaults. Raises InputError where the two differ."""
    found = {}
    for name, default in (("epochs", 1), ("global_batch", 64), ("seed", 0)):
        asked, configured = getattr(settings, name), recipe.config.get(name)
        if None not in (asked, configured) and asked != configured:
            raise InputError(
                f"{name} is {configured} in the job's Config and {asked} in the settings",
                f"leave {name} to the Config",
            )
        found[name] = value = next(
            value for value in (configured, asked, default) if value is not None
        )
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise InputError(
                f"{name} in the job's Config is {value!r:.60}, not a whole number", f"{name}: int"
            )
    sizes = Sizes(**found)
    replace(settings, **sizes._asdict())  # which refuses what is out of range
    return sizes


@dataclass(frozen=True)
class RunSpec:
    """One run, whoever computes it. The plan is the one owner of the global batch.

    num_steps: optimizer steps of the whole run.  threads: intra-op, per process.  device: of this
    rank."""

    job: Job
    settings: Settings
    recipe: Recipe
    plan: Plan
    epochs: int
    num_steps: int
    threads: int
    device: torch.device
    train_source: Source
    eval_source: Source | None

    @staticmethod
    def make(job: Job, settings: Settings, recipe: Recipe, comm: Comm) -> RunSpec:
        """Raises InputError where the job, the settings and this many processes do not go together,
        or ranks have others. A collective."""
        validate_equal_settings(comm, settings, recipe)
        validate_parts(job)
        validate_parameters(job)
        validate_adafactor(job)
        validate_shard(job, settings.shard)
        if settings.checkpoint_blocks:
            validate_checkpointable(job)
        if settings.compile:
            prepare_compiler()
        epochs, _, seed = sizes = resolve_sizes(settings, recipe)

        def opened(data: Any) -> Source:
            return open_source(data, comm.device, seed, job.num_workers, job.collate)

        train_source = opened(job.train_data)
        if settings.capture:
            validate_capturable(train_source, comm.device)
        plan = make_plan(job, settings, sizes, comm.world.world_size, len(train_source))
        num_steps = count_steps(epochs, settings.steps, plan)
        validate_fail_at(settings.fail_at, num_steps)
        threads = threads_per_rank(settings, comm.world.ranks_per_node)
        eval_source = (
            None if job.eval_data is None or job.metrics is None else opened(job.eval_data)
        )
        return RunSpec(
            job,
            settings,
            recipe,
            plan,
            epochs,
            num_steps,
            threads,
            comm.device,
            train_source,
            eval_source,
        )

    def with_order(self, shuffle: str) -> RunSpec:
        """This run with the order that it has begun with; "" where it begins now."""
        return replace(self, plan=replace(self.plan, shuffle=shuffle or self.plan.shuffle))

    @property
    def by_microbatch(self) -> bool:
        """Whether each microbatch is a pass of its own, with keyed randomness; else a rank's share
        is one pass.
        """
        return self.settings.microbatch is not None or self.settings.sync == "exact"

    @cached_property
    def definition(self) -> dict[str, Any]:
        """Everything that decides what is computed; who computes it, and where files lie, is left
        out.
        """
        asked = {
            name: value
            for name, value in asdict(self.settings).items()
            if name not in FREE_ON_RESUME
        }
        asked |= {"epochs": self.epochs, "seed": self.plan.seed}
        asked |= self.recipe.definition
        asked |= {"recipe": self.recipe.name, "num_samples": self.plan.num_samples}
        asked["global_batch"] = self.plan.global_batch
        if self.plan.chunks is not None:  # they decide the order
            asked["chunks"] = (
                f"{len(self.plan.chunks.shards)} shards, {key(repr(self.plan.chunks)):x}"
            )
        if self.job.schedule is None:  # nothing but the end depends on the number of epochs
            asked.pop("epochs", None)
        if (
            self.settings.sync == "exact"
        ):  # another number of threads, or another processor, adds in another order
            asked |= {
                "threads": self.threads,
                "machine": describe_machine(self.device, self.settings.compile),
            }
        for name in ("compile", "capture"):  # runs from before these could be asked for go on
            if not asked[name]:
                del asked[name]
        return asked

    def as_json(self) -> dict[str, Any]:
        """What config.json keeps of it."""
        return {
            "definition": self.definition,
            "plan": self.plan.as_json(),
            "derived": {
                "steps_per_epoch": self.plan.steps_per_epoch,
                "by_microbatch": self.by_microbatch,
            },
            "config": self.recipe.masked_config,
            "job_file": self.recipe.job_file,
        }


def make_plan(
    job: Job, settings: Settings, sizes: Sizes, world_size: int, num_samples: int
) -> Plan:
    """The run's plan. Raises InputError where this many processes cannot share a step."""
    min_microbatch = 2 if find_batch_norms(job.model) else 1
    batch, microbatch = sizes.global_batch, settings.microbatch
    if settings.batch_per_rank is not None:
        batch = settings.batch_per_rank * world_size
        microbatch = microbatch or settings.batch_per_rank
    elif microbatch is None:
        microbatch = default_microbatch(batch)
        if microbatch < min_microbatch:
            microbatch = batch // largest_divisor(batch, batch // min_microbatch)
    chunks = job.train_data.chunks if isinstance(job.train_data, Shards) else None
    plan = Plan(num_samples, batch, microbatch, sizes.seed, min_microbatch, chunks)
    most = max(world_size, settings.most_ranks)
    if most > plan.num_microbatches:
        raise InputError(
            f"{most} processes for {plan.num_microbatches} microbatches (--global-batch {plan.global_batch},"
            f" --microbatch {plan.microbatch}): some would never have work",
            f"--nproc {plan.num_microbatches}, or a smaller --microbatch",
        )
    return plan


def validate_step(spec: RunSpec, step: int) -> None:
    """Raises InputError where the run directory has a step that the run does not."""
    if step > spec.num_steps:
        raise InputError(
            f"run directory {spec.settings.run_dir} is at step {step}, past the {spec.num_steps} asked for",
            "--fresh to begin again, or more --epochs or --steps",
        )


def count_steps(epochs: int, steps: int | None, plan: Plan) -> int:
    """Optimizer steps of the whole run. steps: a limit below that of the epochs, or None."""
    whole = epochs * plan.steps_per_epoch
    if steps is None:
        return whole
    if steps > whole:
        raise InputError(
            f"--steps {steps} is more than --epochs {epochs} holds ({whole})",
            f"--epochs {-(-steps // plan.steps_per_epoch)}",
        )
    return steps


def validate_fail_at(places: Iterable[tuple[int, int]], num_steps: int) -> None:
    """Raises InputError where `fail_at` names a step that the run has not: nobody would see a
    recovery.
    """
    for rank, step in places:
        if step > num_steps:
            raise InputError(
                f"--fail-at {rank}:{step}: the run's last step is {num_steps}",
                f"--fail-at {rank}:{num_steps}",
            )


def describe_start(spec: RunSpec, world: World, step: int) -> list[str]:
    """What rank 0 prints first. step: steps done by earlier attempts."""
    start = f"resumed after step {step}" if step else "new run"
    where = f"  run directory {spec.settings.run_dir}, {start}"
    foreign = (
        world.world_size > 1 and PROGRESS not in os.environ
    )  # another launcher's ranks, not ours
    source = [f"  rank and world size from {world.source}"] if foreign else []
    return [
        *describe_run(spec, world),
        *source,
        where,
        *describe_missed_failures(spec.settings, step),
    ]


def describe_run(spec: RunSpec, world: World) -> list[str]:
    """The effective values of a run, and what depends on the number of ranks."""
    job, plan, settings = spec.job, spec.plan, spec.settings
    processes = "1 process" if world.world_size == 1 else f"{world.world_size} processes"
    threads = f"{spec.threads} thread{'s' if spec.threads > 1 else ''} each"
    lines = [
        f"{spec.recipe.name} on {processes}, {spec.device.type}, {threads}, --sync {settings.sync}",
        f"  {plan.num_samples} samples, global batch {plan.global_batch} = {plan.num_microbatches} x"
        f" {plan.microbatch}, {plan.steps_per_epoch} steps per epoch, {spec.num_steps} in all",
    ]
    rates = sorted({group["lr"] for group in job.optimizer.param_groups})
    rate = f"  learning rate {', '.join(f'{r:g}' for r in rates)} at the start"
    if settings.batch_per_rank is not None:
        rate += f" (batch {settings.batch_per_rank} per process, --lr-scale {settings.lr_scale})"
    if settings.warmup_steps:
        rate += f", after a linear warm-up of {settings.warmup_steps} steps"
    if job.schedule is not None:
        rate += f", then by its schedule, per {job.schedule_per}"
    lines.append(rate)
    if depends := find_rank_dependence(job, spec.by_microbatch):
        lines.append(
            f"  one pass per process: {depends} depend on the number of processes;"
            f" with --microbatch {plan.microbatch} they do not"
        )
    if settings.shard != "none" and settings.shard_copies == 1 and world.world_size > 1:
        lines.append(
            f"  --shard {settings.shard}: if a process is lost, all restart from the last snapshot"
        )
    if settings.replay_every is not None and world.world_size == 1:
        lines.append(
            "  --replay-every on 1 process: it repeats its own work, which finds no fault that lasts"
        )
    if (job.eval_data is None) != (job.metrics is None):
        lines.append("  no evaluation: that takes eval_data and metrics, the job has one of them")
    if world.note:
        lines.append(f"  {world.note}")
    return lines


def describe_missed_failures(settings: Settings, done: int) -> list[str]:
    """What to say of failures that were asked for, and cannot come any more: their steps are among
    those done.
    """
    missed = [(rank, step) for rank, step in settings.fail_at if step <= done]
    return [
        f"  --fail-at {rank}:{step} does nothing: step {step} is done; --fresh begins again"
        for rank, step in missed
        if not has_failed(settings.run_dir, rank, step)
    ]


def find_rank_dependence(job: Job, by_microbatch: bool) -> str:
    """What is different on another number of processes, or "" where it is nothing but rounding."""
    if by_microbatch:
        return ""
    modules = list(job.model.modules())
    found = []
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules):
        found.append("batch norm")
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in modules):
        found.append("dropout")
    return " and ".join([*found, "in-batch losses"]) if found else ""
