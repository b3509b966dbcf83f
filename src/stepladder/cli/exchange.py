"""stepladder export, stepladder import: weights to other programs, and from them."""

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
    "--to", type=click.Choice(["safetensors", "dcp"]), required=True, help="The layout to write."
)
@click.argument("target", metavar="DIR", type=PATH)
def export(run_dir: Path, to: str, target: Path) -> None:
    """Write the weights of the run of RUN_DIR into DIR, a new folder.

    Takes the newest good snapshot; RUN_DIR may also be a snapshot. With safetensors the layout is
    Hugging Face's: model.safetensors, or several files with model.safetensors.index.json. With dcp
    it is that of torch.distributed.checkpoint."""
    from stepladder.tools import export as exports

    echo(exports.export(run_dir, to, target))


class ImportCommand(JobCommand):
    """`import`, with the flags of the job, which its second argument names."""

    before = 1


@click.command("import", cls=ImportCommand)
@click.argument("folder", metavar="DIR", type=PATH)
@click.argument("job", type=JOB)
@click.option(
    "--run-dir", type=PATH, required=True, help="Run directory to make. It must not be there yet."
)
@train_flags("seed", "data-dir")
def import_weights(folder: Path, job: str, run_dir: Path, **flags: Any) -> None:
    """Make a run directory whose run begins with the weights in DIR.

    DIR is in one of the layouts that export writes. JOB is the recipe or job file whose model they
    are of. "stepladder train JOB --run-dir RUN_DIR" then trains on from them, as a new run with an
    optimizer of its own."""
    from stepladder.tools import foreign

    config, own = import_weights.sort(flags)
    settings = Settings(**{**own, "run_dir": run_dir})
    echo(foreign.import_weights(folder, TrainRequest(import_weights.job, config, settings, False)))
