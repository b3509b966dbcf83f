"""`stepladder profile JOB|SCRIPT.py`: where the time of a step goes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepladder.cli.flags import make_command, make_field_options
from stepladder.cli.options import TRACEBACK_FLAG, JobOrScript, TrainFlags, print_tables
from stepladder.cli.types import AsJson, Count, JobPath, ScriptArgs
from stepladder.core.console import echo, echo_json
from stepladder.core.settings import Settings, TrainRequest
from stepladder.core.terminal import get_table_width
from stepladder.core.world import World
from stepladder.rank.lifecycle import run_and_exit

if TYPE_CHECKING:
    from stepladder.tools.profiler.profile import ProfileResult


@make_command(
    JobOrScript,
    *make_field_options(
        TrainFlags,
        "global_batch",
        "microbatch",
        "device",
        "precision",
        "compile",
        "capture",
        "data_dir",
        "sync",
        "shard",
        "threads",
    ),
    TRACEBACK_FLAG,
)
def command(
    job: JobPath,
    args: ScriptArgs = (),
    *,
    nproc: Count = 1,
    steps: Count = 30,
    warmup: Count = 5,
    out: Path | None = None,
    as_json: AsJson = False,
    **flags: Any,
) -> int:
    """Record optimizer steps on all ranks with torch.profiler, and print where their time goes.

    It also prints what is worth doing. A script is run unmodified, and ended when the steps are
    recorded; flags that are not listed here, and all after `--`, are the script's. DIR gets a trace
    per rank, and one of all ranks on one time axis.

    Args:
        job (RECIPE|FILE.py|SCRIPT.py): Name of a recipe, a job file, or a script.
        nproc: Processes.
        steps: Optimizer steps to record; the times are those of the typical half of them.
        warmup: Steps to run before the measurement begins.
        out (DIR): [default: profiles/NAME]
    """
    script = command.script(args)
    config, job_settings = command.sort_flags(flags)
    settings = Settings(run_dir=Path("runs"), **job_settings)
    from stepladder.tools.profiler.profile import record_profile
    from stepladder.tools.profiler.workloads import profile_job, profile_script

    name = command.job.stem
    out = out or Path("profiles") / name
    world = World.detect()
    if script:
        run = partial(profile_script, script, settings.threads, warmup, steps, nproc)
    else:
        request = TrainRequest(command.job, config, settings)
        run = partial(profile_job, request, warmup, steps, nproc)
    if world.world_size > 1:
        run_and_exit(lambda: _show_profile(record_profile(name, run, out, world), as_json))
    return _show_profile(record_profile(name, run, out, world), as_json)


def _show_profile(result: ProfileResult | int, as_json: bool) -> int:
    """Print a profile, and return the exit code.

    Args:
        result: The profile, or the exit code of ranks that failed or are not the first.
        as_json: Print one JSON object.
    """
    if isinstance(result, int):
        return result
    if as_json:
        echo_json(result.as_json())
        return 0
    from stepladder.tools.profiler.tables import make_tables

    width = get_table_width()
    print_tables(make_tables(result, width), width)
    for line in result.describe():
        echo(line)
    return 0
