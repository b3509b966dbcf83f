"""What is printed before the first step: the effective values, and what depends on the number of ranks."""

from __future__ import annotations

from torch import nn

from stepladder.core.world import World
from stepladder.train.job import Job
from stepladder.train.spec import RunSpec


def start_text(job: Job, spec: RunSpec, world: World, step: int) -> list[str]:
    """The lines, for rank 0 to print. step: steps done by earlier attempts."""
    plan, settings = spec.plan, spec.settings
    processes = "1 process" if world.world_size == 1 else f"{world.world_size} processes"
    threads = f"{spec.threads} thread{'s' if spec.threads > 1 else ''} each"
    lines = [
        f"{spec.recipe.name} on {processes}, {spec.device.type}, {threads}, --sync {settings.sync}",
        f"  {plan.num_samples} samples, global batch {plan.global_batch} = {plan.num_microbatches} x"
        f" {plan.microbatch}, {plan.steps_per_epoch} steps per epoch, {spec.num_steps} in all",
    ]
    if world.world_size > 1:
        lines.append(f"  rank and size by {world.source}")
    rates = sorted({group["lr"] for group in job.optimizer.param_groups})
    rate = f"  learning rate {', '.join(f'{r:g}' for r in rates)} at the start"
    if settings.batch_per_rank is not None:
        rate += f" (batch {settings.batch_per_rank} per process, --lr-scale {settings.lr_scale})"
    if settings.warmup_steps:
        rate += f", after a linear warm-up of {settings.warmup_steps} steps"
    if job.schedule is not None:
        rate += f", then by its schedule, per {job.schedule_per}"
    lines.append(rate)
    if depends := depends_on_ranks(job, spec.by_microbatch):
        lines.append(
            f"  one pass per process: {depends} depend on the number of processes;"
            f" with --microbatch {plan.microbatch} they do not"
        )
    if (job.eval_data is None) != (job.metrics is None):
        lines.append("  no evaluation: that takes eval_data and metrics, the job has one of them")
    if world.note:
        lines.append(f"  {world.note}")
    start = f"resumed after step {step}" if step else "new run"
    lines.append(f"  run directory {settings.run_dir}, {start}")
    return lines


def depends_on_ranks(job: Job, by_microbatch: bool) -> str:
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
