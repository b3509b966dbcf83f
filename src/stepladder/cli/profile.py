"""`stepladder profile JOB|SCRIPT.py`: where the time of a step goes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stepladder.cli.options import JobOrScript, json_flag, print_tables, traceback_flag, train_flags
from stepladder.cli.types import COUNT, JOB, PATH
from stepladder.core.console import echo
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.world import World
from stepladder.rank.lifecycle import run_and_exit

if TYPE_CHECKING:
    from stepladder.tools.profiler.profile import ProfileResult

PROFILE_TABLE_WIDTH = 150


@click.command(cls=JobOrScript)
@click.argument("job", metavar="RECIPE|FILE.py|SCRIPT.py", type=JOB)
@click.argument(
    "args",
    nargs=-1,
    type=click.UNPROCESSED,
    metavar="[SCRIPT'S ARGS]",
)
@click.option(
    "--nproc",
    type=COUNT,
    default=1,
    show_default=True,
    help="Processes.",
)
@click.option(
    "--steps", type=COUNT, default=3, show_default=True, help="Optimizer steps to record."
)
@click.option(
    "--warmup",
    type=COUNT,
    default=5,
    show_default=True,
    help="Steps to run before the measurement begins.",
)
@click.option(
    "--out",
    type=PATH,
    metavar="DIR",
    help="[default: profiles/NAME]",
)
@train_flags(
    "global-batch",
    "microbatch",
    "device",
    "precision",
    "compile",
    "capture",
)
@train_flags("data-dir", "sync", "shard", "threads")
@traceback_flag
@json_flag
def command(
    args: tuple[str, ...], nproc: int, steps: int, warmup: int, out: Path | None, **flags: Any
) -> int:
    """Record optimizer steps on all ranks with torch.profiler, and print where their time goes.

    It also prints what is worth doing. A script is run unmodified, and ended when the steps are
    recorded; flags that are not listed here, and all after `--`, are the script's. DIR gets a trace
    per rank, and one of all ranks on one time axis.
    """
    script = command.script(args)
    as_json = flags["as_json"]
    config, job_settings = command.sort_flags(flags)
    settings = Settings(run_dir=Path("runs"), **job_settings)
    from stepladder.tools.profiler.profile import record_profile
    from stepladder.tools.profiler.workloads import profile_job, profile_script

    name = command.job.stem
    out = out or Path("profiles") / name
    world = World.detect()
    if script:
        run = partial(
            profile_script,
            script,
            settings.threads,
            warmup,
            steps,
            nproc,
        )
    else:
        request = TrainRequest(command.job, config, settings)
        run = partial(profile_job, request, warmup, steps, nproc)
    if world.world_size > 1:
        run_and_exit(lambda: show_profile(record_profile(name, run, out, world), as_json))
    return show_profile(record_profile(name, run, out, world), as_json)


def show_profile(result: ProfileResult | int, as_json: bool) -> int:
    """Print a profile, and return the exit code.

    Args:
        result: The profile, or the exit code of ranks that failed or are not the first.
        as_json: Print one JSON object.
    """
    if isinstance(result, int):
        return result
    if as_json:
        echo(json.dumps(result.as_json()))
        return 0
    from stepladder.tools.profiler.tables import make_tables

    print_tables(make_tables(result), PROFILE_TABLE_WIDTH)
    for line in result.describe():
        echo(line)
    return 0
