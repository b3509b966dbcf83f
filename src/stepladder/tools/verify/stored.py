"""What a run directory says of the job that was trained there. No torch."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from stepladder.core.settings import Settings
from stepladder.storage.run_config import config_of
from stepladder.train.job_file import find_job


def stored_job(run_dir: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The job file, its Config and the settings of a run directory. Raises InputError where they are not there."""
    with config_of(run_dir) as config:
        definition, given, job_file = config["definition"], config["config"], config.get("job_file")
    path = Path(job_file) if job_file and Path(job_file).is_file() else find_job(definition["recipe"])
    own = {field.name for field in fields(Settings)}
    return path, given, {name: value for name, value in definition.items() if name in own}
