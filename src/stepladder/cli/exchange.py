"""`stepladder export` and `stepladder import`: weights to and from other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from stepladder.cli.flags import make_command, make_field_options
from stepladder.cli.options import JobCommand, TrainFlags
from stepladder.cli.types import JobPath
from stepladder.core.console import echo
from stepladder.core.settings import Settings, TrainRequest


@make_command()
def export(run_dir: Path, target: Path, *, to: Literal["safetensors", "dcp"]) -> None:
    """Write the weights of the run of RUN_DIR into DIR, a new folder.

    The weights are those of the newest good snapshot; RUN_DIR may also be a snapshot. safetensors
    is Hugging Face's format: model.safetensors, or several files with model.safetensors.index.json.
    dcp is the format of torch.distributed.checkpoint.

    Args:
        target (DIR): Folder of the weights.
        to: Format to write.
    """
    from stepladder.tools import weight_export

    echo(weight_export.export(run_dir, to, target))


class _ImportCommand(JobCommand):
    """`import`, with the flags of the job that its second argument names."""

    arguments_before_job = 1


@make_command(_ImportCommand, *make_field_options(TrainFlags, "seed", "data_dir"), name="import")
def import_weights(folder: Path, job: JobPath, *, run_dir: Path, **flags: Any) -> None:
    """Make a run directory whose run starts from the weights in DIR.

    DIR is in one of the formats that export writes. JOB is the recipe or job file with the model of
    these weights. "stepladder train JOB --run-dir RUN_DIR" then starts a new run from them, with a
    new optimizer.

    Args:
        folder (DIR): Folder of the weights.
        run_dir: Run directory to make. It must not exist yet.
    """
    from stepladder.tools import weight_import

    config, job_settings = import_weights.sort_flags(flags)
    settings = Settings(**{**job_settings, "run_dir": run_dir})
    request = TrainRequest(import_weights.job, config, settings, False)
    echo(weight_import.import_weights(folder, request))
