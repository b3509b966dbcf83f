"""What is printed before the first step: the effective values, and what depends on the number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from stepladder.train.session import Run


def start_text(run: Run) -> list[str]:
    """The lines, for rank 0 to print."""
    world, plan, settings = run.comm.world, run.plan, run.settings
    processes = "1 process" if world.world_size == 1 else f"{world.world_size} processes"
    threads = f"{run.threads} thread{'s' if run.threads > 1 else ''} each"
    lines = [
        f"{run.about['recipe']} on {processes}, {run.comm.device.type}, {threads}, --sync {settings.sync}",
        f"  {plan.num_samples} samples, global batch {plan.global_batch} = {plan.num_microbatches} x"
        f" {plan.microbatch}, {plan.steps_per_epoch} steps per epoch, {run.num_steps} in all",
    ]
    if world.world_size > 1:
        lines.append(f"  rank and size by {world.source}")
    rates = sorted({group["lr"] for group in run.job.optimizer.param_groups})
    rate = f"  learning rate {', '.join(f'{r:g}' for r in rates)} at the start"
    if settings.batch_per_rank is not None:
        rate += f" (batch {settings.batch_per_rank} per process, --lr-scale {settings.lr_scale})"
    if settings.warmup_steps:
        rate += f", after a linear warm-up of {settings.warmup_steps} steps"
    if run.job.schedule is not None:
        rate += f", then by its schedule, per {run.job.schedule_per}"
    lines.append(rate)
    if depends := depends_on_ranks(run):
        lines.append(
            f"  one pass per process: {depends} depend on the number of processes;"
            f" with --microbatch {plan.microbatch} they do not"
        )
    if (run.job.eval_data is None) != (run.job.metrics is None):
        lines.append("  no evaluation: that takes eval_data and metrics, the job has one of them")
    if world.note:
        lines.append(f"  {world.note}")
    start = f"resumed after step {run.step}" if run.step else "new run"
    lines.append(f"  run directory {settings.run_dir}, {start}")
    return lines


def depends_on_ranks(run: Run) -> str:
    """What is different on another number of processes, or "" where it is nothing but rounding."""
    if run.by_microbatch:
        return ""
    modules = list(run.job.model.modules())
    found = []
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in modules):
        found.append("batch norm")
    if any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in modules):
        found.append("dropout")
    return " and ".join([*found, "in-batch losses"]) if found else ""
