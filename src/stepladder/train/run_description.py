"""The lines that a training prints of its run: what is computed, and by which ranks."""

from __future__ import annotations

import os

from torch import nn

from stepladder.core.numbers import format_count
from stepladder.core.settings import Settings
from stepladder.core.world import World
from stepladder.rank.preemption import has_failed
from stepladder.rank.progress import PROGRESS_VARIABLE
from stepladder.train.job import Job
from stepladder.train.run_spec import RunSpec


def describe_start(
    spec: RunSpec, world: World, step: int, has_snapshot: bool, attempt: int = 1
) -> list[str]:
    """Return the lines that the first rank prints at the start of an attempt.

    Args:
        spec: The run.
        world: The ranks that train it.
        step: Steps done by earlier attempts.
        has_snapshot: Whether the attempt begins with a snapshot; one of step 0 was imported.
        attempt: The number of the attempt in the run directory, from 1.
    """
    lines = describe_run(spec, world, step)
    is_started_by_another_launcher = world.world_size > 1 and PROGRESS_VARIABLE not in os.environ
    if is_started_by_another_launcher:
        lines.append(f"  rank and world size from {world.source}")
    start = "new run"
    if step:
        start = f"resumed after step {step}"
    elif has_snapshot:
        start = "new run with the imported weights"
    elif attempt > 1:
        start = "begun again: the earlier start had saved nothing"
    lines.append(f"  run directory {spec.settings.run_dir}, {start}")
    return lines + describe_missed_failures(spec.settings, step)


def describe_run(spec: RunSpec, world: World, step: int = 0) -> list[str]:
    """Return the values of a run after a step, and what depends on the number of ranks."""
    plan = spec.plan
    settings = spec.settings
    processes = format_count(world.world_size, "process")
    threads = f"{format_count(spec.threads, 'thread')} each"
    microbatches = ""
    if spec.by_microbatch:
        microbatches = f" = {plan.num_microbatches} microbatches of {plan.microbatch}"
    lines = [
        f"{spec.recipe.name} on {processes}, {spec.device.type}, {threads}, --sync {settings.sync}",
        f"  {plan.num_samples} samples, global batch {plan.global_batch}{microbatches},"
        f" {plan.steps_per_epoch} steps per epoch, {spec.num_steps} in all",
        _describe_learning_rate(spec.job, settings, step),
    ]
    dependent_parts = _find_rank_dependence(spec.job, spec.by_microbatch)
    if dependent_parts:
        lines.append(
            f"  without microbatches {dependent_parts} depend on the number of processes;"
            f" with --microbatch {plan.microbatch} they do not"
        )
    if not settings.survives_loss and world.world_size > 1:
        lines.append(
            f"  --shard {settings.shard}: if a process is lost, all restart from the last snapshot"
        )
    if settings.replay_every is not None and world.world_size == 1:
        lines.append(
            "  --replay-every on 1 process: it repeats its own work, which detects transient"
            " faults, not a permanent defect"
        )
    if (spec.job.eval_data is None) != (spec.job.metrics is None):
        lines.append("  no evaluation: it needs eval_data and metrics, the job has one of them")
    if world.note:
        lines.append(f"  {world.note}")
    return lines


def _describe_learning_rate(job: Job, settings: Settings, step: int) -> str:
    rates = sorted({group["lr"] for group in job.optimizer.param_groups})
    moment = f"after step {step}" if step else "at the start"
    line = f"  learning rate {', '.join(f'{rate:g}' for rate in rates)} {moment}"
    if settings.batch_per_rank is not None:
        line += f" (batch {settings.batch_per_rank} per process, --lr-scale {settings.lr_scale})"
    if settings.warmup_steps > step:
        line += f", after a linear warm-up of {settings.warmup_steps} steps"
    if job.schedule is not None:
        line += f", then by its schedule, per {job.schedule_per}"
    return line


def describe_missed_failures(settings: Settings, steps_done: int) -> list[str]:
    """Return a line for each failure of --fail-at that cannot happen: its step is done already."""
    return [
        f"  --fail-at {rank}:{step} does nothing: step {step} is done; --fresh begins again"
        for rank, step in settings.fail_at
        if step <= steps_done and not has_failed(settings.run_dir, rank, step)
    ]


def _find_rank_dependence(job: Job, by_microbatch: bool) -> str:
    """Return what gives other results on another number of processes, "" for rounding alone."""
    if by_microbatch:
        return ""
    modules = list(job.model.modules())
    parts = []
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules):
        parts.append("batch norm")
    dropouts = [module for module in modules if isinstance(module, nn.modules.dropout._DropoutNd)]
    if any(dropout.p > 0 for dropout in dropouts):
        parts.append("dropout")
    if not parts:
        return ""
    return " and ".join([*parts, "in-batch losses"])
