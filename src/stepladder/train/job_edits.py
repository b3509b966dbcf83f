"""What is printed if a run is resumed with a job file that has changed since the run began."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stepladder.core.typed_file import hash_file
from stepladder.train.job import Job

# A schedule changes these settings, so the snapshot's values differ from those of the job file.
SCHEDULED_SETTINGS = {
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
    """Return whether config.json has another SHA-256 than the job file has now."""
    environment = config.get("environment") if config is not None else None
    stored = environment.get("job_sha256") if isinstance(environment, dict) else None
    return stored is not None and stored != hash_file(job_file)


def read_optimizer_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each group of parameters, without the parameters."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def describe_edits(job_file: str | None, job: Job, built: list[dict[str, Any]]) -> list[str]:
    """Return the lines for a resume whose job file was edited.

    Args:
        job_file: The path of the edited file.
        job: Its optimizer has the settings of the snapshot.
        built: The settings that the job file gives the optimizer, by group.
    """
    name = Path(job_file or "the job file").name
    lines = [
        f"  {name} has changed since this run was started: its steps from here on are by the file"
        " as it is now"
    ]
    restored = read_optimizer_settings(job.optimizer)
    for number, (in_file, in_snapshot) in enumerate(zip(built, restored, strict=False)):
        group = f" (group {number})" if len(built) > 1 else ""
        for setting, value in in_file.items():
            is_scheduled = setting in SCHEDULED_SETTINGS and bool(job.schedules)
            if is_scheduled or setting not in in_snapshot or _is_same(value, in_snapshot[setting]):
                continue
            lines.append(
                f"  {setting} of the optimizer{group} is {_as_text(value)} in {name},"
                f" {_as_text(in_snapshot[setting])} in the snapshot: the snapshot's is used."
                " HINT: --fresh to begin again"
            )
    return lines


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two settings are equal, where tensors and lists may stand for tuples."""
    return _as_text(first) == _as_text(second)


def _as_text(value: Any) -> str:
    """Return a setting as a person would type it."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return _as_text(value.item())
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_as_text, value))})"
    if isinstance(value, float):
        return f"{value:g}"
    return repr(value)
