"""`stepladder export` and `stepladder import`: weights to and from other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stepladder.cli.options import JobCommand, train_flags
from stepladder.cli.types import JOB, PATH
from stepladder.core.console import echo
from stepladder.core.settings import Settings, TrainRequest


@click.command()
@click.argument("run_dir", type=PATH)
@click.option(
    "--to", type=click.Choice(["safetensors", "dcp"]), required=True, help="Format to write."
)
@click.argument("target", metavar="DIR", type=PATH)
def export(run_dir: Path, to: str, target: Path) -> None:
    """Write the weights of the run of RUN_DIR into DIR, a new folder.

    The weights are those of the newest good snapshot; RUN_DIR may also be a snapshot. safetensors
    is Hugging Face's format: model.safetensors, or several files with model.safetensors.index.json.
    dcp is the format of torch.distributed.checkpoint.
    """
    from stepladder.tools import weight_export

    echo(weight_export.export(run_dir, to, target))


class ImportCommand(JobCommand):
    """`import`, with the flags of the job that its second argument names."""

    arguments_before_job = 1


@click.command("import", cls=ImportCommand)
@click.argument("folder", metavar="DIR", type=PATH)
@click.argument("job", type=JOB)
@click.option(
    "--run-dir", type=PATH, required=True, help="Run directory to make. It must not exist yet."
)
@train_flags("seed", "data-dir")
def import_weights(folder: Path, job: str, run_dir: Path, **flags: Any) -> None:
    """Make a run directory whose run starts from the weights in DIR.

    DIR is in one of the formats that export writes. JOB is the recipe or job file with the model of
    these weights. "stepladder train JOB --run-dir RUN_DIR" then starts a new run from them, with a
    new optimizer.
    """
    from stepladder.tools import weight_import

    config, job_settings = import_weights.sort_flags(flags)
    settings = Settings(**{**job_settings, "run_dir": run_dir})
    request = TrainRequest(import_weights.job, config, settings, False)
    echo(weight_import.import_weights(folder, request))
