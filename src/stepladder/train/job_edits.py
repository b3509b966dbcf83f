"""What is said where a run is resumed with another job file than it was started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stepladder.core.stored import sha256_of
from stepladder.train.job import Job

# A schedule changes these, so the snapshot's values are not the job file's.
SCHEDULED = {
    "lr",
    "initial_lr",
    "momentum",
    "betas",
    "max_lr",
    "min_lr",
    "max_momentum",
    "base_momentum",
}


def is_edited(config: dict[str, Any] | None, job_file: str | None) -> bool:
    """Return whether config.json names another SHA-256 than the job file has now."""
    about = config.get("environment") if config is not None else None
    stored = about.get("job_sha256") if isinstance(about, dict) else None
    return stored is not None and stored != sha256_of(job_file)


def read_optimizer_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what each group of parameters is set to, without the parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def describe_edits(job_file: str | None, job: Job, built: list[dict[str, Any]]) -> list[str]:
    """Return the lines for a resume whose job file was edited.

    Args:
        job_file: that was edited.
        job: its optimizer has its settings from the snapshot.
        built: what the job file has set them to.
    """
    name = Path(job_file or "the job file").name
    lines = [
        f"  {name} has changed since this run was started: its steps from here on are by the file as it is now"
    ]
    for number, (before, now) in enumerate(
        zip(built, read_optimizer_settings(job.optimizer), strict=False)
    ):
        group = f" (group {number})" if len(built) > 1 else ""
        for setting, value in before.items():
            if (
                (setting in SCHEDULED and job.schedules)
                or setting not in now
                or is_same(value, now[setting])
            ):
                continue
            lines.append(
                f"  {setting} of the optimizer{group} is {text(value)} in {name}, {text(now[setting])} in the"
                " snapshot: the snapshot's is used. HINT: --fresh to begin again"
            )
    return lines


def is_same(one: Any, other: Any) -> bool:
    """Return whether two settings are equal, tensors or lists in place of tuples included."""
    return text(one) == text(other)


def text(value: Any) -> str:
    """Return a setting as a person would type it."""
    if isinstance(value, torch.Tensor):
        return (
            text(value.item()) if value.numel() == 1 else f"a tensor of shape {list(value.shape)}"
        )
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(text, value))})"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value)
